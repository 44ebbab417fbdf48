"""Checkpoints: folders that are complete or not there, found by looking, and the exact state of a run in each.

    OUTPUT/checkpoints/step-00000500/
        state.pt      everything that is the same on all ranks, readable with torch.load(weights_only=True)
        ranks.pt      each rank's random generators
        meta.json     step, fingerprint of the recipe, size and SHA-256 of each file

`accelerate.save_state` writes in place, in several files and with pickled parts, and knows neither the position in
an epoch nor the state of a selection of batches; hence these few lines.
"""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.files import atomic_path, checksum, read_json, recover_inside, remove, save_tensors, write_json
from dualenc.training.random_state import random_state, seed_everything, set_random_state

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
