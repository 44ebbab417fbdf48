"""ExactGlobal: the softmax over the whole corpus, the oracle for all other objectives.

Shapes: X directions, A anchors, n items of a chunk.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dualenc.objectives.anchors import PADDING, Anchors, is_listed
from dualenc.objectives.base import CommonArguments, Estimate, Objective
from dualenc.objectives.checks import check_count
from dualenc.objectives.outside_items import OutsideEncoder


class ExactGlobal(Objective):
    """−s⁺/τ + log Σ_z exp(s_z/τ) over every negative z of the corpus.

    This is L(θ) itself (Yau et al. 2024, arXiv:2404.10575, Eq. 1 and 4). The corpus is encoded in
    chunks, three times: for the log-sum, for the gradient, and in the backward pass. Use it to
    check estimators and for small corpora. With views, every image counts with the two views that
    `encode` returns.

        criterion = ExactGlobal(num_left=m, num_right=n)
        criterion(left, right, left_id, right_id, encode=encode).loss.backward()

    Args:
        corpus_chunk_size: number of items encoded at a time.
        **common: see `Objective`; num_left is required (and num_right, if it differs).
    """

    needs_num_left = True
    needs_encode = True
    estimates_partition = True
    encodes_in_backward = True

    def __init__(self, *, corpus_chunk_size: int = 1024, **common: Unpack[CommonArguments]) -> None:
        super().__init__(**common)
        check_count("corpus_chunk_size", corpus_chunk_size)
        self.corpus_chunk_size = corpus_chunk_size

    def anchor_losses(self, anchors: Anchors, encoder: OutsideEncoder | None) -> Tensor:
        assert encoder is not None
        items, log_counts = self._corpus(anchors)
        size = self.corpus_chunk_size
        chunked = (items.split(size, dim=1), log_counts.split(size, dim=1))
        chunks = list(zip(*chunked, strict=True))

        def scores_and_counts(items: Tensor, log_counts: Tensor) -> tuple[Tensor, Tensor]:
            """Return (X, A, n) s/τ of items (X, n), and (X, A, n) log multiplicities or -inf."""
            embeddings = encoder(items, anchors.directions)  # (X, n, D)
            scores = anchors.embeddings @ embeddings.mT / anchors.temperature
            is_positive = is_listed(items.to(scores.device), anchors.hidden_items)  # (X, A, n)
            log_counts = log_counts[:, None].to(scores)
            return scores, log_counts.masked_fill(is_positive, -torch.inf)

        # Each p(z) needs the whole sum. The first pass computes it, and keeps no activations of the
        # encoder.
        with torch.no_grad():
            log_partition = torch.full_like(anchors.positive_scores, -torch.inf)
            for chunk in chunks:
                scores, counts = scores_and_counts(*chunk)
                log_sum = torch.logsumexp(scores + counts, dim=-1)
                log_partition = torch.logaddexp(log_partition, log_sum)
        self.record(log_partition=log_partition)

        def chunk_gradient(items: Tensor, log_counts: Tensor) -> Tensor:
            """Return (X, A) zeros with the gradient Σ_z p(z)·∇s_z/τ over the chunk."""
            scores, counts = scores_and_counts(items, log_counts)
            # An anchor without negatives is only attracted to its positive.
            log_sum = log_partition.nan_to_num(neginf=0.0)[..., None]
            weights = torch.exp(scores.detach() + counts - log_sum)  # (X, A, n)
            return Estimate.apply(torch.zeros_like(log_partition), scores, weights)

        positive = anchors.positive_scores[..., None]
        value = self.log_odds(log_partition, positive[..., 0])
        losses: Tensor = Estimate.apply(value, positive, torch.full_like(positive, -1.0))
        for chunk in chunks:
            # The backward pass encodes each chunk again, so that activations of a single chunk
            # exist at a time.
            losses = losses + checkpoint(chunk_gradient, *chunk, use_reentrant=False)
        return losses

    def _corpus(self, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """Return (X, n) all candidate items, padded with -1, and (X, n) log multiplicities."""
        sizes = [self.corpus.num_items(direction) for direction in anchors.directions]
        items = torch.full((len(sizes), max(sizes)), PADDING)
        counts = torch.zeros(items.shape, dtype=torch.float64)
        for x, (direction, size) in enumerate(zip(anchors.directions, sizes, strict=True)):
            items[x, :size] = torch.arange(size)
            by_item = self.corpus.item_counts(direction)
            counts[x, :size] = 1.0 if by_item is None else by_item.cpu().double()
        return items, counts.log()
