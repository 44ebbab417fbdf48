"""NegativeCache: one negative per anchor, drawn from the softmax over a memory bank.

Shapes: see `anchors`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.objectives.anchors import PADDING, Anchors, find, log_mean
from dualenc.objectives.base import CommonArguments, Estimate
from dualenc.objectives.checks import check_range
from dualenc.objectives.memory import MemoryObjective, draw_per_anchor
from dualenc.objectives.outside_items import OutsideEncoder

REFRESH_CHUNK = 256  # items encoded at a time in a refresh


class DrawPlan(NamedTuple):
    """The drawn negatives."""

    outside: Tensor  # (X, A) drawn items that are not in the batch; -1 elsewhere
    drawn: Tensor  # (X, A) all drawn items; -1 for an anchor without negatives
    is_found: Tensor  # (X, A) True if the item is in the batch
    column: Tensor  # (X, A) its column there; any valid column if not found
    log_partition: Tensor  # (X, A) log Z


class NegativeCache(MemoryObjective):
    """One negative per anchor, drawn from the softmax over a memory bank of the corpus.

    The drawn negative is re-encoded, so its gradient is that of the current model, while the law it
    was drawn from is slightly stale. Each step re-encodes the items that waited longest, a share of
    the corpus; items of the batch, mined negatives and drawn negatives are stored as they come.
    Every item of the corpus counts once, however many pairs it is in. With views an image is two
    items. Source: Lindgren et al. 2021, "Efficient training of retrieval models using negative
    cache" (NeurIPS), Algorithm 1.

        criterion = NegativeCache(num_left=m, num_right=n, refresh=0.01)
        criterion(left, right, left_id, right_id, encode=encode).loss.backward()

    Args:
        refresh: ρ in [0, 1], share of the corpus that a step re-encodes, without gradient.
        **memory: see `MemoryObjective`.
    """

    def __init__(self, *, refresh: float = 0.01, **memory: Unpack[CommonArguments]) -> None:
        super().__init__(**memory)
        check_range("refresh", refresh, "[0, 1]")
        self.refresh = refresh
        self.corpus.counts_pairs = False

    def anchor_losses(self, anchors: Anchors, encoder: OutsideEncoder | None) -> Tensor:
        assert encoder is not None
        if self.updates_state:
            with torch.no_grad():
                self._encode_oldest(anchors, encoder)
                self.remember(anchors, anchors.candidate_items, anchors.candidates)
        return super().anchor_losses(anchors, encoder)

    def plan(self, anchors: Anchors) -> DrawPlan:
        uniform = self.draws.uniform(
            2, len(self.directions), anchors.num_batch, like=anchors.embeddings
        )
        drawn, _, log_mean_exp = draw_per_anchor(self.memories, anchors, uniform)
        if not self.updates_state:
            # A training call has stored the batch already; in evaluation the memory may be empty.
            in_batch = anchors.in_blocks(lambda block: log_mean(block.logits))
            log_mean_exp = log_mean_exp.where(log_mean_exp > -torch.inf, in_batch)
        log_partition = log_mean_exp + self.corpus.log_num_negatives(anchors)
        is_found, column = find(anchors.candidate_items, drawn)
        return DrawPlan(
            drawn.masked_fill(is_found, PADDING), drawn, is_found, column, log_partition
        )

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        assert outside is not None
        if self.updates_state:
            items = anchors.gather(plan.outside)  # (X, G)
            embeddings = anchors.gather(outside)  # (X, G, D)
            for x, direction in enumerate(anchors.directions):
                self.memories[direction].write(items[x], embeddings[x])
        positive = anchors.positive_scores  # (X, A)
        in_batch = anchors.candidates.take_along_dim(plan.column[..., None], dim=1)  # (X, A, D)
        negatives = torch.where(plan.is_found[..., None], in_batch, outside)
        negative = (anchors.embeddings * negatives).sum(dim=-1) / anchors.temperature  # (X, A)
        # An anchor without a drawn negative is only attracted to its positive.
        weight = (plan.drawn != PADDING).to(negative)
        self.record(log_mean_exp=plan.log_partition - self.corpus.log_num_negatives(anchors))
        value = self.log_odds(plan.log_partition, positive)
        # The drawn negative has weight 1: E[∇s_z/τ] under the softmax is the gradient of log Z.
        return Estimate.apply(value, negative[..., None], weight[..., None], positive)

    def _encode_oldest(self, anchors: Anchors, encoder: OutsideEncoder) -> None:
        """Re-encode the items that waited longest, a share of the corpus; ranks split the work."""
        for direction in anchors.directions:
            memory = self.memories[direction]
            due = memory.due(self.refresh)
            if not len(due):
                continue
            own, sizes = distributed.share(due)
            # The same number of chunks on every rank, because all must make the same collective
            # passes.
            num_chunks = math.ceil(max(sizes) / REFRESH_CHUNK)
            encoded = []
            for chunk in own.tensor_split(num_chunks):
                [embeddings] = encoder(chunk[None], (direction,))
                encoded.append(embeddings)
            embeddings = distributed.gather(torch.cat(encoded), sizes)
            memory.write(due.to(embeddings.device, non_blocking=True), embeddings)
