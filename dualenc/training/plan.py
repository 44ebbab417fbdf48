"""Batch plan: the pairs of each batch of an epoch, at random or selected by the embeddings of the epoch before."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualenc import distributed
from dualenc.batching.selector import BatchSelector, batch_losses
from dualenc.encoders.dual import SIDES
from dualenc.errors import DualencError
from dualenc.seeds import derive_seed
from dualenc.types import Side

_MAX_COMPARED_BATCHES = 1024


class EmbeddingTable:
    """(M, D) float16 embeddings of both sides, as of the step at which each pair was last seen.

    Each rank buffers what it encoded; `flush` brings all of it to the main process, which alone holds the table.
    Pairs that were in no batch yet have random unit vectors, a function of `seed`.
    """

    def __init__(self, num_pairs: int, seed: int = 0) -> None:
        self.num_pairs = num_pairs
        self.seed = seed
        self.left: np.ndarray | None = None
        self.right: np.ndarray | None = None
        self._buffer: list[tuple[Tensor, Tensor, Tensor, int]] = []

    def add(self, indices: Tensor, left: Tensor, right: Tensor, step: int) -> None:
        """Add one batch of this rank, (b,), (b, D) and (b, D), as of an optimizer step."""
        # Half precision: selecting batches needs no more, and the table has a row for every pair.
        self._buffer.append((indices.cpu(), left.detach().half().cpu(), right.detach().half().cpu(), step))

    def flush(self, device: torch.device) -> None:
        """Bring every rank's rows into the main process's table, by way of a device; all ranks call it together."""
        batches = self._buffer
        self._buffer = []
        dim = max(distributed.gather_objects(batches[0][1].shape[1] if batches else 0))
        if dim == 0:
            return
        # Ranks without a batch contribute empty tensors.
        rows = [torch.zeros(0, dtype=torch.int64)]
        steps = [torch.zeros(0, dtype=torch.int64)]
        lefts = [torch.zeros(0, dim).half()]
        rights = [torch.zeros(0, dim).half()]
        for indices, left, right, step in batches:
            rows.append(indices)
            steps.append(torch.full_like(indices, step))
            lefts.append(left)
            rights.append(right)
        parts = [torch.cat(part) for part in (rows, steps, lefts, rights)]
        parts = [distributed.gather(part.to(device)).cpu() for part in parts]
        if distributed.is_main():
            self._write(*(part.numpy() for part in parts))

    def _write(self, rows: np.ndarray, steps: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
        if self.left is None or self.right is None:
            self.left = self._random_vectors("left", left.shape[1])
            self.right = self._random_vectors("right", left.shape[1])
        # A pair may come twice between two flushes: in ascending order of steps the last one stays.
        order = np.argsort(steps, kind="stable")
        self.left[rows[order]] = left[order]
        self.right[rows[order]] = right[order]

    def _random_vectors(self, side: Side, dim: int) -> np.ndarray:
        generator = np.random.default_rng(derive_seed("table", self.seed, side))
        vectors = generator.standard_normal((self.num_pairs, dim), dtype=np.float32)
        unit: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit.astype(np.float16)

    def state_dict(self) -> dict[str, Any]:
        """The table, for a checkpoint; call `flush` before."""
        if self.left is None:
            return {}
        return {side: torch.from_numpy(getattr(self, side).copy()) for side in SIDES}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self._buffer = []
        if distributed.is_main():
            for name, tensor in state.items():
                setattr(self, name, tensor.numpy().copy())


class BatchPlan:
    """The batches of each epoch; the same on every rank, and restored exactly from a checkpoint."""

    def __init__(
        self, selector: BatchSelector, num_pairs: int, seed: int = 0, device: torch.device | None = None
    ) -> None:
        self.selector = selector
        self.seed = seed
        self.device = device or torch.device("cpu")
        self.table = EmbeddingTable(num_pairs, seed)
        self.selected: np.ndarray | None = None

    def start_epoch(self, epoch: int) -> dict[str, float]:
        """Select the batches of an epoch; all ranks call it together.

        Returns a report on the selection: loss, random_loss and seconds; {} without a selection.
        """
        if not self.selector.needs_embeddings:
            return {}
        self.table.flush(self.device)
        self.selected, report = distributed.from_main(partial(self._select, epoch))
        return report

    def _select(self, epoch: int) -> tuple[np.ndarray | None, dict[str, float]]:
        """The batches and a report; None and {} before any embedding."""
        if self.table.left is None or self.table.right is None:
            return None, {}
        left = self.table.left.astype(np.float32)
        right = self.table.right.astype(np.float32)
        start = time.perf_counter()
        try:
            batches = np.asarray(self.selector.select(epoch, left, right), dtype=np.int64)
        except DualencError as error:
            raise DualencError(f"selecting batches for epoch {epoch} failed: {error}") from error
        report = {"seconds": time.perf_counter() - start}
        generator = np.random.default_rng(derive_seed("compare", self.seed, epoch))
        random = np.resize(generator.permutation(len(left)), batches.shape)
        temperature = float(getattr(self.selector, "temperature", 0.1))
        # Evenly spaced: the batches may be in ascending order of loss.
        num_compared = min(_MAX_COMPARED_BATCHES, len(batches))
        sample = np.unique(np.linspace(0, len(batches) - 1, num_compared).astype(int))
        report["loss"] = float(batch_losses(left, right, batches[sample], temperature).mean())
        report["random_loss"] = float(batch_losses(left, right, random[sample], temperature).mean())
        return batches, report

    def batches(self, epoch: int) -> np.ndarray:
        """(num_batches, B) pair indices of an epoch, in order."""
        if self.selected is not None:
            return self.selected
        return np.asarray(self.selector.select(epoch), dtype=np.int64)

    def num_steps(self, epochs: int, gradient_accumulation: int = 1) -> int:
        """The optimizer steps of so many epochs; a selection, from the second one on, may leave pairs out."""
        first = len(self.selector.select(0))
        later = self.selector.num_batches if self.selector.needs_embeddings else first
        # Rounded up: the last group of batches may be smaller.
        return -(-first // gradient_accumulation) + (epochs - 1) * -(-later // gradient_accumulation)

    def observe(self, indices: Tensor, left: Tensor, right: Tensor, step: int) -> None:
        """Add the embeddings of a batch of this rank, (b,), (b, D) and (b, D), if selections are made of them."""
        if self.selector.needs_embeddings:
            self.table.add(indices, left, right, step)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later batches depend on; all ranks call it together."""
        if not self.selector.needs_embeddings:
            return {}
        self.table.flush(self.device)
        selected = None if self.selected is None else torch.from_numpy(self.selected.copy())
        return {"table": self.table.state_dict(), "selected": selected}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        if self.selector.needs_embeddings:
            self.table.load_state_dict(state["table"])
            self.selected = None if state["selected"] is None else state["selected"].numpy().copy()
