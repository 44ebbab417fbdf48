"""The pages on adapting and migrating an index: their commands and Python, on a small index."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.cli import main
from tests.helpers import toy
from tests.helpers.pages import code

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS / "adapt.md", DOCS / "migrate.md")
pytestmark = pytest.mark.slow


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages name: index, clicks.csv, events.parquet, my_beir, other_beir,
    more.jsonl, DATA with the documents of both, MODEL, NEW_MODEL and LOCAL."""
    monkeypatch.chdir(tmp_path)
    toy.text_model(tmp_path / "MODEL")
    toy.text_model(tmp_path / "NEW_MODEL", seed=1)
    toy.text_model(tmp_path / "LOCAL", seed=2)
    toy.write_beir(tmp_path / "my_beir", documents=300, queries=60)
    toy.write_beir(tmp_path / "other_beir", documents=50, queries=8, seed=1)
    assert main(["index", "MODEL", "my_beir", "--out", "index", "--texts"]) == 0
    documents = [
        json.loads(line)
        for line in (tmp_path / "my_beir" / "corpus.jsonl").read_text().splitlines()
    ]
    queries = [" ".join(document["text"].split()[:3]) for document in documents]
    ids = [document["_id"] for document in documents]
    with open(tmp_path / "clicks.csv", "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["query", "document_id"])
        writer.writerows(zip(queries, ids, strict=True))
    times = [1_700_000_000 + 60 * row for row in range(len(ids))]
    events = {"query": queries, "document_id": ids, "timestamp": times}
    pq.write_table(pa.table(events), tmp_path / "events.parquet")
    (tmp_path / "more.jsonl").write_text('{"_id": "new", "text": "wing flow"}\n')
    shutil.copytree(tmp_path / "my_beir", tmp_path / "DATA")
    with open(tmp_path / "DATA" / "corpus.jsonl", "a") as stream:
        stream.write((tmp_path / "more.jsonl").read_text())
    return tmp_path


def commands() -> list[list[str]]:
    """The pages' commands, as lists of words, without scripts, and without those for images, which
    have their own tests: tests/commands/test_adapt_images.py and test_migrate_images.py."""
    scripts = [block for page in PAGES for block in code(page, "bash")]
    blocks = [block for block in scripts if not block.startswith("#!")]
    lines = [line.partition(" #")[0] for block in blocks for line in block.splitlines()]
    found = [shlex.split(line)[1:] for line in lines if line.startswith("dualenc ")]
    return [words for words in found if "images_index" not in words]


def test_every_command_and_the_python_run(shop: Path) -> None:
    """In their order, as a reader types them; the index answers in between and holds the new
    document at the end."""
    assert len(commands()) >= 8
    blocks = [block for page in PAGES for block in code(page, "python")]
    assert len(blocks) == 2
    for words in commands():
        assert main(words) == 0, words
        assert main(["search", "index", "wing"]) == 0
    for block in blocks:
        exec(compile(block, "docs", "exec"), {})
    assert (shop / "runs" / "mine" / "model" / "trained_documents.json").is_file()
    assert main(["search", "index", "wing flow", "--k", "301"]) == 0
