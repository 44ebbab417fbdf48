"""Metrics against matrices worked by hand, a slow loop and other libraries; the paired bootstrap
against the t-test."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
import pytrec_eval
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from dualenc.errors import DualencError
from dualenc.evaluation import metrics
from dualenc.evaluation.metrics import (
    best_positive_ranks,
    mean_scores,
    paired_bootstrap,
    recall_at,
    remove_self_matches,
    score_queries,
)

DOCS = [f"d{i}" for i in range(12)]
# A few values only, so that ties abound; grades run from -3 (junk) over 0 to 3.
runs = st.dictionaries(
    st.sampled_from(["q1", "q2", "q3", "d4", "unjudged"]),
    st.dictionaries(st.sampled_from(DOCS), st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0])),
)
judgements = st.dictionaries(
    st.sampled_from(["q1", "q2", "q3", "d4"]),
    st.dictionaries(st.sampled_from(DOCS), st.integers(-3, 3), min_size=1),
    min_size=1,
)


def slow_scores(grades: dict[str, int], scores: dict[str, float], k: int) -> dict[str, float]:
    """The definitions of trec_eval, one query, written out."""
    ranking = sorted(scores, key=lambda doc: (scores[doc], doc), reverse=True)[:k]
    gains = [max(grades.get(doc, 0), 0) for doc in ranking]
    ideal = sorted((max(grade, 0) for grade in grades.values()), reverse=True)[:k]
    relevant = sum(grade >= 1 for grade in grades.values())
    hits = [gain >= 1 for gain in gains]
    precisions = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits)) if hits[i]]

    def dcg(values: list[int]) -> float:
        return sum(value / math.log2(i + 2) for i, value in enumerate(values))

    return {
        f"ndcg@{k}": dcg(gains) / dcg(ideal) if any(ideal) else 0.0,
        f"recall@{k}": sum(hits) / relevant if relevant else 0.0,
        f"map@{k}": sum(precisions) / relevant if relevant else 0.0,
        f"precision@{k}": sum(hits) / k,
        f"hit@{k}": float(any(hits)),
        f"mrr@{k}": 1 / (hits.index(True) + 1) if any(hits) else 0.0,
    }


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(judgements, runs)
def test_equals_the_definitions_written_out(qrels: dict, run: dict) -> None:
    scored = score_queries(qrels, remove_self_matches(run, qrels), (1, 3, 10))
    assert list(scored) == list(qrels)
    for query, grades in qrels.items():
        retrieved = {
            doc: score for doc, score in run.get(query, {}).items() if doc != query or doc in grades
        }
        for k in (1, 3, 10):
            expected = slow_scores(grades, retrieved, k)
            assert {name: scored[query][name] for name in expected} == pytest.approx(
                expected, abs=1e-9
            )


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(judgements, runs)
def test_equals_trec_eval_and_counts_missing_queries_as_zero(qrels: dict, run: dict) -> None:
    means = mean_scores(score_queries(qrels, run, (1, 3, 10)))
    # A query with nothing above -2 crashes it.
    grades = {
        query: {doc: max(grade, -1) for doc, grade in docs.items()} for query, docs in qrels.items()
    }
    trec = pytrec_eval.RelevanceEvaluator(
        grades, {"ndcg_cut.1,3,10", "map_cut.1,3,10", "recall.1,3,10"}
    )
    per_query = trec.evaluate(run)
    for ours, theirs in {"ndcg": "ndcg_cut", "map": "map_cut", "recall": "recall"}.items():
        for k in (1, 3, 10):
            total = sum(scores[f"{theirs}_{k}"] for scores in per_query.values())
            assert means[f"{ours}@{k}"] == pytest.approx(total / len(qrels))


def test_a_ranking_worked_by_hand() -> None:
    """Ranking d3 (0), d2 (2), d1 (1), with d9 (3) missed; d1 and d4 tie, and the higher id d4 goes
    first."""
    qrels = {"q": {"d1": 1, "d2": 2, "d9": 3, "d4": 0}}
    run = {"q": {"d3": 0.9, "d2": 0.8, "d1": 0.7, "d4": 0.7}}
    scores = score_queries(qrels, run, (2, 4))["q"]
    ideal = 3 + 2 / math.log2(3) + 1 / 2
    assert scores["ndcg@4"] == pytest.approx((2 / math.log2(3) + 1 / math.log2(5)) / ideal)
    assert scores["recall@2"] == pytest.approx(1 / 3)
    assert scores["recall@4"] == pytest.approx(2 / 3)
    assert scores["map@4"] == pytest.approx((1 / 2 + 2 / 4) / 3)
    assert scores["mrr@2"] == pytest.approx(1 / 2)
    assert scores["precision@4"] == pytest.approx(1 / 2)
    assert (scores["hit@2"], scores["hit@4"]) == (1, 1)


@pytest.mark.parametrize("rank", [1, 3, 7, 49, 100])
def test_mrr_is_cut_exactly_at_k(rank: int) -> None:
    run = {"q": {f"d{i}": 1.0 / i for i in range(1, 101)}}
    scores = score_queries({"q": {f"d{rank}": 1}}, run, tuple(k for k in (rank - 1, rank) if k))[
        "q"
    ]
    assert scores[f"mrr@{rank}"] == pytest.approx(1 / rank)
    assert scores.get(f"mrr@{rank - 1}", 0.0) == 0.0


def test_a_document_with_the_id_of_the_query_is_removed_unless_it_is_judged() -> None:
    run = {"a": {"a": 3.0, "b": 2.0}, "b": {"c": 1.0}}
    qrels = {"a": {"b": 1}}
    assert remove_self_matches(run, qrels) == {"a": {"b": 2.0}, "b": {"c": 1.0}}
    for grade in (-1, 0, 1):
        assert remove_self_matches(run, {"a": {"a": grade, "b": 1}}) == run
    assert remove_self_matches(run, {"b": {"a": 1}}) == {"a": {"b": 2.0}, "b": {"c": 1.0}}
    assert score_queries(qrels, remove_self_matches(run, qrels), (1,))["a"]["recall@1"] == 1.0
    assert score_queries(qrels, run, (1,))["a"]["recall@1"] == 0.0


@pytest.mark.slow
def test_equals_sentence_transformers_where_the_definitions_agree() -> None:
    """Binary grades, no ties, one relevant document or more; MAP only when k ≥ |R|."""
    import torch
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    generator = np.random.default_rng(0)
    matrix = generator.permuted(np.tile(np.linspace(0, 1, 40), (15, 1)), axis=1)
    relevant = {
        f"q{i}": {f"d{j}" for j in generator.choice(40, 1 + i % 6, replace=False)}
        for i in range(15)
    }
    texts = {f"q{i}": str(i) for i in range(15)}, {f"d{j}": str(j) for j in range(40)}
    evaluator = InformationRetrievalEvaluator(
        *texts,
        relevant,
        accuracy_at_k=[1, 10],
        precision_recall_at_k=[1, 10],
        mrr_at_k=[1, 10],
        ndcg_at_k=[1, 10],
        map_at_k=[10],
        write_csv=False,
        score_functions={"given": lambda queries, docs: torch.from_numpy(matrix)},
    )
    theirs = evaluator.compute_all_metrics(_NumberEncoder())["given"]
    run = {f"q{i}": {f"d{j}": matrix[i, j] for j in range(40)} for i in range(15)}
    ours = mean_scores(
        score_queries({q: dict.fromkeys(docs, 1) for q, docs in relevant.items()}, run, (1, 10))
    )
    names = {
        "ndcg": "ndcg@k",
        "recall": "recall@k",
        "precision": "precision@k",
        "mrr": "mrr@k",
        "hit": "accuracy@k",
    }
    for name, their_name in names.items():
        for k in (1, 10):
            assert ours[f"{name}@{k}"] == pytest.approx(theirs[their_name][k]), name
    assert ours["map@10"] == pytest.approx(theirs["map@k"][10])


class _NumberEncoder:
    """Stands where a SentenceTransformer would: the scores are given, so the embeddings do not
    matter."""

    def encode_query(self, sentences: list[str], **_: object) -> object:
        import torch

        return torch.zeros(len(sentences), 1)

    encode_document = encode_query


def test_ranks_on_a_matrix_worked_by_hand() -> None:
    """Three images, two captions each; they find a caption of theirs at rank 1, 2 and 5."""
    captions = np.eye(6, dtype=np.float32)
    images = np.array(
        [
            [0.9, 0.1, 0.5, 0.4, 0.3, 0.2],
            [0.0, 0.9, 0.8, 0.1, 0.2, 0.3],
            [0.9, 0.8, 0.7, 0.6, 0.1, 0.2],
        ],
        np.float32,
    )
    ranks = best_positive_ranks(images, captions, [[0, 1], [2, 3], [4, 5]])
    assert ranks.tolist() == [1, 2, 5]
    assert recall_at(ranks, (1, 2, 5)) == pytest.approx(
        {"recall@1": 1 / 3, "recall@2": 2 / 3, "recall@5": 1.0}
    )
    # The other way: caption 0 ties between images 0 and 2, caption 5 too: a tie counts against the
    # model.
    owners = [[0], [0], [1], [1], [2], [2]]
    assert best_positive_ranks(captions, images, owners).tolist() == [2, 3, 1, 3, 3, 3]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_ranks_equal_a_loop_whatever_the_block(
    seed: int, rows: int, columns: int, block: int
) -> None:
    generator = np.random.default_rng(seed)
    queries = generator.integers(-2, 3, (rows, 3)).astype(np.float32)
    candidates = generator.integers(-2, 3, (columns, 3)).astype(np.float32)
    positives = [
        generator.choice(columns, generator.integers(0, columns + 1), replace=False)
        for _ in range(rows)
    ]
    with patch.object(metrics, "rows_at_once", lambda candidates: block):
        ranks = best_positive_ranks(queries, candidates, positives)
    for row, rank in enumerate(ranks):
        scores = candidates @ queries[row]
        own = set(positives[row].tolist())
        best = max((scores[i] for i in own), default=-np.inf)
        assert rank == 1 + sum(scores[i] >= best for i in range(columns) if i not in own)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: score_queries({}, {}), "empty"),
        (lambda: score_queries({"q": {"d": 1}}, {"q": {"d": math.nan}}), "query q"),
        (
            lambda: best_positive_ranks(np.full((1, 3), np.nan), np.ones((2, 3)), [[0]]),
            "not finite",
        ),
    ],
)
def test_a_refusal(call: object, message: str) -> None:
    with pytest.raises(DualencError, match=message):
        call()  # type: ignore[operator]


def scores(seed: int, queries: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    a = generator.random(queries)
    return a, a + shift + 0.2 * generator.standard_normal(queries)


@pytest.mark.parametrize(("seed", "shift"), [(0, 0.0), (1, 0.03), (2, 0.06)])
def test_agrees_with_the_t_test(seed: int, shift: float) -> None:
    a, b = scores(seed, 200, shift)
    theirs = scipy.stats.ttest_rel(b, a)
    # With 200 queries the mean is all but normal, so the t-test gives the same interval.
    ours = paired_bootstrap(a, b, samples=20_000)
    interval = theirs.confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high), abs=0.002)


def test_a_run_against_itself() -> None:
    result = paired_bootstrap([0.25, 0.5, 1.0], [0.25, 0.5, 1.0])
    assert result == (0, 0, 0)


@pytest.mark.parametrize(("queries", "low", "high"), [(1, -1, 1), (10, 0.1, 0.1)])
def test_a_constant_difference_is_certain_but_for_one_query(
    queries: int, low: float, high: float
) -> None:
    result = paired_bootstrap(np.zeros(queries), np.full(queries, 0.1), samples=999)
    assert result == pytest.approx((0.1, low, high))


def test_groups_are_resampled_whole() -> None:
    """Of equal sizes, the interval is the t-test's over the groups' means; queries alone give a
    narrower one."""
    generator = np.random.default_rng(0)
    number = np.repeat(generator.permutation(100), 10)
    differences = 0.1 * generator.standard_normal(100)[number] + 0.02 * generator.random(1000)
    before = np.zeros(1000)
    ours = paired_bootstrap(before, differences, groups=number, samples=20_000)
    means = [differences[number == each].mean() for each in range(100)]
    theirs = scipy.stats.ttest_1samp(means, 0).confidence_interval(0.95)
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.002)
    by_query = paired_bootstrap(before, differences, samples=2000)
    assert by_query.high - by_query.low < 0.5 * (ours.high - ours.low)


def test_groups_of_one_and_of_all() -> None:
    """One query each is a resampling of queries; all in one group may be anything."""
    a, b = scores(0, 50, 0.1)
    alone = paired_bootstrap(a, b, groups=np.arange(50)[::-1], samples=999)
    assert alone == pytest.approx(paired_bootstrap(a, b, samples=999), abs=0.01)
    together = paired_bootstrap(a, b, groups=np.zeros(50, int))
    assert together == pytest.approx((np.mean(b - a), -1, 1))


def test_groups_of_unequal_sizes_weigh_by_their_queries() -> None:
    """Against a loop over resampled groups."""
    generator = np.random.default_rng(1)
    number = (generator.random(300) ** 2 * 40).astype(int)
    differences = generator.standard_normal(40)[number]
    ours = paired_bootstrap(np.zeros(300), differences, groups=number, samples=5000)
    assert ours.difference == pytest.approx(differences.mean())
    rows = [np.flatnonzero(number == each) for each in range(40)]
    draws = []
    for _ in range(5000):
        drawn = np.concatenate([rows[each] for each in generator.integers(0, 40, 40)])
        draws.append(differences[drawn].mean())
    expected = np.quantile(draws, [0.025, 0.975])
    assert (ours.low, ours.high) == pytest.approx(tuple(expected), abs=0.04)
