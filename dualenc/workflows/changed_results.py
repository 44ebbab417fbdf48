"""Results of held-out queries before and after a change of the model, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from dualenc.encoders.dual import DualEncoder
from dualenc.evaluation.metrics import score_queries
from dualenc.evaluation.report_page import Table
from dualenc.search.index.open import Index, is_index
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.types import StrPath

MOST_QUERIES = 20
SHOWN = 3
"""Number of results that are shown of each query."""
LENGTH = 80
"""Characters of a snippet."""
RELEVANT = "✓ "


def changed_results(
    evaluator: IndexEvaluator,
    before: DualEncoder,
    after: DualEncoder,
    query_text: Callable[[str], str],
    snippet: Callable[[str], str],
    most: int = MOST_QUERIES,
) -> Table:
    """Show the queries whose nDCG@10 changed most, with their first results before and after.

        table = changed_results(evaluator, original, adapted, texts.get, snippets_of("index"))

    Args:
        evaluator: held-out queries and their relevant documents.
        before: model before the change.
        after: model after the change.
        query_text: returns the text of a query by its id.
        snippet: returns the beginning of a document by its id.
        most: maximum number of queries.

    Returns:
        A row per result, queries with the largest gains and losses first; relevant documents have a
        check mark.
    """
    runs = [evaluator.retrieve(model) for model in (before, after)]
    scores = [score_queries(evaluator.qrels, run) for run in runs]

    def score(place: int, query: str) -> float:
        return float(scores[place][query][evaluator.primary])

    def result(place: int, query: str, rank: int) -> str:
        names = list(runs[place][query])
        if rank >= len(names):
            return ""
        mark = RELEVANT if evaluator.qrels[query].get(names[rank], 0) > 0 else ""
        return f"{mark}{snippet(names[rank])}"

    changes = {query: score(1, query) - score(0, query) for query in scores[0]}
    changed = [query for query in changes if changes[query] != 0]
    changed.sort(key=lambda query: (-abs(changes[query]), query))
    rows: list[Mapping[str, object]] = []
    for query in changed[:most]:
        for rank in range(SHOWN):
            row: dict[str, object] = {"query": "", "nDCG@10": ""}
            if rank == 0:
                row["query"] = _beginning(query_text(query))
                row["nDCG@10"] = f"{score(0, query):.2f} → {score(1, query):.2f}"
            found = {"before": result(0, query, rank), "after": result(1, query, rank)}
            rows.append({**row, "rank": rank + 1, **found})
    caption = (
        f"Held-out queries whose results changed most ({len(changed):,} of {len(changes):,} "
        f"changed): the first {SHOWN} results before and after; ✓ is a relevant document"
    )
    return Table(caption, rows)


def snippets_of(source: StrPath) -> Callable[[str], str]:
    """Return a function from the id of a document to its id and the beginning of its text.

    Only an index stores snippets; of other sources the ids are all that can be shown.
    """
    if not is_index(source):
        return _beginning
    index = Index.open(Path(source))
    if index.snippets is None:
        return _beginning
    snippets = index.snippets
    rows = {name: row for row, name in enumerate(index.ids)}

    def snippet(name: str) -> str:
        return f"{name}: {_beginning(snippets[rows[name]] or '')}"

    return snippet


def _beginning(text: str) -> str:
    """Return at most `LENGTH` characters of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= LENGTH else f"{line[: LENGTH - 1]}…"
