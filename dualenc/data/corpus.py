"""Corpora of items to embed, and retrieval test collections of queries, corpus and judgements."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dualenc.data.bad_rows import BadRows
from dualenc.data.columns import Column, TextColumn, read_column
from dualenc.data.item_lists import Picked
from dualenc.data.labels import labels_of_column, labels_of_folders
from dualenc.data.pairs import PairDataset, by_position
from dualenc.data.ragged import distinct
from dualenc.data.readers.column_names import is_none
from dualenc.data.readers.images import ImageFiles, find_images, printable_names
from dualenc.data.readers.tables import DataTable, TableSource
from dualenc.data.store.identity import digest_of, items_identity
from dualenc.data.store.metadata import metadata_columns
from dualenc.errors import DualencError
from dualenc.io.decoding import rgb_item
from dualenc.types import Integers, Items, Modality, Side, check_several

SNIPPET_LENGTH = 240
MAX_DOCUMENTS = 100_000
"""Default maximum of right items among which held-out pairs are searched."""
_WHOLE_ID = re.compile(r"-?[0-9]+(\.0)?|nan")


class Corpus:
    """N items with ids: documents, queries or images.

    Items are read on access; a corpus over files holds only their positions.

        Corpus(["a", "b"], ["first text", "second text"]).text(0)

    Args:
        ids: (N,) distinct strings.
        items: (N,) raw items: `str`, `PIL.Image`, or `np.ndarray` (D,).
        modality: "text", "image" or "vector".
        labels: (N,) class numbers, if the source has them.
        class_names: name of each class number.
        columns: (N,) rows of further columns, to filter search results.

    Attributes:
        skipped: number of bad samples that the reader left out.
        titles: (N,) titles that the reader prepended to the texts, "" where there is none; None if
            it prepended none.

    Raises:
        DualencError: duplicate ids, or arguments of different lengths.
    """

    skipped = 0
    titles: Items | None = None

    def __init__(
        self,
        ids: Sequence[str],
        items: Items,
        modality: Modality = "text",
        *,
        labels: Sequence[int] | np.ndarray | None = None,
        class_names: Sequence[str] | None = None,
        columns: pa.Table | None = None,
    ) -> None:
        check_several("ids", ids)
        check_several("items", items)
        self.ids = list(ids)
        self.items = by_position(items)
        self.modality = modality
        numbers = None if labels is None else np.asarray(labels, dtype=np.int64)
        self.labels: Integers | None = numbers
        self.class_names = None if class_names is None else list(class_names)
        self.columns = columns
        if len(self.ids) != len(self.items):
            raise DualencError(
                f"ids has {len(self.ids)} rows but there are {len(self.items)} items",
                fix="give one id per item",
            )
        if len(set(self.ids)) != len(self.ids):
            name, count = Counter(self.ids).most_common(1)[0]
            raise DualencError(
                f"{name!r} is a duplicate ({count} times)",
                fix="give each item a unique id",
                where="ids",
            )
        for name, rows in (("columns", self.columns), ("labels", self.labels)):
            if rows is not None and len(rows) != len(self.ids):
                raise DualencError(
                    f"{name} has {len(rows)} rows for {len(self.ids)} items",
                    fix="give one per item",
                )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return rgb_item(self.items[index], f"item {index}")

    def identity(self, *, labels: bool = False) -> str:
        """Return a checksum of ids and items, independent of the files they came from.

        Args:
            labels: whether to include class numbers and names.
        """
        parts = [digest_of(self.ids), items_identity(self.items, self.modality)]
        if labels and self.labels is not None:
            parts += [digest_of(self.labels), digest_of(self.class_names or [])]
        return digest_of(parts)

    def take(self, rows: Sequence[int] | Integers) -> Corpus:
        """Return the items of some rows, in that order, with their labels, columns and titles."""
        rows = np.asarray(rows, dtype=np.int64)
        part = Corpus(
            [self.ids[row] for row in rows.tolist()],
            Picked(self.items, rows),
            self.modality,
            labels=None if self.labels is None else self.labels[rows],
            class_names=self.class_names,
            columns=None if self.columns is None else self.columns.take(rows),
        )
        part.titles = None if self.titles is None else Picked(self.titles, rows)
        return part

    def text(self, index: int) -> str:
        """Return the beginning of a text in one line, for display; "" for images and vectors."""
        if self.modality != "text":
            return ""
        return beginning(self.items[index])


def beginning(text: str) -> str:
    """Return the beginning of a text in one line, for display."""
    line = " ".join(text[: 2 * SNIPPET_LENGTH].split())
    return line if len(line) <= SNIPPET_LENGTH else line[: SNIPPET_LENGTH - 1].rstrip() + "…"


class RetrievalSet(NamedTuple):
    """A retrieval test collection.

    It is what evaluation runs on: `read_beir` returns one, and `held_out` makes one of pairs.

        read_beir("scifact").qrels

    Attributes:
        queries: the queries to run.
        corpus: the documents to search.
        qrels: judgements, `qrels[query id][document id] = grade`; 0 means judged not relevant.
    """

    queries: Corpus
    corpus: Corpus
    qrels: dict[str, dict[str, int]]


def held_out(pairs: PairDataset, most: int = MAX_DOCUMENTS) -> RetrievalSet:
    """Convert pairs to a retrieval test: left items are queries, all right items are the corpus.

    Every right item that is a positive of a query is relevant unless its weight is 0, including by
    pairs that are not in this part. A right text that copies a query gets the query's id, so that
    it is not a result of that query unless it is relevant. Equal items are merged, except in a BEIR
    folder, whose ids distinguish them.

    Args:
        pairs: the pairs to test on.
        most: maximum size of the corpus; beyond it, right items of the pairs stay and the others
            are sampled with a fixed seed.
    """
    pairs = pairs.relevant()
    # A BEIR folder has ids of its documents: equal texts with two ids are judged separately there.
    items: Integers = np.arange(pairs.num_right)
    if not hasattr(pairs, "queries"):
        items = distinct(pairs.first_equal("right"))
        pairs = pairs.merged()
    queries, _ = used_items(pairs, "left")
    left_ids = np.unique(pairs.left_id)
    positives = pairs.positives("left", left_ids)  # (Q, K), padded with -1
    is_item = positives >= 0
    relevant = np.unique(positives[is_item])
    others = np.setdiff1d(items, relevant)
    # All relevant documents stay: without them no search could reach a recall of 1.
    if len(others) > most - len(relevant):
        generator = np.random.default_rng(0)
        num_others = max(0, most - len(relevant))
        others = generator.choice(others, num_others, replace=False)
    documents = np.union1d(relevant, others)
    names = dict(zip(documents.tolist(), _side_ids("right", documents), strict=True))
    copies = pairs.copies("left")
    if copies is not None:
        # As in BEIR, evaluation drops results with the id of the query.
        of_queries = zip(copies[left_ids].tolist(), queries.ids, strict=True)
        names |= {item: query for item, query in of_queries if item in names}
    corpus = Corpus(
        list(names.values()), Picked(pairs.right_items, documents), pairs.right_modality
    )
    qrels: dict[str, dict[str, int]] = {}
    for query, own in zip(queries.ids, positives, strict=True):
        qrels[query] = {names[item]: 1 for item in own[own >= 0].tolist()}
    return RetrievalSet(queries, corpus, qrels)


def used_items(pairs: PairDataset, side: Side) -> tuple[Corpus, Integers]:
    """Return the items of a side that belong to a pair, and each pair's row among them."""
    used, rows = np.unique(pairs.item_ids(side), return_inverse=True)
    items = Picked(pairs.items(side), used)
    return Corpus(_side_ids(side, used), items, pairs.modality(side)), rows


