"""ExactGlobal: the softmax over the whole corpus, the oracle for all other objectives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dualenc.objectives.anchors import Anchors, weighted_sum
from dualenc.objectives.base import AnchorLosses, Encode, Objective
from dualenc.objectives.chains import ids_of
from dualenc.objectives.looks import upload
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
    knows_partition = True

    def __init__(self, *, corpus_chunk_size: int = 1024, **common: Any) -> None:
        super().__init__(**common)
        if corpus_chunk_size < 1:
            self._fail("corpus_chunk_size", f"is {corpus_chunk_size}; it must be at least 1")
        self.corpus_chunk_size = corpus_chunk_size

    def diagnostics(self) -> dict[str, Tensor]:
        """The logs of the partition functions."""
        return self._spread("log_partition")

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> AnchorLosses:
        assert encode is not None
        sides: tuple[Side, ...] = ("left", "right") if anchors.views else (anchors.candidate_side,)
        counts = self.counts(anchors.candidate_side)
        chunks = torch.arange(self.num_items(anchors.candidate_side) or 0).split(self.corpus_chunk_size)

        def logits_of(ids: Tensor) -> Tensor:
            """(A, n) s/τ plus the log of each item's count, -inf at positives; with views (A, 2n)."""
            embeddings = torch.cat([encode(side, ids) for side in sides])
            logits = anchors.embeddings @ embeddings.T / anchors.temperature
            items = torch.cat([2 * ids, 2 * ids + 1]) if anchors.views else ids
            items = upload(items, anchors.ids.device)
            if counts is not None:
                logits = logits + counts[ids_of(items, anchors.views)].log().to(logits)
            return logits.masked_fill(anchors.hides(items), -torch.inf)

        log_partition = torch.full_like(anchors.positive_logits, -torch.inf)
        with torch.no_grad():
            for ids in chunks:
                log_partition = torch.logaddexp(log_partition, torch.logsumexp(logits_of(ids), dim=1))
            # An anchor without any negative pulls its positive only.
            log_partition = log_partition.nan_to_num(neginf=0.0)

        self._watch(anchors, log_partition)

        def weighted_logits(ids: Tensor) -> Tensor:
            logits = logits_of(ids)
            weights = torch.exp(logits - log_partition[:, None])
            return weighted_sum(weights, logits.masked_fill(torch.isneginf(logits), 0.0))

        surrogate = -anchors.positive_logits
        for ids in chunks:
            surrogate = surrogate + checkpoint(weighted_logits, ids, use_reentrant=False)
        return AnchorLosses(surrogate, (log_partition - anchors.positive_logits).detach())
