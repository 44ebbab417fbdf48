"""Pairs between two columns of a table, with mined negatives, weights and a teacher's scores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from dualenc.data.columns import Column, ColumnImages, ImageKeys, Joined, Picked, Texts, number_distinct
from dualenc.data.corpus import Corpus
from dualenc.data.line_tables import kind_of_type
from dualenc.data.pairs import PairDataset, Ragged
from dualenc.data.tables import DataTable
from dualenc.data.vectors import Faults, VectorColumn, usable
from dualenc.errors import DualencError
from dualenc.types import Items, Modality


class ColumnPairs(PairDataset):
    """Pairs between the values of two columns of an opened table; the arguments are those of `TablePairs`.

    Pair by pair in the order of rows; a row with a list on the right makes one pair for each entry, which share
    their left item. Ids are numbered in order of appearance. With `left_vectors` and `right_vectors` the columns hold
    ids of these vectors. `score_columns` hold a teacher's scores of the right and of the negative column's values.
    """

    def __init__(
        self,
        table: DataTable,
        left_column: str,
        right_column: str,
        negative_columns: Sequence[str] = (),
        *,
        weight_column: str | None = None,
        score_columns: tuple[str, str] | None = None,
        left_modality: Modality | None = None,
        right_modality: Modality | None = None,
        left_vectors: Corpus | None = None,
        right_vectors: Corpus | None = None,
        deduplicate: bool = True,
        max_negatives: int | None = None,
    ) -> None:
        left = _Values(table, left_column, left_modality, left_vectors)
        right = _Values(table, right_column, right_modality, right_vectors)
        if left.is_list:
            raise DualencError(f"{table.source}: column {left_column!r} holds lists; name it as right_column instead")
        weights = None if weight_column is None else _weights(table, weight_column)
        right_places = _paired_values(table, left, right, weights, weight_column)
        rows = right.rows[right_places]  # of each pair
        table.skips.demand(len(rows), "pair")
        negatives = None
        if negative_columns:
            negatives = _Negatives(table, negative_columns, right, right_vectors, rows, max_negatives)
        # Only items that a pair uses get a number: ids have no gaps.
        left_first, left_number = _number(left.items, left.keys, np.unique(rows), deduplicate)
        items = right.items
        keys = right.keys
        places = right_places
        if negatives is not None:
            items, keys, places = negatives.behind(right, right_places)
        right_first, right_number = _number(items, keys, places, deduplicate)
        scores = None if score_columns is None else _scores(table, score_columns[0], right.rows)[right_places]
        super().__init__(
            Picked(left.items, left_first),
            Picked(items, right_first),
            left_number[rows],
            right_number[right_places],
            weights=None if weights is None else weights[rows],
            scores=scores,
            left_modality=left.modality,
            right_modality=right.modality,
        )
        if self.scores is not None and np.isnan(self.scores).all():
            mend = "mine them with `dualenc mine`, or leave scores out"
            raise DualencError(f"{table.source}: no positive has a teacher's score; {mend}")
        if negatives is not None:
            self._add_negatives(table, negatives, right_number, rows, score_columns)
        self.skipped = table.skips.report()

    def _add_negatives(
        self,
        table: DataTable,
        negatives: _Negatives,
        right_number: np.ndarray,
        rows: np.ndarray,
        score_columns: tuple[str, str] | None,
    ) -> None:
        """Give each pair the negatives of its row, apart from those that are positives of its left item."""
        # A row with several positives makes several pairs, each with all negatives of the row.
        places = negatives.places.take(rows)  # of each pair
        ids = Ragged(right_number[places.values], places.offsets)
        query = np.repeat(self.left_id, ids.lengths)
        # A pair as one number, to look for all (query, negative) among all (query, positive) at once.
        positive = np.isin(query * self.num_right + ids.values, self.left_id * self.num_right + self.right_id)
        if positive.any():
            pair = np.repeat(np.arange(len(self)), ids.lengths)[np.argmax(positive)]
            where = table.where(int(rows[pair]))
            reason = "negative that is also a positive"
            table.skips.bad(reason, where, "remove it from the negatives", int(positive.sum()))
        mask = ~positive & ids.first_in_row()
        self.negatives = ids.keep(mask)
        if score_columns is not None:
            scores = _scores(table, score_columns[1], negatives.rows)
            self.negative_scores = scores[places.values - negatives.first_place][mask]


def _paired_values(
    table: DataTable, left: _Values, right: _Values, weights: np.ndarray | None, weight_column: str | None
) -> np.ndarray:
    """The positions of right values that make a pair; the table's `skips` counts the faults of all others."""
    good_rows = usable(left.faults, len(table))
    good_values = usable(right.faults, len(right.items))
    left.skip(~good_rows)
    if weights is not None:
        # Rows that are bad already are counted once, for the first reason.
        unweighted = ~np.isfinite(weights) & good_rows
        reason = f"no weight of 0 or more in column {weight_column!r}"
        table.skip_rows(reason, np.flatnonzero(unweighted), "mend the row")
        good_rows = good_rows & ~unweighted
    # A row with an empty list has no value on the right that could be counted as bad.
    without = np.bincount(right.rows, minlength=len(table)) == 0
    right.skip(~good_values & good_rows[right.rows], np.flatnonzero(without & good_rows))
    return np.flatnonzero(good_values & good_rows[right.rows])


