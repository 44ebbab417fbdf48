"""Methods that are tried and not part of the package; rows of `eval/small_batch.py` run them.

`PredictedPartition`: a small network predicts each anchor's log-normaliser from its embedding, in
place of a table by item: no ids, nothing to remember of items seen once (NeuCLIP, Wei et al. 2025,
arXiv:2511.08417; AmorLIP, Sun et al. 2025, arXiv:2505.18983). The network minimises E[exp(s/τ − h)]
+ h, which is least at h = log E[exp(s/τ)].

`SharedRobustTemperature`: the temperature that the robust loss learns, one for all anchors
(FastCLIP-v3, Wei et al. 2024, arXiv:2407.01445).

`DualBank`: the last batches of both sides join the batch as anchors and as candidates, which makes
up for the negatives that gradient accumulation loses (ContAccum, Kim et al. 2024,
arXiv:2406.12356).

`TeacherBatches`: batches of communities of a teacher's hard negatives (B3, Thirukovalluru et al.
2025, arXiv:2505.11293): an edge joins two pairs where the document of one is among the teacher's
nearest to the query of the other, without the very nearest, which are likely positives; groups
along the graph are dealt to batches at random.

`OSGDBatches`: of random batches those with the largest loss (ordered SGD, Cho et al. 2023,
arXiv:2307.05906).

`GlobalFalseNegatives`: each anchor learns the similarity that only a share α of all its negatives
exceeds, and these are left out as likely false negatives (GloFND, Balmaseda et al. 2025,
arXiv:2502.20612). Mixed into `InfoNCE` and `SogCLR`. Where embeddings are remembered, the threshold
needs no learning: `FilteredGlobalCache`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor, nn

from dualenc.batching import BatchSelector, batch_losses
from dualenc.batching.selector import check_at_least
from dualenc.errors import DualencError
from dualenc.objectives import GlobalCache, InfoNCE, ISogCLR, MomentumQueue, Objective, SogCLR
from dualenc.objectives.anchors import PADDING, Anchors, is_listed
from dualenc.objectives.item_tables import first_occurrence, mean_over_duplicates, write_rows
from dualenc.objectives.outside_items import OutsideEncoder

HIDDEN = 128


class PredictedPartition(SogCLR):
    """SogCLR whose u_a is predicted from the anchor's embedding.

    Args:
        dim: D, size of the embeddings.
        rate: learning rate of the predictor.
        updates: its gradient steps for each step of the towers.
        **common: see `SogCLR`.
    """

    def __init__(
        self, *, dim: int = 64, rate: float = 1e-3, updates: int = 2, **common: Any
    ) -> None:
        super().__init__(**common)
        self.updates = updates
        # One for each direction. In a tuple, and so no part of what the trainer optimises.
        self.predictors = tuple(
            nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)) for _ in range(2)
        )
        parameters = [p for predictor in self.predictors for p in predictor.parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=rate)
        self.has_begun = False

    def update_averages(self, anchors: Anchors, log_mean: Tensor) -> Tensor:
        """(X, A) predicted log mean of exp(s/τ) of each anchor, after a step towards this batch's
        (X, A)."""
        embeddings = anchors.embeddings.detach().float()
        if self.updates_state and not self.has_begun:
            # From zero the first weights, exp(s/τ), would be enormous.
            for predictor in self.predictors:
                nn.init.zeros_(predictor[-1].weight)
                nn.init.constant_(predictor[-1].bias, float(log_mean.mean() * anchors.temperature))
            self.has_begun = True
        if self.updates_state:
            with torch.enable_grad():
                for _ in range(self.updates):
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


class SharedRobustTemperature(ISogCLR):
    """iSogCLR with one τ: its slope is the mean over the batch's anchors, see `ISogCLR`."""

    def _move_temperatures(self, anchors: Anchors, slope: Tensor, usable: Tensor) -> None:
        self.tau_momentum.lerp_(slope[usable].mean().to(self.tau), 1 - self.temperature_momentum)
        self.tau.sub_(self.temperature_rate * self.tau_momentum).clamp_(
            self.min_temperature, self.max_temperature
        )


class DualBank(MomentumQueue):
    """InfoNCE of all pairs of the batch and of two queues, each anchor against all of them; for two
    towers on one rank.

    Shapes: P pairs of the batch, Q of the queues, D dimension.
    """

    def __init__(self, **queue: Any) -> None:
        super().__init__(**queue)
        self.momentum = None  # the queues hold the encoder's own embeddings

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        # Left anchors have right candidates, and the other way round; both queues hold the same
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
        both = (
            torch.stack([logits.logsumexp(dim=1), logits.logsumexp(dim=0)]) - scores.diagonal()
        )  # (2, P + Q)
        if self.updates_state:
            for direction in (0, 1):
                queue = self.queues[direction]
                queue.write(
                    anchors.candidate_ids[direction], anchors.candidates[direction].detach()
                )
        return both.mean(dim=1, keepdim=True).expand(2, len(left))


