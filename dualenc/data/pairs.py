"""Training pairs: which left item belongs to which right item, by stable ids."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualenc.data.identity import digest_of, items_identity
from dualenc.data.item_lists import item_key
from dualenc.data.ragged import Ragged, distinct
from dualenc.decoding import rgb_item
from dualenc.errors import BadSample, DualencError
from dualenc.types import Items, Modality, Side


def by_position(items: Items) -> Items:
    """Items by their positions; a pandas Series takes numbers for labels, which may be in another order."""
    is_pandas = hasattr(items, "iloc")
    return items.to_numpy() if is_pandas else items  # type: ignore[attr-defined]


class Pair(NamedTuple):
    """One training pair: its stable number in [0, M), its items' stable ids and the raw items.

    `negatives` are right items mined as hard negatives of this pair's left item, `negative_ids` their right ids.
    """

    index: int  # type: ignore[assignment]  # also the name of a tuple method
    left_id: int
    right_id: int
    left: Any
    right: Any
    negatives: tuple[Any, ...] = ()
    negative_ids: tuple[int, ...] = ()
    weight: float = 1.0


class PairDataset:
    """M training pairs over two collections of items; a map-style dataset whose row `i` is pair `i`.

        PairDataset(["a query", "another"], ["its document", "the other's"])

    Usable as it is with items in memory; every reader of this package is a subclass whose items lie in files.
    A collection may hold items that no pair names: `NegativeCache`, `FrozenCorpus` and chains with `proposals` of a
    number draw them as negatives, the other objectives only if they are mined.

    Args:
        left_items: raw left items by left id, (num_left,).
        right_items: raw right items by right id, (num_right,).
        left_id: each pair's left id, (M,); by default 0, 1, 2, …
        right_id: each pair's right id, (M,); by default 0, 1, 2, …
        negatives: each pair's mined negatives as right ids, M rows; none by default. A repeated one counts once.
        weights: (M,) factors of each pair's loss, 0 or more; by default 1.
        left_modality: "text", "image" or "vector".
        right_modality: "text", "image" or "vector".

    Attributes:
        views: True when left and right are the same image, to be augmented twice (unimodal training).
        skipped: number of bad samples that the reader left out.
    """

    views: bool = False
    skipped: int = 0

    def __init__(
        self,
        left_items: Items,
        right_items: Items,
        left_id: Sequence[int] | np.ndarray | None = None,
        right_id: Sequence[int] | np.ndarray | None = None,
        *,
        negatives: Ragged | Sequence[Sequence[int]] | None = None,
        weights: Sequence[float] | np.ndarray | None = None,
        left_modality: Modality = "text",
        right_modality: Modality = "text",
    ) -> None:
        self.left_items = by_position(left_items)
        self.right_items = by_position(right_items)
        self.left_modality = left_modality
        self.right_modality = right_modality
        self.left_id = _checked_ids("left_id", left_id, len(left_items))
        self.right_id = _checked_ids("right_id", right_id, len(right_items))
        if len(self.left_id) != len(self.right_id):
            counts = f"left_id has {len(self.left_id)} rows but right_id has {len(self.right_id)}"
            raise DualencError(f"{counts}; give one of each per pair")
        if not len(self.left_id):
            raise DualencError("no pairs: the data holds no row with a left and a right item")
        self.weights = None if weights is None else _checked_weights(weights, len(self))
        if negatives is not None and not isinstance(negatives, Ragged):
            negatives = Ragged.from_rows(negatives)
        self.negatives = negatives
        if negatives is not None:
            rows = len(negatives.lengths)
            if rows != len(self):
                raise DualencError(f"negatives has {rows} rows for {len(self)} pairs; give one per pair")
            _checked_ids("negatives", negatives.values, self.num_right)
            self.negatives = negatives.keep(negatives.first_in_row())
        self._positives: dict[Side, Ragged] = {}
        self._positives_of: PairDataset | None = None
        self._copies: dict[Side, np.ndarray] = {}

    @property
    def num_left(self) -> int:
        """The number of left items."""
        return len(self.left_items)

    @property
    def num_right(self) -> int:
        """The number of right items: the whole corpus."""
        return len(self.right_items)

    @property
    def left_dim(self) -> int | None:
        """Size of the left vectors; None for texts and images."""
        return len(self.left_items[0]) if self.left_modality == "vector" else None

    @property
    def right_dim(self) -> int | None:
        """Size of the right vectors; None for texts and images."""
        return len(self.right_items[0]) if self.right_modality == "vector" else None

    def __len__(self) -> int:
        return len(self.left_id)

    def __getitem__(self, index: int) -> Pair:
        if not -len(self) <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        # Negative positions count from the end, as in a list.
        index = int(index) % len(self)
        left_id = int(self.left_id[index])
        right_id = int(self.right_id[index])
        # Views share one image, which is decoded once.
        left = self.item("left", left_id)
        right = left if self.views else self.item("right", right_id)
        weight = 1.0 if self.weights is None else float(self.weights[index])
        negative_ids = () if self.negatives is None else tuple(self.negatives.row(index).tolist())
        negatives = tuple(self.item("right", item_id) for item_id in negative_ids)
        return Pair(index, left_id, right_id, left, right, negatives, negative_ids, weight)

    def items(self, side: Side) -> Items:
        """The raw items of a side."""
        return self.left_items if side == "left" else self.right_items

    def item_ids(self, side: Side) -> np.ndarray:
        """(M,) each pair's item of a side."""
        return self.left_id if side == "left" else self.right_id

    def item(self, side: Side, item_id: int) -> Any:
        """The raw item of one side by its id, images as RGB; a `BadSample` if it cannot be read."""
        return rgb_item(self.items(side)[int(item_id)], f"{side} item {int(item_id)}")

    def identities(self) -> dict[str, str]:
        """Checksums of "pairs" (their ids), "negatives", "left_items" and "right_items"."""
        left = items_identity(self.left_items, self.left_modality)
        right = left
        # Views have one collection: it is read once.
        if self.right_items is not self.left_items or self.right_modality != self.left_modality:
            right = items_identity(self.right_items, self.right_modality)
        return {
            "pairs": digest_of(self.left_id, self.right_id, self.weights),
            "negatives": "" if self.negatives is None else digest_of(*self.negatives),
            "left_items": left,
            "right_items": right,
        }

    def identity(self) -> str:
        """One checksum of `identities`."""
        return digest_of(self.identities().values())

    def positives(self, side: Side, ids: np.ndarray) -> np.ndarray:
        """All opposite-side ids that are positive with each id (n,) of a side: (n, K), ascending, padded by -1."""
        if self._positives_of is not None:
            return self._positives_of.positives(side, ids)
        if side not in self._positives:
            partners = self.item_ids("right" if side == "left" else "left")
            self._positives[side] = Ragged.from_pairs(self.item_ids(side), partners, len(self.items(side)))
        return self._positives[side].padded(np.asarray(ids, dtype=np.int64))

    def copies(self, side: Side) -> np.ndarray | None:
        """(N,) for each item of a side the opposite id of the same text, or -1; None unless both sides are texts."""
        if not self.left_modality == self.right_modality == "text":
            return None
        # Parts over the same items share it.
        if not self._copies:
            left = _text_hashes(self.left_items)
            right = _text_hashes(self.right_items)
            self._copies["left"] = _rows_of_equal(left, right)
            self._copies["right"] = _rows_of_equal(right, left)
        return self._copies[side]

    def not_negatives(self, side: Side, ids: np.ndarray) -> np.ndarray:
        """The `positives` of each id (n,) of a side, and the opposite copy of its text: (n, K), padded by -1."""
        positives = self.positives(side, ids)
        copies = self.copies(side)
        if copies is None or (copies[ids] < 0).all():
            return positives
        return np.column_stack([positives, copies[ids]])

    def split(self, share: float, seed: int = 0) -> tuple[PairDataset, PairDataset]:
        """Divide the pairs at random into the rest and about a share; all pairs of a left item are in one part."""
        items = np.random.default_rng(seed).permutation(distinct(self.left_id))
        chosen = items[: max(1, round(share * len(items)))]
        in_share = np.isin(self.left_id, chosen)
        if not 0 < share < 1:
            raise DualencError(f"share is {share}; give one between 0 and 1")
        if in_share.all():
            raise DualencError(f"{len(items)} left items are too few to hold {share} out; set held_out=0")
        # A query that is held out is no negative of a document that it shares with one that is trained on.
        return self.take(np.flatnonzero(~in_share), self), self.take(np.flatnonzero(in_share), self)

    def take(self, rows: np.ndarray, positives_of: PairDataset | None = None) -> PairDataset:
        """The pairs at these rows (n,) over the same items; `positives_of` knows more positives than these pairs."""
        part = copy.copy(self)
        part.left_id = self.left_id[rows]
        part.right_id = self.right_id[rows]
        part.weights = None if self.weights is None else self.weights[rows]
        if self.negatives is not None:
            part.negatives = self.negatives.take(rows)
        part._positives = {}
        part._positives_of = positives_of
        return part

    def relevant(self) -> PairDataset:
        """The pairs to evaluate on: all but those of weight 0, whose items do not match."""
        if self.weights is None:
            return self
        rows = np.flatnonzero(self.weights > 0)
        if not len(rows):
            raise DualencError("every weight is 0, so that no pair is relevant; give those that match more than 0")
        known = self._positives_of
        return self.take(rows, None if known is None else known.relevant())

    def pair_counts(self, side: Side) -> np.ndarray:
        """(N,) the number of an epoch's pairs that each item of a side occurs in."""
        return np.bincount(self.item_ids(side), minlength=len(self.items(side)))


