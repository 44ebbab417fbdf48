"""NegativeCache: one negative per anchor, drawn from the softmax over remembered embeddings of the whole corpus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

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


class Draws(NamedTuple):
    """One draw per anchor.

    items: (A,), -1 where nothing can be drawn; log_mean: (A,) log of the mean of exp(s/τ) over the cached negatives,
    -inf without any.
    """

    items: Tensor
    log_mean: Tensor


class Query(NamedTuple):
    """The anchors of all ranks: embeddings (A, D), barred (A, K) distinct items never drawn (padded with -1), and τ."""

    embeddings: Tensor
    barred: Tensor
    temperature: Tensor


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

    def draw(self, query: Query, gumbels: Tensor, uniform: Tensor) -> Draws:
        """Draw an item per anchor from the softmax over the filled slots.

        Args:
            query: the anchors of all ranks, the same on every rank.
            gumbels: (num_blocks, A) standard Gumbel draws.
            uniform: (A,) draws in (0, 1).
        """
        value, block, log_sum, count = self._best_block(query, gumbels)
        found = torch.stack([value, log_sum, count])[None].double()
        everyone = distributed.gather(found, [1] * distributed.world_size())
        value_of, log_sum_of, count_of = everyone.unbind(dim=1)
        log_mean = torch.logsumexp(log_sum_of, dim=0) - count_of.sum(dim=0).clamp(min=1).log()
        best, winner = value_of.max(dim=0)
        mine = ((winner == distributed.rank()) & torch.isfinite(best)).nonzero()[:, 0]
        items = torch.full_like(block, -1)
        items[mine] = self._inside_block(query, block, uniform, mine)
        return Draws(distributed.all_reduce(items, "max"), log_mean.to(query.embeddings))

    def _best_block(self, query: Query, gumbels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(A,) each: best perturbed value of this rank's blocks, that block, log-sum and number of its negatives."""
        value = query.embeddings.new_full((len(query.embeddings),), -torch.inf)
        log_sum, count, block = value.clone(), torch.zeros_like(value), torch.zeros_like(value, dtype=torch.long)
        local = query.barred - self.first_item
        for rows in self._chunks(len(value)):
            logits, possible = self._logits(query, rows, local)
            log_sums = _log_sums(logits.unflatten(1, (-1, self.block_size)))
            first = rows.start // self.block_size
            perturbed = log_sums + gumbels[self.blocks][first : first + log_sums.shape[1]].T
            best, place = perturbed.max(dim=1)
            block = torch.where(best > value, place + first, block)
            value = torch.maximum(value, best)
            log_sum = torch.logaddexp(log_sum, torch.logsumexp(log_sums, dim=1))
            count += possible
        return value, block, log_sum, count

    def _logits(self, query: Query, rows: slice, local_barred: Tensor) -> tuple[Tensor, Tensor]:
        """(A, n) s/τ with this rank's rows, -inf for empty slots and barred items; (A,) how many are neither."""
        filled = self.filled[rows]
        logits = (query.embeddings / query.temperature) @ self.features[rows].T
        logits.masked_fill_(~filled, -torch.inf)
        place = local_barred - rows.start
        anchor, listed = ((place >= 0) & (place < len(filled))).nonzero(as_tuple=True)
        column = place[anchor, listed]
        logits[anchor, column] = -torch.inf
        lost = torch.zeros_like(logits[:, 0]).index_add_(0, anchor, filled[column].to(logits))
        return logits, filled.sum() - lost

    def _inside_block(self, query: Query, block: Tensor, uniform: Tensor, anchors: Tensor) -> Tensor:
        """(n,) items drawn inside this rank's winning blocks, for some of the anchors (n,)."""
        if not len(anchors):
            return block[:0]
        drawn = []
        per_chunk = max(1, MAX_ELEMENTS // (self.block_size * self.features.shape[1]))
        for chosen in anchors.split(per_chunk):
            rows = block[chosen, None] * self.block_size + torch.arange(self.block_size, device=block.device)
            logits = torch.einsum("ad,acd->ac", query.embeddings[chosen], self.features[rows]) / query.temperature
            items = rows + self.first_item
            possible = self.filled[rows] & ~(items[:, :, None] == query.barred[chosen, None, :]).any(dim=2)
            weights = torch.softmax(logits.masked_fill(~possible, -torch.inf), dim=1)
            drawn.append(items.gather(1, inverse_cdf(weights, uniform[chosen])[:, None])[:, 0])
        return torch.cat(drawn)

    def _chunks(self, num_anchors: int) -> Iterator[slice]:
        """Runs of whole blocks of this rank, small enough for (A, n) similarities."""
        size = max(1, MAX_ELEMENTS // max(1, num_anchors * self.block_size)) * self.block_size
        for start in range(0, len(self.features), size):
            yield slice(start, min(start + size, len(self.features)))

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

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        keys = [prefix + "features", prefix + "filled"]
        inherited = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(*inherited)
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


def _log_sums(blocks: Tensor) -> Tensor:
    """(A, n, block) -> (A, n) log of the sum of exp over a block, -inf for an empty one; the blocks are used up."""
    peak = blocks.amax(dim=2)
    peak.masked_fill_(torch.isneginf(peak), 0.0)
    return blocks.sub_(peak[:, :, None]).exp_().sum(dim=2).log_().add_(peak)


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
    corpus_of_pairs = False

    def __init__(self, *, refresh: float = 0.01, **common: Any) -> None:
        super().__init__(**common)
        if not 0 <= refresh <= 1:
            raise DualencError(f"NegativeCache: refresh is {refresh}; it must lie in [0, 1], a share of the corpus")
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
                self._refresh(cache, anchors, encode)
                cache.write(items, anchors.candidates)
            drawn, log_mean = self._draw(cache, anchors)
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

    def _refresh(self, cache: FeatureCache, anchors: Anchors, encode: Encode) -> None:
        """Encode the share that waited longest; ranks split the work."""
        due = cache.due(self.refresh).to(anchors.ids.device)
        if not len(due):
            return
        own, sizes = distributed.share(due)
        embeddings = torch.cat([embed(items, encode, anchors) for items in own.split(REFRESH_CHUNK)])
        cache.write(due, distributed.gather(embeddings, sizes))

    def _draw(self, cache: FeatureCache, anchors: Anchors) -> tuple[Tensor, Tensor]:
        """(A,) items drawn for this rank's anchors, -1 for none, and (A,) the log of the mean of exp(s/τ)."""
        rows = distributed.gather(anchors.rows, anchors.sizes)
        embeddings = distributed.gather(anchors.embeddings, anchors.sizes)
        barred = _gather_padded(items_of(anchors.positive_ids, self.views), anchors.sizes)
        query = Query(embeddings, barred, anchors.temperature)
        uniform = self.random.uniform(cache.num_blocks + 1, anchors.num_global, like=embeddings)[:, rows]
        items, log_mean = cache.draw(query, gumbels=-(-uniform[1:].log()).log(), uniform=uniform[0])
        start = sum(anchors.sizes[: distributed.rank()])
        own = slice(start, start + len(anchors.rows))
        return items[own], log_mean[own]


def _gather_padded(ids: Tensor, sizes: list[int]) -> Tensor:
    """(A, K) lists of all ranks, whose K may differ."""
    width = int(distributed.all_reduce(ids.new_full((), ids.shape[1]), "max"))
    missing = ids.new_full((len(ids), width - ids.shape[1]), PADDING)
    return distributed.gather(torch.cat([ids, missing], dim=1), sizes)
