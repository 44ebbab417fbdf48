"""How to read a source: which split, how csv is quoted, what is trusted, what bad samples do."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dualenc.data.bad_rows import BadRows
from dualenc.errors import DualencError
from dualenc.types import OnError, StrPath

ONLY_SPLIT = "train"
"""Name that `datasets` gives to the rows of a source without splits."""


@dataclass(frozen=True)
class ReadOptions:
    """How to read a table, a folder or a hub data set.

    The public readers take these as keyword arguments and pass them on as one object.

        ReadOptions(split="test", on_error="raise")

    Args:
        split: which split of a folder, saved data set or hub name.
        quotes: whether `"` encloses fields; by default true for csv files, and for tsv files whose
            header is in quotes.
        allow_outside: whether image paths may lead out of the table's folder.
        on_error: "skip" leaves out, counts and reports bad samples; "raise" stops at the first.
    """

    split: str = ONLY_SPLIT
    quotes: bool | None = None
    allow_outside: bool = False
    on_error: OnError = "skip"

    def bad_rows(self, source: object) -> BadRows:
        """Return an empty count of the bad samples of a source."""
        return BadRows(source, self.on_error)


def check_split(source: StrPath, split: str, splits: Collection[str] = (ONLY_SPLIT,)) -> None:
    """Raise a `DualencError` if a split is not among `splits`, by default `train` alone."""
    if split not in splits:
        raise DualencError(
            f"no split {split!r}",
            fix=f"there are: {', '.join(splits)}",
            where=source,
        )
