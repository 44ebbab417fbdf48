"""From embeddings to scores and files, runs against full sorts, BM25 against its formula."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data import Corpus, RetrievalSet
from dualenc.evaluation.retrieval import (
    Result,
    bm25_run,
    cutoff_rows,
    first_documents,
    metrics_document,
    retrieve,
    summary_rows,
)
from tests.helpers.result_files import read_per_query


def random_collection(
    seed: int = 0,
) -> tuple[list[str], np.ndarray, list[str], np.ndarray, dict[str, dict[str, int]]]:
    """Queries and documents share ids, so that self-matches occur and score highest."""
    generator = np.random.default_rng(seed)
    documents = generator.standard_normal((60, 8)).astype(np.float32)
    queries = documents[:10] + 0.8 * generator.standard_normal((10, 8)).astype(np.float32)
    ids = [f"x{number}" for number in range(60)]
    qrels = {
        ids[q]: {
            ids[d]: int(g) for d, g in zip(generator.choice(60, 5), generator.integers(0, 3, 5))
        }
        for q in range(10)
    }
    return ids[:10], queries, ids, documents, qrels


def test_retrieval_equals_sorting_all_documents_but_the_query_itself() -> None:
    query_ids, queries, ids, documents, _ = random_collection()
    run = retrieve(query_ids, queries, ids, documents, depth=7, qrels={"x3": {"x3": 1}})
    for row, query in enumerate(query_ids):
        order = [
            ids[column]
            for column in np.argsort(-documents @ queries[row])
            if ids[column] != query or row == 3
        ]
        assert list(run[query]) == order[:7]
    kept = retrieve(query_ids, queries, ids, documents, depth=60)
    assert all(query in kept[query] and len(kept[query]) == 60 for query in query_ids)


def test_the_run_file_gives_trec_eval_the_same_numbers(tmp_path: Path) -> None:
    query_ids, queries, ids, documents, qrels = random_collection()
    result = Result(
        "toy model",
        "toy",
        retrieve(query_ids, queries, ids, documents, depth=20, qrels=qrels),
        qrels,
        len(ids),
    )
    result.write(tmp_path)
    with open(tmp_path / "run.trec", encoding="utf-8") as stream:
        run = pytrec_eval.parse_run(stream)
    theirs = pytrec_eval.RelevanceEvaluator(
        qrels, {"ndcg_cut.10", "recall.10", "map_cut.100"}
    ).evaluate(run)
    for ours, name in {
        "ndcg@10": "ndcg_cut_10",
        "recall@10": "recall_10",
        "map@100": "map_cut_100",
    }.items():
        assert result.means[ours] == pytest.approx(
            np.mean([scores[name] for scores in theirs.values()])
        )
    assert read_per_query(tmp_path / "per_query.ndjson") == result.per_query


def test_cutting_a_run_orders_ties_by_descending_id() -> None:
    assert list(first_documents({"q": {"a": 1.0, "c": 1.0, "b": 1.0, "d": 2.0}}, 3)["q"]) == [
        "d",
        "c",
        "b",
    ]


def test_the_summary_has_a_mean_row_for_each_system_over_several_collections() -> None:
    run = {"q": {"d": 1.0}}
    good, bad = (
        Result("model", "one", run, {"q": {"d": 1}}, 1),
        Result("model", "two", run, {"q": {"e": 1}}, 1),
    )
    bm25 = [Result("BM25", name, run, {"q": {"d": 1}}, 1) for name in ("one", "two")]
    rows = summary_rows([good, bm25[0], bad, bm25[1]])
    assert [(row["data"], row["system"], row["ndcg@10"]) for row in rows] == [
        ("one", "model", 1.0),
        ("one", "BM25", 1.0),
        ("two", "model", 0.0),
        ("two", "BM25", 1.0),
        ("mean", "model", 0.5),
        ("mean", "BM25", 1.0),
    ]
    assert len(summary_rows([good, bm25[0]])) == 2
    by_metric = {row["metric"]: row for row in cutoff_rows([good])}
    assert by_metric["precision"] == {"data": "one", "system": "model", "metric": "precision"} | {
        f"@{k}": 1 / k for k in (1, 3, 5, 10, 100)
    }
    document = metrics_document([good, bad])
    assert document["model"]["mean"]["ndcg@10"] == 0.5
    assert document["model"]["datasets"]["one"]["metrics"] == good.means


WORDS = ["wing", "flow", "shock", "heat", "plate"]
texts = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)


def slow_bm25(query: str, documents: list[str], k1: float = 1.5, b: float = 0.75) -> list[float]:
    bags = [Counter(document.split()) for document in documents]
    mean = sum(sum(bag.values()) for bag in bags) / len(bags)
    scores = [0.0] * len(bags)
    for word in query.split():
        holding = sum(word in bag for bag in bags)
        idf = math.log(1 + (len(bags) - holding + 0.5) / (holding + 0.5))
        for number, bag in enumerate(bags):
            if bag[word]:
                norm = k1 * (1 - b + b * sum(bag.values()) / mean)
                scores[number] += idf * bag[word] / (bag[word] + norm)
    return scores


@given(texts, st.lists(texts, min_size=1, max_size=8).filter(any), st.integers(1, 8))
def test_equals_the_formula(query: str, documents: list[str], k: int) -> None:
    ids = [f"d{number}" for number in range(len(documents))]
    run = bm25_run(RetrievalSet(Corpus(["q"], [query]), Corpus(ids, documents), {"q": {}}), k)["q"]
    expected = dict(zip(ids, slow_bm25(query, documents)))
    found = {document: score for document, score in expected.items() if score > 0}
    assert len(run) == min(k, len(found))
    for document, score in run.items():
        assert score == pytest.approx(found[document], rel=1e-5)
    assert sorted(run.values(), reverse=True) == pytest.approx(
        sorted(found.values(), reverse=True)[:k], rel=1e-5
    )


def test_ties_at_the_cut_go_to_the_higher_id() -> None:
    corpus = Corpus(["a", "c", "b", "x"], ["wing flow", "wing flow", "wing flow", "heat"])
    run = bm25_run(RetrievalSet(Corpus(["q"], ["wing"]), corpus, {"q": {}}), 2)
    assert list(run["q"]) == ["c", "b"]
