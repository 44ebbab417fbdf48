"""Batch plan: the pairs of each batch of an epoch, selected by embeddings or at random.

At the start of an epoch batches are selected from the embeddings of the previous epoch, or of a fresh pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dualenc import distributed
from dualenc.batching.selector import BatchSelector, batch_losses
from dualenc.encoders.dual import SIDES, DualEncoder
from dualenc.errors import DualencError
from dualenc.seeds import derive_seed, random_state_kept
from dualenc.training.encoding import Autocast, PlainEncoding
from dualenc.training.loader import BatchLoader
from dualenc.types import Side

EmbeddingSource = Literal["epoch", "fresh"]
FreshPass = Callable[[], tuple[np.ndarray, np.ndarray]]

_MAX_STEPS_ON_DEVICE = 64
_MAX_COMPARED_BATCHES = 1024


class EmbeddingTable:
    """(M, D) float16 embeddings of both sides and the step at which each pair was last seen.

    Each rank buffers what it encoded; `flush` brings all of it to the main process, which alone holds the table.
    Pairs that were in no batch yet have random unit vectors, a function of `seed`.
    """

    def __init__(self, num_pairs: int, seed: int = 0) -> None:
        self.num_pairs = num_pairs
        self.seed = seed
        self.left: np.ndarray | None = None
        self.right: np.ndarray | None = None
        self.seen_at = np.full(num_pairs, -1, dtype=np.int64)
        self._fresh: list[tuple[Tensor, Tensor, Tensor, int]] = []

    def add(self, indices: Tensor, left: Tensor, right: Tensor, step: int) -> None:
        """Add one batch of this rank, (b,), (b, D) and (b, D), as of an optimizer step."""
        # Half precision: selecting batches needs no more, and the table has a row for every pair.
        self._fresh.append((indices, left.detach().half(), right.detach().half(), step))
        # Moved to the CPU many at a time: each transfer waits for the GPU.
        if left.device.type != "cpu" and len(self._fresh) % _MAX_STEPS_ON_DEVICE == 0:
            first = len(self._fresh) - _MAX_STEPS_ON_DEVICE
            self._fresh[first:] = [(i.cpu(), a.cpu(), b.cpu(), s) for i, a, b, s in self._fresh[first:]]

    def flush(self, device: torch.device) -> None:
        """Bring every rank's rows into the main process's table, by way of a device; all ranks call it together."""
        batches = self._fresh
        self._fresh = []
        dim = max(distributed.gather_objects(batches[0][1].shape[1] if batches else 0))
        if dim == 0:
            return
        # Ranks without a batch contribute empty tensors.
        no_rows = torch.zeros(0, dtype=torch.int64)
        no_vectors = torch.zeros(0, dim).half()
        parts = [
            torch.cat([no_rows, *(rows.cpu() for rows, _, _, _ in batches)]),
            torch.cat([no_rows, *(torch.full_like(rows, step, device="cpu") for rows, _, _, step in batches)]),
            torch.cat([no_vectors, *(left.cpu() for _, left, _, _ in batches)]),
            torch.cat([no_vectors, *(right.cpu() for _, _, right, _ in batches)]),
        ]
        if distributed.is_initialized():
            parts = [distributed.gather(part.to(device)).cpu() for part in parts]
        if not distributed.is_main():
            return
        indices, steps, left, right = (part.numpy() for part in parts)
        if self.left is None or self.right is None:
            self.left, self.right = (self._random_vectors(side, dim) for side in SIDES)
        # A pair may come twice between two flushes: in ascending order of steps the last one stays.
        order = np.argsort(steps, kind="stable")
        self.left[indices[order]] = left[order]
        self.right[indices[order]] = right[order]
        self.seen_at[indices[order]] = steps[order]

    def _random_vectors(self, side: Side, dim: int) -> np.ndarray:
        generator = np.random.default_rng(derive_seed("table", self.seed, side))
        vectors = generator.standard_normal((self.num_pairs, dim), dtype=np.float32)
        unit: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit.astype(np.float16)

    def state_dict(self) -> dict[str, Any]:
        """The table, for a checkpoint; call `flush` before."""
        if self.left is None or self.right is None:
            return {}
        arrays = {"left": self.left, "right": self.right, "seen_at": self.seen_at}
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self._fresh = []
        if state and distributed.is_main():
            self.left = state["left"].numpy().copy()
            self.right = state["right"].numpy().copy()
            self.seen_at = state["seen_at"].numpy().copy()


def fresh_embeddings(
    model: DualEncoder, loader: BatchLoader, device: torch.device, autocast: Autocast, batch_size: int = 256
) -> tuple[np.ndarray, np.ndarray]:
    """Encode every pair without augmentation, dropout or batch statistics; every rank takes a share.

    Args:
        model: in training mode, before and after.
        loader: of the pairs; bad samples get random vectors.
        device: of the model.
        autocast: a new mixed precision context per call.
        batch_size: pairs encoded at once on each rank.

    Returns:
        (M, D) and (M, D) float16 on the main process; empty arrays elsewhere.
    """
    pairs = loader.pairs
    width = batch_size * distributed.world_size()
    encoding = PlainEncoding(model, device, autocast)
    table = EmbeddingTable(len(pairs))
    # The last batch wraps around, so that all have the same width.
    order = np.resize(np.arange(len(pairs)), (-(-len(pairs) // width), width))
    model.eval()
    try:
        with torch.no_grad(), random_state_kept():
            for batch in loader.for_evaluation().batches(order):
                left = encoding.encode("left", batch.left)
                # Without augmentation both views of an image are the same.
                right = left if pairs.views else encoding.encode("right", batch.right)
                table.add(batch.indices, left, right, step=0)
    finally:
        model.train()
    table.flush(device)
    if table.left is None or table.right is None:
        empty = np.zeros((0, 0), dtype=np.float16)
        return empty, empty
    return table.left, table.right


def select_batches(
    selector: BatchSelector, epoch: int, left: np.ndarray, right: np.ndarray, seed: int
) -> tuple[np.ndarray, dict[str, float]]:
    """Select the batches of an epoch and measure how hard they are.

    Args:
        selector: chooses the batches.
        epoch: for which epoch.
        left: (M, D) unit-norm embeddings in any floating type.
        right: (M, D) likewise.
        seed: of the random batches to compare with.

    Returns:
        (num_batches, B) pair indices; a report: seconds, loss of the selected batches and of random ones.
    """
    left = left.astype(np.float32)
    right = right.astype(np.float32)
    start = time.perf_counter()
    batches = np.asarray(selector.select(epoch, left, right), dtype=np.int64)
    report = {"seconds": time.perf_counter() - start}
    generator = np.random.default_rng(derive_seed("compare", seed, epoch))
    random = np.resize(generator.permutation(len(left)), batches.shape)
    temperature = float(getattr(selector, "temperature", 0.1))
    # Evenly spaced: the batches may be in ascending order of loss.
    num_compared = min(_MAX_COMPARED_BATCHES, len(batches))
    sample = np.unique(np.linspace(0, len(batches) - 1, num_compared).astype(int))
    report["loss"] = float(batch_losses(left, right, batches[sample], temperature).mean())
    report["random_loss"] = float(batch_losses(left, right, random[sample], temperature).mean())
    return batches, report


class BatchPlan:
    """The batches of each epoch; the same on every rank, and restored exactly from a checkpoint.

    Args:
        selector: chooses the batches.
        num_pairs: M.
        embeddings: "epoch", those of the last epoch's batches as they were trained; "fresh", an evaluation-mode
            pass at the start of every epoch.
        seed: of the random vectors of pairs not seen yet.
        device: that the process group communicates on.
    """

    def __init__(
        self,
        selector: BatchSelector,
        num_pairs: int,
        *,
        embeddings: EmbeddingSource = "epoch",
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        if embeddings not in ("epoch", "fresh"):
            raise DualencError(f"selection_embeddings is {embeddings!r}; choose 'epoch' or 'fresh'")
        self.selector = selector
        self.embeddings = embeddings
        self.seed = seed
        self.device = device or torch.device("cpu")
        self.uses_embeddings = selector.needs_embeddings
        self.table = EmbeddingTable(num_pairs, seed)
        self.selected: np.ndarray | None = None

    def start_epoch(self, epoch: int, step: int, fresh: FreshPass) -> dict[str, float]:
        """Select the batches of an epoch; all ranks call it together.

        Args:
            epoch: the epoch that begins.
            step: optimizer steps done, for the age of the embeddings.
            fresh: makes the evaluation-mode pass; returns (M, D) and (M, D) on the main process.

        Returns:
            A report on the selection: loss, random_loss, seconds, staleness in steps; {} without a selection.

        Raises:
            DualencError: the selection failed.
        """
        if not self.uses_embeddings:
            return {}
        left: np.ndarray | None
        right: np.ndarray | None
        if self.embeddings == "fresh":
            left, right = fresh()
            seen_at = float(step)
        else:
            self.table.flush(self.device)
            left = self.table.left
            right = self.table.right
            seen_at = float(self.table.seen_at.mean())
        outcome: tuple[np.ndarray, dict[str, float]] | DualencError | None = None
        if distributed.is_main() and left is not None and right is not None:
            try:
                batches, report = select_batches(self.selector, epoch, left, right, self.seed)
                outcome = batches, {**report, "staleness": step - seen_at}
            except DualencError as error:
                # Raised on all ranks, which wait for the outcome.
                outcome = DualencError(f"selecting batches for epoch {epoch} failed: {error}")
        outcome = distributed.broadcast_object(outcome)
        if isinstance(outcome, DualencError):
            raise outcome
        if outcome is None:
            return {}
        self.selected, report = outcome
        return report

    def batches(self, epoch: int) -> np.ndarray:
        """(num_batches, B) pair indices of an epoch, in order."""
        if self.selected is not None:
            return self.selected
        return np.asarray(self.selector.select(epoch), dtype=np.int64)

    def num_batches(self, epoch: int) -> int:
        """How many batches an epoch will have, before it begins: a selection may leave pairs out."""
        first_selected_epoch = int(self.embeddings == "epoch")
        if self.uses_embeddings and epoch >= first_selected_epoch:
            return self.selector.num_batches
        return len(self.selector.select(0))

    def observe(self, indices: Tensor, left: Tensor, right: Tensor, step: int) -> None:
        """Add the embeddings of a batch of this rank, (b,), (b, D) and (b, D), if selections are made of them."""
        if self.uses_embeddings and self.embeddings == "epoch":
            self.table.add(indices, left, right, step)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later batches depend on; all ranks call it together."""
        if not self.uses_embeddings:
            return {}
        self.table.flush(self.device)
        selected = None if self.selected is None else torch.from_numpy(self.selected.copy())
        return {"table": self.table.state_dict(), "selected": selected}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        if not self.uses_embeddings:
            return
        self.table.load_state_dict(state["table"])
        self.selected = None if state["selected"] is None else state["selected"].numpy().copy()
