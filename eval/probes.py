"""Methods that are tried and not part of the package; rows of `eval/small_batch.py` run them.

`PredictedPartition`: a small network predicts each anchor's log-normaliser from its embedding, in place of a table by
item: no ids, nothing to remember of items seen once (NeuCLIP, Wei et al. 2025, arXiv:2511.08417; AmorLIP, Sun et al.
2025, arXiv:2505.18983). The network minimises E[exp(s/τ − h)] + h, which is least at h = log E[exp(s/τ)].

`SharedRobustTemperature`: the temperature that the robust loss learns, one for all anchors (FastCLIP-v3, Wei et al.
2024, arXiv:2407.01445).

`DualBank`: the last batches of both sides join the batch as anchors and as candidates, which makes up for the negatives
that gradient accumulation loses (ContAccum, Kim et al. 2024, arXiv:2406.12356).

`TeacherBatches`: batches of communities of a teacher's hard negatives (B3, Thirukovalluru et al. 2025,
arXiv:2505.11293): an edge joins two pairs where the document of one is among the teacher's nearest to the query of the
other, without the very nearest, which are likely positives; groups along the graph are dealt to batches at random.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor, nn

from dualenc.batching import BatchSelector
from dualenc.objectives import ISogCLR, MomentumQueue, SogCLR
from dualenc.objectives.anchors import Anchors

HIDDEN = 128


class PredictedPartition(SogCLR):
    """SogCLR whose u_a is predicted from the anchor's embedding.

    Args:
        dim: D, size of the embeddings.
        rate: learning rate of the predictor.
        updates: its gradient steps for each step of the towers.
        **common: see `SogCLR`.
    """

    def __init__(self, *, dim: int = 64, rate: float = 1e-3, updates: int = 2, **common: Any) -> None:
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
        """(X, A) predicted log mean of exp(s/τ) of each anchor, after a step towards this batch's (X, A)."""
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
        self.tau.sub_(self.temperature_rate * self.tau_momentum).clamp_(self.min_temperature, self.max_temperature)


class DualBank(MomentumQueue):
    """InfoNCE of all pairs of the batch and of two queues, each anchor against all of them; for two towers on one rank.

    Shapes: P pairs of the batch, Q of the queues, D dimension.
    """

    def __init__(self, **queue: Any) -> None:
        super().__init__(**queue)
        self.momentum = None  # the queues hold the encoder's own embeddings

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        # Left anchors have right candidates, and the other way round; both queues hold the same pairs in one order.
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
        both = torch.stack([logits.logsumexp(dim=1), logits.logsumexp(dim=0)]) - scores.diagonal()  # (2, P + Q)
        if self.updates_state:
            for direction in (0, 1):
                queue = self.queues[direction]
                queue.write(anchors.candidate_ids[direction], anchors.candidates[direction].detach())
        return both.mean(dim=1, keepdim=True).expand(2, len(left))


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

    def select(self, epoch: int, left: np.ndarray | None = None, right: np.ndarray | None = None) -> np.ndarray:
        """(num_batches, B) pair indices; the groups begin elsewhere along the graph in each epoch."""
        draw = self.generator(epoch)
        order = np.roll(self.order, draw.integers(self.num_pairs))
        num_groups = self.num_batches * self.batch_size // self.group_size
        groups = order[: num_groups * self.group_size].reshape(num_groups, self.group_size)
        return draw.permutation(groups).reshape(self.num_batches, self.batch_size)
