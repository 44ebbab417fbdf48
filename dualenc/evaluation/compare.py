"""Is one run better than another? The paired bootstrap over queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dualenc.errors import DualencError
from dualenc.evaluation.metrics import Scores


class Comparison(NamedTuple):
    """What the paired bootstrap says of run B against run A, for one metric.

    Attributes:
        queries: Number of queries, Q.
        mean_a: Mean of run A.
        mean_b: Mean of run B.
        difference: `mean_b` − `mean_a`.
        low: Lower end of the confidence interval of the difference.
        high: Upper end of it.
        p_value: Two-sided: how often the difference would be as large by the choice of queries alone.
        better: Queries on which B scores higher.
        worse: Queries on which B scores lower.
    """

    queries: int
    mean_a: float
    mean_b: float
    difference: float
    low: float
    high: float
    p_value: float
    better: int
    worse: int


def paired_bootstrap(
    a: Sequence[float] | npt.NDArray[np.floating],
    b: Sequence[float] | npt.NDArray[np.floating],
    *,
    samples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Compare two systems by resampling the queries on which both were scored.

    The interval holds the percentiles of the resampled mean difference. The p-value counts the resamples whose
    difference, shifted so that their mean is zero, is at least as far from zero as the observed one (Efron and
    Tibshirani 1993, §16.4); it is never 0, the observed sample being one of those possible.

    Args:
        a: (Q,) scores of run A.
        b: (Q,) scores of run B on the same queries.
        samples: Number of resamples.
        confidence: Share of the resamples inside the interval.
        seed: Of the resampling; the same seed gives the same numbers.

    Raises:
        DualencError: the lengths differ, there is no query, or an argument is out of range.
    """
    a, b = np.asarray(a, float), np.asarray(b, float)
    if a.shape != b.shape or a.ndim != 1 or len(a) == 0:
        raise DualencError(f"scores of shapes {a.shape} and {b.shape}; give one of each run for each query")
    if samples < 1 or not 0 < confidence < 1:
        raise DualencError(
            f"samples={samples}, confidence={confidence}: samples must be 1 or more, confidence in (0, 1)"
        )
    differences = b - a
    observed = float(differences.mean())
    means = _resampled_means(differences, samples, seed)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    # A hair below the observed difference, so that equal ones are not lost to rounding.
    as_far = np.abs(means - observed) >= abs(observed) - 1e-12
    return Comparison(
        queries=len(a),
        mean_a=float(a.mean()),
        mean_b=float(b.mean()),
        difference=observed,
        low=float(low),
        high=float(high),
        p_value=float((1 + as_far.sum()) / (1 + samples)),
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
    )


def compare_runs(
    a: Mapping[str, Scores],
    b: Mapping[str, Scores],
    metrics: Sequence[str],
    *,
    samples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Comparison]:
    """Compare the per-query scores of two runs, metric by metric, in paired resamples.

    Args:
        a: Metrics of run A by query id.
        b: Metrics of run B by query id.
        metrics: Names of the metrics to compare.
        samples: Number of resamples.
        confidence: Share of the resamples inside the interval.
        seed: Of the resampling.

    Raises:
        DualencError: the runs do not have the same queries, or one lacks a metric.
    """
    if a.keys() != b.keys():
        only = len(a.keys() ^ b.keys())
        raise DualencError(f"{only} queries are in one run only; compare runs on the same data and split")
    for name, run in (("A", a), ("B", b)):
        missing = next((metric for metric in metrics if any(metric not in scores for scores in run.values())), None)
        if missing is not None:
            known = ", ".join(next(iter(run.values())))
            raise DualencError(f"run {name} has no metric {missing!r}; it has {known}")
    return {
        metric: paired_bootstrap(
            [a[query][metric] for query in a],
            [b[query][metric] for query in a],
            samples=samples,
            confidence=confidence,
            seed=seed,
        )
        for metric in metrics
    }


def _resampled_means(values: npt.NDArray[np.floating], samples: int, seed: int) -> npt.NDArray[np.floating]:
    """Means of `samples` resamples with replacement, in memory that does not grow with Q × samples."""
    generator = np.random.default_rng(seed)
    rows = max(1, 2**20 // len(values))
    means = [
        values[generator.integers(0, len(values), (min(rows, samples - start), len(values)))].mean(axis=1)
        for start in range(0, samples, rows)
    ]
    return np.concatenate(means)
