"""Evaluation records for reports: histograms of similarities, and the score of each query, beside the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from dualenc.errors import DualencError
from dualenc.evaluation.convergence import SimilarityHistogram, label_similarities, pair_similarities
from dualenc.evaluation.report import best_and_worst, snippet

MAX_PAIRS = 1000
"""Pairs whose similarities are counted, each with all others: a million cosines."""
MAX_QUERIES = 1000
SHOWN = 10
"""Queries of highest, and of lowest score, whose texts are kept."""

_NUM_BINS = 50


@dataclass(frozen=True)
class Observed:
    """Record of one evaluation.

    Attributes:
        similarities: of positive and of negative held-out pairs; None without pairs of either kind.
        metric, scores: a metric by name, and up to 1,000 scores by query id; higher is better.
        texts: the best and the worst queries by id.
    """

    similarities: SimilarityHistogram | None = None
    metric: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """The same for JSON: 50 bins, and scores of four decimals."""
        plain: dict[str, Any] = {}
        if self.similarities is not None:
            plain["similarities"] = self.similarities.merged(_NUM_BINS).to_plain()
        if self.scores:
            scores = {query: round(score, 4) for query, score in self.scores.items()}
            plain["queries"] = {"metric": self.metric, "scores": scores, "texts": dict(self.texts)}
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Observed:
        """Restore from untrusted `to_plain()`.

        Raises:
            DualencError: it is something else.
        """
        try:
            queries = plain.get("queries", {})
            histogram = None
            if plain.get("similarities") is not None:
                histogram = SimilarityHistogram.from_plain(plain["similarities"])
            scores = {str(query): float(score) for query, score in queries.get("scores", {}).items()}
            texts = {str(query): str(text) for query, text in queries.get("texts", {}).items()}
            return cls(histogram, str(queries.get("metric", "")), scores, texts)
        # Whatever untrusted JSON of another shape raises.
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise DualencError(f"no record of an evaluation ({error}); train again, or remove the file") from error


def observed_queries(metric: str, scores: Mapping[str, float], texts: Mapping[str, str]) -> dict[str, Any]:
    """Fields of `Observed` for a metric's scores by query id, of which the first 1,000 are kept.

    `texts` by query id are looked up for the shown queries only.
    """
    kept = dict(islice(scores.items(), MAX_QUERIES))
    best, worst = best_and_worst({query: {metric: score} for query, score in kept.items()}, metric, SHOWN)
    shown = {query: snippet(texts[query], 200) for query in (*best, *worst) if query in texts}
    return {"metric": metric, "scores": kept, "texts": shown}


def observed_pairs(
    left: npt.NDArray[Any], right: npt.NDArray[Any], positives: Sequence[Sequence[int]]
) -> SimilarityHistogram | None:
    """Cosines of up to 1,000 held-out pairs, at equal distances, and of their items with all others.

    Args:
        left, right: (Q, D) and (N, D) embeddings.
        positives: for each left item the rows of its right ones.

    Returns:
        None without a pair, or without a negative one.
    """
    pairs = np.array([(row, column) for row, columns in enumerate(positives) for column in columns], np.int64)
    if not len(pairs):
        return None
    chosen = np.linspace(0, len(pairs) - 1, min(len(pairs), MAX_PAIRS)).round().astype(np.int64)
    rows, columns = pairs[chosen].T
    # A rectangular table of all positives of each query, padded: they are no negatives.
    listed = np.full((len(rows), max(len(positives[row]) for row in rows)), -1, np.int64)
    for place, row in enumerate(rows):
        listed[place, : len(positives[row])] = positives[row]
    try:
        return pair_similarities(left[rows], right[columns], rows, columns, listed)
    except DualencError:
        # One query or one document has no negatives.
        return None


def observed_labels(features: npt.NDArray[Any], labels: npt.NDArray[np.integer]) -> SimilarityHistogram | None:
    """Cosines of up to 1,000 images (N, D) of equal and of different label (N,); None without such pairs."""
    rows = np.linspace(0, len(labels) - 1, min(len(labels), MAX_PAIRS)).round().astype(np.int64)
    try:
        return label_similarities(features[rows], labels[rows])
    except DualencError:
        return None


def joined(parts: Mapping[str, Observed]) -> Observed:
    """Records on several collections as one, ids of queries as "COLLECTION/id", an equal share of scores of each."""
    share = max(1, MAX_QUERIES // len(parts))
    scores: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, part in parts.items():
        scores |= {f"{name}/{query}": score for query, score in islice(part.scores.items(), share)}
        texts |= {f"{name}/{query}": text for query, text in part.texts.items()}
    metric = next((part.metric for part in parts.values() if part.metric), "")
    return Observed(_added([part.similarities for part in parts.values()]), metric, scores, texts)


def _added(histograms: Sequence[SimilarityHistogram | None]) -> SimilarityHistogram | None:
    """The sum of histograms of as many bins; None without any."""
    found = [histogram for histogram in histograms if histogram is not None]
    if not found:
        return None
    positives, negatives = (np.array([getattr(one, name) for one in found]) for name in ("positives", "negatives"))
    return SimilarityHistogram(
        positives.sum(axis=0),
        negatives.sum(axis=0),
        float(np.average([histogram.positive_mean for histogram in found], weights=positives.sum(axis=1))),
        float(np.average([histogram.negative_mean for histogram in found], weights=negatives.sum(axis=1))),
    )
