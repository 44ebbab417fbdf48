from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data import Ragged

ROWS = st.lists(st.lists(st.integers(0, 20), max_size=5), max_size=8)


@given(ROWS)
def test_rows_come_back(rows: list[list[int]]) -> None:
    ragged = Ragged.from_rows(rows)
    assert [ragged.row(i).tolist() for i in range(len(rows))] == rows
    assert ragged.lengths.tolist() == [len(row) for row in rows]


@given(ROWS, st.data())
def test_take_and_padded_agree_with_lists(rows: list[list[int]], data: st.DataObject) -> None:
    picks = np.array(
        data.draw(st.lists(st.integers(0, max(len(rows) - 1, 0)), max_size=6) if rows else st.just([])), int
    )
    ragged = Ragged.from_rows(rows)
    taken = ragged.take(picks)
    assert [taken.row(k).tolist() for k in range(len(picks))] == [rows[i] for i in picks]
    width = max((len(rows[i]) for i in picks), default=0)
    assert ragged.padded(picks).tolist() == [rows[i] + [-1] * (width - len(rows[i])) for i in picks]


@given(ROWS, st.integers(0, 20))
def test_keep_filters_values_and_not_rows(rows: list[list[int]], bound: int) -> None:
    ragged = Ragged.from_rows(rows)
    kept = ragged.keep(ragged.values < bound)
    assert [kept.row(i).tolist() for i in range(len(rows))] == [[v for v in row if v < bound] for row in rows]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=30))
def test_from_pairs_groups_distinct_values_by_key(pairs: list[tuple[int, int]]) -> None:
    keys, values = np.array([k for k, _ in pairs], int), np.array([v for _, v in pairs], int)
    ragged = Ragged.from_pairs(keys, values, num_keys=7)
    assert [ragged.row(k).tolist() for k in range(7)] == [sorted({v for q, v in pairs if q == k}) for k in range(7)]


def test_from_sorted_keeps_order_and_repeats() -> None:
    ragged = Ragged.from_sorted(np.array([0, 2, 2, 2]), np.array([5, 9, 1, 9]), num_keys=4)
    assert [ragged.row(k).tolist() for k in range(4)] == [[5], [], [9, 1, 9], []]
