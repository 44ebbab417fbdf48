"""What `dualenc train` says about a training that did not help."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualenc.commands.train import _is_worse
from dualenc.training.trainer import TrainingResult


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        ({}, {"ndcg@10": 0.1}, False),
        ({"ndcg@10": 0.8, "recall@10": 0.9}, {"ndcg@10": 0.7, "recall@10": 0.9}, True),
        ({"ndcg@10": 0.8, "recall@10": 0.9}, {"ndcg@10": 0.7, "recall@10": 0.91}, False),
        ({"ndcg@10": 0.8}, {"ndcg@10": 0.8}, False),
        ({"ndcg@10": 0.8}, {"ndcg@10": 0.79999}, False),
        ({"ndcg@10": 0.8}, {"mrr@10": 0.1}, False),
        ({"ndcg@10": float("nan")}, {"ndcg@10": 0.8}, False),
    ],
)
def test_a_training_is_worse_if_metrics_fell_and_none_rose(
    before: dict[str, float], after: dict[str, float], worse: bool
) -> None:
    result = TrainingResult(Path("run/model"), 1, 0.5, before, after, 1.0, 0)
    assert _is_worse(result) == worse
