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
    """Retrieve the best documents of each query by exact search.

    Args:
        query_ids: (Q,) ids of the queries.
        queries: (Q, D) embeddings.
        document_ids: (N,) ids of the documents.
        documents: (N, D) embeddings; may be memory-mapped.
        depth: number of documents to keep for each query.
        qrels: judgements; if given, an unjudged document with the id of the query is replaced by
            the next one.
        device: device to search on, as in `exact_search`.

    Returns:
        The score of each retrieved document by query id.
    """
    check_several("query_ids", query_ids)
    check_several("document_ids", document_ids)
    # One extra document replaces a self-match.
    scores, columns = exact_search(
        queries, documents, depth + 1, document_ids=document_ids, device=device
    )
    run = {}
    rankings = zip(query_ids, columns.tolist(), scores.tolist(), strict=True)
    for query, nearest, values in rankings:
        names = [document_ids[column] for column in nearest]
        run[query] = dict(zip(names, values))
    return first_documents(run, depth, qrels)


def first_documents(
    run: Run,
    depth: int,
    qrels: Qrels | None = None,
) -> dict[str, dict[str, float]]:
    """Cut a run to the best documents of each query.

    Args:
        run: score of each retrieved document by query id.
        depth: number of documents to keep for each query.
        qrels: judgements; if given, unjudged documents with the id of the query are removed first.
    """
    if qrels is not None:
        run = remove_self_matches(run, qrels)
    first = {}
    for query, documents in run.items():
        names = ranked(documents)[:depth]
        first[query] = {name: documents[name] for name in names}
    return first


def report_self_matches(name: str, collection: RetrievalSet, keep_self_matches: bool) -> None:
    """Warn if more than 1% of query ids are document ids, and say how these documents are treated.

    Args:
        name: name of the collection.
        collection: queries, corpus and judgements.
        keep_self_matches: keep these documents even if they are not judged.
    """
    shared = set(collection.queries.ids) & set(collection.corpus.ids)
    if len(shared) <= len(collection.queries) / 100 or not distributed.is_main():
        return
    judged = sum(query in collection.qrels[query] for query in shared)
    others = "removed as copies of their queries (keep_self_matches keeps them)"
    if keep_self_matches:
        others = "kept, too"
    logger.warning(
        f"{name}: {len(shared):,} of {len(collection.queries):,} queries have the id of a "
        f"document: {judged:,} of these documents are judged and kept, "
        f"the other {len(shared) - judged:,} are {others}"
    )


def bm25_run(collection: RetrievalSet, k: int) -> dict[str, dict[str, float]]:
    """Retrieve the best documents of each query by BM25 (`dualenc.search.lexical`).

    Only documents that share a word with the query are retrieved. Equal scores are ordered by
    descending id, as in trec_eval.

    Args:
        collection: queries and corpus of texts.
        k: number of documents for each query.
    """
    corpus = collection.corpus
    # The search orders equal scores by ascending row.
    rows = sorted(range(len(corpus)), key=corpus.ids.__getitem__, reverse=True)
    lexical = Lexical.build(corpus[row] for row in rows)
    run = {}
    for number, query in enumerate(collection.queries.ids):
        hits = lexical.search(collection.queries[number], k)
        # Hits are places in the sorted corpus.
        run[query] = {corpus.ids[rows[place]]: score for place, score in hits}
    return run


HEADLINES = ("ndcg@10", "recall@10", "recall@100", "mrr@10", "map@100")
"""Metrics of the summary table."""


@dataclass
class Result:
    """Run of one system on one collection, scored when it is first read.

    All retrieved documents are scored: `retrieve` and `first_documents` remove self-matches.

        result = Result("BM25", "scifact", bm25_run(collection, 100), collection.qrels, 5183)
        result.means["ndcg@10"]

    Args:
        system: name of the system, such as a model.
        dataset: name of the collection.
        run: score of each retrieved document by query id.
        qrels: grade of each judged document by query id.
        num_documents: number of documents in the collection.
    """

    system: str
    dataset: str
    run: Run
    qrels: Qrels
    num_documents: int

    @cached_property
    def per_query(self) -> dict[str, Scores]:
        """Metrics of each judged query."""
        return score_queries(self.qrels, self.run)

    @cached_property
    def means(self) -> Scores:
        """Mean of each metric over the judged queries."""
        return mean_scores(self.per_query)

    def write(self, folder: Path) -> None:
        """Write run.trec and per_query.ndjson into a folder."""
        # A tag must not contain white space.
        tag = "-".join(self.system.split()) or "dualenc"
        write_trec(folder / "run.trec", self.run, tag=tag)
        write_per_query(folder / "per_query.ndjson", self.per_query, self.dataset)


