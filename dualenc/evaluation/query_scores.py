"""The best and the worst queries of an evaluation, for its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dualenc.types import Integers, Vectors


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
