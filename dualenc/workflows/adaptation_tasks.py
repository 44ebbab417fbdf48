"""Split the clicks of an adaptation, and choose the queries that measure it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dualenc.data.bad_rows import BadRows
from dualenc.data.columns import positions_of
from dualenc.data.document_splits import DocumentSplit, fold_by_documents
from dualenc.data.pairs import PairDataset
from dualenc.data.readers.beir import check_judged, read_corpus, read_judged_queries
from dualenc.data.store.vector_shards import Embeddings
from dualenc.evaluation.retrieval import divide_by_training
from dualenc.search.documents import open_documents
from dualenc.search.embed.encode import embed
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.types import Integers
from dualenc.workflows.adaptation_choice import KNOWN, NEW
from dualenc.workflows.adaptation_report import SECOND
from dualenc.workflows.adapting import QuerySide
from dualenc.workflows.trained_pairs import Seen

FOLDS = 5
MANY_PAIRS = 5000
"""With more pairs, two folds hold enough queries out to choose, and to stop a training early."""
MAX_HELD_OUT = 1000
"""Maximum number of held-out queries of either kind, over all folds."""


@dataclass(frozen=True)
class ClickFolds:
    """Pairs to train on, and their splits into training pairs and held-out queries.

        clicks = fold_clicks(learned.pairs, share=0.2, seed=0)
        for fold in clicks.folds:
            print(len(fold.train))

    Attributes:
        pairs: all pairs.
        folds: splits by document that hold out any query.
        unmeasured: why no query was held out; None if there are some.
        has_many: True if more pairs may be held out than `MANY_PAIRS`.
    """

    pairs: PairDataset
    folds: list[DocumentSplit]
    unmeasured: str | None
    has_many: bool


def fold_clicks(
    pairs: PairDataset,
    share: float,
    seed: int,
    *,
    most_folds: int = FOLDS,
    seen: Seen | None = None,
) -> ClickFolds:
    """Hold out queries by their documents, in several folds: fewer where each holds many out.

    Args:
        pairs: queries with rows of relevant documents.
        share: share of the pairs that each fold holds out.
        seed: random seed of the splits.
        most_folds: maximum number of splits.
        seen: what the model that training begins at was trained on: such pairs are not held out.
    """
    may_be_new, may_be_known, usable = None, None, len(pairs)
    if seen is not None:
        may_be_new, may_be_known = seen.may_be_new(pairs), seen.may_be_known(pairs)
        usable = int(may_be_known[pairs.left_id].sum())
    has_many = usable > MANY_PAIRS
    folds = min(most_folds, 2) if has_many else most_folds
    masks = {"may_be_new": may_be_new, "may_be_known": may_be_known}
    splits = []
    if share:
        splits = fold_by_documents(pairs, folds, share, MAX_HELD_OUT // folds, seed, **masks)
    used = [split for split in splits if split.held_out is not None and len(split.train)]
    unmeasured = None if used else _why_unmeasured(pairs, share, seen)
    return ClickFolds(pairs, used, unmeasured, has_many)


def _why_unmeasured(pairs: PairDataset, share: float, seen: Seen | None) -> str:
    """Return why no query was held out."""
    if share == 0:
        return "no query was held out"
    if seen is None:
        documents = f"the documents of each are in over {share:.0%} of the pairs"
        return f"no query could be held out: {documents}"
    count = int(seen.may_be_known(pairs).sum())
    if count == 0:
        return "nothing is held out: the run of --from was trained on all queries of the log"
    return f"nothing is held out: the run of --from was trained on all but {count:,} queries"


def held_out_tasks(fold: DocumentSplit, documents: Embeddings) -> dict[str, IndexEvaluator]:
    """Return evaluators of the held-out queries of a fold.

    Args:
        fold: the split.
        documents: N documents of the index.
    """
    return {
        part: IndexEvaluator.of_pairs(pairs, documents)
        for part, pairs in ((NEW, fold.new), (KNOWN, fold.known))
        if pairs is not None
    }


def first_documents(evaluator: IndexEvaluator, documents: Embeddings) -> Integers:
    """Return (Q,) the row of each query's first relevant document, by which queries are grouped.

    Args:
        evaluator: evaluator over the documents, or over others, whose ids are numbered instead.
        documents: N documents of the index.
    """
    first = [
        next(name for name, grade in grades.items() if grade > 0)
        for grades in evaluator.qrels.values()
    ]
    rows = positions_of(documents.ids, first)
    if (rows < 0).any():
        rows = np.unique(first, return_inverse=True)[1]
    return rows


def measured_tasks(
    trained_ids: Sequence[str], side: QuerySide, test: str | None, second: str | None
) -> dict[str, IndexEvaluator]:
    """Return evaluators of the test queries of two BEIR folders.

    Those of `test` are divided by whether their documents are in training.

    Args:
        trained_ids: ids of the documents in pairs.
        side: the query side of the index.
        test: BEIR folder with other queries of the index.
        second: BEIR folder of another task.
    """
    tasks = {}
    if test is not None:
        evaluator = _test_queries(test, "test", side, side.documents)
        known, new = divide_by_training(evaluator.qrels, trained_ids)
        for part, qrels in ((NEW, new), (KNOWN, known)):
            # The mean over an empty part is undefined.
            if qrels:
                tasks[f"{Path(test).name}: {part}"] = evaluator.among(list(qrels))
    if second is not None:
        documents = _second_documents(second, side)
        name = f"{SECOND}: {Path(second).name}"
        tasks[name] = _test_queries(second, "second", side, documents)
    return tasks


def _test_queries(folder: str, name: str, side: QuerySide, documents: Embeddings) -> IndexEvaluator:
    """Return an evaluator of the test queries of a BEIR folder over documents."""
    bad_rows = BadRows(folder)
    queries, qrels = read_judged_queries(Path(folder), "test", documents.ids, bad_rows)
    bad_rows.report()
    check_judged(folder, qrels, documents.ids, side.source)
    return IndexEvaluator(side.inputs(queries, f"{name}-queries"), qrels, documents)


def _second_documents(folder: str, side: QuerySide) -> Embeddings:
    """Return the documents of a second task, as vectors.

    A folder without documents, or with those of the index, is measured over the index.
    """
    bad_rows = BadRows(folder)
    corpus = read_corpus(folder, bad_rows=bad_rows) if any(Path(folder).glob("corpus*")) else None
    bad_rows.report()
    # Compare all ids: some in common prove nothing, since row numbers are ids too.
    if corpus is None or set(corpus.ids) == set(side.documents.ids):
        return side.documents
    if corpus.modality != "text" or side.text is None:
        return open_documents(folder, side.work / "second")
    out = side.work / "second-documents"
    # Half precision, as `open_documents` stores vectors.
    return embed(side.text.right, corpus, out, dtype="float16", progress=side.progress)
