"""The model folder of a run: the best weights so far, or the last ones."""

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
    """Evaluates, remembers, is patient, and saves the best weights so far, or the last ones.

    `card(before, metrics, step)` makes the model card's part on the training. Without an evaluator
    the last weights are saved.

    Attributes:
        before: metrics of the untrained model.
        best: metrics of the best trained one so far.
        last: those of the latest evaluation.
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
        """Name of the metric that decides; "" without an evaluator."""
        return "" if self.evaluator is None else self.evaluator.primary

    @property
    def out_of_patience(self) -> bool:
        """Whether as many evaluations as the patience allows were no better than the best one."""
        if self.patience is None or not self.best:
            return False
        return self.evaluations_without_improvement >= self.patience

    def evaluate(self, step: int, stopped: Callable[[], bool] | None = None) -> Metrics:
        """Measure the model after `step` steps; save it if it is the best trained one so far.

        Raises:
            EmbeddingStopped: `stopped` was true between two batches; nothing has changed.
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
        """Save the last weights, unless the folder holds better ones; returns the metrics of the
        saved model."""
        if self.best:
            # The folder appears whole, with its card.
            if distributed.broadcast_object((self.folder / "README.md").exists()):
                return self.best
            info(
                f"{self.folder} is gone, and the weights of the best step, {self.best_step}, with it: saving the last"
            )
        self._save(step, self.last)
        return self.last

    @property
    def _evaluation(self) -> list[Any]:
        """Class, metric and data of the evaluator, by which a resumed run knows its numbers."""
        return [type(self.evaluator).__name__, self.primary, *evaluated_data(self.evaluator)]

    def state_dict(self) -> dict[str, Any]:
        """What later decisions depend on."""
        return {"evaluator": self._evaluation} | {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`; numbers of another evaluator are left out, and the best is
        found anew."""
        if state.get("evaluator", self._evaluation) == self._evaluation:
            for name in _STATE:
                setattr(self, name, state[name])

    def _rank(self, metrics: Metrics) -> tuple[bool, float]:
        """What to compare by: every number is better than NaN."""
        return not math.isnan(metrics[self.primary]), metrics[self.primary]

    def _measure(self, step: int, stopped: Callable[[], bool] | None) -> Metrics:
        """The main process's metrics, on every rank."""
        if self.evaluator is None:
            return {}
        moment = f"after step {step}" if step else "before training"
        if isinstance(self.evaluator, Evaluator):
            self.evaluator.describe(moment if self.progress else "")
            self.evaluator.stop_when(stopped)
        self.model.eval()
        try:
            with preserve_random_state(), torch.no_grad():
                metrics = self.evaluator(self.model)
        finally:
            self.model.train()
            if isinstance(self.evaluator, Evaluator):
                self.evaluator.stop_when(None)
        if self.primary not in metrics:
            raise DualencError(
                f"evaluator.primary is {self.primary!r}{nearest(self.primary, metrics)}; choose one of "
                f"{', '.join(metrics)}"
            )
        own = {name: float(value) for name, value in metrics.items()}
        # All ranks must take the same decisions by it, bit for bit.
        everywhere: Metrics = distributed.broadcast_object(own)
        return everywhere

    def _save(self, step: int, metrics: Metrics) -> None:
        card = self.card(self.before, metrics, step)
        if distributed.is_main():
            self.model.set_temperature(self.objective.temperature.item())
            self.model.eval()
            try:
                self.model.save(self.folder, card=card)
            finally:
                self.model.train()
        distributed.barrier()
