"""Splits of pairs by document: held-out queries whose documents are in no training pair."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dualenc.data.pairs import PairDataset
from dualenc.data.ragged import Ragged, distinct
from dualenc.errors import DualencError
from dualenc.types import Integers


class DocumentSplit(NamedTuple):
    """Training pairs, and held-out queries divided by whether their documents are in training.

    A part without pairs is None.

        split_by_documents(pairs, share=0.1, most=1000).train

    Attributes:
        train: pairs to train on.
        new: queries whose documents are in no training pair.
        known: queries whose documents are all in training pairs.
        held_out: the queries of both parts.
    """

    train: PairDataset
    new: PairDataset | None
    known: PairDataset | None
    held_out: PairDataset | None


def split_by_documents(pairs: PairDataset, share: float, most: int, seed: int = 0) -> DocumentSplit:
    """Hold out queries by document, so that `new` measures documents that training never sees.

    For `new`, queries are drawn until their documents have about a `share` of the pairs. All pairs
    of these documents leave training; a query that would exceed the share is skipped. For `known`,
    the same number of queries is drawn, each of whose documents keeps a pair of another query.

    Args:
        pairs: pairs to split.
        share: share of the pairs to hold out for `new`, in [0, 1).
        most: maximum number of queries in each part.
        seed: random seed.

    Raises:
        DualencError: the share is outside [0, 1), or `most` is negative.
    """
    _check_sizes(share, most)
    order = np.random.default_rng(seed).permutation(distinct(pairs.left_id)).tolist()
    return _split(pairs, order, order, share * len(pairs), most)


def fold_by_documents(
    pairs: PairDataset,
    folds: int,
    share: float,
    most: int,
    seed: int = 0,
    *,
    may_be_new: np.ndarray | None = None,
    may_be_known: np.ndarray | None = None,
) -> list[DocumentSplit]:
    """Split several times by document; each split holds out other queries while there are any.

    Each is a split of `split_by_documents` whose queries are drawn in another order: first those
    that were held out least often in the splits before. The first one is that of
    `split_by_documents` with the same arguments.

        for fold in fold_by_documents(pairs, folds=5, share=0.2, most=200):
            print(len(fold.train), fold.new, fold.known)

    Where training begins at a model that was trained on some of the pairs, `may_be_new` and
    `may_be_known` say which queries can still measure it; the others stay in training, unless their
    documents are held out. The share is then one of the pairs of queries that may be new; and as
    these may be few, `known` has at least this share of the queries that may be known.

    Args:
        pairs: pairs to split.
        folds: number of splits.
        share: share of the pairs that each split holds out for `new`, in [0, 1).
        most: maximum number of queries in each part of a split.
        seed: random seed.
        may_be_new: (num_left,) True for queries that may be held out with their documents; None for
            all.
        may_be_known: (num_left,) True for queries that may be held out in `known`; None for all,
            and for as many as in `new`.

    Raises:
        DualencError: the share is outside [0, 1), or `most` is negative.
    """
    _check_sizes(share, most)
    is_new, is_known = (
        np.ones(pairs.num_left, dtype=bool) if mask is None else mask
        for mask in (may_be_new, may_be_known)
    )
    budget = share * int(is_new[pairs.left_id].sum())
    generator = np.random.default_rng(seed)
    queries = distinct(pairs.left_id)
    times_new = np.zeros(pairs.num_left, dtype=np.int64)
    times_held_out = np.zeros(pairs.num_left, dtype=np.int64)
    least_known = 0 if may_be_known is None else round(share * int(is_known[queries].sum()))
    splits: list[DocumentSplit] = []
    for _ in range(folds):
        drawn = generator.permutation(queries)
        # Stable: queries that were held out equally often stay in random order.
        order_new, order_known = (
            [query for query in drawn[np.argsort(times[drawn], kind="stable")] if may_be[query]]
            for times, may_be in ((times_new, is_new), (times_held_out, is_known))
        )
        split = _split(pairs, order_new, order_known, budget, most, min(most, least_known))
        splits.append(split)
        if split.new is not None:
            times_new[distinct(split.new.left_id)] += 1
        if split.held_out is not None:
            times_held_out[distinct(split.held_out.left_id)] += 1
    return splits


def _check_sizes(share: float, most: int) -> None:
    """Raise if the share is outside [0, 1) or the maximum number of queries is negative."""
    if not 0 <= share < 1:
        raise DualencError(
            f"share must be in [0, 1), got {share}",
            fix="give the share of the pairs to hold out",
        )
    if most < 0:
        raise DualencError(
            f"most must be 0 or more, got {most}",
            fix="give the maximum number of queries",
        )


def _split(
    pairs: PairDataset,
    order_new: list[int],
    order_known: list[int],
    budget: float,
    most: int,
    least_known: int = 0,
) -> DocumentSplit:
    """Return a split whose new and known queries are drawn in the given orders.

    Documents of about `budget` pairs are held out. `known` has as many queries as `new`, or
    `least_known` if these are more.
    """
    documents = Ragged.from_pairs(pairs.left_id, pairs.right_id, pairs.num_left)
    # Holding out a document costs all its pairs, also those of queries that stay in training.
    num_pairs = np.bincount(pairs.right_id, minlength=pairs.num_right)
    is_held_out = np.zeros(pairs.num_right, dtype=bool)
    is_held_out[_draw_documents(order_new, documents, num_pairs, budget, most)] = True
    rest = ~is_held_out[pairs.right_id]
    num_trained = np.bincount(pairs.left_id, rest, pairs.num_left)
    # Number of each query's pairs whose documents stay in training. A query with documents on both
    # sides of the split keeps only these pairs and is not used for evaluation.
    new = [query for query in order_new if num_trained[query] == 0][:most]
    whole = [query for query in order_known if num_trained[query] == documents.lengths[query]]
    num_remaining = np.bincount(pairs.right_id[rest], minlength=pairs.num_right)
    known = _draw_known(whole, documents, num_remaining, max(len(new), least_known))
    is_trained = rest & ~np.isin(pairs.left_id, known)
    parts: list[PairDataset | None] = []
    for queries in (new, known, new + known):
        rows = np.flatnonzero(np.isin(pairs.left_id, queries))
        parts.append(pairs.take(rows) if len(rows) else None)
    trained = pairs.take(np.flatnonzero(is_trained), positives_of=pairs)
    return DocumentSplit(trained, *parts)


def _draw_documents(
    order: list[int], documents: Ragged, num_pairs: Integers, budget: float, most: int
) -> list[int]:
    """Return documents of queries drawn until these documents have about `budget` pairs."""
    drawn: set[int] = set()
    num_queries = 0
    for query in order:
        if num_queries == most or budget < 1:
            break
        added = set(documents.row(query).tolist()) - drawn
        cost = num_pairs[list(added)].sum()
        # A query with a popular document may exceed the budget; a later one may still fit.
        if cost <= budget:
            budget -= cost
            drawn |= added
            num_queries += 1
    return sorted(drawn)


def _draw_known(order: list[int], documents: Ragged, num_pairs: Integers, most: int) -> list[int]:
    """Return up to `most` queries each of whose documents keeps a pair of another query.

    `num_pairs` (N,) is the number of pairs of each document.
    """
    remaining = num_pairs.copy()
    drawn: list[int] = []
    for query in order:
        own = documents.row(query)
        if len(drawn) == most:
            break
        # Each of its documents must keep a pair of a query that stays in training.
        if (remaining[own] > 1).all():
            remaining[own] -= 1
            drawn.append(query)
    return drawn
