"""Finite sets of pairs that every model of an evaluation encodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dualenc.data import Corpus, PairDataset, open_corpus, open_pairs
from dualenc.encoders import DualEncoder
from dualenc.encoders.dual import SIDES
from dualenc.errors import DualencError
from dualenc.evaluation.images import simclr_prepare
from dualenc.evaluation.objectives import FrozenPairs
from dualenc.training.loader import augmentation_seeds
from dualenc.types import Inputs, Side

if TYPE_CHECKING:
    from dualenc.evaluation.options import Augmentation, ColumnOptions

CHUNK = 64
"""Items prepared and encoded at once."""


def open_set(model: DualEncoder, data: str, split: str, columns: ColumnOptions) -> Corpus | PairDataset:
    """Open the items to measure a model on: images for models of kind image, pairs for all others."""
    found: Corpus | PairDataset
    if model.kind == "image":
        found = open_corpus(data, modality="image", split=split)
        modalities: tuple[str, ...] = (found.modality,)
    else:
        found = open_pairs(data, **vars(columns), split=split)
        modalities = (found.left_modality, found.right_modality)
    for side, modality in zip(SIDES, modalities):
        takes = model.tower(side).modality
        if modality != takes:
            raise DualencError(f"{data}: its {side} items are {modality}, but the model's {side} tower takes {takes}")
    if len(found) < 2:
        raise DualencError(f"{data}: holds one item; a set of two or more is needed")
    return found


class PairSet:
    """Chosen pairs, of which every item is encoded once; of images, two augmentations of each are a pair.

    Args:
        data, rows: images or pairs, and (M,) numbers of the chosen ones.
        augmentation: of images: SimCLR's, or that of the model's training.
        seed: of the augmentations, which are the same for every model.
    """

    def __init__(
        self, data: Corpus | PairDataset, rows: np.ndarray, augmentation: Augmentation = "simclr", seed: int = 0
    ) -> None:
        self.data = data
        self.augmentation = augmentation
        self.seed = seed
        self.items: dict[Side, np.ndarray] = {"left": rows, "right": rows}
        places: dict[Side, np.ndarray] = {"left": np.arange(len(rows)), "right": np.arange(len(rows))}
        self._arguments: dict[str, Any] = {"views": True}
        if isinstance(data, PairDataset):
            ids: dict[Side, np.ndarray] = {"left": data.left_id[rows], "right": data.right_id[rows]}
            for side in SIDES:
                self.items[side], places[side] = np.unique(ids[side], return_inverse=True)
            self._arguments = {
                f"{side}_positives": self._positives(data.positives(side, ids[side]), side) for side in SIDES
            }
        self._arguments |= {f"{side}_id": torch.from_numpy(places[side]) for side in SIDES}

    def _positives(self, ids: np.ndarray, side: Side) -> torch.Tensor | None:
        """(M, K) rows among the embedded items of ids of the other side; other items, and padding, are -1."""
        others = self.items["right" if side == "left" else "left"]
        rows = np.searchsorted(others, ids).clip(max=len(others) - 1)
        listed = np.where(others[rows] == ids, rows, -1)
        # Where no item has more positives than its own pair, there is nothing to list.
        return torch.from_numpy(listed) if ((listed >= 0).sum(axis=1) > 1).any() else None

    def inputs(self, model: DualEncoder, side: Side) -> Iterator[Inputs]:
        """Prepared inputs of the items of a side, chunk by chunk."""
        prepare: Any = model.tower(side).prepare
        if self.augmentation == "simclr" and isinstance(self.data, Corpus):
            prepare = simclr_prepare(prepare)
        for start in range(0, len(self.items[side]), CHUNK):
            ids = self.items[side][start : start + CHUNK].tolist()
            if isinstance(self.data, Corpus):
                yield prepare([self.data[row] for row in ids], augmentation_seeds(self.seed, 0, ids, side))
            else:
                yield prepare([self.data.item(side, item) for item in ids])

    def pairs(self, left: torch.Tensor, right: torch.Tensor) -> FrozenPairs:
        """The pairs between embeddings (N, D) of the items."""
        return FrozenPairs(left, right, **self._arguments)


@torch.no_grad()
def embed_pairs(model: DualEncoder, chosen: PairSet) -> FrozenPairs:
    """Embed every item of a set."""
    left, right = (
        torch.cat([_encode(model, side, inputs) for inputs in chosen.inputs(model, side)]).float() for side in SIDES
    )
    return chosen.pairs(left, right)


def _encode(model: DualEncoder, side: Side, inputs: Inputs) -> torch.Tensor:
    device = next(model.parameters()).device
    return model(side, {name: tensor.to(device) for name, tensor in inputs.items()})
