"""Metrics of the batch, the same for every objective, so that runs can be compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dualenc.objectives.anchors import Anchors, log_mean


def batch_metrics(
    directions: list[Anchors], log_num_negatives: Callable[[Anchors], Tensor]
) -> dict[str, Tensor]:
    """In-batch estimate of L(θ), share of anchors whose positive is above all negatives, similarity
    of positives, τ.

    Args:
        directions: all anchors of this rank.
        log_num_negatives: gives (X, A) the log of the number of negatives that anchors have in the
            corpus.
    """
    estimates = []  # (X,) each
    accuracies = []
    similarities = []
    for anchors in directions:
        batch_mean, hardest = anchors.in_blocks(_log_mean_and_hardest)
        has_negatives = batch_mean > -torch.inf
        positive = anchors.positive_scores
        estimate = batch_mean + log_num_negatives(anchors) - positive
        # A rank without anchors, or anchors without negatives, report 0, not NaN.
        estimate = estimate.where(has_negatives, 0.0).sum(dim=-1)
        estimates.append(estimate / has_negatives.sum(dim=-1).clamp(min=1))
        accuracies.append((positive > hardest).to(positive).mean(dim=-1).nan_to_num())
        similarities.append(anchors.positive_similarities.mean(dim=-1).nan_to_num())
    return {
        "batch_estimate": torch.cat(estimates).mean(),
        "accuracy": torch.cat(accuracies).mean(),
        "positive_similarity": torch.cat(similarities).mean(),
        "temperature": directions[0].temperature,
    }


def _log_mean_and_hardest(block: Anchors) -> tuple[Tensor, Tensor]:
    logits = block.logits  # (X, a, C)
    # A rank with no candidates at all has no maximum.
    hardest = logits.amax(dim=-1) if logits.shape[-1] else block.positive_scores
    # Mined negatives, harder than most, stand for no others.
    return log_mean(logits[..., : block.num_batch]), hardest
