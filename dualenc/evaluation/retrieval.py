"""Text retrieval from embeddings and judgements: runs of a model and of BM25, and their scores."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dualenc import distributed
from dualenc.evaluation.metrics import (
    CUTOFFS,
    Qrels,
    Run,
    Scores,
    mean_scores,
    remove_self_matches,
    score_queries,
)
from dualenc.evaluation.runs import ranked, write_per_query, write_trec
from dualenc.search.exact_search import exact_search
from dualenc.search.lexical import Lexical
from dualenc.types import Vectors, check_several

if TYPE_CHECKING:
    from dualenc.data import RetrievalSet

logger = logging.getLogger("dualenc.evaluation")


def retrieve(
    query_ids: Sequence[str],
    queries: Vectors,
    document_ids: Sequence[str],
    documents: Vectors,
    *,
    depth: int = 100,
    qrels: Qrels | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, dict[str, float]]:
    """The best documents of each query by exact search: their scores by query id.

    Args:
        query_ids, queries: (Q,) ids and (Q, D) embeddings.
        document_ids, documents: (N,) ids and (N, D) embeddings; may be memory-mapped.
        depth: how many documents to keep for each query.
        qrels: judgements; with them one more takes the place of an unjudged document whose id is
            the query's.
        device: where to search, as in `exact_search`.
    """
    check_several("query_ids", query_ids)
    check_several("document_ids", document_ids)
    # One document more than wanted takes the place of a self-match.
    scores, columns = exact_search(
        queries, documents, depth + 1, document_ids=document_ids, device=device
    )
    run = {}
    for query, nearest, values in zip(query_ids, columns.tolist(), scores.tolist(), strict=True):
        run[query] = {document_ids[column]: score for column, score in zip(nearest, values)}
    return first_documents(run, depth, qrels)


def first_documents(
    run: Run, depth: int, qrels: Qrels | None = None
) -> dict[str, dict[str, float]]:
    """The run cut to the `depth` best documents of each query; with judgements, unjudged
    self-matches are removed."""
    run = run if qrels is None else remove_self_matches(run, qrels)
    return {
        query: {name: documents[name] for name in ranked(documents)[:depth]}
        for query, documents in run.items()
    }


def report_self_matches(name: str, collection: RetrievalSet, keep_self_matches: bool) -> None:
    """Log what becomes of documents with the id of a query, where that is no stray coincidence (1 %
    of the queries)."""
    shared = set(collection.queries.ids) & set(collection.corpus.ids)
    if len(shared) <= len(collection.queries) / 100 or not distributed.is_main():
        return
    judged = sum(query in collection.qrels[query] for query in shared)
    others = (
        "kept, too"
        if keep_self_matches
        else "removed as copies of their queries (keep_self_matches keeps them)"
    )
    logger.warning(
        f"{name}: {len(shared):,} of {len(collection.queries):,} queries have the id of a document: "
        f"{judged:,} of these documents are judged and kept, the other {len(shared) - judged:,} are {others}"
    )


def bm25_run(collection: RetrievalSet, k: int) -> dict[str, dict[str, float]]:
    """The k best documents of each query by BM25, as `dualenc.search.lexical` splits and scores
    texts.

    Documents that share no word with the query are not retrieved. Equal scores are ordered by
    descending id, as trec_eval does.
    """
    corpus = collection.corpus
    # Equal scores are found by ascending row.
    rows = sorted(range(len(corpus)), key=corpus.ids.__getitem__, reverse=True)
    lexical = Lexical.build(corpus[row] for row in rows)
    run = {}
    for number, query in enumerate(collection.queries.ids):
        hits = lexical.search(collection.queries[number], k)
        run[query] = {corpus.ids[rows[place]]: score for place, score in hits}
    return run


HEADLINES = ("ndcg@10", "recall@10", "recall@100", "mrr@10", "map@100")
"""The metrics of the summary table."""


@dataclass
class Result:
    """Scores of one system, such as a model, on one collection of `num_documents`, by its run and
    the judgements.

    The run is scored as it is: `retrieve` and `first_documents` remove unjudged documents with the
    id of the query.
    """

    system: str
    dataset: str
    run: Run
    qrels: Qrels
    num_documents: int

    @cached_property
    def per_query(self) -> dict[str, Scores]:
        """Each metric of each judged query."""
        return score_queries(self.qrels, self.run)

    @cached_property
    def means(self) -> Scores:
        """Mean over the judged queries of each metric, by name."""
        return mean_scores(self.per_query)

    def write(self, folder: Path) -> None:
        """Write the TREC run file and the log of per-query scores."""
        write_trec(folder / "run.trec", self.run, tag="-".join(self.system.split()) or "dualenc")
        write_per_query(folder / "per_query.ndjson", self.per_query, self.dataset)


def split_by_training(result: Result, trained_ids: Iterable[str]) -> list[Result]:
    """Divide a result into queries with a relevant document that was in training, and queries with
    none.

    A part without queries is left out.
    """
    seen, unseen = divide_by_training(result.qrels, trained_ids)
    parts = []
    for name, qrels in (("documents seen in training", seen), ("documents not seen", unseen)):
        if qrels:
            run = {query: result.run[query] for query in qrels if query in result.run}
            system = f"{result.system}: {name}"
            parts.append(Result(system, result.dataset, run, qrels, result.num_documents))
    return parts


def divide_by_training(
    qrels: Qrels, trained_ids: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The judgements of queries with a relevant document that was in training, and those of queries
    with none."""
    trained = set(trained_ids)
    seen: dict[str, Any] = {}
    unseen: dict[str, Any] = {}
    for query, grades in qrels.items():
        relevant = {name for name, grade in grades.items() if grade > 0}
        part = unseen if relevant.isdisjoint(trained) else seen
        part[query] = grades
    return seen, unseen


