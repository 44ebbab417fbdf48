"""What readers report: bad samples, counted or raised, and in one line each what they guess or
leave out."""

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
    """Bad samples of one reader: raised at once ("raise"), or left out, counted and reported in one
    line ("skip").

    `counts` are the samples left out for each reason, `first` the position of the first (file:line,
    or file and row).
    """

    def __init__(self, source: object, on_error: OnError = "skip") -> None:
        if on_error not in get_args(OnError):
            raise DualencError(
                f"{on_error!r} is not a choice",
                fix="take skip or raise",
                where="on_error",
            )
        self.source = str(source)
        self.on_error = on_error
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    @property
    def total(self) -> int:
        """Number of samples left out."""
        return self.counts.total()

    def add(
        self, reason: str, position: str, fix: str = "fix or remove it", count: int = 1
    ) -> None:
        """Count bad samples, the first of them at `position`; under on_error="raise" a
        `BadSample`."""
        if self.on_error == "raise":
            raise BadSample(
                reason,
                fix=f"{fix}, or pass on_error=skip",
                where=position,
            )
        self.counts[reason] += count
        self.first.setdefault(reason, position)

    def update(self, counts: Mapping[str, int], first: Mapping[str, str]) -> None:
        """Add the bad samples of another reader, by its `counts` and `first`."""
        self.counts.update(counts)
        self.first = {**first, **self.first}

    def describe(self) -> str:
        """Reasons with their counts and first positions, in one line; "" when nothing was left
        out."""
        reasons = self.counts.items()
        return ", ".join(
            f"{count} {reason} (first: {self.first[reason]})" for reason, count in reasons
        )

    def report(self) -> int:
        """Log what was left out, on the main process only. Returns the number of samples."""
        if self.total:
            # Loads torch, which reading without bad samples does not need.
            from dualenc import distributed

            if distributed.is_main():
                logger.warning(
                    "%s: skipped %d bad samples: %s", self.source, self.total, self.describe()
                )
        return self.total

    def require(self, usable: int, what: str) -> None:
        """Raise a `DualencError` if nothing usable is left."""
        if not usable:
            raise DualencError(
                f"no usable {what}: {self.describe() or 'it is empty'}",
                fix="check the file and the named columns",
                where=self.source,
            )


@cache
def report_once(message: str) -> None:
    """Log a line of a reader, once in each process."""
    logger.warning("%s", message)
