"""Batch plan: batches selected by the embeddings of earlier steps."""

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
    """The batches of an epoch by embeddings, identical on every rank and after a resume.

    The main process keeps (M, D) float16 tables of both sides. A row holds the embedding from the
    step in which its pair was last used. Pairs that were never used have random unit vectors. For
    selectors that need no embeddings it only counts steps.

    Args:
        selector: the batch selector.
        num_pairs: number of training pairs, M.
        seed: random seed for the initial vectors.
        device: device for exchanges between ranks; the CPU by default.

    Attributes:
        selected: (num_batches, B) pair indices of the epoch's batches, by embeddings; None before
            there are any, and for selectors that need none.
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
        """Remember the embeddings of this rank's batch, for a selector that needs them.

        Args:
            indices: (b,) pair indices.
            left: (b, D) embeddings of the left items.
            right: (b, D) embeddings of the right items.
            step: number of the step.
        """
        # In half precision, which is enough to select batches: the tables have a row per pair.
        left = left.detach().half()
        right = right.detach().half()
        self._buffer.append((indices.cpu(), left.cpu(), right.cpu(), step))

    def _flush(self) -> None:
        """Write the buffers of all ranks into the tables. All ranks call it together."""
        batches = self._buffer
        self._buffer = []
        own_dim = batches[0][1].shape[1] if batches else 0
        # Ranks without a batch learn the dimension from the others.
        dim = max(distributed.gather_objects(own_dim))
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
        gathered = []
        for parts in (rows, steps, lefts, rights):
            own = torch.cat(parts).to(self.device)
            gathered.append(distributed.gather(own).cpu().numpy())
        if distributed.is_main():
            self._write(*gathered)

    def _write(
        self, rows: np.ndarray, steps: np.ndarray, left: np.ndarray, right: np.ndarray
    ) -> None:
        """Write embeddings (n, D) into the rows (n,) of the tables."""
        if self.left is None or self.right is None:
            dim = left.shape[1]
            self.left = self._random_vectors("left", dim)
            self.right = self._random_vectors("right", dim)
        # A pair may occur twice between two flushes. Assignment keeps the last duplicate, so sort
        # by step.
        order = np.argsort(steps, kind="stable")
        self.left[rows[order]] = left[order]
        self.right[rows[order]] = right[order]

    def _random_vectors(self, side: Side, dim: int) -> np.ndarray:
        generator = np.random.default_rng(derive_seed("table", self.seed, side))
        vectors = generator.standard_normal((self.num_pairs, dim), dtype=np.float32)
        unit: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit.astype(np.float16)

    def start_epoch(self, epoch: int) -> dict[str, float]:
        """Select the batches of an epoch. All ranks call it together.

        Args:
            epoch: number of the epoch, from 0.

        Returns:
            loss: mean loss of the selected batches; random_loss: that of random ones; seconds: time
            taken. {} without a selection.
        """
        if not self.selector.needs_embeddings:
            return {}
        self._flush()
        self.selected, report = distributed.from_main(partial(self._select, epoch))
        return report

    def _select(self, epoch: int) -> tuple[np.ndarray | None, dict[str, float]]:
        """Return the batches and a report; None and {} before there are embeddings."""
        if self.left is None or self.right is None:
            return None, {}
        left = self.left.astype(np.float32)
        right = self.right.astype(np.float32)
        start = time.perf_counter()
        try:
            selected = self.selector.select(epoch, left, right)
        except DualencError as error:
            raise DualencError(f"selecting batches for epoch {epoch} failed: {error}") from error
        batches = np.asarray(selected, dtype=np.int64)
        seconds = time.perf_counter() - start
        # Random batches of the same shape show how much harder the selected ones are.
        generator = np.random.default_rng(derive_seed("compare", self.seed, epoch))
        random = np.resize(generator.permutation(len(left)), batches.shape)
        temperature = float(getattr(self.selector, "temperature", 0.1))
        # An evenly spaced sample, because the batches may be sorted by loss.
        num_compared = min(_MAX_COMPARED_BATCHES, len(batches))
        positions = np.linspace(0, len(batches) - 1, num_compared)
        sample = np.unique(positions.astype(int))
        losses = batch_losses(left, right, batches[sample], temperature)
        random_losses = batch_losses(left, right, random[sample], temperature)
        report = {
            "seconds": seconds,
            "loss": float(losses.mean()),
            "random_loss": float(random_losses.mean()),
        }
        return batches, report

    def num_steps(self, epochs: int, gradient_accumulation: int = 1) -> int:
        """Return the number of optimizer steps in a number of epochs.

        Args:
            epochs: number of epochs.
            gradient_accumulation: number of batches per step.
        """
        first = len(self.selector.select(0))
        # From the second epoch on, a selection may leave pairs out.
        later = self.selector.num_batches if self.selector.needs_embeddings else first
        # Rounded up, because the last step of an epoch may have fewer batches.
        first_steps = -(-first // gradient_accumulation)
        later_steps = -(-later // gradient_accumulation)
        return first_steps + (epochs - 1) * later_steps

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later batches depend on. All ranks call it together."""
        if not self.selector.needs_embeddings:
            return {}
        self._flush()
        state: dict[str, Any] = {}
        for name in _STATE:
            array = getattr(self, name)
            state[name] = None if array is None else torch.from_numpy(array.copy())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        for name, tensor in state.items():
            # All ranks need the selected batches; only the main process holds the tables.
            if tensor is not None and (name == "selected" or distributed.is_main()):
                setattr(self, name, tensor.numpy().copy())