def _side_ids(side: Side, items: Integers) -> list[str]:
    """Return prefixed names of a side's items, so that removing self-matches drops no documents."""
    return [f"{side}-{item}" for item in items]


def table_corpus(
    source: TableSource,
    main_column: str,
    modality: Modality = "text",
    *,
    optional: Collection[str] = (),
    title_column: str | None = None,
    label_column: str | None = None,
    id_column: str | None = None,
    columns: Sequence[str] = (),
) -> Corpus:
    """Return the usable items of a table's column; items of lists get the ids `ID#0`, `ID#1`, …

    Args:
        source: the table.
        main_column: column of the items.
        modality: "text", "image" or "vector".
        optional: columns that the table may lack.
        title_column: column of titles to prepend to texts.
        label_column: column of image classes.
        id_column: column of ids; None or "none" for row numbers.
        columns: further columns to keep for filters.
    """
    if is_none(id_column):
        id_column = None
    kind = "vector" if modality == "vector" else source.kinds.get(main_column, "value")
    # A column may have two roles, such as text and filter; the main column keeps its kind.
    others = [
        name for name in (title_column, label_column, id_column, *columns) if name is not None
    ]
    table = source.open({**dict.fromkeys(others, "value"), main_column: kind}, optional=optional)
    values = read_column(
        table, main_column, modality, title_column if table.has(title_column) else None
    )
    values.skip()
    names = row_ids(table, id_column)
    if values.is_list:
        # Number the entries 0, 1, 2, … within each row. Rows ascend, so the first position of a row
        # is where searchsorted finds it.
        entry = np.arange(len(values.rows)) - np.searchsorted(values.rows, values.rows, side="left")
        numbered = zip([names[row] for row in values.rows], entry)
        names = [f"{name}#{number}" if name else None for name, number in numbered]

    def position_of(item: int) -> str:
        return table.position(int(values.rows[item]))

    ids, positions = distinct_ids(
        names, np.flatnonzero(values.usable()), table.bad_rows, position_of, modality
    )
    rows = values.rows[positions]
    corpus = Corpus(ids, Picked(values.items, positions), modality)
    if isinstance(values.items, TextColumn) and values.items.titles is not None:
        corpus.titles = Picked(TextColumn(values.items.titles), positions)
    if label_column is not None and table.has(label_column):
        numbers, corpus.class_names = labels_of_column(table, label_column) or (None, None)
        corpus.labels = None if numbers is None else numbers[rows]
    if columns:
        corpus.columns = metadata_columns(table, columns, rows)
    return corpus


