"""Methods that are tried and not part of the package: rows of `small_batch.py`, see `rows.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor, nn
from torch.nn import functional as F

from dualenc.batching import BatchSelector, batch_losses
from dualenc.objectives import GlobalCache, InfoNCE, ISogCLR, MomentumQueue, Objective, SogCLR
from dualenc.objectives.anchors import PADDING, Anchors, is_listed
from dualenc.objectives.item_tables import (
    first_occurrence,
    mean_over_duplicates,
    write_log_means,
    write_rows,
)
from dualenc.objectives.outside_items import OutsideEncoder

# Of a predictor; updates for each step of the towers.
HIDDEN, PREDICTOR_RATE, UPDATES = 128, 1e-3, 2
# Ranks of a teacher's hard negatives, and the size of a group of pairs.
LIKELY_POSITIVES, EDGES, GROUP = 30, 130, 16


class PredictedPartition(SogCLR):
    """SogCLR whose u_a a small network predicts from the anchor's embedding, in place of a table.

    It minimizes E[exp(s/τ − h)] + h, which is least at h = log E[exp(s/τ)], and remembers nothing
    by id (NeuCLIP, Wei et al. 2025, arXiv:2511.08417; AmorLIP, Sun et al. 2025, arXiv:2505.18983).
    """

    def __init__(self, *, dim: int = 64, **common: Any) -> None:
        super().__init__(**common)
        # One for each direction. In a tuple, and so no part of what the trainer optimizes.
        self.predictors = tuple(
            nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)) for _ in range(2)
        )
        parameters = [p for predictor in self.predictors for p in predictor.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=PREDICTOR_RATE)
        self.has_begun = False

    def update_averages(self, anchors: Anchors, log_mean: Tensor) -> Tensor:
        """Return (X, A) predicted log means of exp(s/τ), after steps towards those of the batch."""
        embeddings = anchors.embeddings.detach().float()
        if self.updates_state and not self.has_begun:
            # From zero the first weights, exp(s/τ), would be enormous.
            for predictor in self.predictors:
                nn.init.zeros_(predictor[-1].weight)
                nn.init.constant_(predictor[-1].bias, float(log_mean.mean() * anchors.temperature))
            self.has_begun = True
        if self.updates_state:
            with torch.enable_grad():
                for _ in range(UPDATES):
                    predicted = self._predict(embeddings, anchors)
                    bound = (log_mean - predicted).exp() + predicted
                    self.optimizer.zero_grad()
                    bound.mean().backward()
                    self.optimizer.step()
        return self._predict(embeddings, anchors).detach().to(log_mean)

    def _predict(self, embeddings: Tensor, anchors: Anchors) -> Tensor:
        rows = zip(anchors.directions, embeddings, strict=True)
        # In units of similarities, which are alike for every τ.
        predicted = [self.predictors[direction](row).squeeze(-1) for direction, row in rows]
        return torch.stack(predicted) / anchors.temperature.detach()


class SCENT(SogCLR):
    """SogCLR whose moving average has a rate for each anchor, by the average u_a before the step.

        γ_a = sigmoid(log α + κ·log u_a)

    κ = 0 is SogCLR. α is such that γ_a is `gamma` at the running mean of log u (Wei et al. 2026,
    arXiv:2602.02877, where κ = 1 and α is chosen). On one rank.
    """

    mean_log_u: Tensor

    def __init__(self, *, kappa: float, mean_rate: float = 0.05, **common: Any) -> None:
        super().__init__(**common)
        self.kappa = kappa
        self.mean_rate = mean_rate
        self.register_buffer("mean_log_u", torch.tensor(torch.nan))

    def update_averages(self, anchors: Anchors, log_means: Tensor) -> Tensor:
        """Update u_a by this batch's log mean of exp(s/τ) (X, A), and return (X, A) log u_a."""
        remembered = self.log_u[anchors.rows].to(log_means)
        visited = remembered[remembered.isfinite()]
        if self.updates_state and len(visited):
            mean = visited.mean().to(self.mean_log_u)
            before = mean if self.mean_log_u.isnan() else self.mean_log_u
            self.mean_log_u.copy_(torch.lerp(before, mean, self.mean_rate))
        deviation = (remembered - self.mean_log_u).nan_to_num().double()
        odds = math.log(self.gamma / (1 - self.gamma)) + self.kappa * deviation  # of γ_a
        share_of_old = remembered + F.logsigmoid(-odds).to(log_means)
        share_of_new = log_means + F.logsigmoid(odds).to(log_means)
        mixed = torch.logaddexp(share_of_old, share_of_new)
        has_negatives = log_means > -torch.inf
        updated = torch.where(remembered.isnan(), log_means, mixed)
        log_u = torch.where(has_negatives, updated, remembered)
        if self.updates_state:
            rows = anchors.rows.flatten()
            write_log_means(self.log_u, rows, log_u.flatten(), has_negatives.flatten())
        self.record(log_mean_exp=log_u, gamma=odds.sigmoid().to(log_u))
        return log_u.nan_to_num(nan=-torch.inf)


