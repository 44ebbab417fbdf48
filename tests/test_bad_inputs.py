"""Bad inputs driven through the real commands: each ends in one line with exit code 2, and leaves nothing half-written.

What a class refuses of its arguments is tested with the class; these are files and options, as users spoil them.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dualenc.cli import main
from tests.commands import toy
from tests.commands.image_models import save_image_model
from tests.commands.in_process import failure
from tests.data.make import write_jsonl

pytestmark = pytest.mark.nightly
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]|object at 0x|_io\.")

RETRIEVAL = "evaluate retrieval text beir --out out"
FILES = {
    "docs.jsonl": "embed text docs.jsonl --out out",
    "docs.parquet": "embed text docs.parquet --out out",
    "pairs.jsonl": "mine text pairs.jsonl --out out",
    "beir/corpus.jsonl": RETRIEVAL,
    "beir/queries.jsonl": RETRIEVAL,
    "beir/qrels/test.tsv": RETRIEVAL,
    "captioned/test.jsonl": "evaluate image-text clip captioned --out out",
    "recipe.yaml": "train recipe.yaml",
    "a.trec": "evaluate compare a.trec a.trec --qrels beir/qrels/test.tsv --out out",
    "retrieval/per_query.ndjson": "evaluate compare retrieval retrieval --out out --samples 100",
    "emb/meta.json": "index emb --out out",
    "idx/meta.json": "search idx wing",
}
MISTAKES = (
    "embed text captioned/pictures --out out",
    "embed image docs.jsonl --out out",
    "embed nowhere docs.jsonl --out out",
    "embed text docs.jsonl --out docs.jsonl",
    "embed text docs.jsonl --out beir",
    "embed text docs.jsonl --out=",
    "index text --out out",
    "index docs.jsonl --out out",
    "index emb --out out --queries docs.jsonl",
    "index emb --out idx --append",
    "index emb --out out --append",
    "index idx --remove nowhere",
    "search emb wing",
    "search beir wing",
    "search nowhere wing",
    "search idx ␣",
    "serve text --port=0",
    "serve idx --port=99999",
    "serve idx --port=0 --rerank=text",
    "train recipe.yaml --out x",
    "quickstart --steps=0 --out out",
    "quickstart --steps=x --out out",
)


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid example of everything that the commands read."""
    toys = tmp_path_factory.mktemp("toys")
    toy.text_model(toys / "text")
    toy.image_text_model(toys / "clip")
    save_image_model(toys / "image")
    toy.write_beir(toys / "beir", documents=24, queries=6)
    shutil.copy(toys / "beir/qrels/test.tsv", toys / "beir/qrels/train.tsv")
    toy.write_captioned(toys / "captioned")
    rows = [json.loads(line) for line in (toys / "beir" / "corpus.jsonl").read_text().splitlines()]
    write_jsonl(toys / "docs.jsonl", [{"_id": row["_id"], "text": row["text"]} for row in rows])
    write_jsonl(toys / "pairs.jsonl", [{"query": row["title"], "document": row["text"]} for row in rows])
    pq.write_table(pa.Table.from_pylist(rows).select(["_id", "text"]), toys / "docs.parquet")
    recipe = {
        "model": {"class_path": "TextEncoder", "init_args": {"name": "text"}},
        "data": {"class_path": "BeirPairs", "init_args": {"path": "beir"}},
        "objective": {"class_path": "SogCLR", "init_args": {"temperature": 0.1}},
        "evaluator": {"class_path": "RetrievalEvaluator", "init_args": {"path": "beir"}},
        "trainer": {"output": "run", "batch_size": 3, "max_steps": 2, "progress": False},
    }
    (toys / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(toys)
        assert main(["embed", "text", "docs.jsonl", "--out", "emb"]) == 0
        assert main(["index", "emb", "--out", "idx"]) == 0
        assert main(["evaluate", "retrieval", "text", "beir", "--out", "retrieval"]) == 0
    shutil.copy(toys / "retrieval" / "run.trec", toys / "a.trec")
    return toys


@pytest.fixture
def folder(toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toys of a case's own, in which the commands run."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(toys, tmp_path, dirs_exist_ok=True)


WAYS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "noise": lambda path: path.write_bytes(random.Random(0).randbytes(4096)),
    "deep": lambda path: path.write_bytes(b"[" * 200_000),
    "a list": lambda path: path.write_text("[1, 2]"),
    "another object": lambda path: path.write_text('{"a": [1]}'),
}


def assert_refused(folder: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = failure(capsys, *(word.replace("␣", " ") for word in line.split()))
    assert len(error) < 1500
    assert not CONTROL.search(error.rstrip("\n"))
    assert not list(folder.rglob("*.part"))
    if line.split()[0] in ("embed", "index", "mine"):
        assert not (folder / "out").exists()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FILES)
def test_spoilt_files(folder: Path, name: str, way: str, capsys: pytest.CaptureFixture[str]) -> None:
    WAYS[way](folder / name)
    if (name, way) == ("docs.jsonl", "another object"):
        assert main(FILES[name].split()) == 0  # its only column is that of texts
    else:
        assert_refused(folder, FILES[name], capsys)


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes(folder: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(folder, line, capsys)
