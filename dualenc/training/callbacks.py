"""Trainer callbacks: user code that runs after each optimizer step and each evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.seeds import preserve_random_state


class Callback:
    """Base class of trainer callbacks. Override the methods you need; they do nothing by default.

    Callbacks run on the main process only. They get plain numbers and return nothing, so they
    cannot change the training: the weights are bitwise the same with and without them. Random
    numbers that a callback draws do not count either. An exception in a callback ends the run with
    its traceback; the latest checkpoint stays.

    Example:
        class PrintLoss(Callback):
            def on_step(self, step, metrics):
                print(step, metrics["loss"])

        Trainer(output="run").fit(model, pairs, objective, callbacks=[PrintLoss()])
    """

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        """Receive the metrics of an optimizer step.

        This is called after the weights are updated, and before any evaluation or checkpoint of the
        step. A resumed run continues with the step after its checkpoint.

        Args:
            step: number of optimizer steps so far, from 1.
            metrics: values of this step by name, as in metrics.jsonl: loss (unless the objective
                reports none), learning_rate, epoch and, with clipping, gradient_norm; every
                `log_every` steps also the objective's metrics. With several processes, the values
                are those of the main process's share of the batch.
        """

    def on_evaluate(self, step: int, metrics: dict[str, float]) -> None:
        """Receive the metrics of an evaluation.

        Args:
            step: number of optimizer steps so far; 0 for the evaluation before training.
            metrics: metrics of the evaluator, by name.
        """


class CallbackRunner:
    """Calls callbacks on the main process, and does nothing on the others.

    Args:
        callbacks: callbacks to call, in this order.

    Raises:
        DualencError: an entry is not an instance of `Callback`.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        for number, callback in enumerate(callbacks):
            if not isinstance(callback, Callback):
                kind = callback.__name__ if isinstance(callback, type) else type(callback).__name__
                raise DualencError(
                    f"{kind} is not an instance of dualenc.training.Callback",
                    fix="derive a class from Callback, and pass an instance",
                    where=f"callbacks[{number}]",
                )
        self.callbacks = list(callbacks) if distributed.is_main() else []
        # Reading the values of a step waits for the device, so only if a callback wants them.
        self.reads_steps = any(
            type(callback).on_step is not Callback.on_step for callback in self.callbacks
        )

    def after_step(self, step: int, values: Mapping[str, Tensor | float]) -> None:
        """Call `on_step` of all callbacks.

        Args:
            step: number of optimizer steps so far.
            values: scalars by name, numbers or tensors on any device.
        """
        if not self.reads_steps:
            return
        metrics = _plain(values)
        with preserve_random_state():
            for callback in self.callbacks:
                # A copy for each: what one changes, the others must not see.
                callback.on_step(step, dict(metrics))

    def after_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call `on_evaluate` of all callbacks.

        Args:
            step: number of optimizer steps so far.
            metrics: metrics of the evaluator.
        """
        if not self.callbacks:
            return
        with preserve_random_state():
            for callback in self.callbacks:
                callback.on_evaluate(step, dict(metrics))


def _plain(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return scalars as Python numbers."""
    numbers: dict[str, float] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            tensors[name] = value.detach()
        numbers[name] = 0.0 if isinstance(value, Tensor) else value
    if tensors:
        # Stacked, for one transfer to the host. In float64, which holds each of them exactly.
        stacked = torch.stack([tensor.double() for tensor in tensors.values()])
        numbers.update(zip(tensors, stacked.tolist(), strict=True))
    return numbers
