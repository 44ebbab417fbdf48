"""MomentumQueue: MoCo's queue of a momentum encoder's embeddings.

Shapes: X directions, A anchors of this rank, P pairs of all ranks, G anchors of all ranks (P, or with views 2P), C
candidates, Q items in a queue, D dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import Objective
from dualenc.objectives.checks import fail
from dualenc.objectives.embedding_queue import EmbeddingQueue


class MomentumQueue(Objective):
    """−log(e⁺ / (e⁺ + Σ_k e_k)) with the embeddings of a momentum encoder: the partner's, and a queue of past ones.

    Source: MoCo (He et al. 2020, arXiv:1911.05722), Algorithm 1, in both directions as in v3 (Chen, Xie and He 2021,
    arXiv:2104.02057). The momentum encoder is a moving average of the towers, θ̄ ← μ·θ̄ + (1 − μ)·θ after each step:
    `Trainer` keeps it and gives `forward` its embeddings of the batch, `keys_left` and `keys_right`. Gradients reach
    anchors alone. Mined negatives join the queue's, with gradient. In the first step the momentum encoder's embeddings
    of the batch itself are the negatives.

    Copies of an anchor's known positives in the queue are not its negatives. A value over fewer negatives is smaller,
    so `reports_loss` is False until the queue is full.

    Args:
        queue_size: embeddings of each side in the queue; with views, of both together.
        momentum: μ in [0, 1), of each step: .99 for some thousand steps, .999 for more.
        **common: see `Objective`.
    """

    def __init__(self, *, queue_size: int = 4096, momentum: float = 0.99, **common: Any) -> None:
        super().__init__(**common)
        if queue_size < 1:
            fail(self, "queue_size", f"is {queue_size}; it must be at least 1, a number of embeddings such as 4096")
        if not 0 <= momentum < 1:
            fail(self, "momentum", f"is {momentum}; it must lie in [0, 1), such as 0.99")
        self.momentum = momentum
        # By direction: left anchors look at right items.
        self.queues = nn.ModuleList(EmbeddingQueue(queue_size) for _ in self.directions)

    @property
    def reports_loss(self) -> bool:
        return all(self.queue_of(direction).is_full for direction in self.directions)

    def queue_of(self, direction: int) -> EmbeddingQueue:
        """The queue of a direction's candidates."""
        queue = self.queues[direction]
        assert isinstance(queue, EmbeddingQueue)
        return queue

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        keys = anchors.keys  # (X, G, D)
        assert keys is not None
        column = anchors.positive_column[..., None].expand(-1, -1, keys.shape[-1])
        own_keys = keys.gather(1, column)  # (X, A, D)
        positive = (anchors.embeddings * own_keys).sum(dim=-1) / anchors.temperature  # (X, A)
        losses: Tensor = self._against_queue(anchors, keys).by_blocks(_info_nce, positive)
        if self.updates_state:
            for x, direction in enumerate(anchors.directions):
                self.queue_of(direction).write(anchors.candidate_ids[x, : anchors.num_batch], keys[x])
        return losses

    def _against_queue(self, anchors: Anchors, keys: Tensor) -> Anchors:
        """The same anchors against mined negatives and the queues, or while these are empty the batch's keys."""
        # Behind the candidates of the batch stand mined negatives.
        mined = anchors.candidates[:, anchors.num_batch :]
        if any(self.queue_of(direction).is_empty for direction in anchors.directions):
            return anchors.with_candidates(torch.cat([keys, mined], dim=1), anchors.candidate_ids)
        # Concatenation copies: the queues change before the backward pass.
        held = [self.queue_of(direction).held(anchors.candidates) for direction in anchors.directions]
        queued = torch.stack([one.embeddings for one in held])  # (X, Q, D)
        queued_ids = torch.stack([one.ids for one in held])  # (X, Q)
        mined_ids = anchors.candidate_ids[:, anchors.num_batch :]
        return anchors.with_candidates(torch.cat([mined, queued], dim=1), torch.cat([mined_ids, queued_ids], dim=1))


def _info_nce(block: Anchors, positive: Tensor) -> Tensor:
    """(X, a) −log of the positive's share, whose score is s⁺/τ (X, a), beside the block's negatives."""
    logits = torch.cat([positive[..., None], block.logits], dim=-1)  # (X, a, 1 + C)
    return logits.logsumexp(dim=-1) - positive
