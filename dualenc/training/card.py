"""What the model card says of the training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import yaml

from dualenc.data.pairs import PairDataset
from dualenc.encoders.card import Code
from dualenc.objectives.base import Objective


class TrainingCard:
    """Describes a run for `DualEncoder.save`.

    Args:
        pairs: the training data.
        objective: the loss.
        settings: of the trainer.
        recipe: the resolved recipe; empty for a run from Python.
    """

    def __init__(
        self, pairs: PairDataset, objective: Objective, settings: Mapping[str, Any], recipe: Mapping[str, Any]
    ) -> None:
        self.pairs, self.objective = pairs, objective
        self.settings, self.recipe = _plain(settings), _plain(recipe)

    def __call__(self, before: dict[str, float], metrics: dict[str, float], step: int) -> dict[str, Any]:
        """The card of the model after so many steps, with its metrics and those of the untrained model."""
        recipe = yaml.safe_dump(self.recipe or {"trainer": self.settings}, sort_keys=False, allow_unicode=True)
        return {
            "data": (
                f"{type(self.pairs).__name__}: {len(self.pairs)} pairs of {self.pairs.num_left} left and "
                f"{self.pairs.num_right} right items."
            ),
            "training": f"{type(self.objective).__name__}, {step} steps with batches of {self.settings['batch_size']}.",
            "metrics": _columns(before, metrics) or None,
            "recipe": Code("yaml", recipe),
        }


def _columns(before: dict[str, float], metrics: dict[str, float]) -> dict[str, dict[str, float]]:
    """One row per metric: untrained and trained."""
    untrained = {name: {"untrained": before[name]} if name in before else {} for name in metrics}
    return {name: {**untrained[name], "trained": value} for name, value in metrics.items()}


def _plain(value: Any) -> Any:
    """Tuples and paths as YAML has them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, os.PathLike) else value
