"""The folder of a run: known by its meta.json, locked by one run at a time; its checkpoints are complete or absent.

    OUTPUT/checkpoints/step-00000500/
        state.pt      everything that is the same on all ranks, readable with torch.load(weights_only=True)
        ranks.pt      each rank's random generators
        meta.json     step, fingerprint of the recipe, size and SHA-256 of each file

`accelerate.save_state` is not used: it writes in place, in several files and with pickled parts, and knows neither the
position in an epoch nor the state of a selection of batches.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, SoftFileLock, Timeout
from torch import nn

from dualenc import distributed
from dualenc.checksums import checksums
from dualenc.data.pairs import PairDataset
from dualenc.encoders.dual import is_model
from dualenc.errors import DualencError
from dualenc.files import (
    atomic_folder,
    check_folder_target,
    is_folder_of,
    recover_inside,
    remove,
    save_tensors,
    write_json,
)
from dualenc.objectives.base import Objective
from dualenc.reading import read_json
from dualenc.seeds import random_state, seed_everything, set_random_state

FORMAT = "dualenc-run"
LOCK = ".lock"
META = "meta.json"
RUN_FILES = ("metrics.jsonl", "evaluations.jsonl", "checkpoints", "model", "recipe.yaml", "trackers")


def fingerprint(
    settings: Mapping[str, Any], model: nn.Module, objective: nn.Module, pairs: PairDataset, batching: object
) -> dict[str, Any]:
    """A flat dict of plain values that describes a run, for `Checkpoints`.

    Args:
        settings: nested settings that the result depends on.
        model: described by its class and the names and shapes of its weights, which do not depend on the number of
            processes as buffers may.
        objective: likewise, and by its settings, where those of a recipe do not say it; its state is part of the run.
        pairs: described by class, sizes, ids and contents (`PairDataset.identities`), so that changed data of equal
            size is noticed; the main process reads them for all.
        batching: described by its class.
    """
    # Through JSON, as meta.json gives it back: tuples become lists, paths texts.
    described = flatten(json.loads(json.dumps(settings, default=str)))
    for name, module in (("model", model), ("objective", objective)):
        shapes = [(key, list(parameter.shape)) for key, parameter in module.named_parameters()]
        digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]
        described[name] = f"{type(module).__name__} with weights {digest}"
    for path, module in objective.named_modules(prefix="objective"):
        if isinstance(module, Objective):
            described = flatten(module.settings, f"{path}.") | described
    sizes = f"{len(pairs)} pairs, {pairs.num_left} left, {pairs.num_right} right items"
    # Reading all contents takes minutes on large data: once, not on every rank.
    contents = distributed.broadcast_object(pairs.identities() if distributed.is_main() else {})
    return {
        **described,
        "data": f"{type(pairs).__name__} of {sizes}",
        **flatten(contents, "data."),
        "batching": type(batching).__name__,
    }


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
    """Lock a run's folder in this context; all ranks enter it together, the main process holds the lock.

    The folder is made if it is missing. Otherwise nothing in it changes here but `meta.json`, and a folder in which
    nothing else was written is as before at the end: a mistake that comes to light before the first step leaves no
    trace.

    Args:
        output: the folder.
        resume: a run in the folder will be resumed.
        overwrite: a run in the folder may be replaced, see `clear`.

    Raises:
        DualencError: as `check_run_folder`; another run is using the folder; it holds a finished or broken one and
            neither is wanted; or the folder cannot be made.
    """
    folder = Path(output)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = FileLock(folder / LOCK, timeout=0)
    problem = None
    if distributed.is_main():
        try:
            check_run_folder(output, resume=resume, overwrite=overwrite)
            folder.mkdir(parents=True, exist_ok=True)
            _lock(lock)
            recover_inside(folder)
            present = [name for name in RUN_FILES if (folder / name).exists()]
            if present and not (resume or overwrite):
                raise DualencError(
                    f"{folder}: holds a run already ({present[0]}); resume it (--resume), allow "
                    "trainer.overwrite=true, or choose another trainer.output"
                )
            mark_run(folder)
        except OSError as error:
            problem = f"{folder}: cannot be made or written to ({error.strerror}); choose another trainer.output"
        except DualencError as error:
            problem = str(error)
    try:
        # Raised on all ranks: the others would wait for the main process in their first exchange.
        problem = distributed.broadcast_object(problem)
        if problem:
            raise DualencError(problem)
        yield
    finally:
        if lock.is_locked:
            with suppress(FileNotFoundError):
                if set(os.listdir(folder)) <= {LOCK, META}:
                    remove(folder / META)
            # Removed while it is held: whoever waits for a removed lock file notices, and tries again.
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()
        if distributed.is_main():
            # Inner folders first, up to one that holds something.
            with suppress(OSError):
                for path in made:
                    path.rmdir()


def mark_run(folder: Path) -> None:
    """Let a run use a folder that holds other files, unless these have a meta.json."""
    if not (folder / META).exists():
        write_json(folder / META, {"format": FORMAT})


def check_run_folder(output: str | os.PathLike[str], *, resume: bool, overwrite: bool) -> None:
    """Refuse to write into a folder that holds anything but a run; arguments as of `locked_run`.

    Raises:
        DualencError: the folder, or a file or folder in it that would be replaced, is of another origin.
    """
    check_folder_target(output, _may_be_used, "run of dualenc")
    for name in (LOCK, *(RUN_FILES if overwrite and not resume else ("model",))):
        path = Path(output) / name
        if path.exists() and not _is_of_a_run(path):
            raise DualencError(
                f"{path}: was not written by a training and is not replaced; move it, or choose another trainer.output"
            )


def _may_be_used(folder: Path) -> bool:
    """Whether a folder holds a run, or nothing yet but what one that was killed before its first step has left."""
    if all(name == LOCK or name.startswith(f".{META}.part") for name in os.listdir(folder)):
        return True
    return is_folder_of(folder, FORMAT)


def _lock(lock: FileLock) -> None:
    """Take the lock, and write into its file who has it; the system frees it when the process ends."""
    path = Path(lock.lock_file)
    try:
        lock.acquire()
    except Timeout:
        with suppress(OSError):
            holder = " ".join(path.read_text(encoding="utf-8", errors="replace").split())[:200]
            raise DualencError(
                f"{path.parent}: a run is going on in this folder ({holder}); wait for it or stop it, or choose "
                "another trainer.output"
            ) from None
        raise DualencError(f"{path.parent}: another run has just ended in this folder; start again") from None
    # On a file system without locks, filelock keeps its own record in the file.
    if not isinstance(lock, SoftFileLock):
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since}\n", encoding="utf-8")


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a checkpoint, complete or not."""
    return any((folder / name).exists() for name in ("state.pt", "meta.json"))


