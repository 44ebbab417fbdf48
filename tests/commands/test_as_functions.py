"""Every workflow as a Python function: it prints nothing and writes the files of its command."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dualenc
from dualenc.errors import BelowTarget
from dualenc.evaluation.report_page import Table
from tests.helpers import toy
from tests.helpers.image_models import save_classes, save_splits
from tests.helpers.in_process import run
from tests.helpers.local_qdrant import url_of, use_folders
from tests.helpers.logged_run import write_run

pytestmark = pytest.mark.slow

MEASURED = {"milliseconds", "exact_milliseconds"}


@pytest.fixture(scope="module")
def places(
    tmp_path_factory: pytest.TempPathFactory, toy_text: Path, toy_clip: Path, image_model: Path
) -> dict[str, str]:
    """Models and data by name."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "filters.jsonl").write_text('{"filter": ""}\n')
    found = {
        "text": toy_text,
        "clip": toy_clip,
        "image": image_model,
        "beir": toy.write_beir(folder / "beir"),
        "pairs": toy.write_beir(folder / "pairs", 60, 20, "train"),
        "captioned": toy.write_captioned(folder / "captioned"),
        "classes": save_classes(folder / "classes", per_class=2),
        "splits": save_splits(folder / "splits", test=3),
        "filters": folder / "filters.jsonl",
        "embeddings": folder / "embeddings",
        "index": folder / "index",
    }
    run("embed", toy_text, found["beir"], "--out", folder / "embeddings")
    run("index", folder / "embeddings", "--out", folder / "index")
    return {name: str(path) for name, path in found.items()}


EVALUATIONS: list[tuple[str, Callable[..., Any], list[str], dict[str, Any]]] = [
    (
        "retrieval",
        dualenc.evaluate_retrieval,
        ["text", "beir"],
        {"hybrid": "weighted", "weight": 0.3},
    ),
    ("image-text", dualenc.evaluate_image_text, ["clip", "captioned"], {"batch_size": 3}),
    ("zero-shot", dualenc.evaluate_zero_shot, ["clip", "classes"], {}),
    ("probe", dualenc.evaluate_probe, ["image", "splits"], {"limit": 8, "num_workers": 0}),
    (
        "corrupted",
        dualenc.evaluate_corrupted,
        ["image", "splits"],
        {"corruptions": ["fog", "pixelate"], "train": "splits", "seed": 3, "num_workers": 0},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("task", "function", "data", "options"), EVALUATIONS)
def test_an_evaluation(
    task: str,
    function: Callable[..., Any],
    data: list[str],
    options: dict[str, Any],
    places: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {name: places.get(str(value), value) for name, value in options.items()}
    sources = [places[name] for name in data]
    run("evaluate", task, *sources, *as_words(options), "--out", tmp_path / "command")
    capsys.readouterr()
    result = function(*sources, **options, out=tmp_path / "function", progress=False)
    assert capsys.readouterr() == ("", "")
    assert contents(tmp_path / "function") == contents(tmp_path / "command")
    assert result.folder == tmp_path / "function"
    assert all(isinstance(table, Table) for table in result.tables)
    recorded = json.loads((result.folder / "metrics.json").read_text())
    assert recorded.items() >= {**result.facts, **result.metrics}.items()


def test_recall_under_filters(
    places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("command", "function"):
        run("index", places["embeddings"], "--out", tmp_path / name)
    run("evaluate", "engine", tmp_path / "command", "--filters", places["filters"])
    capsys.readouterr()
    measured = dualenc.evaluate_engine(str(tmp_path / "function"), filters=places["filters"])
    assert capsys.readouterr() == ("", "")
    assert (measured.recall, measured.target) == (1.0, 0.95)
    measured.check()
    reports = [json.loads((tmp_path / name / "recall.json").read_text()) for name in NAMES]
    for report in reports:
        for row in report["filters"]:
            for name in MEASURED:
                del row[name]
    assert reports[0] == reports[1]
    with pytest.raises(BelowTarget, match=r"below 1; index the columns"):
        dualenc.evaluate_engine(str(tmp_path / "function"), recall=1.0).check()


NAMES = ("command", "function")


def test_push(
    places: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_folders(monkeypatch)
    url = url_of(tmp_path / "data")
    run("push", places["embeddings"], url, "--out", tmp_path / "command", "--table", "papers")
    capsys.readouterr()
    result = dualenc.push(
        places["embeddings"], url, out=tmp_path / "function", table="papers", progress=False
    )
    assert capsys.readouterr() == ("", "")
    assert contents(tmp_path / "function") == contents(tmp_path / "command")
    assert (result.count, result.sent, result.metric, result.recall) == (40, 0, "cosine", None)
    assert result.location.endswith("'papers'")


def test_mine(places: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("mine", places["text"], places["pairs"], "--relative", "null", "--last-rank", 20)
    run(*words, "--out", tmp_path / "command.jsonl")
    capsys.readouterr()
    mined = dualenc.mine(
        places["text"],
        places["pairs"],
        out=tmp_path / "function.jsonl",
        relative=None,
        last_rank=20,
        progress=False,
    )
    assert capsys.readouterr() == ("", "")
    lines = mined.file.read_text()
    assert lines == (tmp_path / "command.jsonl").read_text()
    assert mined.counts.written == lines.count("\n")
    embeddings = tmp_path / "command.jsonl-embeddings"
    assert contents(mined.embeddings) == contents(embeddings)


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run", [0.1, 0.4, 0.3])
    run("report", folder, "--out", tmp_path / "command.html")
    capsys.readouterr()
    written = dualenc.report(folder, out=tmp_path / "function.html")
    assert capsys.readouterr() == ("", "")
    assert written.file.read_bytes() == (tmp_path / "command.html").read_bytes()
    assert written.tables[0].rows[0]["best"] == 0.4


def test_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("quickstart", "--max-docs", 300, "--test-docs", 40, "--steps", 4)
    run(*words, "--out", tmp_path / "command")
    capsys.readouterr()
    result = dualenc.quickstart(
        out=tmp_path / "function", max_docs=300, test_docs=40, steps=4, progress=False
    )
    assert capsys.readouterr().out == ""
    assert (result.num_documents, result.num_test, result.steps) == (300, 40, 4)
    assert list(result.metrics) == ["untrained", "BM25", "trained"]
    for part in ("data", "model", "embeddings", "index"):
        here, there = (contents(tmp_path / name / part) for name in NAMES)
        assert here.keys() == there.keys()
        differ = {name for name, value in here.items() if value != there[name]}
        # They name their sources by absolute paths, or times.
        assert differ <= {"meta.json", "README.md", "items.arrow"}, part


def as_words(options: dict[str, Any]) -> list[str]:
    """The options of a command that stand for keyword arguments."""
    words = []
    for name, value in options.items():
        text = ",".join(value) if isinstance(value, list) else str(value)
        words += [f"--{name.replace('_', '-')}", text]
    return words


def contents(folder: Path) -> dict[str, str]:
    """Digests of all files of a folder by name."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert files
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
