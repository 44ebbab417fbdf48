"""A training step: forward and backward passes, and the update of the weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from dualenc import distributed
from dualenc.data.pairs import PairDataset
from dualenc.encoders.dual import DualEncoder
from dualenc.io.cpus import usable_workers
from dualenc.objectives.base import Objective, ObjectiveOutput
from dualenc.training.averages import AveragedWeights, trained_state
from dualenc.training.encoding import CachedEncoding, PlainEncoding
from dualenc.training.extra_items import ItemEncoder
from dualenc.training.loader import LoadedBatch
from dualenc.training.optim import (
    build_optimizer,
    build_schedule,
    clip_gradients,
    trainable_parameters,
)
from dualenc.training.settings import TrainerSettings
from dualenc.types import Inputs, Side


class TrainStep:
    """Everything that a step changes: weights, optimizer, schedule, and weight averages.

    A step calls `accumulate` for each of its batches, and then `update`.

    Args:
        settings: settings of the run.
        accelerator: accelerator with the precision of the run.
        model: the model in training.
        objective: the objective; its parameters are trained, too.
        pairs: the training pairs.
        total_steps: number of steps, for the schedule.
        device: device of this rank.
    """

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
        # For float16, where small gradients would underflow to 0 without scaling. Otherwise None.
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
        # By the names in a checkpoint: the average that is evaluated and saved, and the momentum
        # encoder. The latter must not warm up, as its decay is part of the objective.
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
            num_workers=usable_workers(settings.num_workers),
            on_error=settings.on_error,
        )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update, for the first group of parameters."""
        return float(self.optimizer.param_groups[0]["lr"])

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has its averaged weights, if they are enabled."""
        if "averages" in self.averages:
            return self.averages["averages"].applied()
        return nullcontext()

    def accumulate(
        self, batch: LoadedBatch, number: int, group_size: int
    ) -> tuple[ObjectiveOutput, Tensor, Tensor]:
        """Run the forward and backward pass of a batch, and add its gradient to that of the step.

        Args:
            batch: this rank's part of the batch.
            number: number of the batch in the run, for the augmentation of items outside it.
            group_size: number of batches in the step.

        Returns:
            The output of the objective, and the embeddings (b, D) of both sides.
        """
        # Before any graph is built: the momentum encoder swaps the weights in place.
        keys = self._encode_keys(batch)
        encoding = self.encoding
        encoding.begin()
        self.items.begin(number)
        parts: list[tuple[Side, Inputs]] = [("left", batch.left), ("right", batch.right)]
        if batch.negatives:
            parts.append(("right", batch.negatives))
        left, right, *mined = encoding.encode_parts(*parts)
        negatives = mined[0] if mined else None
        ids = batch.pairs.to(self.device)
        pairs = replace(ids, left=left, right=right, negatives=negatives, **keys)
        # Called as a module, so that forward hooks run and overrides of `forward` count.
        output = self.objective(**vars(pairs), encode=self.items)
        # The step uses the mean gradient of its batches. The logged loss is not divided.
        loss = output.loss / group_size
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        encoding.backward(loss)
        return output, left, right

    def _encode_keys(self, batch: LoadedBatch) -> dict[str, Tensor]:
        """Return the momentum encoder's embeddings of a batch; {} without such an encoder."""
        if "momentum_encoder" not in self.averages:
            return {}
        self.encoding.begin()
        # The pass updates BatchNorm's running statistics, but those are swapped like the weights.
        with torch.no_grad(), self.averages["momentum_encoder"].applied():
            left, right = self.encoding.encode_parts(("left", batch.left), ("right", batch.right))
        return {"keys_left": left, "keys_right": right}

    def update(self) -> Tensor | None:
        """Average gradients over ranks, clip and apply them. Returns their norm, if clipped."""
        norm = None
        distributed.average_gradients(self.parameters)
        # Unscaled after averaging, so that an overflow on one rank makes all ranks skip the step.
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.settings.max_gradient_norm is not None:
            norm = clip_gradients(self.parameters, self.settings.max_gradient_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        # Also after a skipped step, so that the schedule depends only on the number of steps.
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
        """Return trained weights, optimizer, schedule and averages. All ranks call it together."""
        state = {name: part.state_dict() for name, part in self._stateful().items()}
        return state | {"model": trained_state(self.model)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`, on any number of processes."""
        # Frozen weights are not in a checkpoint: the model has them, and the fingerprint of the run
        # guarantees that they are the same.
        self.model.load_state_dict(self.model.state_dict() | state["model"])
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])
