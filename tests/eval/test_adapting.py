"""Adapting queries to frozen vectors, in small: held-out documents, mined negatives, every run
recorded."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from dualenc.search.embed.writer import EmbeddingWriter
from tests.helpers.eval_scripts import load_script

DIM, NUM = 6, 80
DRAW = np.random.default_rng(0)
DOCUMENTS = DRAW.standard_normal((NUM, DIM)).astype(np.float32)
TURN = np.linalg.qr(DRAW.standard_normal((DIM, DIM)))[0].astype(np.float32)
QUERIES = np.concatenate([DOCUMENTS, DOCUMENTS[:20] + 0.1]) @ TURN
TRAIN = [(row, row) for row in range(60)] + [(NUM + row, row) for row in range(20)]
TEST = [(row, row) for row in range(60, 78)] + [(78, 0), (79, 1)]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Queries are turned documents, some twice; two of the 20 test queries name documents of
    training."""
    for side, letter, rows in (("corpus", "d", DOCUMENTS), ("queries", "q", QUERIES)):
        ids = [f"{letter}{row}" for row in range(len(rows))]
        writer = EmbeddingWriter(tmp_path / "vectors" / "toy" / side, ids, DIM, "float32", {})
        writer.write_all(lambda number, writer=writer, rows=rows: (rows[writer.ranges[number]], []))
    folder = tmp_path / "data" / "toy" / "qrels"
    folder.mkdir(parents=True)
    for split, pairs in (("train", TRAIN), ("test", TEST)):
        lines = [f"q{query}\td{document}\t1" for query, document in pairs]
        (folder / f"{split}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]))
    return tmp_path / "data", tmp_path / "vectors"


def ndcg(queries: np.ndarray, query: int, document: int) -> float:
    """nDCG@10 of a query with one relevant document."""
    unit = [
        vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (queries, DOCUMENTS)
    ]
    scores = unit[1].astype(float) @ unit[0][query].astype(float)
    rank = 1 + sum(score > scores[document] for score in scores)
    return 1 / math.log2(rank + 1) if rank <= 10 else 0.0


def test_documents_are_held_out_and_mined_ones_are_near_and_no_positives(
    folders: tuple[Path, Path],
) -> None:
    script = load_script("adapting.py")
    task = script.Task(*folders, "toy")
    held_out = {int(document[1:]) for grades in task.new.values() for document in grades}
    trained = set(task.pairs[:, 1].tolist())
    assert held_out | trained == set(range(60))
    assert held_out.isdisjoint(trained)
    # A tenth of the pairs of training.
    assert len(TRAIN) - len(task.pairs) == 8
    both = script.Task(*folders, "toy", hold_known=True)
    assert both.new == task.new
    assert {int(document[1:]) for grades in both.known.values() for document in grades} <= trained
    assert len(both.pairs) == len(task.pairs) - len(both.known) < len(task.pairs)
    settings = {
        "method": "InfoNCE, mined",
        "map": "dense",
        "temperature": 0.1,
        "rate": 1e-3,
        "seed": 0,
        "steps": 1,
    }
    training = script.Training(task, settings)
    training.mine()
    scores = (task.queries @ task.documents.T).double()
    for query, document in task.pairs.tolist():
        allowed = [
            d
            for d in range(NUM)
            if d != document and scores[query, d] <= 0.95 * scores[query, document]
        ]
        expected = sorted(allowed, key=lambda d: -scores[query, d])[:8]
        assert [d for d in training.mined[query].tolist() if d >= 0] == expected


@pytest.mark.slow
def test_every_method_is_tuned_recorded_and_reported(
    folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = load_script("adapting.py")
    for name, value in {
        "TEMPERATURES": (0.1, 0.05, 0.2),
        "RATES": (1e-2, 3e-3, 3e-2),
        "BEYOND_EDGE": 0,
        "SHARES": (0.0, 1.0),
    }.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(sys.modules["adapting_training"], "SHARES", (0.0, 1.0))
    results = tmp_path / "results.jsonl"
    options = {"epochs": 20, "tuning": 1.0, "seeds": 2, "results": results}
    script.run(*folders, ["toy"], **options)
    script.keep(*folders, "toy", [], **options)
    script.few(
        *folders, "toy", epochs=1, sizes=[20], rate=1e-2, temperature=0.1, seeds=2, results=results
    )
    lines = results.read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    unadapted = runs[0]
    expected = [ndcg(QUERIES, *pair) for pair in TEST]
    assert unadapted["all"] == pytest.approx(np.mean(expected), abs=6e-5)
    assert unadapted["new"] == pytest.approx(np.mean(expected[:18]), abs=6e-5)
    assert unadapted["all queries"] == 20
    exact = [
        one
        for one in runs
        if one["settings"]["method"] == "FrozenCorpus+" and "pairs" not in one["settings"]
    ]
    # Three temperatures, two more rates, and a second seed.
    assert len(exact) == 3 + 2 + 1
    assert all(one["done"] == one["settings"]["steps"] == round(20 * 72 / 32) for one in exact)
    shares = {one["settings"]["keep"]: one for one in runs if one["settings"]["method"] == "keep"}
    assert shares[1.0]["all"] == pytest.approx(unadapted["all"], abs=6e-5)
    assert (shares[1.0]["low"], shares[1.0]["high"]) == (0, 0)
    chosen = [one for one in exact if one["settings"] | {"seed": 1} == exact[-1]["settings"]]
    # A turn of the space is learned, also for new documents.
    assert all(one["new"] > unadapted["new"] + 0.2 for one in chosen)
    assert shares[0.0]["all"] == pytest.approx(
        np.mean([one["last"]["all"] for one in chosen]), abs=6e-5
    )
    few = [one["settings"] for one in runs if "pairs" in one["settings"]]
    assert [(one["method"], one["seed"]) for one in few] == [
        (method, seed) for seed in (0, 1) for method in ("FrozenCorpus+", "InfoNCE, B = 32")
    ]
    script.run(*folders, ["toy"], **options)
    assert results.read_text().splitlines()[: len(lines)] == lines
    script.run(*folders, ["toy"], hold_known=True, methods=["FrozenCorpus+"], **options)
    both = [json.loads(line) for line in results.read_text().splitlines() if '"both"' in line]
    assert len(both) == 6
    # All of the original weights is the model as it was; those of the best evaluation cost new
    # documents nothing.
    assert {one["share"] for one in both} <= {0.0, 1.0}
    assert all(one["all"] == unadapted["all"] for one in both if one["share"] == 1)
    assert any(one["all"] > unadapted["all"] for one in both if one["share"] == 0)
    script.report(results, figures=tmp_path)
    printed = capsys.readouterr().out
    assert all(name in printed for name in script.METHODS)
    assert (tmp_path / "adapt_keep.svg").read_text().count("<path") > 10
