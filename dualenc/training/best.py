"""The model folder of a run: the best weights so far, or the last ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dualenc import distributed
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import DualencError
from dualenc.objectives.base import Objective
from dualenc.seeds import random_state_kept
from dualenc.training.checkpoint import Checkpoints
from dualenc.training.evaluators import Evaluator

_STATE = ("before", "best", "last", "best_step", "evaluations_without_improvement")


class BestModel:
    """Evaluates, and keeps in the model folder the best weights so far, or the last ones.

    Args:
        model: what is trained.
        objective: whose temperature goes into model formats that have a place for it.
        evaluator: None when there is nothing to measure by; then the last weights are kept.
        folder: the model folder.
        keep_best: keep the weights with the best primary metric; otherwise the last.
        card: makes the model card's part on the training: `card(before, metrics, step)`.
        progress: show bars while the evaluator embeds.

    Attributes:
        before: metrics of the untrained model.
        best: metrics of the best trained one so far.
        last: those of the latest evaluation.
        evaluations_without_improvement: how many there were since the best one.
    """

    def __init__(
        self,
        model: DualEncoder,
        objective: Objective,
        evaluator: Evaluator | None,
        folder: Path,
        *,
        keep_best: bool,
        card: Callable[[dict[str, float], dict[str, float], int], dict[str, Any]],
        progress: bool = False,
    ) -> None:
        self.model = model
        self.progress = progress
        self.objective = objective
        self.evaluator = evaluator
        self.folder = folder
        self.keep_best = keep_best and evaluator is not None
        self.card = card
        self.before: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.best_step = -1
        self.evaluations_without_improvement = 0

    @property
    def primary(self) -> str:
        """Name of the metric that decides; "" without an evaluator."""
        return "" if self.evaluator is None else self.evaluator.primary

    def evaluate(self, step: int) -> dict[str, float]:
        """Measure the model after so many steps; saves it if it is the best of the trained ones so far."""
        self.last = self._measure(step)
        if step == 0:
            self.before = self.last
        elif self.keep_best and (not self.best or self.last[self.primary] > self.best[self.primary]):
            self.best = self.last
            self.best_step = step
            self.evaluations_without_improvement = 0
            self._save(step, self.best)
        else:
            self.evaluations_without_improvement += 1
        return self.last

    def _measure(self, step: int) -> dict[str, float]:
        """The main process's metrics, on every rank."""
        if self.evaluator is None:
            return {}
        self.model.eval()
        # Any callable may be an evaluator.
        if self.progress and isinstance(self.evaluator, Evaluator):
            self.evaluator.moment = f"after step {step}" if step else "before training"
        try:
            with random_state_kept(), torch.no_grad():
                metrics = self.evaluator(self.model)
        finally:
            self.model.train()
            if isinstance(self.evaluator, Evaluator):
                self.evaluator.moment = ""
        if self.primary not in metrics:
            raise DualencError(f"evaluator.primary is {self.primary!r}; choose one of {', '.join(metrics)}")
        # All ranks must take the same decisions by it, bit for bit.
        own = {name: float(value) for name, value in metrics.items()}
        everywhere: dict[str, float] = distributed.broadcast_object(own)
        return everywhere

    def finish(self, step: int, checkpoints: Checkpoints, info: Callable[[str], None]) -> dict[str, float]:
        """Make sure that the model folder holds what it should; all ranks call it together.

        Args:
            step: the last one, of the weights that the model has.
            checkpoints: one of them may have the best weights, if the model folder that had them is gone.
            info: reports to the user if none has.

        Returns:
            The metrics of what the folder holds.
        """
        if self.keep_best and self.best:
            # The folder is written whole, so its card stands for all of it.
            if not distributed.broadcast_object(not (self.folder / "README.md").exists()):
                return self.best
            state = checkpoints.load_step(self.best_step)
            if state is not None:
                self._save_from(state)
                return self.best
            info(f"{self.folder} is gone, and no checkpoint has the best weights, those of step {self.best_step}")
            self.best = {}
            self.best_step = -1
        self._save(step, self.last)
        return self.last

    def _save_from(self, state: dict[str, Any]) -> None:
        """Save the weights of the best step's checkpoint; the model keeps its own."""
        parts: dict[str, torch.nn.Module] = {"model": self.model, "objective": self.objective}
        latest = {
            name: {key: tensor.clone() for key, tensor in part.state_dict().items()} for name, part in parts.items()
        }
        # Restore the evaluated weights (averaged ones, if enabled).
        averages = state.get("averages")
        self.model.load_state_dict(state["model"] if averages is None else averages["average"])
        self.objective.load_state_dict(state["objective"])
        self._save(self.best_step, self.best)
        for name, part in parts.items():
            part.load_state_dict(latest[name])

    def state_dict(self) -> dict[str, Any]:
        """What later decisions depend on."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        for name in _STATE:
            setattr(self, name, state[name])

    def _save(self, step: int, metrics: dict[str, float]) -> None:
        if distributed.is_main():
            self.model.set_temperature(self.objective.temperature.item())
            self.model.set_dims(self.objective.dims or ())
            self.model.eval()
            try:
                self.model.save(self.folder, card=self.card(self.before, metrics, step))
            finally:
                self.model.train()
        distributed.barrier()
