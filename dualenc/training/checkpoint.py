"""The folder of a run: known by its meta.json, locked by one run at a time; its checkpoints are
complete or absent.

OUTPUT/checkpoints/step-00000500/
    state.pt      what is the same on all ranks, and the random generators of each; for
    torch.load(weights_only=True) meta.json     step, fingerprint of the recipe, size and SHA-256 of
    state.pt
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
    """A flat dict of plain values that describes a run, for `Checkpoints`: what its result depends
    on.

    Model and objective by their classes, the names and shapes of their weights, and the values of
    frozen ones, which checkpoints leave out; the model by how it prepares items, objective and
    batches by their settings too; the data by class, sizes and contents.
    """
    # Through JSON, as meta.json gives it back: tuples become lists, paths texts.
    described = flatten(json.loads(json.dumps(settings, default=str)))
    for name, module in (("model", model), ("objective", objective)):
        weights = [
            (key, list(weight.shape), _frozen_sum(weight))
            for key, weight in module.named_parameters()
        ]
        digest = hashlib.sha256(json.dumps(weights).encode()).hexdigest()[:12]
        described[name] = type(module).__name__
        described[f"{name}.weights"] = digest
    for side in SIDES:
        described |= flatten(plain_values(model.tower(side).prepare), f"model.{side}.")
    for path, module in objective.named_modules(prefix="objective"):
        if isinstance(module, Objective):
            described = flatten(module.settings, f"{path}.") | described
    # Reading all contents takes minutes on large data: once, not on every rank.
    contents = distributed.from_main(pairs.identities)
    kind = type(pairs).__name__
    described["data"] = (
        f"{kind}: {len(pairs)} pairs, {pairs.num_left} left, {pairs.num_right} right items"
    )
    described |= flatten(contents, "data.")
    described["batching"] = type(batching).__name__
    return flatten(plain_values(batching), "batching.") | described


def _frozen_sum(weight: nn.Parameter) -> int | None:
    """The sum of a frozen weight's bytes, the same on every device; None of one that trains."""
    if weight.requires_grad:
        return None
    return int(weight.detach().flatten().view(torch.uint8).sum(dtype=torch.int64))


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@contextmanager
def locked_run(output: str | os.PathLike[str], *, resume: bool, overwrite: bool) -> Iterator[None]:
    """Lock a run's folder in this context; all ranks enter it together, the main process holds the
    lock.

    The folder is made if it is missing. A folder in which nothing was written is as before at the
    end: a mistake that comes to light before the first step leaves no trace.
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
                # Removed while it is held: whoever waits for a removed lock file notices, and tries
                # again.
                Path(lock.lock_file).unlink(missing_ok=True)
                lock.release()


def _take_folder(folder: Path, lock: FileLock, resume: bool, overwrite: bool) -> None:
    """Check, make, lock and mark the folder of a run; its lock file says who has it."""
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
                f"{folder}: holds a run already ({present[0]}); resume it (--resume), allow trainer.overwrite=true, or "
                "choose another trainer.output"
            )
        mark_run(folder)
    except Timeout:
        holder = path.read_text(encoding="utf-8", errors="replace").strip()
        raise DualencError(
            f"{folder}: a run is going on in this folder ({holder}); wait for it or stop it, or choose another "
            "trainer.output"
        ) from None
    except OSError as error:
        problem = (
            f"{folder}: cannot be made or written ({error.strerror}); choose another trainer.output"
        )
        raise DualencError(problem) from None


def mark_run(folder: Path) -> None:
    """Let a run use a folder that holds other files, unless these have a meta.json."""
    if not (folder / META).exists():
        write_json(folder / META, {"format": RUN})


def _is_run(folder: Path) -> bool:
    """True if a folder holds a run, or the lock file of one that was killed at its beginning."""
    return os.listdir(folder) == [LOCK] or is_folder_of(folder, RUN)


def check_run_folder(output: str | os.PathLike[str]) -> None:
    """Refuse to write into a folder that holds anything but a run, or that others replace."""
    check_outside(output)
    # A run that was killed at its beginning has left its lock file.
    check_folder_target(output, _is_run, "run of dualenc")


def clear(output: str | os.PathLike[str]) -> None:
    """Remove an earlier run."""
    if distributed.is_main():
        for name in RUN_FILES:
            remove(Path(output) / name)


class Checkpoints:
    """The checkpoints of one run, of which the latest `keep` stay.

    `fingerprint` is a flat dict of what must be the same for a resumed run to be the same run.
    """

    def __init__(
        self, folder: Path, keep: int = 2, fingerprint: dict[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.fingerprint = fingerprint or {}

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the state after `step` optimizer steps, equal on all ranks, which call it
        together."""
        # Dropout draws from each rank's own generators.
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
        """(step, folder) of every checkpoint, in ascending order."""
        folders = self.folder.glob("step-*")
        return sorted(
            (int(folder.name[5:]), folder) for folder in folders if folder.name[5:].isdecimal()
        )

    def load_latest(self, seed: int) -> dict[str, Any] | None:
        """The state of the latest checkpoint, or None; sets this rank's random generators.

        A rank that the checkpoint does not know (more processes than before) is seeded anew from
        (seed, rank).

        Raises:
            DualencError: a file that is missing, cut short or changed, or another recipe or other
                data.
        """
        if distributed.is_main():
            recover_inside(self.folder)
        # The main process decides: another rank may see the folder later, on a shared file system.
        finished = self.finished()
        folder = distributed.broadcast_object(finished[-1][1] if finished else None)
        if folder is None:
            return None
        # On the main process alone: every rank reads the same files.
        distributed.from_main(partial(self._verify, folder))
        # weights_only, so that a checkpoint of unknown origin cannot run code.
        with explain(f"{folder / STATE}: damaged", _remedy(folder)):
            state: dict[str, Any] = torch.load(
                folder / STATE, map_location="cpu", weights_only=True
            )
        ranks = state.pop("ranks")
        # A run may be resumed on more processes than it was saved by.
        if distributed.rank() < len(ranks):
            set_random_state(ranks[distributed.rank()])
        else:
            seed_everything(seed, distributed.rank())
        return state

    def _verify(self, folder: Path) -> None:
        meta = read_json_object(folder / META)
        verify_files(folder, [STATE], meta, _remedy(folder), whole=True)
        saved = meta["fingerprint"]
        # What a selector knows follows from other settings.
        for key in sorted(
            {*saved, *self.fingerprint}, key=lambda key: (key.startswith("batching."), key)
        ):
            was = saved.get(key)
            now = self.fingerprint.get(key)
            if was != now:
                raise DualencError(
                    f"{folder}: this checkpoint is from another recipe or other data: {key} was {was!r} and is now "
                    f"{now!r}; resume with the recipe and data it was made with, or choose another output folder"
                )


def _remedy(folder: Path) -> str:
    return f"remove the folder {folder} to resume from the checkpoint before it"