class SharedRobustTemperature(ISogCLR):
    """iSogCLR with one τ for all anchors: its slope is the mean over the batch's.

    Source: FastCLIP-v3, Wei et al. 2024, arXiv:2407.01445.
    """

    def _move_temperatures(self, anchors: Anchors, slope: Tensor, usable: Tensor) -> None:
        self.tau_momentum.lerp_(slope[usable].mean().to(self.tau), 1 - self.temperature_momentum)
        self.tau.sub_(self.temperature_rate * self.tau_momentum).clamp_(
            self.min_temperature, self.max_temperature
        )


class DualBank(MomentumQueue):
    """InfoNCE of all P pairs of the batch and Q of two queues, each anchor against all of them.

    That makes up for the negatives that gradient accumulation loses (ContAccum, Kim et al. 2024,
    arXiv:2406.12356). For two towers on one rank.
    """

    def __init__(self, **queue: Any) -> None:
        super().__init__(**queue)
        self.momentum = None  # the queues hold the encoder's own embeddings

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        # Left anchors have right candidates, and the other way round. Both queues hold the same
        # pairs in one order.
        bank_right, bank_right_ids = self.queues[0].held(anchors.candidates)
        bank_left, bank_left_ids = self.queues[1].held(anchors.candidates)
        right, left = anchors.candidates  # (P, D) each
        right_ids, left_ids = anchors.candidate_ids  # (P,) each
        all_left = torch.cat([left, bank_left])  # (P + Q, D)
        all_right = torch.cat([right, bank_right])
        ids = (torch.cat([left_ids, bank_left_ids]), torch.cat([right_ids, bank_right_ids]))
        scores = all_left @ all_right.T / anchors.temperature  # (P + Q, P + Q)
        shares_item = (ids[0][:, None] == ids[0]) | (ids[1][:, None] == ids[1])
        not_candidate = shares_item.fill_diagonal_(False)
        logits = scores.masked_fill(not_candidate, -torch.inf)
        totals = torch.stack([logits.logsumexp(dim=1), logits.logsumexp(dim=0)])
        both = totals - scores.diagonal()  # (2, P + Q)
        if self.updates_state:
            self.queues[0].write(right_ids, right.detach())
            self.queues[1].write(left_ids, left.detach())
        return both.mean(dim=1, keepdim=True).expand(2, len(left))