class _Negatives:
    """Mined negatives of the rows that have a pair. Their positions begin behind those of the right values.

    Attributes:
        items: (n,) values of the negative columns, column after column.
        keys: (n,) strings, file contents or vectors, equal for equal items.
        rows: (n,) the row of each value.
        first_place: position of the first of them.
        places: (rows of the table) positions of each row's negatives, in the order of the columns.
    """

    def __init__(
        self,
        table: DataTable,
        columns: Sequence[str],
        right: _Values,
        vectors: Corpus | None,
        rows: np.ndarray,
        max_negatives: int | None,
    ) -> None:
        parts = [_Values(table, column, right.modality, vectors, right.dim) for column in columns]
        filled = [usable(part.faults, len(part.items)) for part in parts]
        for part, mask in zip(parts, filled):
            part.skip(~mask)
        self.items: Items = Joined([part.items for part in parts])
        self.keys: Items = Joined([part.keys for part in parts])
        self.rows = np.concatenate([part.rows for part in parts])
        self.first_place = len(right.items)
        # Negatives of rows without a pair are never used, and would be items without a query.
        paired = np.bincount(rows, minlength=len(table)) > 0
        to_use = np.flatnonzero(np.concatenate(filled) & paired[self.rows])
        to_use = to_use[np.argsort(self.rows[to_use], kind="stable")]
        self.places = Ragged.from_sorted(self.rows[to_use], self.first_place + to_use, len(table))
        if max_negatives is not None:
            rank = np.arange(len(to_use)) - np.repeat(self.places.offsets[:-1], self.places.lengths)
            self.places = self.places.keep(rank < max_negatives)

    def behind(self, right: _Values, right_places: np.ndarray) -> tuple[Items, Items, np.ndarray]:
        """Items and keys of the right column with the negatives behind them, and the positions that are used."""
        items = Joined([right.items, self.items])
        keys = Joined([right.keys, self.keys])
        return items, keys, np.concatenate([right_places, np.unique(self.places.values)])


