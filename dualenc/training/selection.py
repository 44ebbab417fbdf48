"""Batches chosen from embeddings in a background process, which imports this file and goes without torch."""

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
from dualenc.files import atomic_path, read_json, remove, save_array, write_json
from dualenc.seeds import derive_seed

_SIDES = ("left", "right")
_BATCHES_COMPARED = 1024
_SENT_TO_ALL = (-signal.SIGTERM, -signal.SIGINT)  # as exit codes


def main(folder: Path) -> None:
    """Read selector.pickle, left.npy and right.npy; write batches.npy, then report.json."""
    if hasattr(os, "nice"):
        os.nice(10)  # the training comes first
    with open(folder / "selector.pickle", "rb") as stream:
        selector, epoch, seed = pickle.load(stream)
    left, right = (np.load(folder / f"{side}.npy") for side in ("left", "right"))
    batches, report = select(selector, epoch, left, right, seed)
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
    left, right = left.astype(np.float32), right.astype(np.float32)
    start = time.perf_counter()
    batches = np.asarray(selector.select(epoch, left, right), dtype=np.int64)
    report = {"seconds": time.perf_counter() - start}
    draw = np.random.default_rng(derive_seed("compare", seed, epoch))
    random = np.resize(draw.permutation(len(left)), batches.shape)
    temperature = float(getattr(selector, "temperature", 0.1))
    looked_at = np.unique(np.linspace(0, len(batches) - 1, min(_BATCHES_COMPARED, len(batches))).astype(int))
    for name, some in (("loss", batches[looked_at]), ("random_loss", random[looked_at])):
        report[name] = float(batch_losses(left, right, some, temperature).mean())
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
        outcome: what a finished job gave; then there is nothing to do.
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
        self.epoch, self.seen_at, self.folder = epoch, seen_at, folder / "job-finished"
        self._outcome, self._process = outcome, None
        if embeddings is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
            for side, rows in zip(_SIDES, embeddings, strict=True):
                save_array(self.folder / f"{side}.npy", rows)
            (self.folder / "selector.pickle").write_bytes(pickle.dumps((selector, epoch, seed)))
            self._process = self._start()

    def result(self) -> tuple[np.ndarray, dict[str, float]]:
        """(num_batches, B) pair indices and the report on them, once they are there.

        Raises:
            DualencError: the selection failed.
        """
        if self._outcome is None:
            # What a scheduler or a terminal sends goes to every process of a job, but the run is still there to say
            # when it ends.
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
        """Give the job up."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait()
        remove(self.folder)

    def state_dict(self) -> dict[str, Any]:
        """The outcome if it is there, else what is needed to start again and get the same."""
        state: dict[str, Any] = {"epoch": self.epoch, "seen_at": self.seen_at}
        if self._process is None or self._process.poll() not in (None, *_SENT_TO_ALL):
            batches, report = self.result()
            return {**state, "batches": batches, "report": dict(report)}
        return {**state, **{side: np.load(self.folder / f"{side}.npy") for side in _SIDES}}

    def _start(self) -> subprocess.Popen[bytes] | None:
        # Alone: not a rank of the training, and with no GPU to hold memory on.
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
