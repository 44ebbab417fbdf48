"""Showings and clicks by pair and position, and whether the log connects the positions.

Shapes: n showings, P distinct pairs of a query and a document, K positions, C cells, which are
distinct (pair, place); a place is a position, or several of them far down a results list.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph

from dualenc.types import Integers

NUM_SINGLE, POOLED_WITHIN = 20, 1.25
"""Positions below these are pooled if they differ by less than this factor."""
CONNECTED = 0.9
"""Least share of the showings that must be at positions that are connected."""
OFTEN, MIN_OFTEN = 3, 100
"""A position with so many pairs that were shown there so often tells clicks of relevant documents
from chance by itself: three showings identify a mixture of two click rates."""


class Counts(NamedTuple):
    """Showings and clicks of C cells (pair, place), where places are numbered from 0.

    Attributes:
        pairs: distinct (query, document), (P, 2).
        pair: row of the pair of each cell, (C,).
        place: number of the place of each cell, (C,).
        clicks: clicks of each cell, (C,).
        misses: showings without a click of each cell, (C,).
        usual: usual place of each pair, (P,); that with most showings.
        place_of: place of positions 1, 2, …, (K,); -1 without a showing.
        moved: number of pairs seen at two positions or more.
        connected: share of the showings with a position that are at places of these cells.
    """

    pairs: Integers
    pair: Integers
    place: Integers
    clicks: np.ndarray
    misses: np.ndarray
    usual: Integers
    place_of: Integers
    moved: int
    connected: float

    @property
    def num_places(self) -> int:
        """Number of places that have a showing."""
        return int(self.place_of.max(initial=-1)) + 1

    def of_positions(self, values: np.ndarray) -> np.ndarray:
        """Return the value of each position's place, (K,); NaN without a showing."""
        padded = np.append(values, np.nan)
        return padded[self.place_of]

    def at_places(self, values: np.ndarray) -> np.ndarray:
        """Sum values of cells (C,) by place."""
        return np.bincount(self.place, values, self.num_places)

    def of_pairs(self, values: np.ndarray) -> np.ndarray:
        """Sum values of cells (C,) by pair."""
        return np.bincount(self.pair, values, len(self.pairs))

    def unidentified(self) -> str | None:
        """Return why relevance and position cannot be told apart, or None if they can."""
        if not self.num_places:
            return "the log has no positions"
        if not self.clicks.any():
            return "the log has no click"
        if not self.misses.any():
            return "the log has no showing without a click"
        if not self.moved and self.connected < 1:
            return "every pair was shown at one position only, and seldom"
        if self.connected < CONNECTED:
            return (
                "pairs that were shown at several positions, or often, connect only positions with "
                f"{100 * self.connected:.0f}% of the showings"
            )
        return None


def count(
    query: Integers, document: Integers, position: Integers, clicked: np.ndarray, pool: bool
) -> Counts:
    """Count showings and clicks by pair and place.

    Args:
        query: row of the query of each showing, (n,).
        document: row of the document, (n,).
        position: position from 1, (n,); 0 where unknown.
        clicked: above 0 where the showing had an action, (n,).
        pool: whether θ will be estimated: positions far down then share a place, and only the
            largest set of places that pairs connect is counted. Else all positions are.
    """
    query, document, position = (np.asarray(own, np.int64) for own in (query, document, position))
    clicked = np.asarray(clicked) > 0
    pairs, pair = distinct_pairs(query, document)
    connected = 1.0
    is_used = position > 0
    seen, _ = distinct_pairs(pair[is_used], position[is_used])
    moved = int((np.bincount(seen[:, 0], minlength=1) > 1).sum())
    if pool and is_used.any():
        pools = _pool(position)
        part = _connected(pair[is_used], pools[is_used])
        connected = float(np.isin(pools[is_used], part).mean())
        is_used &= np.isin(pools, part)
    pair, position, clicked = pair[is_used], position[is_used], clicked[is_used]
    place = np.unique(_pool(position) if pool else position, return_inverse=True)[1]
    cells, cell = distinct_pairs(pair, place)
    shown = np.bincount(cell, minlength=len(cells)).astype(float)
    clicks = np.bincount(cell, clicked, len(cells))
    # Sorted by pair and then by showings, the last cell of a pair is its usual one.
    order = np.lexsort((-cells[:, 1], shown, cells[:, 0]))
    usual = np.zeros(len(pairs), np.int64)
    usual[cells[order, 0]] = cells[order, 1]
    place_of = np.full(position.max(initial=0), -1)
    place_of[position - 1] = place
    return Counts(
        pairs,
        cells[:, 0],
        cells[:, 1],
        clicks,
        shown - clicks,
        usual,
        place_of,
        moved,
        connected,
    )


def _connected(pair: Integers, pools: Integers) -> Integers:
    """Return the places with most showings (n,) among sets of places that are connected.

    Pairs that were shown at several places connect these, since their relevance is the same. So do
    repeated showings: the classes of relevant and other pairs are the same at all places.
    """
    places, place = np.unique(pools, return_inverse=True)
    cells, cell = distinct_pairs(pair, place)
    often = cells[np.bincount(cell) >= OFTEN, 1]
    repeated = np.flatnonzero(np.bincount(often, minlength=len(places)) >= MIN_OFTEN)
    # The first place of a pair is connected with its other ones.
    first = np.minimum.reduceat(cells[:, 1], np.flatnonzero(np.diff(cells[:, 0], prepend=-1)))
    starts = first[np.cumsum(np.diff(cells[:, 0], prepend=-1) > 0) - 1]
    size = len(places)
    ends = np.concatenate([cells[:, 1], repeated[1:]])
    starts = np.concatenate([starts, repeated[:-1]])
    graph = scipy.sparse.coo_array((np.ones(len(ends)), (starts, ends)), (size, size))
    label = scipy.sparse.csgraph.connected_components(graph, directed=False)[1]
    showings = np.bincount(label[place])
    return places[label == showings.argmax()]


def distinct_pairs(first: Integers, second: Integers) -> tuple[Integers, Integers]:
    """Return the distinct pairs of two arrays (n,), ascending (P, 2), and each row's among them."""
    span = int(second.max(initial=0)) + 1
    keys, row = np.unique(first * span + second, return_inverse=True)
    return np.stack(np.divmod(keys, span), axis=1), row


def _pool(position: Integers) -> Integers:
    """Return a number for each position (n,), the same for those far down that share θ."""
    ratio = np.maximum(position, NUM_SINGLE) / NUM_SINGLE
    deeper = np.log(ratio) // math.log(POOLED_WITHIN)
    return np.minimum(position, NUM_SINGLE + 1) + deeper.astype(np.int64)
