"""Metrics of the batch, the same for every objective, so that runs can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from dualenc.objectives.anchors import Anchors


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
    means, estimates = [], []
    for anchors in directions:
        log_mean, hardest, num_negatives = anchors.by_blocks(_log_mean_and_hardest)
        positive, has_negatives = anchors.positive_scores, num_negatives > 0
        estimate = torch.where(has_negatives, log_mean + log_num_negatives(anchors) - positive, 0.0)
        estimates.append(estimate.flatten())
        for x in range(len(anchors.directions)):
            values = (
                estimate[x].sum() / has_negatives[x].sum().clamp(min=1),
                (positive[x] > hardest[x]).to(positive).mean().nan_to_num(),
                anchors.positive_similarities[x].mean().nan_to_num(),
                anchors.temperature,
            )
            means.append(torch.stack(values))
    return dict(zip(Metrics.NAMES, torch.stack(means).mean(dim=0).unbind(), strict=True)), torch.cat(estimates)


def log_mean_exp(block: Anchors) -> Tensor:
    """(X, A) log of the mean of exp(s/τ) over the negatives of the batch; -inf without any."""
    not_negative = block.not_negative
    count = (~not_negative).sum(dim=-1).clamp(min=1)
    return block.scores.masked_fill(not_negative, -torch.inf).logsumexp(dim=-1) - count.to(block.scores.dtype).log()


def _log_mean_and_hardest(block: Anchors) -> tuple[Tensor, ...]:
    logits = block.logits
    num_negatives = (logits > -torch.inf).sum(dim=-1)
    log_mean = logits.logsumexp(dim=-1) - num_negatives.clamp(min=1).to(logits).log()
    hardest = logits.amax(dim=-1) if logits.shape[-1] else block.positive_scores
    return log_mean, hardest, num_negatives
