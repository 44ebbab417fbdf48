"""Splits by document: held-out documents are in no training pair, and folds hold out other ones."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest

from dualenc.data import PairDataset, fold_by_documents, split_by_documents
from dualenc.errors import DualencError


@pytest.mark.parametrize("seed", range(5))
def test_held_out_documents_are_in_no_training_pair(seed: int) -> None:
    """New queries: none of their documents is trained on; known ones: each is; positives stay known
    to all parts."""
    generator = np.random.default_rng(seed)
    left_id = generator.integers(0, 400, 1500)
    right_id = (generator.beta(1, 3, 1500) * 300).astype(int)
    pairs = PairDataset(
        [str(row) for row in range(400)], [str(row) for row in range(300)], left_id, right_id
    )
    parts = split_by_documents(pairs, 0.2, most=30, seed=seed)
    trained = set(parts.train.right_id.tolist())
    documents = defaultdict(set)
    for query, document in zip(left_id.tolist(), right_id.tolist()):
        documents[query].add(document)
    assert parts.new is not None
    assert parts.known is not None
    for query in set(parts.new.left_id.tolist()):
        assert documents[query].isdisjoint(trained)
        assert query not in parts.train.left_id
    for query in set(parts.known.left_id.tolist()):
        assert documents[query] <= trained
        assert query not in parts.train.left_id
    assert len(parts.train) >= 0.6 * len(pairs)
    assert 5 <= len(set(parts.new.left_id.tolist())) <= 30
    for query in set(parts.train.left_id.tolist()):
        listed = parts.train.positives("left", np.array([query]))[0].tolist()
        assert {document for document in listed if document >= 0} == documents[query]


def test_a_document_that_all_click_is_not_held_out() -> None:
    """Holding it out would leave nothing to train on."""
    pairs = PairDataset(
        [str(row) for row in range(50)],
        ["popular", "rare"],
        np.arange(50),
        np.r_[np.zeros(49, int), 1],
    )
    parts = split_by_documents(pairs, 0.1, most=100)
    assert parts.new is not None
    assert parts.new.right_id.tolist() == [1]
    assert len(parts.train) == 48  # and one query of the popular document is held out as known


@pytest.mark.parametrize(("share", "most"), [(2, 10), (float("nan"), 10), (-0.1, 10), (0.1, -1)])
def test_a_split_needs_a_share_and_a_count(share: float, most: int) -> None:
    pairs = PairDataset(["a", "b"], ["c", "d"], [0, 1], [0, 1])
    with pytest.raises(DualencError, match=r"share must be in|most must be 0 or more"):
        split_by_documents(pairs, share, most)


def test_folds_hold_out_every_document_before_one_twice() -> None:
    """Five folds of a fifth hold out the documents of about all queries, and each fold is a
    split."""
    pairs = PairDataset(
        [str(row) for row in range(200)],
        [str(row) for row in range(100)],
        np.arange(200),
        np.arange(200) % 100,
    )
    folds = fold_by_documents(pairs, folds=5, share=0.2, most=1000, seed=3)
    times: Counter[int] = Counter()
    for fold in folds:
        assert fold.new is not None
        assert fold.known is not None
        held_out = set(fold.new.right_id.tolist())
        assert len(fold.new) == 40
        assert held_out.isdisjoint(fold.train.right_id.tolist())
        assert set(fold.known.right_id.tolist()) <= set(fold.train.right_id.tolist())
        assert set(fold.known.left_id.tolist()).isdisjoint(fold.train.left_id.tolist())
        times.update(held_out)
    assert times == dict.fromkeys(range(100), 1)
    again = fold_by_documents(pairs, folds=6, share=0.2, most=1000, seed=3)
    for fold, same in zip(folds, again):
        assert fold.train.left_id.tolist() == same.train.left_id.tolist()
    assert len(again) == 6


def test_the_first_fold_is_the_split() -> None:
    pairs = PairDataset(
        [str(row) for row in range(60)],
        [str(row) for row in range(30)],
        np.arange(60),
        np.arange(60) // 2,
    )
    [fold] = fold_by_documents(pairs, folds=1, share=0.3, most=9, seed=4)
    split = split_by_documents(pairs, 0.3, 9, seed=4)
    for own, other in zip(fold, split):
        assert own is not None
        assert other is not None
        assert own.left_id.tolist() == other.left_id.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_pairs_that_were_trained_on_are_not_held_out(seed: int) -> None:
    """By enumeration: which queries may be new and known follows from an earlier model's pairs, no
    other is held out, and what is not held out is trained on."""
    generator = np.random.default_rng(seed)
    left_id, right_id = generator.integers(0, 400, 900), generator.integers(0, 300, 900)
    left_id, right_id = np.unique(np.stack([left_id, right_id]), axis=1)
    pairs = PairDataset(
        [str(row) for row in range(400)], [str(row) for row in range(300)], left_id, right_id
    )
    documents = defaultdict(set)
    for query, document in zip(left_id.tolist(), right_id.tolist()):
        documents[query].add(document)
    before = set(generator.permutation(100).tolist()[:60])  # queries of yesterday's log
    trained = {document for query in before for document in documents[query]}
    may_be_new = np.array([not documents[query] & trained for query in range(400)])
    may_be_known = np.array([query not in before for query in range(400)])
    fresh = {query for query in documents if may_be_known[query]}
    folds = fold_by_documents(
        *(pairs, 5, 0.2, 1000, seed), may_be_new=may_be_new, may_be_known=may_be_known
    )
    new_pairs = sum(len(documents[query]) for query in documents if may_be_new[query])
    times: Counter[int] = Counter()
    for fold in folds:
        assert fold.new is not None
        assert fold.known is not None
        new, known = (set(part.left_id.tolist()) for part in (fold.new, fold.known))
        assert all(may_be_new[query] for query in new)
        assert known <= fresh
        gone = {document for query in new for document in documents[query]}
        assert gone.isdisjoint(trained)
        # A share of the pairs that may be held out, and of the queries.
        assert sum(document in gone for document in right_id.tolist()) <= 0.2 * new_pairs
        assert len(known) >= min(len(new), round(0.2 * len(fresh)))
        expected = [
            (query, document)
            for query, document in zip(left_id.tolist(), right_id.tolist())
            if document not in gone and query not in known
        ]
        assert sorted(zip(fold.train.left_id.tolist(), fold.train.right_id.tolist())) == expected
        times.update(known)
    # Other queries each time, while there are any that can be.
    assert len(times) > 0.6 * len(fresh)


def test_masks_of_all_queries_change_nothing_but_the_number_of_known_ones() -> None:
    pairs = PairDataset(
        [str(row) for row in range(60)],
        [str(row) for row in range(30)],
        np.arange(60),
        np.arange(60) // 2,
    )
    everyone = np.ones(60, dtype=bool)
    plain = fold_by_documents(pairs, 3, 0.2, 50, seed=1)
    masked = fold_by_documents(pairs, 3, 0.2, 50, 1, may_be_new=everyone)
    for fold, same in zip(plain, masked, strict=True):
        for part, other in zip(fold, same, strict=True):
            assert part is not None
            assert other is not None
            assert part.left_id.tolist() == other.left_id.tolist()
    [nothing] = fold_by_documents(pairs, 1, 0.2, 50, may_be_new=~everyone, may_be_known=~everyone)
    assert nothing.held_out is None
    assert len(nothing.train) == 60
    [known] = fold_by_documents(pairs, 1, 0.2, 50, may_be_new=~everyone, may_be_known=everyone)
    assert known.new is None
    assert known.known is not None
    assert len(known.known) == 12
