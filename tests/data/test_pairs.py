from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dualenc.data import Mixture, Pair, PairDataset, Ragged
from dualenc.data.corpus import held_out
from dualenc.errors import DualencError
from dualenc.types import Modality, Side


def test_rows_are_pairs_with_stable_index() -> None:
    pairs = PairDataset(
        ["q0", "q1"], ["d0", "d1", "d2"], [0, 0, 1], [2, 0, 2], negatives=[[1], [], [0, 1]]
    )
    assert pairs[0] == Pair(0, 0, 2, "q0", "d2", ("d1",), (1,))
    assert pairs[2] == Pair(2, 1, 2, "q1", "d2", ("d0", "d1"), (0, 1))
    assert pairs[-1] == pairs[2]
    assert (len(pairs), pairs.num_left, pairs.num_right) == (3, 2, 3)
    with pytest.raises(IndexError):
        pairs[3]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=25), st.data()
)
def test_positives_are_all_partners_padded_with_minus_one(
    links: list[tuple[int, int]], data: st.DataObject
) -> None:
    left_id, right_id = [a for a, _ in links], [b for _, b in links]
    pairs = PairDataset([str(i) for i in range(5)], [str(i) for i in range(7)], left_id, right_id)
    ids = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    for side, own, other in (("left", left_id, right_id), ("right", right_id, left_id)):
        table = pairs.positives(side, np.array(ids))  # type: ignore[arg-type]
        found = [[value for value in row if value >= 0] for row in table.tolist()]
        assert found == [sorted({b for a, b in zip(own, other) if a == i}) for i in ids]
        assert table.dtype == np.int64
        assert table.shape[1] == max(map(len, found))


def test_the_copy_of_a_text_on_the_other_side_is_no_negative() -> None:
    """As in pairs of equal questions, where every text is an anchor and a candidate."""
    pairs = PairDataset(["a", "b", "only left"], ["b", "c", "a"], [0, 1, 2], [0, 1, 1])
    assert pairs.not_negatives("left", np.array([0, 1, 2])).tolist() == [[0, 2], [1, 0], [1, -1]]
    assert pairs.not_negatives("left", np.array([2])).tolist() == [[1]], "no wider than it must be"
    assert pairs.not_negatives("right", np.array([0, 1])).tolist() == [[0, -1, 1], [1, 2, -1]]
    assert pairs.positives("left", np.array([0])).tolist() == [[0]], "a copy is not relevant"
    part = pairs.take(np.array([1]))
    assert part.not_negatives("right", np.array([2])).tolist() == [[0]]
    images = PairDataset(["a", "b"], ["b", "a"], left_modality="image")
    assert images.copies("left") is None
    assert images.not_negatives("left", np.array([0])).tolist() == [[0]]


QUESTIONS = ["how to cook rice", "rice cooking?", "capital of france", "capital of france"]
ANSWERS = ["boil it", "boil it", "paris", "the city of paris"]
ALIKE = [{0, 1}, {0, 1}, {2, 3}, {2, 3}]


def listed(pairs: PairDataset, side: Side) -> list[set[int]]:
    return [set(row) - {-1} for row in pairs.not_negatives(side, np.arange(4)).tolist()]


@pytest.mark.parametrize("kind", ["texts", "vectors", "images"])
def test_equal_items_are_never_negatives_of_one_anothers_partners(kind: str) -> None:
    """Whatever their ids: as in a table of the same rows, where they have one."""
    items: list = [QUESTIONS, ANSWERS]
    if kind == "vectors":
        items = [[np.full(3, len(text), np.float32) for text in texts] for texts in items]
    elif kind == "images":
        items = [[Image.new("RGB", (2, 2), (len(text), 0, 0)) for text in texts] for texts in items]
    modality: Modality = {"texts": "text", "vectors": "vector", "images": "image"}[kind]  # type: ignore[assignment]
    pairs = PairDataset(*items, left_modality=modality, right_modality=modality)
    assert (pairs.num_right, pairs.right_id.tolist()) == (4, [0, 1, 2, 3])
    assert listed(pairs, "left") == listed(pairs, "right") == ALIKE
    rest, part = pairs.split(0.3)
    assert {rest.left_id.min(), part.left_id.min()} == {0, 2}, "equal questions are in one part"
    assert listed(part, "left") == ALIKE
    assert listed(pairs.take(np.arange(1)), "left")[0] == {0, 1}
    assert (
        listed(Mixture({"one": pairs.take(np.arange(4))}), "left")[:2] == ALIKE[:2]
        or kind == "images"
    )