class FalseNegativeFilter(Objective):
    """Mixed into an objective: what `false_negatives` finds is no negative of an anchor. On one
    rank.

    Args:
        start: share of the training before which all are negatives.
        **objective: see the objective that this is mixed into.
    """

    def __init__(self, *, start: float = 0.4, **objective: Any) -> None:
        super().__init__(**objective)
        self.start = start
        self.has_begun = start == 0

    def set_progress(self, fraction: float) -> None:
        """Set the share of the training that is done, see `report_progress` of `outside.py`."""
        self.has_begun = fraction >= self.start

    def anchor_losses(self, anchors: Anchors, encoder: OutsideEncoder | None) -> Tensor:
        if self.has_begun:
            with torch.no_grad():
                anchors = with_positives(anchors, self.false_negatives(anchors))
        return super().anchor_losses(anchors, encoder)

    def false_negatives(self, anchors: Anchors) -> Tensor:
        """(X, A, K) ids of likely false negatives, padded with -1."""
        raise NotImplementedError


class GlobalFalseNegatives(FalseNegativeFilter):
    """The (1 − α)-quantile λ of an anchor's similarities to its negatives minimises λ·α + E[max(s −
    λ, 0)]:

        λ ← λ − η·(α − share of the batch's negatives with s > λ)/α

    starting at 1. Candidates of the batch with s > λ are left out.

    Args:
        alpha: α in (0, 1).
        threshold_rate: η.
        **objective: `start`, after which thresholds are learned and used, and see
            `FalseNegativeFilter`.
    """

    threshold: Tensor

    def __init__(self, *, alpha: float, threshold_rate: float = 0.05, **objective: Any) -> None:
        super().__init__(**objective)
        self.alpha = alpha
        self.threshold_rate = threshold_rate
        self.register_buffer("threshold", torch.ones(self.corpus.num_rows))

    def false_negatives(self, anchors: Anchors) -> Tensor:
        similarities = anchors.similarities.masked_fill(
            anchors.not_negative, -torch.inf
        )  # (X, A, C)
        if self.updates_state:
            self._move_thresholds(anchors, similarities)
        threshold = self.threshold[anchors.rows].to(similarities)
        is_beyond = similarities > threshold[..., None]
        self.record(threshold=threshold, left_out=is_beyond.sum(dim=-1).to(similarities))
        return anchors.candidate_ids[:, None].where(is_beyond, PADDING)

    def _move_thresholds(self, anchors: Anchors, similarities: Tensor) -> None:
        """A step against the subgradient, by the similarities (X, A, C) of the batch's negatives,
        -inf elsewhere."""
        rows = anchors.rows.flatten()
        beyond = similarities > self.threshold[anchors.rows].to(similarities)[..., None]
        share = beyond.sum(dim=-1) / anchors.num_negatives.clamp(min=1)  # (X, A)
        slope = (1 - share / self.alpha).flatten().to(self.threshold)
        slope, written = mean_over_duplicates(
            slope, (anchors.num_negatives > 0).flatten(), first_occurrence(rows)
        )
        moved = (self.threshold[rows] - self.threshold_rate * slope).clamp(-1, 1)
        write_rows(self.threshold, rows, moved, written)


class FilteredInfoNCE(GlobalFalseNegatives, InfoNCE):
    """InfoNCE of the batch's negatives below the threshold."""


class FilteredSogCLR(GlobalFalseNegatives, SogCLR):
    """SogCLR, whose averages are of the negatives below the threshold."""


