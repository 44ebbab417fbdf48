"""Commands that change an index."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def changes(made: Path, index: Path) -> dict[str, tuple[Any, ...]]:
    """The words of each command; `made` has the model, the collection, more.jsonl and gone.txt."""
    return {
        "append": ("append", index, made / "old", made / "more.jsonl"),
        "remove": ("remove", index, made / "gone.txt"),
        "build": ("index", made / "old", made / "beir", "--out", index),
    }
