"""Items to embed, and what a retrieval evaluation reads: queries, a corpus and who is relevant to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dualenc.data.columns import Column, ColumnImages, Picked, Texts, labels_of_column
from dualenc.data.identity import digest_of, items_identity
from dualenc.data.pairs import Items
from dualenc.data.tables import DataTable
from dualenc.errors import DualencError
from dualenc.types import Modality

SNIPPET_LENGTH = 240


class Corpus:
    """N items with ids of their own: documents, queries or images.

    Args:
        ids: (N,) distinct strings.
        items: (N,) raw items, `str` or RGB `PIL.Image`.
        modality: "text" or "image".
        labels: (N,) class numbers, where the source has them.
        class_names: name of each class number.

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
    ) -> None:
        self.ids = list(ids)
        self.items = items
        self.modality = modality
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int64)
        self.class_names = None if class_names is None else list(class_names)
        if len(self.ids) != len(self.items):
            raise DualencError(f"ids has {len(self.ids)} rows but there are {len(self.items)} items; give one id each")
        if len(set(self.ids)) != len(self.ids):
            first: dict[str, int] = {}
            again = next(i for i, name in enumerate(self.ids) if first.setdefault(name, i) != i)
            raise DualencError(f"ids: {self.ids[again]!r} stands twice (again at row {again}); ids must differ")
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

        Changed texts and images under the same ids give another one. Ids count in full; of more than 2,097,152 texts
        or 65,536 images only a sample is read (`dualenc.data.identity.items_identity` says what counts of the others).

        Args:
            labels: whether class numbers and names count too, for results that depend on them.
        """
        parts = [digest_of(self.ids), items_identity(self.items, self.modality)]
        if labels and self.labels is not None:
            parts += [digest_of(self.labels), digest_of(self.class_names or [])]
        return digest_of(parts)

    def text(self, index: int) -> str:
        """The beginning of a text in one line, to show beside a search result; "" for an image."""
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


def text_corpus(
    table: DataTable,
    text_column: str,
    title_column: str | None = None,
    id_column: str | None = None,
    what: str = "document",
) -> Corpus:
    """The texts of a table, in the order of its rows, without empty ones and without repeated ids.

    Args:
        table: the rows; bad ones are told to its `skips`.
        text_column: texts, or lists of texts, whose ids then are `ID#0`, `ID#1`, …
        title_column: joined in front of the text.
        id_column: ids; by default the row's number.
        what: names an item in errors.
    """
    column = Column(table, text_column, "text", lists=True)
    titles = None if title_column is None or column.is_list else Column(table, title_column, "text")
    there = column.filled() if titles is None else column.filled() | titles.filled()
    rows = column.row_of_values()
    names = _ids(table, id_column)
    if column.is_list:
        place = np.arange(len(rows)) - np.searchsorted(rows, rows, side="left")  # 0, 1, 2, … within each row
        names = [f"{names[row]}#{k}" for row, k in zip(rows, place)]
    kept = _usable(table, names, rows, there, what, f"empty {what}", "fill it in or remove it")
    return Corpus([names[i] for i in kept], Picked(Texts(column, titles), kept))


def image_corpus(
    table: DataTable, image_column: str, label_column: str | None = None, id_column: str | None = None
) -> Corpus:
    """The images of a table, in the order of its rows, with labels where there is a column of them."""
    column = Column(table, image_column, "image")
    names = _ids(table, id_column)
    missing = f"no image in column {image_column!r}"
    rows = np.arange(len(table))
    kept = _usable(table, names, rows, column.filled(), "image", missing, "fill it in or remove the row")
    labels, classes = (None, None) if label_column is None else labels_of_column(table, label_column).take(kept)
    items = Picked(ColumnImages(table, column), kept)
    return Corpus([names[i] for i in kept], items, "image", labels=labels, class_names=classes)


def _ids(table: DataTable, id_column: str | None) -> list[Any]:
    if id_column is None:
        return [str(row) for row in range(len(table))]
    column = Column(table, id_column, "text")
    values = column.values(np.arange(len(column))).tolist()
    return [None if value is None else str(value) for value in values]


def _usable(
    table: DataTable, names: list[Any], rows: np.ndarray, there: np.ndarray, what: str, missing: str, mend: str
) -> np.ndarray:
    """Positions of the values that are there and whose names are there and new; the others are told to `skips`."""
    empty = rows[~there]
    if len(empty):
        table.skips.bad(missing, table.where(int(empty[0])), mend, len(empty))
    seen: set[str] = set()
    kept = []
    for i in np.flatnonzero(there).tolist():
        name = names[i]
        if name is None:
            table.skips.bad(f"{what} without an id", table.where(int(rows[i])), "give it one")
        elif name in seen:
            table.skips.bad(f"{what} with an id used before", table.where(int(rows[i])), f"{name!r} stands twice")
        else:
            seen.add(name)
            kept.append(i)
    table.skips.demand(len(kept), what)
    return np.array(kept, dtype=np.int64)