class FilteredGlobalCache(FalseNegativeFilter, GlobalCache):
    """GlobalCache without the remembered items beyond each anchor's exact (1 − count/N)-quantile.

    Args:
        count: remembered items to leave out of each anchor's negatives.
        **objective: see `GlobalCache`.
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
            similarities = (
                anchors.embeddings[x] @ memory.embeddings.to(anchors.embeddings).T
            )  # (A, N)
            is_positive = is_listed(memory.keys, anchors.positive_ids[x])
            hidden = similarities.masked_fill(is_positive | (memory.keys == PADDING), -torch.inf)
            values, slots = hidden.topk(min(self.count, len(memory.keys)), dim=1)
            nearest.append(memory.keys[slots].where(values > -torch.inf, PADDING))
        return torch.stack(nearest)


def with_positives(anchors: Anchors, ids: Tensor) -> Anchors:
    """The same anchors, with ids (X, A, K), or -1, that are no negatives either."""
    listed = torch.cat([anchors.positive_ids, ids], dim=-1).sort(dim=-1).values
    is_repeated = torch.zeros_like(listed, dtype=torch.bool)
    is_repeated[..., 1:] = listed[..., 1:] == listed[..., :-1]
    return replace(
        anchors, positive_ids=listed.masked_fill(is_repeated, PADDING).sort(dim=-1).values
    )


class TeacherBatches(BatchSelector):
    """Batches of groups of pairs that a teacher finds hard for one another.

    Args:
        left, right: (M, D) unit-norm vectors of each pair's items by the teacher.
        batch_size: B.
        skip: p, the nearest documents of a query that are left out as likely positives.
        neighbors: m, the documents after them that are its edges.
        group_size: K, pairs of a group; a batch has B/K groups.
        seed: of the order of the groups.
    """

    def __init__(
        self,
        left: np.ndarray,
        right: np.ndarray,
        batch_size: int,
        skip: int = 30,
        neighbors: int = 100,
        group_size: int = 16,
        seed: int = 0,
    ) -> None:
        super().__init__(len(left), batch_size, seed)
        self.group_size = group_size
        ranked = np.argsort(-(left @ right.T), axis=1)[:, skip : skip + neighbors]
        sources = np.repeat(np.arange(len(left)), ranked.shape[1])
        ones = np.ones(ranked.size, dtype=np.float32)
        graph = coo_matrix((ones, (sources, ranked.ravel())), shape=(len(left), len(left))).tocsr()
        self.order = reverse_cuthill_mckee(graph + graph.T, symmetric_mode=True).astype(np.int64)

    def select(
        self, epoch: int, left: np.ndarray | None = None, right: np.ndarray | None = None
    ) -> np.ndarray:
        """(num_batches, B) pair indices; the groups begin elsewhere along the graph in each
        epoch."""
        draw = self.generator(epoch)
        order = np.roll(self.order, draw.integers(self.num_pairs))
        num_groups = self.num_batches * self.batch_size // self.group_size
        groups = order[: num_groups * self.group_size].reshape(num_groups, self.group_size)
        return draw.permutation(groups).reshape(self.num_batches, self.batch_size)


class OSGDBatches(BatchSelector):
    """Ordered SGD: of each k random batches the q with the largest loss; other pairs are left out
    of the epoch.

    The k batches are disjoint (without replacement): an epoch is a random partition into N/B
    batches, cut into windows of k.

    Source: Cho et al. 2023, arXiv:2307.05906, Algorithm 6; Kawaguchi and Lu 2020, arXiv:1907.04371.

    Args:
        num_pairs, batch_size, seed: as of `BatchSelector`.
        k: batches to choose from; a window of fewer (the last, or all if k > N/B) gives in
            proportion.
        q: batches to choose, at most k.
        temperature: τ of the loss.
    """

    needs_embeddings = True

    def __init__(
        self,
        num_pairs: int,
        batch_size: int,
        seed: int = 0,
        k: int = 1500,
        q: int = 150,
        temperature: float = 0.1,
    ) -> None:
        super().__init__(num_pairs, batch_size, seed)
        check_at_least(1, k=k, q=q)
        if q > k:
            raise DualencError(f"q is {q} but k is {k}; choose a q of at most k")
        if not temperature > 0:
            raise DualencError(f"temperature is {temperature}; choose a number above 0")
        self.k = k
        self.q = q
        self.temperature = temperature

    @property
    def num_batches(self) -> int:
        """Batches that one call of `select` returns with embeddings."""
        candidates = self.num_pairs // self.batch_size
        full, rest = divmod(candidates, self.k)
        return full * self.q + self._share_of(rest)

    def select(
        self, epoch: int, left: np.ndarray | None = None, right: np.ndarray | None = None
    ) -> np.ndarray:
        """As `BatchSelector.select`: the batches of the largest loss, by falling loss within each
        window of k."""
        candidates = self.random_batches(self.generator(epoch))
        if left is None:
            return candidates
        left, right = self.check_embeddings(left, right)
        losses = batch_losses(left, right, candidates, self.temperature)
        chosen = []
        for start in range(0, len(candidates), self.k):
            # A stable sort, so that equal losses give equal batches on every rank.
            in_window = losses[start : start + self.k]
            order = np.argsort(-in_window, kind="stable")
            hardest = start + order[: self._share_of(len(order))]
            chosen.append(candidates[hardest])
        return np.concatenate(chosen)

    def _share_of(self, window: int) -> int:
        return math.ceil(self.q * window / self.k)
