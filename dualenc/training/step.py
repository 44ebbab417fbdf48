"""A training step: forward and backward passes of its batches, and the update of the weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from dualenc import distributed
from dualenc.data.pairs import PairDataset
from dualenc.encoders.dual import DualEncoder
from dualenc.objectives.base import Objective, ObjectiveOutput
from dualenc.training.averages import AveragedWeights, trained_state
from dualenc.training.encoding import CachedEncoding, PlainEncoding
from dualenc.training.extra_items import ItemEncoder
from dualenc.training.loader import Batch
from dualenc.training.optim import (
    build_optimizer,
    build_schedule,
    clip_gradients,
    trainable_parameters,
)
from dualenc.training.settings import TrainerSettings
from dualenc.types import Inputs, Side


class TrainStep:
    """What a step changes: weights, optimizer, schedule, and moving averages of the weights."""

    def __init__(
        self,
        settings: TrainerSettings,
        accelerator: Accelerator,
        model: DualEncoder,
        objective: Objective,
        pairs: PairDataset,
        total_steps: int,
        device: torch.device,
    ) -> None:
        self.settings = settings
        self.model = model
        self.objective = objective
        self.device = device
        # Of float16, whose small gradients would be 0 without it.
        self.scaler = accelerator.scaler
        modules = [model, objective]
        self.parameters = trainable_parameters(modules)
        self.optimizer = build_optimizer(
            modules,
            settings.optimizer,
            settings.learning_rate,
            settings.weight_decay,
            settings.momentum,
        )
        self.schedule = build_schedule(
            self.optimizer, settings.schedule, total_steps, settings.warmup
        )
        # The average that is evaluated and saved, and the momentum encoder, by their names in a
        # checkpoint.
        self.averages: dict[str, AveragedWeights] = {}
        if settings.weight_average is not None:
            self.averages["averages"] = AveragedWeights(model, settings.weight_average)
        if objective.momentum is not None:
            self.averages["momentum_encoder"] = AveragedWeights(
                model, objective.momentum, warm_up=False
            )
        common = (model, device, accelerator.autocast, objective.needs_encode, settings.compile)
        if settings.chunk_size is None:
            self.encoding = PlainEncoding(*common)
        else:
            self.encoding = CachedEncoding(*common, chunk_size=settings.chunk_size)
        self.items = ItemEncoder(
            model,
            pairs,
            self.encoding,
            seed=settings.seed,
            num_workers=settings.num_workers,
            on_error=settings.on_error,
        )

    @property
    def learning_rate(self) -> float:
        """Of the next update, of the first group of parameters."""
        return float(self.optimizer.param_groups[0]["lr"])

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the model has its averaged weights, if the settings ask for them."""
        return self.averages["averages"].applied() if "averages" in self.averages else nullcontext()

    def accumulate(
        self, batch: Batch, number: int, group_size: int
    ) -> tuple[ObjectiveOutput, Tensor, Tensor]:
        """Forward and backward pass of one of the batches whose mean gradient makes a step.

        Args:
            batch: this rank's part of it.
            number: of the batch in the run, by which items outside it are augmented.
            group_size: batches of the step.

        Returns:
            The output of the objective, and the embeddings (b, D) of both sides.
        """
        # First, as it exchanges the weights, which a graph must find unchanged.
        keys = self._encode_keys(batch)
        encoding = self.encoding
        encoding.begin()
        self.items.begin(number)
        parts: list[tuple[Side, Inputs]] = [("left", batch.left), ("right", batch.right)]
        if batch.negatives is not None:
            parts.append(("right", batch.negatives))
        left, right, *mined = encoding.encode_parts(*parts)
        output = self.objective(
            left,
            right,
            encode=self.items,
            negatives=mined[0] if mined else None,
            **batch.arguments(self.device),
            **keys,
        )
        # Each batch has a share of the mean; the loss that is logged is not divided.
        loss = output.loss / group_size
        encoding.backward(loss if self.scaler is None else self.scaler.scale(loss))
        return output, left, right

    def _encode_keys(self, batch: Batch) -> dict[str, Tensor]:
        """The momentum encoder's embeddings of the batch, as arguments of the objective; {} without
        such an encoder."""
        if "momentum_encoder" not in self.averages:
            return {}
        self.encoding.begin()
        # Running statistics of BatchNorm, which the pass would change, are exchanged with the
        # weights.
        with torch.no_grad(), self.averages["momentum_encoder"].applied():
            left, right = self.encoding.encode_parts(("left", batch.left), ("right", batch.right))
        return {"keys_left": left, "keys_right": right}

    def update(self) -> Tensor | None:
        """Average, clip and apply the gradients; returns their norm if they are clipped."""
        norm = None
        distributed.average_gradients(self.parameters)
        # Averaged before: an overflow on one rank is then an overflow on all, and all skip the
        # step.
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.settings.max_gradient_norm is not None:
            norm = clip_gradients(self.parameters, self.settings.max_gradient_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        for average in self.averages.values():
            average.update()
        return norm

    def _stateful(self) -> dict[str, Any]:
        parts = {"optimizer": self.optimizer, "schedule": self.schedule}
        if self.scaler is not None:
            parts["scaler"] = self.scaler
        return {**parts, **self.averages}

    def state_dict(self) -> dict[str, Any]:
        """Weights but frozen ones, optimizer, schedule and averages; all ranks call it together."""
        state = {name: part.state_dict() for name, part in self._stateful().items()}
        return state | {"model": trained_state(self.model)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`, whatever the number of processes was then."""
        # Frozen weights are those that the model has; the fingerprint of a run compares them.
        self.model.load_state_dict(self.model.state_dict() | state["model"])
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])
