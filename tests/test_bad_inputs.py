"""Mistakes driven through the real commands: each ends in one line with exit code 2, and leaves
nothing half-written.

What a class refuses of its arguments and files is tested with the class; these are commands given
the wrong thing.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from dualenc.cli import main
from tests.helpers import toy
from tests.helpers.image_models import save_image_model
from tests.helpers.in_process import failure
from tests.helpers.make import write_jsonl

pytestmark = pytest.mark.nightly
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|object at 0x|_io\.")

MISTAKES = (
    "embed text captioned/pictures --out out",
    "embed image docs.jsonl --out out",
    "embed nowhere docs.jsonl --out out",
    "embed text docs.jsonl --out docs.jsonl",
    "embed text docs.jsonl --out=",
    "index text --out out",
    "index docs.jsonl --out out",
    "index emb --out out --queries docs.jsonl",
    "append idx emb",
    "append out emb",
    "remove idx nowhere",
    "search emb wing",
    "search beir wing",
    "search idx ␣",
    "quickstart --steps=0 --out out",
    "quickstart --steps=x --out out",
)


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid example of everything that the commands read."""
    toys = tmp_path_factory.mktemp("toys")
    toy.text_model(toys / "text")
    save_image_model(toys / "image")
    toy.write_beir(toys / "beir", documents=24, queries=6)
    toy.write_captioned(toys / "captioned")
    rows = [json.loads(line) for line in (toys / "beir" / "corpus.jsonl").read_text().splitlines()]
    write_jsonl(toys / "docs.jsonl", [{"_id": row["_id"], "text": row["text"]} for row in rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(toys)
        assert main(["embed", "text", "docs.jsonl", "--out", "emb"]) == 0
        assert main(["index", "emb", "--out", "idx"]) == 0
    return toys


@pytest.fixture
def folder(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toys of a case's own, in which the commands run."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(toys, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes(folder: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = failure(capsys, *(word.replace("␣", " ") for word in line.split()))
    assert len(error) < 1500
    assert not CONTROL.search(error.rstrip("\n"))
    assert not list(folder.rglob("*.part"))
    assert not (folder / "out").exists()
