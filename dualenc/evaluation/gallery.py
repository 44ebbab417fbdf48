"""Which queries to look at: the best and the worst answered, with what was retrieved for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from dualenc.evaluation.metrics import Scores
from dualenc.evaluation.report import Entry, Gallery, Item
from dualenc.evaluation.retrieval import Result
from dualenc.evaluation.runs import ranked

Show = Callable[[str], str]
ShowItem = Callable[[int], Item]


def retrieval_galleries(
    result: Result,
    show_query: Show,
    show_document: Show,
    *,
    metric: str = "ndcg@10",
    entries: int = 5,
    documents: int = 5,
) -> list[Gallery]:
    """The best and the worst queries of a run, with the documents found and the first relevant one that was missed.

    Args:
        result: A scored run.
        show_query: Text of a query by id.
        show_document: Text of a document by id, "" if it is not in the corpus.
        metric: What decides between good and bad.
        entries: Queries in each gallery, fewer if there are not twice as many.
        documents: Retrieved documents shown for each query.
    """
    best, worst = best_and_worst(result.per_query, metric, entries)

    def entry(query: str) -> Entry:
        shown = Item(show_query(query), note=f"query {query} · {metric} {result.per_query[query][metric]:.3f}")
        return Entry(shown, _documents(result, query, show_document, documents))

    where = f"{result.dataset}, {result.system}, by {metric}"
    return [
        Gallery(f"Best queries ({where})", [entry(query) for query in best]),
        Gallery(f"Worst queries ({where})", [entry(query) for query in worst]),
    ]


def best_and_worst(per_query: Mapping[str, Scores], metric: str, count: int) -> tuple[list[str], list[str]]:
    """Ids of the `count` queries of highest and of lowest score, no query twice; equals in their given order."""
    order = sorted(per_query, key=lambda query: -per_query[query][metric])
    count = min(count, (len(order) + 1) // 2)
    lowest = sorted(per_query, key=lambda query: per_query[query][metric])
    best = order[:count]
    return best, list(islice((query for query in lowest if query not in best), count))


def rank_galleries(
    what: str,
    ranks: npt.NDArray[np.int64],
    queries: npt.NDArray[np.floating],
    candidates: npt.NDArray[np.floating],
    positives: Sequence[Sequence[int]],
    show_query: ShowItem,
    show_candidate: ShowItem,
    *,
    entries: int = 5,
    results: int = 5,
) -> list[Gallery]:
    """The best and the worst queries of a rank evaluation, such as image to text, with the nearest candidates.

    Args:
        what: Names the direction in the captions.
        ranks: (A,) rank of each query's best right answer.
        queries: (A, D) embeddings.
        candidates: (N, D) embeddings.
        positives: For each query the columns that are right.
        show_query: What to show for a query by row.
        show_candidate: What to show for a candidate by column.
        entries: Queries in each gallery.
        results: Candidates shown for each query.
    """
    scores = {str(row): {"rank": -float(rank)} for row, rank in enumerate(ranks)}
    best, worst = best_and_worst(scores, "rank", entries)

    def entry(row: int) -> Entry:
        similarity = candidates @ queries[row]
        nearest = np.argsort(-similarity, kind="stable")[:results].tolist()
        right = set(positives[row])
        items = [
            show_candidate(column)._replace(note=f"{similarity[column]:.3f}", relevant=column in right)
            for column in nearest
        ]
        return Entry(show_query(row)._replace(note=f"right answer at rank {ranks[row]}"), items)

    return [
        Gallery(f"{what}: best", [entry(int(row)) for row in best]),
        Gallery(f"{what}: worst", [entry(int(row)) for row in worst]),
    ]


def _documents(result: Result, query: str, show_document: Show, count: int) -> list[Item]:
    found = result.run.get(query, {})
    grades = result.qrels[query]
    order = ranked(found)
    items = [
        Item(
            show_document(document),
            note=f"{rank}. {document} · {found[document]:.3f}",
            relevant=grades.get(document, 0) > 0,
        )
        for rank, document in enumerate(order[:count], start=1)
    ]
    place = {document: rank for rank, document in enumerate(order, start=1)}
    relevant = sorted((d for d, grade in grades.items() if grade > 0), key=lambda d: place.get(d, len(order) + 1))
    if relevant and place.get(relevant[0], count + 1) > count:
        rank = place.get(relevant[0])
        note = f"relevant, missed: {relevant[0]} · " + (f"rank {rank}" if rank else f"not in the first {len(order)}")
        items.append(Item(show_document(relevant[0]), note=note, relevant=True))
    return items
