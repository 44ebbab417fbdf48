"""Rows of small batches: every one can be constructed."""

from __future__ import annotations

import pytest

from tests.helpers.eval_scripts import load_script

rows = load_script("rows.py")


@pytest.mark.parametrize("name", rows.OBJECTIVES)
def test_every_row_is_an_objective(name: str) -> None:
    sizes = {"num_left": 9, "num_right": 9, "views": False, "seed": 0, "temperature": 0.1}
    assert rows.objective_of(name)(**sizes).temperature.item() == pytest.approx(0.1)
