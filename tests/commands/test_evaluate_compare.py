"""`dualenc evaluate compare` on folders and logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualenc.evaluation.runs import write_per_query
from tests.commands.in_process import run

QUERIES = [f"q{number}" for number in range(12)]


def row_of(printed: str, metric: str) -> dict[str, str]:
    """The cells of a metric's row in the table, by the names of the columns."""
    lines = [line.replace("B − A", "B−A").split() for line in printed.splitlines()]
    names = next(line for line in lines if "metric" in line)
    return dict(zip(names, next(line for line in lines if metric in line)))


def test_logs_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run B finds the relevant document first on every query but two, run A on every third."""
    for name, is_good in (("a", lambda i: i % 3 == 0), ("b", lambda i: i > 1)):
        scores = {query: {"mrr@10": 1.0 if is_good(i) else 0.5} for i, query in enumerate(QUERIES)}
        write_per_query(tmp_path / f"{name}.ndjson", scores)
    words = ["evaluate", "compare", tmp_path / "a.ndjson", tmp_path / "b.ndjson"]
    run(*words)
    printed = capsys.readouterr().out
    row = row_of(printed, "mrr@10")
    assert (row["queries"], float(row["A"]), float(row["B"])) == ("12", 0.6667, 0.9167)
    assert (row["better"], row["worse"]) == ("7", "1")
    assert float(row["low"]) < float(row["B−A"]) < float(row["high"])
    assert float(row["p"]) < 0.05
    run(*words)
    assert capsys.readouterr().out == printed


def test_folders_with_several_collections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("a", 0.25), ("b", 0.5)):
        for collection in ("one", "two"):
            (tmp_path / name / collection).mkdir(parents=True)
            scores = {query: {"top@1": value} for query in QUERIES}
            write_per_query(tmp_path / name / collection / "per_query.ndjson", scores, collection)
    run("evaluate", "compare", tmp_path / "a", tmp_path / "b")
    printed = capsys.readouterr().out
    assert printed.count("top@1") == 2
    assert printed.count("0.2500") >= 4  # mean of A and the difference, twice


def test_runs_are_paired_by_query_id_not_by_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = {"q1": {"ndcg@10": 0.0}, "q2": {"ndcg@10": 1.0}}
    write_per_query(tmp_path / "a.ndjson", scores)
    write_per_query(tmp_path / "b.ndjson", dict(reversed(scores.items())))
    run("evaluate", "compare", tmp_path / "a.ndjson", tmp_path / "b.ndjson")
    row = row_of(capsys.readouterr().out, "ndcg@10")
    assert (row["better"], row["worse"], row["p"]) == ("0", "0", "1.0000")
