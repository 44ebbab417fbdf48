"""Tasks and rows of small batches: copies are false negatives, and every row can be trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.eval_scripts import load_script

tasks, toys, rows = load_script("tasks.py"), load_script("toys.py"), load_script("rows.py")


@pytest.mark.parametrize("known", [False, True])
def test_copies_are_false_negatives_that_training_may_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    def as_texts(*parts: object, learning_rate: float) -> object:
        return tasks.Task(lambda: None, *parts, learning_rate)

    monkeypatch.setattr(tasks, "on_features", as_texts)
    monkeypatch.setattr(tasks, "vector_pairs", tasks.PairDataset)
    monkeypatch.setattr(tasks, "COPIED_PAIRS", 20)
    task = tasks.copies(toys.beir(tmp_path / "toy"), "", known=known)
    pairs, test = task.pairs, task.test
    assert (len(pairs), pairs.num_left, pairs.num_right) == (24, 24, 24)
    for row in range(20, 24):
        words = set(pairs.right_items[row].split())
        [original] = [o for o in range(20) if words <= set(pairs.right_items[o].split())]
        both = [original, row] if known else [row]
        assert pairs.positives("left", np.array([row])).tolist() == [both]
        assert pairs.positives("right", np.array([row])).tolist() == [both]
    copies = {own for grades in test.qrels.values() for own in grades if own.endswith("-copy")}
    assert copies
    assert copies <= set(test.corpus.ids)
    assert len(test.corpus) == 72
    for grades in test.qrels.values():
        assert grades.keys() >= {own.removesuffix("-copy") for own in grades}


@pytest.mark.parametrize("name", rows.OBJECTIVES)
def test_every_row_is_an_objective(name: str) -> None:
    sizes = {"num_left": 9, "num_right": 9, "views": False, "seed": 0, "temperature": 0.1}
    assert rows.objective_of(name)(**sizes).temperature.item() == pytest.approx(0.1)
