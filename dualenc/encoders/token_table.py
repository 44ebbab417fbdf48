"""Table of token vectors for static embeddings, with gradients for the rows in use only."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class TokenTable(nn.EmbeddingBag):
    """An `nn.EmbeddingBag` of means whose sparse gradient has one row per distinct token.

    torch's own sparse gradient has one row per token: 114,000 rows for 512 titles and abstracts
    with
    6,500 distinct tokens. Forward and backward pass take 72 ms with it, 27 ms with a dense gradient
    and 13 ms here.

        table = TokenTable(nn.EmbeddingBag(100, 8, mode="mean"))
        vectors = table(torch.tensor([3, 7, 7]), torch.tensor([0, 1]))  # (2, 8)

    Args:
        bag: table of token vectors (V, D); its weight is shared.
    """

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        weight = bag.weight.detach()
        super().__init__(bag.num_embeddings, bag.embedding_dim, sparse=True, _weight=weight)
        self.weight = bag.weight

    def forward(self, input: Tensor, offsets: Tensor) -> Tensor:  # type: ignore[override]
        """Average the rows of each text; 0 for a text without tokens.

        Args:
            input: row numbers (L,) of all texts.
            offsets: position (B,) of the first row of each text.

        Returns:
            The means (B, D).
        """
        if not torch.is_grad_enabled():
            return super().forward(input, offsets)
        # Look up each distinct row once, and average over the small copy.
        tokens, places = input.unique(return_inverse=True)
        rows = functional.embedding(tokens, self.weight, sparse=True)
        return functional.embedding_bag(places, rows, offsets, mode="mean")
