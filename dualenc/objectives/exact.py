"""ExactGlobal: the softmax over the whole corpus, the oracle for all other objectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dualenc.errors import DualencError
from dualenc.objectives.anchors import Anchors, weighted_sum
from dualenc.objectives.base import AnchorLosses, Encode, Objective
from dualenc.types import Side


class ExactGlobal(Objective):
    """−s⁺/τ + log Σ_z exp(s_z/τ) over every negative z of the corpus: L(θ) itself (Yau et al. 2024, Eq. 1 and 4).

    The corpus is encoded in chunks, twice: once for the log-sum, once for the weighted similarities, whose encoder
    activations are recomputed in the backward pass. One step costs several passes over the corpus; use it to check
    estimators and on small sets.

    Each corpus item counts once, or as often as it stands in a pair if `set_counts` tells. With views, every image
    counts with the two views that `encode` gives for its "left" and its "right" side.

    Args:
        corpus_chunk_size: items encoded at a time.
        **common: see `Objective`; num_left (and num_right) are needed.
    """

    needs_num_left = True
    needs_encode = True

    def __init__(self, *, corpus_chunk_size: int = 1024, **common: Any) -> None:
        super().__init__(**common)
        if corpus_chunk_size < 1:
            raise DualencError(f"ExactGlobal: corpus_chunk_size is {corpus_chunk_size}; it must be at least 1")
        self.corpus_chunk_size = corpus_chunk_size

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> AnchorLosses:
        assert encode is not None
        log_partition = self._log_partition(anchors, encode)
        surrogate = -anchors.positive_logits
        for ids in self._chunks(anchors):
            term = checkpoint(self._chunk_term, anchors, encode, ids, log_partition, use_reentrant=False)
            surrogate = surrogate + term
        return AnchorLosses(surrogate, (log_partition - anchors.positive_logits).detach())

    @torch.no_grad()
    def _log_partition(self, anchors: Anchors, encode: Encode) -> Tensor:
        log_partition = torch.full_like(anchors.positive_logits, -torch.inf)
        for ids in self._chunks(anchors):
            logits = self._chunk_logits(anchors, encode, ids)
            log_partition = torch.logaddexp(log_partition, torch.logsumexp(logits, dim=1))
        return log_partition

    def _chunk_term(self, anchors: Anchors, encode: Encode, ids: Tensor, log_partition: Tensor) -> Tensor:
        logits = self._chunk_logits(anchors, encode, ids)
        return weighted_sum(torch.exp(logits - log_partition[:, None]), logits.masked_fill(torch.isneginf(logits), 0.0))

    def _chunk_logits(self, anchors: Anchors, encode: Encode, ids: Tensor) -> Tensor:
        """(A, n) s/τ plus the log of each item's count, -inf at positives; with views (A, 2n)."""
        sides: tuple[Side, ...] = ("left", "right") if anchors.views else (anchors.candidate_side,)
        logits = anchors.outside_logits(torch.cat([encode(side, ids) for side in sides]))
        ids, counts = ids.repeat(len(sides)), self.counts(anchors.candidate_side)
        if counts is not None:
            logits = logits + counts[ids].log().to(logits)
        return logits.masked_fill(~anchors.is_negative(ids), -torch.inf)

    def _chunks(self, anchors: Anchors) -> Iterator[Tensor]:
        total = self.num_items(anchors.candidate_side) or 0
        for start in range(0, total, self.corpus_chunk_size):
            yield torch.arange(start, min(start + self.corpus_chunk_size, total), device=anchors.ids.device)