def test_a_text_on_both_sides_and_under_several_ids() -> None:
    pairs = PairDataset(["a", "b", "a"], ["b", "a", "a"])
    assert [set(row) - {-1} for row in pairs.not_negatives("left", np.arange(3)).tolist()] == [
        {0, 1, 2}
    ] * 3


def test_equal_documents_are_one_where_pairs_are_evaluated() -> None:
    collection = held_out(PairDataset(QUESTIONS, ANSWERS))
    assert collection.corpus.ids == ["right-0", "right-2", "right-3"]
    assert collection.qrels["left-1"] == {"right-0": 1}
    assert collection.qrels["left-2"] == {"right-2": 1, "right-3": 1}


@pytest.mark.parametrize("items", [(text for text in "ab"), "ab", {"a": 1}, {"a"}, None])
def test_items_are_a_collection_by_position(items: object) -> None:
    with pytest.raises(DualencError, match=r"left_items is of type .*; give a list, or"):
        PairDataset(items, ["x", "y"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"left_id": [0, 2], "right_id": [0, 1]}, "left_id: 2 at row 1 is outside [0, 2)"),
        ({"left_id": [0, 1], "right_id": [-1, 1]}, "right_id: -1 at row 0 is outside [0, 3)"),
        (
            {"left_id": [0.5, 1], "right_id": [0, 1]},
            "left_id: has type float64 and shape (2,); give integers",
        ),
        ({"left_id": [0], "right_id": [0, 1]}, "left_id has 1 rows but right_id has 2"),
        ({"left_id": [], "right_id": []}, "the data is empty; give at least one pair"),
        (
            {"left_id": [0], "right_id": [0], "negatives": [[1], [2]]},
            "negatives has 2 rows for 1 pairs",
        ),
        (
            {"left_id": [0], "right_id": [0], "negatives": [[3]]},
            "negatives: 3 at row 0 is outside [0, 3)",
        ),
    ],
)
def test_wrong_ids_are_told_in_one_line(arguments: dict, message: str) -> None:
    with pytest.raises(DualencError) as error:
        PairDataset(["a", "b"], ["x", "y", "z"], **arguments)
    assert message in str(error.value)


def test_both_parts_of_a_split_know_all_positives() -> None:
    """So that a held-out query is no negative of a document that it shares; also of a part, and
    after pickling."""
    pairs = PairDataset(
        [f"q{i}" for i in range(8)], ["d0", "d1"], range(8), [0, 1] * 4, negatives=[[1], [0]] * 4
    )
    rest, part = pairs.split(0.25)
    for each in (*rest.split(0.5), part, pickle.loads(pickle.dumps(rest))):
        assert each.positives("right", np.arange(2)).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
        assert each[0].negative_ids == (1 - each[0].right_id,)
    assert rest.identities() != part.identities()
    assert (
        Mixture({"rest": rest}).positives("left", rest.left_id).tolist()
        == rest.right_id[:, None].tolist()
    )
    for share, message in (
        (1.5, "share must be between 0 and 1, got 1.5; give a share"),
        (0.1, "1 left items are too few.*held_out=0"),
    ):
        with pytest.raises(DualencError, match=message):
            PairDataset(["q"], ["d"]).split(share)


ROWS = st.lists(st.lists(st.integers(0, 20), max_size=5), max_size=8)


@given(ROWS, st.data())
def test_take_and_padded_agree_with_lists(rows: list[list[int]], data: st.DataObject) -> None:
    picks = np.array(
        data.draw(
            st.lists(st.integers(0, max(len(rows) - 1, 0)), max_size=6) if rows else st.just([])
        ),
        int,
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
    assert [kept.row(i).tolist() for i in range(len(rows))] == [
        [v for v in row if v < bound] for row in rows
    ]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=30))
def test_from_pairs_groups_distinct_values_by_key(pairs: list[tuple[int, int]]) -> None:
    keys, values = np.array([k for k, _ in pairs], int), np.array([v for _, v in pairs], int)
    ragged = Ragged.from_pairs(keys, values, num_keys=7)
    assert [ragged.row(k).tolist() for k in range(7)] == [
        sorted({v for q, v in pairs if q == k}) for k in range(7)
    ]
