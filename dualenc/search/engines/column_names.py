"""Names of the columns of a table, or of the fields and vectors of a collection."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TableColumnNames:
    """Names of columns, or of fields and vectors of Qdrant; None finds them by their types.

        migrate_table(url, "docs", "new-model", columns=TableColumnNames(text="body"))

    Attributes:
        id: unique ids.
        text: texts.
        vector: vectors of the old model.
    """

    id: str | None = None
    text: str | None = None
    vector: str | None = None
