"""Checkpoints: folders that are complete or not there, found by looking, and the exact state of a run in each.

    OUTPUT/checkpoints/step-00000500/
        state.pt      everything that is the same on all ranks, readable with torch.load(weights_only=True)
        ranks.pt      each rank's random generators
        meta.json     step, fingerprint of the recipe, size and SHA-256 of each file

`accelerate.save_state` writes in place, in several files and with pickled parts, and knows neither the position in
an epoch nor the state of a selection of batches; hence these few lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

from dualenc import distributed
from dualenc.data.pairs import PairDataset
from dualenc.errors import DualencError
from dualenc.files import atomic_path, checksum, read_json, recover_inside, remove, save_tensors, write_json
from dualenc.training.loader import derive_seed
from dualenc.training.log import read_metrics


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python's, numpy's and torch's generators as a function of (seed, rank)."""
    derived = derive_seed("rank", seed, rank)
    random.seed(derived)
    np.random.seed(derived % 2**32)  # noqa: NPY002  # whoever uses the legacy generator gets it seeded too
    torch.manual_seed(derived)


def random_state() -> dict[str, Any]:
    """The states of Python's, numpy's, torch's CPU and current CUDA generator."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]  # noqa: NPY002
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put all generators back to what `random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """What happens inside (an evaluation) draws from the generators without shifting them for the training."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def fingerprint(
    settings: Mapping[str, Any], model: nn.Module, objective: nn.Module, pairs: PairDataset, batching: object
) -> dict[str, Any]:
    """A flat dict of plain values that describes a run, for `Checkpoints`.

    Args:
        settings: nested settings that the result depends on.
        model: its class and the names and shapes of its weights count.
        objective: likewise; its state is part of the run.
        pairs: its class, sizes, ids and contents count (`PairDataset.identities`), so that changed data of equal size
            is noticed; the main process reads them for all.
        batching: its class counts.
    """
    contents = distributed.broadcast_object(pairs.identities() if distributed.is_main() else {})
    return {
        **flatten(json.loads(json.dumps(settings, default=str))),
        "model": _describe(model),
        "objective": _describe(objective),
        "data": f"{type(pairs).__name__} of {len(pairs)} pairs, {pairs.num_left} left, {pairs.num_right} right items",
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


def _describe(module: nn.Module) -> str:
    """Class and weights: names and shapes, which do not depend on the number of processes as buffers may."""
    shapes = [(name, list(parameter.shape)) for name, parameter in module.named_parameters()]
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]
    return f"{type(module).__name__} with weights {digest}"


LOCK = ".lock"
RUN_FILES = ("metrics.jsonl", "checkpoints", "selection", "model", "recipe.yaml", "trackers")


@contextmanager
def claimed(output: str | os.PathLike[str], *, resume: bool, overwrite: bool) -> Iterator[None]:
    """In this context a run has a folder for itself; all ranks enter it together, the main process holds the lock.

    The folder is made if it is not there. Otherwise nothing in it changes here, and a folder in which nothing was
    written is gone at the end: a mistake that comes to light before the first step leaves no trace.

    Args:
        output: the folder.
        resume: a run there is gone on with.
        overwrite: a run there may be replaced, see `clear`.

    Raises:
        DualencError: another run is going on there; there is a finished or broken one and neither is wanted; or the
            folder cannot be made.
    """
    folder = Path(output)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    problem = None
    if distributed.is_main():
        try:
            _claim(folder, resume or overwrite)
        except DualencError as error:
            problem = str(error)
            _remove_empty(made)
    problem = distributed.broadcast_object(problem)
    if problem:
        raise DualencError(problem)
    try:
        yield
    finally:
        if distributed.is_main():
            _unlock(folder / LOCK)
            _remove_empty(made)


def clear(output: str | os.PathLike[str]) -> None:
    """Remove what an earlier run has left, all but `selection`, in which the new one may be at work already."""
    if distributed.is_main():
        for name in RUN_FILES:
            if name != "selection":
                remove(Path(output) / name)


def save_recipe(output: str | os.PathLike[str], recipe: Mapping[str, Any] | None) -> None:
    """Write recipe.yaml, from which the run can be made again."""
    if recipe and distributed.is_main():
        with atomic_path(Path(output) / "recipe.yaml") as beside:
            beside.write_text(yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True), encoding="utf-8")