class FalseNegativeFilter(Objective):
    """Mixed into an objective: what `false_negatives` finds is no negative, on one rank.

    It returns ids (X, A, K), or -1. Before `start`, a share of the training, all are negatives.
    """

    false_negatives: Callable[[Anchors], Tensor]

    def __init__(self, *, start: float = 0.4, **objective: Any) -> None:
        super().__init__(**objective)
        self.start = start
        self.has_begun = start == 0

    def set_progress(self, fraction: float) -> None:
        """Begin after the start, see `report_progress` of `outside.py`."""
        self.has_begun = fraction >= self.start

    def anchor_losses(self, anchors: Anchors, encoder: OutsideEncoder | None) -> Tensor:
        if self.has_begun:
            with torch.no_grad():
                anchors = with_positives(anchors, self.false_negatives(anchors))
        return super().anchor_losses(anchors, encoder)


class GlobalFalseNegatives(FalseNegativeFilter):
    """Each anchor learns the similarity λ that only a share α of all its negatives exceeds.

    λ minimizes λ·α + E[max(s − λ, 0)], starting at 1:

        λ ← λ − threshold_rate·(α − share of the batch's negatives with s > λ)/α

    Candidates of the batch with s > λ are left out (GloFND, Balmaseda et al. 2025,
    arXiv:2502.20612).
    """

    threshold: Tensor

    def __init__(self, *, alpha: float, threshold_rate: float = 0.05, **objective: Any) -> None:
        super().__init__(**objective)
        self.alpha = alpha
        self.threshold_rate = threshold_rate
        self.register_buffer("threshold", torch.ones(self.corpus.num_rows))

    def false_negatives(self, anchors: Anchors) -> Tensor:
        # (X, A, C)
        similarities = anchors.similarities.masked_fill(anchors.not_negative, -torch.inf)
        if self.updates_state:
            self._move_thresholds(anchors, similarities)
        threshold = self.threshold[anchors.rows].to(similarities)
        is_beyond = similarities > threshold[..., None]
        self.record(threshold=threshold, left_out=is_beyond.sum(dim=-1).to(similarities))
        return anchors.candidate_ids[:, None].where(is_beyond, PADDING)

    def _move_thresholds(self, anchors: Anchors, similarities: Tensor) -> None:
        """Step against the subgradient, by similarities (X, A, C), -inf where no negative is."""
        rows = anchors.rows.flatten()
        beyond = similarities > self.threshold[anchors.rows].to(similarities)[..., None]
        share = beyond.sum(dim=-1) / anchors.num_negatives.clamp(min=1)  # (X, A)
        slope = (1 - share / self.alpha).flatten().to(self.threshold)
        usable = (anchors.num_negatives > 0).flatten()
        slope, written = mean_over_duplicates(slope, usable, first_occurrence(rows))
        moved = (self.threshold[rows] - self.threshold_rate * slope).clamp(-1, 1)
        write_rows(self.threshold, rows, moved, written)


class FilteredInfoNCE(GlobalFalseNegatives, InfoNCE):
    """InfoNCE of the batch's negatives below the threshold."""


class FilteredSogCLR(GlobalFalseNegatives, SogCLR):
    """SogCLR, whose averages are of the negatives below the threshold."""


class FilteredGlobalCache(FalseNegativeFilter, GlobalCache):
    """GlobalCache without the `count` remembered items that are nearest to each anchor.

    Where embeddings are remembered, the threshold needs no learning.
    """

    def __init__(self, *, count: int, **objective: Any) -> None:
        super().__init__(**objective)
        self.count = count

    def false_negatives(self, anchors: Anchors) -> Tensor:
        nearest = []
        for x, direction in enumerate(anchors.directions):
            memory = self.memories[direction]
            if not len(memory.keys):
                nearest.append(anchors.rows.new_full((anchors.rows.shape[1], 0), PADDING))
                continue
            remembered = memory.embeddings.to(anchors.embeddings)
            similarities = anchors.embeddings[x] @ remembered.T  # (A, N)
            is_positive = is_listed(memory.keys, anchors.positive_ids[x])
            hidden = similarities.masked_fill(is_positive | (memory.keys == PADDING), -torch.inf)
            values, slots = hidden.topk(min(self.count, len(memory.keys)), dim=1)
            nearest.append(memory.keys[slots].where(values > -torch.inf, PADDING))
        return torch.stack(nearest)


