"""Options that say how a corpus is read; meta.json records them, so that it can be read again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from dualenc.search.recorded_data import RECORDED

DEFAULT_SPLIT = "train"


class ReadOptions(TypedDict, total=False):
    """Keyword arguments that say how the items of a corpus are read.

    Attributes:
        split: split of a data set that has several; "train" by default.
        text_column: column with the texts; None finds a usual name.
        image_column: column with the images; None finds a usual name.
        vector_column: column with the vectors; None finds a usual name.
        id_column: column with the ids; None finds a usual name, "none" takes row numbers.
        columns: further columns of a table to keep, by which results can be filtered.
        quotes: True if `"` encloses fields; None decides by the file.
        allow_outside: let image paths lead out of the folder of the table; for trusted tables only.
    """

    split: str
    text_column: str | None
    image_column: str | None
    vector_column: str | None
    id_column: str | None
    columns: Sequence[str] | None
    quotes: bool | None
    allow_outside: bool


def to_record(options: ReadOptions) -> dict[str, Any]:
    """Return the options without defaults that are needed to read the same items again."""
    record = {}
    for name in RECORDED:
        default = DEFAULT_SPLIT if name == "split" else None
        value = options.get(name, default)
        if value != default:
            record[name] = value
    return record
