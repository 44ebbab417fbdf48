"""Metrics of the batch, the same for every objective, so that runs can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from dualenc.objectives.anchors import Anchors, log_count


class Metrics(Mapping[str, Tensor]):
    """Detached scalars for logging, averaged over this rank's anchors, and computed when the first of them is read.

    Until then this holds the batch's embeddings without their graph. Reading asks no other process, so one rank may
    read and another not.

    Args:
        compute: gives the scalars by name, and (2b,) the `batch_estimate` of each anchor.
    """

    NAMES = ("batch_estimate", "accuracy", "positive_similarity", "temperature")

    def __init__(self, compute: Callable[[], tuple[dict[str, Tensor], Tensor]]) -> None:
        self._compute = compute
        self._computed: tuple[dict[str, Tensor], Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self._results()[0][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.NAMES)

    def __len__(self) -> int:
        return len(self.NAMES)

    def __repr__(self) -> str:
        return repr({name: float(value) for name, value in self.items()})

    @property
    def per_anchor(self) -> Tensor:
        """(2b,) the `batch_estimate` of each anchor, left ones first."""
        return self._results()[1]

    def _results(self) -> tuple[dict[str, Tensor], Tensor]:
        if self._computed is None:
            self._computed = self._compute()
        return self._computed


@torch.no_grad()
def batch_metrics(
    directions: list[Anchors], log_num_negatives: Callable[[Anchors], Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """In-batch estimate of L(θ), share of anchors whose positive is above all negatives, similarity of positives, τ.

    Args:
        directions: all anchors of this rank.
        log_num_negatives: gives (X, A) the log of the number of negatives that anchors have in the corpus.

    Returns:
        Scalars by name; (2b,) the estimate of each anchor, 0 without negatives.
    """
    estimates = []
    values: dict[str, list[Tensor]] = {name: [] for name in Metrics.NAMES}  # (X,) each
    for anchors in directions:
        batch_mean, hardest, has_negatives = anchors.by_blocks(_log_mean_and_hardest)
        positive = anchors.positive_scores
        estimate = batch_mean + log_num_negatives(anchors) - positive
        estimate = estimate.where(has_negatives, 0.0)
        estimates.append(estimate.flatten())
        # A rank without anchors reports 0, not NaN.
        values["batch_estimate"].append(estimate.sum(dim=-1) / has_negatives.sum(dim=-1).clamp(min=1))
        values["accuracy"].append((positive > hardest).to(positive).mean(dim=-1).nan_to_num())
        values["positive_similarity"].append(anchors.positive_similarities.mean(dim=-1).nan_to_num())
        values["temperature"].append(anchors.temperature[None])
    means = {name: torch.cat(parts).mean() for name, parts in values.items()}
    return means, torch.cat(estimates)


def log_mean_exp(block: Anchors) -> Tensor:
    """(X, A) log of the mean of exp(s/τ) over the negatives of the batch; -inf without any."""
    return log_mean(block.logits)


def log_mean(logits: Tensor) -> Tensor:
    """(X, A) log of the mean of exp of those of logits (X, A, C) that are not -inf; -inf without any."""
    return logits.logsumexp(dim=-1) - log_count(logits > -torch.inf, like=logits)


def _log_mean_and_hardest(block: Anchors) -> tuple[Tensor, ...]:
    logits = block.logits  # (X, a, C)
    is_negative = logits > -torch.inf
    # A rank with no candidates at all has no maximum.
    hardest = logits.amax(dim=-1) if logits.shape[-1] else block.positive_scores
    return log_mean(logits), hardest, is_negative.any(dim=-1)
