"""Record a table of PostgreSQL that other software filled, to search and to measure it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dualenc.encoders import load_model
from dualenc.errors import DualencError
from dualenc.io.files import check_writable, locked
from dualenc.io.provenance import Provenance
from dualenc.search.embed.encode import tower_checksum
from dualenc.search.engines.column_names import TableColumnNames
from dualenc.search.engines.postgres_foreign import ForeignTable
from dualenc.search.engines.postgres_names import parse_name
from dualenc.search.engines.postgres_url import without_secrets
from dualenc.search.engines.pushed_folder import check_push_target
from dualenc.types import Metric, StrPath
from dualenc.workflows.session import recorded_name

logger = logging.getLogger("dualenc.workflows")


def record_table(
    target: str,
    table: str,
    out: StrPath,
    *,
    names: TableColumnNames | None = None,
    columns: Sequence[str] = (),
    model: str | None = None,
    metric: Metric | None = None,
) -> Provenance:
    """Write a folder that records where a table's vectors are; the table is only read.

    Searches, `adapt`, evaluations and checks take the folder like one that `push` wrote. Same as
    `dualenc index postgresql://… --table TABLE --out OUT`.

        record_table("postgresql://me@localhost/shop", "docs", "docs-table", model="my-model")
        Searcher.open("docs-table").search("a query")

    Args:
        target: postgresql://user@host/database. The password comes from the URL, PGPASSWORD or
            ~/.pgpass.
        table: table or schema.table.
        out: folder to write.
        names: columns of ids, texts and vectors, where their types leave a choice.
        columns: further columns that results show and can be filtered by.
        model: model of the vectors: a folder, which is compared with them, or a name, which is
            recorded only.
        metric: "cosine" or "ip"; None takes that of the index.

    Returns:
        What was recorded.

    Raises:
        DualencError: there is no such table, its columns leave a choice, or the model has vectors
            of another size.
    """
    check_push_target(out)
    check_writable(Path(out))
    named = {name: value for name, value in vars(names or TableColumnNames()).items() if value}
    about: dict[str, Any] = {**parse_name(table), "target": without_secrets(target), "live": True}
    about |= {"names": named, "columns": dict.fromkeys(columns, "text"), "type": "vector"}
    about |= {"side": "right", "modality": "text", "output": "embedding"}
    if model is not None:
        about["model"] = recorded_name(model)
    with locked(out, wait=False), closing(ForeignTable(Provenance(**about), target)) as opened:
        opened.find(metric)
        if model is not None and Path(model).is_dir():
            opened.record(**_checked(opened, model))
        opened.count_vectors()
        opened.save(out)
        logger.info("%s: %s", opened.location, _described(opened))
        return opened.provenance


def _checked(opened: ForeignTable, model: str) -> dict[str, Any]:
    """Return what is recorded of a model, whose vectors must have the size of the table's."""
    encoder = load_model(model)
    tower = encoder.right
    if tower.dim != opened.dim:
        raise DualencError(
            f"has vectors of dimension {tower.dim}, and {opened.vector_column.name} {opened.dim}",
            fix="name the model of the table's vectors by --model",
            where=model,
        )
    return {"model_checksum": tower_checksum(tower), "kind": encoder.kind}


def _described(opened: ForeignTable) -> str:
    """Return which columns and which index were found."""
    about = opened.provenance
    columns = ", ".join(f"{role} {name}" for role, name in about.names.items())
    searched = f"searched by its {about.index} index"
    if about.index == "none":
        searched = "compared with all rows, as no index fits"
    return f"{columns}; {about.metric}, {searched}"
