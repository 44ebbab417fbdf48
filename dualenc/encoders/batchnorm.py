"""Batch normalisation: synchronised over processes, and of out-of-batch items by a training batch's statistics."""

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


class BatchStatistics:
    """The mean and variance by which BatchNorm layers normalised the latest training batch, with their gradient.

    Out-of-batch items (chain states, cached items) are compared with the batch's items. By running statistics, or by
    statistics of their own, they would be embedded by another function than the batch, and a model would learn to
    distinguish the two functions instead of the items. The gradient goes through the statistics into the batch:
    otherwise a shift of all out-of-batch items would seem to lower the loss, until the next batch is normalised.

    Recording costs no pass over the batch: a layer stores the statistics that it computes anyway. The activations that
    their gradient needs are held until `release`.

    Under a synchronised BatchNorm the statistics are those of all processes; their gradient reaches this process's
    part of the batch, as if the other processes' out-of-batch items were like its own.

    Args:
        keep: record at all; without, running statistics stand in.
    """

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep
        self._latest: dict[_BatchNorm, _Recorded] = {}

    def release(self) -> None:
        """Drop the stored activations. Call after a step's last `encode`, before `backward`."""
        for recorded in self._latest.values():
            recorded.values = None

    def of_batch(self, module: nn.Module, out_of_batch: bool) -> AbstractContextManager[None]:
        """`recorded` for a forward of the training batch, `applied` for one of out-of-batch items."""
        return self.applied(module) if out_of_batch else self.recorded(module)

    @contextmanager
    def recorded(self, module: nn.Module) -> Iterator[None]:
        """Record the statistics of forwards in this context."""
        with ExitStack() as stack:
            for layer in _training_layers(module) if self.keep else []:
                synchroniser = _synchroniser(layer) if distributed.is_initialized() else None
                if synchroniser is None:
                    stack.enter_context(_recording(layer, self._latest))
                else:
                    synchroniser.latest = self._latest
                    stack.callback(setattr, synchroniser, "latest", None)
            yield

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Normalise by the recorded statistics, or by running ones if none were recorded.

        Running statistics do not change, and an item's result does not depend on other items. Other layers, dropout
        included, keep their mode.
        """
        with ExitStack() as stack:
            for layer in _training_layers(module):
                stack.callback(_set, layer, training=True)
                layer.training = False
                if layer not in self._latest:
                    continue
                mean, variance = self._latest[layer].statistics()
                stack.callback(_set, layer, running_mean=layer.running_mean, running_var=layer.running_var)
                # Outside training a layer takes its running statistics for constants; the hook adds their gradient.
                layer.running_mean = mean.detach()
                layer.running_var = variance.detach()
                if mean.requires_grad:
                    hook = functools.partial(_connect, mean=mean, variance=variance)
                    stack.callback(layer.register_forward_pre_hook(hook).remove)
            yield


def synchronise_statistics(module: nn.Module) -> None:
    """Have BatchNorm layers compute their training statistics over the batches of all processes, with gradient.

    On any backend, where `torch.nn.SyncBatchNorm` works on GPUs alone. Every process must encode something whenever
    one does. With one process, and in evaluation mode, layers work as they always do.

    Args:
        module: a network; layers that are synchronised already stay as they are.
    """
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm) and _synchroniser(layer) is None:
            synchroniser = _Synchroniser(layer)
            layer.register_forward_pre_hook(synchroniser.before)
            layer.register_forward_hook(synchroniser.after, always_call=True)


def waits_for_others(module: nn.Module) -> bool:
    """Whether a layer exchanges its statistics with other processes when it trains."""
    return distributed.is_initialized() and any(
        isinstance(layer, nn.SyncBatchNorm) or _synchroniser(layer) is not None for layer in module.modules()
    )


class _Synchroniser:
    """Gives one layer, for a forward, mean and variance over all processes as if they were its running ones."""

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer = layer
        self.latest: dict[_BatchNorm, _Recorded] | None = None
        self._running: tuple[Tensor | None, Tensor | None] | None = None

    def before(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        """Pre-hook: the layer normalises by the statistics of all processes."""
        layer = self.layer
        values = inputs[0]
        if not layer.training or not distributed.is_initialized():
            return None
        mean, variance, count = _gather_statistics(values)
        like = layer.weight if layer.running_mean is None else layer.running_mean
        dtype = values.dtype if like is None else like.dtype
        mean = mean.to(dtype)
        variance = variance.to(dtype)
        if layer.track_running_stats and layer.running_mean is not None and layer.running_var is not None:
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked.add_(1)
            unbiased = variance.detach() * (count / (count - 1))
            _update_running(layer, layer.running_mean, layer.running_var, mean.detach(), unbiased)
        if self.latest is not None:
            own_count = values.numel() // values.shape[1]
            self.latest[layer] = _Recorded(values, mean.detach(), variance.detach(), own_count)
        self._running = layer.running_mean, layer.running_var
        # Outside training a layer takes its running statistics for constants; the connection adds their gradient.
        layer.training = False
        _set(layer, running_mean=mean.detach(), running_var=variance.detach())
        return _connect(layer, inputs, mean, variance)

    def after(self, *_: Any) -> None:
        """Hook: the layer has its running statistics back."""
        if self._running is not None:
            self.layer.running_mean, self.layer.running_var = self._running
            self.layer.training = True
            self._running = None


def _gather_statistics(values: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean, (biased) variance and number of values per channel over all processes, with gradient."""
    own = values if values.dtype in (torch.float32, torch.float64) else values.float()
    own_variance, own_mean = torch.var_mean(own, (0, *range(2, values.dim())), correction=0)
    # Sums and squares are added up in float64.
    own_variance = own_variance.double()
    own_mean = own_mean.double()
    own_count = values.numel() // values.shape[1]
    own_square = own_variance + own_mean.square()
    sums = torch.cat([own_count * own_mean, own_count * own_square, own_mean.new_tensor([own_count])])
    total = distributed.gather_with_grad(sums[None], [1] * distributed.world_size()).sum(0)
    count = int(total[-1])
    if count < 2:
        raise DualencError("BatchNorm needs more than one value per channel in training; make batch_size larger")
    mean, square = (total[:-1] / count).chunk(2)
    return mean, (square - mean.square()).clamp(min=0), count


