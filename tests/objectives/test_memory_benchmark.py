"""The memory benchmark measures every objective, each in a process of its own."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).resolve().parents[2] / "eval" / "bench" / "memory.py"))
OPTIONS = {"encoder": "linear", "size": 8, "layers": 1, "chunk_size": 4, "steps": 2, "num_items": 20, "device": "cpu"}


@pytest.mark.parametrize("name", SCRIPT["OBJECTIVES"])
def test_every_objective_is_trained(name: str) -> None:
    found = SCRIPT["measure"]({**OPTIONS, "objective": name, "batch_size": 6})
    item = 8 * 4 / 2**20
    beside = found["inputs"] / item - 2 * 6
    assert beside == pytest.approx(round(beside))
    needs_encode = SCRIPT["new_objective"](name, 12, views=False).needs_encode
    assert beside >= 0 if needs_encode else beside == pytest.approx(0)
    assert found["peak"] > found["inputs"]


def test_a_table_of_ratios_to_the_smallest_batch_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    SCRIPT["main"](encoder="linear", batch_sizes=[4], objectives=["InfoNCE"], num_items=8, steps=1)
    name, batch_size, peak, ratio, _, without = capsys.readouterr().out.splitlines()[-1].split()
    assert (name, batch_size, ratio, without) == ("InfoNCE", "4", "1.00", "1.00")
    assert float(peak.replace(",", "")) > 50


def test_an_unknown_objective_is_named() -> None:
    with pytest.raises(SystemExit, match="InfoNEC not known; choose from InfoNCE"):
        SCRIPT["main"](objectives=["InfoNEC"])
