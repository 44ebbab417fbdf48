"""Items to embed, and what a retrieval evaluation reads: queries, a corpus and who is relevant to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dualenc.data.columns import Column, Images, Picked, Texts, Titled, filled, labels_of_column
from dualenc.data.identity import digest_of, items_identity
from dualenc.data.pairs import Items
from dualenc.data.tables import Table
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
        self._check()

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

    def _check(self) -> None:
        if len(self.ids) != len(self.items):
            raise DualencError(f"ids has {len(self.ids)} rows but there are {len(self.items)} items; give one id each")
        if len(set(self.ids)) != len(self.ids):
            first: dict[str, int] = {}
            again = next(i for i, name in enumerate(self.ids) if first.setdefault(name, i) != i)
            raise DualencError(f"ids: {self.ids[again]!r} stands twice (again at row {again}); ids must differ")
        if self.labels is not None and len(self.labels) != len(self.ids):
            raise DualencError(f"labels has {len(self.labels)} rows for {len(self.ids)} items; give one each")
        if self.class_names is not None and self.labels is not None:
            highest = self.labels.max(initial=-1)
            if highest >= len(self.class_names):
                raise DualencError(f"labels: class {highest} has no name among {len(self.class_names)} class_names")


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
    table: Table,
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

    Raises:
        DualencError: nothing usable, or a column of something else.
        BadSample: an empty text, a missing or repeated id, under on_error="raise".
    """
    column = Column.of(table, text_column, "text", lists=True)
    items: Items = Texts(column)
    there = filled(column)
    if title_column is not None and not column.is_list:
        titles = Column.of(table, title_column, "text")
        items, there = Titled(titles, column), there | filled(titles)
    rows = column.row_of_values()
    _tell(table, rows[~there], f"empty {what}", "fill it in or remove it")
    ids = _ids(table, id_column)
    names = ids if not column.is_list else [f"{ids[row]}#{k}" for row, k in zip(rows, _place_in_list(rows))]
    kept = _usable(table, names, rows, np.flatnonzero(there), what)
    return Corpus([names[i] for i in kept], Picked(items, kept))


def image_corpus(
    table: Table, image_column: str, label_column: str | None = None, id_column: str | None = None
) -> Corpus:
    """The images of a table, in the order of its rows, with labels where there is a column of them.

    Raises:
        DualencError: nothing usable, or a column of something else.
        BadSample: a row without an image, a missing or repeated id, under on_error="raise".
    """
    column = Column.of(table, image_column, "image")
    there = filled(column)
    _tell(table, np.flatnonzero(~there), f"no image in column {image_column!r}", "fill it in or remove the row")
    ids = _ids(table, id_column)
    kept = _usable(table, ids, np.arange(len(table)), np.flatnonzero(there), "image")
    labels = None if label_column is None else labels_of_column(table, label_column).take(kept)
    items = Picked(Images(table, column), kept)
    numbers, names = (None, None) if labels is None else labels
    return Corpus([ids[i] for i in kept], items, "image", labels=numbers, class_names=names)


def _ids(table: Table, id_column: str | None) -> Sequence[str | None]:
    if id_column is None:
        return [str(row) for row in range(len(table))]
    column = Column.of(table, id_column, "text")
    values = column.values(np.arange(len(column))).tolist()
    return [None if value is None else str(value) for value in values]


def _place_in_list(rows: np.ndarray) -> np.ndarray:
    """0, 1, 2, … within each run of equal rows."""
    starts = np.searchsorted(rows, rows, side="left")
    return np.arange(len(rows)) - starts


def _tell(table: Table, rows: np.ndarray, reason: str, mend: str) -> None:
    if len(rows):
        table.skips.bad(reason, table.where(int(rows[0])), mend, len(rows))


def _usable(
    table: Table, names: Sequence[str | None], rows: np.ndarray, candidates: np.ndarray, what: str
) -> np.ndarray:
    """The candidates whose names are there and new."""
    seen: set[str] = set()
    kept = []
    for i in candidates.tolist():
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
