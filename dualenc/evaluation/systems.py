"""Retrieval systems: rankings of a collection by a model, BM25, the two fused, a reranker and an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.evaluation.metrics import Run
from dualenc.evaluation.retrieval import Result, bm25_run, first_documents, retrieve
from dualenc.evaluation.runs import ranked
from dualenc.search.fusion import Fusion, fuse
from dualenc.search.rerank import Rescore
from dualenc.search.rerank import rerank as rerank_pairs

if TYPE_CHECKING:
    from dualenc.data import Corpus, RetrievalSet
    from dualenc.data.embeddings import Embeddings
    from dualenc.evaluation.options import RankingOptions, RetrievalOptions

BM25 = "BM25"
HYBRID = "hybrid"
RERANKED = "reranked"


class Engine(Protocol):
    """A search engine that holds the documents' embeddings."""

    system: str

    def run(self, queries: Embeddings, depth: int) -> Run: ...


@dataclass(frozen=True)
class Systems:
    """The systems to compare: a model by its name in tables, BM25, both fused, a cross-encoder, a search engine."""

    model: str
    options: RetrievalOptions
    ranking: RankingOptions
    device: torch.device
    rescore: Rescore | None = None
    engine: Engine | None = None

    def rank(self, name: str, collection: RetrievalSet, queries: Embeddings, documents: Embeddings) -> list[Result]:
        """Rank the documents by each system and score the rankings; only the main process has all results."""
        limits = self._limits(collection)
        runs: dict[str, Run] = {self.model: retrieve(*_vectors(queries, documents), **limits, device=self.device)}
        reranked = self.model
        if self.engine is not None:
            reranked = self.engine.system
            runs[reranked] = first_documents(self.engine.run(queries, self.options.depth + 1), **limits)
        if (self.options.bm25 or self.ranking.hybrid) and distributed.is_main():
            texts = [_texts(collection.queries), _texts(collection.corpus)]
            depth = self.options.depth + 1
            words = bm25_run(collection.queries.ids, texts[0], collection.corpus.ids, texts[1], depth)
            runs[BM25] = first_documents(words, **limits)
            if self.ranking.hybrid:
                runs[HYBRID] = self._fuse(self.ranking.hybrid, runs[self.model], runs[BM25])
        if self.rescore is not None:
            if self.ranking.hybrid:
                reranked = HYBRID
            run = distributed.broadcast_object(runs.get(reranked))
            runs[RERANKED] = _rerank(self.rescore, run, collection, self.ranking.rerank_top)
        return [self._score(system, name, run, collection) for system, run in runs.items() if distributed.is_main()]

    def _score(self, system: str, name: str, run: Run, collection: RetrievalSet) -> Result:
        keep = self.options.keep_self_matches
        return Result(system, name, run, collection.qrels, len(collection.corpus), keep_self_matches=keep)

    def _limits(self, collection: RetrievalSet) -> dict[str, Any]:
        """How many documents a run keeps, and the judgements by which it drops copies of queries."""
        qrels = None if self.options.keep_self_matches else collection.qrels
        return {"depth": self.options.depth, "qrels": qrels}

    def _fuse(self, how: Fusion, *runs: Run) -> Run:
        fused = {}
        weights = [self.ranking.weight, 1 - self.ranking.weight]
        for query in runs[0]:
            rankings = [[(name, run[query][name]) for name in ranked(run[query])] for run in runs]
            fused[query] = dict(fuse(rankings, how, weights=weights)[: self.options.depth])
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
