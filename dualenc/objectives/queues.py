"""Queues of past embeddings as negatives: MomentumQueue (MoCo), and XBM.

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
from dualenc.objectives.in_batch import InfoNCE


class QueueObjective(Objective):
    """Base of the objectives whose negatives are the embeddings of past batches, as they were then.

    An item may be in the queue several times; copies of an anchor's known positives are not its negatives. Anchors of
    each direction have a queue of their own, all views one together. A value over fewer negatives is smaller, so
    `reports_loss` is False until the queue is full.

    Args:
        queue_size: embeddings of each side that are kept; with views, of both together.
        **common: see `Objective`.
    """

    def __init__(self, *, queue_size: int = 4096, **common: Any) -> None:
        super().__init__(**common)
        if queue_size < 1:
            fail(self, "queue_size", f"is {queue_size}; it must be at least 1, a number of embeddings such as 4096")
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

    def add_queues(self, anchors: Anchors, first: int) -> Anchors:
        """The same anchors against the candidates from column `first` on and, after them, the queues.

        Copies: the queues change before the backward pass.
        """
        held = [self.queue_of(direction).held(anchors.candidates) for direction in anchors.directions]
        embeddings = torch.stack([one.embeddings for one in held])  # (X, Q, D)
        ids = torch.stack([one.ids for one in held])  # (X, Q)
        candidates = torch.cat([anchors.candidates[:, first:], embeddings], dim=1)
        return anchors.with_candidates(candidates, torch.cat([anchors.candidate_ids[:, first:], ids], dim=1))

    def enqueue(self, anchors: Anchors, embeddings: Tensor) -> None:
        """Put embeddings (X, G, D) of the batch's candidates into the queues, in training only."""
        if self.updates_state:
            for x, direction in enumerate(anchors.directions):
                self.queue_of(direction).write(anchors.candidate_ids[x, : anchors.num_batch], embeddings[x])


class MomentumQueue(QueueObjective):
    """−log(e⁺ / (e⁺ + Σ_k e_k)) with the embeddings of a momentum encoder: the partner's, and a queue of past ones.

    Source: MoCo (He et al. 2020, arXiv:1911.05722), Algorithm 1, in both directions as in v3 (Chen, Xie and He 2021,
    arXiv:2104.02057): an anchor's positive is its partner (the right item, the other view) as the momentum encoder sees
    it, and its negatives are what that encoder gave for the batches before. Gradients reach anchors alone. The momentum
    encoder is a moving average of the towers, θ̄ ← μ·θ̄ + (1 − μ)·θ after each step: `Trainer` keeps it and gives
    `forward` its embeddings of the batch, `keys_left` and `keys_right`. So a pair costs two more forward passes.

    Mined negatives join the queue's, with gradient. In the first step, where the queue is empty, the momentum encoder's
    embeddings of the batch itself are the negatives.

    Args:
        queue_size: see `QueueObjective`.
        momentum: μ in [0, 1), of each step. About queue_size / B steps pass through the queue; the average should move
            little meanwhile, and follow within the run: .99 for some thousand steps, .999 for more.
        **common: see `Objective`.
    """

    def __init__(self, *, momentum: float = 0.99, **queue: Any) -> None:
        super().__init__(**queue)
        if not 0 <= momentum < 1:
            fail(self, "momentum", f"is {momentum}; it must lie in [0, 1), such as 0.99")
        self.momentum = momentum

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        keys = anchors.keys  # (X, G, D)
        assert keys is not None
        column = anchors.positive_column[..., None].expand(-1, -1, keys.shape[-1])
        own_keys = keys.gather(1, column)  # (X, A, D)
        positive = (anchors.embeddings * own_keys).sum(dim=-1) / anchors.temperature  # (X, A)
        # Behind those of the batch stand mined negatives.
        mined = anchors.num_batch
        against_queue = self.add_queues(anchors, first=mined)
        if any(self.queue_of(direction).is_empty for direction in anchors.directions):
            candidates = torch.cat([keys, anchors.candidates[:, mined:]], dim=1)
            against_queue = anchors.with_candidates(candidates, anchors.candidate_ids)
        losses: Tensor = against_queue.by_blocks(_info_nce, positive)
        self.enqueue(anchors, keys)
        return losses


class XBM(QueueObjective, InfoNCE):
    """InfoNCE over the batch and a queue of the embeddings of past batches, which the encoder itself gave then.

    Source: cross-batch memory (Wang et al. 2020, arXiv:1912.06798), with InfoNCE as its pair loss. Embeddings in the
    queue are as old as queue_size / B steps and carry no gradient: where an encoder moves fast, anchors flee from where
    items were, and it ends far below InfoNCE; hence the warm-up, after which rates are lower. `MomentumQueue` and
    `GlobalCache` do not depend on that.

    Args:
        queue_size: see `QueueObjective`.
        warm_up: share of the training, in [0, 1], before the queue is used; it is filled from the start. A loop that
            never calls `set_progress` has none.
        **common: see `Objective`.
    """

    def __init__(self, *, warm_up: float = 0.5, **queue: Any) -> None:
        super().__init__(**queue)
        if not 0 <= warm_up <= 1:
            fail(self, "warm_up", f"is {warm_up}; it must lie in [0, 1], a share of the training")
        self.warm_up = warm_up
        self.uses_queue = True

    @property
    def reports_loss(self) -> bool:
        return self.uses_queue and super().reports_loss

    def set_progress(self, fraction: float) -> None:
        self.uses_queue = fraction >= self.warm_up

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        losses = InfoNCE.losses(self, self.add_queues(anchors, first=0) if self.uses_queue else anchors)
        self.enqueue(anchors, anchors.candidates[:, : anchors.num_batch])
        return losses


def _info_nce(block: Anchors, positive: Tensor) -> Tensor:
    """(X, a) −log of the positive's share, whose score is s⁺/τ (X, a), beside the block's negatives."""
    logits = torch.cat([positive[..., None], block.logits], dim=-1)  # (X, a, 1 + C)
    return logits.logsumexp(dim=-1) - positive