def _text_hashes(items: Items) -> pa.Array:
    """(N,) a number for each text, the same for equal ones in this process; null where none can be read."""
    hashes = np.full(len(items), -1)  # which Python never returns
    for row in range(len(items)):
        with suppress(BadSample):
            text = item_key(items, row)
            if isinstance(text, str):
                hashes[row] = hash(text)
    return pa.array(hashes, mask=hashes == -1)


def _rows_of_equal(values: pa.Array, among: pa.Array) -> np.ndarray:
    """(n,) the first row of each value (n,) among others, -1 for none and for null."""
    return pc.index_in(values, value_set=among, skip_nulls=True).fill_null(-1).to_numpy().astype(np.int64)


def _checked_weights(weights: Sequence[float] | np.ndarray, count: int) -> np.ndarray:
    result = np.asarray(weights, dtype=np.float32)
    if result.shape != (count,):
        raise DualencError(f"weights has shape {result.shape}; give {count} numbers")
    if not (np.isfinite(result) & (result >= 0)).all():
        raise DualencError("weights: some are negative or not finite; give each pair 0 or more")
    return result


def _checked_ids(name: str, ids: Sequence[int] | np.ndarray | None, num_items: int) -> np.ndarray:
    result = np.arange(num_items) if ids is None else np.asarray(ids)
    if result.ndim != 1 or (result.size and not np.issubdtype(result.dtype, np.integer)):
        raise DualencError(f"{name}: give whole numbers (M,), not {result.dtype} {result.shape}")
    wrong = np.flatnonzero((result < 0) | (result >= num_items))
    if wrong.size:
        row = wrong[0]
        raise DualencError(f"{name}: {result[row]} at row {row} is outside [0, {num_items}), the positions")
    return result.astype(np.int64)
