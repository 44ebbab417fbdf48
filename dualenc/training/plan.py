"""Batch plan: the pairs of each batch of an epoch, selected by embeddings or at random.

At the start of an epoch the embeddings of the previous epoch (or of a fresh pass) go to a background process. Its
selection takes effect at the start of the next epoch, whenever it finishes: so a run is the same however fast the
machine is. Until the first selection is finished, batches are random.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dualenc import distributed
from dualenc.batching.selector import BatchSelector
from dualenc.encoders.dual import SIDES, DualEncoder
from dualenc.errors import DualencError
from dualenc.files import remove
from dualenc.seeds import derive_seed, random_state_kept
from dualenc.training.encoding import Autocast, PlainEncoding
from dualenc.training.loader import BatchLoader
from dualenc.training.selection import SelectionJob
from dualenc.types import Side

EmbeddingSource = Literal["epoch", "fresh"]
FreshPass = Callable[[], tuple[np.ndarray, np.ndarray]]

_MAX_STEPS_ON_DEVICE = 64


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

    @property
    def empty(self) -> bool:
        """Whether no batch has been added yet."""
        return self.left is None and not self._fresh

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
        # A rank without a batch takes part with empty tensors.
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


class BatchPlan:
    """The batches of each epoch; the same on every rank, and restored exactly from a checkpoint.

    Args:
        selector: chooses the batches.
        num_pairs: M.
        folder: for the background process to work in.
        embeddings: "epoch", those of the last epoch's batches as they were trained; "fresh", an evaluation-mode
            pass at the start of every epoch.
        background: select while training goes on, one epoch late; False waits for the selection and uses it at once.
        seed: of the random vectors of pairs not seen yet.
        device: that the process group communicates on.
    """

    def __init__(
        self,
        selector: BatchSelector,
        num_pairs: int,
        folder: Path,
        *,
        embeddings: EmbeddingSource = "epoch",
        background: bool = True,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        if embeddings not in ("epoch", "fresh"):
            raise DualencError(f"selection_embeddings is {embeddings!r}; choose 'epoch' or 'fresh'")
        self.selector = selector
        self.folder = folder
        self.embeddings = embeddings
        self.background = background
        self.seed = seed
        self.device = device or torch.device("cpu")
        self.uses_embeddings = selector.needs_embeddings
        self.table = EmbeddingTable(num_pairs, seed)
        self.selected: np.ndarray | None = None
        self.job: SelectionJob | None = None

    def start_epoch(self, epoch: int, step: int, fresh: FreshPass, last: bool = False) -> dict[str, float]:
        """Put the finished selection in force, and start the next one; all ranks call it together.

        Args:
            epoch: the epoch that begins.
            step: optimizer steps done, for the age of the embeddings.
            fresh: makes the evaluation-mode pass; returns (M, D) and (M, D) on the main process.
            last: no epoch follows.

        Returns:
            A report on the selection that takes effect now: loss, random_loss, seconds, staleness in steps.
        """
        # Waited for here and not when it finishes: a run must not depend on how fast the machine is.
        report = self._collect(step)
        if not self.uses_embeddings or (last and self.background):
            return report
        if self.embeddings == "fresh":
            left, right = fresh()
            seen_at = float(step)
        else:
            self.table.flush(self.device)
            if distributed.broadcast_object(self.table.empty):
                return report
            if self.table.left is not None and self.table.right is not None:
                left = self.table.left
                right = self.table.right
                seen_at = float(self.table.seen_at.mean())
        if distributed.is_main():
            self.job = SelectionJob(
                self.selector, epoch + self.background, seen_at, self.folder, self.seed, embeddings=(left, right)
            )
        if self.background:
            return report
        return self._collect(step)

    def _collect(self, step: int) -> dict[str, float]:
        """Wait for the selection under way, if any, and put it in force on all ranks."""
        if not self.uses_embeddings:
            return {}
        outcome: tuple[np.ndarray, dict[str, float]] | DualencError | None = None
        if distributed.is_main() and self.job is not None:
            job = self.job
            self.job = None
            try:
                batches, report = job.result()
                outcome = batches, {**report, "staleness": step - job.seen_at}
            except DualencError as error:
                # Raised on all ranks, which wait for the outcome.
                outcome = error
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
        first_selected_epoch = (self.embeddings == "epoch") + self.background
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
        job = None if self.job is None else self.job.state_dict()
        if job is not None:
            job = {key: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for key, v in job.items()}
        selected = None if self.selected is None else torch.from_numpy(self.selected.copy())
        return {"table": self.table.state_dict(), "selected": selected, "job": job}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`; a selection that was under way is started again."""
        if not self.uses_embeddings:
            return
        self.table.load_state_dict(state["table"])
        self.selected = None if state["selected"] is None else state["selected"].numpy().copy()
        job = state["job"]
        if job is None or not distributed.is_main():
            return
        if "batches" in job:
            arguments: dict[str, Any] = {"outcome": (job["batches"].numpy().copy(), dict(job["report"]))}
        else:
            arguments = {"embeddings": (job["left"].numpy(), job["right"].numpy())}
        self.job = SelectionJob(self.selector, job["epoch"], job["seen_at"], self.folder, self.seed, **arguments)

    def remove_leftovers(self) -> None:
        """Remove the folders of selections that a killed run was waiting for."""
        if distributed.is_main() and self.folder.is_dir():
            for path in self.folder.iterdir():
                # The job of a resumed run has started before the first step.
                if self.job is None or path != self.job.folder:
                    remove(path)

    def close(self) -> None:
        """Stop a selection that is not needed any more, and leave no empty folder."""
        if self.job is not None:
            self.job.stop()
            self.job = None
        if distributed.is_main() and self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()
