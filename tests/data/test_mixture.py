"""Several sources as one: ids, items, prompts and columns are those of the sources, one after the
other."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data import ImageViews, Mixture, PairDataset, VectorPairs
from dualenc.data.corpus import corpora
from dualenc.data.store.identity import items_identity
from dualenc.errors import DualencError
from tests.helpers.make import picture


def texts(name, count):
    return [f"{name} {i}" for i in range(count)]


def pairs_of(name, left, right, left_id=None, right_id=None, **columns):
    return PairDataset(
        texts(f"{name} left", left), texts(f"{name} right", right), left_id, right_id, **columns
    )


@pytest.fixture
def one():
    return pairs_of("one", 3, 5, [0, 0, 2, 1], [4, 3, 0, 0])


@pytest.fixture
def two():
    return pairs_of("two", 2, 2)


def test_pairs_of_a_source_follow_those_of_the_sources_before(one, two):
    both = Mixture({"one": one, "two": two})
    assert (len(both), both.num_left, both.num_right) == (6, 5, 7)
    assert both.left_id.tolist() == [0, 0, 2, 1, 3, 4]
    assert both.right_id.tolist() == [4, 3, 0, 0, 5, 6]
    expected = [one[i] for i in range(4)] + [two[i] for i in range(2)]
    for index, (pair, own) in enumerate(zip([both[i] for i in range(6)], expected, strict=True)):
        assert (pair.index, pair.left, pair.right) == (index, own.left, own.right)
        assert both.item("left", pair.left_id) == own.left
        assert both.item("right", pair.right_id) == own.right


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_positives_are_those_of_the_source_shifted(sizes, data):
    sources, firsts, first = {}, [], 0
    for number, size in enumerate(sizes):
        ids = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
        others = data.draw(st.lists(st.integers(0, size - 1), min_size=len(ids), max_size=len(ids)))
        sources[f"s{number}"] = pairs_of(f"{number}", size, size, ids, others)
        firsts.append(first)
        first += size
    both = Mixture(sources)
    for start, source in zip(firsts, sources.values(), strict=True):
        every = np.arange(source.num_left)
        for side in ("left", "right"):
            own, shifted = source.positives(side, every), both.positives(side, every + start)
            assert [[i + start for i in row if i >= 0] for row in own.tolist()] == [
                [i for i in row if i >= 0] for row in shifted.tolist()
            ]


def test_prompts_are_put_before_the_texts_of_their_source_and_before_mined_negatives(one):
    mined = pairs_of("mined", 2, 3, [0, 1], [0, 1], negatives=[[2], [2, 0]])
    both = Mixture(
        {"one": one, "mined": mined},
        left_prompts={"mined": "query: "},
        right_prompts={"mined": "passage: "},
    )
    assert both[0].left == "one left 0"
    pair = both[5]
    assert pair.left == "query: mined left 1"
    assert pair.right == "passage: mined right 1"
    assert pair.negatives == ("passage: mined right 2", "passage: mined right 0")
    assert pair.negative_ids == (7, 5)
    assert both.prompts == {"mined": ("query: ", "passage: ")}
    assert both.item("right", pair.negative_ids[0]) == "passage: mined right 2"


def test_columns_that_a_source_does_not_have_are_filled(one):
    mined = pairs_of("mined", 2, 2, negatives=[[1], [0]], weights=[0.5, 2.0])
    both = Mixture({"one": one, "mined": mined})
    assert both.weights.tolist() == [1, 1, 1, 1, 0.5, 2]
    assert [both[i].negative_ids for i in range(6)] == [(), (), (), (), (6,), (5,)]
    plain = Mixture({"one": one})
    assert plain.weights is plain.negatives is None


def test_items_are_counted_as_often_as_their_pairs_come(one, two):
    both = Mixture({"one": one, "two": two}, weights={"two": 2.5})
    assert both.pair_counts("right").tolist() == [2, 0, 0, 1, 1, 2.5, 2.5]
    assert both.pair_counts("left").tolist() == [2, 1, 1, 2.5, 2.5]


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, True),
        ({"weights": {"two": 1}}, True),
        ({"weights": {"two": 2}}, False),
        ({"batches": "one_source"}, False),
    ],
)
def test_only_weights_and_batches_of_one_source_need_batches_of_their_own(one, two, options, plain):
    assert Mixture({"one": one, "two": two}, **options).is_plain is plain


def test_identities_tell_what_has_changed(one, two):
    def of(**options):
        return Mixture({"one": one, "two": two}, **options).identities()

    def differ(first, second):
        return {
            name for name in first.keys() | second.keys() if first.get(name) != second.get(name)
        }

    assert of() == of(weights={"one": 1.0})
    assert differ(of(), of(weights={"two": 2})) == {"two.weight"}
    assert differ(of(), of(left_prompts={"one": "q: "})) == {"one.prompts"}
    assert differ(of(), of(batches="one_source")) == {"batches"}
    other = pairs_of("two", 2, 2)
    other.right_items[1] = "something else"
    assert differ(of(), Mixture({"one": one, "two": other}).identities()) == {"two.right_items"}
    prompted = Mixture({"one": one, "two": two}, left_prompts={"two": "q: "})
    texts = ["q: " + text if "two" in text else text for text in [*one.left_items, *two.left_items]]
    assert items_identity(prompted.left_items) == items_identity(texts)
    assert prompted.describe() == [
        "one (4 pairs, weight 1)",
        "two (2 pairs, weight 1, left prompt 'q: ')",
    ]
    left, right = corpora(prompted)
    assert (len(left), len(right)) == (prompted.num_left, prompted.num_right) == (5, 7)
    assert [pair.left for pair in pickle.loads(pickle.dumps(prompted))][-1] == "q: two left 1"
    assert "sources" in differ(of(), Mixture({"two": two, "one": one}).identities())


def test_vectors_and_views_can_be_mixed(tmp_path):
    for name, count in (("a", 3), ("b", 4)):
        np.save(
            tmp_path / f"{name}.npy",
            np.random.default_rng(count).normal(size=(count, 6)).astype(np.float32),
        )
    a, b = (
        VectorPairs(str(tmp_path / f"{name}.npy"), str(tmp_path / f"{name}.npy")) for name in "ab"
    )
    both = Mixture({"a": a, "b": b})
    assert (both.left_dim, both.right_dim) == (6, 6)
    assert np.array_equal(both[3].left, b[0].left)
    images = Mixture(
        {"dark": ImageViews([picture(1), picture(2)]), "light": ImageViews([picture(200)])}
    )
    assert images.views
    assert images[2].left is images[2].right


IMAGES = PairDataset([picture(1)], ["a caption"], left_modality="image")
VECTORS = [
    PairDataset(np.ones((1, d)), np.ones((1, 4)), left_modality="vector", right_modality="vector")
    for d in (3, 4)
]


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ({}, {}, "sources is empty; give at least one"),
        ({"a/b": "one"}, {}, "'a/b' is not a valid source name; use letters, digits, _ and -"),
        (
            {"a": "one", "b": Mixture({"x": VECTORS[0]})},
            {},
            "source b is itself a mixture; list its sources",
        ),
        (
            {"a": "one", "b": "one"},
            {"weights": {"c": 1}},
            "weights names 'c', which is not a source; the sources are a, b",
        ),
        (
            {"a": "one"},
            {"left_prompts": {"c": ""}},
            "left_prompts names 'c', which is not a source; the sources are a",
        ),
        ({"a": "one"}, {"weights": {"a": 0}}, "the weight of a is 0; give a number above 0"),
        ({"a": "one"}, {"weights": {"a": float("nan")}}, "the weight of a is nan"),
        (
            {"a": "one", "b": IMAGES},
            {},
            "the left side of b is image, but a's is text; mix sources of one kind",
        ),
        (
            {"a": VECTORS[0], "b": VECTORS[1]},
            {},
            "left side of b is vectors of 4 numbers, but a's is vectors of 3",
        ),
        (
            {"a": VECTORS[0]},
            {"left_prompts": {"a": "q: "}},
            "left_prompts names a, whose left side is vector",
        ),
        (
            {"a": ImageViews([picture(1)]), "b": IMAGES},
            {},
            "left side of b is image, but a's is images alone",
        ),
    ],
)
def test_what_does_not_fit_together_is_told_in_one_line(one, sources, options, message):
    given_sources = {name: one if pairs == "one" else pairs for name, pairs in sources.items()}
    with pytest.raises(DualencError, match=message):
        Mixture(given_sources, **options)
