"""Batches chosen from embeddings while training goes on, and the nearest items that some objectives ask for.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dualenc import distributed
from dualenc.batching.selector import BatchSelector, batch_losses
from dualenc.data.pairs import PairDataset
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import DualencError
from dualenc.files import atomic_path, read_json, remove, save_array, write_json
from dualenc.objectives.base import Objective
from dualenc.training.checkpoint import random_state_kept
from dualenc.training.encoding import Autocast, PlainEncoding
from dualenc.training.loader import SIDES, BatchLoader, generator

EmbeddingSource = Literal["epoch", "fresh"]
FreshPass = Callable[[], tuple[np.ndarray, np.ndarray]]

_STEPS_KEPT_ON_DEVICE = 64
_BATCHES_COMPARED = 1024
_LISTS_PROBED = 8


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
    random = np.resize(generator("compare", seed, epoch).permutation(len(left)), batches.shape)
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
        self._outcome: tuple[np.ndarray, dict[str, float]] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
        save_array(self.folder / "left.npy", left)
        save_array(self.folder / "right.npy", right)
        (self.folder / "selector.pickle").write_bytes(pickle.dumps((selector, epoch, seed)))
        self._process: subprocess.Popen[bytes] | None = self._start()

    def result(self) -> tuple[np.ndarray, dict[str, float]]:
        """(num_batches, B) pair indices and the report on them, once they are there.

        Raises:
            DualencError: the selection failed.
        """
        if self._outcome is None:
            # A scheduler's SIGTERM goes to every process of a job, but the run is still there to say when it ends.
            while self._process is not None and self._process.wait() == -signal.SIGTERM:
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
        common = {"epoch": self.epoch, "seen_at": self.seen_at}
        if self._process is None or self._process.poll() not in (None, -signal.SIGTERM):
            batches, report = self.result()
            return {**common, "batches": torch.from_numpy(batches), "report": dict(report)}
        return {**common, **{side: torch.from_numpy(np.load(self.folder / f"{side}.npy")) for side in SIDES}}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any], selector: Any, folder: Path, seed: int) -> SelectionJob:
        """The job that `state_dict` describes: finished, or started again."""
        if "batches" not in state:
            left, right = state["left"].numpy(), state["right"].numpy()
            return cls(selector, state["epoch"], left, right, state["seen_at"], folder, seed)
        job = cls.__new__(cls)
        job.epoch, job.seen_at, job._process = state["epoch"], state["seen_at"], None
        job.folder = folder / "job-finished"
        job._outcome = state["batches"].numpy().copy(), dict(state["report"])
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


class EmbeddingTable:
    """(M, D) float16 embeddings of both sides and the step at which each pair was last seen.

    Each rank buffers what it encoded; `flush` brings all of it to the main process, which alone holds the table.
    Pairs that no batch has brought yet have random unit vectors.

    Args:
        num_pairs: M.
        seed: of the vectors of pairs not seen yet.
    """

    def __init__(self, num_pairs: int, seed: int = 0) -> None:
        self.num_pairs, self.seed = num_pairs, seed
        self.left: np.ndarray | None = None
        self.right: np.ndarray | None = None
        self.seen_at = np.full(num_pairs, -1, dtype=np.int64)
        self._fresh: list[tuple[Tensor, Tensor, Tensor, int]] = []

    @property
    def empty(self) -> bool:
        """Whether no batch has been added yet."""
        return self.left is None and not self._fresh

    def add(self, indices: Tensor, left: Tensor, right: Tensor, step: int) -> None:
        """Note one batch of this rank.

        Args:
            indices: (b,) pair indices.
            left: (b, D) embeddings.
            right: (b, D) embeddings.
            step: number of the optimizer step, for the age of a row.
        """
        rows = (indices, left.detach().half(), right.detach().half(), step)
        self._fresh.append(rows)
        late = len(self._fresh) - _STEPS_KEPT_ON_DEVICE
        if left.device.type != "cpu" and late >= 0 and len(self._fresh) % _STEPS_KEPT_ON_DEVICE == 0:
            self._fresh[late:] = [(i.cpu(), a.cpu(), b.cpu(), s) for i, a, b, s in self._fresh[late:]]

    def flush(self, device: torch.device) -> None:
        """Bring every rank's rows into the main process's table; all ranks call it together.

        Args:
            device: what the process group communicates on.
        """
        rows, self._fresh = self._fresh, []
        dim = max(distributed.gather_objects(rows[0][1].shape[1] if rows else 0))
        if dim == 0:
            return
        none, nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dim).half()
        parts = [
            torch.cat([none, *(row[0].cpu() for row in rows)]),
            torch.cat([none, *(torch.full_like(row[0], row[3], device="cpu") for row in rows)]),
            torch.cat([nothing, *(row[1].cpu() for row in rows)]),
            torch.cat([nothing, *(row[2].cpu() for row in rows)]),
        ]
        if distributed.is_initialized():
            parts = [distributed.gather(part.to(device)).cpu() for part in parts]
        if not distributed.is_main():
            return
        indices, steps, left, right = (part.numpy() for part in parts)
        if self.left is None or self.right is None:
            draws = [generator("table", self.seed, side) for side in (0, 1)]
            random = [draw.standard_normal((self.num_pairs, dim), dtype=np.float32) for draw in draws]
            unit = [(rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float16) for rows in random]
            self.left, self.right = unit
        # A pair may come twice between two flushes: in ascending order of steps the last one stays.
        order = np.argsort(steps, kind="stable")
        self.left[indices[order]] = left[order]
        self.right[indices[order]] = right[order]
        self.seen_at[indices[order]] = steps[order]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; call `flush` before."""
        if self.left is None or self.right is None:
            return {}
        arrays = {"left": self.left, "right": self.right, "seen_at": self.seen_at}
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._fresh = []
        if state and distributed.is_main():
            self.left, self.right = state["left"].numpy().copy(), state["right"].numpy().copy()
            self.seen_at = state["seen_at"].numpy().copy()