def summary_rows(results: Sequence[Result]) -> list[dict[str, object]]:
    """A table row for each result and, with several collections, the mean of each system over
    them."""
    rows: list[dict[str, object]] = []
    for result in results:
        sizes = {"queries": len(result.per_query), "documents": result.num_documents}
        scores = {name: result.means[name] for name in HEADLINES}
        rows.append({"data": result.dataset, "system": result.system, **sizes, **scores})
    # The mean of one collection would repeat its row.
    if len({result.dataset for result in results}) > 1:
        for system, means in means_by_system(results).items():
            scores = {name: means[name] for name in HEADLINES}
            rows.append(
                {"data": "mean", "system": system, "queries": None, "documents": None, **scores}
            )
    return rows


def cutoff_rows(results: Sequence[Result]) -> list[dict[str, object]]:
    """A table row for each metric of each result, with a column for each cut-off."""
    rows: list[dict[str, object]] = []
    for result in results:
        for metric in dict.fromkeys(name.partition("@")[0] for name in result.means):
            cells = {f"@{k}": result.means[f"{metric}@{k}"] for k in CUTOFFS}
            rows.append(
                {"data": result.dataset, "system": result.system, "metric": metric, **cells}
            )
    return rows


def means_by_system(results: Sequence[Result]) -> dict[str, Scores]:
    """The means over collections, each weighing the same, of each system's metrics."""
    systems: dict[str, dict[str, Scores]] = {}
    for result in results:
        systems.setdefault(result.system, {})[result.dataset] = result.means
    return {system: mean_scores(means) for system, means in systems.items()}


def metrics_document(results: Sequence[Result]) -> dict[str, Any]:
    """Contents of `metrics.json`: all metrics by system and collection, and their means."""
    document: dict[str, Any] = {}
    for system, means in means_by_system(results).items():
        datasets = {}
        for result in results:
            if result.system == system:
                sizes = {"queries": len(result.per_query), "documents": result.num_documents}
                datasets[result.dataset] = {**sizes, "metrics": result.means}
        document[system] = {"datasets": datasets, "mean": means}
    return document
