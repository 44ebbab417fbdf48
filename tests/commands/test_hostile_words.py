"""Words of the command line that nobody means well: each ends in one line, without a traceback and without a key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dualenc.encoders import VectorEncoder
from tests.commands import toy
from tests.commands.in_process import failure, run

NO_URL = "http://me:secret@[::1/x.jsonl?key=secret"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, toy_text: Path) -> Path:
    """An index of 20 texts with a column of numbers and BM25."""
    folder = tmp_path_factory.mktemp("words")
    rows = [f'{{"_id": "d{i}", "text": "{text}", "year": {i}}}\n' for i, text in enumerate(toy.texts(20))]
    (folder / "docs.jsonl").write_text("".join(rows))
    run("index", toy_text, folder / "docs.jsonl", "--columns", "year", "--bm25", "--out", folder / "index")
    return folder / "index"


@pytest.mark.parametrize("more", [(), ("--hybrid", "rrf")])
def test_a_query_that_is_no_utf_8(index: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    assert "is not valid Unicode" in failure(capsys, "search", index, os.fsdecode(b"fox \xff"), *more)


@pytest.mark.parametrize("year", ["99999999999999999999", "-9223372036854775808", "9" * 4000])
def test_a_number_that_no_column_holds(index: Path, capsys: pytest.CaptureFixture[str], year: str) -> None:
    for sign in (">=", "=", "!="):
        told = failure(capsys, "search", index, "fox", "--where", f"year{sign}{year}")
        assert "give a whole number of 64 bits" in told


@pytest.mark.parametrize(
    "words",
    [
        ("embed", "MODEL", NO_URL, "--out", "OUT"),
        ("index", "MODEL", NO_URL, "--out", "OUT"),
        ("mine", "MODEL", NO_URL, "--out", "OUT"),
        ("evaluate", "retrieval", "MODEL", NO_URL),
        ("evaluate", "objectives", "MODEL", NO_URL),
        ("embed", "MODEL", "https://[x]/a.jsonl", "--out", "OUT"),
        ("embed", "MODEL", "https://me:secret@h/x.tar?key=secret", "--columns", "year", "--out", "OUT"),
        ("embed", "https://me:secret@h/x?key=secret", NO_URL, "--out", "OUT"),
        ("search", "https://me:secret@h/x?key=secret", "fox"),
        ("search", "INDEX", "fox", "--model", "https://me:secret@h/x?key=secret"),
        ("push", NO_URL, "OUT"),
        ("train", "https://me:secret@h/x?key=secret"),
    ],
    ids=lambda words: " ".join(words)[:40],
)
def test_a_url_that_is_none_or_that_holds_a_key(
    words: tuple[str, ...], tmp_path: Path, toy_text: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"MODEL": str(toy_text), "OUT": str(tmp_path / "out"), "INDEX": str(index)}
    assert "secret" not in failure(capsys, *(places.get(word, word) for word in words))


@pytest.mark.parametrize("line", ['{"vector": null}', '{"vector": []}'])
def test_vectors_that_are_all_missing(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "v.jsonl").write_text(f"{line}\n{line}\n")
    VectorEncoder(8).save(tmp_path / "model")
    told = failure(capsys, "embed", tmp_path / "model", tmp_path / "v.jsonl", "--out", tmp_path / "out")
    assert "2 no vector in column 'vector'" in told


def test_names_of_files_that_are_not_utf8(toy_text: Path, tmp_path: Path) -> None:
    data = tmp_path / os.fsdecode(b"caf\xe9.csv")
    data.write_text("text\nfox\n")
    run("embed", toy_text, data, "--out", tmp_path / os.fsdecode(b"emb\xe9"))
    run("index", toy_text, data, "--out", tmp_path / "index")
