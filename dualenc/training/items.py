"""Items outside the batch, by id, for objectives that ask for them: `encode(side, ids) -> (n, D)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dualenc.data.pairs import PairDataset
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import BadSample, DualencError
from dualenc.training.encoding import Encoding
from dualenc.training.loader import OnError, Side
from dualenc.training.seeds import item_seeds


class ItemEncoder:
    """Fetches raw items, augments them with a seed of (seed, step, id, view), and encodes them.

    BatchNorm normalises them as it did the batch: see `BatchStatistics`. Whether a graph is built follows
    `torch.is_grad_enabled()`. With on_error="skip" a broken item gets a zero vector, similar to nothing, and is counted
    in `bad`: nobody can leave it out of what was asked for.

    Args:
        model: the two towers, which also know how to prepare items.
        pairs: where the items are.
        seed: of the augmentation.
        on_error: "skip" or "raise", for items that cannot be read.

    Attributes:
        num_encoded: how many items were encoded so far.
        bad: reason by (side, id) of the items that could not be read.
    """

    def __init__(self, model: DualEncoder, pairs: PairDataset, *, seed: int = 0, on_error: OnError = "skip") -> None:
        self.model, self.pairs = model, pairs
        self.seed, self.on_error = seed, on_error
        self.num_encoded = 0
        self.bad: dict[tuple[str, int], str] = {}

    def bind(self, encoding: Encoding, step: int) -> Callable[[Side, Tensor], Tensor]:
        """The callback of one step.

        Args:
            encoding: how this step encodes: plainly or with gradient caching.
            step: number of the batch, for the seeds.
        """

        def encode(side: Side, ids: Tensor) -> Tensor:
            return self._encode(encoding, side, ids, step)

        return encode

    def _encode(self, encoding: Encoding, side: Side, ids: Tensor, step: int) -> Tensor:
        listed = [int(item_id) for item_id in ids.reshape(-1).tolist()]
        self._check(side, listed)
        items = [self._read(side, item_id) for item_id in listed]
        found = [position for position, item in enumerate(items) if item is not None]
        self.num_encoded += len(found)
        seeds = item_seeds(self.seed, step, [listed[position] for position in found], side)
        raw = [items[position] for position in found]
        inputs = dict(self.model.tower(side).prepare(raw, seeds)) if raw else {}
        embeddings = encoding.encode(side, inputs, beside=True)
        if len(found) == len(listed):
            return embeddings
        position = torch.tensor(found, dtype=torch.int64, device=embeddings.device)
        return embeddings.new_zeros(len(listed), embeddings.shape[1]).index_copy(0, position, embeddings)

    def _read(self, side: Side, item_id: int) -> Any:
        try:
            return self.pairs.item(side, item_id)
        except BadSample as error:
            if self.on_error == "raise":
                raise
            self.bad[side, item_id] = str(error)
            return None

    def _check(self, side: Side, ids: list[int]) -> None:
        limit = self.pairs.num_left if side == "left" else self.pairs.num_right
        wrong = [item_id for item_id in ids if not 0 <= item_id < limit]
        if wrong:
            raise DualencError(f"the objective asks for {side} item {wrong[0]}, but ids lie in [0, {limit})")
