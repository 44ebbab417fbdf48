"""Objectives in open_clip's training (3.3: `open_clip_train.train.train_one_epoch` and `open_clip_train.main`).

Its loops hand images and texts to the model, and features to the loss. `with_ids` keeps the ids of the pairs beside:

    data["train"] = with_ids(data["train"])
    loss = GlobalClipLoss(SogCLR(**data["train"].sizes, temperature=0.05), data["train"], model)
    train_one_epoch(model, data, loss, ...)

`main` is open_clip's program with such a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.files import atomic_path
from dualenc.integrations.open_clip_data import IndexedData, with_ids
from dualenc.objectives.base import Objective
from dualenc.objectives.checks import refuse_momentum

__all__ = ["GlobalClipLoss", "IndexedData", "load_state", "main", "save_state", "state_path", "with_ids"]


class GlobalClipLoss(nn.Module):
    """An objective in the place of `open_clip.ClipLoss`; gathers from all ranks itself.

    τ is the objective's. The model's `logit_scale` is set to log 1/τ at the start and has a gradient of zero, so that
    DistributedDataParallel sees it used, and it does not change. With accum_freq > 1 the objective works on all
    accumulated batches at once; its memory is updated once.

    Args:
        objective: of `data.sizes`; images are left, texts right.
        data: see `with_ids`.
        model: the CLIP model, as `train_one_epoch` gets it.
        epochs: of the whole training, for objectives with schedules.
    """

    seen: Tensor

    def __init__(self, objective: Objective, data: IndexedData, model: nn.Module, epochs: int | None = None) -> None:
        super().__init__()
        refuse_momentum(objective)
        sizes = tuple(data.sizes.values())
        if objective.num_left is not None and (objective.num_left, objective.num_right) != sizes:
            raise DualencError(
                f"{objective.name} has num_left, num_right = {objective.num_left}, {objective.num_right}, but the data "
                f"{sizes[0]}, {sizes[1]}; build it with **data.sizes"
            )
        self.objective = objective
        self.data = data
        self.epochs = epochs
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))  # pairs, over all ranks
        self._encode = data.encoder(model)
        self._replay: list[tuple[Tensor, Tensor]] = []  # of accumulated batches: gradients, once for each further call
        pairs = data.pairs
        counts = (np.bincount(pairs.left_id, minlength=sizes[0]), np.bincount(pairs.right_id, minlength=sizes[1]))
        objective.set_counts(*map(torch.from_numpy, counts))
        clip: Any = getattr(model, "module", model)
        with torch.no_grad():
            clip.logit_scale.fill_(-math.log(objective.temperature.item()))

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | None = None,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        **others: Any,
    ) -> Any:
        """{"contrastive_loss": loss}, or the loss; arguments as of `open_clip.ClipLoss`."""
        if others:
            raise DualencError(f"GlobalClipLoss has no term for {', '.join(others)}; take a model of class CLIP")
        features = [normalize(side.float(), dim=-1) for side in (image_features, text_features)]
        loss = self._surrogate(features) if self._replay else self._global_loss(features)
        for unused in (logit_scale, logit_bias):
            if unused is not None:
                loss = loss + 0.0 * unused.sum()
        return {"contrastive_loss": loss} if output_dict else loss

    def _global_loss(self, features: list[Tensor]) -> Tensor:
        """The objective on all batches since the last call; of accumulated ones, keep the gradients of the features."""
        batches = self.data.take_rows()
        rows = torch.cat(batches).cpu().numpy() if batches else np.zeros(0, dtype=np.int64)
        if len(rows) != len(features[0]):
            raise DualencError(
                f"GlobalClipLoss: {len(features[0])} pairs but ids of {len(rows)}; train on the loader of with_ids, "
                "and call the loss on all that it gives, in training only"
            )
        if self.epochs is not None:
            self.objective.set_progress(float(self.seen) / (self.epochs * self.data.num_samples))
        self.seen += len(rows) * distributed.world_size()
        pairs = self.data.pairs
        ids = [pairs.left_id[rows], pairs.right_id[rows]]
        numbers = [*ids, pairs.positives("left", ids[0]), pairs.positives("right", ids[1])]
        left_id, right_id, *positives = (torch.from_numpy(value).to(features[0].device) for value in numbers)
        offsets = [torch.zeros_like(side, requires_grad=True) for side in features]
        if len(batches) > 1:
            features = [side + offset for side, offset in zip(features, offsets, strict=True)]
        out = self.objective(
            *features, left_id, right_id, self._encode, left_positives=positives[0], right_positives=positives[1]
        )
        loss: Tensor = out.loss
        if len(batches) > 1:
            # Further calls bring the same batches, each with another one's graph (Gao et al. 2021, arXiv:2101.06983).
            gradients = torch.autograd.grad(loss, offsets, retain_graph=True)
            self._replay = [(gradients[0], gradients[1])] * (len(batches) - 1)
            self._value = loss.detach()
        return loss

    def _surrogate(self, features: list[Tensor]) -> Tensor:
        """A scalar of the value of the last loss, whose gradient is that with respect to `features`."""
        products = [(side * gradient).sum() for side, gradient in zip(features, self._replay.pop(), strict=True)]
        product = products[0] + products[1]
        return product - product.detach() + self._value


def state_path(checkpoint: str | Path) -> Path:
    """Where the state of the loss lies: beside open_clip's own checkpoint, which holds the model and the optimizer."""
    # open_clip takes the last *.pt for the latest checkpoint.
    return Path(f"{checkpoint}.objective")


