"""Checksums: a file is read once until it changes, and again where that is promised."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import dualenc
from dualenc.errors import DualencError
from dualenc.io import checksums
from dualenc.search import Index
from dualenc.search.documents import fingerprint
from tests.helpers import toy
from tests.helpers.in_process import run
from tests.helpers.pushed import embeddings


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file was read for its checksum, by path; files just written count as old."""
    count: Counter[str] = Counter()
    read = checksums.checksum

    def counted(path: Path) -> str:
        count[str(path)] += 1
        return read(path)

    monkeypatch.setattr(checksums, "checksum", counted)
    monkeypatch.setattr(checksums, "CLOCK_TICK", -1)
    return count


def of(folder: Path, reads: Counter[str]) -> set[int]:
    """How often the files of a folder were read; meta.json is only read by a fingerprint."""
    return {
        reads[str(path)] for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"
    }


def test_an_index_is_read_once_until_it_changes(tmp_path: Path, reads: Counter[str]) -> None:
    folder = tmp_path / "index"
    Index.build(embeddings(), folder=folder, recall_queries=0)
    reads.clear()
    for _ in range(3):
        Index.open(folder)
    assert max(of(folder, reads)) <= 1
    fingerprint(folder)
    Index.open(folder, verify=True)
    assert of(folder, reads) == {2}, "a fingerprint and --verify read everything"
    damaged = bytearray((folder / "items.arrow").read_bytes())
    damaged[-1] ^= 1
    (folder / "items.arrow").write_bytes(damaged)
    with pytest.raises(DualencError, match=r"items\.arrow: corrupt, its checksum"):
        Index.open(folder)


def test_a_file_that_was_just_written_is_read_again(
    tmp_path: Path, reads: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second write may leave its time unchanged."""
    monkeypatch.setattr(checksums, "CLOCK_TICK", 10**12)
    Index.build(embeddings(), folder=tmp_path / "index", recall_queries=0)
    reads.clear()
    for _ in range(3):
        Index.open(tmp_path / "index")
    assert of(tmp_path / "index", reads) == {3}


@pytest.mark.slow
def test_commands_read_an_index_once_and_adapt_once_more(
    tmp_path: Path, reads: Counter[str]
) -> None:
    model, data, index = tmp_path / "model", tmp_path / "beir", tmp_path / "index"
    toy.text_model(model)
    toy.write_beir(data, documents=60, queries=8)
    dualenc.index(str(model), str(data), out=index, recall_queries=0, progress=False)
    rows = [
        f"wing flow {word},d{row}"
        for row, word in enumerate(["stream", "jet", "heat", "cone"] * 10)
    ]
    (tmp_path / "clicks.csv").write_text("\n".join(["query,doc_id", *rows]))
    commands = {
        1: [
            ("search", index, "wing flow"),
            ("evaluate", "retrieval", model, data, "--documents", index, "--out", tmp_path / "ev"),
        ],
        2: [("adapt", index, tmp_path / "clicks.csv", "--out", tmp_path / "run", "--epochs", 1)],
    }
    for times, each in commands.items():
        for command in each:
            reads.clear()
            checksums._DIGESTS.clear()
            run(*command)
            assert of(index, reads) == {times}, command[0]
