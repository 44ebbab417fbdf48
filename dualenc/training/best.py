"""Evaluation, early stopping, and the model folder with the best (or last) weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dualenc import distributed
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import DualencError, nearest
from dualenc.objectives.base import Objective
from dualenc.seeds import preserve_random_state
from dualenc.training.evaluators import Evaluator, evaluated_data

Metrics = dict[str, float]

_STATE = ("before", "best", "last", "best_step", "evaluations_without_improvement")


class BestModel:
    """Runs evaluations, tracks early stopping, and saves the best (or last) weights.

    Without an evaluator it saves the last weights. All ranks call its methods together.

    Args:
        model: the model in training.
        objective: the objective, whose temperature is saved with the model.
        evaluator: the evaluator, or None.
        folder: model folder to write.
        keep_best: True to save the best weights, False to save the last ones.
        patience: number of evaluations without improvement before training stops, or None.
        card: function of (before, metrics, step) that returns the model card's training section.
        progress: True to show progress bars.

    Attributes:
        before: metrics of the untrained model.
        best: best metrics of the trained model so far.
        last: metrics of the latest evaluation.
    """

    def __init__(
        self,
        model: DualEncoder,
        objective: Objective,
        evaluator: Evaluator | None,
        folder: Path,
        *,
        keep_best: bool,
        patience: int | None,
        card: Callable[[Metrics, Metrics, int], dict[str, Any]],
        progress: bool = False,
    ) -> None:
        self.model = model
        self.objective = objective
        self.evaluator = evaluator
        self.folder = folder
        self.keep_best = keep_best and evaluator is not None
        self.patience = patience
        self.card = card
        self.progress = progress
        self.before: Metrics = {}
        self.best: Metrics = {}
        self.last: Metrics = {}
        self.best_step = -1
        self.evaluations_without_improvement = 0

    @property
    def primary(self) -> str:
        """Name of the metric that selects the best weights; "" without an evaluator."""
        return "" if self.evaluator is None else self.evaluator.primary

    @property
    def out_of_patience(self) -> bool:
        """True if the last `patience` evaluations did not improve on the best one."""
        # An untrained model does not count as the best one, so training always starts.
        if self.patience is None or not self.best:
            return False
        return self.evaluations_without_improvement >= self.patience

    def evaluate(self, step: int, stopped: Callable[[], bool] | None = None) -> Metrics:
        """Evaluate the model, and save it if it is the best so far.

        Args:
            step: number of optimizer steps so far; 0 for the untrained model, which is not saved.
            stopped: function that returns True to stop the evaluation between two batches.

        Raises:
            EmbeddingStopped: the evaluation was stopped. Nothing has changed.
        """
        self.last = self._measure(step, stopped)
        if step == 0:
            self.before = self.last
        elif self.keep_best and (not self.best or self._rank(self.last) > self._rank(self.best)):
            self.best = self.last
            self.best_step = step
            self.evaluations_without_improvement = 0
            self._save(step, self.best)
        else:
            self.evaluations_without_improvement += 1
        return self.last

    def finish(self, step: int, info: Callable[[str], None]) -> Metrics:
        """Save the last weights, unless the folder holds better ones.

        Args:
            step: number of the last step.
            info: function that logs a line.

        Returns:
            The metrics of the saved model.
        """
        if self.best:
            # The folder is written atomically, so it is complete if it has its card.
            if distributed.broadcast_object((self.folder / "README.md").exists()):
                return self.best
            info(
                f"{self.folder} was removed, and with it the weights of the best step "
                f"({self.best_step}): saving the last weights"
            )
        self._save(step, self.last)
        return self.last

    @property
    def _evaluation(self) -> list[Any]:
        """Identity of the evaluator: its class, metric and data."""
        return [type(self.evaluator).__name__, self.primary, *evaluated_data(self.evaluator)]

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics and counters that later decisions depend on."""
        counters = {name: getattr(self, name) for name in _STATE}
        return {"evaluator": self._evaluation, **counters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`, unless the state is from another evaluator."""
        # Scores of different evaluators cannot be compared: the search for the best starts over.
        if state.get("evaluator", self._evaluation) == self._evaluation:
            for name in _STATE:
                setattr(self, name, state[name])

    def _rank(self, metrics: Metrics) -> tuple[bool, float]:
        """Return the sort key of an evaluation; any number ranks above NaN."""
        value = metrics[self.primary]
        return not math.isnan(value), value

    def _measure(self, step: int, stopped: Callable[[], bool] | None) -> Metrics:
        """Return the metrics of the main process, on every rank."""
        if self.evaluator is None:
            return {}
        moment = f"step {step}" if step else "before training"
        # Any callable may be an evaluator; only subclasses have these methods.
        if isinstance(self.evaluator, Evaluator):
            self.evaluator.describe(moment if self.progress else "")
            self.evaluator.stop_when(stopped)
        self.model.eval()
        try:
            # Evaluations may draw random numbers. How often a run evaluates must not change it.
            with preserve_random_state(), torch.no_grad():
                metrics = self.evaluator(self.model)
        finally:
            self.model.train()
            if isinstance(self.evaluator, Evaluator):
                self.evaluator.stop_when(None)
        if self.primary not in metrics:
            raise DualencError(
                f"evaluator.primary is {self.primary!r}{nearest(self.primary, metrics)}",
                fix=f"choose one of {', '.join(metrics)}",
            )
        own = {name: float(value) for name, value in metrics.items()}
        # Broadcast, because all ranks must make identical decisions; rounding may differ by rank.
        everywhere: Metrics = distributed.broadcast_object(own)
        return everywhere

    def _save(self, step: int, metrics: Metrics) -> None:
        # On all ranks: the card counts the samples that any of them skipped.
        card = self.card(self.before, metrics, step)
        if distributed.is_main():
            self.model.set_temperature(self.objective.temperature.item())
            self.model.eval()
            try:
                self.model.save(self.folder, card=card)
            finally:
                self.model.train()
        distributed.barrier()
