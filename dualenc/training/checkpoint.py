"""The folder of a run and its checkpoints.

The folder is identified by its meta.json and locked by one run at a time. Checkpoints are complete
or absent:

    OUTPUT/checkpoints/step-00000500/
        state.pt      state common to all ranks, and the random generators of each rank; readable by
                      torch.load(weights_only=True)
        meta.json     step, fingerprint of the recipe, size and SHA-256 of state.pt
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import nn

from dualenc import distributed
from dualenc.data.pairs import PairDataset
from dualenc.data.store.identity import plain_values
from dualenc.encoders.dual import SIDES, DualEncoder
from dualenc.errors import DualencError, explain
from dualenc.io.checksums import recorded, verify_files
from dualenc.io.files import (
    atomic_folder,
    check_folder_target,
    is_folder_of,
    recover_inside,
    remove,
    removed_if_refused,
    save_tensors,
    write_json,
)
from dualenc.io.reading import read_json_object
from dualenc.io.targets import RUN, RUN_FILES, check_outside
from dualenc.objectives.base import Objective
from dualenc.seeds import random_state, seed_everything, set_random_state

LOCK = ".lock"
META = "meta.json"
STATE = "state.pt"


def fingerprint(
    settings: Mapping[str, Any],
    model: DualEncoder,
    objective: nn.Module,
    pairs: PairDataset,
    batching: object,
) -> dict[str, Any]:
    """Return everything that the result of a run depends on, as a flat dict of plain values.

    `Checkpoints` compares it to refuse resuming another run. It covers class, weights and item
    preparation of the model; class, weights and settings of the objective; class, sizes and
    contents of the data; and class and settings of the batch selector.

    Args:
        settings: nested settings of the run.
        model: the model.
        objective: the objective.
        pairs: the training pairs.
        batching: the batch selector.
    """
    # Through JSON, to match what is read back from meta.json: tuples become lists, paths strings.
    described = flatten(json.loads(json.dumps(settings, default=str)))
    for name, module in (("model", model), ("objective", objective)):
        described[name] = type(module).__name__
        described[f"{name}.weights"] = _weights_digest(module)
    for side in SIDES:
        prepare = plain_values(model.tower(side).prepare)
        described |= flatten(prepare, f"model.{side}.")
    for path, module in objective.named_modules(prefix="objective"):
        if isinstance(module, Objective):
            # On the left of "|": a recipe's spelling of a setting takes precedence.
            described = flatten(module.settings, f"{path}.") | described
    # On one rank only: reading the contents of large data takes minutes.
    contents = distributed.from_main(pairs.identities)
    described["data"] = (
        f"{type(pairs).__name__}: {len(pairs)} pairs, "
        f"{pairs.num_left} left, {pairs.num_right} right items"
    )
    described |= flatten(contents, "data.")
    described["batching"] = type(batching).__name__
    return flatten(plain_values(batching), "batching.") | described


def _weights_digest(module: nn.Module) -> str:
    """Return a digest of the names and shapes of all weights, and of the values of frozen ones."""
    # Checkpoints omit frozen weights, so their values must be compared here.
    weights = [
        (name, list(weight.shape), _frozen_sum(weight))
        for name, weight in module.named_parameters()
    ]
    return hashlib.sha256(json.dumps(weights).encode()).hexdigest()[:12]


def _frozen_sum(weight: nn.Parameter) -> int | None:
    """Return the sum of a frozen weight's bytes; None for a trained weight."""
    if weight.requires_grad:
        return None
    # A sum of integers is the same on every device, whatever the order of addition.
    return int(weight.detach().flatten().view(torch.uint8).sum(dtype=torch.int64))


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join the keys of nested mappings with dots: {"a": {"b": 1}} becomes {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@contextmanager
def locked_run(output: str | os.PathLike[str], *, resume: bool, overwrite: bool) -> Iterator[None]:
    """Lock the folder of a run in this context, and create it if it is missing.

    All ranks enter the context together; the main process holds the lock. If the run writes
    nothing, the folder is restored: a mistake found before the first step leaves no trace.

    Args:
        output: folder of the run.
        resume: True to accept a folder that holds a run, to continue it.
        overwrite: True to accept a folder that holds a run, to replace it.

    Raises:
        DualencError: the folder is locked, holds a run or other files, or cannot be written.
    """
    folder = Path(output)
    lock = FileLock(folder / LOCK, timeout=0)
    with removed_if_refused(folder):
        try:
            distributed.from_main(partial(_take_folder, folder, lock, resume, overwrite))
            yield
        finally:
            if lock.is_locked:
                with suppress(FileNotFoundError):
                    if set(os.listdir(folder)) <= {LOCK, META}:
                        remove(folder / META)
                # Removed before the release: a process that waits for the lock then notices that
                # the file is gone, and creates another one.
                Path(lock.lock_file).unlink(missing_ok=True)
                lock.release()


def _take_folder(folder: Path, lock: FileLock, resume: bool, overwrite: bool) -> None:
    """Check, create, lock and mark the folder of a run; the lock file names its holder."""
    path = Path(lock.lock_file)
    try:
        check_run_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {socket.gethostname()}, since {since}\n"
        path.write_text(holder, encoding="utf-8")
        recover_inside(folder)
        present = [name for name in RUN_FILES if (folder / name).exists()]
        if present and not (resume or overwrite):
            raise DualencError(
                f"holds a run already ({present[0]})",
                fix="resume it (--resume), set trainer.overwrite=true, or choose another "
                "trainer.output",
                where=folder,
            )
        mark_run(folder)
    except Timeout:
        holder = path.read_text(encoding="utf-8", errors="replace").strip()
        raise DualencError(
            f"is in use by another run ({holder})",
            fix="wait for it or stop it, or choose another trainer.output",
            where=folder,
        ) from None
    except OSError as error:
        raise DualencError(
            f"cannot be created or written ({error.strerror})",
            fix="choose another trainer.output",
            where=folder,
        ) from None


def mark_run(folder: Path) -> None:
    """Mark a folder as a run with a meta.json, unless it has one.

    Args:
        folder: existing folder, which may hold other files.
    """
    if not (folder / META).exists():
        write_json(folder / META, {"format": RUN})


def _is_run(folder: Path) -> bool:
    """Return True if a folder holds a run, or just the lock file of a run killed at its start."""
    return os.listdir(folder) == [LOCK] or is_folder_of(folder, RUN)


def check_run_folder(output: str | os.PathLike[str]) -> None:
    """Refuse a folder that holds anything but a run, or lies in a folder that others replace.

    Args:
        output: folder to check, which need not exist.

    Raises:
        DualencError: the folder cannot be used.
    """
    check_outside(output)
    check_folder_target(output, _is_run, "run of dualenc")


def clear(output: str | os.PathLike[str]) -> None:
    """Remove an earlier run from a folder."""
    if distributed.is_main():
        for name in RUN_FILES:
            remove(Path(output) / name)


class Checkpoints:
    """The checkpoints of one run.

    Saving removes old checkpoints; loading verifies the latest one and refuses one of another run.

    Args:
        folder: folder of the checkpoints.
        keep: number of recent checkpoints to keep.
        fingerprint: flat dict of everything that must stay the same when the run is resumed.
    """

    def __init__(
        self, folder: Path, keep: int = 2, fingerprint: dict[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.fingerprint = fingerprint or {}

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint. All ranks call it together.

        Args:
            step: number of optimizer steps so far.
            state: state of the run, the same on all ranks.
        """
        # Generators differ by rank, as dropout must.
        ranks = distributed.gather_objects(random_state())
        if distributed.is_main():
            folder = self.folder / f"step-{step:08d}"
            with atomic_folder(folder, lambda path: (path / STATE).exists(), "checkpoint") as part:
                part.mkdir()
                save_tensors(part / STATE, {**state, "ranks": ranks})
                write_json(
                    part / META,
                    {"step": step, **recorded(part, [STATE]), "fingerprint": self.fingerprint},
                )
            for _, old in self.finished()[: -self.keep]:
                remove(old)
        distributed.barrier()

    def finished(self) -> list[tuple[int, Path]]:
        """Return (step, folder) of every checkpoint, in ascending order."""
        folders = self.folder.glob("step-*")
        return sorted(
            (int(folder.name[5:]), folder) for folder in folders if folder.name[5:].isdecimal()
        )

    def load_latest(self, seed: int) -> dict[str, Any] | None:
        """Load the latest checkpoint, and set this rank's random generators from it.

        Args:
            seed: random seed for ranks that the checkpoint lacks (more processes than before).

        Returns:
            The state; None without a checkpoint.

        Raises:
            DualencError: a file is missing, truncated or changed, or the recipe or data differ.
        """
        if distributed.is_main():
            recover_inside(self.folder)
        # The main process decides: on a shared file system, other ranks may see a folder later.
        finished = self.finished()
        folder = distributed.broadcast_object(finished[-1][1] if finished else None)
        if folder is None:
            return None
        # Only on the main process, because all ranks read the same files.
        distributed.from_main(partial(self._verify, folder))
        # With weights_only, a checkpoint of unknown origin cannot run code.
        with explain(f"{folder / STATE}: damaged", _remedy(folder)):
            state: dict[str, Any] = torch.load(
                folder / STATE, map_location="cpu", weights_only=True
            )
        ranks = state.pop("ranks")
        # A run may be resumed on more processes than wrote the checkpoint.
        if distributed.rank() < len(ranks):
            set_random_state(ranks[distributed.rank()])
        else:
            seed_everything(seed, distributed.rank())
        return state

    def _verify(self, folder: Path) -> None:
        kinds = {"sizes": dict, "files": dict, "fingerprint": dict}
        meta = read_json_object(folder / META, kinds)
        sums = (meta["sizes"], meta["files"])
        verify_files(folder, [STATE], *sums, _remedy(folder), whole=True)
        saved = meta["fingerprint"]
        keys = sorted({*saved, *self.fingerprint})
        # The selector's values come last: they often follow from another setting, which is the one
        # to name. The sort is stable.
        keys.sort(key=lambda key: key.startswith("batching."))
        for key in keys:
            was = saved.get(key)
            now = self.fingerprint.get(key)
            if was != now:
                raise DualencError(
                    "this checkpoint is from another recipe or other data: "
                    f"{key} was {was!r} and is now {now!r}",
                    fix="resume with the recipe and data it was made with, or choose another "
                    "output folder",
                    where=folder,
                )


def _remedy(folder: Path) -> str:
    """Return the advice for a damaged checkpoint."""
    return f"remove the folder {folder} to resume from the checkpoint before it"
