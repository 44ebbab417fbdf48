"""Batch normalization across processes, and with a training batch's statistics for other items."""

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
"""Mean and biased variance of each layer's input, (channels,) each."""
TOO_SMALL = "BatchNorm needs more than one value per channel in training; raise batch_size"


class BatchStatistics:
    """Keep the statistics that BatchNorm layers computed for the latest training batch.

    Out-of-batch items are normalized with them, so that all embeddings of a step are comparable.
    The gradient flows through the statistics into this process's part of the batch.

        statistics = BatchStatistics()
        with statistics.recorded(tower):
            anchors = tower(batch)
        with statistics.applied(tower):
            negatives = tower(out_of_batch)

    Args:
        keep: record statistics; if False, out-of-batch items use the running statistics instead.
    """

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep
        self._latest: Statistics = {}
        self._applied: set[_BatchNorm] = set()

    def release(self) -> None:
        """Drop the stored activations. Call after a step's last `encode`, before `backward`."""
        for layer, (mean, variance) in self._latest.items():
            # Gradient checkpointing recomputes forward passes in the backward pass, and then
            # applies these statistics again, with the same gradient.
            if layer not in self._applied:
                self._latest[layer] = (mean.detach(), variance.detach())

    def of_batch(self, module: nn.Module, out_of_batch: bool) -> AbstractContextManager[None]:
        """Record the statistics of a training batch, or apply them to out-of-batch items.

        Args:
            module: the tower that runs in this context.
            out_of_batch: True for `applied`, False for `recorded`.
        """
        return self.applied(module) if out_of_batch else self.recorded(module)

    @contextmanager
    def recorded(self, module: nn.Module) -> Iterator[None]:
        """Record the statistics of the forward passes in this context."""
        with ExitStack() as stack:
            for layer in _training_layers(module) if self.keep else []:
                synchronizer = _synchronizer(layer) if distributed.is_initialized() else None
                if synchronizer is None:
                    stack.callback(layer.register_forward_pre_hook(self._record).remove)
                else:
                    # The synchronizer gathers these statistics anyway; a second hook would
                    # see this process's part of the batch only.
                    synchronizer.latest = self._latest
                    stack.callback(setattr, synchronizer, "latest", None)
            yield

    def _record(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Store the statistics of a layer's input; a forward pre-hook."""
        with _saved_under_checkpointing():
            self._latest[layer] = _mean_and_variance(inputs[0])  # type: ignore[index]

    @contextmanager
    def applied(self, module: nn.Module) -> Iterator[None]:
        """Normalize with the recorded statistics, else with the running ones; update neither."""
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
                # In eval mode a layer treats its running statistics as constants, so the
                # gradient is added by the hook.
                _set(layer, running_mean=mean.detach(), running_var=variance.detach())
                if mean.requires_grad:
                    hook = functools.partial(_connect, mean=mean, variance=variance)
                    stack.callback(layer.register_forward_pre_hook(hook).remove)
            yield


def trained_norms(tower: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers that use batch statistics in training: the unfrozen ones."""
    norms = []
    for layer in tower.modules():
        if isinstance(layer, _BatchNorm):
            # A layer with affine=False is frozen if its whole tower is.
            weights = list(layer.parameters()) or list(tower.parameters())
            if any(weight.requires_grad for weight in weights):
                norms.append(layer)
    return norms


@contextmanager
def explain_single_values() -> Iterator[None]:
    """Replace torch's error about a single value per channel by one line of advice."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise DualencError(TOO_SMALL) from error


def keep_frozen_statistics(tower: nn.Module) -> None:
    """Put frozen BatchNorm layers into eval mode, so they keep their running statistics."""
    trained = trained_norms(tower)
    for layer in tower.modules():
        if isinstance(layer, _BatchNorm) and layer not in trained:
            layer.eval()


def synchronize_statistics(module: nn.Module) -> None:
    """Make BatchNorm layers compute training statistics over all processes, with gradient."""
    for layer in trained_norms(module):
        # A second trainer over the same model must not register the hooks twice.
        if _synchronizer(layer) is None:
            synchronizer = _Synchronizer(layer)
            layer.register_forward_pre_hook(synchronizer.before)
            layer.register_forward_hook(synchronizer.after, always_call=True)


def waits_for_others(module: nn.Module) -> bool:
    """Return True if a layer exchanges statistics with other processes in training."""
    synchronizers = map(_synchronizer, module.modules())
    return distributed.is_initialized() and any(one is not None for one in synchronizers)


class _Synchronizer:
    """Forward hooks of one layer that give it the statistics of all processes."""

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer = layer
        self.latest: Statistics | None = None
        self._running: tuple[Tensor | None, Tensor | None] | None = None

    def before(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        """Make the layer normalize with the statistics of all processes; a forward pre-hook."""
        layer = self.layer
        values = inputs[0]
        if not layer.training or not distributed.is_initialized():
            return None
        mean, variance, count = _gather_statistics(values)
        if layer.track_running_stats and layer.running_mean is not None:
            # As in torch: running statistics hold the unbiased variance, normalization divides
            # by the biased one.
            unbiased = variance.detach() * (count / (count - 1))
            _update_running(layer, mean.detach(), unbiased)
        if self.latest is not None:
            with _saved_under_checkpointing():
                own_mean, own_variance = _mean_and_variance(values)
                # Gradients of out-of-batch items reach this process's part of the batch only,
                # so that their backward pass needs no collective. The variance of this part
                # around the global mean is own variance + (own mean − global mean)².
                square = own_variance + (own_mean - mean.detach()).square()
                self.latest[layer] = (
                    _with_gradient(mean, own_mean),
                    _with_gradient(variance, square),
                )
        self._running = layer.running_mean, layer.running_var
        # In eval mode a layer treats its running statistics as constants, so the gradient is
        # added by the connection.
        _set(layer, training=False, running_mean=mean.detach(), running_var=variance.detach())
        return _connect(layer, inputs, mean, variance)

    def after(self, *_: Any) -> None:
        """Restore the layer's running statistics; a forward hook."""
        if self._running is not None:
            self.layer.running_mean, self.layer.running_var = self._running
            self.layer.training = True
            self._running = None


def _mean_and_variance(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and biased variance per channel of (B, channels, ...), with gradient."""
    # Half precision loses the small differences that a variance is made of.
    exact = values if values.dtype == torch.float64 else values.float()
    variance, mean = torch.var_mean(exact, (0, *range(2, values.dim())), correction=0)
    return mean, variance


def _gather_statistics(values: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return mean, biased variance and count per channel over all processes, with gradient."""
    own_mean, own_variance = (statistic.double() for statistic in _mean_and_variance(values))
    # Var = E[x²] − E[x]² cancels badly in float32, hence double precision above. One collective
    # carries both sums and the count, because processes may have batches of different sizes.
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
    # Rounding can make the difference slightly negative for constant channels.
    variance = (square - mean.square()).clamp(min=0)
    dtype = torch.promote_types(values.dtype, torch.float32)
    return mean.to(dtype), variance.to(dtype), count


def _update_running(layer: Any, mean: Tensor, variance: Tensor) -> None:
    """Update the running statistics; without momentum they are the plain average of all batches."""
    layer.num_batches_tracked.add_(1)
    share = 1 / float(layer.num_batches_tracked) if layer.momentum is None else layer.momentum
    layer.running_mean.mul_(1 - share).add_(mean, alpha=share)
    layer.running_var.mul_(1 - share).add_(variance, alpha=share)


def _synchronizer(layer: nn.Module) -> _Synchronizer | None:
    """Return the synchronizer registered on a layer, or None."""
    for hook in layer._forward_pre_hooks.values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, _Synchronizer):
            return owner
    return None


def _saved_under_checkpointing() -> saved_tensors_hooks:
    """Return hooks that save tensors unchanged, overriding those of gradient checkpointing."""
    # Gradient checkpointing would drop the saved tensors until it recomputes the layer.
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _with_gradient(value: Tensor, source: Tensor) -> Tensor:
    """Return the value of one tensor with the gradient of another."""
    return value.detach() + source - source.detach()


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Reshape (channels,) to broadcast against (B, channels, ...)."""
    return values.view(1, -1, *(1 for _ in range(like.dim() - 2)))


def _training_layers(module: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers in training mode."""
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm) and layer.training]


def _set(layer: _BatchNorm, **attributes: Any) -> None:
    """Set several attributes of a layer."""
    for name, value in attributes.items():
        setattr(layer, name, value)


def _connect(
    layer: Any, inputs: tuple[Tensor, ...], mean: Tensor, variance: Tensor
) -> tuple[Tensor]:
    """Return the layer's input, connected to its statistics so that they get their gradient."""
    return (_Connection.apply(inputs[0], mean, variance, layer.eps),)  # type: ignore[no-untyped-call]


class _Connection(torch.autograd.Function):
    """Identity on (B, channels, ...) that adds the gradient of the mean and variance a layer uses.

    The layer itself computes y = (x − μ) / √(σ² + ε) with constant μ and σ². With g = ∂L/∂x at
    the layer's input, ∂L/∂μ = −Σ g and ∂L/∂σ² = −Σ g·(x − μ) / 2(σ² + ε), summed per channel.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(values, mean, variance)
        ctx.eps = eps
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        # `once_differentiable` does not raise if the incoming gradient is a constant.
        if torch.is_grad_enabled():
            raise DualencError(
                "batch statistics do not support second derivatives",
                fix="leave create_graph out",
            )
        gradient = gradients[0]
        values, mean, variance = ctx.saved_tensors
        others = [0, *range(2, values.dim())]
        d_mean = -gradient.sum(dim=others, dtype=mean.dtype)
        centered = values - _per_channel(mean, values)
        d_variance = (gradient * centered).sum(dim=others, dtype=mean.dtype) / (
            -2 * (variance + ctx.eps)
        )
        return gradient, d_mean, d_variance, None
