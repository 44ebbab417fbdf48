"""What the model card says of the training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dualenc.data.pairs import PairDataset
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
        self.settings, self.recipe = dict(settings), dict(recipe)

    def __call__(self, before: dict[str, float], metrics: dict[str, float], step: int) -> dict[str, Any]:
        """The card of the model after so many steps, with its metrics and those of the untrained model."""
        return {
            "data": (
                f"{type(self.pairs).__name__}: {len(self.pairs)} pairs of {self.pairs.num_left} left and "
                f"{self.pairs.num_right} right items"
            ),
            "objective": type(self.objective).__name__,
            "steps": step,
            "metrics": metrics,
            "metrics_before": before,
            "recipe": self.recipe or {"trainer": self.settings},
        }