def save_state(loss: GlobalClipLoss, checkpoint: str | Path) -> None:
    """Write the state of the loss beside a checkpoint of open_clip (`epoch_3.pt`); the main process does."""
    if distributed.is_main():
        with atomic_path(state_path(checkpoint)) as part:
            torch.save({"objective": loss.objective.state_dict(), "seen": loss.seen}, part)


def load_state(loss: GlobalClipLoss, checkpoint: str | Path) -> None:
    """Read what `save_state` wrote; every process does.

    Raises:
        DualencError: there is none, or it is of another objective.
    """
    path = state_path(checkpoint)
    if not path.is_file():
        raise DualencError(f"{path}: no such file; resume from an epoch with one, or start over with --pretrained")
    state = torch.load(path, map_location="cpu", weights_only=True)
    loss.objective.load_state_dict(state["objective"])
    loss.seen.copy_(state["seen"])


def main(arguments: Sequence[str], make_objective: Callable[..., Objective]) -> None:
    """open_clip's own program `open_clip_train.main` with an objective as its loss.

    The state of the objective is written beside every `epoch_N.pt` and read with --resume.

    Args:
        arguments: of the program, such as `sys.argv[1:]`.
        make_objective: `make_objective(num_left=…, num_right=…)`.
    """
    from open_clip_train import main as program

    train_one_epoch = program.train_one_epoch
    losses: list[GlobalClipLoss] = []

    def train(model: nn.Module, data: dict[str, Any], _: Any, epoch: int, *rest: Any, tb_writer: Any = None) -> None:
        args = rest[-1]
        if not losses:
            if args.horovod or args.distill:
                raise DualencError("--horovod and --distill have losses of their own; leave them out")
            data["train"] = with_ids(data["train"])
            objective = make_objective(**data["train"].sizes)
            if objective.log_temperature.requires_grad:
                raise DualencError("learnable_temperature: this program's optimizer has the model alone; leave it out")
            losses.append(GlobalClipLoss(objective, data["train"], model, args.epochs).to(args.device))
            if epoch:
                load_state(losses[0], Path(args.resume).with_name(f"epoch_{epoch}.pt"))
        train_one_epoch(model, data, losses[0], epoch, *rest, tb_writer=tb_writer)
        if args.logs and args.logs.lower() != "none":
            folder = Path(args.checkpoint_path)
            save_state(losses[0], folder / f"epoch_{epoch + 1}.pt")
            # Until open_clip has written its checkpoint, the one before counts.
            older = folder / f"epoch_{epoch - 1}.pt"
            if distributed.is_main() and not older.exists():
                state_path(older).unlink(missing_ok=True)

    with mock.patch.object(program, "train_one_epoch", train):
        program.main(arguments)
