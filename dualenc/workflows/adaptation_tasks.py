"""Split the clicks of an adaptation, and choose the queries that measure it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dualenc.data.bad_rows import BadRows
from dualenc.data.document_splits import DocumentSplit, split_by_documents
from dualenc.data.pairs import PairDataset
from dualenc.data.readers.beir import check_judged, read_corpus, read_judged_queries
from dualenc.data.store.vector_shards import Embeddings
from dualenc.evaluation.retrieval import divide_by_training
from dualenc.search.documents import open_documents
from dualenc.search.embed.encode import embed
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.workflows.adaptation_report import SECOND
from dualenc.workflows.adapting import QuerySide

MAX_HELD_OUT = 1000
"""Maximum number of held-out queries of either kind."""
NEW = "new documents"
KNOWN = "documents in training"
MIN_DOCUMENTS = 30
"""Fewer documents of held-out queries cannot show whether adapting harms unclicked documents."""


@dataclass(frozen=True)
class ClickSplit:
    """Pairs to train on, and held-out queries.

        split = split_clicks(side.pairs(clicks), side.documents, share=0.1, seed=0)
        print(len(split.parts.train), split.unmeasured)

    Attributes:
        parts: the pairs by part.
        trained_ids: ids of the documents in training pairs.
        unmeasured: why held-out queries cannot show the effect on new documents; None if they can.
    """

    parts: DocumentSplit
    trained_ids: list[str]
    unmeasured: str | None


def split_clicks(pairs: PairDataset, documents: Embeddings, share: float, seed: int) -> ClickSplit:
    """Hold out queries by their documents.

    Args:
        pairs: queries with rows of relevant documents.
        documents: N documents of the index.
        share: share of the pairs to hold out.
        seed: random seed of the split.
    """
    parts = split_by_documents(pairs, share, MAX_HELD_OUT, seed)
    rows = sorted(set(parts.train.right_id.tolist()))
    trained_ids = [documents.ids[row] for row in rows]
    return ClickSplit(parts, trained_ids, _why_unmeasured(parts, share))


def _why_unmeasured(parts: DocumentSplit, share: float) -> str | None:
    """Return why held-out queries cannot show the effect on new documents; None if they can."""
    if share == 0:
        return "no query was held out"
    if parts.new is None:
        documents = f"the documents of each are in over {share:.0%} of the pairs"
        return f"no query could be held out: {documents}"
    count = len(np.unique(parts.new.right_id))
    if count < MIN_DOCUMENTS:
        few = f"fewer than {MIN_DOCUMENTS} cannot tell"
        return f"held-out queries name {count} documents, and {few}"
    return None


def measured_tasks(
    split: ClickSplit, side: QuerySide, test: str | None, second: str | None
) -> dict[str, IndexEvaluator]:
    """Return evaluators of the held-out queries, and of the test queries of two BEIR folders.

    Held-out queries and those of `test` are divided by whether their documents are in training.

    Args:
        split: the clicks.
        side: the query side of the index.
        test: BEIR folder with other queries of the index.
        second: BEIR folder of another task.
    """
    tasks = {}
    for part, pairs in ((NEW, split.parts.new), (KNOWN, split.parts.known)):
        if pairs is not None:
            tasks[part] = IndexEvaluator.of_pairs(pairs, side.documents)
    if test is not None:
        evaluator = _test_queries(test, "test", side, side.documents)
        known, new = divide_by_training(evaluator.qrels, split.trained_ids)
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
