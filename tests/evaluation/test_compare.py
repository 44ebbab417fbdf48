"""The paired bootstrap against scipy, and against cases with a known answer."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from dualenc.errors import DualencError
from dualenc.evaluation.compare import compare_runs, paired_bootstrap


def scores(seed: int, queries: int, shift: float) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    a = generator.random(queries)
    return a, a + shift + 0.2 * generator.standard_normal(queries)


@pytest.mark.parametrize(("seed", "shift"), [(0, 0.0), (1, 0.03), (2, 0.06)])
def test_agrees_with_scipy(seed: int, shift: float) -> None:
    a, b = scores(seed, 200, shift)
    ours = paired_bootstrap(a, b, samples=20_000)
    interval = scipy.stats.bootstrap(
        (b - a,), np.mean, n_resamples=20_000, method="percentile", rng=0
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx((interval.low, interval.high), abs=0.002)
    # With 200 queries the mean is all but normal, so the t-test gives the same probability.
    assert ours.p_value == pytest.approx(scipy.stats.ttest_rel(b, a).pvalue, abs=0.01)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    covered = [
        result.low <= 0.1 <= result.high
        for result in (paired_bootstrap(*scores(seed, 80, 0.1), samples=500, confidence=0.9) for seed in range(200))
    ]
    assert np.mean(covered) == pytest.approx(0.9, abs=0.06)


def test_a_run_against_itself() -> None:
    result = paired_bootstrap([0.25, 0.5, 1.0], [0.25, 0.5, 1.0])
    assert (result.difference, result.low, result.high, result.p_value) == (0, 0, 0, 1)
    assert (result.better, result.worse, result.queries) == (0, 0, 3)


def test_a_constant_difference_is_certain() -> None:
    result = paired_bootstrap(np.zeros(10), np.full(10, 0.1), samples=999)
    assert (result.low, result.high) == pytest.approx((0.1, 0.1))
    assert result.p_value == pytest.approx(1 / 1000)
    assert result.better == 10


@given(st.integers(0, 2**31), st.integers(1, 40))
def test_the_seed_decides_and_swapping_the_runs_mirrors(seed: int, queries: int) -> None:
    a, b = scores(seed, queries, 0.05)
    first, second = paired_bootstrap(a, b, samples=200, seed=seed), paired_bootstrap(a, b, samples=200, seed=seed)
    mirrored = paired_bootstrap(b, a, samples=200, seed=seed)
    assert first == second
    assert mirrored.difference == -first.difference
    assert (mirrored.low, mirrored.high) == pytest.approx((-first.high, -first.low))
    assert mirrored.p_value == first.p_value


def test_runs_are_paired_by_query_id_not_by_order() -> None:
    a = {"q1": {"ndcg@10": 0.0}, "q2": {"ndcg@10": 1.0}}
    b = {"q2": {"ndcg@10": 1.0}, "q1": {"ndcg@10": 0.0}}
    assert compare_runs(a, b, ["ndcg@10"])["ndcg@10"].better == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paired_bootstrap([1.0], [1.0, 2.0]), "for each query"),
        (lambda: paired_bootstrap([], []), "for each query"),
        (lambda: paired_bootstrap([1.0], [1.0], samples=0), "samples=0"),
        (lambda: paired_bootstrap([1.0], [1.0], confidence=95), "confidence=95"),
        (lambda: compare_runs({"q": {}}, {"p": {}}, []), "2 queries are in one run only"),
        (lambda: compare_runs({"q": {"a": 1.0}}, {"q": {"b": 1.0}}, ["a"]), "run B has no metric 'a'; it has b"),
    ],
)
def test_mistakes(call: object, message: str) -> None:
    with pytest.raises(DualencError, match=message):
        call()  # type: ignore[operator]
