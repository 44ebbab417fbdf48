"""Objectives in lightly's models and PyTorch Lightning: two views of an image, told apart by its file name.

    ids = FileIds(dataset)                                      # a LightlyDataset
    self.criterion = ViewsLoss(SogCLR(**ids.sizes, temperature=0.1), ids)
    ...
    (view0, view1), _, names = batch
    loss = self.criterion(self(view0), self(view1), names)

As an attribute of a `LightningModule` the loss and its memory are in its checkpoints, and in validation, where
Lightning switches to `eval()`, the memory stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dualenc.errors import DualencError
from dualenc.objectives.base import Objective
from dualenc.objectives.checks import refuse_momentum
from dualenc.objectives.items import Encode
from dualenc.types import Side


class FileIds:
    """Stable ids of a `LightlyDataset`'s images: their position among the distinct file names, sorted.

    Args:
        dataset: the training data; `get_filenames()` gives a name for each row.
    """

    def __init__(self, dataset: Any) -> None:
        names = dataset.get_filenames()
        self.dataset = dataset
        self.rows = {name: row for row, name in reversed([*enumerate(names)])}
        self.names = sorted(self.rows)
        self._number = {name: number for number, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    @property
    def sizes(self) -> dict[str, Any]:
        """`num_left` and `views` of an objective."""
        return {"num_left": len(self), "views": True}

    def __call__(self, names: Sequence[str]) -> Tensor:
        """(b,) ids of file names.

        Raises:
            DualencError: a name that the data set did not have.
        """
        try:
            return torch.tensor([self._number[name] for name in names], dtype=torch.int64)
        except KeyError as error:
            raise DualencError(f"{error.args[0]}: not a file of this data set; give FileIds the training set") from None

    def encoder(self, embed: Callable[[Tensor], Tensor], device: Callable[[], torch.device]) -> Encode:
        """`encode(side, ids)`: views of images outside the batch, drawn anew by the data set's transform."""

        def encode(side: Side, ids: Tensor) -> Tensor:
            # Each process makes a pass, even for no items.
            numbers = ids.tolist() or [0]
            views = [self.dataset[self.rows[self.names[number]]][0][side == "right"] for number in numbers]
            return normalize(embed(torch.stack(views).to(device())).float(), dim=1)[: len(ids)]

        return encode


class ViewsLoss(nn.Module):
    """An objective in the place of `lightly.loss.NTXentLoss`; gathers from all ranks itself.

    Args:
        objective: with `**ids.sizes`.
        ids: of the training data.
        embed: image batch to projections, such as the `LightningModule`'s `forward`; objectives that encode images
            outside the batch need it.
    """

    def __init__(self, objective: Objective, ids: FileIds, embed: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        if not objective.views or objective.num_left not in (None, len(ids)):
            raise DualencError(f"{objective.name}: build it with **ids.sizes, num_left={len(ids)} and views=True")
        refuse_momentum(objective)
        if objective.needs_encode and embed is None:
            raise DualencError(f"{objective.name} encodes images outside the batch; give ViewsLoss embed=self.forward")
        self.objective = objective
        self.ids = ids
        self._encode = None if embed is None else ids.encoder(embed, lambda: self.objective.log_temperature.device)

    def forward(self, z0: Tensor, z1: Tensor, names: Sequence[str]) -> Tensor:
        """The loss of two views' projections (b, D), of any length, by their images' file names."""
        left, right = (normalize(z.float(), dim=1) for z in (z0, z1))
        loss: Tensor = self.objective(left, right, self.ids(names).to(left.device), encode=self._encode).loss
        return loss


def keep_out_of_ddp(module: nn.Module) -> None:
    """Call at the end of `__init__`: DistributedDataParallel then leaves the memories of objectives alone.

    They are the same on all ranks already; it would send them from the first to the others in every step.
    """
    names = [
        f"{prefix}.{name}"
        for prefix, objective in module.named_modules()
        if isinstance(objective, Objective)
        for name, _ in objective.named_buffers()
    ]
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
    module._ddp_params_and_buffers_to_ignore = [*ignored, *names]  # type: ignore[assignment]
