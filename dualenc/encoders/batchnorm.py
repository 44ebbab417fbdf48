"""Batch normalisation of items that are encoded beside a training batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dualenc import distributed

Statistics = tuple[Tensor, Tensor]


class BatchStatistics:
    """The mean and variance by which BatchNorm layers normalised the latest training batch.

    Items beside the batch (chain states, cached items) are compared with the batch's own. By running statistics, or
    by statistics of their own, they would be embedded by another function than the batch, and a model would learn to
    tell the two functions apart instead of the items. By the batch's statistics all of them are embedded by one.

    Args:
        keep: record at all; without, running statistics stand in.
    """

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep
        self._latest: dict[_BatchNorm, Statistics] = {}

    def of_batch(self, module: nn.Module, beside: bool) -> AbstractContextManager[None]:
        """For a forward of the training batch, which is recorded, or of items beside it, to which that is applied."""
        return self.applied(module) if beside else self.recorded(module)

    @contextmanager
    def recorded(self, module: nn.Module) -> Iterator[None]:
        """Forwards in this context leave their statistics here; running statistics move as they always do."""
        with ExitStack() as hooks:
            for layer in _training_layers(module) if self.keep else []:
                if layer.track_running_stats:
                    hooks.enter_context(self._recorded(layer))
            yield

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Layers that look at the batch take the recorded statistics, or running ones if none were recorded.

        Nothing moves and nothing depends on who else is encoded. Other layers, dropout included, keep their mode;
        gradients flow as usual.
        """
        layers = _training_layers(module)
        running = [(layer.running_mean, layer.running_var) for layer in layers]
        for layer in layers:
            layer.training = False
            if layer in self._latest:
                layer.running_mean, layer.running_var = self._latest[layer]
        try:
            yield
        finally:
            for layer, statistics in zip(layers, running):
                layer.training = True
                layer.running_mean, layer.running_var = statistics

    @contextmanager
    def _recorded(self, layer: _BatchNorm) -> Iterator[None]:
        """With a momentum of 1, the running statistics that a layer writes are the batch's: no pass is added."""
        momentum = layer.momentum
        running: list[Statistics] = []

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            assert layer.running_mean is not None
            assert layer.running_var is not None
            running.append((layer.running_mean, layer.running_var))
            layer.running_mean, layer.running_var = layer.running_mean.clone(), layer.running_var.clone()
            layer.momentum = 1.0

        def after(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            assert layer.running_mean is not None
            assert layer.running_var is not None
            batch, kept = (layer.running_mean, layer.running_var), running.pop()
            weight = momentum if momentum is not None else 1 / int(layer.num_batches_tracked)  # type: ignore[arg-type]
            with torch.no_grad():
                for old, new in zip(kept, batch):
                    old.lerp_(new, weight)
                self._latest[layer] = batch[0], batch[1] * _uncorrected(inputs[0], layer)
            layer.running_mean, layer.running_var = kept
            layer.momentum = momentum

        hooks = layer.register_forward_pre_hook(before), layer.register_forward_hook(after)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            if running:  # the forward failed on the way
                layer.running_mean, layer.running_var = running.pop()
            layer.momentum = momentum


def _training_layers(module: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.training]


def _uncorrected(values: Tensor, layer: _BatchNorm) -> float:
    """(n − 1)/n: running variances are corrected for n values per channel, the variance to normalise by is not."""
    count = values.numel() // values.shape[1]
    if isinstance(layer, nn.SyncBatchNorm):
        count *= distributed.world_size()
    return (count - 1) / count