def _is_of_a_run(path: Path) -> bool:
    """Whether something that has a name of the files of a run was written by a training."""
    # A user's file or folder of the same name must not be deleted; metrics.jsonl and the like are files.
    if path.name == LOCK:
        return path.is_file() and bool(re.match(r"(process )?\d+\s|$", path.read_text(errors="replace")))
    if path.suffix:
        return path.is_file()
    if path.name == "checkpoints":
        return path.is_dir() and all(is_checkpoint(step) or step.name.startswith(".") for step in path.iterdir())
    if path.name == "model":
        return is_model(path)
    return path.is_dir()


def clear(output: str | os.PathLike[str]) -> None:
    """Remove an earlier run."""
    if distributed.is_main():
        for name in RUN_FILES:
            remove(Path(output) / name)


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: of the checkpoints; made when the first one is written.
        keep: how many of the latest stay.
        fingerprint: flat dict of what must be the same for a resumed run to be the same run.
    """

    def __init__(self, folder: Path, keep: int = 2, fingerprint: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.fingerprint = fingerprint or {}

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint; every rank calls it, the main process writes.

        Args:
            step: number of optimizer steps done.
            state: tensors and plain values, equal on all ranks.
        """
        # Dropout draws from each rank's own generators.
        ranks = distributed.gather_objects(random_state())
        if distributed.is_main():
            with atomic_folder(self.folder / f"step-{step:08d}", is_checkpoint, "checkpoint") as part:
                part.mkdir()
                save_tensors(part / "state.pt", state)
                save_tensors(part / "ranks.pt", ranks)
                self._save_meta(part, step)
            _sync_folder(self.folder)
            # Only now that a newer one is complete and on the disk.
            for _, old in self.finished()[: -self.keep]:
                remove(old)
        distributed.barrier()

    def _save_meta(self, part: Path, step: int) -> None:
        written = [path for path in sorted(part.rglob("*")) if path.is_file()]
        sizes = {path.relative_to(part).as_posix(): path.stat().st_size for path in written}
        meta = {"step": step, "files": sizes, "checksums": checksums(part, sizes), "fingerprint": self.fingerprint}
        write_json(part / "meta.json", meta)

    def finished(self) -> list[tuple[int, Path]]:
        """(step, folder) of every checkpoint whose files are all there, in ascending order.

        The rename that ends the writing of a folder is atomic, but disks and copies are not: sizes are compared.
        """
        found: list[tuple[int, Path]] = []
        if not self.folder.is_dir():
            return found
        for folder in self.folder.iterdir():
            named = re.match(r"step-(\d+)$", folder.name)
            if named is None:
                continue
            if _is_complete(folder):
                found.append((int(named[1]), folder))
            else:
                warnings.warn(f"{folder}: this checkpoint is not complete and is passed over", stacklevel=2)
        return sorted(found)

    def load_latest(self, seed: int) -> dict[str, Any] | None:
        """The state of the latest complete checkpoint, or None; sets this rank's random generators.

        A rank that the checkpoint does not know (more processes than before) is seeded anew from (seed, rank).

        Raises:
            DualencError: the checkpoint belongs to another recipe or is damaged.
        """
        if distributed.is_main():
            recover_inside(self.folder)
        # The main process decides: another rank may see the folder later, on a shared file system.
        complete = self.finished()
        folder = distributed.broadcast_object(complete[-1][1] if complete else None)
        if folder is None:
            return None
        self._check_fingerprint(folder)
        _check_files(folder)
        state: dict[str, Any] = _load(folder / "state.pt")
        ranks = _load(folder / "ranks.pt")
        # A run may be resumed on more processes than it was saved by.
        if distributed.rank() < len(ranks):
            set_random_state(ranks[distributed.rank()])
        else:
            seed_everything(seed, distributed.rank())
        return state

    def _check_fingerprint(self, folder: Path) -> None:
        saved = read_json(folder / "meta.json")["fingerprint"]
        for key in sorted(set(saved) | set(self.fingerprint)):
            was = saved.get(key)
            now = self.fingerprint.get(key)
            if was != now:
                raise DualencError(
                    f"{folder}: this checkpoint is from another recipe or other data: {key} was {was!r} and is now "
                    f"{now!r}; resume with the recipe and data it was made with, or choose another output folder"
                )


