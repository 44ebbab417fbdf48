"""What GlobalCache and NegativeCache share: a memory of all embeddings for each direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dualenc.objectives.anchors import PADDING, Anchors
from dualenc.objectives.base import Objective
from dualenc.objectives.draws import SharedRandom
from dualenc.objectives.memory import EmbeddingMemory


class MemoryObjective(Objective):
    """Base of the objectives that remember the latest embedding of every item, from which the value of the loss is
    taken; `reports_loss` is False until every pair was seen once.

    Args:
        **common: see `Objective`; num_left (and num_right) are needed, and `encode` in forward.
    """

    needs_num_left = True
    needs_encode = True
    estimates_partition = True

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        # By direction: left anchors look at right items.
        self.memories = nn.ModuleList(
            EmbeddingMemory(self.corpus.num_items(direction)) for direction in self.directions
        )
        self.draws = SharedRandom(self.seed)

    @property
    def reports_loss(self) -> bool:
        return all(self.memory_of(direction).holds_corpus for direction in self.directions)

    def memory_of(self, direction: int) -> EmbeddingMemory:
        """The memory of a direction's candidates."""
        memory = self.memories[direction]
        assert isinstance(memory, EmbeddingMemory)
        return memory

    def remember(self, anchors: Anchors, items: Tensor, embeddings: Tensor) -> None:
        """Write items (X, n) and their embeddings (X, n, D), the batch's first; -1 for none."""
        is_item = items != PADDING
        for x, direction in enumerate(anchors.directions):
            memory = self.memory_of(direction)
            memory.write(items[x][is_item[x]], embeddings[x][is_item[x]])
            # The rest does not count: batches alone pass through the corpus.
            memory.count(anchors.num_batch)

    def num_remembered(self, anchors: Anchors) -> Tensor:
        """(X, A) how many negatives of each anchor are remembered."""
        numbers = [
            self.memory_of(direction).num_negatives(anchors.hidden_items[x], self.corpus.item_counts(direction))
            for x, direction in enumerate(anchors.directions)
        ]
        return torch.stack(numbers).to(anchors.embeddings)

    def diagnostics(self) -> dict[str, Tensor]:
        """The logs of the mean of exp(s/τ) over the corpus, and what share of all items is remembered."""
        memories = [self.memory_of(direction) for direction in self.directions]
        remembered = torch.stack([memory.num_remembered() for memory in memories]).sum()
        total = sum(memory.num_items for memory in memories)
        return self.spread("log_mean_exp") | {"remembered": remembered / total}
