"""Finite sets of pairs that every model of an evaluation encodes: prepared inputs, or embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from dualenc.data import Corpus, PairDataset, open_corpus, open_pairs
from dualenc.encoders import DualEncoder
from dualenc.errors import DualencError
from dualenc.evaluation.convergence import (
    FiniteSet,
    alignment,
    effective_rank,
    exact_gradient,
    pair_similarities,
    uniformity,
)
from dualenc.evaluation.corrupted import PrepareImages
from dualenc.evaluation.images import random_rows, simclr_prepare
from dualenc.evaluation.objectives import FrozenPairs
from dualenc.training.loader import augmentation_seeds
from dualenc.types import Inputs, Side

Augmentation = Literal["simclr", "model"]
CHUNK = 64
"""Items prepared and encoded at once."""


def open_set(
    model: DualEncoder, data: str, split: str, left_column: str | None, right_column: str | None
) -> Corpus | PairDataset:
    """Open the items to measure a model on: images for models of kind image, pairs for all others."""
    found: Corpus | PairDataset
    if model.kind == "image":
        found = open_corpus(data, modality="image", split=split)
        modalities: tuple[str, ...] = (found.modality,)
    else:
        found = open_pairs(data, left_column, right_column, split=split)
        modalities = (found.left_modality, found.right_modality)
    for side, tower, modality in zip(("left", "right"), (model.left, model.right), modalities):
        if modality != tower.modality:
            raise DualencError(
                f"{data}: its {side} items are {modality}, but the model's {side} tower takes {tower.modality}"
            )
    if len(found) < 2:
        raise DualencError(f"{data}: holds one item; a set of two or more is needed")
    return found


def prepare_set(
    model: DualEncoder, found: Corpus | PairDataset, pairs: int, augmentation: Augmentation, seed: int
) -> tuple[list[Inputs], list[Inputs], FiniteSet]:
    """The finite set: prepared inputs of the left and of the right items, in chunks, and which of them are pairs."""

    def chunks(prepare: PrepareImages, items: Sequence[Any], *seeds: Sequence[int]) -> list[Inputs]:
        """Prepared with seeds (augmented), or without."""
        parts = [slice(start, start + CHUNK) for start in range(0, len(items), CHUNK)]
        return [prepare(items[part], *(numbers[part] for numbers in seeds)) for part in parts]

    numbers = random_rows(len(found), pairs)
    if isinstance(found, Corpus):
        # Each image in two augmentations, which are the same for every model.
        images = [found[number] for number in numbers.tolist()]
        prepare: PrepareImages = model.left.prepare
        if augmentation == "simclr":
            prepare = simclr_prepare(prepare)
        left, right = (
            chunks(prepare, images, augmentation_seeds(seed, 0, numbers.tolist(), side)) for side in ("left", "right")
        )
        ids = torch.arange(len(images))
        return left, right, FiniteSet(ids, ids, views=True)
    rows = [found[number] for number in numbers.tolist()]
    left_id = found.left_id[numbers]
    right_id = found.right_id[numbers]
    pair_ids = FiniteSet(
        torch.from_numpy(left_id),
        torch.from_numpy(right_id),
        left_positives=torch.from_numpy(found.positives("left", left_id)),
        right_positives=torch.from_numpy(found.positives("right", right_id)),
    )
    left = chunks(model.left.prepare, [row.left for row in rows])
    return left, chunks(model.right.prepare, [row.right for row in rows]), pair_ids


@torch.inference_mode()
def embed_pairs(model: DualEncoder, found: PairDataset | Corpus, rows: np.ndarray, seed: int) -> FrozenPairs:
    """Embed every item of some pairs (M,) once; of images, two SimCLR augmentations of each."""
    device = next(model.parameters()).device

    def embed(side: Side, ids: np.ndarray) -> torch.Tensor:
        """(N, D) embeddings of the items of a side."""
        parts = []
        for block in np.split(ids, range(CHUNK, len(ids), CHUNK)):
            if isinstance(found, Corpus):
                seeds = augmentation_seeds(seed, 0, block.tolist(), side)
                inputs = simclr_prepare(model.left.prepare)([found[row] for row in block.tolist()], seeds)
            else:
                items = [found.item(side, item) for item in block.tolist()]
                inputs = model.tower(side).prepare(items)
            parts.append(model(side, {name: tensor.to(device) for name, tensor in inputs.items()}))
        return torch.cat(parts).float()

    if isinstance(found, Corpus):
        return FrozenPairs.one_to_one(embed("left", rows).clone(), embed("right", rows).clone(), views=True)
    ids_of_pairs: dict[Side, np.ndarray] = {"left": found.left_id[rows], "right": found.right_id[rows]}
    items = {}
    places = {}
    for side, ids in ids_of_pairs.items():
        items[side], places[side] = np.unique(ids, return_inverse=True)
    positives = {}
    opposite: tuple[tuple[Side, Side], ...] = (("left", "right"), ("right", "left"))
    for side, other in opposite:
        ids = found.positives(side, ids_of_pairs[side])
        # Rows among the embedded items; other items, and padding, are -1.
        embedded = np.searchsorted(items[other], ids).clip(max=len(items[other]) - 1)
        listed = np.where(items[other][embedded] == ids, embedded, -1)
        # Where no item has more positives than its own pair, there is nothing to list.
        positives[side] = torch.from_numpy(listed).to(device) if ((listed >= 0).sum(axis=1) > 1).any() else None
    return FrozenPairs(
        embed("left", items["left"]),
        embed("right", items["right"]),
        torch.from_numpy(places["left"]).to(device),
        torch.from_numpy(places["right"]).to(device),
        left_positives=positives["left"],
        right_positives=positives["right"],
    )


def measure_model(
    model: DualEncoder, left: list[Inputs], right: list[Inputs], pairs: FiniteSet, temperature: float
) -> dict[str, Any]:
    """Metrics and the histogram of similarities of one model, as plain values."""
    device = next(model.parameters()).device

    def encode(side: str, inputs: Inputs) -> torch.Tensor:
        return model(side, {name: tensor.to(device) for name, tensor in inputs.items()})  # type: ignore[arg-type]

    found = exact_gradient(model, encode, left, right, pairs, temperature)
    positives = None if pairs.left_positives is None else pairs.left_positives.numpy()
    histogram = pair_similarities(found.left, found.right, pairs.left_id.numpy(), pairs.right_id.numpy(), positives)
    sides = (found.left, found.right)
    metrics = {
        "loss": found.loss,
        "squared_gradient_norm": found.squared_gradient_norm,
        "alignment": alignment(found.left, found.right),
        "uniformity": float(np.mean([uniformity(side) for side in sides])),
        "effective_rank": float(np.mean([effective_rank(side) for side in sides])),
        "positive_cosine": histogram.positive_mean,
        "negative_cosine": histogram.negative_mean,
        "overlap": histogram.overlap,
    }
    return {"metrics": metrics, "histogram": histogram.to_plain()}
