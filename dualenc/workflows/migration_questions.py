"""Queries that measure a migration: judged ones, or documents that stand in for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from dualenc.data import Corpus
from dualenc.encoders import Tower
from dualenc.evaluation import migration_measures as measures
from dualenc.evaluation.metrics import Qrels
from dualenc.search import Index
from dualenc.search.migration import maps
from dualenc.search.migration.candidates import NUM_CANDIDATES
from dualenc.search.query_vectors import query_vector
from dualenc.workflows.migration_documents import MAX_JUDGED

NUM_TIMED = 11
"""Number of queries whose time is measured."""


class Questions(NamedTuple):
    """Q queries in the spaces of both models, and how the results of systems are scored.

        questions = document_questions(old, new, fold, sampled_texts)
        questions.scores({"new": (questions.new, new)})

    Attributes:
        old: (Q, E) vectors of the old model; if it is gone, of the new one, mapped.
        new: (Q, D) vectors of the new model.
        old_is_gone: whether the old model is gone.
        few: a few of the queries, to measure time with.
        may_fit: (n,) bool, documents of the sample that are not queries, to fit a map of queries.
        truth: what is relevant, for the report.
        scores: function that scores systems by name.
        candidates: function that scores the new model over candidates of the old one.
        candidates_from: where these come from, for the report.
    """

    old: np.ndarray
    new: np.ndarray
    old_is_gone: bool
    few: Corpus
    may_fit: np.ndarray
    truth: str
    scores: Callable[[Mapping[str, measures.System]], dict[str, measures.Scores]]
    candidates: Callable[[measures.Sample], measures.Scores]
    candidates_from: str

    def best_map(self, new: np.ndarray, mapped: Mapping[maps.MapKind, np.ndarray]) -> maps.MapKind:
        """Return the kind of map over whose documents the queries find most.

        Args:
            new: (n, D) documents of the new model.
            mapped: (n, D) mapped documents by kind of map.
        """
        systems: dict[str, measures.System] = {measures.NEW: (self.new, new)}
        systems |= {kind: (self.new, vectors) for kind, vectors in mapped.items()}
        scores = self.scores(systems)
        return measures.best_map({kind: scores[kind] for kind in maps.KINDS})

    def all_scores(self, sample: measures.Sample, kind: maps.MapKind) -> dict[str, measures.Scores]:
        """Return the scores of all systems of the report, in its order.

        Args:
            sample: documents in both spaces.
            kind: kind of map.
        """
        mapped = self.old
        if not self.old_is_gone:
            # The reverse map: new queries over old vectors.
            fit_new, fit_old = sample.new[self.may_fit], sample.old[self.may_fit]
            mapped = maps.fit(fit_new, fit_old, kind)(self.new)
        systems = measures.compared(sample, self.old, mapped, self.new)
        if self.old_is_gone:
            del systems[measures.OLD]
        scores = self.scores(systems)
        # Before the mixed vectors, which the table shows share by share up to the new ones.
        before = [name for name in scores if name in measures.COMPARED_WITH]
        candidates = measures.OF_MAPPED if self.old_is_gone else measures.CANDIDATES
        own = {candidates: self.candidates(sample)}
        return {name: scores[name] for name in before} | own | scores


def judged_questions(
    queries: Corpus,
    qrels: Qrels,
    old: np.ndarray,
    new: np.ndarray,
    index: Index,
    rows: np.ndarray,
    *,
    old_is_gone: bool,
) -> Questions:
    """Return queries with relevance judgements.

    Args:
        queries: Q queries.
        qrels: grades by query id.
        old: (Q, E) vectors of the old model; if it is gone, of the new one, mapped.
        new: (Q, D) vectors of the new model.
        index: the old index of N documents, which finds candidates.
        rows: (n,) rows of the sample.
        old_is_gone: whether the old model is gone.
    """
    ids = (queries.ids, [index.ids[row] for row in rows.tolist()], qrels)

    def candidates(sample: measures.Sample) -> measures.Scores:
        # Among all documents, as searches find them: those of the sample alone would be too good.
        found = index.search_rows(old, min(NUM_CANDIDATES, len(index)))[1]
        column_of = np.full(len(index), -1)
        column_of[rows] = np.arange(len(rows))
        columns = np.where(found >= 0, column_of[found], -1)
        return measures.judged_candidates((new, sample.new), columns, *ids)

    return Questions(
        old,
        new,
        old_is_gone,
        _first(queries),
        may_fit=np.ones(len(rows), bool),
        truth="judged documents",
        scores=lambda systems: measures.judged_scores(systems, *ids),
        candidates=candidates,
        candidates_from=f"sampled ones among the first {NUM_CANDIDATES} of all",
    )


def document_questions(
    old: np.ndarray, new: np.ndarray, fold: np.ndarray, documents: Corpus, *, old_is_gone: bool
) -> Questions:
    """Return documents as queries; what the new model finds counts as relevant.

    Args:
        old: (n, E) documents of the sample by the old model.
        new: (n, D) the same by the new model.
        fold: (n,) folds; documents of the first one are the queries.
        documents: the n documents.
        old_is_gone: whether the old model is gone.
    """
    rows = np.flatnonzero(fold == 0)[:MAX_JUDGED]
    # The map of the queries must not have seen them.
    may_fit = fold != 0
    finding = old[rows]
    if old_is_gone:
        finding = maps.fit(new[may_fit], old[may_fit], "rescaled")(new[rows])
    return Questions(
        finding,
        new[rows],
        old_is_gone,
        _first(documents.take(rows)),
        may_fit=may_fit,
        truth="the new model's neighbours of documents",
        scores=lambda systems: measures.neighbour_scores(systems, rows),
        candidates=lambda sample: measures.neighbour_candidates(
            sample, finding, rows, NUM_CANDIDATES
        ),
        candidates_from=f"the first {NUM_CANDIDATES} of the sample",
    )


def warm_seconds(
    queries: Corpus, old_tower: Tower, new_tower: Tower, index: Index, vectors: np.ndarray
) -> float:
    """Return the median time of a search by candidates that all have new vectors.

    Args:
        queries: a few queries.
        old_tower: tower of the old model that encodes them, or of what stands in for it.
        new_tower: the same of the new model.
        index: the old index.
        vectors: (K, D) vectors of candidates.
    """
    seconds = []
    for item in [queries[row] for row in range(len(queries))]:
        started = time.perf_counter()
        old = query_vector(item, old_tower, index.dim, may_be_zero=True)
        new = query_vector(item, new_tower, new_tower.dim, may_be_zero=True)
        index.search_rows(old, min(NUM_CANDIDATES, len(index)))
        _ = vectors @ new
        seconds.append(time.perf_counter() - started)
    # The first call of a model takes longer.
    return float(np.median(seconds[1:] or seconds))


def _first(corpus: Corpus) -> Corpus:
    return corpus.take(range(min(len(corpus), NUM_TIMED)))
