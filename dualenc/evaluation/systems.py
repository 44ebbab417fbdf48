"""Retrieval systems: rankings of a collection by a model, BM25, the two fused, a reranker and an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.evaluation.compression import Size, compressed_run
from dualenc.evaluation.metrics import Run, Scores
from dualenc.evaluation.retrieval import Result, bm25_run, first_documents, retrieve
from dualenc.evaluation.runs import ranked
from dualenc.search.fusion import fuse
from dualenc.search.rerank import Rescore
from dualenc.search.rerank import rerank as rerank_pairs

if TYPE_CHECKING:
    from dualenc.data import Corpus, RetrievalSet
    from dualenc.data.embeddings import Embeddings

BM25 = "BM25"
HYBRID = "hybrid"
RERANKED = "reranked"


class Engine(Protocol):
    """A search engine that holds the documents' embeddings."""

    system: str

    def run(self, queries: Embeddings, depth: int) -> Run: ...


@dataclass(frozen=True)
class Systems:
    """The systems to compare, and what they need.

    Args:
        model: the model's name in tables.
        depth: documents to retrieve for each query.
        device: to search on.
        keep_self_matches: keep a document whose id is the query's.
        bm25: rank by BM25 as well.
        hybrid: how to fuse the model and BM25, if they are fused.
        weight: of the model in the fusion; BM25 has the rest.
        rescore: a cross-encoder that scores the best documents again.
        rerank_top: how many of the best it scores.
        engine: a search engine to ask as well.
    """

    model: str
    depth: int
    device: torch.device
    keep_self_matches: bool = False
    bm25: bool = False
    hybrid: Literal["rrf", "weighted"] | None = None
    weight: float = 0.5
    rescore: Rescore | None = None
    rerank_top: int = 100
    engine: Engine | None = None

    def rank(self, collection: RetrievalSet, queries: Embeddings, documents: Embeddings) -> dict[str, Run]:
        """Rank the documents by each system; BM25 and the fusion only on the main process, the others on all."""
        runs: dict[str, Run] = {self.model: retrieve(*_vectors(queries, documents), **self._search_arguments())}
        if self.engine is not None:
            runs[self.engine.system] = self._first(self.engine.run(queries, self.depth + 1))
        if self.bm25 and distributed.is_main():
            texts = [_texts(collection.queries), _texts(collection.corpus)]
            words = bm25_run(collection.queries.ids, texts[0], collection.corpus.ids, texts[1], self.depth + 1)
            runs[BM25] = self._first(words)
            if self.hybrid is not None:
                runs[HYBRID] = self._fuse(runs[self.model], runs[BM25])
        if self.rescore is not None:
            reranked = self.model if self.engine is None else self.engine.system
            if self.hybrid is not None:
                reranked = HYBRID
            run = distributed.broadcast_object(runs.get(reranked))
            runs[RERANKED] = _rerank(self.rescore, run, collection, self.rerank_top)
        return runs

    def rank_compressed(
        self, collection: RetrievalSet, queries: Embeddings, documents: Embeddings, sizes: Sequence[Size]
    ) -> dict[Size, Scores]:
        """Mean metrics of the model with its vectors in each of several smaller sizes."""
        means = {}
        for size in sizes:
            run = compressed_run(*_vectors(queries, documents), size, **self._search_arguments())
            means[size] = self.score(size.name, "", run, collection).means
        return means

    def score(self, system: str, name: str, run: Run, collection: RetrievalSet) -> Result:
        """The metrics of a run on a collection of some name."""
        size = len(collection.corpus)
        return Result(system, name, run, collection.qrels, size, keep_self_matches=self.keep_self_matches)

    def _search_arguments(self) -> dict[str, Any]:
        return {"depth": self.depth, "keep_self_matches": self.keep_self_matches, "device": self.device}

    def _first(self, run: Run) -> Run:
        return first_documents(run, self.depth, keep_self_matches=self.keep_self_matches)

    def _fuse(self, *runs: Run) -> Run:
        assert self.hybrid is not None
        fused = {}
        for query in runs[0]:
            rankings = [[(name, run[query][name]) for name in ranked(run[query])] for run in runs]
            best = fuse(rankings, self.hybrid, weights=[self.weight, 1 - self.weight])[: self.depth]
            fused[query] = dict(best)
        return fused


def _vectors(queries: Embeddings, documents: Embeddings) -> tuple[Any, Any, Any, Any]:
    return queries.ids, queries.vectors, documents.ids, documents.vectors


def _texts(corpus: Corpus) -> list[str]:
    return [corpus[row] for row in range(len(corpus))]


def _rerank(rescore: Rescore, run: Run, collection: RetrievalSet, top: int) -> dict[str, dict[str, float]]:
    """The best of a run in the scores of a cross-encoder; each process scores its share of the queries."""
    queries = collection.queries
    corpus = collection.corpus
    row_of = {name: row for row, name in enumerate(corpus.ids)}
    share = range(len(queries))[distributed.rank_slice(len(queries))]
    own: dict[str, dict[str, float]] = {}
    for row in tqdm(share, desc="rerank", unit=" queries", disable=not distributed.is_main()):
        names = ranked(run[queries.ids[row]])[:top]
        order, scores = rerank_pairs(rescore, [[(queries[row], corpus[row_of[name]]) for name in names]])[0]
        own[queries.ids[row]] = {names[place]: score for place, score in zip(order.tolist(), scores.tolist())}
    return {query: scores for part in distributed.gather_objects(own) for query, scores in part.items()}