def last_logged(output: str | os.PathLike[str], name: str) -> float:
    """The last value of a metric in metrics.jsonl; NaN if there is none."""
    values = [line[name] for line in read_metrics(Path(output) / "metrics.jsonl") if line.get(name) is not None]
    return float(values[-1]) if values else float("nan")


def _claim(folder: Path, wanted: bool) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _lock(folder / LOCK)
    except OSError as error:
        raise DualencError(
            f"{folder}: cannot be made or written to ({error.strerror}); choose another trainer.output"
        ) from None
    found = [name for name in RUN_FILES if (folder / name).exists()]
    if found and not wanted:
        _unlock(folder / LOCK)
        raise DualencError(
            f"{folder}: holds a run already ({found[0]}); resume it (--resume), allow trainer.overwrite=true, or "
            "choose another trainer.output"
        )


def _lock(lock: Path) -> None:
    """Write who works here, unless somebody does; the lock of a process that is gone is replaced."""
    with _alone(lock.parent):
        if lock.exists():
            holder = _holder(lock)
            who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}, since {holder.get('since', '?')}"
            state = _state(holder)
            if state == "unknown":
                raise DualencError(
                    f"{lock.parent}: locked by a run that cannot be looked up from here ({who}); if it has ended, "
                    f"remove {lock} and start again"
                )
            if state == "running":
                raise DualencError(
                    f"{lock.parent}: a run is going on in this folder ({who}); wait for it or stop it, or choose "
                    "another trainer.output"
                )
            lock.unlink(missing_ok=True)
        try:
            with open(lock, "x", encoding="utf-8") as stream:
                stream.write(json.dumps({**_myself(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n")
        except FileExistsError:
            raise DualencError(f"{lock.parent}: another run has just begun in this folder; wait for it") from None
        except OSError:
            lock.unlink(missing_ok=True)
            raise


def _unlock(lock: Path) -> None:
    holder = _holder(lock)
    if {name: holder.get(name) for name in _myself()} == _myself():
        lock.unlink(missing_ok=True)


def _holder(lock: Path) -> dict[str, Any]:
    """Who a lock names; nobody when it cannot be read: it may be being written on another machine."""
    try:
        holder = json.loads(lock.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _state(holder: dict[str, Any]) -> str:
    """Whether the process that a lock names is "running", "gone", or "unknown" as it is out of sight.

    A number alone does not name a process: numbers are used again, so the time of its start counts too; they mean
    nothing after another boot; and in another container they mean other processes.
    """
    myself = _myself()
    if holder.get("host") != myself["host"] or not isinstance(holder.get("pid"), int):
        return "unknown"
    if holder.get("boot") != myself["boot"]:
        return "gone"
    if holder.get("container") != myself["container"]:
        return "unknown"
    return "running" if holder.get("started") == _started(holder["pid"]) else "gone"


def _myself() -> dict[str, Any]:
    boot, container = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "container": os.readlink(container) if container.is_symlink() else "",
    }


def _started(pid: int) -> str:
    """When a process was started, in whatever clock its system keeps; "" for one that has ended."""
    if Path("/proc/self/stat").exists():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if fields[0] in "ZX" else fields[19]  # ended, but not yet noticed by its parent
    import psutil

    try:
        return f"{psutil.Process(pid).create_time():.0f}"
    except psutil.Error:
        return ""


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of several processes on one machine that find a stale lock, one replaces it and the others see that."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no such locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, inner ones first, up to one that holds something."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


_COMPLETE = re.compile(r"step-(\d+)$")


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are; made when the first one is written.
        keep: how many of the latest stay.
        fingerprint: flat dict of what must be the same for a resumed run to be the same run.
    """

    def __init__(self, folder: Path, keep: int = 2, fingerprint: dict[str, Any] | None = None) -> None:
        if keep < 1:
            raise DualencError(f"keep_checkpoints is {keep}; it must be at least 1")
        self.folder = folder
        self.keep = keep
        self.fingerprint = fingerprint or {}

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint; every rank calls it, the main process writes.

        Args:
            step: number of optimizer steps done.
            state: tensors and plain values, equal on all ranks.
        """
        ranks = distributed.gather_objects(random_state())
        if distributed.is_main():
            with atomic_path(self.folder / f"step-{step:08d}") as beside:
                beside.mkdir()
                save_tensors(beside / "state.pt", state)
                save_tensors(beside / "ranks.pt", ranks)
                files = sorted(beside.iterdir())
                meta = {
                    "step": step,
                    "files": {p.name: p.stat().st_size for p in files},
                    "checksums": {p.name: checksum(p) for p in files},
                    "fingerprint": self.fingerprint,
                }
                write_json(beside / "meta.json", meta)
            _sync_folder(self.folder)
            for _, old in self.complete()[: -self.keep]:
                remove(old)
        distributed.barrier()

    def complete(self) -> list[tuple[int, Path]]:
        """(step, folder) of every checkpoint whose files are all there, in ascending order."""
        if not self.folder.is_dir():
            return []
        found = [(int(m[1]), p) for p in self.folder.iterdir() if (m := _COMPLETE.match(p.name))]
        return sorted((step, path) for step, path in found if _is_complete(path))

    def load_latest(self, seed: int) -> dict[str, Any] | None:
        """The state of the latest complete checkpoint, or None; sets this rank's random generators.

        A rank that the checkpoint does not know (more processes than before) is seeded anew from (seed, rank).

        Raises:
            DualencError: the checkpoint belongs to another recipe, is damaged, or is too old to have checksums.
        """
        if distributed.is_main():
            recover_inside(self.folder)
        complete = self.complete()
        folder = distributed.broadcast_object(complete[-1][1] if complete else None)
        if folder is None:
            return None
        self._check_fingerprint(folder)
        _check_files(folder)
        state, ranks = _load(folder / "state.pt"), _load(folder / "ranks.pt")
        if distributed.rank() < len(ranks):
            set_random_state(ranks[distributed.rank()])
        else:
            seed_everything(seed, distributed.rank())
        return state

    def load_step(self, step: int) -> dict[str, Any] | None:
        """The state of the checkpoint of a step, or None if it is not there; all ranks call it together."""
        folder = distributed.broadcast_object(dict(self.complete()).get(step))
        if folder is None:
            return None
        _check_files(folder)
        return _load(folder / "state.pt")

    def _check_fingerprint(self, folder: Path) -> None:
        theirs = read_json(folder / "meta.json")["fingerprint"]
        for key in sorted(set(theirs) | set(self.fingerprint)):
            was, now = theirs.get(key), self.fingerprint.get(key)
            if was != now:
                raise DualencError(
                    f"{folder}: this checkpoint is from another recipe or other data: {key} was {was!r} and is now "
                    f"{now!r}; resume with the recipe and data it was made with, or choose another output folder"
                )


def _is_complete(folder: Path) -> bool:
    """Whether all files have their size; the rename of the folder is atomic, but disks and copies are not."""
    try:
        sizes = read_json(folder / "meta.json")["files"]
        complete = all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (DualencError, OSError, KeyError, TypeError):
        complete = False
    if not complete:
        warnings.warn(f"{folder}: this checkpoint is not complete and is passed over", stacklevel=2)
    return complete


def _check_files(folder: Path) -> None:
    """Compare every file with its checksum, on the main process; what is wrong is raised on all."""
    problem = None
    if distributed.is_main():
        sums = read_json(folder / "meta.json").get("checksums")
        if sums is None:
            problem = (
                f"{folder}: an earlier version wrote this checkpoint, without checksums; finish the run with that "
                "version, or start anew with trainer.overwrite=true"
            )
        else:
            damaged = [name for name, expected in sums.items() if checksum(folder / name) != expected]
            problem = _damage(folder / damaged[0], "its SHA-256 is not the one in meta.json") if damaged else None
    problem = distributed.broadcast_object(problem)
    if problem:
        raise DualencError(problem)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DualencError(_damage(path, " ".join(str(error).split())[:120])) from None


def _damage(path: Path, reason: str) -> str:
    return f"{path}: damaged ({reason}); remove the folder {path.parent} to resume from the checkpoint before it"


def _sync_folder(folder: Path) -> None:
    """Push the rename itself to the disk, where the system allows it."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
