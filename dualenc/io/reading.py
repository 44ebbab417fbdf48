"""Reading files that may be missing, corrupted, or no files at all."""

from __future__ import annotations

import glob
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from dualenc.errors import DualencError
from dualenc.types import StrPath

Source = TypeVar("Source", bound="str | Path")

_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def open_regular(path: StrPath) -> BinaryIO:
    """Open a regular file for reading bytes."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise DualencError(f"{path}: not a file; give a regular file")
    return open(path, "rb")


def with_home(source: Source) -> Source:
    """Return a path with the user's folder in place of a leading `~`, which no shell has expanded;
    others unchanged."""
    text = str(source)
    if not text.startswith("~") or os.path.lexists(text):
        return source
    return cast(Source, type(source)(os.path.expanduser(text)))


def glob_files(pattern: str) -> list[Path]:
    """The files that match a glob, sorted; what exists under its very name, `shards [v2]`, is no
    pattern."""
    if Path(pattern).is_file():
        return [Path(pattern)]
    folder = next(parent for parent in Path(pattern).parents if parent.is_dir())
    inside = Path(pattern).relative_to(folder)
    names = glob.glob(str(Path(glob.escape(str(folder)), inside)), recursive=True)
    return sorted(Path(name) for name in names if Path(name).is_file())


def is_utf8(text: str) -> bool:
    """Whether a text can be encoded: lone surrogates, as in names of files that are not UTF-8,
    cannot."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def read_json(source: StrPath) -> Any:
    """Read a JSON file."""
    try:
        with open_regular(source) as stream:
            return json.loads(stream.read().decode("utf-8-sig"))
    except FileNotFoundError:
        raise DualencError(f"{source}: no such file; is the folder complete?") from None
    except DualencError:
        raise
    except (ValueError, RecursionError) as error:
        raise DualencError(f"{source}: not valid JSON ({error}); write it again") from None


def read_json_object(source: StrPath, kinds: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        source: the file.
        kinds: required names, each with the type or tuple of types of its value; `True` is no
            `int`.
    """
    value = read_json(source)
    if not isinstance(value, dict):
        raise DualencError(
            f"{source}: holds {_KINDS[type(value)]} instead of an object; write it again"
        )
    check_fields(value, kinds or {}, source)
    return value


def check_fields(value: Mapping[str, Any], kinds: Mapping[str, Any], source: StrPath) -> None:
    """Refuse an object of JSON that lacks a name, or has a value of another type; `kinds` as of
    `read_json_object`."""
    for name, required in kinds.items():
        if name not in value:
            raise DualencError(f"{source}: lacks {name!r}; write it again")
        allowed = required if isinstance(required, tuple) else (required,)
        # Not isinstance: a bool would pass for an int.
        kind = type(value[name])
        if kind not in allowed:
            expected = " or ".join(_KINDS[each] for each in allowed)
            actual = _KINDS.get(kind, kind.__name__)
            raise DualencError(f"{source}: {name!r} is {actual}, not {expected}; write it again")
