"""Clicks: queries with ids of relevant documents in an index, and splits by document."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from dualenc.data.bad_rows import BadRows
from dualenc.data.columns import (
    Column,
    ItemColumn,
    matrix_faults,
    positions_of,
    read_column,
    read_ids,
    usable,
)
from dualenc.data.item_lists import Picked, VectorItems, distinct_items
from dualenc.data.pairs import PairDataset
from dualenc.data.ragged import Ragged, distinct
from dualenc.data.readers.beir import read_judged_queries, relevant_pairs
from dualenc.data.readers.column_kinds import ColumnKind
from dualenc.data.readers.column_names import (
    CLICKED,
    DOCUMENT_IDS,
    QUERIES,
    VECTORS,
    columns_named,
    is_none,
    normalized,
)
from dualenc.data.readers.column_pairs import paired_positions
from dualenc.data.readers.detect import RETRIEVAL_KINDS, detect
from dualenc.data.readers.id_columns import are_row_numbers
from dualenc.data.readers.read_options import ReadOptions
from dualenc.data.readers.relevance import (
    label_columns,
    looks_like_labels,
    named_labels,
    read_labels,
)
from dualenc.data.readers.tables import TableSource, check_columns
from dualenc.data.readers.written_lists import parse_list
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.types import Integers, Modality, OnError

logger = logging.getLogger("dualenc.data")

_QUERIES = (*QUERIES, "text", *VECTORS)
_DOCUMENTS = (*DOCUMENT_IDS, *CLICKED, "id", "_id")
_NO_CLICKS = "are not clicks"
_FITS = 0.5  # share of a column's values that must be ids of documents


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
        bad_rows = BadRows(source, on_error)
        kind = detect(source)
        if kind in RETRIEVAL_KINDS:
            queries, qrels = read_judged_queries(Path(source), split, documents.ids, bad_rows)
            queries, rows, right_id, _ = relevant_pairs(queries, qrels, documents.ids)
            items = queries.items
            modality = queries.modality
        else:
            options = ReadOptions(split=split)
            table = TableSource(source, bad_rows, kind=kind, options=options)
            left, rows, right_id = _read_clicks(
                table, query_column, document_column, label_column, documents
            )
            items = left.items
            modality = left.modality
        # Equal queries, for example of several sessions, are one item.
        used, row_number = np.unique(rows, return_inverse=True)
        items, number = distinct_items(items, used)
        pairs = _distinct_pairs(number[row_number], right_id, documents, bad_rows)
        super().__init__(
            items,
            VectorItems(documents.vectors),
            pairs[:, 0],
            pairs[:, 1],
            left_modality=modality,
            right_modality="vector",
        )
        self.documents = documents
        self.skipped = bad_rows.report()


def _distinct_pairs(
    left_id: Integers, right_id: Integers, documents: Embeddings, bad_rows: BadRows
) -> Integers:
    """Return the distinct pairs (M, 2) of clicks (n,); count clicks on unusable documents."""
    # Other documents may have faults, too: they stay, since row numbers are ids of the index.
    faults = matrix_faults(documents.vectors)
    for reason, (is_bad, fix) in faults.items():
        clicked = right_id[is_bad[right_id]]
        if len(clicked):
            bad_rows.add(f"click on a {reason}", documents.ids[int(clicked[0])], fix, len(clicked))
    clicks = np.stack([left_id, right_id], axis=1)
    pairs = clicks[usable(faults)[right_id]]
    bad_rows.require(len(pairs), "pair")
    # Several clicks on one document are one pair, in the place of the first.
    _, first = np.unique(pairs, axis=0, return_index=True)
    return pairs[np.sort(first)]


def _read_clicks(
    source: TableSource,
    query_column: str | None,
    document_column: str | None,
    label_column: str | None,
    documents: Embeddings,
) -> tuple[ItemColumn, Integers, Integers]:
    """Return the queries of a table, and the query and the document of each click (M,)."""
    if query_column is None:
        query_column = source.default_column(_QUERIES, "query_column", but=document_column)
    if document_column is None:
        document_column = _document_column(source, (query_column, label_column), documents.ids)
    columns: dict[str, ColumnKind] = {
        query_column: source.item_kind(query_column),
        document_column: "list",
    }
    likely: list[str] = []
    named: list[str] = []
    if label_column is None:
        likely = label_columns(source.kinds, columns)
    elif not is_none(label_column):
        named = [label_column]
        check_columns(source.path, source.kinds, named)
    columns |= {name: source.label_kind(name) for name in (*likely, *named)}
    table = source.open(columns)
    right = read_ids(table, document_column, documents.ids, VectorItems(documents.vectors))
    if len(right.rows) and not right.usable().any():
        first = str(Column(table, document_column, "text", lists=True)[0])
        raise DualencError(
            f"column {document_column!r} does not hold ids of documents (its first value is "
            f"{first[:60]!r}, and an id of the index is {documents.ids[0][:60]!r})",
            fix="name the column of ids",
            where=source.path,
        )
    labels = read_labels(table, likely, right, "label_column", effect=_NO_CLICKS)
    for name in named:
        labels = named_labels(table, name, right, "label_column", _NO_CLICKS)
    modality: Modality = "vector" if columns[query_column] == "vector" else "text"
    left = read_column(table, query_column, modality)
    paired = paired_positions(left, right, labels)
    if labels is not None:
        paired = paired[labels.of_pairs(right, paired) > 0]
    return left, right.rows[paired], cast(Picked, right.items).positions[paired]


def _document_column(source: TableSource, but: tuple[str, str | None], ids: Sequence[str]) -> str:
    """Return the column of document ids: one with a common name whose values are such ids.

    Labels are excluded, and so are row numbers if the values of another column are ids.
    """
    values = {
        name: _examined(source, name)
        for name, kind in source.kinds.items()
        if name not in but
        and kind != "vector"
        and not looks_like_labels(_examined(source, name), name)
    }
    usual = columns_named(values, _DOCUMENTS)
    fitting = [name for name in values if _are_ids(values[name], ids)]
    own = [name for name in usual if name in fitting]
    # A column `id` may hold ids of the rows, so it only counts if no other column fits.
    own = [name for name in own if normalized(name) not in ("id", "_id")] or own[:1]
    others = [name for name in fitting if name not in usual and not are_row_numbers(values[name])]
    fix = "name one as document_column (--document-column)"
    if len(own) > 1:
        raise DualencError(
            f"columns {own[0]!r} and {own[1]!r} both hold document ids",
            fix=fix,
            where=source.path,
        )
    if own and others and are_row_numbers(values[own[0]]):
        raise DualencError(
            f"column {own[0]!r} numbers the rows, and the values of {others[0]!r} are document "
            "ids, too",
            fix=fix,
            where=source.path,
        )
    if not own and (others or not usual):
        hint = f": the values of {others[0]!r} are ids of documents" if others else ""
        raise DualencError(
            "it is unclear which column is document_column",
            fix=f"name it (columns: {', '.join(source.kinds)}){hint}",
            where=source.path,
        )
    return own[0] if own else usual[0]


def _examined(source: TableSource, name: str) -> list[str]:
    """Return the examined values of a column, with lists flattened."""
    values: list[str] = []
    for value in source.examined(name):
        if name in source.written_lists:
            value = parse_list(value)
        for entry in value if isinstance(value, list) else [value]:
            if entry is not None and str(entry).strip():
                values.append(str(entry))
    return values


def _are_ids(values: Sequence[str], ids: Sequence[str]) -> bool:
    """Return True if most values are among ids."""
    return bool(values and np.mean(positions_of(ids, values) >= 0) >= _FITS)


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
