"""A training step: forward and backward passes of its batches, and the update of the weights."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from dualenc import distributed
from dualenc.data.pairs import PairDataset
from dualenc.encoders.batchnorm import waits_for_others
from dualenc.encoders.dual import DualEncoder
from dualenc.objectives.base import Objective, ObjectiveOutput
from dualenc.training.averages import AveragedWeights
from dualenc.training.encoding import CachedEncoding, PlainEncoding
from dualenc.training.loader import Batch, ItemEncoder
from dualenc.training.optim import build_optimizer, build_schedule, trainable_parameters
from dualenc.training.settings import TrainerSettings
from dualenc.types import Inputs, Side


class TrainStep:
    """What a step changes: weights, optimizer, schedule, and moving averages of the weights.

    Args:
        settings: of the trainer.
        accelerator: mixed precision.
        model: placed on its device.
        objective: the loss.
        pairs: the training pairs, which may bring mined negatives.
        items: encodes items outside the batch.
        total_steps: of the schedule.
        device: to compute on.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        accelerator: Accelerator,
        model: DualEncoder,
        objective: Objective,
        pairs: PairDataset,
        items: ItemEncoder,
        total_steps: int,
        device: torch.device,
    ) -> None:
        self.settings = settings
        self.accelerator = accelerator
        self.model = model
        self.objective = objective
        self.pairs = pairs
        self.items = items
        self.device = device
        modules = [model, objective]
        self.parameters = trainable_parameters(modules)
        self.gradients = distributed.GradientAverage(self.parameters)
        # Gradients can be averaged during the backward pass only where it is one pass: gradient caching makes many, and
        # layers that exchange statistics do so within one.
        self.one_backward = settings.chunk_size is None and not waits_for_others(model)
        self.optimizer = build_optimizer(
            modules,
            settings.optimizer,
            settings.learning_rate,
            settings.weight_decay,
            settings.momentum,
            settings.betas,
            settings.layer_decay,
        )
        self.schedule = build_schedule(
            self.optimizer, settings.schedule, total_steps, settings.warmup, settings.final_fraction
        )
        self.averages: AveragedWeights | None = None
        if settings.weight_average is not None:
            self.averages = AveragedWeights(model, settings.weight_average)
        self.momentum_encoder: AveragedWeights | None = None
        if objective.momentum is not None:
            self.momentum_encoder = AveragedWeights(model, objective.momentum, warm_up=False)
        self.encoding = self._new_encoding()

    def _new_encoding(self) -> PlainEncoding:
        common = (self.model, self.device, self.accelerator.autocast, self.objective.needs_encode)
        if self.settings.chunk_size is None:
            return PlainEncoding(*common, self.settings.compile)
        return CachedEncoding(*common, bool(self.settings.compile), self.settings.chunk_size)

    @property
    def learning_rate(self) -> float:
        """Of the next update, of the first group of parameters."""
        return float(self.optimizer.param_groups[0]["lr"])

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model has its averaged weights, if they are kept."""
        return nullcontext() if self.averages is None else self.averages.applied()

    def accumulate(
        self, batch: Batch, number: int, group_size: int, is_last: bool
    ) -> tuple[ObjectiveOutput, Tensor, Tensor]:
        """Forward and backward pass of one of the batches whose mean gradient makes a step.

        Args:
            batch: this rank's part of it.
            number: of the batch in the run, by which items outside it are augmented.
            group_size: batches of the step.
            is_last: whether none of them follows.

        Returns:
            What the objective gave, and the embeddings (b, D) of both sides.
        """
        # First, as it exchanges the weights, which a graph must find unchanged.
        keys = self._encode_keys(batch)
        encoding = self.encoding
        encoding.begin()
        parts: list[tuple[Side, Inputs]] = [("left", batch.left), ("right", batch.right)]
        if batch.negatives is not None:
            parts.append(("right", batch.negatives))
        left, right, *mined = encoding.encode_parts(*parts)
        output = self.objective(
            left,
            right,
            batch.left_id.to(self.device),
            batch.right_id.to(self.device),
            self.items.bind(encoding, number),
            negatives=None if batch.negatives is None else mined[0],
            **batch.arguments(self.device, self.objective.needs_teacher),
            **keys,
        )
        # Only the last of the batches completes the gradients, which may then be sent while they are computed.
        if self.one_backward and is_last:
            self.gradients.expect()
        # Each batch has a share of the mean; the loss that is logged is not divided.
        loss = output.loss / group_size
        scaler = self.accelerator.scaler
        encoding.backward(loss if scaler is None else scaler.scale(loss))
        return output, left, right

    def _encode_keys(self, batch: Batch) -> dict[str, Tensor]:
        """The momentum encoder's embeddings of the batch, as arguments of the objective; none without such an encoder.

        Running statistics of BatchNorm, which the pass would change, are exchanged with the weights.
        """
        if self.momentum_encoder is None:
            return {}
        self.encoding.begin()
        with torch.no_grad(), self.momentum_encoder.applied():
            left, right = self.encoding.encode_parts(("left", batch.left), ("right", batch.right))
        return {"keys_left": left, "keys_right": right}

    def update(self) -> Tensor | None:
        """Average, clip and apply the gradients; returns their norm if they are clipped."""
        scaler = self.accelerator.scaler
        norm = None
        # Averaged before unscaling: an overflow on one rank is then an overflow on all, and all skip the step.
        self.gradients.finish()
        if scaler is not None:
            scaler.unscale_(self.optimizer)
        if self.settings.max_gradient_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.max_gradient_norm)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
            scaler.update()
        # A step that the scaler skips, for an overflow, still advances the schedule, so that it ends on time.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step.*")
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.averages is not None:
            self.averages.update()
        if self.momentum_encoder is not None:
            self.momentum_encoder.update()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, schedule and averages; all ranks call it together."""
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
        }
        if self.averages is not None:
            state["averages"] = self.averages.state_dict()
        if self.momentum_encoder is not None:
            state["momentum_encoder"] = self.momentum_encoder.state_dict()
        scaler = self.accelerator.scaler
        state["scaler"] = None if scaler is None else scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`, whatever the number of processes was then."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.averages is not None:
            self.averages.load_state_dict(state["averages"])
        self.schedule.load_state_dict(state["schedule"])
        if self.momentum_encoder is not None:
            self.momentum_encoder.load_state_dict(state["momentum_encoder"])
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
