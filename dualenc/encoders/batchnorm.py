"""Batch normalisation of items that are encoded beside a training batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class BatchStatistics:
    """The mean and variance by which BatchNorm layers normalised the latest training batch, with their gradient.

    Items beside the batch (chain states, cached items) are compared with the batch's own. By running statistics, or
    by statistics of their own, they would be embedded by another function than the batch, and a model would learn to
    tell the two functions apart instead of the items. By the batch's statistics all of them are embedded by one.
    The gradient goes through the statistics into the batch: otherwise a shift of all items beside it would seem to
    lower the loss, which the next batch's normalisation takes back.

    Under a synchronised BatchNorm the statistics are those of this process's part of the batch.

    Args:
        keep: record at all; without, running statistics stand in.
    """

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep
        self._latest: dict[_BatchNorm, tuple[Tensor, Tensor]] = {}

    def of_batch(self, module: nn.Module, beside: bool) -> AbstractContextManager[None]:
        """For a forward of the training batch, which is recorded, or of items beside it, to which that is applied."""
        return self.applied(module) if beside else self.recorded(module)

    @contextmanager
    def recorded(self, module: nn.Module) -> Iterator[None]:
        """Forwards in this context leave their statistics here."""
        with ExitStack() as stack:
            for layer in _training_layers(module) if self.keep else []:
                hook = layer.register_forward_pre_hook(self._record)
                stack.callback(hook.remove)
            yield

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Layers that look at the batch take the recorded statistics, or running ones if none were recorded.

        Running statistics stay, and nothing depends on who else is encoded. Other layers, dropout included, keep their
        mode.
        """
        with ExitStack() as stack:
            for layer in _training_layers(module):
                stack.enter_context(_evaluating(layer))
                if layer in self._latest:
                    stack.enter_context(_normalised_before(layer, *self._latest[layer]))
            yield

    def _record(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(layer, _BatchNorm)
        values: Tensor = inputs[0]
        variance, mean = torch.var_mean(values, dim=[0, *range(2, values.dim())], correction=0)
        self._latest[layer] = mean, variance


def _training_layers(module: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.training]


@contextmanager
def _evaluating(layer: _BatchNorm) -> Iterator[None]:
    layer.training = False
    try:
        yield
    finally:
        layer.training = True


@contextmanager
def _normalised_before(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> Iterator[None]:
    """The layer's inputs come normalised; its own normalisation does nothing, and what it does after that stays."""
    running = layer.running_mean, layer.running_var
    dtype = mean.dtype if layer.weight is None else layer.weight.dtype
    layer.running_mean = torch.zeros_like(mean, dtype=dtype)
    layer.running_var = torch.full_like(mean, 1 - layer.eps, dtype=dtype)
    hook = layer.register_forward_pre_hook(_normalise_by(mean, variance, layer.eps))
    try:
        yield
    finally:
        hook.remove()
        layer.running_mean, layer.running_var = running


def _normalise_by(mean: Tensor, variance: Tensor, eps: float) -> Callable[..., tuple[Tensor]]:
    scale = torch.rsqrt(variance + eps)
    shift = -mean * scale

    def normalise(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        shape = (1, -1, *(1 for _ in range(inputs[0].dim() - 2)))
        return (torch.addcmul(shift.view(shape), inputs[0], scale.view(shape)),)

    return normalise
