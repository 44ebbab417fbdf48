"""Batch normalisation: synchronised over processes, and of out-of-batch items by a training batch's
statistics."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm

from dualenc import distributed
from dualenc.errors import DualencError

Statistics = dict[_BatchNorm, tuple[Tensor, Tensor]]
"""The mean and the (biased) variance of each layer's inputs, (channels,)."""
TOO_SMALL = "BatchNorm needs more than one value per channel in training; raise batch_size"


class BatchStatistics:
    """The statistics by which BatchNorm layers normalised the latest training batch, for its
    out-of-batch items.

    The gradient goes through them into this process's part of the batch. Without `keep`, running
    statistics stand in.
    """

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep
        self._latest: Statistics = {}
        self._applied: set[_BatchNorm] = set()

    def release(self) -> None:
        """Drop the stored activations. Call after a step's last `encode`, before `backward`."""
        for layer, (mean, variance) in self._latest.items():
            # Applied ones may be applied again, by gradient checkpointing.
            if layer not in self._applied:
                self._latest[layer] = (mean.detach(), variance.detach())

    def of_batch(self, module: nn.Module, out_of_batch: bool) -> AbstractContextManager[None]:
        """`recorded` for a forward of the training batch, `applied` for one of out-of-batch
        items."""
        return self.applied(module) if out_of_batch else self.recorded(module)

    @contextmanager
    def recorded(self, module: nn.Module) -> Iterator[None]:
        """Record the statistics of forwards in this context."""
        with ExitStack() as stack:
            for layer in _training_layers(module) if self.keep else []:
                synchroniser = _synchroniser(layer) if distributed.is_initialized() else None
                if synchroniser is None:
                    stack.callback(layer.register_forward_pre_hook(self._record).remove)
                else:
                    synchroniser.latest = self._latest
                    stack.callback(setattr, synchroniser, "latest", None)
            yield

    def _record(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        with _saved_under_checkpointing():
            self._latest[layer] = _mean_and_variance(inputs[0])  # type: ignore[index]

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Normalise by the recorded statistics, or by running ones if none were recorded; neither
        change."""
        with ExitStack() as stack:
            for layer in _training_layers(module):
                stack.callback(_set, layer, training=True)
                layer.training = False
                if layer not in self._latest:
                    continue
                self._applied.add(layer)
                mean, variance = self._latest[layer]
                stack.callback(
                    _set, layer, running_mean=layer.running_mean, running_var=layer.running_var
                )
                # Outside training a layer takes its running statistics for constants; the hook adds
                # their gradient.
                _set(layer, running_mean=mean.detach(), running_var=variance.detach())
                if mean.requires_grad:
                    hook = functools.partial(_connect, mean=mean, variance=variance)
                    stack.callback(layer.register_forward_pre_hook(hook).remove)
            yield


def trained_norms(tower: nn.Module) -> list[_BatchNorm]:
    """BatchNorm layers that normalise by the batch in training; frozen ones keep to their running
    statistics."""
    norms = []
    for layer in tower.modules():
        if isinstance(layer, _BatchNorm):
            # A layer without weights is frozen with its tower.
            weights = list(layer.parameters()) or list(tower.parameters())
            if any(weight.requires_grad for weight in weights):
                norms.append(layer)
    return norms


@contextmanager
def explain_single_values() -> Iterator[None]:
    """Report torch's error about a batch of one value per channel in one line."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise DualencError(TOO_SMALL) from error


def keep_frozen_statistics(tower: nn.Module) -> None:
    """Have BatchNorm layers whose weights are frozen normalise by their running statistics, which
    stay as they are."""
    trained = trained_norms(tower)
    for layer in tower.modules():
        if isinstance(layer, _BatchNorm) and layer not in trained:
            layer.eval()


def synchronise_statistics(module: nn.Module) -> None:
    """Have BatchNorm layers compute their training statistics over the batches of all processes,
    with gradient."""
    for layer in trained_norms(module):
        if _synchroniser(layer) is None:
            synchroniser = _Synchroniser(layer)
            layer.register_forward_pre_hook(synchroniser.before)
            layer.register_forward_hook(synchroniser.after, always_call=True)


def waits_for_others(module: nn.Module) -> bool:
    """Whether a layer exchanges its statistics with other processes when it trains."""
    synchronisers = map(_synchroniser, module.modules())
    return distributed.is_initialized() and any(one is not None for one in synchronisers)


class _Synchroniser:
    """Gives one layer, for a forward, mean and variance over all processes as if they were its
    running ones."""

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer = layer
        self.latest: Statistics | None = None
        self._running: tuple[Tensor | None, Tensor | None] | None = None

    def before(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        """Pre-hook: the layer normalises by the statistics of all processes."""
        layer = self.layer
        values = inputs[0]
        if not layer.training or not distributed.is_initialized():
            return None
        mean, variance, count = _gather_statistics(values)
        if layer.track_running_stats and layer.running_mean is not None:
            unbiased = variance.detach() * (count / (count - 1))
            _update_running(layer, mean.detach(), unbiased)
        if self.latest is not None:
            with _saved_under_checkpointing():
                own_mean, own_variance = _mean_and_variance(values)
                square = own_variance + (own_mean - mean.detach()).square()
                self.latest[layer] = (
                    _with_gradient(mean, own_mean),
                    _with_gradient(variance, square),
                )
        self._running = layer.running_mean, layer.running_var
        # Outside training a layer takes its running statistics for constants; the connection adds
        # their gradient.
        _set(layer, training=False, running_mean=mean.detach(), running_var=variance.detach())
        return _connect(layer, inputs, mean, variance)

    def after(self, *_: Any) -> None:
        """Hook: the layer has its running statistics back."""
        if self._running is not None:
            self.layer.running_mean, self.layer.running_var = self._running
            self.layer.training = True
            self._running = None


def _mean_and_variance(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and (biased) variance per channel of (B, channels, ...), with gradient."""
    exact = values if values.dtype == torch.float64 else values.float()
    variance, mean = torch.var_mean(exact, (0, *range(2, values.dim())), correction=0)
    return mean, variance


def _gather_statistics(values: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean, (biased) variance and number of values per channel over all processes, with
    gradient."""
    own_mean, own_variance = (statistic.double() for statistic in _mean_and_variance(values))
    own_count = values.numel() // values.shape[1]
    own_square = own_variance + own_mean.square()
    sums = torch.cat(
        [own_count * own_mean, own_count * own_square, own_mean.new_tensor([own_count])]
    )
    total = distributed.gather_with_grad(sums[None], [1] * distributed.world_size()).sum(0)
    count = int(total[-1])
    if count < 2:
        raise DualencError(TOO_SMALL)
    mean, square = (total[:-1] / count).chunk(2)
    variance = (square - mean.square()).clamp(min=0)
    dtype = torch.promote_types(values.dtype, torch.float32)
    return mean.to(dtype), variance.to(dtype), count


def _update_running(layer: Any, mean: Tensor, variance: Tensor) -> None:
    """Add a batch to running statistics; without momentum they are the plain average of all
    batches."""
    layer.num_batches_tracked.add_(1)
    share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.mul_(1 - share).add_(mean, alpha=share)
    layer.running_var.mul_(1 - share).add_(variance, alpha=share)


def _synchroniser(layer: nn.Module) -> _Synchroniser | None:
    for hook in layer._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, _Synchroniser):
            return owner
    return None


def _saved_under_checkpointing() -> saved_tensors_hooks:
    """Keep the tensors of a graph as they are: gradient checkpointing would drop them until the
    recomputation."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _with_gradient(value: Tensor, source: Tensor) -> Tensor:
    """A value with the gradient of another tensor."""
    return value.detach() + source - source.detach()


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """(channels,) to a shape that goes with (B, channels, ...)."""
    return values.view(1, -1, *(1 for _ in range(like.dim() - 2)))


def _training_layers(module: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.training]


def _set(layer: _BatchNorm, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(layer, name, value)


def _connect(
    layer: Any, inputs: tuple[Tensor, ...], mean: Tensor, variance: Tensor
) -> tuple[Tensor]:
    """The layer's input, through which the gradient of its statistics flows."""
    return (_Connection.apply(inputs[0], mean, variance, layer.eps),)  # type: ignore[no-untyped-call]


class _Connection(torch.autograd.Function):
    """Values (B, channels, ...) as they are, on their way into a layer that normalises them by mean
    and variance.

    With g the loss's gradient in x, that in μ is −Σ g, and that in σ² is −Σ g·(x − μ) / 2(σ² + ε).
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(values, mean, variance)
        ctx.eps = eps
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        # torch's `once_differentiable` lets them pass where the incoming gradient is a constant.
        if torch.is_grad_enabled():
            raise DualencError(
                "batch statistics have no second derivatives; leave create_graph out"
            )
        gradient = gradients[0]
        values, mean, variance = ctx.saved_tensors
        others = [0, *range(2, values.dim())]
        d_mean = -gradient.sum(dim=others, dtype=mean.dtype)
        centred = values - _per_channel(mean, values)
        d_variance = (gradient * centred).sum(dim=others, dtype=mean.dtype) / (
            -2 * (variance + ctx.eps)
        )
        return gradient, d_mean, d_variance, None
