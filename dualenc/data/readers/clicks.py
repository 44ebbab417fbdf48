"""Clicks: queries with ids of relevant documents in an index, and splits by document."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from dualenc.data.item_lists import Picked, VectorItems
from dualenc.data.logs.click_log import LogColumns
from dualenc.data.logs.log_table import by_appearance
from dualenc.data.logs.open_log import open_log
from dualenc.data.pairs import PairDataset
from dualenc.data.ragged import Ragged, distinct
from dualenc.data.readers.column_names import NO_COLUMN
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.types import Integers, OnError


class IndexPairs(PairDataset):
    """Queries paired with relevant documents of an existing index.

    The pairs come from click logs, relevance judgements or questions with answers. Left items are
    the distinct queries. Right items are the vectors of all N documents, in index order: each is a
    candidate of the loss. Ids that are not among the documents are left out, counted and reported.

        IndexPairs("clicks.csv", open_documents("index"))

    Args:
        source: table with a query (a text, or a vector) and a document id, or a list of ids, in
            each row; several rows of a query give several positives. Or a BEIR folder:
            queries.jsonl (or vectors) and qrels/SPLIT.tsv.
        documents: N vectors with ids, see `dualenc.search.documents.open_documents`.
        query_column: column of queries, if a table does not use a common name.
        document_column: column of document ids, likewise.
        label_column: column that is 0 in rows without a click; by default a column with a common
            name (clicked, label, score, …) that holds labels. `none` reads no labels.
        split: which split of a BEIR folder, folder of tables, saved data set or hub name.
        on_error: "skip" leaves out, counts and reports bad rows; "raise" stops at the first.
    """

    def __init__(
        self,
        source: str | Path,
        documents: Embeddings,
        *,
        query_column: str | None = None,
        document_column: str | None = None,
        label_column: str | None = None,
        split: str = "train",
        on_error: OnError = "skip",
    ) -> None:
        if not hasattr(documents, "ids"):
            raise DualencError(
                f"documents is {type(documents).__name__}",
                fix="give open_documents(INDEX)",
                where="IndexPairs",
            )
        columns = LogColumns(
            query=query_column,
            document=document_column,
            clicked=label_column,
            position=NO_COLUMN,
            time=NO_COLUMN,
        )
        log = open_log(source, documents, columns=columns, split=split, on_error=on_error)
        clicks = np.flatnonzero(log.reward > 0)
        first, left_id = by_appearance(log.query[clicks])
        # Several clicks on one document are one pair, in the place of the first.
        pairs, _ = by_appearance(left_id * len(documents) + log.document[clicks])
        super().__init__(
            Picked(log.queries.items, log.query[clicks[first]]),
            VectorItems(documents.vectors),
            left_id[pairs],
            log.document[clicks[pairs]],
            left_modality=log.queries.modality,
            right_modality="vector",
        )
        self.documents = documents
        self.skipped = log.skipped


class DocumentSplit(NamedTuple):
    """Training pairs, and held-out queries divided by whether their documents are in training.

    A part without pairs is None.

        split_by_documents(pairs, share=0.1, most=1000).train

    Attributes:
        train: pairs to train on.
        new: queries whose documents are in no training pair.
        known: queries whose documents are all in training pairs.
        held_out: the queries of both parts.
    """

    train: PairDataset
    new: PairDataset | None
    known: PairDataset | None
    held_out: PairDataset | None


def split_by_documents(pairs: PairDataset, share: float, most: int, seed: int = 0) -> DocumentSplit:
    """Hold out queries by document, so that `new` measures documents that training never sees.

    For `new`, queries are drawn until their documents have about a `share` of the pairs. All pairs
    of these documents leave training; a query that would exceed the share is skipped. For `known`,
    the same number of queries is drawn, each of whose documents keeps a pair of another query.

    Args:
        pairs: pairs to split.
        share: share of the pairs to hold out for `new`, in [0, 1).
        most: maximum number of queries in each part.
        seed: random seed.

    Raises:
        DualencError: the share is outside [0, 1), or `most` is negative.
    """
    if not 0 <= share < 1:
        raise DualencError(
            f"share must be in [0, 1), got {share}",
            fix="give the share of the pairs to hold out",
        )
    if most < 0:
        raise DualencError(
            f"most must be 0 or more, got {most}",
            fix="give the maximum number of queries",
        )
    generator = np.random.default_rng(seed)
    order = generator.permutation(distinct(pairs.left_id)).tolist()
    documents = Ragged.from_pairs(pairs.left_id, pairs.right_id, pairs.num_left)
    # Holding out a document costs all its pairs, also those of queries that stay in training.
    num_pairs = np.bincount(pairs.right_id, minlength=pairs.num_right)
    budget = share * len(pairs)
    is_held_out = np.zeros(pairs.num_right, dtype=bool)
    is_held_out[_draw_documents(order, documents, num_pairs, budget, most)] = True
    rest = ~is_held_out[pairs.right_id]
    num_trained = np.bincount(pairs.left_id, rest, pairs.num_left)
    # Number of each query's pairs whose documents stay in training. A query with documents on both
    # sides of the split keeps only these pairs and is not used for evaluation.
    new = [query for query in order if num_trained[query] == 0][:most]
    whole = [query for query in order if num_trained[query] == documents.lengths[query]]
    num_remaining = np.bincount(pairs.right_id[rest], minlength=pairs.num_right)
    known = _draw_known(whole, documents, num_remaining, len(new))
    is_trained = rest & ~np.isin(pairs.left_id, known)
    parts: list[PairDataset | None] = []
    for queries in (new, known, new + known):
        rows = np.flatnonzero(np.isin(pairs.left_id, queries))
        parts.append(pairs.take(rows) if len(rows) else None)
    trained = pairs.take(np.flatnonzero(is_trained), positives_of=pairs)
    return DocumentSplit(trained, *parts)


def _draw_documents(
    order: list[int], documents: Ragged, num_pairs: Integers, budget: float, most: int
) -> list[int]:
    """Return documents of queries drawn until these documents have about `budget` pairs."""
    drawn: set[int] = set()
    num_queries = 0
    for query in order:
        if num_queries == most or budget < 1:
            break
        added = set(documents.row(query).tolist()) - drawn
        cost = num_pairs[list(added)].sum()
        # A query with a popular document may exceed the budget; a later one may still fit.
        if cost <= budget:
            budget -= cost
            drawn |= added
            num_queries += 1
    return sorted(drawn)


def _draw_known(order: list[int], documents: Ragged, num_pairs: Integers, most: int) -> list[int]:
    """Return up to `most` queries each of whose documents keeps a pair of another query.

    `num_pairs` (N,) is the number of pairs of each document.
    """
    remaining = num_pairs.copy()
    drawn: list[int] = []
    for query in order:
        own = documents.row(query)
        if len(drawn) == most:
            break
        # Each of its documents must keep a pair of a query that stays in training.
        if (remaining[own] > 1).all():
            remaining[own] -= 1
            drawn.append(query)
    return drawn