def split_by_training(result: Result, trained_ids: Iterable[str]) -> list[Result]:
    """Divide a result into queries with a relevant document that was in training, and the others.

    Args:
        result: scores of all queries.
        trained_ids: ids of the documents in training.

    Returns:
        Two results, or one if the other would be empty.
    """
    seen, unseen = divide_by_training(result.qrels, trained_ids)
    parts = []
    named = {"documents seen in training": seen, "documents not seen": unseen}
    for name, qrels in named.items():
        if qrels:
            run = {query: result.run[query] for query in qrels if query in result.run}
            system = f"{result.system}: {name}"
            parts.append(Result(system, result.dataset, run, qrels, result.num_documents))
    return parts


def divide_by_training(
    qrels: Qrels,
    trained_ids: Iterable[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide judgements by queries with and without a relevant document that was in training.

    Args:
        qrels: grades by query id.
        trained_ids: ids of the documents in training.
    """
    trained = set(trained_ids)
    seen: dict[str, Any] = {}
    unseen: dict[str, Any] = {}
    for query, grades in qrels.items():
        relevant = {name for name, grade in grades.items() if grade > 0}
        # One is enough: the query's relevance was partly learned.
        part = unseen if relevant.isdisjoint(trained) else seen
        part[query] = grades
    return seen, unseen


def summary_rows(results: Sequence[Result]) -> list[dict[str, object]]:
    """Return a table row for each result and, for several collections, their mean by system.

    Args:
        results: results of systems on collections.
    """
    rows = []
    for result in results:
        sizes = (len(result.per_query), result.num_documents)
        rows.append(_summary_row(result.dataset, result.system, sizes, result.means))
    # The mean of one collection would repeat its row.
    if len({result.dataset for result in results}) > 1:
        for system, means in means_by_system(results).items():
            # Dashes: sizes do not have a mean worth reading.
            rows.append(_summary_row("mean", system, (None, None), means))
    return rows


def _summary_row(
    dataset: str, system: str, sizes: tuple[int | None, int | None], means: Scores
) -> dict[str, object]:
    """Return a row of the summary table: names, the metrics of `HEADLINES`, and sizes."""
    names = {"data": dataset, "system": system}
    counts = dict(zip(("queries", "documents"), sizes))
    return {**names, **{name: means[name] for name in HEADLINES}, **counts}


def cutoff_rows(results: Sequence[Result]) -> list[dict[str, object]]:
    """Return a table row for each metric of each result, with a column for each cutoff.

    Args:
        results: results of systems on collections.
    """
    rows: list[dict[str, object]] = []
    for result in results:
        metrics = dict.fromkeys(name.partition("@")[0] for name in result.means)
        for metric in metrics:
            row: dict[str, object] = {
                "data": result.dataset,
                "system": result.system,
                "metric": metric,
            }
            for k in CUTOFFS:
                row[f"@{k}"] = result.means[f"{metric}@{k}"]
            rows.append(row)
    return rows


def means_by_system(results: Sequence[Result]) -> dict[str, Scores]:
    """Return the means of each system's metrics over collections, which weigh the same.

    Args:
        results: results of systems on collections.
    """
    systems: dict[str, dict[str, Scores]] = {}
    for result in results:
        systems.setdefault(result.system, {})[result.dataset] = result.means
    return {system: mean_scores(means) for system, means in systems.items()}


def metrics_document(results: Sequence[Result]) -> dict[str, Any]:
    """Return the contents of metrics.json: metrics by system and collection, and their means.

    Args:
        results: results of systems on collections.
    """
    document: dict[str, Any] = {}
    for system, means in means_by_system(results).items():
        datasets = {}
        for result in results:
            if result.system == system:
                datasets[result.dataset] = {
                    "queries": len(result.per_query),
                    "documents": result.num_documents,
                    "metrics": result.means,
                }
        document[system] = {"datasets": datasets, "mean": means}
    return document
