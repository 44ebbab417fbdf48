"""Text retrieval from embeddings and judgements: the run, its scores, and the files that keep them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualenc.errors import DualencError
from dualenc.evaluation.metrics import (
    CUTOFFS,
    Qrels,
    Run,
    Scores,
    as_run,
    exact_search,
    mean_scores,
    remove_self_matches,
    score_queries,
)
from dualenc.files import atomic_path, open_regular

PathLike = str | os.PathLike[str]

LONGEST_LINE = 1 << 20
"""Bytes; a longer line is no line of the files that are read here."""
HIGHEST_GRADE = 1 << 20
"""No scale of relevance goes further; the gain of nDCG is linear in the grade."""


def write_trec(path: PathLike, run: Run, tag: str = "dualenc") -> None:
    """Write a run as `query Q0 document rank score tag` lines, ranked as trec_eval ranks them.

    Scores are written so that reading them gives the same float32.

    Args:
        path: The file to write, replaced as a whole.
        run: Score of each retrieved document by query id.
        tag: Name of the system, without white space.

    Raises:
        DualencError: an id or the tag holds white space, which the format cannot express.
    """
    check_trec_names((tag,), "the tag")
    check_trec_names(run, "query id")
    with atomic_path(path) as beside, open(beside, "w", encoding="utf-8") as stream:
        for query, documents in run.items():
            check_trec_names(documents, "document id")
            for rank, document in enumerate(ranked(documents), start=1):
                stream.write(f"{query} Q0 {document} {rank} {documents[document]:.9g} {tag}\n")


def read_trec(path: PathLike) -> dict[str, dict[str, float]]:
    """Read a TREC run file; the ranks in it are ignored, as trec_eval does.

    Raises:
        DualencError: no such file, a line that is not a run's, or a document twice for a query.
    """
    run: dict[str, dict[str, float]] = {}
    for place, line in read_lines(path):
        fields = line.split()
        score = _number(fields[4]) if len(fields) == 6 else None
        if score is None:
            raise DualencError(f"{place}: not a line of a TREC run (query Q0 document rank score tag); mend the line")
        documents = run.setdefault(fields[0], {})
        if fields[2] in documents:
            raise DualencError(f"{place}: document {fields[2]} stands twice for query {fields[0]}; remove one")
        documents[fields[2]] = score
    return run


def read_qrels(path: PathLike) -> dict[str, dict[str, int]]:
    """Read judgements from a BEIR file (`query-id corpus-id score`) or a TREC one (`query 0 document grade`).

    Raises:
        DualencError: no such file, a line that is neither, or no judgement at all.
    """
    qrels: dict[str, dict[str, int]] = {}
    for number, (place, line) in enumerate(read_lines(path)):
        fields = line.split()
        grade = _number(fields[-1]) if len(fields) in (3, 4) else None
        if grade is None and number == 0:
            continue  # the header of a BEIR file
        if grade is None or grade != int(grade) or abs(grade) > HIGHEST_GRADE:
            raise DualencError(
                f"{place}: not a judgement (query, document, whole grade up to {HIGHEST_GRADE:,}); mend the line"
            )
        qrels.setdefault(fields[0], {})[fields[-2]] = int(grade)
    if not qrels:
        raise DualencError(f"{path}: the judgements (qrels) are empty; give the file of the right split")
    return qrels


def write_per_query(path: PathLike, per_query: Mapping[str, Scores], dataset: str = "") -> None:
    """Write one JSON object per query and line: `{"dataset": …, "query": …, "ndcg@10": …, …}`."""
    # An id may be a file name that is no UTF-8: its odd bytes are escaped as JSON escapes them.
    with atomic_path(path) as beside, open(beside, "w", encoding="utf-8", errors="backslashreplace") as stream:
        for query, scores in per_query.items():
            row = {"dataset": dataset, "query": query, **scores}
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_per_query(path: PathLike) -> dict[str, Scores]:
    """Read a log of `write_per_query`: the metrics by query id.

    Raises:
        DualencError: no such file, a line that is not such an object, a query twice, or no line at all.
    """
    per_query: dict[str, Scores] = {}
    for place, line in read_lines(path):
        try:
            row = json.loads(line)
            query = row.pop("query")
            row.pop("dataset", None)
            scores = {name: float(value) for name, value in row.items()}
            if not isinstance(query, str) or not all(map(math.isfinite, scores.values())):
                raise ValueError
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
            raise DualencError(f"{place}: not a line of a per-query log; evaluate again to write it anew") from None
        if query in per_query:
            raise DualencError(f"{place}: query {query} stands twice; evaluate again to write the log anew")
        per_query[query] = scores
    if not per_query:
        raise DualencError(f"{path}: the per-query log is empty; evaluate again to write it anew")
    return per_query


def ranked(documents: Mapping[str, float]) -> list[str]:
    """Document ids by descending score, equal scores by descending id, as trec_eval orders them."""
    return sorted(documents, key=lambda document: (documents[document], document), reverse=True)


def check_trec_names(names: Iterable[str], what: str) -> None:
    """Make sure that names can stand in a TREC file: not empty, no white space.

    Raises:
        DualencError: one cannot; tells which.
    """
    for name in names:
        if len(name.split()) != 1 or name.strip() != name:
            raise DualencError(f"{what} {name!r} is empty or holds white space, which TREC files cannot; rename it")


def read_lines(path: PathLike) -> Iterator[tuple[str, str]]:
    """Lines of a text file that are not blank, each with where it stands; a line at a time is in memory.

    Raises:
        DualencError: no regular file, not UTF-8, or a line that is too long to be one.
    """
    try:
        stream = open_regular(path)
    except FileNotFoundError:
        raise DualencError(f"{path}: no such file") from None
    with stream:
        number = 0
        while line := stream.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise DualencError(f"{path}:{number}: a line of more than {LONGEST_LINE >> 20} MiB; is it a text file?")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                reason = f"byte 0x{line[error.start]:02x}"
                raise DualencError(f"{path}:{number}: not UTF-8 text ({reason}); save the file as UTF-8") from None
            if text.strip():
                yield f"{path}:{number}", text


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def bm25_run(
    query_ids: Sequence[str],
    queries: Sequence[str],
    document_ids: Sequence[str],
    documents: Sequence[str],
    k: int,
    *,
    k1: float = 1.5,
    b: float = 0.75,
) -> dict[str, dict[str, float]]:
    """The k best documents of each query by BM25 (Lucene's variant), English stop words removed, no stemming.

    Documents that share no word with the query are not retrieved, so a query may find fewer than k, or none. Equal
    scores are ordered by descending document id, as trec_eval does.

    Args:
        query_ids: (Q,) ids.
        queries: (Q,) texts.
        document_ids: (N,) ids.
        documents: (N,) texts.
        k: How many documents to retrieve for each query.
        k1: Saturation of the term frequency.
        b: Strength of the length normalisation.

    Returns:
        Score of each retrieved document by query id.

    Raises:
        DualencError: no document has a word.
    """
    import bm25s

    corpus = bm25s.tokenize(list(documents), show_progress=False)
    if not any(corpus.ids):
        raise DualencError("BM25: no document holds a word; is the corpus empty?")
    scorer = bm25s.BM25(k1=k1, b=b)
    scorer.index(corpus, show_progress=False)
    words = bm25s.tokenize(list(queries), return_ids=False, show_progress=False)
    run: dict[str, dict[str, float]] = {}
    for query, tokens in zip(query_ids, words, strict=True):
        known = [token for token in tokens if token in corpus.vocab]
        scores = scorer.get_scores(known) if known else np.zeros(len(documents), np.float32)
        run[query] = _best(scores, document_ids, k)
    return run


def _best(scores: npt.NDArray[np.floating], document_ids: Sequence[str], k: int) -> dict[str, float]:
    columns = np.flatnonzero(scores > 0)
    if len(columns) > k:
        # Keep whatever ties with the k-th: the ids decide among equals.
        kth = np.partition(scores[columns], -k)[-k]
        columns = columns[scores[columns] >= kth]
    found = sorted(((float(scores[column]), document_ids[column]) for column in columns.tolist()), reverse=True)[:k]
    return {document: score for score, document in found}


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
