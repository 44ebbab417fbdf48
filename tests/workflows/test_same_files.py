"""Workflows as functions: they print nothing, and write the same files as the commands."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dualenc
from dualenc.encoders import load_model
from dualenc.errors import DualencError
from dualenc.search import Index
from dualenc.workflows.migrate_model import MigrationReport, roll_back
from tests.helpers import toy
from tests.helpers.in_process import run

TIMES = {"build_seconds", "latency_ms", "seconds", "time", "created"}
"""Entries of JSON files that differ from run to run."""


def without_times(value: Any) -> Any:
    """Return a JSON value without measured times, fingerprints of files with times, and paths."""
    if isinstance(value, dict):
        return {
            name: without_times(entry)
            for name, entry in value.items()
            if name not in TIMES and "seconds" not in name and not name.startswith("checksum")
        }
    return value


def contents(folder: Path, root: Path) -> dict[str, str]:
    """Return a checksum of each file below a folder; of JSON, without times and the root."""
    sums = {}
    for path in sorted(folder.rglob("*")):
        # The log of a training and the page hold times; all else must agree.
        if not path.is_file() or path.name in ("metrics.jsonl", "report.html", "trainer.json"):
            continue
        data = path.read_bytes()
        if path.suffix == ".json":
            entries = json.dumps(without_times(json.loads(data)))
            data = entries.replace(str(root), "ROOT").encode()
        sums[str(path.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return sums


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, tables of documents, clicks and a BEIR collection."""
    folder = tmp_path_factory.mktemp("workflows")
    toy.text_model(folder / "old")
    model = load_model(folder / "old")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weights in model.parameters():
            noise = torch.randn(weights.shape, generator=generator)
            weights.add_(0.3 * weights.std(unbiased=False) * noise)
    model.save(folder / "new")
    texts = toy.save_documents(folder / "docs.jsonl", 200)
    more = [{"_id": f"n{row}", "text": text} for row, text in enumerate(texts[:5])]
    (folder / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in more))
    (folder / "gone.txt").write_text("d3\nn2\n")
    with open(folder / "clicks.csv", "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["query", "doc_id"])
        for row, text in enumerate(texts):
            writer.writerow([" ".join(text.split()[:4]), f"d{row}"])
    toy.write_beir(folder / "beir", documents=150, queries=20)
    return folder


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two folders: what commands write, and what functions write."""
    return tmp_path_factory.mktemp("commands"), tmp_path_factory.mktemp("functions")


def same(sides: tuple[Path, Path], name: str) -> None:
    """Check that command and function have written the same files."""
    by_command, by_function = (contents(side / name, side) for side in sides)
    assert by_command
    assert by_command == by_function


def test_embed(made: Path, sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run("embed", made / "old", made / "docs.jsonl", "--out", sides[0] / "emb", "--dim", 16)
    capsys.readouterr()
    embeddings = dualenc.embed(
        str(made / "old"), str(made / "docs.jsonl"), out=sides[1] / "emb", dim=16, progress=False
    )
    assert capsys.readouterr() == ("", "")
    assert (len(embeddings), embeddings.dim) == (200, 16)
    same(sides, "emb")


def test_index_append_remove_and_verify(
    made: Path, sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """An index with texts and BM25, whose vectors, words and texts follow each change."""
    old, docs, more = (str(made / name) for name in ("old", "docs.jsonl", "more.jsonl"))
    run("index", old, docs, "--out", sides[0] / "index", "--texts", "--bm25")
    run("append", sides[0] / "index", old, more)
    run("remove", sides[0] / "index", made / "gone.txt")
    run("verify", sides[0] / "index")
    assert "203 vectors" in capsys.readouterr().out

    folder = sides[1] / "index"
    built = dualenc.index(old, docs, out=folder, texts=True, bm25=True, progress=False)
    assert (built.num_vectors, built.num_bm25, built.num_texts) == (200, 200, 200)
    assert built.provenance.recall_at_10 == built.open().provenance.recall_at_10
    appended = dualenc.append(folder, old, more, progress=False)
    assert (appended.num_changed, appended.num_vectors, appended.was_done) == (5, 205, False)
    removed = dualenc.remove(folder, made / "gone.txt")
    assert (removed.num_changed, removed.num_vectors) == (2, 203)
    checked = dualenc.verify(folder)
    assert checked.num_vectors == 203
    assert checked.num_bytes == sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    assert capsys.readouterr() == ("", "")
    same(sides, "index")


def test_remove_takes_ids(made: Path, tmp_path: Path) -> None:
    old, docs = str(made / "old"), str(made / "docs.jsonl")
    dualenc.index(old, docs, out=tmp_path / "index", recall_queries=0, progress=False)
    assert dualenc.remove(tmp_path / "index", ["d0", "d1", "d1"]).num_changed == 2
    assert len(Index.open(tmp_path / "index")) == 198


def test_texts_are_added_to_an_index(made: Path, tmp_path: Path) -> None:
    folder = str(tmp_path / "index")
    dualenc.index(
        str(made / "old"), str(made / "docs.jsonl"), out=folder, recall_queries=0, progress=False
    )
    added = dualenc.index(folder, bm25=True)
    assert (added.num_vectors, added.num_bm25, added.num_texts) == (0, 200, 0)


def test_arguments_that_would_be_ignored_are_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(DualencError, match="embeddings without data leave text_column, side"):
        dualenc.index("emb", out=tmp_path / "index", side="left", text_column="title")
    with pytest.raises(DualencError, match="train is 'everything'; choose one of perceptron"):
        dualenc.adapt("index", "clicks.csv", out=tmp_path / "run", train="everything")  # type: ignore[arg-type]
    with pytest.raises(DualencError, match=r"keep must be in \[0, 1\], got 2"):
        dualenc.adapt("index", "clicks.csv", out=tmp_path / "run", keep=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_adapt(made: Path, sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    # Both adapt to one index: its fingerprint covers measured times.
    index = str(made / "index")
    dualenc.index(str(made / "old"), str(made / "docs.jsonl"), out=index, progress=False)
    clicks = str(made / "clicks.csv")
    run("adapt", index, clicks, "--out", sides[0] / "run", "--epochs", 2, "--second", made / "beir")
    capsys.readouterr()
    # With a progress bar, as by the command: the model card names all settings.
    result = dualenc.adapt(index, clicks, out=sides[1] / "run", epochs=2, second=str(made / "beir"))
    assert capsys.readouterr().out == ""
    same(sides, "run")
    metrics = json.loads((sides[1] / "run" / "metrics.json").read_text())
    assert metrics["quality"] == list(result.quality)
    assert metrics["original weights kept"] == result.keep
    assert len(result.forgetting) == 1
    assert load_model(result.model_folder).kind == "query-index"


@pytest.mark.slow
def test_migrate(made: Path, sides: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    old, new, beir = (str(made / name) for name in ("old", "new", "beir"))
    for side in sides:
        dualenc.index(old, beir, out=side / "moved", recall_queries=0, progress=False)
    run("migrate", sides[0] / "moved", new, "--data", beir, "--anyway")
    capsys.readouterr()
    index = str(sides[1] / "moved")
    measured = dualenc.migrate(index, new, data=beir, report_only=True, progress=False)
    assert (measured.state, measured.num_vectors) == ("measured", 150)
    assert measured.is_judged()
    rolled_back = roll_back(index)
    assert (rolled_back.replaced, rolled_back.removed) == (False, 150)
    shown: list[MigrationReport] = []
    done = dualenc.migrate(
        index, new, data=beir, anyway=True, progress=False, on_report=shown.append
    )
    assert done.state == "replaced"
    assert [report.state for report in shown] == ["measured"]
    assert dualenc.migrate(index, new).state == "unchanged"
    assert capsys.readouterr() == ("", "")
    same(sides, "moved")
