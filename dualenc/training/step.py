"""One optimizer step: forwards, objective, backward, averaging over ranks, clipping, update."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dualenc import distributed
from dualenc.encoders.dual import DualEncoder
from dualenc.objectives.base import Objective, ObjectiveOutput
from dualenc.training.encoding import CachedEncoding, Encoding, PlainEncoding
from dualenc.training.loader import Batch, ItemEncoder
from dualenc.training.optim import trainable_parameters
from dualenc.training.signals import StopSignals

Observe = Callable[[Tensor, Tensor, Tensor], None]


class Step:
    """Updates a model and its objective from one or more global batches.

    Args:
        model: the two towers, on the accelerator's device.
        objective: the loss, on the same device.
        optimizer: over the parameters of both.
        schedule: of its learning rate.
        items: encodes what the objective asks for by id.
        accelerator: device, mixed precision and gradient scaler.
        chunk_size: items encoded at once, with gradient caching; None encodes a whole batch at once.
        max_gradient_norm: gradients are scaled down to this norm; None leaves them.
        signals: what a scheduler has sent; every step agrees on it with the other ranks.
    """

    def __init__(
        self,
        model: DualEncoder,
        objective: Objective,
        optimizer: Optimizer,
        schedule: LambdaLR,
        items: ItemEncoder,
        accelerator: Accelerator,
        *,
        chunk_size: int | None = None,
        max_gradient_norm: float | None = None,
        signals: StopSignals | None = None,
    ) -> None:
        self.model, self.objective, self.items = model, objective, items
        self.optimizer, self.schedule, self.accelerator = optimizer, schedule, accelerator
        self.chunk_size, self.max_gradient_norm = chunk_size, max_gradient_norm
        self.signals = signals or StopSignals()
        self.device = torch.device(accelerator.device.type, accelerator.device.index)
        self.parameters = trainable_parameters([model, objective])

    def __call__(
        self, batches: list[Batch], number: int, observe: Observe, with_metrics: bool = True
    ) -> dict[str, Tensor | float]:
        """Accumulate the mean gradient over some global batches, and update.

        Args:
            batches: this rank's parts of the batches.
            number: how many batches the run has had before these; seeds what objectives ask for.
            observe: gets the pair indices (b,) and embeddings (b, D), (b, D) of each batch.
            with_metrics: have the objective compute its metrics, which costs a look at all similarities.

        Returns:
            Scalars to log: this rank's loss, the objective's metrics if wanted, gradient_norm when clipped,
            items_encoded, so that its mean over ranks is their sum, for objectives that ask for items.
        """
        encoded_before = self.items.num_encoded
        outputs = [self._accumulate(b, number + n, 1 / len(batches), observe) for n, b in enumerate(batches)]
        values: dict[str, Tensor | float] = {}
        if with_metrics:
            values = {k: torch.stack([out.metrics[k] for out in outputs]).mean() for k in outputs[0].metrics}
        values["loss"] = torch.stack([out.loss.detach() for out in outputs]).mean()
        if self.objective.needs_encode:
            values["items_encoded"] = float(self.items.num_encoded - encoded_before) * distributed.world_size()
        return {**values, **self._update()}

    def compute(self, encoding: Encoding, batch: Batch, number: int) -> tuple[ObjectiveOutput, Tensor, Tensor]:
        """The objective's output on one batch, and the embeddings (b, D), (b, D) of its pairs."""
        left, right = encoding.encode("left", batch.left), encoding.encode("right", batch.right)
        negatives = None if batch.negatives is None else encoding.encode("right", batch.negatives)
        out = self.objective(
            left,
            right,
            batch.left_id.to(self.device),
            batch.right_id.to(self.device),
            self.items.bind(encoding, number),
            left_positives=_moved(batch.left_positives, self.device),
            right_positives=_moved(batch.right_positives, self.device),
            negatives=negatives,
            negative_id=_moved(batch.negative_id, self.device),
        )
        return out, left, right

    def _accumulate(self, batch: Batch, number: int, share: float, observe: Observe) -> ObjectiveOutput:
        encoding = self._encoding()
        out, left, right = self.compute(encoding, batch, number)
        loss = out.loss * share
        encoding.backward(loss if self.accelerator.scaler is None else self.accelerator.scaler.scale(loss))
        observe(batch.indices, left, right)
        return out

    def _encoding(self) -> Encoding:
        common = self.model, self.device, self.accelerator.autocast
        keep = self.objective.needs_encode
        if self.chunk_size is None:
            return PlainEncoding(*common, keep_statistics=keep)
        return CachedEncoding(*common, self.chunk_size, keep_statistics=keep)

    def _update(self) -> dict[str, Tensor | float]:
        # Averaged before unscaling: an overflow on one rank is then an overflow on all, and all skip the step.
        self.signals.agreed = distributed.average_gradients(self.parameters, number=self.signals.noted)
        scaler = self.accelerator.scaler
        values: dict[str, Tensor | float] = {}
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        if self.max_gradient_norm is not None:
            values["gradient_norm"] = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_gradient_norm)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        with warnings.catch_warnings():  # a step skipped by the scaler still advances the schedule
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return values


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device, non_blocking=True)
