"""Options that say how the columns of a table of pairs are read."""

from __future__ import annotations

from typing import TypedDict

from dualenc.types import Modality


class PairColumns(TypedDict, total=False):
    """Keyword arguments that say how the two columns of a table of pairs are read.

    Attributes:
        left_column: column with queries or images; None finds a usual name.
        right_column: column with documents or captions (one, or a list in each row); None finds a
            usual name.
        left_modality: modality of the left column; None detects it from its values.
        right_modality: modality of the right column; None detects it from its values.
        weight_column: column with labels, grades or weights, 0 for rows that do not match.
        quotes: True if `"` encloses fields; None decides by the file.
        allow_outside: let image paths lead out of the folder of the table; for trusted tables only.
    """

    left_column: str | None
    right_column: str | None
    left_modality: Modality | None
    right_modality: Modality | None
    weight_column: str | None
    quotes: bool | None
    allow_outside: bool
