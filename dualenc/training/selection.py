"""Batch selection from embeddings in a background process, which imports this file and not torch."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from dualenc.batching.selector import BatchSelector, batch_losses
from dualenc.errors import DualencError
from dualenc.files import atomic_path, remove, save_array, write_json
from dualenc.reading import read_json
from dualenc.seeds import derive_seed

_SIDES = ("left", "right")
_MAX_COMPARED_BATCHES = 1024
_SENT_TO_ALL = (-signal.SIGTERM, -signal.SIGINT)
"""Exit codes of a process that ended by a signal which schedulers and terminals send to every process of a job."""


def main(folder: Path) -> None:
    """Read selector.pickle, left.npy and right.npy; write batches.npy, then report.json."""
    if hasattr(os, "nice"):
        os.nice(10)  # the training has priority
    with open(folder / "selector.pickle", "rb") as stream:
        selector, epoch, seed = pickle.load(stream)
    left, right = (np.load(folder / f"{side}.npy") for side in _SIDES)
    batches, report = select(selector, epoch, left, right, seed)
    # The report is written last: it says that the batches are complete.
    with atomic_path(folder / "batches.npy") as part:
        save_array(part, batches)
    write_json(folder / "report.json", report)


def select(
    selector: BatchSelector, epoch: int, left: np.ndarray, right: np.ndarray, seed: int
) -> tuple[np.ndarray, dict[str, float]]:
    """Select the batches of an epoch and measure how hard they are at the embeddings given.

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
    sample = np.unique(np.linspace(0, len(batches) - 1, min(_MAX_COMPARED_BATCHES, len(batches))).astype(int))
    report["loss"] = float(batch_losses(left, right, batches[sample], temperature).mean())
    report["random_loss"] = float(batch_losses(left, right, random[sample], temperature).mean())
    return batches, report


class SelectionJob:
    """Selects batches in a background process, which starts at once; `result` waits for it.

    A plain process, not a spawned `ProcessPoolExecutor`: that one imports the user's script, and breaks if it has no
    `__name__` guard; and when the run is killed, its worker stays (measured: over 10 minutes).

    Args:
        selector: picklable, with `select(epoch, left, right)`.
        epoch: for which epoch.
        seen_at: mean step at which the embeddings were taken.
        folder: where the job's own folder is made.
        seed: of the random batches that the report compares with.
        embeddings: (M, D) and (M, D) of the left and the right side.
        outcome: of a finished job; then there is nothing to do.
    """

    def __init__(
        self,
        selector: Any,
        epoch: int,
        seen_at: float,
        folder: Path,
        seed: int = 0,
        *,
        embeddings: tuple[np.ndarray, np.ndarray] | None = None,
        outcome: tuple[np.ndarray, dict[str, float]] | None = None,
    ) -> None:
        self.epoch = epoch
        self.seen_at = seen_at
        self.folder = folder / "job-finished"
        self._outcome = outcome
        self._process: subprocess.Popen[bytes] | None = None
        if embeddings is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
            for side, rows in zip(_SIDES, embeddings, strict=True):
                save_array(self.folder / f"{side}.npy", rows)
            (self.folder / "selector.pickle").write_bytes(pickle.dumps((selector, epoch, seed)))
            self._process = self._start()

    def result(self) -> tuple[np.ndarray, dict[str, float]]:
        """(num_batches, B) pair indices and the report on them; waits for them.

        Raises:
            DualencError: the selection failed.
        """
        if self._outcome is None:
            # A signal that went to every process of the job does not end the selection: the run decides when.
            while self._process is not None and self._process.wait() in _SENT_TO_ALL:
                self._process = self._start()
            try:
                self._outcome = np.load(self.folder / "batches.npy"), read_json(self.folder / "report.json")
            except (DualencError, OSError, ValueError):
                lines = (self.folder / "errors.txt").read_text(errors="replace").strip().splitlines()
                reason = lines[-1] if lines else "the process was killed; is there enough memory?"
                raise DualencError(f"selecting batches for epoch {self.epoch} failed: {reason}") from None
            finally:
                remove(self.folder)
        return self._outcome

    def stop(self) -> None:
        """Stop the job and remove its folder."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        remove(self.folder)

    def state_dict(self) -> dict[str, Any]:
        """The outcome of a finished job, else what is needed to start again and get the same."""
        state: dict[str, Any] = {"epoch": self.epoch, "seen_at": self.seen_at}
        # A job that failed raises here, too.
        if self._process is None or self._process.poll() not in (None, *_SENT_TO_ALL):
            batches, report = self.result()
            return {**state, "batches": batches, "report": dict(report)}
        return {**state, **{side: np.load(self.folder / f"{side}.npy") for side in _SIDES}}

    def _start(self) -> subprocess.Popen[bytes] | None:
        # Not a rank of the training, and without a GPU, where it would hold memory.
        ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in ranks}
        with open(self.folder / "errors.txt", "wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "dualenc.training.selection", str(self.folder)],
                env={**environment, "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
