"""NegativeCache: one negative per anchor, drawn from the softmax over remembered embeddings of the whole corpus."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.anchors import PADDING, Anchors
from dualenc.objectives.base import AnchorLosses, Encode, Objective
from dualenc.objectives.chains import candidate_items, embed, find, inverse_cdf, items_of
from dualenc.objectives.state import SharedRandom, first_rows

MAX_BLOCKS = 16384
MAX_ELEMENTS = 2**22
REFRESH_CHUNK = 256


class FeatureCache(nn.Module):
    """The last known embedding of each of N items; empty slots are never drawn.

    Each rank holds its blocks only; the state dict holds all of them, whatever the number of ranks (saving is
    collective: call `state_dict()` on every rank).

    Args:
        num_items: N.
    """

    features: Tensor
    filled: Tensor
    num_steps: Tensor

    def __init__(self, num_items: int) -> None:
        super().__init__()
        self.num_items = num_items
        self.block_size = max(64, -(-num_items // MAX_BLOCKS))
        self.num_blocks = -(-num_items // self.block_size)
        # The dimension is known with the first write.
        self.register_buffer("features", torch.zeros(0, 0), persistent=False)
        self.register_buffer("filled", torch.zeros(0, dtype=torch.bool), persistent=False)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.long))

    def write(self, items: Tensor, features: Tensor) -> None:
        """Remember features (n, D) of items (n,), the same on every rank; of an item's copies the first counts."""
        if not self.features.shape[1]:
            self._allocate(features)
        chosen = first_rows(items)
        local = items[chosen] - self.first_item
        own = (local >= 0) & (local < len(self.features))
        self.features[local[own]] = features.detach()[chosen][own].to(self.features)
        self.filled[local[own]] = True

    def due(self, share: float) -> Tensor:
        """(n,) the items to encode anew in this step, on the CPU: a share of all per step, in turn."""
        step = int(self.num_steps)
        self.num_steps += 1
        start, stop = (int(steps * share * self.num_items + 1e-9) for steps in (step, step + 1))
        return torch.arange(start, stop) % self.num_items

    def draw(self, anchors: Tensor, barred: Tensor, gumbels: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Draw an item per anchor from the softmax over the filled slots: a block by Gumbel-max, then one of its items.

        Args:
            anchors: (A, D) embeddings of the anchors of all ranks over τ, the same on every rank.
            barred: (A, K) distinct items that are never drawn, padded with -1.
            gumbels: (num_blocks, A) standard Gumbel draws.
            uniform: (A,) draws in (0, 1).

        Returns:
            (A,) items, -1 where nothing can be drawn; and (A,) log of the mean of exp(s/τ) over the cached negatives,
            -inf without any.
        """
        value = anchors.new_full((len(anchors),), -torch.inf)
        log_sum, count, block = value.clone(), torch.zeros_like(value), torch.zeros_like(value, dtype=torch.long)
        # Runs of whole blocks of this rank, small enough for (A, n) similarities.
        size = max(1, MAX_ELEMENTS // max(1, len(anchors) * self.block_size)) * self.block_size
        for start in range(0, len(self.features), size):
            filled = self.filled[start : start + size]
            logits = (anchors @ self.features[start : start + size].T).masked_fill_(~filled, -torch.inf)
            place = barred - self.first_item - start
            anchor, listed = ((place >= 0) & (place < len(filled))).nonzero(as_tuple=True)
            column = place[anchor, listed]
            logits[anchor, column] = -torch.inf
            count += filled.sum() - torch.zeros_like(value).index_add_(0, anchor, filled[column].to(value))
            # The log of the sum of exp over each block, -inf for an empty one; in place.
            blocks = logits.unflatten(1, (-1, self.block_size))
            peak = blocks.amax(dim=2)
            peak.masked_fill_(torch.isneginf(peak), 0.0)
            log_sums = blocks.sub_(peak[:, :, None]).exp_().sum(dim=2).log_().add_(peak)
            first = start // self.block_size
            best, place = (log_sums + gumbels[self.blocks][first : first + log_sums.shape[1]].T).max(dim=1)
            block = torch.where(best > value, place + first, block)
            value = torch.maximum(value, best)
            log_sum = torch.logaddexp(log_sum, torch.logsumexp(log_sums, dim=1))
        found = torch.stack([value, log_sum, count])[None].double()
        value_of, log_sum_of, count_of = distributed.gather(found, [1] * distributed.world_size()).unbind(dim=1)
        log_mean = torch.logsumexp(log_sum_of, dim=0) - count_of.sum(dim=0).clamp(min=1).log()
        best, winner = value_of.max(dim=0)
        mine = ((winner == distributed.rank()) & torch.isfinite(best)).nonzero()[:, 0]
        items = torch.full_like(block, -1)
        items[mine] = self._inside_block(anchors[mine], barred[mine], block[mine], uniform[mine])
        return distributed.all_reduce(items, "max"), log_mean.to(anchors)

    def _inside_block(self, anchors: Tensor, barred: Tensor, block: Tensor, uniform: Tensor) -> Tensor:
        """(A,) items drawn inside the winning blocks (A,) of this rank."""
        drawn = [block[:0]]
        per_chunk = max(1, MAX_ELEMENTS // (self.block_size * max(1, self.features.shape[1])))
        for start in range(0, len(anchors), per_chunk):
            some = slice(start, start + per_chunk)
            rows = block[some, None] * self.block_size + torch.arange(self.block_size, device=block.device)
            logits, items = torch.einsum("ad,acd->ac", anchors[some], self.features[rows]), rows + self.first_item
            possible = self.filled[rows] & ~(items[:, :, None] == barred[some, None, :]).any(dim=2)
            weights = torch.softmax(logits.masked_fill(~possible, -torch.inf), dim=1)
            drawn.append(items.gather(1, inverse_cdf(weights, uniform[some])[:, None])[:, 0])
        return torch.cat(drawn)

    @property
    def blocks(self) -> slice:
        """The blocks that this rank holds."""
        return distributed.rank_slice(self.num_blocks)

    @property
    def first_item(self) -> int:
        """The first item that this rank holds."""
        return self.blocks.start * self.block_size

    def _allocate(self, like: Tensor) -> None:
        num_rows = (self.blocks.stop - self.blocks.start) * self.block_size
        self.features = like.new_zeros(num_rows, like.shape[1])
        self.filled = torch.zeros(num_rows, dtype=torch.bool, device=like.device)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "features"] = distributed.gather(self.features)[: self.num_items]
        destination[prefix + "filled"] = distributed.gather(self.filled)[: self.num_items]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        _, _, missing_keys, unexpected_keys, _ = rest
        keys = [prefix + "features", prefix + "filled"]
        unexpected_keys[:] = [key for key in unexpected_keys if key not in keys]
        missing_keys.extend(key for key in keys if key not in state_dict)
        if any(key not in state_dict for key in keys):
            return
        # Saved elsewhere, for instance on the CPU; used where this cache is.
        features, filled = (state_dict[key].to(self.num_steps.device) for key in keys)
        if not len(filled):
            self.features, self.filled = features.clone(), filled.clone()
        elif len(filled) != self.num_items:
            raise DualencError(
                f"{prefix}features holds {len(filled)} items in the saved state, {self.num_items} here; load it into "
                "an objective with the same num_left, num_right and views"
            )
        else:
            self._allocate(features)
            own = slice(self.first_item, self.first_item + len(self.features))
            self.features[: len(features[own])] = features[own]
            self.filled[: len(filled[own])] = filled[own]


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
    corpus_of_pairs = False

    def __init__(self, *, refresh: float = 0.01, **common: Any) -> None:
        super().__init__(**common)
        if not 0 <= refresh <= 1:
            self._fail("refresh", f"is {refresh}; it must lie in [0, 1], a share of the corpus")
        self.refresh = refresh
        # Named by the items they hold: left anchors draw from the right items.
        self.left_cache = FeatureCache((self.num_left or 1) * (2 if self.views else 1))
        self.right_cache = self.left_cache if self.views else FeatureCache(self.num_right or 1)
        self.random = SharedRandom(self.seed)

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> AnchorLosses:
        assert encode is not None
        cache = self.left_cache if anchors.candidate_side == "left" else self.right_cache
        items, updates = candidate_items(anchors), self.updates_state
        with torch.no_grad():
            if updates:
                # The share that waited longest is encoded anew; ranks split the work.
                due = cache.due(self.refresh).to(anchors.ids.device)
                if len(due):
                    own, sizes = distributed.share(due)
                    renewed = torch.cat([embed(some, encode, anchors) for some in own.split(REFRESH_CHUNK)])
                    cache.write(due, distributed.gather(renewed, sizes))
                cache.write(items, anchors.candidates)
            barred = items_of(anchors.positive_ids, self.views)
            # Lists of ranks may differ in length.
            width = int(distributed.all_reduce(barred.new_full((), barred.shape[1]), "max"))
            barred = nn.functional.pad(barred, (0, width - barred.shape[1]), value=PADDING)
            everyone = (anchors.rows, anchors.embeddings / anchors.temperature, barred)
            rows, embeddings, barred = (distributed.gather(values, anchors.sizes) for values in everyone)
            uniform = self.random.uniform(cache.num_blocks + 1, anchors.num_global, like=embeddings)[:, rows]
            first = sum(anchors.sizes[: distributed.rank()])
            gumbels, of_rank = -(-uniform[1:].log()).log(), slice(first, first + len(anchors.rows))
            drawn, log_mean = (v[of_rank] for v in cache.draw(embeddings, barred, gumbels, uniform[0]))
        # What is drawn from the batch has an embedding already; the rest is encoded, and remembered.
        column = find(items, drawn)
        in_batch = (anchors.embeddings * anchors.candidates[column.clamp(min=0)]).sum(dim=1)
        similarity = torch.where(column >= 0, in_batch, 0.0)
        away = ((drawn >= 0) & (column < 0)).nonzero()[:, 0]
        embeddings = embed(drawn[away], encode, anchors)
        similarity = similarity.index_put((away,), (anchors.embeddings[away] * embeddings).sum(dim=1))
        if updates:
            sizes = distributed.rank_sizes(len(away), away.device)
            cache.write(distributed.gather(drawn[away], sizes), distributed.gather(embeddings, sizes))
        value = log_mean.nan_to_num(neginf=0.0) + self.log_corpus_size(anchors) - anchors.positive_logits
        return AnchorLosses(similarity / anchors.temperature - anchors.positive_logits, value.detach())
