"""Neighbours of every item, for objectives that draw proposals from them: looked up anew in every epoch."""

from __future__ import annotations

import numpy as np
import torch

from dualenc import distributed
from dualenc.data.pairs import PairDataset
from dualenc.index.factory import choose_factory, new_index, training_rows
from dualenc.objectives.anchors import Side
from dualenc.objectives.base import Objective
from dualenc.training.selection import FreshPass

_LISTS_PROBED = 8
_SEED = 0

Items = tuple[np.ndarray, np.ndarray]


def tell_neighbors(objective: Objective, pairs: PairDataset, fresh: FreshPass) -> None:
    """Embed all pairs and tell the objective which items are near each anchor; all ranks call it together.

    Args:
        objective: is told as many neighbours as its `num_neighbors` says; nothing happens for 0.
        pairs: whose items.
        fresh: makes an evaluation-mode pass; returns (M, D) and (M, D) on the main process.
    """
    if not objective.num_neighbors:
        return
    left, right = fresh()
    found: list[np.ndarray] | None = None
    if distributed.is_main():
        lefts, rights = _items(left, pairs.left_id), _items(right, pairs.right_id)
        found = [_near(lefts, rights, pairs.num_left, objective.num_neighbors)]
        if not pairs.views:
            found.append(_near(rights, lefts, pairs.num_right, objective.num_neighbors))
    told: list[np.ndarray] = distributed.broadcast_object(found)
    sides: tuple[Side, ...] = ("left", "right")
    for side, ids in zip(sides, told, strict=False):
        objective.set_neighbors(side, torch.from_numpy(ids))


def _items(embeddings: np.ndarray, ids: np.ndarray) -> Items:
    """Ids (n,) of the items that are in a pair, and their embeddings (n, D), out of those of all pairs (M, D)."""
    distinct, first = np.unique(np.asarray(ids), return_index=True)
    return distinct, np.ascontiguousarray(embeddings[first], dtype=np.float32)


def _near(anchors: Items, items: Items, num_anchors: int, count: int) -> np.ndarray:
    """(num_anchors, count) ids of the items with the largest cosine; -1 for anchors in no pair and missing ones."""
    vectors = items[1]
    index = new_index(vectors.shape[1], choose_factory(*vectors.shape), "ip")
    if rows := training_rows(index, len(vectors)):
        index.train(vectors[np.random.default_rng(_SEED).permutation(len(vectors))[:rows]])
    if hasattr(index, "nprobe"):
        index.nprobe = _LISTS_PROBED
    index.add(vectors)
    _, places = index.search(anchors[1], count)
    near = np.full((num_anchors, count), -1, dtype=np.int64)
    near[anchors[0]] = np.where(places < 0, -1, items[0][places])
    return near
