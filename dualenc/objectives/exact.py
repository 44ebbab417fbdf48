"""ExactGlobal: the softmax over the whole corpus, the oracle for all other objectives.

Shapes: X directions, A anchors, n items of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dualenc.objectives.anchors import PADDING, Anchors, is_listed
from dualenc.objectives.base import Objective
from dualenc.objectives.checks import fail
from dualenc.objectives.items import ItemEncoder
from dualenc.objectives.surrogate import Estimate


class ExactGlobal(Objective):
    """−s⁺/τ + log Σ_z exp(s_z/τ) over every negative z of the corpus: L(θ) itself (Yau et al. 2024, arXiv:2404.10575,
    Eq. 1 and 4).

    The corpus is encoded in chunks, twice: once for the log-sum, once for the gradient, where the encoder's activations
    are recomputed in the backward pass. One step costs several passes over the corpus; use it to check estimators and
    on small sets. Each corpus item counts as often as it is in a pair (`set_counts`). With views, every image counts
    with the two views that `encode` gives for its "left" and its "right" side.

    Args:
        corpus_chunk_size: items encoded at a time.
        **common: see `Objective`; num_left (and num_right) are needed.
    """

    needs_num_left = True
    needs_encode = True
    estimates_partition = True
    encodes_in_backward = True

    def __init__(self, *, corpus_chunk_size: int = 1024, **common: Any) -> None:
        super().__init__(**common)
        if corpus_chunk_size < 1:
            fail(self, "corpus_chunk_size", f"is {corpus_chunk_size}; it must be at least 1")
        self.corpus_chunk_size = corpus_chunk_size

    def anchor_losses(self, anchors: Anchors, encoder: ItemEncoder | None) -> Tensor:
        assert encoder is not None
        chunks = self._corpus(anchors).split(self.corpus_chunk_size, dim=1)

        def scores_and_counts(items: Tensor) -> tuple[Tensor, Tensor]:
            """(X, A, n) s/τ of items (X, n); (X, A, n) log of how often each counts as a negative, -inf for never."""
            embeddings = encoder(items, anchors.directions)  # (X, n, D)
            scores = anchors.embeddings @ embeddings.mT / anchors.temperature
            items = items.to(scores.device)
            log_counts = self._log_counts(anchors, items)[:, None].to(scores)  # (X, 1, n)
            is_positive = is_listed(items, anchors.hidden_items)  # (X, A, n)
            return scores, log_counts.masked_fill(is_positive, -torch.inf)

        # Each p(z) needs the whole sum, so the first pass computes it, and keeps no activations of the encoder.
        with torch.no_grad():
            log_partition = torch.full_like(anchors.positive_scores, -torch.inf)
            for items in chunks:
                scores, log_counts = scores_and_counts(items)
                log_sum = torch.logsumexp(scores + log_counts, dim=-1)
                log_partition = torch.logaddexp(log_partition, log_sum)
        self.watch(log_partition=log_partition)

        def chunk_gradient(items: Tensor) -> Tensor:
            """(X, A) zeros with the gradient Σ_z p(z)·∇s_z/τ over the chunk."""
            scores, log_counts = scores_and_counts(items)
            # An anchor without negatives only pulls its positive.
            log_sum = log_partition.nan_to_num(neginf=0.0)[..., None]
            weights = torch.exp(scores.detach() + log_counts - log_sum)  # (X, A, n)
            return Estimate.apply(torch.zeros_like(log_partition), scores, weights)

        positive = anchors.positive_scores[..., None]
        value = self.log_odds(log_partition, positive[..., 0])
        losses: Tensor = Estimate.apply(value, positive, torch.full_like(positive, -1.0))
        for items in chunks:
            # The backward pass encodes a chunk again, so that one chunk's activations exist at a time.
            losses = losses + checkpoint(chunk_gradient, items, use_reentrant=False)
        return losses

    def _corpus(self, anchors: Anchors) -> Tensor:
        """(X, n) all candidate items of each direction, padded with -1."""
        sizes = torch.tensor([self.corpus.num_items(direction) for direction in anchors.directions])
        items = torch.arange(int(sizes.max())).expand(len(sizes), -1)
        return items.where(items < sizes[:, None], PADDING)

    def _log_counts(self, anchors: Anchors, items: Tensor) -> Tensor:
        """(X, n) log of how often items are in the corpus; -inf for -1."""
        log_counts = []
        for direction, candidates in zip(anchors.directions, items, strict=True):
            number = torch.ones_like(candidates, dtype=torch.float64)
            counts = self.corpus.item_counts(direction)
            if counts is not None:
                number = counts.double()[candidates.clamp(min=0)]
            # The smaller side's chunks are padded to the length of the larger one's.
            number = number.where(candidates != PADDING, 0.0)
            log_counts.append(number.log())
        return torch.stack(log_counts)

    def diagnostics(self) -> dict[str, Tensor]:
        """The logs of the partition functions."""
        return self.spread("log_partition")