class _Values:
    """One column as items, its lists laid flat: n values.

    Args:
        table: the rows.
        name: one of its columns.
        modality: what it holds; found out from the values by default.
        vectors: what the values are ids of, if they are ids.
        dim: size that vectors in the column must have; by default the most frequent one.

    Attributes:
        is_list: whether a row may hold several values.
        rows: (n,) the row of each value.
        items: (n,) texts, images or vectors.
        keys: strings, file contents or vectors, equal for equal items.
        faults: which values cannot be used; the first reason is also that of a row without any.
        dim: size of the vectors in the column.
    """

    def __init__(
        self,
        table: DataTable,
        name: str,
        modality: Modality | None,
        vectors: Corpus | None = None,
        dim: int | None = None,
    ) -> None:
        self.table = table
        self.dim = dim
        self.modality: Modality
        self.items: Items
        self.keys: Items
        self.faults: Faults
        in_vectors = kind_of_type(table.dataset.data.schema.field(name).type) in ("vector", "vectors")
        if vectors is None and (modality == "vector" or (modality is None and in_vectors)):
            self.modality = "vector"
            found = VectorColumn(table, name, dim)
            self.is_list = found.is_list
            self.rows = found.rows
            self.dim = found.dim
            self.items = self.keys = found.items
            self.faults = found.faults
            return
        column = Column(table, name, "text" if vectors is not None else modality, lists=True)
        texts = Texts(column)
        filled = column.filled()
        self.is_list = column.is_list
        self.rows = column.row_of_values()
        self.modality = column.modality if vectors is None else vectors.modality
        self.items = self.keys = texts
        if column.modality == "image":
            images = ColumnImages(table, column)
            self.items = images
            self.keys = ImageKeys(images)
        what = "id" if vectors is not None else column.modality
        self.faults = {f"no {what} in column {name!r}": (~filled, "fill it in or remove the row")}
        if vectors is not None:
            # Position -1 is never read: those values are among the faults.
            place = column.places_in(vectors.ids)
            self.items = Picked(vectors.items, place)
            missing = filled & (place < 0)
            self.faults["id without a vector"] = (missing, f"column {name!r} names what is not embedded")

    def skip(self, bad: np.ndarray, without: np.ndarray | None = None) -> None:
        """Count values that are bad (n,), and rows that hold none, as bad samples."""
        for number, (reason, (mask, mend)) in enumerate(self.faults.items()):
            rows = self.rows[mask & bad]
            if number == 0 and without is not None:
                rows = np.sort(np.concatenate([without, rows]))
            self.table.skip_rows(reason, rows, mend)


def _weights(table: DataTable, name: str) -> np.ndarray:
    """The weight (M,) of each row, float32; NaN where the column holds no number of 0 or more."""
    # Values of lines are texts, those of other tables numbers; both are read as Python reads them.
    texts = [str(value) for value in table.dataset.data.column(name).to_pylist()]
    weights = np.full(len(texts), np.nan, np.float32)
    for row, text in enumerate(texts):
        with suppress(ValueError):
            weights[row] = float(text)
    weights[~np.isfinite(weights) | (weights < 0)] = np.nan
    return weights


def _scores(table: DataTable, name: str, rows: np.ndarray) -> np.ndarray:
    """A teacher's score (n,) of each value of a column of lists, float32; NaN where there is none.

    `rows` (n,), ascending, are those of the values. The table's `skips` counts lists of another length than a row's.
    """
    count = np.bincount(rows, minlength=len(table))
    starts = np.concatenate([[0], np.cumsum(count)])
    scores = np.full(len(rows), np.nan, np.float32)
    unfit = []
    for row, given in enumerate(table.dataset.data.column(name).to_pylist()):
        if given is not None and len(given) == count[row]:
            scores[starts[row] : starts[row + 1]] = [np.nan if score is None else score for score in given]
        elif count[row]:
            unfit.append(row)
    mend = "give a number each, or leave scores out"
    table.skip_rows(f"{name} that are not one for each text", np.array(unfit), mend)
    scores[~np.isfinite(scores)] = np.nan
    return scores


def _number(items: Items, keys: Items, positions: np.ndarray, deduplicate: bool) -> tuple[np.ndarray, np.ndarray]:
    """First position of each item that is distinct by its key; the item's number by position, else -1."""
    sizes = keys.sizes[positions] if isinstance(keys, ImageKeys) else None
    first, inverse = number_distinct(keys.__getitem__ if deduplicate else None, positions, sizes=sizes)
    number = np.full(len(items), -1, dtype=np.int64)
    number[positions] = inverse
    return first, number
