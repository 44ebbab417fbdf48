"""Batches chosen from embeddings while training goes on.

At the start of an epoch the embeddings of the epoch before (or of a fresh pass) go to a background process; what
it selects takes effect at the start of the next epoch, whenever it finishes: so a run is the same however fast the
machine is. Until the first selection is there, batches are random.
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
from dualenc.errors import DualencError
from dualenc.files import remove
from dualenc.training.embedding_table import EmbeddingTable
from dualenc.training.selection_job import SelectionJob

EmbeddingSource = Literal["epoch", "fresh"]
FreshPass = Callable[[], tuple[np.ndarray, np.ndarray]]


class BatchPlan:
    """Who meets whom in each epoch; the same on every rank, and restored exactly from a checkpoint.

    Args:
        selector: chooses the batches.
        num_pairs: M.
        folder: for the background process to work in.
        embeddings: "epoch", those of the last epoch's batches as they were trained; "fresh", an evaluation-mode
            pass at the start of every epoch.
        background: select while training goes on, one epoch late; False waits for the selection and uses it at once.
        seed: of what stands for embeddings of pairs not seen yet.
        device: what the process group communicates on.
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
        self.selector, self.folder = selector, folder
        self.embeddings, self.background, self.seed = embeddings, background, seed
        self.device = device or torch.device("cpu")
        self.uses_embeddings = selector.needs_embeddings
        self.table = EmbeddingTable(num_pairs, seed)
        self.selected: np.ndarray | None = None
        self.job: SelectionJob | None = None

    def start_epoch(self, epoch: int, step: int, fresh: FreshPass, last: bool = False) -> dict[str, float]:
        """Take what was selected meanwhile, and set the next selection going; all ranks call it together.

        Args:
            epoch: the epoch that begins.
            step: optimizer steps done, for the age of the embeddings.
            fresh: makes the evaluation-mode pass; returns (M, D) and (M, D) on the main process.
            last: no epoch follows.

        Returns:
            A report on the selection that takes effect now: loss, random_loss, seconds, staleness in steps.
        """
        if not self.uses_embeddings:
            return {}
        report = self._collect(step)
        useless = last and self.background
        if not useless and self._has_embeddings():
            self._launch(epoch + self.background, step, fresh)
            if not self.background:
                report = self._collect(step)
        return report

    def batches(self, epoch: int) -> np.ndarray:
        """(num_batches, B) pair indices of an epoch, in order."""
        return np.asarray(self.selector.select(epoch), dtype=np.int64) if self.selected is None else self.selected

    def num_batches(self, epoch: int) -> int:
        """How many batches an epoch will have, told before it begins: a selection may leave pairs out."""
        late = (self.embeddings == "epoch") + self.background
        selected = self.uses_embeddings and epoch >= late
        return self.selector.num_batches if selected else len(self.selector.select(0))

    def observe(self, indices: Tensor, left: Tensor, right: Tensor, step: int) -> None:
        """Note the embeddings of a batch of this rank, (b,), (b, D) and (b, D), if selections are made of them."""
        if self.uses_embeddings and self.embeddings == "epoch":
            self.table.add(indices, left, right, step)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later batches depend on; all ranks call it together."""
        if not self.uses_embeddings:
            return {}
        self.table.flush(self.device)
        return {
            "table": self.table.state_dict(),
            "selected": None if self.selected is None else torch.from_numpy(self.selected.copy()),
            "job": None if self.job is None else self.job.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; a selection that was under way is started again."""
        if not self.uses_embeddings:
            return
        self.table.load_state_dict(state["table"])
        self.selected = None if state["selected"] is None else state["selected"].numpy().copy()
        if state["job"] is not None and distributed.is_main():
            self.job = SelectionJob.from_state_dict(state["job"], self.selector, self.folder, self.seed)

    def remove_leftovers(self) -> None:
        """Remove the folders of selections that a killed run was waiting for."""
        if distributed.is_main() and self.folder.is_dir():
            for path in self.folder.iterdir():
                if self.job is None or path != self.job.folder:
                    remove(path)

    def close(self) -> None:
        """Stop a selection that nobody will use, and leave no empty folder behind."""
        if self.job is not None:
            self.job.stop()
            self.job = None
        if distributed.is_main() and self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _has_embeddings(self) -> bool:
        if self.embeddings == "fresh":
            return True
        self.table.flush(self.device)
        return distributed.broadcast_object(not self.table.empty)

    def _launch(self, epoch: int, step: int, fresh: FreshPass) -> None:
        if self.embeddings == "fresh":
            left, right = fresh()
            seen_at = float(step)
        elif distributed.is_main() and self.table.left is not None and self.table.right is not None:
            left, right, seen_at = self.table.left, self.table.right, float(self.table.seen_at.mean())
        if distributed.is_main():
            self.job = SelectionJob(self.selector, epoch, left, right, seen_at, self.folder, self.seed)

    def _collect(self, step: int) -> dict[str, float]:
        """Wait for the selection under way, if any, and put it in force on all ranks."""
        outcome = None
        if distributed.is_main() and self.job is not None:
            outcome = self.job.result()
            self.job = None
        outcome = distributed.broadcast_object(outcome)
        if outcome is None:
            return {}
        if isinstance(outcome, DualencError):
            raise outcome
        self.selected, report = outcome.batches, dict(outcome.report)
        report["staleness"] = step - outcome.seen_at
        return report
