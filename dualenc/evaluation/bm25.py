"""BM25, the lexical baseline beside every dense retriever; `bm25s` computes the scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dualenc.errors import DualencError


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
