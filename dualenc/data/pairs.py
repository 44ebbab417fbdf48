"""Training pairs: left and right items matched by stable ids."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from PIL import Image

from dualenc.data.item_lists import item_key
from dualenc.data.ragged import Ragged, distinct
from dualenc.data.store.identity import contents, digest_of, items_identity
from dualenc.errors import BadSample, DualencError
from dualenc.io.decoding import rgb_item
from dualenc.types import Integers, Items, Modality, Side, opposite


def by_position(items: Items) -> Items:
    """Return items indexable by position.

    A pandas Series indexes by label, so convert it to an array first.
    """
    is_pandas = hasattr(items, "iloc")
    return items.to_numpy() if is_pandas else items  # type: ignore[attr-defined]


class Pair(NamedTuple):
    """One training pair.

    A pair holds its number, the ids of its items and the raw items; ids stay the same across runs.

        PairDataset(["a query"], ["a document"])[0].right

    Attributes:
        index: number of the pair in [0, M).
        left_id: id of the left item.
        right_id: id of the right item.
        left: raw left item.
        right: raw right item.
        negatives: right items mined as hard negatives of the left item.
        negative_ids: right ids of `negatives`.
        weight: factor of the pair's loss.
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
    """M training pairs over two collections of items, a map-style dataset; row `i` is pair `i`.

    Use it directly for items in memory. Every reader of this package is a subclass whose items are
    stored in files.

        PairDataset(["a query", "another"], ["its document", "the other's"])

    A collection may hold items without a pair: `NegativeCache`, `FrozenCorpus` and chains with a
    number of `proposals` draw them as negatives, the other objectives use them only if they are
    mined. Equal texts, vectors and images in memory may have several ids, but are never negatives
    of each other's partners.

    Args:
        left_items: raw left items by left id, (num_left,).
        right_items: raw right items by right id, (num_right,).
        left_id: each pair's left id, (M,); by default 0, 1, 2, …
        right_id: each pair's right id, (M,); by default 0, 1, 2, …
        negatives: each pair's mined negatives as right ids, M rows; none by default. Duplicates
            count once.
        weights: (M,) factors >= 0 of each pair's loss; by default 1.
        left_modality: "text", "image" or "vector".
        right_modality: "text", "image" or "vector".

    Attributes:
        views: True if left and right are the same image, to be augmented twice (unimodal training).
        skipped: number of bad samples that the reader left out.
        has_distinct_items: True if equal items of a side already share an id, or the user turned
            deduplication off.

    Raises:
        DualencError: the pairs are empty, ids are out of range, or lengths differ.
    """

    views: bool = False
    skipped: int = 0
    has_distinct_items: bool = False

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
        self.left_items = _checked_items("left_items", by_position(left_items))
        self.right_items = _checked_items("right_items", by_position(right_items))
        self.left_modality = left_modality
        self.right_modality = right_modality
        self.left_id = _checked_ids("left_id", left_id, len(left_items))
        self.right_id = _checked_ids("right_id", right_id, len(right_items))
        if len(self.left_id) != len(self.right_id):
            raise DualencError(
                f"left_id has {len(self.left_id)} rows but right_id has {len(self.right_id)}",
                fix="give one of each per pair",
            )
        if not len(self.left_id):
            raise DualencError(
                "the data is empty",
                fix="give at least one pair of a left and a right item",
            )
        self.weights = None if weights is None else _checked_weights(weights, len(self))
        if negatives is not None and not isinstance(negatives, Ragged):
            negatives = Ragged.from_rows(negatives)
        self.negatives = negatives
        if negatives is not None:
            rows = len(negatives.lengths)
            if rows != len(self):
                raise DualencError(
                    f"negatives has {rows} rows for {len(self)} pairs",
                    fix="give one per pair",
                )
            _checked_ids("negatives", negatives.values, self.num_right)
            self.negatives = negatives.keep(negatives.first_in_row())
        self._positives: dict[Side, Ragged] = {}
        self._positives_of: PairDataset | None = None
        # These depend on the items alone, so all parts of these pairs (`take`) share them. The
        # hashes behind them take minutes for millions of items.
        self._contents: dict[Side, Integers] = {}
        self._alike: dict[Side, Alike | None] = {}

    @property
    def num_left(self) -> int:
        """Number of left items."""
        return len(self.left_items)

    @property
    def num_right(self) -> int:
        """Number of right items: the whole corpus."""
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
        # Both views are of one image, which is decoded once.
        left = self.item("left", left_id)
        right = left if self.views else self.item("right", right_id)
        weight = 1.0
        if self.weights is not None:
            weight = float(self.weights[index])
        negative_ids: tuple[int, ...] = ()
        if self.negatives is not None:
            negative_ids = tuple(self.negatives.row(index).tolist())
        return Pair(
            index,
            left_id,
            right_id,
            left,
            right,
            negatives=tuple(self.item("right", item_id) for item_id in negative_ids),
            negative_ids=negative_ids,
            weight=weight,
        )

    def items(self, side: Side) -> Items:
        """Return the raw items of a side."""
        return self.left_items if side == "left" else self.right_items

    def modality(self, side: Side) -> Modality:
        """Return the modality of a side's items."""
        return self.left_modality if side == "left" else self.right_modality

    @property
    def _are_texts(self) -> bool:
        return self.left_modality == self.right_modality == "text"

    def item_ids(self, side: Side) -> Integers:
        """Return each pair's item of a side, (M,)."""
        return self.left_id if side == "left" else self.right_id

    def item(self, side: Side, item_id: int) -> Any:
        """Return a raw item of one side by its id, images as RGB.

        Raises:
            BadSample: the item cannot be read.
        """
        return rgb_item(self.items(side)[int(item_id)], f"{side} item {int(item_id)}")

    def identities(self) -> dict[str, str]:
        """Return checksums of "pairs" (their ids), "negatives", "left_items" and "right_items"."""
        left = items_identity(self.left_items, self.left_modality)
        right = left
        # Views have one collection, which is read once.
        if self.right_items is not self.left_items or self.right_modality != self.left_modality:
            right = items_identity(self.right_items, self.right_modality)
        return {
            "pairs": digest_of(self.left_id, self.right_id, self.weights),
            "negatives": "" if self.negatives is None else digest_of(*self.negatives),
            "left_items": left,
            "right_items": right,
        }

    def identity(self) -> str:
        """Return one checksum of all `identities`."""
        return digest_of(self.identities().values())

    def positives(self, side: Side, ids: Integers) -> Integers:
        """Return the opposite-side ids that are positive with each id (n,) of a side.

        The result is (n, K), ascending, padded with -1.
        """
        if self._positives_of is not None:
            return self._positives_of.positives(side, ids)
        if side not in self._positives:
            partners = self.item_ids(opposite(side))
            self._positives[side] = Ragged.from_pairs(
                self.item_ids(side), partners, len(self.items(side))
            )
        return self._positives[side].padded(np.asarray(ids, dtype=np.int64))

    def contents(self, side: Side) -> Integers:
        """Return a number for each item of a side, (N,), the same for equal items.

        If both sides are texts, numbers are comparable across sides.
        """
        if not self._contents:
            left = self._hashes("left")
            right = left if self.views else self._hashes("right")
            # Texts of both sides are numbered together, to find copies across sides.
            if self._are_texts:
                numbers = _numbers_of_hashes([left, right])
            else:
                numbers = [_numbers_of_hashes([part])[0] for part in (left, right)]
            self._contents["left"], self._contents["right"] = numbers
        return self._contents[side]

    def _hashes(self, side: Side) -> pa.Array:
        """Return a hash for each item of a side, (N,), valid in this process; null if unread."""
        items = self.items(side)
        # Readers have compared images in files, which takes long; do not read them again.
        are_files = self.modality(side) == "image" and not isinstance(items, (list, tuple))
        # Distinct texts are hashed all the same: a query may be equal to a document.
        if are_files or (self.has_distinct_items and not self._are_texts):
            return pa.nulls(len(items), pa.int64())
        return _item_hashes(items)

    def first_equal(self, side: Side) -> Integers:
        """Return the id of the first item of a side that is equal to each of them, (N,)."""
        numbers = self.contents(side)
        if self.has_distinct_items:
            return np.arange(len(numbers))
        _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
        return first[inverse]

    def copies(self, side: Side) -> Integers | None:
        """Return the first opposite id with the same text as each item of a side, (N,), or -1.

        None unless both sides are texts.
        """
        if not self._are_texts:
            return None
        return _first_rows(self.contents(side), self.contents(opposite(side)))

    def not_negatives(self, side: Side, ids: Integers) -> Integers:
        """Return the opposite-side ids that must not be negatives of each id (n,) of a side.

        These are the `positives` of all items equal to it, items equal to one of these, and
        opposite copies of its text; (n, K), padded with -1.
        """
        alike = self._alike_positives(side)
        if alike is not None:
            return alike.padded(np.asarray(ids, dtype=np.int64))
        positives = self.positives(side, ids)
        copies = self.copies(side)
        if copies is None or (copies[ids] < 0).all():
            return positives
        return np.column_stack([positives, copies[ids]])

    def _alike_positives(self, side: Side) -> Alike | None:
        """Return the positives of a side by contents; None if all its items are distinct."""
        if self.views:
            return None
        if self._positives_of is not None:
            return self._positives_of._alike_positives(side)
        if side not in self._alike:
            own = self.contents(side)
            other = self.contents(opposite(side))
            # Without equal items, `positives` by id says the same and costs less.
            is_distinct = all(len(distinct(numbers)) == len(numbers) for numbers in (own, other))
            self._alike[side] = None
            if not is_distinct:
                shared = np.zeros(0, np.int64)
                if self._are_texts:
                    shared = np.intersect1d(own, other)
                # Work on numbers of contents in place of ids. A text on both sides is a partner
                # of itself: a query's copy among the documents must not be its negative.
                pair_keys = own[self.item_ids(side)]
                pair_values = other[self.item_ids(opposite(side))]
                keys = np.concatenate([pair_keys, shared])
                values = np.concatenate([pair_values, shared])
                count = int(max(own.max(), other.max())) + 1
                partners = Ragged.from_pairs(keys, values, count)
                members = Ragged.from_pairs(other, np.arange(len(other)), count)
                self._alike[side] = Alike(own, partners, members)
        return self._alike[side]

    def split(self, share: float, seed: int = 0) -> tuple[PairDataset, PairDataset]:
        """Split the pairs at random into the rest and about a `share` of them.

        All pairs of a left item, and of left items equal to it, stay together.

        Args:
            share: share of the left items to hold out, in (0, 1).
            seed: random seed.

        Raises:
            DualencError: the share is outside (0, 1), or would leave no training pair.
        """
        # Equal items, such as one query with ids of several sessions, stay in one part.
        first = self.first_equal("left")[self.left_id]
        items = np.random.default_rng(seed).permutation(distinct(first))
        chosen = items[: max(1, round(share * len(items)))]
        in_share = np.isin(first, chosen)
        if not 0 < share < 1:
            raise DualencError(
                f"share must be between 0 and 1, got {share}", fix="give a share such as 0.1"
            )
        if in_share.all():
            raise DualencError(
                f"{len(items)} left items are too few to hold {share} out",
                fix="set held_out=0",
            )
        # Held-out queries stay known positives, so that a document shared with a training query
        # never treats them as negatives.
        return self.take(np.flatnonzero(~in_share), self), self.take(np.flatnonzero(in_share), self)

    def take(self, rows: Integers, positives_of: PairDataset | None = None) -> PairDataset:
        """Return the pairs at these rows (n,), over the same items.

        Args:
            rows: rows of pairs.
            positives_of: pairs whose positives remain known; by default only those returned.
        """
        part = copy.copy(self)
        part.left_id = self.left_id[rows]
        part.right_id = self.right_id[rows]
        part.weights = None if self.weights is None else self.weights[rows]
        if self.negatives is not None:
            part.negatives = self.negatives.take(rows)
        # A shallow copy shares the items and the caches that depend on items only; the positives
        # depend on the pairs.
        part._positives = {}
        part._alike = {}
        part._positives_of = positives_of
        return part

    def merged(self) -> PairDataset:
        """Return the same pairs with each item replaced by the first equal one.

        The other copies are then in no pair.
        """
        lefts = self.first_equal("left")
        rights = self.first_equal("right")
        known = None if self._positives_of is None else self._positives_of.merged()
        part = self.take(np.arange(len(self)), known)
        part.left_id = lefts[self.left_id]
        part.right_id = rights[self.right_id]
        return part

    def relevant(self) -> PairDataset:
        """Return the pairs to evaluate on; excludes pairs with weight 0 (labeled non-matching)."""
        if self.weights is None:
            return self
        rows = np.flatnonzero(self.weights > 0)
        if not len(rows):
            raise DualencError(
                "every weight is 0, so no pair is relevant",
                fix="give matching pairs a weight above 0",
            )
        known = self._positives_of
        return self.take(rows, None if known is None else known.relevant())

    def pair_counts(self, side: Side) -> Integers:
        """Return the number of pairs per epoch in which each item of a side occurs, (N,)."""
        return np.bincount(self.item_ids(side), minlength=len(self.items(side)))


