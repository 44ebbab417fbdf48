"""A disk that is full while another library writes to it: which one, in a line, and what was there
stays."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from dualenc.errors import DualencError
from dualenc.io.files import atomic_path, save_tensors
from dualenc.search import Index
from dualenc.search.index import open as index
from dualenc.search.lexical import Lexical
from dualenc.search.migration.maps import LinearMap
from tests.helpers.clusters import clustered

FULL = (
    r"{}: the disk is full \([\d.,]+ of [\d.,]+ MiB are free in .*\); "
    r"free some space, or name a folder on another disk"
)
FAISS = (
    "Error in write_index at index_write.cpp:499: Error: 'ret == (size)' failed: "
    "write error (No space left on device)"
)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 400 KiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def build(folder: Path, count: int, factory: str = "Flat") -> None:
    Index.build(clustered(count), factory=factory, recall_queries=0).save(folder)


def build_in_blocks(folder: Path) -> None:
    vectors = clustered(9000)
    Index.build(
        vectors, factory="PQ4x4,Refine(Flat)", recall_queries=0, folder=folder, memory=700_000
    )


def save_words(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    Lexical.build([f"word{number} other{number}" for number in range(20000)]).save(folder, "x")


def save_state(path: Path) -> None:
    with atomic_path(path) as part:
        save_tensors(part, torch.zeros(10**6))


WRITERS: dict[str, Callable[[Path], None]] = {
    "faiss": lambda path: build(path, 20000),
    "faiss, the last bytes": lambda path: build(path, 6380),
    "codes in blocks": build_in_blocks,
    "safetensors": lambda path: LinearMap(np.zeros((500, 500)), np.zeros(500)).save(path),
    "bm25s": save_words,
    "torch": save_state,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_small_disk(small: Path, name: str) -> None:
    with pytest.raises(DualencError, match=FULL.format(re.escape(str(small)) + ".*")) as error:
        WRITERS[name](small / "target")
    assert "\n" not in str(error.value)
    left = [path for path in small.rglob("*") if path.is_file()]
    assert not left
    build(small / "target", 100)
    assert len(Index.open(small / "target")) == 100


def test_what_libraries_say_of_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "index", 50)

    def fill(*arguments: object) -> None:
        raise RuntimeError(FAISS)

    with monkeypatch.context() as patch:
        patch.setattr(index.faiss, "write_index", fill)
        with pytest.raises(DualencError, match=FULL.format(re.escape(str(tmp_path / "index")))):
            build(tmp_path / "index", 60)
    assert len(Index.open(tmp_path / "index")) == 50
    for error in (
        safetensors.SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
        OSError(122, "Disk quota exceeded"),
    ):
        with pytest.raises(DualencError, match="the disk is full"), atomic_path(tmp_path / "file"):
            raise error
    for error in (
        RuntimeError("CUDA error"),
        OSError("1000 requested and 0 written"),
        DualencError("no space here"),
    ):
        with (
            pytest.raises(type(error), match=re.escape(str(error))),
            atomic_path(tmp_path / "file"),
        ):
            raise error