def fresh_embeddings(
    model: DualEncoder, loader: BatchLoader, device: torch.device, autocast: Autocast, batch_size: int = 256
) -> tuple[np.ndarray, np.ndarray]:
    """Encode every pair without augmentation, dropout or batch statistics; every rank takes a share.

    Args:
        model: in training mode, in which it is left.
        loader: whose pairs; bad samples get random vectors.
        device: where the model is.
        autocast: a new mixed precision context per call.
        batch_size: pairs encoded at once on each rank.

    Returns:
        (M, D) and (M, D) float16 on the main process; empty arrays elsewhere.
    """
    pairs = loader.pairs
    width = batch_size * distributed.world_size()
    encoding = PlainEncoding(model, device, autocast)
    table = EmbeddingTable(len(pairs))
    model.eval()
    with torch.no_grad(), random_state_kept():
        # The last batch wraps around, so that all have the same width.
        order = np.resize(np.arange(len(pairs)), (-(-len(pairs) // width), width))
        for batch in loader.for_evaluation().batches(order):
            left = encoding.encode("left", batch.left)
            right = left if pairs.views else encoding.encode("right", batch.right)
            table.add(batch.indices, left, right, step=0)
    model.train()
    table.flush(device)
    nothing = np.zeros((0, 0), dtype=np.float16)
    return (nothing if table.left is None else table.left), (nothing if table.right is None else table.right)


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
        if not useless and self._launch(epoch + self.background, step, fresh) and not self.background:
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

    def _launch(self, epoch: int, step: int, fresh: FreshPass) -> bool:
        """Start a selection, if there are embeddings; all ranks call it together, the main process has the job."""
        if self.embeddings == "fresh":
            left, right = fresh()
            seen_at = float(step)
        else:
            self.table.flush(self.device)
            if distributed.broadcast_object(self.table.empty):
                return False
            if self.table.left is not None and self.table.right is not None:
                left, right, seen_at = self.table.left, self.table.right, float(self.table.seen_at.mean())
        if distributed.is_main():
            self.job = SelectionJob(self.selector, epoch, left, right, seen_at, self.folder, self.seed)
        return True

    def _collect(self, step: int) -> dict[str, float]:
        """Wait for the selection under way, if any, and put it in force on all ranks."""
        outcome: tuple[np.ndarray, dict[str, float]] | DualencError | None = None
        if distributed.is_main() and self.job is not None:
            job, self.job = self.job, None
            try:
                batches, report = job.result()
                outcome = batches, {**report, "staleness": step - job.seen_at}
            except DualencError as error:
                outcome = error
        outcome = distributed.broadcast_object(outcome)
        if isinstance(outcome, DualencError):
            raise outcome
        if outcome is None:
            return {}
        self.selected, report = outcome
        return report


def tell_neighbors(objective: Objective, pairs: PairDataset, fresh: FreshPass) -> None:
    """Embed all pairs and tell the objective which items are near each anchor; all ranks call it together.

    Args:
        objective: is told as many neighbours as its `num_neighbors` says; nothing happens for 0.
        pairs: whose items.
        fresh: makes an evaluation-mode pass; returns (M, D) and (M, D) on the main process.
    """
    if not objective.num_neighbors:
        return
    embeddings = fresh()
    found: list[np.ndarray] | None = None
    if distributed.is_main():
        items = []  # ids (n,) of the items of a side that are in a pair, and their embeddings (n, D)
        for ids, rows in zip((pairs.left_id, pairs.right_id), embeddings, strict=True):
            distinct, first = np.unique(np.asarray(ids), return_index=True)
            items.append((distinct, np.ascontiguousarray(rows[first], dtype=np.float32)))
        found = [_near(items[0], items[1], pairs.num_left, objective.num_neighbors)]
        if not pairs.views:
            found.append(_near(items[1], items[0], pairs.num_right, objective.num_neighbors))
    for side, ids in zip(SIDES, distributed.broadcast_object(found), strict=False):
        objective.set_neighbors(side, torch.from_numpy(ids))


def _near(
    anchors: tuple[np.ndarray, np.ndarray], items: tuple[np.ndarray, np.ndarray], num_anchors: int, count: int
) -> np.ndarray:
    """(num_anchors, count) ids of the items with the largest cosine; -1 for anchors in no pair and missing ones."""
    from dualenc.search import build

    vectors = items[1]
    index = build.new_index(vectors.shape[1], build.choose_factory(*vectors.shape), "ip")
    if rows := build.training_rows(index, len(vectors)):
        index.train(vectors[np.random.default_rng(0).permutation(len(vectors))[:rows]])
    if hasattr(index, "nprobe"):
        index.nprobe = _LISTS_PROBED
    index.add(vectors)
    _, places = index.search(anchors[1], count)
    near = np.full((num_anchors, count), -1, dtype=np.int64)
    near[anchors[0]] = np.where(places < 0, -1, items[0][places])
    return near


if __name__ == "__main__":
    main(Path(sys.argv[1]))
