"""Text retrieval from embeddings and judgements: the run, its scores, and the files that keep them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy.typing as npt

from dualenc.errors import DualencError
from dualenc.evaluation.metrics import CUTOFFS, Qrels, Run, Scores, mean_scores, remove_self_matches, score_queries
from dualenc.evaluation.runs import ranked, write_per_query, write_trec
from dualenc.evaluation.search import as_run, exact_search

HEADLINES = ("ndcg@10", "recall@10", "recall@100", "mrr@10", "map@100")
"""The metrics of the summary table."""


class Result:
    """What one system achieved on one collection.

    Args:
        system: Name of the model or method.
        dataset: Name of the collection.
        run: Score of each retrieved document by query id.
        qrels: Judgements.
        num_documents: Size of the corpus.
        keep_self_matches: Keep a retrieved document whose id is the query's; by default it is removed.

    Attributes:
        run: The run as it is scored, self-matches removed: trec_eval finds the same numbers in its file.

    Raises:
        DualencError: the judgements are empty, or a score is not finite.
    """

    def __init__(
        self, system: str, dataset: str, run: Run, qrels: Qrels, num_documents: int, *, keep_self_matches: bool = False
    ) -> None:
        self.system = system
        self.dataset = dataset
        self.run = run if keep_self_matches else remove_self_matches(run)
        self.qrels = qrels
        self.num_documents = num_documents
        self.per_query: dict[str, Scores] = score_queries(qrels, self.run, CUTOFFS, keep_self_matches=True)

    @cached_property
    def means(self) -> Scores:
        """Mean over the judged queries of each metric, by name."""
        return mean_scores(self.per_query)

    def row(self, metrics: Sequence[str] = HEADLINES) -> dict[str, object]:
        """The line of this result in a table."""
        sizes = {"queries": len(self.per_query), "documents": self.num_documents}
        return {"data": self.dataset, "system": self.system, **sizes, **{name: self.means[name] for name in metrics}}

    def write(self, folder: Path) -> None:
        """Write the TREC run file and the log of per-query scores."""
        write_trec(folder / "run.trec", self.run, tag=_tag(self.system))
        write_per_query(folder / "per_query.ndjson", self.per_query, self.dataset)


def retrieve(
    query_ids: Sequence[str],
    queries: npt.NDArray[Any],
    document_ids: Sequence[str],
    documents: npt.NDArray[Any],
    *,
    depth: int = 100,
    keep_self_matches: bool = False,
) -> dict[str, dict[str, float]]:
    """The best documents of each query by exact search.

    Args:
        query_ids: (Q,) ids.
        queries: (Q, D) embeddings.
        document_ids: (N,) ids.
        documents: (N, D) embeddings; may be memory-mapped.
        depth: How many documents to keep for each query.
        keep_self_matches: Keep a document whose id is the query's; otherwise one more takes its place.

    Returns:
        Score of each retrieved document by query id.

    Raises:
        DualencError: the shapes do not fit, there is no document, or an embedding is not finite.
    """
    if keep_self_matches:
        return as_run(query_ids, document_ids, *exact_search(queries, documents, depth, document_ids=document_ids))
    found = exact_search(queries, documents, depth + 1, document_ids=document_ids)
    return first_documents(remove_self_matches(as_run(query_ids, document_ids, *found)), depth)


def first_documents(run: Run, depth: int) -> dict[str, dict[str, float]]:
    """The run cut to the `depth` best documents of each query."""
    return {
        query: {document: documents[document] for document in ranked(documents)[:depth]}
        for query, documents in run.items()
    }


def summary_rows(results: Sequence[Result], metrics: Sequence[str] = HEADLINES) -> list[dict[str, object]]:
    """A table row for each result and, with several collections, the mean of each system over them."""
    rows = [result.row(metrics) for result in results]
    systems = dict.fromkeys(result.system for result in results)
    if len({result.dataset for result in results}) > 1:
        rows += [
            {"data": "mean", "system": system, "queries": None, "documents": None, **means_over_datasets(own, metrics)}
            for system in systems
            if (own := [result for result in results if result.system == system])
        ]
    return rows


def cutoff_rows(results: Sequence[Result]) -> list[dict[str, object]]:
    """A table row for each metric of each result, with a column for each cut-off."""
    return [
        {"data": result.dataset, "system": result.system, "metric": metric}
        | {f"@{k}": result.means[f"{metric}@{k}"] for k in CUTOFFS}
        for result in results
        for metric in dict.fromkeys(name.partition("@")[0] for name in result.means)
    ]


def means_over_datasets(results: Sequence[Result], metrics: Sequence[str] | None = None) -> Scores:
    """The mean over collections, each weighing the same, of each metric of one system."""
    if not results:
        raise DualencError("no collection was evaluated; give a BEIR folder")
    return mean_scores(
        {result.dataset: {name: result.means[name] for name in metrics or result.means} for result in results}
    )


def metrics_document(results: Sequence[Result]) -> dict[str, Any]:
    """What `metrics.json` says of the results: all metrics by system and collection, and their means."""
    systems = dict.fromkeys(result.system for result in results)
    document: dict[str, Any] = {}
    for system in systems:
        own = [result for result in results if result.system == system]
        document[system] = {
            "datasets": {
                result.dataset: {
                    "queries": len(result.per_query),
                    "documents": result.num_documents,
                    "metrics": result.means,
                }
                for result in own
            },
            "mean": means_over_datasets(own),
        }
    return document


def _tag(system: str) -> str:
    return "-".join(system.split()) or "dualenc"
