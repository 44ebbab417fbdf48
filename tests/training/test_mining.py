"""Negatives mined in training: those of a slow search by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualenc.data import Mixture, PairDataset
from dualenc.encoders.dual import DualEncoder
from dualenc.search.hard_negatives import Rule
from dualenc.training.log import read_metrics
from dualenc.training.mined_negatives import NegativeMiner
from dualenc.training.settings import TrainerSettings
from tests.helpers.fakes import (
    TinyEncoder,
    tiny_objective,
    tiny_pairs,
    vector_encoder,
    vector_pairs,
)
from tests.helpers.runs import train

# Half of the right items have two pairs, and so have some left ones.
LEFT_ID = [*range(20), 0, 1, 2, 3]
RIGHT_ID = [*range(12), *(12 + number // 2 for number in range(12))]
WIDE = Rule(num_negatives=3, relative=None)


def text_pairs() -> PairDataset:
    """Items 4 and 5 on the right are the same text, item 7 there is the left item 9, and item 8
    cannot be read."""
    pairs = tiny_pairs(left_id=LEFT_ID, right_id=RIGHT_ID)
    right: Any = pairs.right_items
    right[5] = right[4]
    right[7] = pairs.left_items[9]
    right.bad = (8,)
    return pairs


def mixed_pairs() -> Mixture:
    return Mixture({"one": tiny_pairs(24), "two": tiny_pairs(14, seed=1)}, weights={"two": 2.0})


def parts(name: str, folder: Path) -> tuple[DualEncoder, PairDataset]:
    if name == "vectors":
        return vector_encoder(), vector_pairs(folder)
    return TinyEncoder(dropout=0.5), mixed_pairs() if name == "mixture" else text_pairs()


def by_hand(model: DualEncoder, pairs: PairDataset, rule: Rule) -> list[dict[int, int]]:
    """The negatives of each pair, and their ranks, from one item at a time and a full matrix of
    scores in float64."""

    def contents(item: Any) -> Any:
        return item.tobytes() if hasattr(item, "tobytes") else item

    def every(side: Any) -> list[Any]:
        return list(pairs.items(side))  # not by number: that of a bad item raises

    def encoded(side: Any) -> np.ndarray:
        tower, rows = model.tower(side), []
        for item in every(side):
            with torch.no_grad():
                rows.append(tower(tower.prepare([item]))[0].double().numpy())
        return np.array(rows)

    was_training = model.training
    model.eval()
    scores = encoded("left") @ encoded("right").T
    model.train(was_training)
    bad = getattr(pairs.right_items, "bad", ())
    left, right = ([contents(item) for item in every(side)] for side in ("left", "right"))
    found = []
    for left_id in pairs.left_id.tolist():
        own = {int(r) for k, r in zip(pairs.left_id, pairs.right_id) if left[k] == left[left_id]}
        taken = {right[r] for r in own} | {left[left_id]}
        readable = [scores[left_id, r] for r in own if r not in bad]
        chosen: dict[int, int] = {}
        limit = np.inf
        if rule.relative is not None and readable:
            limit = np.mean(readable) - (1 - rule.relative) * abs(np.mean(readable))
        window = [
            r
            for r in np.argsort(-scores[left_id]).tolist()
            if right[r] not in taken and r not in bad
        ]
        for rank, row in enumerate(window[: rule.last_rank], start=1):
            is_new = right[row] not in {right[r] for r in chosen}
            if is_new and scores[left_id, row] <= limit and len(chosen) < rule.num_negatives:
                chosen[row] = rank
        found.append(chosen if readable else {})
    return found


def rows(pairs: PairDataset) -> list[list[int]]:
    assert pairs.negatives is not None
    return [pairs.negatives.row(index).tolist() for index in range(len(pairs))]


@pytest.mark.parametrize("name", ["text", "vectors", "mixture"])
@pytest.mark.parametrize(
    "rule", [WIDE, Rule(num_negatives=2, relative=0.9)], ids=["wide", "limited"]
)
def test_negatives_are_those_of_a_search_by_hand(tmp_path: Path, name: str, rule: Rule) -> None:
    model, pairs = parts(name, tmp_path)
    model.train()
    mining = {"mine_every": 1, "mine_negatives": rule.num_negatives, "mine_relative": rule.relative}
    settings = TrainerSettings(output="run", epochs=2, **mining)
    report = NegativeMiner(model, pairs, settings, "no", torch.device("cpu")).mine()
    expected = by_hand(model, pairs, rule)
    assert [sorted(row) for row in rows(pairs)] == [sorted(row) for row in expected]
    assert model.training
    assert all(tower.training for tower in (model.left, model.right))
    has_none = {int(left_id) for left_id, row in zip(pairs.left_id, expected) if not row}
    assert report["without_negatives"] == pytest.approx(
        len(has_none) / len(np.unique(pairs.left_id))
    )
    of_left = {int(left_id): list(row.values()) for left_id, row in zip(pairs.left_id, expected)}
    assert report["mean_rank"] == pytest.approx(
        np.mean([rank for ranks in of_left.values() for rank in ranks])
    )


@pytest.mark.slow
@pytest.mark.parametrize(("every", "chunk_size"), [(1, None), (2, 4)])
def test_batches_have_the_negatives_that_the_model_mined_last(
    tmp_path: Path, every: int, chunk_size: int | None
) -> None:
    """Those of the data serve until the first mining; the caller's pairs stay as they are."""
    negatives = [[(i + 3) % 24] for i in range(24)]
    pairs = tiny_pairs(negatives=negatives)
    model, objective = TinyEncoder(dropout=0.2), tiny_objective(pairs)
    expected: list[Any] = negatives
    calls = 0

    def compare(module: Any, arguments: Sequence[Any], named: dict[str, Any]) -> None:
        nonlocal expected, calls
        epoch, batch = divmod(calls, 4)
        calls += 1
        if batch == 0 and epoch and epoch % every == 0:
            expected = by_hand(model, pairs, Rule(num_negatives=2, relative=None))
        of_batch = [row for left in named["left_id"].tolist() for row in expected[left]]
        assert sorted(named["negative_id"].tolist()) == sorted(of_batch)

    objective.register_forward_pre_hook(compare, with_kwargs=True)
    settings: dict[str, Any] = {
        "mine_every": every,
        "mine_negatives": 2,
        "mine_relative": None,
        "epochs": 4,
    }
    train(
        tmp_path, model=model, pairs=pairs, objective=objective, chunk_size=chunk_size, **settings
    )
    assert calls == 16
    assert rows(pairs) == negatives
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "mined/seconds" in line]
    assert [line["step"] for line in lines] == [
        4 * epoch + 1 for epoch in range(1, 4) if epoch % every == 0
    ]
    assert all(
        line["mined/mean_rank"] >= 1 and line["mined/without_negatives"] == 0 for line in lines
    )
