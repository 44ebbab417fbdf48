"""Pairs from tables: any columns of any table, and rows that bring mined negatives."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from dualenc.data.columns import Chained, Column, Picked, Texts, filled, items_of, modality_of, number_distinct
from dualenc.data.pairs import Items, PairDataset, Ragged
from dualenc.data.skips import Skips
from dualenc.data.tables import Kind, Table, open_table
from dualenc.errors import DualencError
from dualenc.types import Modality, OnError


class ColumnPairs(PairDataset):
    """Pairs between the values of two columns of an opened table.

    Pair by pair in the order of rows; a row with a list on the right makes one pair for each entry, which share
    their left item. Ids are numbered in order of appearance.

    Args:
        table: the rows.
        left_column: one item in each row.
        right_column: an item or a list of items in each row.
        negative_column: mined negatives of the row's left item, a text or a list of texts.
        left_modality: "text" or "image"; found out from the values by default.
        right_modality: the same for the right column.
        deduplicate: equal texts, and equal image paths, of one side are the same item and share an id.
        max_negatives: keep that many negatives of each row, from the front.

    Raises:
        DualencError: nothing usable, or a list in the left column.
        BadSample: an empty cell, under on_error="raise".
    """

    def __init__(
        self,
        table: Table,
        left_column: str,
        right_column: str,
        negative_column: str | None = None,
        *,
        left_modality: Modality | None = None,
        right_modality: Modality | None = None,
        deduplicate: bool = True,
        max_negatives: int | None = None,
    ) -> None:
        left = _Values.of(table, left_column, left_modality)
        right = _Values.of(table, right_column, right_modality)
        if left.column.is_list:
            raise DualencError(f"{table.source}: column {left_column!r} holds lists; name it as right_column instead")
        rows, right_at = _match(table, left, right)
        table.skips.demand(len(rows), "pair")
        left_first, left_number = left.number(np.unique(rows), deduplicate)
        negatives = _no_negatives(len(table))
        if negative_column is not None:
            negative = _Values.of(table, negative_column, right.modality)
            negatives = _negatives_of_rows(table, negative, rows, max_negatives)
            right = right.chained(negative)
            negatives = negatives._replace(values=negatives.values + len(right.items) - len(negative.items))
        pool = np.concatenate([right_at, np.unique(negatives.values)])
        right_first, right_number = right.number(pool, deduplicate)
        super().__init__(
            Picked(left.items, left_first),
            Picked(right.items, right_first),
            left_number[rows],
            right_number[right_at],
            left_modality=left.modality,
            right_modality=right.modality,
        )
        if negative_column is not None:
            ids = Ragged(right_number[negatives.values], negatives.offsets).take(rows)
            self.negatives = self._without_positives(ids, rows, table)
        self.skipped = table.skips.report()

    def _without_positives(self, negatives: Ragged, rows: np.ndarray, table: Table) -> Ragged:
        """Leave out, and count, what is listed as a negative of its own positive pair partner."""
        left = np.repeat(self.left_id, negatives.lengths)
        positive = np.isin(left * self.num_right + negatives.values, self.left_id * self.num_right + self.right_id)
        if positive.any():
            pair = np.repeat(np.arange(len(self)), negatives.lengths)[np.argmax(positive)]
            reason = "negative that is also a positive"
            table.skips.bad(reason, table.where(int(rows[pair])), "remove it from the negatives", int(positive.sum()))
        return negatives.keep(~positive)


class _Values(NamedTuple):
    """One column laid flat, or two behind one another."""

    items: Items
    modality: Modality
    column: Column
    rows: np.ndarray  # the row each value stands in
    keys: Items | None  # strings that are equal for equal items, where that is cheap to know

    @classmethod
    def of(cls, table: Table, name: str, modality: Modality | None) -> _Values:
        modality = modality or modality_of(Column(table.dataset, name))
        column = Column.of(table, name, modality, lists=True)
        keys = Texts(column) if modality == "text" or column.holds_strings else None
        return cls(items_of(table, column, modality), modality, column, column.row_of_values(), keys)

    def chained(self, other: _Values) -> _Values:
        keys = None if self.keys is None or other.keys is None else Chained(self.keys, other.keys)
        return self._replace(items=Chained(self.items, other.items), keys=keys)

    def number(self, positions: np.ndarray, deduplicate: bool) -> tuple[np.ndarray, np.ndarray]:
        """First position of each distinct item, and by position the number of its item (-1: not among them)."""
        first, inverse = positions, np.arange(len(positions))
        if deduplicate and self.keys is not None:
            first, inverse = number_distinct(self.keys, positions)
        number = np.full(len(self.items), -1, dtype=np.int64)
        number[positions] = inverse
        return first, number


def _match(table: Table, left: _Values, right: _Values) -> tuple[np.ndarray, np.ndarray]:
    """Row and position of the right value of every usable pair, in order."""
    good = filled(left.column)
    _count_empty(table, left, np.flatnonzero(~good))
    there = filled(right.column)
    none = np.bincount(right.rows, minlength=len(table)) == 0
    empty = np.concatenate([np.flatnonzero(none), right.rows[~there]])
    _count_empty(table, right, np.sort(empty[good[empty]]))
    usable = np.flatnonzero(there & good[right.rows])
    return right.rows[usable], usable


def _count_empty(table: Table, values: _Values, rows: np.ndarray) -> None:
    if len(rows):
        reason = f"no {values.modality} in column {values.column.name!r}"
        table.skips.bad(reason, table.where(int(rows[0])), "fill it in or remove the row", len(rows))


def _no_negatives(num_rows: int) -> Ragged:
    return Ragged(np.zeros(0, dtype=np.int64), np.zeros(num_rows + 1, dtype=np.int64))


def _negatives_of_rows(table: Table, negative: _Values, rows: np.ndarray, most: int | None) -> Ragged:
    """Positions of the filled negatives of each row that makes a pair."""
    there = filled(negative.column)
    _count_empty(table, negative, negative.rows[~there])
    paired = np.zeros(len(table), dtype=bool)
    paired[rows] = True
    kept = np.flatnonzero(there & paired[negative.rows])
    ragged = Ragged.from_sorted(negative.rows[kept], kept, len(table))
    rank = np.arange(len(kept)) - np.repeat(ragged.offsets[:-1], ragged.lengths)
    return ragged if most is None else ragged.keep(rank < most)


class TablePairs(ColumnPairs):
    """Pairs from any table: local files, a saved data set, or the Hugging Face hub.

    Args:
        path: a .jsonl, .json, .csv, .tsv, .txt or .parquet file, a glob or folder of such files, a folder written by
            `datasets.save_to_disk`, or a hub name.
        left_column: query or image. Images may be file contents, `datasets` images, or paths relative to the table.
        right_column: document or caption; a list of captions makes one pair each.
        negative_column: mined negatives, a text or a list of texts.
        split: of a folder, saved data set or hub name.
        subset: configuration of a hub data set.
        left_modality: "text" or "image"; found out from the values by default.
        right_modality: the same for the right column.
        image_root: where relative image paths start, and where images must lie; by default the table's folder.
        allow_outside: whether image paths may lead out of that folder; only for a table that you trust.
        deduplicate: equal texts, and equal image paths, of one side are the same item and share an id.
        max_negatives: keep that many negatives of each row, from the front.
        limit: read the first rows only.
        quotes: whether `"` encloses fields of csv and tsv files.
        on_error: "skip" leaves out, counts and reports bad rows; "raise" stops at the first.

    Raises:
        DualencError: no such file, column or split; nothing usable; a broken file.
        BadSample: a malformed line or an empty cell, under on_error="raise".
    """

    def __init__(
        self,
        path: str | Path,
        left_column: str,
        right_column: str,
        negative_column: str | None = None,
        *,
        split: str = "train",
        subset: str | None = None,
        left_modality: Modality | None = None,
        right_modality: Modality | None = None,
        image_root: str | Path | None = None,
        allow_outside: bool = False,
        deduplicate: bool = True,
        max_negatives: int | None = None,
        limit: int | None = None,
        quotes: bool = True,
        on_error: OnError = "skip",
    ) -> None:
        columns: dict[str, Kind] = {left_column: "value", right_column: "list"}
        if negative_column is not None:
            columns[negative_column] = "list"
        table = open_table(
            path,
            columns,
            Skips(path, on_error),
            split=split,
            subset=subset,
            limit=limit,
            quotes=quotes,
            allow_outside=allow_outside,
        )
        table.root = table.root if image_root is None else Path(image_root)
        super().__init__(
            table,
            left_column,
            right_column,
            negative_column,
            left_modality=left_modality,
            right_modality=right_modality,
            deduplicate=deduplicate,
            max_negatives=max_negatives,
        )


class MinedPairs(ColumnPairs):
    """Pairs with mined negatives, one query a line, as FlagEmbedding and Tevatron write them.

    FlagEmbedding: `{"query": …, "pos": [text, …], "neg": [text, …]}`. Tevatron: `{"query": …, "positive_passages":
    [{"docid", "title", "text"}, …], "negative_passages": […]}`. A query with several positives makes one pair each.
    Equal texts are the same item, wherever they stand.

    Args:
        path: a .jsonl file, or a glob of them.
        titles: join a passage's title to its text.
        max_negatives: keep that many negatives of each query, from the front.
        limit: read the first queries only.
        on_error: "skip" leaves out, counts and reports bad lines; "raise" stops at the first.

    Raises:
        DualencError: no such file, neither layout, nothing usable.
        BadSample: a malformed line, an empty query or passage, under on_error="raise".
    """

    def __init__(
        self,
        path: str | Path,
        *,
        titles: bool = True,
        max_negatives: int | None = None,
        limit: int | None = None,
        on_error: OnError = "skip",
    ) -> None:
        columns: dict[str, Kind] = {"query": "value", "pos": "list", "neg": "list"}
        reshape = _mined_with_titles if titles else _mined
        table = open_table(path, columns, Skips(path, on_error), optional=("neg",), limit=limit, reshape=reshape)
        super().__init__(
            table, "query", "pos", "neg", left_modality="text", right_modality="text", max_negatives=max_negatives
        )


def _mined(record: dict[str, Any], titles: bool = False) -> dict[str, Any]:
    """Tevatron's nested passages as FlagEmbedding's lists of texts."""
    names = {"pos": "positive_passages", "neg": "negative_passages"}
    if names["pos"] not in record:
        return record
    lists = {new: _passages(record.get(old), titles) for new, old in names.items()}
    return {**record, **lists}


def _mined_with_titles(record: dict[str, Any]) -> dict[str, Any]:
    return _mined(record, titles=True)


def _passages(passages: Any, titles: bool) -> Any:
    return [_passage(entry, titles) for entry in passages] if isinstance(passages, list) else passages


def _passage(entry: Any, titles: bool) -> Any:
    """Title and text joined; anything else is left for the reading of the column to judge."""
    if not isinstance(entry, dict):
        return entry
    parts = (entry.get("title") if titles else None, entry.get("text"))
    if any(not isinstance(part, (str, NoneType)) for part in parts):
        raise TypeError("a passage's title or text is no string")
    return " ".join(part or "" for part in parts).strip()
