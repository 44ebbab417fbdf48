"""Items to embed, and what a retrieval evaluation reads: queries, a corpus and who is relevant to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dualenc.data.columns import Column, ColumnImages, Picked, Texts, labels_of_column
from dualenc.data.identity import digest_of, items_identity
from dualenc.data.metadata import metadata_columns
from dualenc.data.pairs import Items, PairDataset
from dualenc.data.tables import DataTable
from dualenc.errors import DualencError
from dualenc.types import Modality

if TYPE_CHECKING:
    import pyarrow as pa

SNIPPET_LENGTH = 240


class Corpus:
    """N items with ids of their own: documents, queries or images.

    Args:
        ids: (N,) distinct strings.
        items: (N,) raw items: `str`, RGB `PIL.Image`, or `np.ndarray` (D,).
        modality: "text", "image" or "vector".
        labels: (N,) class numbers, where the source has them.
        class_names: name of each class number.
        columns: (N,) rows of what else is known of the items, to filter search results by.

    Attributes:
        skipped: how many bad samples the reader left out.

    Raises:
        DualencError: unequal lengths, a repeated id, or a label without a name.
    """

    skipped: int = 0

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
        self.ids = list(ids)
        self.items = items
        self.modality = modality
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int64)
        self.class_names = None if class_names is None else list(class_names)
        self.columns = columns
        if len(self.ids) != len(self.items):
            raise DualencError(f"ids has {len(self.ids)} rows but there are {len(self.items)} items; give one id each")
        if len(set(self.ids)) != len(self.ids):
            first: dict[str, int] = {}
            again = next(i for i, name in enumerate(self.ids) if first.setdefault(name, i) != i)
            raise DualencError(f"ids: {self.ids[again]!r} stands twice (again at row {again}); ids must differ")
        if columns is not None and len(columns) != len(self.ids):
            raise DualencError(f"columns has {len(columns)} rows for {len(self.ids)} items; give one each")
        if self.labels is not None and len(self.labels) != len(self.ids):
            raise DualencError(f"labels has {len(self.labels)} rows for {len(self.ids)} items; give one each")
        highest = -1 if self.labels is None else self.labels.max(initial=-1)
        if self.class_names is not None and highest >= len(self.class_names):
            raise DualencError(f"labels: class {highest} has no name among {len(self.class_names)} class_names")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]

    def identity(self, *, labels: bool = False) -> str:
        """Checksum of ids and items, in hexadecimal: equal for equal data, whatever files and folders it came from.

        Changed texts and images under the same ids give another one (`dualenc.data.identity.items_identity` says what
        of huge collections is read).

        Args:
            labels: whether class numbers and names count too, for results that depend on them.
        """
        parts = [digest_of(self.ids), items_identity(self.items, self.modality)]
        if labels and self.labels is not None:
            parts += [digest_of(self.labels), digest_of(self.class_names or [])]
        return digest_of(parts)

    def take(self, rows: Sequence[int] | np.ndarray) -> Corpus:
        """The items of some rows, in that order, with what is known of them."""
        rows = np.asarray(rows, dtype=np.int64)
        ids = [self.ids[row] for row in rows.tolist()]
        labels = None if self.labels is None else self.labels[rows]
        columns = None if self.columns is None else self.columns.take(rows)
        how: dict[str, Any] = {"labels": labels, "class_names": self.class_names, "columns": columns}
        return Corpus(ids, Picked(self.items, rows), self.modality, **how)

    def text(self, index: int) -> str:
        """The beginning of a text in one line, to show with a search result; "" for an image or a vector."""
        if self.modality != "text":
            return ""
        line = " ".join(self.items[index][: 2 * SNIPPET_LENGTH].split())
        return line if len(line) <= SNIPPET_LENGTH else line[: SNIPPET_LENGTH - 1].rstrip() + "…"


class RetrievalSet(NamedTuple):
    """A retrieval test collection.

    Attributes:
        queries: the queries to run.
        corpus: the documents to search.
        qrels: judgements, `qrels[query id][document id] = grade`; 0 means judged not relevant.
    """

    queries: Corpus
    corpus: Corpus
    qrels: dict[str, dict[str, int]]

    def among(self, kept: np.ndarray) -> RetrievalSet:
        """The test among some of its documents, as a search with a filter has it.

        Judgements of all others are left out, and with them queries to which no document is relevant any more.

        Args:
            kept: (N,) bool, of the documents.

        Raises:
            DualencError: no document is kept, or none that is relevant to a query.
        """
        corpus = self.corpus.take(np.flatnonzero(kept))
        if not len(corpus):
            raise DualencError(f"none of {len(self.corpus):,} documents is kept; ask for less")
        known = set(corpus.ids)
        qrels = {query: {d: grade for d, grade in own.items() if d in known} for query, own in self.qrels.items()}
        qrels = {query: own for query, own in qrels.items() if any(grade > 0 for grade in own.values())}
        if not qrels:
            count = f"{len(corpus):,} of {len(self.corpus):,} documents"
            raise DualencError(f"{count} are kept, and none is relevant to a query; ask for less")
        rows = [row for row, name in enumerate(self.queries.ids) if name in qrels]
        return RetrievalSet(self.queries.take(rows), corpus, qrels)


def table_corpus(
    table: DataTable,
    main_column: str,
    modality: Modality = "text",
    *,
    title_column: str | None = None,
    label_column: str | None = None,
    id_column: str | None = None,
    columns: Sequence[str] = (),
    what: str = "document",
) -> Corpus:
    """The texts or images of a table, in the order of its rows, without empty ones and without repeated ids.

    Args:
        table: the rows; bad ones are told to its `skips`.
        main_column: images, texts, or lists of texts, whose ids then are `ID#0`, `ID#1`, …
        modality: what it holds.
        title_column: joined in front of a text.
        label_column: classes of images.
        id_column: ids; by default the row's number.
        columns: of the table, to keep for filters.
        what: names a text in errors.
    """
    column = Column(table, main_column, modality, lists=modality == "text")
    rows, there = column.row_of_values(), column.filled()
    titles = None if title_column is None or column.is_list else Column(table, title_column, "text")
    if titles is not None:
        there = there | titles.filled()
    names: list[str | None] = [str(row) for row in range(len(table))]
    if id_column is not None:
        values = Column(table, id_column, "text").values(np.arange(len(table))).tolist()
        names = [None if value is None else str(value) for value in values]
    if column.is_list:
        place = np.arange(len(rows)) - np.searchsorted(rows, rows, side="left")  # 0, 1, 2, … within each row
        names = [f"{names[row]}#{k}" for row, k in zip(rows, place)]
    reason, mend = f"empty {what}", "fill it in or remove it"
    if modality == "image":
        what, reason, mend = "image", f"no image in column {main_column!r}", "fill it in or remove the row"
    empty = rows[~there]
    if len(empty):
        table.skips.bad(reason, table.where(int(empty[0])), mend, len(empty))
    ids: dict[str, int] = {}  # and the position of their values
    for i in np.flatnonzero(there).tolist():
        name = names[i]
        if name is None:
            table.skips.bad(f"{what} without an id", table.where(int(rows[i])), "give it one")
        elif name in ids:
            table.skips.bad(f"{what} with an id used before", table.where(int(rows[i])), f"{name!r} stands twice")
        else:
            ids[name] = i
    table.skips.demand(len(ids), what)
    kept = np.array(list(ids.values()), dtype=np.int64)
    labels, classes = (None, None) if label_column is None else labels_of_column(table, label_column).take(kept)
    items = Texts(column, titles) if modality == "text" else ColumnImages(table, column)
    further = metadata_columns(table, columns, rows[kept]) if columns else None
    return Corpus(list(ids), Picked(items, kept), modality, labels=labels, class_names=classes, columns=further)


def corpora(pairs: PairDataset) -> tuple[Corpus, Corpus]:
    """The left and the right items of pairs, to embed: by their ids in a BEIR folder, else by their numbers."""
    queries, documents = getattr(pairs, "queries", None), getattr(pairs, "corpus", None)
    if isinstance(queries, Corpus) and isinstance(documents, Corpus):
        return queries, documents
    left = Corpus([str(i) for i in range(pairs.num_left)], pairs.left_items, pairs.left_modality)
    return left, Corpus([str(i) for i in range(pairs.num_right)], pairs.right_items, pairs.right_modality)
