"""Bad samples of a reader, counted or raised, and one-line notices of what a reader assumes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import get_args

from dualenc.errors import BadSample, DualencError
from dualenc.types import OnError

logger = logging.getLogger("dualenc.data")


class BadRows:
    """The bad samples of one reader.

    With `on_error="raise"` the first one is raised. With "skip" they are left out and counted, and
    `report` logs them in one line.

        bad_rows = BadRows("pairs.csv")
        bad_rows.add("empty text", "pairs.csv:7")
        bad_rows.total  # 1

    Args:
        source: file or folder being read, named in logs and errors.
        on_error: "skip" or "raise".

    Attributes:
        counts: number of bad samples by reason.
        first: position of the first bad sample by reason (file:line, or file and row).
    """

    def __init__(self, source: object, on_error: OnError = "skip") -> None:
        if on_error not in get_args(OnError):
            raise DualencError(
                f"{on_error!r} is not a valid choice",
                fix="choose skip or raise",
                where="on_error",
            )
        self.source = str(source)
        self.on_error = on_error
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    @property
    def total(self) -> int:
        """Number of bad samples left out."""
        return self.counts.total()

    def add(
        self, reason: str, position: str, fix: str = "fix or remove it", count: int = 1
    ) -> None:
        """Count `count` bad samples, the first of them at `position`.

        Raises:
            BadSample: the reader was opened with on_error="raise".
        """
        if self.on_error == "raise":
            raise BadSample(
                reason,
                fix=f"{fix}, or pass on_error=skip",
                where=position,
            )
        self.counts[reason] += count
        self.first.setdefault(reason, position)

    def update(self, counts: Mapping[str, int], first: Mapping[str, str]) -> None:
        """Merge in the `counts` and `first` of another reader."""
        self.counts.update(counts)
        # Positions found earlier take precedence, so that `first` stays the first one.
        self.first = {**first, **self.first}

    def describe(self) -> str:
        """Return all reasons with count and first position in one line, "" without any."""
        reasons = self.counts.items()
        return ", ".join(
            f"{count} {reason} (first: {self.first[reason]})" for reason, count in reasons
        )

    def report(self) -> int:
        """Log the bad samples left out, on the main process only, and return their number."""
        if self.total:
            # Imported here because it loads torch, which takes seconds and is rarely needed.
            from dualenc import distributed

            if distributed.is_main():
                logger.warning(
                    "%s: skipped %d bad samples: %s", self.source, self.total, self.describe()
                )
        return self.total

    def require(self, usable: int, what: str) -> None:
        """Raise a `DualencError` if no samples are usable."""
        if not usable:
            raise DualencError(
                f"no usable {what}: {self.describe() or 'it is empty'}",
                fix="check the file and the column names",
                where=self.source,
            )


@cache
def report_once(message: str) -> None:
    """Log a message once per process."""
    # Cached, because several readers may open one source, such as pairs and an evaluator.
    logger.warning("%s", message)