def _is_complete(folder: Path) -> bool:
    """Whether a checkpoint's files have the sizes in its meta.json."""
    try:
        sizes = read_json(folder / "meta.json")["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (DualencError, OSError, AttributeError, KeyError, TypeError):
        return False


def _sync_folder(folder: Path) -> None:
    """Flush the rename of a finished checkpoint to the disk."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_files(folder: Path) -> None:
    """Compare every file with its checksum, on the main process; what is wrong is raised on all."""
    problem = None
    if distributed.is_main():
        problem = _problem_with_files(folder)
    problem = distributed.broadcast_object(problem)
    if problem:
        raise DualencError(problem)


def _problem_with_files(folder: Path) -> str | None:
    recorded = read_json(folder / "meta.json")["checksums"]
    found = checksums(folder, recorded)
    for name, expected in recorded.items():
        if found[name] != expected:
            return _damage(folder / name, "its SHA-256 is not the one in meta.json")
    return None


def _load(path: Path) -> Any:
    # weights_only, so that a checkpoint of unknown origin cannot run code.
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DualencError(_damage(path, " ".join(str(error).split())[:120])) from None


def _damage(path: Path, reason: str) -> str:
    return f"{path}: damaged ({reason}); remove the folder {path.parent} to resume from the checkpoint before it"
