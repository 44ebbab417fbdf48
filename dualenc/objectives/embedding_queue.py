"""EmbeddingQueue: the embeddings of the last batches, first in, first out.

Shapes: n embeddings of a batch, Q held ones, D dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualenc.objectives.anchors import PADDING


class Held(NamedTuple):
    """What a queue holds, in no particular order.

    Attributes:
        embeddings: (Q, D).
        ids: (Q,) of their items.
    """

    embeddings: Tensor
    ids: Tensor


class EmbeddingQueue(nn.Module):
    """A ring of embeddings with the ids of their items, the same on every rank; double precision is kept.

    Args:
        size: embeddings that it can hold.
    """

    ids: Tensor
    embeddings: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        # Embeddings have no dimension until the first write.
        self.register_buffer("ids", torch.full((size,), PADDING))
        self.register_buffer("embeddings", torch.zeros(size, 0))
        self.num_written = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written."""
        return self.num_written == 0

    @property
    def is_full(self) -> bool:
        """Whether as many embeddings were written as it can hold."""
        return self.num_written >= self.size

    def held(self, like: Tensor) -> Held:
        """What it holds, without gradient, in the precision and, while it is empty, of the dimension of `like`."""
        if not self.num_written:
            return Held(like.new_zeros(0, like.shape[-1]), self.ids[:0])
        count = min(self.num_written, self.size)
        return Held(self.embeddings[:count].to(like), self.ids[:count])

    @torch.no_grad()
    def write(self, ids: Tensor, embeddings: Tensor) -> None:
        """Put embeddings (n, D) of items (n,) in the places of the oldest; of more than it can hold, the last."""
        if not self.num_written:
            self.embeddings = embeddings.new_zeros(self.size, embeddings.shape[1])
        ids = ids[-self.size :]
        skipped = len(embeddings) - len(ids)
        places = torch.arange(self.num_written + skipped, self.num_written + len(embeddings), device=ids.device)
        places %= self.size
        self.ids[places] = ids
        self.embeddings[places] = embeddings[skipped:].to(self.embeddings)
        self.num_written += len(embeddings)

    def get_extra_state(self) -> Tensor:
        """How many embeddings were ever written, for the state dict."""
        return torch.tensor([self.num_written])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore from `get_extra_state()`."""
        self.num_written = int(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "embeddings")
        # The dimension is that of the saved embeddings.
        if saved is not None:
            self.embeddings = saved.new_zeros(saved.shape, device=self.embeddings.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)
