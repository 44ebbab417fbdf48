"""Refuse outputs in folders that a later command replaces or removes as a whole."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from dualenc.errors import DualencError
from dualenc.io.reading import read_json_object
from dualenc.types import StrPath

REPLACED = {
    "dualenc index": "the index",
    "dualenc embeddings": "the embeddings",
    "dualenc engine": "the pushed embeddings",
    "dualenc quickstart": "the data of the quickstart",
}
"""Folders that are replaced as a whole, by the format in their meta.json, and their description."""
RUN = "dualenc-run"
RUN_FILES = ("metrics.jsonl", "checkpoints", "model", "recipe.yaml", "trackers")
"""Parts of a run folder that a later run replaces; other files in it stay."""


def check_outside(target: StrPath, *, is_part: bool = False) -> None:
    """Raise if an output is inside a folder that another command replaces or removes.

    Such folders are indexes, embeddings, pushed embeddings and the parts of a run, such as its
    model. Other places in a run folder are allowed: RUN/index, RUN/report.html.

    Args:
        target: path of the file or folder, which need not exist.
        is_part: True if the target itself may be a part of a run.

    Raises:
        DualencError: names the folder around the target.
    """
    # Resolved, so that no symbolic link hides the folder around the target.
    path = Path(os.path.realpath(os.path.expanduser(target)))
    for folder in path.parents:
        name = _format_of(folder)
        part = path.relative_to(folder).parts
        if name in REPLACED:
            what = f"{REPLACED[name]} {folder}"
        elif name == RUN and part[0] in RUN_FILES and not (is_part and len(part) == 1):
            what = f"{part[0]} of the run {folder}"
        else:
            continue
        raise DualencError(
            f"lies in {what}, and would be lost when that is replaced",
            fix="choose a place outside",
            where=os.fspath(target),
        )


def _format_of(folder: Path) -> str:
    """Return the format in the meta.json of a folder; "" without one."""
    path = folder / "meta.json"
    # A broken meta.json of another program must not stop an output beside it.
    with suppress(OSError, DualencError):
        if path.is_file():
            return str(read_json_object(path).get("format", ""))
    return ""
