"""The pairs of a batch as one object: ids from the loader, then embeddings from the towers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class PairBatch:
    """This rank's pairs of a global batch; the fields are arguments of `Objective.forward`.

    The loader fills in ids and weights, and the training step adds embeddings.
    Shapes: b pairs, n mined negatives, K known positives, D dimension.

        batch = PairBatch(left_id=ids, right_id=ids)
        objective.compute_loss(replace(batch, left=left, right=right)).loss
    """

    left_id: Tensor  # (b,)
    right_id: Tensor  # (b,)
    left_positives: Tensor | None = None  # (b, K) right ids, padded with -1
    right_positives: Tensor | None = None  # (b, K) left ids, padded with -1
    negative_id: Tensor | None = None  # (n,)
    weights: Tensor | None = None  # (b,)
    left: Tensor | None = None  # (b, D)
    right: Tensor | None = None  # (b, D)
    negatives: Tensor | None = None  # (n, D)
    keys_left: Tensor | None = None  # (b, D) by the momentum encoder
    keys_right: Tensor | None = None  # (b, D) by the momentum encoder

    @property
    def ids(self) -> dict[str, Tensor]:
        """Ids and lists of positives, by argument."""
        optional = given(
            negative_id=self.negative_id,
            left_positives=self.left_positives,
            right_positives=self.right_positives,
        )
        return {"left_id": self.left_id, "right_id": self.right_id, **optional}

    @property
    def embeddings(self) -> dict[str, Any]:
        """Embeddings by argument. Both sides are included even if they are missing."""
        optional = given(
            negatives=self.negatives, keys_left=self.keys_left, keys_right=self.keys_right
        )
        return {"left": self.left, "right": self.right, **optional}

    def to(self, device: torch.device) -> PairBatch:
        """Copy all tensors to a device, without waiting for it."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> PairBatch:
        """Copy all tensors to pinned memory; a `DataLoader` calls this."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> PairBatch:
        tensors = given(**vars(self))
        return replace(self, **{name: function(tensor) for name, tensor in tensors.items()})


def given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not None, by name."""
    return {name: value for name, value in arguments.items() if value is not None}
