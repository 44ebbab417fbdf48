"""Evaluation during training, and which weights end up in the model folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dualenc import distributed
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import DualencError
from dualenc.training.evaluators import Evaluator, Metrics
from dualenc.training.random_state import random_state_kept


class BestModel:
    """Evaluates, and keeps in the model folder the best weights so far, or the last ones.

    Args:
        model: what is trained.
        folder: the model folder.
        evaluator: None when there is nothing to measure by.
        keep_best: keep the weights with the best primary metric; otherwise the last.
        card: makes what the model card says of the training: `card(before, metrics, step)`.
        temperature: τ of the objective as it is now, for model formats that have a place for it.
    """

    def __init__(
        self,
        model: DualEncoder,
        folder: Path,
        evaluator: Evaluator | None,
        *,
        keep_best: bool,
        card: Callable[[Metrics, Metrics, int], dict[str, Any]],
        temperature: Callable[[], float],
    ) -> None:
        self.model, self.folder, self.evaluator, self.card = model, folder, evaluator, card
        self.temperature = temperature
        self.keep_best = keep_best and evaluator is not None
        self.before: Metrics = {}
        self.best: Metrics = {}
        self.last: Metrics = {}
        self.best_step = -1

    @property
    def primary(self) -> str:
        """Name of the metric that decides; "" without an evaluator."""
        return "" if self.evaluator is None else self.evaluator.primary

    def evaluate(self, step: int) -> Metrics:
        """Measure the model after so many steps; saves it if it is the best of the trained ones so far."""
        self.last = self._measure()
        if step == 0:
            self.before = self.last
        elif self.keep_best and self._improves():
            self.best, self.best_step = self.last, step
            self._save(step, self.best)
        return self.last

    def missing_step(self) -> int | None:
        """The step whose weights were the best, if the model folder that had them is gone; all ranks call it."""
        gone = self.keep_best and self.best_step > 0 and not (self.folder / "README.md").exists()
        return self.best_step if distributed.broadcast_object(gone) else None

    def save_best(self) -> None:
        """Write the model as it is, which has the best weights again."""
        self._save(self.best_step, self.best)

    def forget(self) -> None:
        """The best weights are lost: the last ones will do."""
        self.best, self.best_step = {}, -1

    def finish(self, step: int) -> Metrics:
        """Make sure that the model folder holds what it should; returns the metrics of what it holds."""
        if self.keep_best and self.best:
            return self.best
        self._save(step, self.last)
        return self.last

    def state_dict(self) -> dict[str, Any]:
        """What later decisions depend on."""
        return {"before": self.before, "best": self.best, "last": self.last, "best_step": self.best_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.before, self.best, self.last = state["before"], state["best"], state["last"]
        self.best_step = state["best_step"]

    def _measure(self) -> Metrics:
        if self.evaluator is None:
            return {}
        self.model.eval()
        try:
            with random_state_kept(), torch.no_grad():
                metrics = self.evaluator(self.model)
        finally:
            self.model.train()
        if self.primary not in metrics:
            raise DualencError(f"evaluator.primary is {self.primary!r}; choose one of {', '.join(metrics)}")
        return distributed.broadcast_object({name: float(value) for name, value in metrics.items()})

    def _improves(self) -> bool:
        return not self.best or self.last[self.primary] > self.best[self.primary]

    def _save(self, step: int, metrics: Metrics) -> None:
        if distributed.is_main():
            self.model.eval()
            self.model.set_temperature(self.temperature())
            self.model.save(self.folder, card=self.card(self.before, metrics, step))
            self.model.train()
        distributed.barrier()
