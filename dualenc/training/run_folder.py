"""The folder of a run: who may write there, and what stands in its log."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.files import atomic_path, remove
from dualenc.training.run_log import read_metrics

RUN_FILES = ("metrics.jsonl", "checkpoints", "selection", "model", "recipe.yaml", "trackers")


def claim(output: str | os.PathLike[str], *, resume: bool, overwrite: bool) -> None:
    """Make sure that a run may write into a folder; all ranks call it together.

    Args:
        output: the folder; made if it is not there.
        resume: a run there is gone on with.
        overwrite: a run there is removed.

    Raises:
        DualencError: the folder holds a run, and neither is wanted; or it cannot be made.
    """
    folder = Path(output)
    found = distributed.broadcast_object([name for name in RUN_FILES if (folder / name).exists()])
    if found and not (resume or overwrite):
        raise DualencError(
            f"{folder}: holds a run already ({found[0]}); resume it (--resume), allow trainer.overwrite=true, or "
            "choose another trainer.output"
        )
    if distributed.is_main():
        if overwrite and not resume:
            for name in found:
                remove(folder / name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DualencError(f"{folder}: cannot be made ({error}); choose another trainer.output") from None
    distributed.barrier()


def save_recipe(output: str | os.PathLike[str], recipe: Mapping[str, Any] | None) -> None:
    """Write recipe.yaml, from which the run can be made again."""
    if recipe and distributed.is_main():
        with atomic_path(Path(output) / "recipe.yaml") as beside:
            beside.write_text(yaml.safe_dump(dict(recipe), sort_keys=False, allow_unicode=True), encoding="utf-8")


def last_logged(output: str | os.PathLike[str], name: str) -> float:
    """The last value of a metric in metrics.jsonl; NaN if there is none."""
    values = [line[name] for line in read_metrics(Path(output) / "metrics.jsonl") if line.get(name) is not None]
    return float(values[-1]) if values else float("nan")
