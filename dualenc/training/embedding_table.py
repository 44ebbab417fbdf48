"""The latest embeddings of all training pairs, gathered from the batches as they pass by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualenc import distributed
from dualenc.data.pairs import PairDataset
from dualenc.objectives.base import Objective
from dualenc.search.build import choose_factory, new_index, training_rows
from dualenc.training.checkpoint import random_state_kept
from dualenc.training.encoding import PlainEncoding
from dualenc.training.loader import BatchLoader, generator
from dualenc.training.step import Step
from dualenc.types import Side

_STEPS_KEPT_ON_DEVICE = 64


class EmbeddingTable:
    """(M, D) float16 embeddings of both sides and the step at which each pair was last seen.

    Each rank buffers what it encoded; `flush` brings all of it to the main process, which alone holds the table.
    Pairs that no batch has brought yet have random unit vectors.

    Args:
        num_pairs: M.
        seed: of the vectors of pairs not seen yet.
    """

    def __init__(self, num_pairs: int, seed: int = 0) -> None:
        self.num_pairs, self.seed = num_pairs, seed
        self.left: np.ndarray | None = None
        self.right: np.ndarray | None = None
        self.seen_at = np.full(num_pairs, -1, dtype=np.int64)
        self._fresh: list[tuple[Tensor, Tensor, Tensor, int]] = []

    @property
    def empty(self) -> bool:
        """Whether no batch has been added yet."""
        return self.left is None and not self._fresh

    def add(self, indices: Tensor, left: Tensor, right: Tensor, step: int) -> None:
        """Note one batch of this rank.

        Args:
            indices: (b,) pair indices.
            left: (b, D) embeddings.
            right: (b, D) embeddings.
            step: number of the optimizer step, for the age of a row.
        """
        rows = (indices, left.detach().half(), right.detach().half(), step)
        self._fresh.append(rows)
        late = len(self._fresh) - _STEPS_KEPT_ON_DEVICE
        if left.device.type != "cpu" and late >= 0 and len(self._fresh) % _STEPS_KEPT_ON_DEVICE == 0:
            self._fresh[late:] = [(i.cpu(), a.cpu(), b.cpu(), s) for i, a, b, s in self._fresh[late:]]

    def flush(self, device: torch.device) -> None:
        """Bring every rank's rows into the main process's table; all ranks call it together.

        Args:
            device: what the process group communicates on.
        """
        buffered, self._fresh = self._fresh, []
        dim = max(distributed.gather_objects(buffered[0][1].shape[1] if buffered else 0))
        if dim == 0:
            return
        indices, steps, left, right = (_gather(part, device) for part in _joined(buffered, dim))
        if distributed.is_main():
            self._write(indices.numpy(), steps.numpy(), left.numpy(), right.numpy())

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; call `flush` before."""
        if self.left is None or self.right is None:
            return {}
        arrays = {"left": self.left, "right": self.right, "seen_at": self.seen_at}
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._fresh = []
        if state and distributed.is_main():
            self.left, self.right = state["left"].numpy().copy(), state["right"].numpy().copy()
            self.seen_at = state["seen_at"].numpy().copy()

    def _write(self, indices: np.ndarray, steps: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
        if self.left is None or self.right is None:
            self.left, self.right = (self._random_rows(left.shape[1], side) for side in (0, 1))
        # A pair may come twice between two flushes: in ascending order of steps the last one stays.
        order = np.argsort(steps, kind="stable")
        self.left[indices[order]] = left[order]
        self.right[indices[order]] = right[order]
        self.seen_at[indices[order]] = steps[order]

    def _random_rows(self, dim: int, side: int) -> np.ndarray:
        rows = generator("table", self.seed, side).standard_normal((self.num_pairs, dim), dtype=np.float32)
        return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float16)


def _joined(rows: list[tuple[Tensor, Tensor, Tensor, int]], dim: int) -> list[Tensor]:
    """Indices (n,), steps (n,), left (n, D) and right (n, D) of all buffered batches, on the CPU."""
    if not rows:
        none = torch.zeros(0, dtype=torch.int64)
        return [none, none, torch.zeros(0, dim).half(), torch.zeros(0, dim).half()]
    indices = torch.cat([row[0].cpu() for row in rows])
    left, right = torch.cat([row[1].cpu() for row in rows]), torch.cat([row[2].cpu() for row in rows])
    steps = torch.cat([torch.full_like(row[0], row[3], device="cpu") for row in rows])
    return [indices, steps, left, right]


def _gather(part: Tensor, device: torch.device) -> Tensor:
    return distributed.gather(part.to(device)).cpu() if distributed.is_initialized() else part


def fresh_embeddings(step: Step, loader: BatchLoader, batch_size: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Encode every pair without augmentation, dropout or batch statistics; every rank takes a share.

    Args:
        step: whose model is asked.
        loader: whose pairs; bad samples get random vectors.
        batch_size: pairs encoded at once on each rank.

    Returns:
        (M, D) and (M, D) float16 on the main process; empty arrays elsewhere.
    """
    pairs = loader.builder.pairs
    width = batch_size * distributed.world_size()
    encoding = PlainEncoding(step.model, step.device, step.accelerator.autocast)
    table = EmbeddingTable(len(pairs))
    step.model.eval()
    with torch.no_grad(), random_state_kept():
        # The last batch wraps around, so that all have the same width.
        order = np.resize(np.arange(len(pairs)), (-(-len(pairs) // width), width))
        for batch in loader.for_evaluation().batches(order):
            left = encoding.encode("left", batch.left)
            right = left if pairs.views else encoding.encode("right", batch.right)
            table.add(batch.indices, left, right, step=0)
    step.model.train()
    table.flush(step.device)
    nothing = np.zeros((0, 0), dtype=np.float16)
    return (nothing if table.left is None else table.left), (nothing if table.right is None else table.right)


FreshPass = Callable[[], tuple[np.ndarray, np.ndarray]]

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
