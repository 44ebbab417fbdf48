"""`dualenc report`: curves, metrics and settings of runs on one page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from dualenc.training import RetrievalEvaluator
from dualenc.workflows.training_report import read_run
from tests.helpers.fakes import tiny_pairs
from tests.helpers.in_process import failure, run
from tests.helpers.logged_run import write_run
from tests.helpers.runs import train


@pytest.mark.slow
def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        write_run(tmp_path / "a<b", [0.1, 0.4, 0.3]),
        write_run(tmp_path / "other", [0.3, 0.2, 0.25]),
    ]
    run("report", *runs)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a<b", "ndcg@10", "0.1000", "0.4000", "10", "0.3000"] in rows
    assert ["other", "ndcg@10", "0.3000", "0.2500", "20", "0.2500"] in rows, (
        "the best of the trained"
    )
    page = (runs[0] / "report.html").read_text()
    assert "a&lt;b" in page
    assert "a<b" not in page
    assert re.findall(r"<figcaption>(.*?)</figcaption>", page) == ["evaluation/ndcg@10", "loss"]
    assert dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page)) == {
        "a&lt;b": "20 steps",
        "other": "20 steps",
    }


@pytest.mark.slow
def test_a_run_without_a_known_loss_shows_its_estimate(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 10, "batch_estimate": 2.5}\n{"step": 20, "batch_estimate": 2.0}\n'
    )
    run("report", tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r"<figcaption>(.*?)</figcaption>", page) == ["batch_estimate"]


def test_without_matplotlib_one_line_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_folder = write_run(tmp_path / "run", [0.1, 0.4])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert failure(capsys, "report", run_folder).endswith(
        "matplotlib: pip install 'dualenc[plots]'"
    )
    assert not (run_folder / "report.html").exists()


@pytest.mark.parametrize("part", ["model", "metrics.jsonl"])
def test_a_part_of_a_run_leads_to_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    folder = write_run(tmp_path / "run", [0.1, 0.4])
    assert failure(capsys, "report", folder / part).endswith(f"; name the run: {folder}")


@pytest.mark.slow
def test_a_real_run(tmp_path: Path) -> None:
    train(tmp_path / "run", evaluator=RetrievalEvaluator(pairs=tiny_pairs(12)), evaluate_every=4)
    records = read_run(tmp_path / "run")
    assert records.curve("evaluation/ndcg@10")[0] == [0, 4, 8, 12]
    run("report", tmp_path / "run", "--out", tmp_path / "page.html")
    assert "12 steps" in (tmp_path / "page.html").read_text()


GARBAGE = [
    ("metrics.jsonl", b"\x00\xff\xfe"),
    ("metrics.jsonl", b'{"step": 1, "loss": {"a": 1}}'),
    ("metrics.jsonl", b'{"step": 1, "loss": ' + b"9" * 400 + b"}"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "garbage"), GARBAGE)
def test_garbage_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, garbage: bytes
) -> None:
    folder = write_run(tmp_path / "run", [0.1, 0.2])
    (folder / name).write_bytes(garbage + b"\n")
    assert name in failure(capsys, "report", folder)
    assert not (folder / "report.html").exists()
