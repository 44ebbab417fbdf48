"""Batches chosen from embeddings while training goes on.

At the start of an epoch the embeddings of the epoch before (or of a fresh pass) go to a background process; what
it selects takes effect at the start of the next epoch, whenever it finishes: so a run is the same however fast the
machine is. Until the first selection is there, batches are random.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualenc import distributed
from dualenc.batching.selector import BatchSelector, batch_losses
from dualenc.errors import DualencError
from dualenc.files import atomic_path, read_json, remove, save_array, write_json
from dualenc.training.embedding_table import EmbeddingTable, FreshPass
from dualenc.training.loader import generator


def main(folder: Path) -> None:
    """Read selector.pickle, left.npy and right.npy; write batches.npy, then report.json."""
    if hasattr(os, "nice"):
        os.nice(10)  # the training comes first
    with open(folder / "selector.pickle", "rb") as stream:
        selector, epoch, seed = pickle.load(stream)
    left, right = (np.load(folder / f"{side}.npy") for side in ("left", "right"))
    batches, report = select(selector, epoch, left, right, seed)
    with atomic_path(folder / "batches.npy") as beside:
        save_array(beside, batches)
    write_json(folder / "report.json", report)


def select(
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
    left, right = left.astype(np.float32), right.astype(np.float32)
    start = time.perf_counter()
    batches = np.asarray(selector.select(epoch, left, right), dtype=np.int64)
    seconds = time.perf_counter() - start
    order = np.resize(generator("compare", seed, epoch).permutation(len(left)), batches.shape)
    temperature = float(getattr(selector, "temperature", 0.1))
    report = {
        "seconds": seconds,
        "loss": mean_batch_loss(left, right, batches, temperature),
        "random_loss": mean_batch_loss(left, right, order, temperature),
    }
    return batches, report


def mean_batch_loss(
    left: np.ndarray, right: np.ndarray, batches: np.ndarray, temperature: float, at_most: int = 1024
) -> float:
    """Mean loss of batches at frozen embeddings, over at most so many evenly spaced ones.

    Args:
        left: (M, D).
        right: (M, D).
        batches: (num_batches, B) pair indices.
        temperature: τ.
        at_most: batches looked at.
    """
    chosen = np.unique(np.linspace(0, len(batches) - 1, min(at_most, len(batches))).astype(int))
    return float(batch_losses(left, right, batches[chosen], temperature).mean())


if __name__ == "__main__":
    main(Path(sys.argv[1]))


class Selected(NamedTuple):
    """(num_batches, B) pair indices, the report on them, and the mean step at which their embeddings were taken."""

    batches: np.ndarray
    report: dict[str, float]
    seen_at: float


class SelectionJob:
    """Starts the background process at once; `result` waits for it.

    Args:
        selector: picklable, with `select(epoch, left, right)`.
        epoch: for which epoch.
        left: (M, D) embeddings.
        right: (M, D) embeddings.
        seen_at: mean step at which the embeddings were taken.
        folder: where the job's own folder is made.
        seed: of the random batches that the report compares with.
    """

    def __init__(
        self,
        selector: Any,
        epoch: int,
        left: np.ndarray,
        right: np.ndarray,
        seen_at: float,
        folder: Path,
        seed: int = 0,
    ) -> None:
        self.epoch, self.seen_at = epoch, seen_at
        self._outcome: Selected | DualencError | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
        save_array(self.folder / "left.npy", left)
        save_array(self.folder / "right.npy", right)
        (self.folder / "selector.pickle").write_bytes(pickle.dumps((selector, epoch, seed)))
        self._process: subprocess.Popen[bytes] | None = self._start()

    def result(self) -> Selected | DualencError:
        """The selection once it is there, or why there is none."""
        if self._outcome is None:
            # A scheduler's SIGTERM goes to every process of a job, but the run is still there to say when it ends.
            while self._process is not None and self._process.wait() == -signal.SIGTERM:
                self._process = self._start()
            self._outcome = self._read()
            remove(self.folder)
        return self._outcome

    def stop(self) -> None:
        """Give the job up."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        remove(self.folder)

    def state_dict(self) -> dict[str, Any]:
        """The outcome if it is there, else what is needed to start again and get the same."""
        common = {"epoch": self.epoch, "seen_at": self.seen_at}
        if self._process is None or self._process.poll() not in (None, -signal.SIGTERM):
            outcome = self.result()
            if isinstance(outcome, DualencError):
                raise outcome
            return {**common, "batches": torch.from_numpy(outcome.batches), "report": dict(outcome.report)}
        arrays = {side: torch.from_numpy(np.load(self.folder / f"{side}.npy")) for side in ("left", "right")}
        return {**common, **arrays}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], selector: Any, folder: Path, seed: int) -> SelectionJob:
        """The job that `state_dict` describes: finished, or started again."""
        if "batches" not in state:
            left, right = state["left"].numpy(), state["right"].numpy()
            return cls(selector, state["epoch"], left, right, state["seen_at"], folder, seed)
        job = cls.__new__(cls)
        job.epoch, job.seen_at, job._process = state["epoch"], state["seen_at"], None
        job.folder = folder / "job-finished"
        job._outcome = Selected(state["batches"].numpy().copy(), dict(state["report"]), state["seen_at"])
        return job

    def _start(self) -> subprocess.Popen[bytes]:
        # Alone: not a rank of the training, and with no GPU to hold memory on.
        ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        environment = {k: v for k, v in os.environ.items() if k not in ranks}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        with open(self.folder / "errors.txt", "wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "dualenc.training.selection", str(self.folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def _read(self) -> Selected | DualencError:
        try:
            report = read_json(self.folder / "report.json")
            return Selected(np.load(self.folder / "batches.npy"), report, self.seen_at)
        except (DualencError, OSError, ValueError):
            lines = (self.folder / "errors.txt").read_text(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else "the process was killed; is there enough memory?"
            return DualencError(f"selecting batches for epoch {self.epoch} failed: {reason}")


EmbeddingSource = Literal["epoch", "fresh"]


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
