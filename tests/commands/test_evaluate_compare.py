"""`dualenc evaluate compare` on folders, logs and TREC runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dualenc.cli import main
from dualenc.evaluation.runs import write_per_query, write_trec

QUERIES = [f"q{number}" for number in range(12)]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Run B ranks the relevant document first on every query but two, run A on every third."""
    (tmp_path / "qrels.tsv").write_text("".join(f"{query}\tright\t1\n" for query in QUERIES))
    for name, is_good in (("a", lambda i: i % 3 == 0), ("b", lambda i: i > 1)):
        run = {q: {"right": 2.0 if is_good(i) else 0.5, "wrong": 1.0} for i, q in enumerate(QUERIES)}
        write_trec(tmp_path / f"{name}.trec", run)
    return tmp_path / "a.trec", tmp_path / "b.trec"


@pytest.mark.slow
def test_trec_runs_with_judgements(runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "compare", *map(str, runs), "--qrels", str(tmp_path / "qrels.tsv"), "--out"]
    assert main([*words, str(tmp_path / "one")]) == 0
    assert main([*words, str(tmp_path / "two")]) == 0
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
    for run, value in (("a", 0.25), ("b", 0.5)):
        for collection in ("one", "two"):
            (tmp_path / run / collection).mkdir(parents=True)
            scores = {query: {"top@1": value} for query in QUERIES}
            write_per_query(tmp_path / run / collection / "per_query.ndjson", scores, collection)
    assert main(["evaluate", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("top@1") == 2
    assert printed.count("0.2500") >= 4  # mean of A and the difference, twice


def test_mistakes_are_told_in_one_line(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "none.tsv").write_text("query-id\tcorpus-id\tscore\n")
    log, other = tmp_path / "log.ndjson", tmp_path / "other.ndjson"
    write_per_query(log, {"q": {"ndcg@10": 1.0}})
    write_per_query(other, {"p": {"ndcg@10": 1.0}})
    qrels = ["--qrels", tmp_path / "qrels.tsv"]
    for words, message in [
        ((*runs,), "needs judgements"),
        ((runs[0], tmp_path / "absent", *qrels), "absent: no such file"),
        ((runs[0], empty, *qrels), "holds no per_query.ndjson"),
        ((*runs, "--qrels", tmp_path / "none.tsv"), "none.tsv: no usable judgement: it is empty"),
        ((log, other), "2 queries are in one run only"),
        ((log, log, "--metrics", "ndgc@10"), "--metrics: 'ndgc@10' is not in both runs; they share ndcg@10"),
        ((log, log, "--samples", "0"), "--samples is 0; it must lie between 1"),
    ]:
        assert main(["evaluate", "compare", *map(str, words)]) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1
        assert message in error[0]
