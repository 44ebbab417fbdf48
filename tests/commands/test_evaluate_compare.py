"""`dualenc evaluate compare` on folders, logs and TREC runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dualenc.evaluation.runs import write_per_query, write_trec
from tests.commands.in_process import run

QUERIES = [f"q{number}" for number in range(12)]


@pytest.mark.slow
def test_trec_runs_with_judgements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run B ranks the relevant document first on every query but two, run A on every third."""
    (tmp_path / "qrels.tsv").write_text("".join(f"{query}\tright\t1\n" for query in QUERIES))
    for name, is_good in (("a", lambda i: i % 3 == 0), ("b", lambda i: i > 1)):
        ranking = {q: {"right": 2.0 if is_good(i) else 0.5, "wrong": 1.0} for i, q in enumerate(QUERIES)}
        write_trec(tmp_path / f"{name}.trec", ranking)
    words = ["evaluate", "compare", tmp_path / "a.trec", tmp_path / "b.trec", "--qrels", tmp_path / "qrels.tsv"]
    run(*words, "--out", tmp_path / "one")
    run(*words, "--out", tmp_path / "two")
    comparison = json.loads((tmp_path / "one" / "comparison.json").read_text())
    row = next(row for row in comparison["comparisons"] if row["metric"] == "mrr@10")
    assert (row["queries"], row["A"], row["B"]) == (12, pytest.approx(8 / 12), pytest.approx(11 / 12))
    assert (row["better"], row["worse"]) == (7, 1)
    assert row["low"] < row["B − A"] < row["high"]
    assert row["p"] < 0.05
    assert json.loads((tmp_path / "two" / "comparison.json").read_text()) == comparison
    assert "mrr@10" in capsys.readouterr().out
    assert "Comparison" in (tmp_path / "one" / "report.html").read_text()


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


def test_runs_are_paired_by_query_id_not_by_order(tmp_path: Path) -> None:
    scores = {"q1": {"ndcg@10": 0.0}, "q2": {"ndcg@10": 1.0}}
    write_per_query(tmp_path / "a.ndjson", scores)
    write_per_query(tmp_path / "b.ndjson", dict(reversed(scores.items())))
    run("evaluate", "compare", tmp_path / "a.ndjson", tmp_path / "b.ndjson", "--out", tmp_path / "out")
    row = json.loads((tmp_path / "out" / "comparison.json").read_text())["comparisons"][0]
    assert (row["better"], row["worse"], row["p"]) == (0, 0, 1)
