"""Text ids for objectives: add an id column to a `datasets.Dataset`; equal texts share an id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset
from pyarrow.types import is_list
from torch import Tensor

from dualenc.data.ragged import Ragged
from dualenc.errors import DualencError
from dualenc.types import Side

ROWS_PER_BLOCK = 2**16
"""Rows of a data set whose texts are in memory at a time."""


class PairTexts:
    """The distinct texts of a data set's pairs by id, with their counts and known positives.

    `with_ids` makes one. Calling it with a side and ids returns texts.

    Example:
        dataset, texts = with_ids(dataset)
        texts("left", torch.tensor([0, 2]))  # the anchors with ids 0 and 2

    Args:
        left: left texts, indexed by id.
        right: right texts, indexed by id.
        left_id: (M,) left id of each pair.
        right_id: (M,) right id of each pair.
    """

    def __init__(
        self, left: pa.Array, right: pa.Array, left_id: np.ndarray, right_id: np.ndarray
    ) -> None:
        self.texts: dict[Side, pa.Array] = {"left": left, "right": right}
        self.counts = (
            np.bincount(left_id, minlength=len(left)),
            np.bincount(right_id, minlength=len(right)),
        )
        # A text must not be the negative of an equal text on the other side.
        copies = pc.index_in(left, value_set=right)
        left_id = np.concatenate([left_id, np.flatnonzero(copies.is_valid())])
        right_id = np.concatenate([right_id, copies.drop_null().to_numpy()])
        self._not_negatives: dict[Side, Ragged] = {
            "left": Ragged.from_pairs(left_id, right_id, len(left)),
            "right": Ragged.from_pairs(right_id, left_id, len(right)),
        }

    @property
    def num_left(self) -> int:
        """Number of distinct left texts."""
        return len(self.texts["left"])

    @property
    def num_right(self) -> int:
        """Number of distinct right texts."""
        return len(self.texts["right"])

    def not_negatives(self, side: Side, ids: Tensor) -> Tensor:
        """Return the ids that must not be negatives of items of a side, (n, K), padded with -1.

        Args:
            side: side of the items; the returned ids belong to the other side.
            ids: (n,) ids of the items.
        """
        listed = self._not_negatives[side].padded(ids.cpu().numpy())
        return torch.from_numpy(listed).to(ids.device)

    def are_named_by(self, dataset: Dataset) -> bool:
        """Return True if every row's `label` column holds the ids of its first texts."""
        names = [name for name in dataset.column_names if name != "label"]
        if "label" not in dataset.column_names:
            return False
        # In blocks: the texts of a large data set do not fit into memory.
        tables = dataset.with_format("arrow").iter(ROWS_PER_BLOCK)
        return all(self._are_named_in(table, names) for table in tables)

    def _are_named_in(self, table: pa.Table, names: Sequence[str]) -> bool:
        labels = table["label"]
        if not is_list(labels.type) or not pa.types.is_integer(labels.type.value_type):
            return False
        lengths = pc.unique(pc.list_value_length(labels)).to_pylist()
        values = pc.list_flatten(labels)
        # Every row must have equally many ids, for an anchor, a positive and any negatives.
        if len(lengths) != 1 or not 2 <= (lengths[0] or 0) <= len(names) or values.null_count:
            return False
        ids = values.to_numpy().reshape(-1, lengths[0])
        for column, name in enumerate(names[: lengths[0]]):
            # The first column holds the anchors; all others hold right texts.
            texts = self.texts["right" if column else "left"]
            own = ids[:, column]
            if own.min() < 0 or own.max() >= len(texts):
                return False
            if not _is_full_text(table[name]):
                return False
            named = texts.take(pa.array(own))
            # Arrow compares only columns of one string type.
            actual = table[name].cast(pa.large_string())
            if not pc.all(pc.equal(actual, named)).as_py():
                return False
        return True

    def __call__(self, side: Side, ids: Tensor) -> list[str]:
        """Return the texts of a side with the given ids (n,)."""
        rows = pa.array(ids.cpu().numpy())
        return self.texts[side].take(rows).to_pylist()


def with_ids(dataset: Dataset) -> tuple[Dataset, PairTexts]:
    """Add a column `label` with the ids [anchor, positive, *negatives]; equal texts share an id.

    Ids depend on the order of the rows. Keep the order for runs that resume, and let the trainer
    shuffle.

    Args:
        dataset: one split with text columns: anchor, positive, and any number of negatives.

    Returns:
        The data set with ids, and the texts by id.

    Raises:
        DualencError: the columns are not texts, or a text is missing.
    """
    if not isinstance(dataset, Dataset):
        raise DualencError(
            f"the data set is of type {type(dataset).__name__}",
            fix="give one split as a datasets.Dataset",
        )
    names = dataset.column_names
    if len(names) < 2 or "label" in names:
        raise DualencError(
            f"the columns are {', '.join(names)}",
            fix="give anchor, positive and negatives, without a label",
        )
    table = dataset.with_format("arrow")[:]
    for name in names:
        column = table[name]
        if not _is_text(column):
            raise DualencError(
                f"column {name} holds {column.type}, not texts",
                fix=f"remove it: dataset.remove_columns({name!r})",
            )
        if column.null_count:
            raise DualencError(
                f"column {name} has {column.null_count} rows without a text",
                fix=f"remove them: dataset.filter(lambda row: row[{name!r}] is not None)",
            )
    anchors = table[names[0]]
    left_ids, left = _distinct(anchors.chunks)
    right_chunks = []
    for name in names[1:]:
        right_chunks += table[name].chunks
    right_ids, right = _distinct(right_chunks)
    ids = np.vstack([left_ids, right_ids.reshape(-1, len(anchors))])
    texts = PairTexts(left, right, ids[0], ids[1])
    labels = pa.array(ids.T.tolist())
    # Not by `add_column`, which would copy shuffled rows one by one.
    return Dataset(table.append_column("label", labels), split=dataset.split), texts


def _is_text(column: pa.ChunkedArray) -> bool:
    """Return True for a column of strings."""
    return column.type in (pa.string(), pa.large_string())


def _is_full_text(column: pa.ChunkedArray) -> bool:
    """Return True for a column of strings without missing values."""
    return column.null_count == 0 and _is_text(column)


def _distinct(chunks: Sequence[pa.Array]) -> tuple[np.ndarray, pa.Array]:
    """Return the id of each text, and the texts by id."""
    # Large strings, because 32-bit offsets would overflow at 2 GB of text.
    texts = pa.chunked_array([chunk.cast(pa.large_string()) for chunk in chunks])
    encoded = texts.dictionary_encode().combine_chunks()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary
