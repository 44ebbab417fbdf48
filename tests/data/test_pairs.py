from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data import ImageViews, Pair, PairDataset
from dualenc.errors import DualencError

from .make import picture


def test_rows_are_pairs_with_stable_index() -> None:
    pairs = PairDataset(["q0", "q1"], ["d0", "d1", "d2"], [0, 0, 1], [2, 0, 2], negatives=[[1], [], [0, 1]])
    assert pairs[0] == Pair(0, 0, 2, "q0", "d2", ("d1",), (1,))
    assert pairs[2] == Pair(2, 1, 2, "q1", "d2", ("d0", "d1"), (0, 1))
    assert pairs[-1] == pairs[2]
    assert (len(pairs), pairs.num_left, pairs.num_right) == (3, 2, 3)
    with pytest.raises(IndexError):
        pairs[3]


def test_without_ids_item_i_belongs_to_item_i() -> None:
    pairs = PairDataset(["a", "b"], ["x", "y"])
    assert [(p.left, p.right) for p in pairs] == [("a", "x"), ("b", "y")]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=25), st.data())
def test_positives_are_all_partners_padded_with_minus_one(links: list[tuple[int, int]], data: st.DataObject) -> None:
    left_id, right_id = [a for a, _ in links], [b for _, b in links]
    pairs = PairDataset([str(i) for i in range(5)], [str(i) for i in range(7)], left_id, right_id)
    ids = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    for side, own, other in (("left", left_id, right_id), ("right", right_id, left_id)):
        table = pairs.positives(side, np.array(ids))  # type: ignore[arg-type]
        found = [[value for value in row if value >= 0] for row in table.tolist()]
        assert found == [sorted({b for a, b in zip(own, other) if a == i}) for i in ids]
        assert table.dtype == np.int64
        assert table.shape[1] == max(map(len, found))


def test_views_pair_every_image_with_itself() -> None:
    views = ImageViews([picture(1), picture(2)])
    assert views.views
    assert views[1].left is views[1].right
    assert views.left_id.tolist() == views.right_id.tolist() == [0, 1]
    assert views.positives("left", np.array([1])).tolist() == [[1]]


def test_travels_to_worker_processes() -> None:
    pairs = PairDataset(["a", "b"], ["x", "y"], negatives=[[1], [0]])
    assert list(pickle.loads(pickle.dumps(pairs))) == list(pairs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"left_id": [0, 2], "right_id": [0, 1]}, "left_id: 2 at row 1 is outside [0, 2)"),
        ({"left_id": [0, 1], "right_id": [-1, 1]}, "right_id: -1 at row 0 is outside [0, 3)"),
        ({"left_id": [0.5, 1], "right_id": [0, 1]}, "left_id: give whole numbers"),
        ({"left_id": [0], "right_id": [0, 1]}, "left_id has 1 rows but right_id has 2"),
        ({"left_id": [], "right_id": []}, "no pairs"),
        ({"left_id": [0], "right_id": [0], "negatives": [[1], [2]]}, "negatives has 2 rows for 1 pairs"),
        ({"left_id": [0], "right_id": [0], "negatives": [[3]]}, "negatives: 3 at row 0 is outside [0, 3)"),
    ],
)
def test_wrong_ids_are_told_in_one_line(arguments: dict, message: str) -> None:
    with pytest.raises(DualencError) as error:
        PairDataset(["a", "b"], ["x", "y", "z"], **arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
