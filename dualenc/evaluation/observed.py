"""What an evaluation saw besides its metrics, for reports: histograms of similarities, and the score of each query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from dualenc.errors import DualencError
from dualenc.evaluation.convergence import SimilarityHistogram, label_similarities, pair_similarities

MOST_PAIRS = 1000
"""Pairs whose similarities are counted, each with all others: a million cosines."""
MOST_QUERIES = 1000
SHOWN = 10
"""Queries of highest, and of lowest score, whose texts are kept."""

_NUM_BINS = 50


@dataclass(frozen=True)
class Observed:
    """What one evaluation saw.

    Attributes:
        similarities: of positive and of negative held-out pairs; None where there are none of one kind.
        metric: what `scores` are; "" without any.
        scores: of up to 1,000 queries by id, higher is better.
        texts: of the best and the worst of them.
    """

    similarities: SimilarityHistogram | None = None
    metric: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """The same for JSON: 50 bins, and four decimals."""
        plain: dict[str, Any] = {}
        if (found := self.similarities) is not None:
            counts = {name: getattr(found, name) for name in ("positives", "negatives")}
            joined = {name: of.reshape(_NUM_BINS, -1).sum(axis=1).tolist() for name, of in counts.items()}
            means = {"positive_mean": round(found.positive_mean, 4), "negative_mean": round(found.negative_mean, 4)}
            plain["similarities"] = joined | means
        if self.scores:
            scores = {query: round(score, 4) for query, score in self.scores.items()}
            plain["queries"] = {"metric": self.metric, "scores": scores, "texts": dict(self.texts)}
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Observed:
        """What `to_plain` gave.

        Raises:
            DualencError: it is something else.
        """
        try:
            found, queries = plain.get("similarities"), plain.get("queries", {})
            histogram = None
            if found is not None:
                positives, negatives = (np.array(found[name], np.int64) for name in ("positives", "negatives"))
                means = (float(found["positive_mean"]), float(found["negative_mean"]))
                if positives.shape != negatives.shape or positives.ndim != 1 or not np.isfinite(means).all():
                    raise ValueError("histograms of different shapes")
                if any(counts.min(initial=0) < 0 or not counts.sum() for counts in (positives, negatives)):
                    raise ValueError("a histogram of nothing")
                histogram = SimilarityHistogram(np.linspace(-1, 1, len(positives) + 1), positives, negatives, *means)
            scores = {str(query): float(score) for query, score in queries.get("scores", {}).items()}
            texts = {str(query): str(text) for query, text in queries.get("texts", {}).items()}
            return cls(histogram, str(queries.get("metric", "")), scores, texts)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise DualencError(f"no record of an evaluation ({error}); train again, or remove the file") from error


def observed_queries(metric: str, scores: Mapping[str, float], texts: Mapping[str, str]) -> dict[str, Any]:
    """What is kept of the scores of queries: fields of `Observed`.

    Args:
        metric: what the scores are.
        scores: by query id, of which the first 1,000 are kept.
        texts: by query id; looked up for those only that are shown. Of queries that are no texts, none.
    """
    from dualenc.evaluation.report import best_and_worst, snippet

    kept = dict(islice(scores.items(), MOST_QUERIES))
    best, worst = best_and_worst({query: {metric: score} for query, score in kept.items()}, metric, SHOWN)
    shown = {query: snippet(texts[query], 200) for query in (*best, *worst) if query in texts}
    return {"metric": metric, "scores": kept, "texts": shown}


def observed_pairs(
    left: npt.NDArray[Any], right: npt.NDArray[Any], positives: Sequence[Sequence[int]]
) -> SimilarityHistogram | None:
    """Cosines of up to 1,000 held-out pairs, taken at equal distances, and of their items with one another.

    Args:
        left: (Q, D) embeddings.
        right: (N, D) embeddings.
        positives: for each left item the rows of its right ones.

    Returns:
        None where there is no pair, or no negative one.
    """
    pairs = np.array([(row, column) for row, columns in enumerate(positives) for column in columns], np.int64)
    if not len(pairs):
        return None
    rows, columns = pairs[np.linspace(0, len(pairs) - 1, min(len(pairs), MOST_PAIRS)).round().astype(np.int64)].T
    listed = np.full((len(rows), max(len(positives[row]) for row in rows)), -1, np.int64)
    for place, row in enumerate(rows):
        listed[place, : len(positives[row])] = positives[row]
    try:
        return pair_similarities(left[rows], right[columns], rows, columns, listed)
    except DualencError:  # one query, or one document: nobody is a negative
        return None


def observed_labels(features: npt.NDArray[Any], labels: npt.NDArray[np.integer]) -> SimilarityHistogram | None:
    """Cosines of up to 1,000 images (N, D), taken at equal distances, of equal and of different label (N,); None where
    there are no such pairs."""
    rows = np.linspace(0, len(labels) - 1, min(len(labels), MOST_PAIRS)).round().astype(np.int64)
    try:
        return label_similarities(features[rows], np.unique(labels[rows], return_inverse=True)[1])
    except DualencError:
        return None
