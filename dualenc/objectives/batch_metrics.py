"""Metrics of the batch, computed alike for every objective, so that runs can be compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dualenc.objectives.anchors import Anchors, log_mean


def batch_metrics(
    directions: list[Anchors], log_num_negatives: Callable[[Anchors], Tensor]
) -> dict[str, Tensor]:
    """Compute the in-batch estimate of L(θ), the accuracy, the similarity of positives, and τ.

    The accuracy is the share of anchors whose positive scores above all negatives.

    Args:
        directions: all anchors of this rank.
        log_num_negatives: function that returns (X, A) the log of the number of negatives of each
            anchor in the corpus.
    """
    estimates = []  # (X,) each
    accuracies = []
    similarities = []
    for anchors in directions:
        batch_mean, hardest = anchors.in_blocks(_log_mean_and_hardest)
        has_negatives = batch_mean > -torch.inf
        positive = anchors.positive_scores
        estimate = batch_mean + log_num_negatives(anchors) - positive
        # A rank without anchors, and anchors without negatives, report 0 instead of NaN.
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
    # The maximum of an empty set of candidates is undefined.
    hardest = logits.amax(dim=-1) if logits.shape[-1] else block.positive_scores
    # Mined negatives are harder than most items, and would bias the estimate.
    return log_mean(logits[..., : block.num_batch]), hardest