def image_corpus(folder: Path) -> Corpus:
    """Return the images of a folder by name, with the first subfolder, if any, as class."""
    names = find_images(folder)
    ids = printable_names(folder, names)
    numbers, class_names = labels_of_folders(ids) or (None, None)
    return Corpus(ids, ImageFiles(folder, names), "image", labels=numbers, class_names=class_names)


def row_ids(table: DataTable, id_column: str | None) -> list[str | None]:
    """Return the id of each row in a column, None if missing; row numbers without a column."""
    if id_column is None:
        return [str(row) for row in range(len(table))]
    values = Column(table, id_column, "text").values()
    texts = ["" if value is None else str(value) for value in values]
    names = [text if text.strip() else None for text in texts]
    # Only if all ids are integers: among texts, "nan" and "7.0" are ids like any other.
    if all(name is None or _WHOLE_ID.fullmatch(name) for name in names):
        names = [None if name == "nan" else name for name in names]
        # pandas writes id 7 as 7.0 beside missing ids, perhaps in one of several files only.
        # If every id ends in .0 and none is missing, pandas did not add it.
        are_fractions = all(name and name.endswith(".0") for name in names)
        if None in names or not are_fractions:
            names = [name and name.removesuffix(".0") for name in names]
    return names


def distinct_ids(
    names: Sequence[str | None],
    rows: Integers,
    bad_rows: BadRows,
    position_of: Callable[[int], str],
    what: str,
) -> tuple[list[str], Integers]:
    """Return the ids (n,) of some rows, and their rows (n,), without missing and repeated ids.

    Args:
        names: (N,) id of each row.
        rows: rows to use.
        bad_rows: counts missing and repeated ids.
        position_of: returns the position of a row for error messages.
        what: name of an item in error messages.
    """
    row_of: dict[str, int] = {}
    for row in rows.tolist():
        name = names[row]
        if name is None:
            bad_rows.add(f"{what} without an id", position_of(row), "give it one")
        elif row_of.setdefault(name, row) != row:
            bad_rows.add(
                f"{what} with an id used before", position_of(row), f"{name!r} is a duplicate"
            )
    bad_rows.require(len(row_of), what)
    return list(row_of), np.array(list(row_of.values()), dtype=np.int64)


def corpora(pairs: PairDataset) -> tuple[Corpus, Corpus]:
    """Return the left and right items of pairs as corpora to embed.

    Ids are those of a BEIR folder, otherwise item numbers.
    """
    queries = getattr(pairs, "queries", None)
    documents = getattr(pairs, "corpus", None)
    if isinstance(queries, Corpus) and isinstance(documents, Corpus):
        return queries, documents
    left_ids = [str(number) for number in range(pairs.num_left)]
    right_ids = [str(number) for number in range(pairs.num_right)]
    return (
        Corpus(left_ids, pairs.left_items, pairs.left_modality),
        Corpus(right_ids, pairs.right_items, pairs.right_modality),
    )
