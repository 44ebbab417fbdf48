"""The gate of an adaptation: whether held-out queries show the gain that is required."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dualenc.errors import BelowTarget
from dualenc.evaluation.metrics import paired_bootstrap
from dualenc.workflows.adaptation_choice import Compared, pool


class Gate(NamedTuple):
    """A required gain in nDCG@10, and what held-out queries show.

        gate = Gate.of(0.01, result_by_task)
        gate.check()

    Attributes:
        required: gain that the interval must exceed.
        queries: number of held-out queries.
        gain: mean difference of the adapted model from the original.
        low: lower end of its 95% interval over documents.
        high: upper end.
        passed: True if `low` is at least what is required.
    """

    required: float
    queries: int
    gain: float | None
    low: float | None
    high: float | None
    passed: bool

    @classmethod
    def of(cls, required: float, compared: Mapping[str, Compared]) -> Gate:
        """Measure the gain over all queries of some tasks; without any the gate is not passed."""
        if not compared:
            return cls(required, 0, None, None, None, False)
        before, after, groups, _ = pool(compared)
        # One group varies as little as one query does: its interval would be a point.
        if len(np.unique(groups)) < 2:
            return cls(required, len(before), float((after - before).mean()), None, None, False)
        gain, low, high = paired_bootstrap(before, after, groups=groups)
        return cls(required, len(before), gain, low, high, low >= required)

    def check(self) -> None:
        """Raise unless the gate was passed.

        Raises:
            BelowTarget: held-out queries do not show the gain.
        """
        if self.passed:
            return
        shown = "no held-out query measures the gain"
        if self.low is not None:
            shown = (
                f"{self.queries:,} held-out queries show a gain of {self.gain:+.3f} "
                f"[{self.low:+.3f}, {self.high:+.3f}]"
            )
        raise BelowTarget(
            f"the gate is not passed, and the model is the original: {shown}, and --require-gain "
            f"is {self.required:g}",
            fix="collect more clicks, or require less",
        )
