"""One selection of batches in a process of its own."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dualenc.errors import DualencError
from dualenc.files import read_json, remove, save_array


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
                [sys.executable, "-m", "dualenc.training.selection_worker", str(self.folder)],
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
