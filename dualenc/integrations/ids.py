"""Ids of texts for objectives: a column of ids for a data set of `datasets`, equal texts with equal
ids."""

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

ROWS_PER_BLOCK = 2**16  # of a data set, whose texts are in memory at a time


class PairTexts:
    """The distinct texts of a data set's pairs, by id, how many pairs each is in, and which belong
    together.

    Args:
        left, right: the texts by id.
        left_id, right_id: (M,) those of each pair.
    """

    def __init__(
        self, left: pa.Array, right: pa.Array, left_id: np.ndarray, right_id: np.ndarray
    ) -> None:
        self.texts: dict[Side, pa.Array] = {"left": left, "right": right}
        self.counts = (
            np.bincount(left_id, minlength=len(left)),
            np.bincount(right_id, minlength=len(right)),
        )
        # An equal text of the other side is no negative, either.
        copies = pc.index_in(left, value_set=right)
        left_id = np.concatenate([left_id, np.flatnonzero(copies.is_valid())])
        right_id = np.concatenate([right_id, copies.drop_null().to_numpy()])
        self._not_negatives: dict[Side, Ragged] = {
            "left": Ragged.from_pairs(left_id, right_id, len(left)),
            "right": Ragged.from_pairs(right_id, left_id, len(right)),
        }

    @property
    def num_left(self) -> int:
        return len(self.texts["left"])

    @property
    def num_right(self) -> int:
        return len(self.texts["right"])

    def not_negatives(self, side: Side, ids: Tensor) -> Tensor:
        """(n, K) the ids of other texts that are no negatives of texts (n,) of a side, padded by
        -1."""
        return torch.from_numpy(self._not_negatives[side].padded(ids.cpu().numpy())).to(ids.device)

    def are_named_by(self, dataset: Dataset) -> bool:
        """Whether in every row of a data set the column `label` has the ids of its first texts."""
        names = [name for name in dataset.column_names if name != "label"]
        if "label" not in dataset.column_names:
            return False
        tables = dataset.with_format("arrow").iter(ROWS_PER_BLOCK)
        return all(self._are_named_in(table, names) for table in tables)

    def _are_named_in(self, table: pa.Table, names: Sequence[str]) -> bool:
        labels = table["label"]
        if not is_list(labels.type) or not pa.types.is_integer(labels.type.value_type):
            return False
        lengths = pc.unique(pc.list_value_length(labels)).to_pylist()
        values = pc.list_flatten(labels)
        # Rows of one length, with an id for an anchor and others.
        if len(lengths) != 1 or not 2 <= (lengths[0] or 0) <= len(names) or values.null_count:
            return False
        ids = values.to_numpy().reshape(-1, lengths[0])
        for column, name in enumerate(names[: lengths[0]]):
            texts = self.texts["right" if column else "left"]
            own = ids[:, column]
            if own.min() < 0 or own.max() >= len(texts) or table[name].null_count:
                return False
            if table[name].type not in (pa.string(), pa.large_string()):
                return False
            named = texts.take(pa.array(own))
            if not pc.all(pc.equal(table[name].cast(pa.large_string()), named)).as_py():
                return False
        return True

    def __call__(self, side: Side, ids: Tensor) -> list[str]:
        """The texts with these ids (n,)."""
        return self.texts[side].take(pa.array(ids.cpu().numpy())).to_pylist()


def with_ids(dataset: Dataset) -> tuple[Dataset, PairTexts]:
    """Add a column `label` of ids, [anchor, positive, *negatives], to columns of texts; equal texts
    have equal ids.

    Ids follow the data set's order: keep it for runs that resume, and shuffle by the trainer.

    Returns:
        The data set with ids, and the texts by id.
    """
    if not isinstance(dataset, Dataset):
        raise DualencError(
            f"the data set is of type {type(dataset).__name__}; give one split as a datasets.Dataset"
        )
    names = dataset.column_names
    if len(names) < 2 or "label" in names:
        raise DualencError(
            f"the columns are {', '.join(names)}; give anchor, positive and negatives, without a label"
        )
    table = dataset.with_format("arrow")[:]
    for name in names:
        column = table[name]
        if column.type not in (pa.string(), pa.large_string()):
            raise DualencError(
                f"column {name} holds {column.type}, not texts; keep columns of texts"
            )
        if column.null_count:
            raise DualencError(
                f"column {name} has no text in {column.null_count} rows; "
                f"remove them: dataset.filter(lambda row: row[{name!r}] is not None)"
            )
    anchors = table[names[0]]
    left_ids, left = _distinct(anchors.chunks)
    right_chunks = []
    for name in names[1:]:
        right_chunks += table[name].chunks
    right_ids, right = _distinct(right_chunks)
    ids = np.vstack([left_ids, right_ids.reshape(-1, len(anchors))])
    texts = PairTexts(left, right, ids[0], ids[1])
    # `add_column` would copy shuffled rows one by one.
    return Dataset(
        table.append_column("label", pa.array(ids.T.tolist())), split=dataset.split
    ), texts


def _distinct(chunks: Sequence[pa.Array]) -> tuple[np.ndarray, pa.Array]:
    """The id of each text, and the texts by id."""
    # Offsets of 32 bits would overflow at 2 GB of text.
    texts = pa.chunked_array([chunk.cast(pa.large_string()) for chunk in chunks])
    encoded = texts.dictionary_encode().combine_chunks()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary
