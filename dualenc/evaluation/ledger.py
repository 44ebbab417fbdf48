"""Results of single images, written as they come, so that an interrupted evaluation goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dualenc import distributed
from dualenc.files import remove

Signature = dict[str, Any]


class Ledger:
    """Values by image number in a folder, one JSON line each; every process appends to a file of its own.

    Lines of all processes are read back, whatever their number was. A line cut short by a kill is left out, and files
    that another model, other data or other settings wrote are removed.

    Args:
        folder: Where the files are; made if it is not there.
        signature: Everything that the values depend on, as plain values.
    """

    def __init__(self, folder: str | os.PathLike[str], signature: Signature):
        self.folder = Path(folder)
        self.signature = json.loads(json.dumps(signature))
        self.path = self.folder / f"part-{distributed.rank():05d}.ndjson"
        if distributed.is_main():
            self.folder.mkdir(parents=True, exist_ok=True)
            for part in self._parts():
                if _read(part)[0] != self.signature:
                    remove(part)
        distributed.barrier()
        self.values: dict[int, Any] = {}
        for part in self._parts():
            self.values.update(_read(part)[1])
        distributed.barrier()

    def missing(self, indices: Iterable[int]) -> list[int]:
        """Those of the image numbers without a value that this process should do."""
        left = [index for index in indices if index not in self.values]
        return left[distributed.rank_slice(len(left))]

    def add(self, values: dict[int, Any]) -> None:
        """Append values by image number."""
        lines = [] if self.path.exists() else [json.dumps({"signature": self.signature})]
        lines += [json.dumps({"image": index, "value": value}) for index, value in values.items()]
        with open(self.path, "a", encoding="utf-8") as stream:
            # A first newline ends a line that a kill cut short.
            stream.write("\n" + "\n".join(lines) + "\n")
        self.values.update(values)

    def all_values(self) -> dict[int, Any]:
        """The values of all processes by image number, in order of number; all processes call it together."""
        merged = {index: value for values in distributed.gather_objects(self.values) for index, value in values.items()}
        return dict(sorted(merged.items()))

    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob("part-*.ndjson"))


def _read(part: Path) -> tuple[Signature | None, dict[int, Any]]:
    signature, values = None, {}
    for line in part.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "signature" in entry:
            signature = entry["signature"]
        else:
            values[entry["image"]] = entry["value"]
    return signature, values
