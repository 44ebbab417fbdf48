"""NegativeCache: one negative per anchor, drawn from the softmax over remembered embeddings of the whole corpus."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import AnchorLosses, Encode, Objective
from dualenc.objectives.chains import NO_STATE, candidate_items, embed, find, known_candidate_items, known_rows
from dualenc.objectives.feature_cache import FeatureCache, queries_of_all, share_remembered
from dualenc.objectives.looks import Asking, upload
from dualenc.objectives.state import SharedRandom

REFRESH_CHUNK = 256


class NegativeCache(Objective):
    """The drawn negative weighs one; it is encoded anew, so the gradient is of the current model, its law a bit old.

    Source: Lindgren et al. 2021, "Efficient training of retrieval models using negative cache", Algorithm 1 (cached
    Gumbel-max gradient descent). Each step encodes a share of the corpus anew, the items that waited longest; the
    items of the batch, mined negatives and the drawn negatives are remembered as they come, at no cost.
    Every item of the corpus counts once, however many pairs it is in. With views an image is two items, its left and
    its right view. Evaluation draws from the cache as it stands.

    Args:
        refresh: ρ in [0, 1], share of the corpus that a step encodes anew (without gradient).
        **common: see `Objective`; num_left (and num_right) are needed, and `encode` in forward.
    """

    needs_num_left = True
    needs_encode = True
    knows_partition = True
    corpus_of_pairs = False

    def __init__(self, *, refresh: float = 0.01, **common: Any) -> None:
        super().__init__(**common)
        if not 0 <= refresh <= 1:
            self._fail("refresh", f"is {refresh}; it must lie in [0, 1], a share of the corpus")
        self.refresh = refresh
        # Named by the items they hold: left anchors draw from the right items.
        self.left_cache = FeatureCache((self.num_left or 1) * (2 if self.views else 1), self.state_on_cpu)
        self.right_cache = self.left_cache if self.views else FeatureCache(self.num_right or 1, self.state_on_cpu)
        self.random = SharedRandom(self.seed)

    def diagnostics(self) -> dict[str, Tensor]:
        """The logs of the mean of exp(s/τ) over what is remembered, and what share of all items that is."""
        share = share_remembered(self.log_temperature, self.left_cache, self.right_cache)
        return self._spread("log_mean_exp") | {"remembered": share}

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> Asking[AnchorLosses]:
        assert encode is not None
        cache = self.left_cache if anchors.candidate_side == "left" else self.right_cache
        items, updates = candidate_items(anchors), self.updates_state
        with torch.no_grad():
            if updates:
                # The share that waited longest is encoded anew; ranks split the work.
                due = cache.due(self.refresh)
                if len(due):
                    own, sizes = distributed.share(due)
                    # In as many chunks on every rank.
                    chunks = own.tensor_split(-(-max(sizes) // REFRESH_CHUNK))
                    renewed = torch.cat([embed(some, encode, anchors) for some in chunks])
                    cache.write(upload(due, items.device), distributed.gather(renewed, sizes), due)
                cache.write(items, anchors.candidates, known_candidate_items(anchors))
            embeddings, barred, guide = queries_of_all(anchors)
            rows = distributed.gather(anchors.rows, anchors.sizes)
            uniform = self.random.uniform(cache.num_blocks + 1, anchors.num_global, like=embeddings)[:, rows]
            first = sum(anchors.sizes[: distributed.rank()])
            gumbels, of_rank = -(-uniform[1:].clamp(min=2**-24).log()).log(), slice(first, first + len(anchors.rows))
            drawn, log_mean = (v[of_rank] for v in cache.draw(embeddings, barred, gumbels, uniform[0], guide))
        # What is drawn from the batch has an embedding already; the rest is encoded, and remembered.
        column = find(items, drawn)
        in_batch = (anchors.embeddings * anchors.candidates[column.clamp(min=0)]).sum(dim=1)
        similarity = torch.where(column >= 0, in_batch, 0.0)
        away, rows = known_rows((yield torch.where(column < 0, drawn, NO_STATE)), anchors)
        embeddings = embed(away, encode, anchors)
        similarity = similarity.index_put((rows,), (anchors.embeddings[rows] * embeddings).sum(dim=1))
        if updates:
            yield None  # what is encoded is looked at before it is remembered
            sizes = distributed.rank_sizes(len(away), rows.device)
            cache.write(distributed.gather(drawn[rows], sizes), distributed.gather(embeddings, sizes), away)
        self._watch(anchors, log_mean)
        value = log_mean.nan_to_num(neginf=0.0) + self.log_corpus_size(anchors) - anchors.positive_logits
        return AnchorLosses(similarity / anchors.temperature - anchors.positive_logits, value.detach())