def with_positives(anchors: Anchors, ids: Tensor) -> Anchors:
    """Return the same anchors, with ids (X, A, K), or -1, that are no negatives either."""
    listed = torch.cat([anchors.positive_ids, ids], dim=-1).sort(dim=-1).values
    is_repeated = torch.zeros_like(listed, dtype=torch.bool)
    is_repeated[..., 1:] = listed[..., 1:] == listed[..., :-1]
    distinct = listed.masked_fill(is_repeated, PADDING).sort(dim=-1).values
    return replace(anchors, positive_ids=distinct)


class TeacherBatches(BatchSelector):
    """Batches of groups of pairs that a teacher finds hard for one another.

    An edge joins two pairs where the document of one is among the teacher's nearest to the query of
    the other, without the very nearest, which are likely positives; groups along the graph are
    dealt to batches at random (B3, Thirukovalluru et al. 2025, arXiv:2505.11293).
    """

    def __init__(self, left: np.ndarray, right: np.ndarray, batch_size: int, seed: int = 0) -> None:
        super().__init__(len(left), batch_size, seed)
        nearest = np.argsort(-(left @ right.T), axis=1)[:, LIKELY_POSITIVES:EDGES]
        sources = np.repeat(np.arange(len(left)), nearest.shape[1])
        ones, size = np.ones(nearest.size, dtype=np.float32), (len(left), len(left))
        graph = coo_matrix((ones, (sources, nearest.ravel())), shape=size).tocsr()
        self.order = reverse_cuthill_mckee(graph + graph.T, symmetric_mode=True).astype(np.int64)

    def select(
        self, epoch: int, left: np.ndarray | None = None, right: np.ndarray | None = None
    ) -> np.ndarray:
        """Return (num_batches, B) pairs; groups begin elsewhere along the graph in each epoch."""
        draw = self.generator(epoch)
        order = np.roll(self.order, draw.integers(self.num_pairs))
        num_groups = self.num_batches * self.batch_size // GROUP
        groups = order[: num_groups * GROUP].reshape(num_groups, GROUP)
        return draw.permutation(groups).reshape(self.num_batches, self.batch_size)


class OSGDBatches(BatchSelector):
    """Ordered SGD: of each k random batches the q with the largest loss.

    The k batches are disjoint: an epoch is a random partition into batches, cut into windows of k,
    of which the last may be shorter and gives in proportion. Source: Cho et al. 2023,
    arXiv:2307.05906, Algorithm 6; Kawaguchi and Lu 2020, arXiv:1907.04371.
    """

    needs_embeddings = True

    def __init__(
        self, *pairs: int, k: int = 1500, q: int = 150, temperature: float = 0.1, **seed: int
    ) -> None:
        super().__init__(*pairs, **seed)
        self.k = k
        self.q = q
        self.temperature = temperature

    @property
    def num_batches(self) -> int:
        """Number of batches that `select` returns with embeddings."""
        full, rest = divmod(self.num_pairs // self.batch_size, self.k)
        return full * self.q + math.ceil(self.q * rest / self.k)

    def select(
        self, epoch: int, left: np.ndarray | None = None, right: np.ndarray | None = None
    ) -> np.ndarray:
        """Return batches as `BatchSelector.select`, by falling loss within each window of k."""
        candidates = self.random_batches(self.generator(epoch))
        if left is None:
            return candidates
        left, right = self.check_embeddings(left, right)
        losses = batch_losses(left, right, candidates, self.temperature)
        chosen = []
        for start in range(0, len(candidates), self.k):
            # A stable sort, so that equal losses give equal batches on every rank.
            order = start + np.argsort(-losses[start : start + self.k], kind="stable")
            chosen.append(candidates[order[: math.ceil(self.q * len(order) / self.k)]])
        return np.concatenate(chosen)
