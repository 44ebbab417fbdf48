"""MomentumQueue: MoCo's queue of embeddings by a momentum encoder.

Shapes: X directions, A anchors of this rank, G anchors of all ranks, C candidates, Q items in a
queue, D dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from dualenc.objectives.anchors import PADDING, Anchors
from dualenc.objectives.base import CommonArguments, Objective
from dualenc.objectives.checks import check_count, check_range


class MomentumQueue(Objective):
    """−log(e⁺ / (e⁺ + Σ_k e_k)) against a queue of past embeddings by a momentum encoder.

    The positive is the partner's embedding by the momentum encoder, a moving average of the towers:
    θ̄ ← μ·θ̄ + (1 − μ)·θ after each step. `Trainer` updates it and passes its embeddings of the
    batch to `forward` as `keys_left` and `keys_right`. Mined negatives join the queue's, with
    gradient. In the first step the keys of the batch itself are the negatives. The loss over fewer
    negatives is smaller, so `reports_loss` is False until the queue is full. Source: MoCo (He et
    al. 2020, arXiv:1911.05722), Algorithm 1, in both directions as in v3 (Chen, Xie and He 2021,
    arXiv:2104.02057).

        criterion = MomentumQueue(queue_size=4096)
        criterion(left, right, ids, keys_left=keys_left, keys_right=keys_right).loss.backward()

    Args:
        queue_size: number of embeddings per side in the queue; with views, for both views together.
        momentum: μ in [0, 1), decay per step: .99 for some thousand steps, .999 for more.
        **common: see `Objective`.
    """

    queues: Sequence[EmbeddingQueue]  # for each direction's candidates

    def __init__(
        self,
        *,
        queue_size: int = 4096,
        momentum: float = 0.99,
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(**common)
        check_count("queue_size", queue_size)
        check_range("momentum", momentum, "[0, 1)")
        self.momentum = momentum
        queues = nn.ModuleList(EmbeddingQueue(queue_size) for _ in self.directions)
        self.queues = queues  # type: ignore[assignment]

    @property
    def reports_loss(self) -> bool:
        """True if the queues are full."""
        return all(queue.num_written >= queue.size for queue in self.queues)

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        keys = anchors.keys  # (X, G, D)
        assert keys is not None
        own_keys = keys.take_along_dim(anchors.positive_column[..., None], dim=1)  # (X, A, D)
        positive = (anchors.embeddings * own_keys).sum(dim=-1) / anchors.temperature  # (X, A)
        losses = self._against_queue(anchors, keys).in_blocks(_info_nce, positive)
        if self.updates_state:
            ids = anchors.candidate_ids[:, : anchors.num_batch]  # (X, G), without mined negatives
            for x, direction in enumerate(anchors.directions):
                self.queues[direction].write(ids[x], keys[x])
        return losses

    def _against_queue(self, anchors: Anchors, keys: Tensor) -> Anchors:
        """Use mined negatives and the queues as candidates; while these are empty, the keys."""
        # Mined negatives follow the candidates of the batch.
        mined = anchors.candidates[:, anchors.num_batch :]
        mined_ids = anchors.candidate_ids[:, anchors.num_batch :]
        queues = [self.queues[direction] for direction in anchors.directions]
        if queues[0].num_written == 0:
            return anchors.with_candidates(torch.cat([keys, mined], dim=1), anchors.candidate_ids)
        # Concatenation copies the queues, which change before the backward pass.
        held = [queue.held(anchors.candidates) for queue in queues]
        queued, queued_ids = zip(*held, strict=True)
        candidates = torch.cat([mined, torch.stack(queued)], dim=1)  # (X, n + Q, D)
        candidate_ids = torch.cat([mined_ids, torch.stack(queued_ids)], dim=1)
        return anchors.with_candidates(candidates, candidate_ids)


def _info_nce(block: Anchors, positive: Tensor) -> Tensor:
    """Return (X, a) −log of the positive's share; its score is s⁺/τ (X, a)."""
    positive_column = positive[..., None]
    logits = torch.cat([positive_column, block.logits], dim=-1)  # (X, a, 1 + C)
    return logits.logsumexp(dim=-1) - positive


class EmbeddingQueue(nn.Module):
    """A ring buffer of the latest embeddings and the ids of their items, the same on every rank.

        queue = EmbeddingQueue(size=4096)
        queue.write(ids, embeddings)

    Args:
        size: maximum number of embeddings.
    """

    ids: Tensor
    embeddings: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        # The dimension is unknown until the first write.
        self.register_buffer("ids", torch.full((size,), PADDING))
        self.register_buffer("embeddings", torch.zeros(size, 0))
        self.num_written = 0

    def held(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return (Q, D) embeddings in arbitrary order, and (Q,) their ids.

        The embeddings have the precision of `like`.
        """
        if not self.num_written:
            return like.new_zeros(0, like.shape[-1]), self.ids[:0]
        count = min(self.num_written, self.size)
        return self.embeddings[:count].to(like), self.ids[:count]

    @torch.no_grad()
    def write(self, ids: Tensor, embeddings: Tensor) -> None:
        """Replace the oldest entries by embeddings (n, D) of items (n,).

        If n exceeds the size, the last ones are kept.
        """
        if not self.num_written:
            self.embeddings = embeddings.new_zeros(self.size, embeddings.shape[1])
        before = self.num_written
        self.num_written += len(ids)
        positions = torch.arange(before, self.num_written, device=ids.device)
        latest = slice(-self.size, None)
        rows = positions[latest] % self.size
        self.ids[rows] = ids[latest]
        self.embeddings[rows] = embeddings[latest].to(self.embeddings)

    def get_extra_state(self) -> Tensor:
        """Return the number of embeddings ever written, for the state dict."""
        return torch.tensor([self.num_written])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore from `get_extra_state()`."""
        self.num_written = int(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # The saved embeddings set the dimension.
        if prefix + "embeddings" in state_dict:
            saved = state_dict[prefix + "embeddings"]
            self.embeddings = torch.zeros_like(saved, device=self.embeddings.device)
        super()._load_from_state_dict(state_dict, prefix, *rest)
