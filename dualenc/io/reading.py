"""Read files that may be missing, corrupted, or not regular files."""

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

Source = TypeVar("Source", bound=StrPath)

JSON_TYPES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}
_RECREATE = "recreate the file"


def open_regular(path: StrPath) -> BinaryIO:
    """Open a regular file for reading bytes."""
    # Opening a FIFO would block until somebody writes to it; a device may never end.
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise DualencError("not a file", fix="name a regular file", where=path)
    return open(path, "rb")


def with_home(source: Source) -> Source:
    """Expand a leading `~` to the user's home folder; return other sources unchanged.

    No shell has expanded it in a recipe or in `--option=~/path`.
    """
    text = str(source)
    if not text.startswith("~") or os.path.lexists(text):
        return source
    return cast(Any, type(source))(os.path.expanduser(text))


def glob_files(pattern: str) -> list[Path]:
    """Return the files that match a glob, sorted.

    A file whose name is the pattern itself, such as `shards [v2]`, is taken literally.
    """
    if Path(pattern).is_file():
        return [Path(pattern)]
    # Only the part below the last existing folder is a pattern: that folder's name may contain
    # brackets.
    folder = next(parent for parent in Path(pattern).parents if parent.is_dir())
    inside = Path(pattern).relative_to(folder)
    names = glob.glob(str(Path(glob.escape(str(folder)), inside)), recursive=True)
    return sorted(Path(name) for name in names if Path(name).is_file())


def is_utf8(text: str) -> bool:
    """Return True if a text can be encoded.

    Lone surrogates, which stand for undecodable bytes of file names, cannot.
    """
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
        raise DualencError("no such file", fix="is the folder complete?", where=source) from None
    except DualencError:
        raise
    except (ValueError, RecursionError) as error:
        raise DualencError(f"not valid JSON ({error})", fix=_RECREATE, where=source) from None


def read_json_object(source: StrPath, kinds: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Args:
        source: path of the file.
        kinds: required names, each with the type or tuple of types of its value. `True` does not
            count as an `int`.
    """
    value = read_json(source)
    if not isinstance(value, dict):
        raise DualencError(
            f"holds {JSON_TYPES[type(value)]} instead of an object", fix=_RECREATE, where=source
        )
    check_fields(value, kinds or {}, source)
    return value


def check_fields(value: Mapping[str, Any], kinds: Mapping[str, Any], source: StrPath) -> None:
    """Raise if a JSON object lacks a name or has a value of another type.

    Args:
        value: the object.
        kinds: required names and types, as in `read_json_object`.
        source: path of the file, for the error.
    """
    for name, required in kinds.items():
        if name not in value:
            raise DualencError(f"lacks {name!r}", fix=_RECREATE, where=source)
        allowed = required if isinstance(required, tuple) else (required,)
        # Not isinstance: a bool is an instance of int.
        kind = type(value[name])
        if kind not in allowed:
            expected = " or ".join(JSON_TYPES[each] for each in allowed)
            actual = JSON_TYPES.get(kind, kind.__name__)
            raise DualencError(f"{name!r} is {actual}, not {expected}", fix=_RECREATE, where=source)
