"""Ledger: results of single items, appended as they arrive, so that an interrupted evaluation resumes."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.files import remove, removed_if_refused
from dualenc.reading import open_regular

Key = TypeVar("Key", int, str)


class Ledger(Generic[Key]):
    """Values by number or name of an item, one JSON line each, in a folder; every process appends to its own file.

    Lines of all processes are read back, also after their number has changed. Damaged lines, such as one cut short by a
    kill, are ignored; files of another model, other data or other settings are removed.

    Args:
        folder: Where the files are; made with the first value.
        signature: Everything that the values depend on, as plain values: settings, and checksums of the weights and
            of the data (`Corpus.identity`), since contents may change under the same names.
    """

    def __init__(self, folder: str | os.PathLike[str], signature: dict[str, Any]):
        self.folder = Path(folder)
        self.signature = json.loads(json.dumps(signature))
        self.path = self.folder / f"part-{distributed.rank():05d}.ndjson"
        if distributed.is_main():
            for part in self.folder.glob("part-*.ndjson"):
                if read_part(part)[0] != self.signature:
                    remove(part)
        # No process may read what the main process is about to remove.
        distributed.barrier()
        self.values: dict[Key, Any] = {}
        for part in sorted(self.folder.glob("part-*.ndjson")):
            self.values.update(read_part(part)[1])
        distributed.barrier()

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """This process's share of the items without a value."""
        left = [key for key in keys if key not in self.values]
        return left[distributed.rank_slice(len(left))]

    def add(self, values: dict[Key, Any]) -> None:
        """Append values by item."""
        size = self.path.stat().st_size if self.path.exists() else 0
        lines = [] if size else [json.dumps({"signature": self.signature})]
        lines += [
            json.dumps({"item": key, "value": value, "check": _check(key, value)}) for key, value in values.items()
        ]
        with removed_if_refused(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with open(self.path, "a", encoding="utf-8") as stream:
                    # The first newline ends a line that a kill cut short.
                    stream.write("\n" + "\n".join(lines) + "\n")
            except OSError:
                # On a full disk no half line stays.
                if size:
                    os.truncate(self.path, size)
                else:
                    remove(self.path)
                raise
        self.values.update(values)

    def all_values(self) -> dict[Key, Any]:
        """The values of all processes by item, in order; all processes call it together."""
        merged = {key: value for values in distributed.gather_objects(self.values) for key, value in values.items()}
        return dict(sorted(merged.items()))


def read_part(part: Path) -> tuple[dict[str, Any] | None, dict[Any, Any]]:
    """The signature and the values of one file; lines that `Ledger.add` did not write are ignored."""
    signature: dict[str, Any] | None = None
    values: dict[Any, Any] = {}
    try:
        with open_regular(part) as stream:
            lines = stream.read().splitlines()
    except (DualencError, OSError):
        return None, {}
    for line in lines:
        # A kill can cut a line anywhere, and what remains may still be JSON: hence the checksum.
        try:
            entry = json.loads(line)
            if "signature" in entry:
                signature = entry["signature"]
            elif entry["check"] == _check(entry["item"], entry["value"]):
                values[entry["item"]] = entry["value"]
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return signature, values


def _check(key: int | str, value: Any) -> int:
    return zlib.crc32(json.dumps([key, value]).encode())
