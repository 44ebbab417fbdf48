"""The finite set of `dualenc evaluate convergence`: pairs read and prepared once, for every model of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from dualenc.commands.images import random_rows, simclr_prepare
from dualenc.errors import DualencError
from dualenc.evaluation.convergence import FiniteSet, Inputs
from dualenc.evaluation.image_versions import Prepare

if TYPE_CHECKING:
    from dualenc.data import Corpus, PairDataset
    from dualenc.encoders import DualEncoder

Augmentation = Literal["simclr", "model"]
CHUNK = 64


class Source(NamedTuple):
    """Where the finite set comes from."""

    data: str
    split: str
    left_column: str | None
    right_column: str | None
    pairs: int
    augmentation: Augmentation
    seed: int


class Finite(NamedTuple):
    """The finite set as a model takes it: prepared inputs of both sides, chunk by chunk, and who belongs to whom."""

    left: list[Inputs]
    right: list[Inputs]
    pairs: FiniteSet


def open_set(model: DualEncoder, source: Source) -> Corpus | PairDataset:
    """Open what a run is measured on: images for models of kind image, pairs for all others.

    Raises:
        DualencError: the data cannot be read, is of another modality than the model, or holds one item only.
    """
    from dualenc.data import open_corpus, open_pairs

    found: Corpus | PairDataset
    if model.kind == "image":
        found = open_corpus(source.data, modality="image", split=source.split)
        kinds = {"left": found.modality}
    else:
        columns = {"left_column": source.left_column, "right_column": source.right_column}
        found = open_pairs(source.data, split=source.split, **columns)  # type: ignore[arg-type]
        kinds = {"left": found.left_modality, "right": found.right_modality}
    for side, modality in kinds.items():
        wanted = model.tower(side).modality  # type: ignore[arg-type]
        if modality != wanted:
            raise DualencError(
                f"{source.data}: its {side} items are {modality}, but the model's {side} tower takes {wanted}"
            )
    if len(found) < 2:
        raise DualencError(f"{source.data}: holds one item; a set of two or more is needed")
    return found


def prepare_set(model: DualEncoder, found: Corpus | PairDataset, source: Source) -> Finite:
    """Choose the finite set and prepare it once for all models of a run."""
    from dualenc.data import Corpus

    if isinstance(found, Corpus):
        return _views(model, found, source)
    numbers = random_rows(len(found), source.pairs)
    rows = [found[number] for number in numbers.tolist()]
    left_id, right_id = found.left_id[numbers], found.right_id[numbers]
    return Finite(
        _chunks(model.left.prepare, [row.left for row in rows]),
        _chunks(model.right.prepare, [row.right for row in rows]),
        FiniteSet(
            torch.from_numpy(left_id),
            torch.from_numpy(right_id),
            left_positives=torch.from_numpy(found.positives("left", left_id)),
            right_positives=torch.from_numpy(found.positives("right", right_id)),
        ),
    )


def _views(model: DualEncoder, images: Corpus, source: Source) -> Finite:
    """The images, each in two augmentations that are the same for every model."""
    from dualenc.training.seeds import augmentation_seeds

    numbers = random_rows(len(images), source.pairs).tolist()
    items = [images[number] for number in numbers]
    tower = model.left
    prepare = simclr_prepare(tower.prepare) if source.augmentation == "simclr" else tower.prepare
    left, right = (
        _chunks(prepare, items, augmentation_seeds(source.seed, 0, numbers, side)) for side in ("left", "right")
    )  # fmt: skip
    ids = torch.arange(len(items))
    return Finite(left, right, FiniteSet(ids, ids, views=True))


def _chunks(prepare: Prepare, items: Sequence[Any], seeds: Sequence[int] | None = None) -> list[Inputs]:
    starts = range(0, len(items), CHUNK)
    if seeds is None:
        return [prepare(items[start : start + CHUNK]) for start in starts]
    return [prepare(items[start : start + CHUNK], seeds[start : start + CHUNK]) for start in starts]
