"""One global batch's forwards and the backward pass, whole: the plain way. `gradient_cache` has the other way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from dualenc.encoders.batchnorm import BatchStatistics, waits_for_others
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import DualencError
from dualenc.training.inputs import Inputs
from dualenc.training.loader import Side

Autocast = Callable[[], AbstractContextManager[None]]


class Encoding(Protocol):
    """The forwards of one step, and how a loss on their results reaches the weights."""

    def encode(self, side: Side, inputs: Inputs, beside: bool = False) -> Tensor:
        """Encode n prepared items to (n, D); under `torch.no_grad()` without a graph.

        Args:
            side: which tower.
            inputs: the tower's inputs, on any device, first dimension n; {} for no item.
            beside: they are no part of the batch: BatchNorm takes the batch's statistics, and counts them nowhere.
        """
        ...

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of everything that was encoded with a graph."""
        ...


class PlainEncoding:
    """One forward per call, one backward: memory grows with the batch.

    Args:
        model: the two towers.
        device: where they are.
        autocast: a new mixed precision context per call.
        keep_statistics: the objective will ask for items beside the batch.
    """

    def __init__(
        self,
        model: DualEncoder,
        device: torch.device,
        autocast: Autocast = nullcontext,
        keep_statistics: bool = True,
    ) -> None:
        self.model, self.device, self.autocast = model, device, autocast
        self.statistics = BatchStatistics(keep=keep_statistics)

    def encode(self, side: Side, inputs: Inputs, beside: bool = False) -> Tensor:
        if not inputs:
            if self.model.training and not beside and waits_for_others(self.model):
                raise DualencError(
                    "this process has no sample of a batch, and BatchNorm over all processes needs one on each; make "
                    "batch_size larger or mend the samples that cannot be read"
                )
            return no_rows(self.model)
        with self.statistics.of_batch(self.model.tower(side), beside), self.autocast():
            return self.model.encode(side, to_device(inputs, self.device))

    def backward(self, loss: Tensor) -> None:
        self.statistics.release()
        loss.backward()


def no_rows(model: DualEncoder) -> Tensor:
    """(0, D) with gradient: a rank without items still takes part in the collectives of the backward pass."""
    weight = next(model.parameters())
    return torch.zeros(0, model.dim, dtype=weight.dtype, device=weight.device, requires_grad=torch.is_grad_enabled())


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    """The same tensors on a device; page-locked ones are copied while the device works on."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