def _update_running(layer: _BatchNorm, mean: Tensor, variance: Tensor, new_mean: Tensor, new_variance: Tensor) -> None:
    """Count a batch in running statistics; without momentum they are the plain average of all batches."""
    share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum  # type: ignore[arg-type]
    mean.mul_(1 - share).add_(new_mean, alpha=share)
    variance.mul_(1 - share).add_(new_variance, alpha=share)


def _synchroniser(layer: nn.Module) -> _Synchroniser | None:
    owners = (getattr(hook, "__self__", None) for hook in layer._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, _Synchroniser)), None)


class _Recorded:
    """The mean and (biased) variance of one layer's inputs (B, channels, ...), of `count` values per channel."""

    def __init__(self, values: Tensor, mean: Tensor, variance: Tensor, count: int) -> None:
        # Without a graph there is no backward pass, and no reason to keep a batch's activations.
        self.values = values if torch.is_grad_enabled() and values.requires_grad else None
        self.mean = mean
        self.variance = variance
        self.count = count
        self._with_gradient: tuple[Tensor, Tensor] | None = None

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and variance; where a graph is built, with their gradient."""
        if self.values is not None and self._with_gradient is None and torch.is_grad_enabled():
            # Under gradient checkpointing these tensors would be dropped until the recomputation.
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                self._with_gradient = _Statistics.apply(  # type: ignore[no-untyped-call]
                    self.values, self.mean, self.variance, self.count
                )
        if self._with_gradient is None or not torch.is_grad_enabled():
            return self.mean, self.variance
        return self._with_gradient


@contextmanager
def _recording(layer: _BatchNorm, latest: dict[_BatchNorm, _Recorded]) -> Iterator[None]:
    """Has one layer write its batch's statistics: for a forward, its running ones are blank and their momentum is 1."""
    names = ("running_mean", "running_var", "momentum", "track_running_stats", "num_batches_tracked")
    kept = {name: getattr(layer, name) for name in names}
    own_mean = kept["running_mean"]
    own_variance = kept["running_var"]
    batches = kept["num_batches_tracked"]

    def before(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        channels = inputs[0].shape[1]
        device = inputs[0].device
        like = layer.weight if own_mean is None else own_mean
        blank = torch.zeros(2, channels, dtype=inputs[0].dtype if like is None else like.dtype, device=device)
        counter = torch.zeros((), dtype=torch.long, device=device) if batches is None else batches
        _set(layer, running_mean=blank[0], running_var=blank[1], num_batches_tracked=counter)
        _set(layer, momentum=1.0, track_running_stats=True)

    def after(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        mean = layer.running_mean
        variance = layer.running_var
        assert mean is not None
        assert variance is not None
        _set(layer, **kept)
        if own_mean is not None:
            _update_running(layer, own_mean, own_variance, mean, variance)
        values: Tensor = inputs[0]
        count = values.numel() // values.shape[1]
        counted = count * distributed.world_size() if isinstance(layer, nn.SyncBatchNorm) else count
        biased = variance * ((counted - 1) / counted)  # running variances are unbiased, the layer divided by this one
        latest[layer] = _Recorded(values, mean, biased, count)

    hooks = layer.register_forward_pre_hook(before), layer.register_forward_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _set(layer, **kept)


class _Statistics(torch.autograd.Function):
    """Known mean and variance of known values: nothing is computed before a gradient comes back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mean: Tensor, variance: Tensor, count: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(values, mean)
        ctx.count = count
        return mean.clone(), variance.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        _refuse_second_derivatives()
        values, mean = ctx.saved_tensors
        d_mean, d_variance = (_per_channel(gradient / ctx.count, values) for gradient in gradients)
        centred = values - _per_channel(mean, values)
        return torch.addcmul(d_mean, centred, d_variance, value=2).to(values.dtype), None, None, None


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """(channels,) to a shape that goes with (B, channels, ...)."""
    return values.view(1, -1, *(1 for _ in range(like.dim() - 2)))


def _training_layers(module: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.training]


def _set(layer: _BatchNorm, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(layer, name, value)


def _connect(layer: Any, inputs: tuple[Tensor, ...], mean: Tensor, variance: Tensor) -> tuple[Tensor]:
    """The layer's input, through which the gradient of its statistics flows."""
    return (_Connection.apply(inputs[0], mean, variance, layer.eps),)  # type: ignore[no-untyped-call]


class _Connection(torch.autograd.Function):
    """Values (B, channels, ...) as they are, on their way into a layer that normalises them by mean and variance.

    The layer's result depends on (x − μ)/√(σ² + ε) alone. So with g the loss's gradient in x, that in μ is −Σ g, and
    that in σ² is −Σ g·(x − μ) / 2(σ² + ε).
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(values, mean, variance)
        ctx.eps = eps
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        _refuse_second_derivatives()
        (gradient,), (values, mean, variance) = gradients, ctx.saved_tensors
        others = [0, *range(2, values.dim())]
        d_mean = -gradient.sum(dim=others, dtype=mean.dtype)
        centred = values - _per_channel(mean, values)
        d_variance = (gradient * centred).sum(dim=others, dtype=mean.dtype) / (-2 * (variance + ctx.eps))
        return gradient, d_mean, d_variance, None


def _refuse_second_derivatives() -> None:
    # torch's `once_differentiable` lets them pass where the incoming gradient is a constant.
    if torch.is_grad_enabled():
        raise DualencError("batch statistics have no second derivatives; call backward without create_graph")
