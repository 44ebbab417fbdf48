"""Training on a teacher's scores: the student comes to order negatives as its teacher does; chunks change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualenc.data import PairDataset
from dualenc.errors import DualencError
from dualenc.objectives import Distilled, InfoNCE
from dualenc.training import Trainer
from tests.training.fakes import TinyEncoder, same, tiny_pairs, weights

PAIRS, EACH = 24, 4


def taught() -> PairDataset:
    """Each pair has four mined negatives, which a random linear teacher scores."""
    plain = tiny_pairs(PAIRS)
    negatives = [[(i + 1 + 3 * k) % PAIRS for k in range(EACH)] for i in range(PAIRS)]
    left, right = (
        np.array([[float(x) for x in row.split()] for row in side]) for side in (plain.left_items, plain.right_items)
    )
    scores = left @ np.random.default_rng(5).normal(size=(left.shape[1], right.shape[1])) @ right.T
    listed = np.concatenate([scores[i, row] for i, row in enumerate(negatives)])
    return tiny_pairs(PAIRS, negatives=negatives, scores=scores.diagonal(), negative_scores=listed)


def agreement(model: TinyEncoder, pairs: PairDataset) -> float:
    """Share of pairs of negatives of one query that the student orders as the teacher."""
    with torch.no_grad():
        left = model("left", model.left.prepare([pairs.item("left", i) for i in range(PAIRS)]))
        right = model("right", model.right.prepare([pairs.item("right", i) for i in range(PAIRS)]))
    found = (left @ right.T).numpy()
    agreed = [
        (found[p.left_id, a] > found[p.left_id, b]) == (s > t)
        for p in pairs
        for a, s in zip(p.negative_ids, p.negative_scores)
        for b, t in zip(p.negative_ids, p.negative_scores)
        if a < b
    ]
    return float(np.mean(agreed))


def train(folder: Path, pairs: PairDataset, objective: dict[str, Any], **more: Any) -> TinyEncoder:
    torch.manual_seed(0)
    model = TinyEncoder()
    trainer = Trainer(output=folder, batch_size=8, epochs=60, learning_rate=0.03, progress=False, **more)
    student = InfoNCE(temperature=0.2)
    trainer.fit(model, pairs, Distilled(student, **objective) if objective else student)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["margin_mse", "kl"])
def test_the_student_learns_the_teachers_order(tmp_path: Path, kind: Any) -> None:
    pairs = taught()
    own = agreement(train(tmp_path / "own", pairs, {}), pairs)
    settings = {"kind": kind, "own_weight": 0.0}
    alone = agreement(train(tmp_path / "alone", pairs, settings), pairs)
    assert alone > 0.8
    assert alone > own + 0.1


@pytest.mark.slow
def test_gradient_caching_changes_nothing(tmp_path: Path) -> None:
    pairs = taught()
    for name, chunk_size in (("whole", None), ("chunks", 3)):
        train(tmp_path / name, pairs, {"kind": "kl"}, chunk_size=chunk_size)
    whole, chunks = (weights(tmp_path / name) for name in ("whole", "chunks"))
    assert all(torch.allclose(whole[name], chunks[name], atol=1e-4) for name in whole)


@pytest.mark.slow
def test_pairs_of_weight_zero_teach_nothing(tmp_path: Path) -> None:
    """With all weights at zero, and no weight decay, nothing moves."""
    plain, zero = tiny_pairs(PAIRS), tiny_pairs(PAIRS, weights=np.zeros(PAIRS))
    torch.manual_seed(0)
    before = {name: value.clone() for name, value in TinyEncoder().state_dict().items()}
    unchanged = train(tmp_path / "zero", zero, {}, weight_decay=0.0).state_dict()
    changed = train(tmp_path / "plain", plain, {}, weight_decay=0.0).state_dict()
    assert same(before, unchanged)
    assert not same(before, changed)


def test_a_teacher_without_scores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match="Distilled of InfoNCE learns from a teacher, but the data holds no scores"):
        train(tmp_path / "run", tiny_pairs(PAIRS), {"kind": "kl"})