class Alike(NamedTuple):
    """Positives by contents.

    Items are numbered by contents, the same number for equal ones.

        Alike(own, partners, members).padded(np.array([0]))

    Attributes:
        own: number of each own item, (N,).
        partners: numbers of the partners of each number.
        members: opposite items with each number.
    """

    own: Integers
    partners: Ragged
    members: Ragged

    def padded(self, ids: Integers) -> Integers:
        """Return the opposite items of some own items (n,) as (n, K), padded with -1."""
        partners = self.partners.take(self.own[ids])
        members = self.members.take(partners.values)
        # Members of all partners of an item are adjacent, so its row only needs other offsets.
        rows = Ragged(members.values, members.offsets[partners.offsets])
        return rows.padded(np.arange(len(ids)))


def _item_hashes(items: Items) -> pa.Array:
    """Return a hash for each text, vector or image, (N,); null if it cannot be read."""
    # Python's `hash` never returns -1. It is 64 bits and salted per process, which is enough to
    # compare items within one.
    hashes = np.full(len(items), -1)
    for row in range(len(items)):
        with suppress(BadSample):
            item = item_key(items, row)
            if isinstance(item, (str, bytes)):
                hashes[row] = hash(item)
            elif isinstance(item, np.ndarray):
                hashes[row] = hash(np.ascontiguousarray(item, dtype=np.float32).tobytes())
            elif isinstance(item, Image.Image):
                hashes[row] = hash(contents(item))
    return pa.array(hashes, mask=hashes == -1)


