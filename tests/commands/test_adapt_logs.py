"""`dualenc adapt` from logs with positions and times, and its gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.cli import main
from dualenc.search import Index
from tests.helpers.in_process import run

pytestmark = pytest.mark.slow
D, N, SHOWN = 16, 240, 6


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index, and a log in which queries are their documents turned, in half of the showings."""
    folder = tmp_path_factory.mktemp("shop")
    random = np.random.default_rng(0)
    documents = random.normal(size=(N, D)).astype(np.float32)
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    turn = np.linalg.qr(np.eye(D) + 0.5 * random.normal(size=(D, D)))[0]
    Index.build(documents, [f"d{row}" for row in range(N)]).save(folder / "index")
    queries = (documents @ turn).astype(np.float32)
    write_log(folder / "useful.parquet", queries, relevant=0.9)
    write_log(folder / "position.parquet", queries, relevant=0.1)
    return folder


def write_log(path: Path, queries: np.ndarray, relevant: float) -> None:
    """Write impressions: a click at position k has a probability of 1/k times 0.1, or `relevant`
    for the document of the query."""
    random = np.random.default_rng(1)
    rows: list[tuple[Any, ...]] = []
    for session in range(2400):
        query = int(random.integers(N))
        shown = [query, *random.permutation(N)[: SHOWN - 1].tolist()]
        for place, document in enumerate(random.permutation(shown).tolist(), 1):
            rate = (relevant if document == query else 0.1) / place
            clicked = bool(random.random() < rate)
            time = 1_700_000_000 + 60 * session
            rows.append((queries[query], f"d{document}", place, clicked, session, time))
    names = ["query", "doc_id", "position", "clicked", "session_id", "timestamp"]
    columns = dict(zip(names, map(list, zip(*rows)), strict=True))
    pq.write_table(pa.table(columns), path)


def failed(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """Return what a command that ends with an error prints."""
    capsys.readouterr()
    assert main([str(word) for word in words]) != 0
    return capsys.readouterr().err


def metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())


def test_a_useful_log_passes_the_gate(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(
        *("adapt", shop / "index", shop / "useful.parquet", "--out", tmp_path / "run"),
        *("--train", "linear", "--learning-rate", 0.02, "--require-gain", 0.01),
    )
    output = capsys.readouterr().out
    assert "read as impressions: 14,400 rows, 240 queries" in output
    assert "click model: at position 1 a relevant document is clicked with 0." in output
    assert "next:  dualenc search" in output
    report = metrics(tmp_path / "run")
    assert report["gate"]["passed"]
    assert report["gate"]["low"] >= 0.01
    assert report["keep"] < 1
    rows = {row["queries of"]: row for row in report["quality"]}
    later = [row for task, row in rows.items() if task.startswith("last tenth: ")]
    assert sum(row["queries"] for row in later) == report["gate"]["queries"]
    assert all("Rocchio" in row for row in later)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "results changed most" in page


def test_a_gain_that_is_not_shown_leaves_the_original(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    text = failed(
        capsys,
        *("adapt", shop / "index", shop / "useful.parquet", "--out", tmp_path / "run"),
        *("--train", "linear", "--epochs", 1, "--require-gain", 0.9),
    )
    assert "the gate is not passed, and the model is the original" in text
    report = metrics(tmp_path / "run")
    assert not report["gate"]["passed"]
    assert report["keep"] == 1


def test_clicks_by_position_alone_teach_nothing(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = failed(
        capsys, "adapt", shop / "index", shop / "position.parquet", "--out", tmp_path / "run"
    )
    assert "clicks depend on the position alone" in text
    assert not (tmp_path / "run" / "model").exists()


def test_weights_of_actions_are_read(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = failed(
        capsys,
        *("adapt", shop / "index", shop / "useful.parquet", "--out", tmp_path / "run"),
        *("--weights", "click"),
    )
    assert "--weights has 'click'" in text
