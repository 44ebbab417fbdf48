"""Batch plan: the pairs of each batch of an epoch, at random or selected by the embeddings of the
epoch before."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualenc import distributed
from dualenc.batching.selector import BatchSelector, batch_losses
from dualenc.errors import DualencError
from dualenc.seeds import derive_seed
from dualenc.types import Side

_MAX_COMPARED_BATCHES = 1024
_STATE = ("left", "right", "selected")


class BatchPlan:
    """The batches of each epoch; the same on every rank, and restored exactly from a checkpoint.

    For selectors that need embeddings the main process holds (M, D) float16 tables of both sides,
    each row as of the step at which its pair was last seen; pairs that were in no batch yet have
    random unit vectors, by `seed`.
    """

    def __init__(
        self,
        selector: BatchSelector,
        num_pairs: int,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.selector = selector
        self.num_pairs = num_pairs
        self.seed = seed
        self.device = device or torch.device("cpu")
        self.left: np.ndarray | None = None
        self.right: np.ndarray | None = None
        self.selected: np.ndarray | None = None
        self._buffer: list[tuple[Tensor, Tensor, Tensor, int]] = []

    def observe(self, indices: Tensor, left: Tensor, right: Tensor, step: int) -> None:
        """Add the embeddings of a batch of this rank, (b,), (b, D) and (b, D), if selections are
        made of them."""
        if self.selector.needs_embeddings:
            # Half precision: selecting batches needs no more, and the tables have a row for every
            # pair.
            rows = (left.detach().half().cpu(), right.detach().half().cpu())
            self._buffer.append((indices.cpu(), *rows, step))

    def _flush(self) -> None:
        """Bring every rank's rows into the main process's tables; all ranks call it together."""
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
        parts = [torch.cat(part).to(self.device) for part in (rows, steps, lefts, rights)]
        gathered = [distributed.gather(part).cpu().numpy() for part in parts]
        if distributed.is_main():
            self._write(*gathered)

    def _write(
        self, rows: np.ndarray, steps: np.ndarray, left: np.ndarray, right: np.ndarray
    ) -> None:
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

    def start_epoch(self, epoch: int) -> dict[str, float]:
        """Select the batches of an epoch; all ranks call it together.

        Returns a report on the selection: loss, random_loss and seconds; {} without a selection.
        """
        if not self.selector.needs_embeddings:
            return {}
        self._flush()
        self.selected, report = distributed.from_main(partial(self._select, epoch))
        return report

    def _select(self, epoch: int) -> tuple[np.ndarray | None, dict[str, float]]:
        """The batches and a report; None and {} before any embedding."""
        if self.left is None or self.right is None:
            return None, {}
        left = self.left.astype(np.float32)
        right = self.right.astype(np.float32)
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
        """The optimizer steps of so many epochs; a selection, from the second one on, may leave
        pairs out."""
        first = len(self.selector.select(0))
        later = self.selector.num_batches if self.selector.needs_embeddings else first
        # Rounded up: the last group of batches may be smaller.
        return -(-first // gradient_accumulation) + (epochs - 1) * -(
            -later // gradient_accumulation
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that later batches depend on; all ranks call it together."""
        if not self.selector.needs_embeddings:
            return {}
        self._flush()
        arrays = {name: getattr(self, name) for name in _STATE}
        return {
            name: None if each is None else torch.from_numpy(each.copy())
            for name, each in arrays.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        for name, tensor in state.items():
            # The main process alone holds the tables.
            if tensor is not None and (name == "selected" or distributed.is_main()):
                setattr(self, name, tensor.numpy().copy())
