"""The gate of an adaptation against scores whose difference is known."""

from __future__ import annotations

import numpy as np
import pytest

from dualenc.errors import BelowTarget
from dualenc.workflows.adaptation_choice import Compared
from dualenc.workflows.gate import Gate


def compared(gain: float, count: int = 200) -> Compared:
    before = np.random.default_rng(0).uniform(0, 0.5, count)
    return Compared(before, before + gain, np.arange(count) // 2)


def test_a_gain_of_all_queries_passes() -> None:
    gate = Gate.of(0.01, {"new": compared(0.05), "known": compared(0.03)})
    assert gate.passed
    assert gate.queries == 400
    assert gate.gain == pytest.approx(0.04)
    gate.check()


def test_the_lower_end_of_the_interval_decides() -> None:
    noise = np.random.default_rng(1).normal(0.02, 0.3, 100)
    gate = Gate.of(0.01, {"new": Compared(np.zeros(100), noise, np.arange(100))})
    assert gate.low is not None
    assert gate.gain is not None
    assert gate.low < 0.01 < gate.gain + 0.1
    assert not gate.passed
    with pytest.raises(BelowTarget, match=r"the gate is not passed.*100 held-out queries"):
        gate.check()


@pytest.mark.parametrize(
    "measured",
    [{}, {"new": Compared(np.zeros(5), np.ones(5), np.zeros(5, np.int64))}],
    ids=["nothing", "one document"],
)
def test_what_cannot_be_told_does_not_pass(measured: dict[str, Compared]) -> None:
    gate = Gate.of(0.0, measured)
    assert not gate.passed
    with pytest.raises(BelowTarget, match="gate is not passed"):
        gate.check()
