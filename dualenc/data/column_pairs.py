"""Pairs between two columns of a table, with mined negatives and weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from dualenc.data.columns import ItemColumn
from dualenc.data.item_lists import Joined, Picked, number_items
from dualenc.data.pairs import PairDataset, Ragged
from dualenc.data.tables import DataTable
from dualenc.errors import DualencError


class ColumnPairs(PairDataset):
    """Pairs between the items of two columns of a table, with ids in order of appearance."""

    def __init__(
        self,
        left: ItemColumn,
        right: ItemColumn,
        negative_columns: Sequence[ItemColumn] = (),
        *,
        weight_column: str | None = None,
        deduplicate: bool = True,
        max_negatives: int | None = None,
    ) -> None:
        table = left.table
        weights = None if weight_column is None else _weights(table, weight_column)
        if weights is not None:
            reason = f"no weight of 0 or more in column {weight_column!r}"
            left = left.with_fault(reason, ~np.isfinite(weights), "fix the row")
        paired = paired_positions(left, right)
        rows = right.rows[paired]
        items = right.items
        used = paired
        negatives = None
        if negative_columns:
            negatives = _read_negatives(negative_columns, rows, len(right.items), max_negatives)
            items = Joined([items, *(column.items for column in negative_columns)])
            used = np.concatenate([paired, np.unique(negatives.values)])
        # Only items that a pair uses get a number: ids have no gaps.
        used_rows, pair_row = np.unique(rows, return_inverse=True)
        left_first, left_number = number_items(left.items, used_rows, deduplicate)
        right_first, number = number_items(items, used, deduplicate)
        right_number = np.full(len(items), -1, dtype=np.int64)
        right_number[used] = number
        super().__init__(
            Picked(left.items, left_first),
            Picked(items, right_first),
            left_number[pair_row],
            right_number[paired],
            weights=None if weights is None else weights[rows],
            left_modality=left.modality,
            right_modality=right.modality,
        )
        if negatives is not None:
            self._add_negatives(table, negatives.take(rows), right_number, rows)
        self.skipped = table.bad_rows.report()

    def _add_negatives(
        self, table: DataTable, positions: Ragged, right_number: np.ndarray, rows: np.ndarray
    ) -> None:
        """Give each pair the negatives of its row, apart from those that are positives of its left item.

        A row with several positives makes several pairs, each with all negatives of the row.
        """
        ids = Ragged(right_number[positions.values], positions.offsets)
        query = np.repeat(self.left_id, ids.lengths)
        # A pair as one number, to look for all (query, negative) among all (query, positive) at once.
        pairs = self.left_id * self.num_right + self.right_id
        positive = np.isin(query * self.num_right + ids.values, pairs)
        if positive.any():
            pair = np.repeat(np.arange(len(self)), ids.lengths)[np.argmax(positive)]
            position = table.position(int(rows[pair]))
            reason = "negative that is also a positive"
            table.bad_rows.add(reason, position, "remove it from the negatives", int(positive.sum()))
        self.negatives = ids.keep(~positive & ids.first_in_row())


def paired_positions(left: ItemColumn, right: ItemColumn) -> np.ndarray:
    """The positions (M,) of right values that make a pair; the faults of all others are counted."""
    table = left.table
    if left.is_list:
        raise DualencError(f"{table.source}: the left column holds lists; name it as right_column instead")
    good_rows = left.usable()
    good_values = right.usable()
    left.skip(~good_rows)
    # A row with an empty list has no value on the right that could be counted as bad.
    is_empty = np.bincount(right.rows, minlength=len(good_rows)) == 0
    in_good_row = good_rows[right.rows]
    right.skip(~good_values & in_good_row, np.flatnonzero(is_empty & good_rows))
    table.bad_rows.require(int((good_values & in_good_row).sum()), "pair")
    return np.flatnonzero(good_values & in_good_row)


def _read_negatives(
    columns: Sequence[ItemColumn], paired_rows: np.ndarray, start: int, max_negatives: int | None
) -> Ragged:
    """The positions, from `start` on, of the negatives' values in each row of the table."""
    usable = []
    for column in columns:
        usable.append(column.usable())
        column.skip(~usable[-1])
    rows = np.concatenate([column.rows for column in columns])
    num_rows = len(columns[0].table)
    # Negatives of rows without a pair are never used, and would be items without a query.
    has_pair = np.bincount(paired_rows, minlength=num_rows) > 0
    to_use = np.flatnonzero(np.concatenate(usable) & has_pair[rows])
    to_use = to_use[np.argsort(rows[to_use], kind="stable")]
    positions = Ragged.from_sorted(rows[to_use], start + to_use, num_rows)
    if max_negatives is not None:
        rank = np.arange(len(to_use)) - np.repeat(positions.offsets[:-1], positions.lengths)
        positions = positions.keep(rank < max_negatives)
    return positions


def _weights(table: DataTable, name: str) -> np.ndarray:
    """The weight (M,) of each row, float32; NaN where the column holds no number of 0 or more."""
    weights = np.full(len(table), np.nan, np.float32)
    for row, value in enumerate(table.column(name).to_pylist()):
        with suppress(ValueError, TypeError):
            weights[row] = float(value)
    weights[~np.isfinite(weights) | (weights < 0)] = np.nan
    return weights
