"""The scores of single queries at one evaluation, of which reports show the best and the worst."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from dualenc.errors import DualencError
from dualenc.types import Integers, Vectors

MAX_QUERIES = 1000
SHOWN_QUERIES = 10
TEXT_CHARACTERS = 200


class QueryScores(NamedTuple):
    """Scores of up to 1,000 queries by id, higher is better, and the texts of the best and the worst."""

    metric: str
    scores: Mapping[str, float]
    texts: Mapping[str, str]

    def to_plain(self) -> dict[str, Any]:
        """For JSON, scores of four decimals."""
        scores = {query: round(score, 4) for query, score in self.scores.items()}
        return {"queries": {"metric": self.metric, "scores": scores, "texts": dict(self.texts)}}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> QueryScores:
        """Restore from untrusted `to_plain()`."""
        try:
            queries = plain["queries"]
            scores = {query: float(score) for query, score in queries["scores"].items()}
            texts = {query: str(text) for query, text in queries["texts"].items()}
            return cls(str(queries["metric"]), scores, texts)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise DualencError(
                f"no record of an evaluation ({error}); train again, or remove the file"
            ) from error


def query_scores(metric: str, scores: Mapping[str, float], texts: Mapping[str, str]) -> QueryScores:
    """Keep the scores of the first 1,000 queries; `texts` by id are looked up for the shown queries only."""
    first = dict(islice(scores.items(), MAX_QUERIES))
    best, worst = best_and_worst(first, SHOWN_QUERIES)
    shown = {query: snippet(texts[query], TEXT_CHARACTERS) for query in (*best, *worst) if query in texts}
    return QueryScores(metric, first, shown)


def best_and_worst(scores: Mapping[str, float], count: int) -> tuple[list[str], list[str]]:
    """Ids of the `count` queries of highest and of lowest score, no query twice; equals in their given order."""
    count = min(count, (len(scores) + 1) // 2)
    best = sorted(scores, key=lambda query: -scores[query])[:count]
    lowest = sorted(scores, key=scores.__getitem__)
    worst = [query for query in lowest if query not in set(best)]
    return best, worst[:count]


def best_and_worst_rows(
    scores: Mapping[str, float],
    metric: str,
    describe: Callable[[str], Mapping[str, object]],
    count: int = 5,
) -> list[dict[str, object]]:
    """Table rows of the best and the worst queries: id, score, and the columns of `describe(id)`."""
    rows: list[dict[str, object]] = []
    for kind, queries in zip(("best", "worst"), best_and_worst(scores, count)):
        for query in queries:
            rows.append({"": kind, "query": query, metric: scores[query], **describe(query)})
    return rows


def rank_rows(
    ranks: Integers,
    queries: Vectors,
    candidates: Vectors,
    name_query: Callable[[int], str],
    name_candidate: Callable[[int], str],
) -> list[dict[str, object]]:
    """Table rows of the best and the worst queries by the rank of their right answer, with the nearest candidate.

    `ranks` (A,) are from 1, of queries (A, D) among candidates (N, D); the functions name a row of either.
    """

    def describe(query: str) -> dict[str, object]:
        row = int(query)
        nearest = int((candidates @ queries[row]).argmax())
        return {"rank": int(ranks[row]), "what": name_query(row), "nearest": name_candidate(nearest)}

    reciprocal = {str(row): 1 / float(rank) for row, rank in enumerate(ranks)}
    return best_and_worst_rows(reciprocal, "1/rank", describe)


def snippet(text: str, characters: int = 400) -> str:
    """The beginning of a text in one line, cut at a word where it is too long."""
    line = " ".join(text.split())
    if len(line) <= characters:
        return line
    return line[:characters].rsplit(" ", 1)[0] + " …"
