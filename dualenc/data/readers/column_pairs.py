"""Pairs between two columns of a table, with mined negatives, weights and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from dualenc.data.columns import ItemColumn
from dualenc.data.item_lists import Joined, distinct_items
from dualenc.data.pairs import PairDataset
from dualenc.data.ragged import Ragged, distinct
from dualenc.data.readers.column_kinds import ColumnKind
from dualenc.data.readers.column_names import is_none
from dualenc.data.readers.relevance import Labels, as_number, label_columns, read_labels
from dualenc.data.readers.tables import DataTable, TableSource
from dualenc.errors import DualencError
from dualenc.types import Integers


class ColumnPairs(PairDataset):
    """Pairs between the items of two columns of a table, with ids in order of appearance."""

    has_distinct_items = True

    def __init__(
        self,
        left: ItemColumn,
        right: ItemColumn,
        negative_columns: Sequence[ItemColumn] = (),
        *,
        weight_column: str | None = None,
        likely_labels: Sequence[str] = (),
        deduplicate: bool = True,
        max_negatives: int | None = None,
    ) -> None:
        table = left.table
        weights = None
        if weight_column is not None:
            weights = _weights(table, weight_column)
            reason = f"no weight >= 0 in column {weight_column!r}"
            # A fault of the row, so that it is counted once, even if it holds several captions.
            left = left.with_fault(reason, ~np.isfinite(weights), "fix the row")
        beside_images = "image" in (left.modality, right.modality)
        labels = read_labels(
            table, likely_labels, right, "weight_column", beside_images=beside_images
        )
        paired = paired_positions(left, right, labels)
        rows = right.rows[paired]
        pair_weights = None if weights is None else weights[rows]
        if labels is not None:
            pair_weights = labels.of_pairs(right, paired)
            # All ones are the same as no weights.
            if (pair_weights == 1).all():
                pair_weights = None
        items = right.items
        used = paired
        negatives = None
        if negative_columns:
            negatives = _read_negatives(negative_columns, rows, len(items), max_negatives)
            # Positives and negatives share one space of positions, so that a text that is both
            # gets one id.
            items = Joined([items, *(column.items for column in negative_columns)])
            used = np.concatenate([paired, distinct(negatives.values)])
        # Only items that a pair uses get a number, so that ids are contiguous.
        used_rows, pair_row = np.unique(rows, return_inverse=True)
        lefts, left_number = distinct_items(left.items, used_rows, deduplicate)
        rights, number = distinct_items(items, used, deduplicate)
        right_number = np.full(len(items), -1, dtype=np.int64)
        right_number[used] = number
        super().__init__(
            lefts,
            rights,
            left_number[pair_row],
            right_number[paired],
            weights=pair_weights,
            left_modality=left.modality,
            right_modality=right.modality,
        )
        if negatives is not None:
            self._add_negatives(table, negatives.take(rows), right_number, rows)
        self.skipped = table.bad_rows.report()

    def _add_negatives(
        self, table: DataTable, positions: Ragged, right_number: Integers, rows: Integers
    ) -> None:
        """Give each pair the negatives of its row, without positives of its left item.

        A row with several positives makes several pairs, each with all negatives of the row.
        """
        ids = Ragged(right_number[positions.values], positions.offsets)
        query = np.repeat(self.left_id, ids.lengths)
        # Encode (query, document) as one integer: one `isin` then finds every negative that is a
        # positive of its query in any row.
        pairs = self.left_id * self.num_right + self.right_id
        positive = np.isin(query * self.num_right + ids.values, pairs)
        if positive.any():
            pair = np.repeat(np.arange(len(self)), ids.lengths)[np.argmax(positive)]
            position = table.position(int(rows[pair]))
            reason = "negative that is also a positive"
            table.bad_rows.add(
                reason, position, "remove it from the negatives", int(positive.sum())
            )
        # Equal texts share an id, so a negative may be listed twice in a row.
        self.negatives = ids.keep(~positive & ids.first_in_row())


def paired_positions(left: ItemColumn, right: ItemColumn, labels: Labels | None) -> Integers:
    """Return the positions (M,) of right values that make a pair; count all other faults.

    A row, or an entry of its lists, without a label is a fault if there are labels.
    """
    table = left.table
    if left.is_list:
        raise DualencError(
            "the left column holds lists",
            fix="name it as right_column instead",
            where=table.source,
        )
    if labels is not None:
        reason = f"no label in column {labels.name!r}"
        fault = (reason, np.isnan(labels.values), "fill it in or remove the row")
        if labels.of_entries:
            right = right.with_fault(*fault)
        else:
            left = left.with_fault(*fault)
    good_rows = left.usable()
    in_good_row = good_rows[right.rows]
    # A row that is bad on the left counts once, whatever it holds on the right.
    left.skip()
    # An empty list lacks a value that could be counted as bad, so count its row.
    is_empty = np.bincount(right.rows, minlength=len(good_rows)) == 0
    right.skip(in_good_row, np.flatnonzero(is_empty & good_rows))
    paired = np.flatnonzero(right.usable() & in_good_row)
    table.bad_rows.require(len(paired), "pair")
    return paired


def open_with_weights(
    source: TableSource, columns: Mapping[str, ColumnKind], weight_column: str | None
) -> tuple[DataTable, str | None, list[str]]:
    """Open the columns of pairs, and the column of weights or else those that may be labels.

    Return the table, the column of weights if there is one, and the columns that may be labels.
    """
    likely = label_columns(source.kinds, columns) if weight_column is None else []
    opened = {**columns, **{name: source.label_kind(name) for name in likely}}
    if is_none(weight_column):
        weight_column = None
    if weight_column is not None:
        opened[weight_column] = "value"
    return source.open(opened), weight_column, likely


def _read_negatives(
    columns: Sequence[ItemColumn], paired_rows: Integers, start: int, max_negatives: int | None
) -> Ragged:
    """Return the positions, counted from `start`, of the negatives in each row of the table."""
    for column in columns:
        # An empty cell means that the pair lacks a negative, which is fine; an empty entry in a
        # list is a bad sample.
        column.skip(True if column.is_list else ~column.is_empty)
    usable = np.concatenate([column.usable() for column in columns])
    rows = np.concatenate([column.rows for column in columns])
    num_rows = len(columns[0].table)
    # Negatives of rows without a pair are never drawn, and would only enlarge the corpus.
    has_pair = np.bincount(paired_rows, minlength=num_rows) > 0
    to_use = np.flatnonzero(usable & has_pair[rows])
    # Stable, so that negatives of a row keep their order and max_negatives keeps the first ones.
    to_use = to_use[np.argsort(rows[to_use], kind="stable")]
    positions = Ragged.from_sorted(rows[to_use], start + to_use, num_rows)
    if max_negatives is not None:
        # Rank of each negative within its row.
        starts = np.repeat(positions.offsets[:-1], positions.lengths)
        rank = np.arange(len(to_use)) - starts
        positions = positions.keep(rank < max_negatives)
    return positions


def _weights(table: DataTable, name: str) -> np.ndarray:
    """Return the weight (M,) of each row, float32; NaN if the value is not a number >= 0."""
    weights = np.full(len(table), np.nan, np.float32)
    for row, value in enumerate(table.column(name).to_pylist()):
        with suppress(ValueError, TypeError):
            weights[row] = float(as_number(value))  # type: ignore[arg-type]
    weights[~np.isfinite(weights) | (weights < 0)] = np.nan
    return weights
