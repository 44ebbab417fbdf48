"""Every file of an index, emptied, cut, pickled or of another type: one line, and nothing is
unpickled."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualenc.cli import main
from dualenc.errors import DualencError
from dualenc.io.checksums import checksum
from tests.helpers.started_migration import started


class Evil:
    """A pickle of it makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def saved(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def contents(name: str, original: bytes, evil: Evil) -> Iterator[bytes]:
    """Other contents of a file."""
    yield from (
        b"",
        original[: len(original) // 2],
        b"\xff\xfe\x00" * 50,
        b"null",
        b"[]",
        b"{}",
        b"3",
        b'"x"',
    )
    yield from (pickle.dumps(evil), saved(np.array([evil, 1], object)))
    if name.endswith(".npy"):
        yield from map(
            saved,
            (
                np.zeros(60),
                np.zeros((60, 2), np.uint32),
                np.zeros(3, np.int32),
                np.array(["a"] * 60),
            ),
        )
        yield saved(np.full_like(np.load(io.BytesIO(original)), 2**31 - 1))
    if name.endswith(".json"):
        entries = json.loads(original)
        for key in [key for key in entries if key != "eel"]:
            others: list[Any] = [None, [], {}, "x", -1, 1.5, [[]], {"a": 1}, 10**30]
            yield from (
                json.dumps(entries | {key: other}).encode()
                for other in others
                if other != entries[key]
            )
            yield json.dumps(
                {name: entry for name, entry in entries.items() if name != key}
            ).encode()


def accept(folder: Path, name: str) -> None:
    """Record size and checksum of a file in the meta.json beside it, as its writer would."""
    if name.endswith("meta.json"):
        return
    path = folder / name
    meta = json.loads((path.parent / "meta.json").read_text())
    meta["files"][path.name], meta["sizes"][path.name] = checksum(path), path.stat().st_size
    (path.parent / "meta.json").write_text(json.dumps(meta))


FILES = (
    "index.faiss",
    "items.arrow",
    "order.npy",
    "meta.json",
    "texts/items.arrow",
    "texts/order.npy",
    "texts/meta.json",
)
BM25 = (
    "data.csc.index.npy",
    "indices.csc.index.npy",
    "indptr.csc.index.npy",
    "params.index.json",
    "vocab.index.json",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FILES, *(f"bm25/{file}" for file in (*BM25, "meta.json"))])
def test_a_corrupted_file_is_one_line(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = tmp_path / "index"
    original = (made / "index" / name).read_bytes()
    for data in contents(name, original, Evil(tmp_path / "executed")):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made / "index", folder)
        (folder / name).write_bytes(data)
        accept(folder, name)
        for words in (
            ("search", folder, "fox", "--hybrid", "rrf", "--model", made / "model"),
            ("verify", folder),
        ):
            capsys.readouterr()
            code = main([str(word) for word in words])
            lines = [
                line
                for line in capsys.readouterr().err.splitlines()
                if line.startswith("dualenc: ")
            ]
            assert code in (0, 2), (data[:200], lines)
            assert len(lines) == (code == 2), (data[:200], lines)
    assert not (tmp_path / "executed").exists()


def test_a_corrupted_order_of_a_migration_is_one_line(tmp_path: Path) -> None:
    migration = started(tmp_path, "Flat")
    for data in (
        b"",
        pickle.dumps(1),
        saved(np.array([Evil(tmp_path / "executed")], object)),
        saved(np.zeros(700)),
    ):
        (migration.work / "order.npy").write_bytes(data)
        with pytest.raises(
            DualencError, match=r"order\.npy: corrupt \(.*\); end the migration: dualenc migrate "
        ):
            migration.stages(np.zeros(0, int))
    assert not (tmp_path / "executed").exists()