def _numbers_of_hashes(parts: list[pa.Array]) -> list[Integers]:
    """Assign numbers from 0 to the values of arrays, equal ones to equal values.

    Each null gets a unique number.
    """
    joined = pa.chunked_array(parts).combine_chunks()
    codes = joined.dictionary_encode().indices
    numbers = codes.fill_null(-1).to_numpy().astype(np.int64)
    # An item that cannot be read is equal to none, not even to another unreadable one.
    is_null = numbers < 0
    first_unused = numbers.max(initial=-1) + 1
    numbers[is_null] = first_unused + np.arange(is_null.sum())
    return np.split(numbers, [len(parts[0])])[: len(parts)]


def _first_rows(values: Integers, among: Integers) -> Integers:
    """Return the first row of each value (n,) among others (N,), -1 if there is none."""
    if not len(among):
        return np.full(len(values), -1)
    # A binary search in the distinct values: memory does not depend on their range.
    numbers, first = np.unique(among, return_index=True)
    # Values beyond the last one are clipped to it, and then differ from it.
    positions = np.searchsorted(numbers, values).clip(max=len(numbers) - 1)
    is_present = numbers[positions] == values
    return np.where(is_present, first[positions], -1)


def _checked_items(name: str, items: Items) -> Items:
    """Return items if they have a length and are indexed by position."""
    is_mapping = isinstance(items, (Mapping, str, bytes))
    if is_mapping or not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        raise DualencError(
            f"{name} is of type {type(items).__name__}",
            fix="give a list, or another sequence with a length",
        )
    return items


def _checked_weights(weights: Sequence[float] | np.ndarray, count: int) -> np.ndarray:
    result = np.asarray(weights, dtype=np.float32)
    if result.shape != (count,):
        raise DualencError(
            f"weights has shape {result.shape}",
            fix=f"give {count} numbers",
        )
    if not (np.isfinite(result) & (result >= 0)).all():
        raise DualencError("weights must be finite and >= 0", fix="give each pair 0 or more")
    return result


def _checked_ids(name: str, ids: Sequence[int] | Integers | None, num_items: int) -> Integers:
    result = np.arange(num_items) if ids is None else np.asarray(ids)
    if result.ndim != 1 or (result.size and not np.issubdtype(result.dtype, np.integer)):
        raise DualencError(
            f"has type {result.dtype} and shape {result.shape}",
            fix="give integers of shape (M,)",
            where=name,
        )
    wrong = np.flatnonzero((result < 0) | (result >= num_items))
    if wrong.size:
        row = wrong[0]
        raise DualencError(
            f"{result[row]} at row {row} is outside [0, {num_items})",
            fix="give positions of items",
            where=name,
        )
    return result.astype(np.int64)
