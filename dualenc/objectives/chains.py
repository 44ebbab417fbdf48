"""The memory of EMC²'s Markov chains, and what goes into and comes out of one transition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import Encode
from dualenc.objectives.state import SharedRandom, first_rows
from dualenc.types import Side

NO_STATE = -1


class Chains(nn.Module):
    """One chain per anchor: the pair it is on, named by two ids, and that pair's similarity when accepted.

    A pair is named by its item on the candidates' side and by its partner on the anchors' side: of a document that
    three queries share, a chain knows on which of the three copies it is. Both are -1 before the first step; the
    partner is -1 as well where items are not proposed in pairs.

    Args:
        num_anchors: m, the number of chains.
    """

    state: Tensor
    partner: Tensor
    score: Tensor

    def __init__(self, num_anchors: int) -> None:
        super().__init__()
        self.register_buffer("state", torch.full((num_anchors,), NO_STATE))
        self.register_buffer("partner", torch.full((num_anchors,), NO_STATE))
        self.register_buffer("score", torch.full((num_anchors,), -torch.inf))

    def store(self, anchors: Anchors, chains: Tensor, state: Tensor, partner: Tensor, score: Tensor) -> None:
        """Write where the chains (A,) of all ranks' anchors are now; of several rows of a chain the first counts."""
        whole = distributed.gather(torch.stack([anchors.rows, chains, state, partner], dim=1), anchors.sizes)
        score = distributed.gather(score, anchors.sizes)
        in_order = whole[:, 0].argsort()
        in_order = in_order[whole[in_order, 2] != NO_STATE]
        chosen = in_order[first_rows(whole[in_order, 1])]
        _, chains, state, partner = whole[chosen].unbind(dim=1)
        self.state[chains] = state
        self.partner[chains] = partner
        self.score[chains] = score[chosen].to(self.score)

    def forget(self) -> None:
        """Back to before the first step."""
        self.state.fill_(NO_STATE)
        self.partner.fill_(NO_STATE)
        self.score.fill_(-torch.inf)


class RecentItems(nn.Module):
    """The latest embeddings of up to K items: where chains start, and what the loss is worth.

    Item k has slot k mod K. With K ≥ N every item keeps its own latest embedding; with more items each slot holds
    the latest of its class, and stands for all of that class (a stratified sample of the corpus).

    Args:
        num_slots: the most that K may be; 0 remembers nothing.
        num_items: N.
    """

    items: Tensor
    partners: Tensor
    embeddings: Tensor
    log_counts: Tensor

    def __init__(self, num_slots: int, num_items: int) -> None:
        super().__init__()
        self.num_slots = size = min(num_slots, num_items)
        self.num_seen, self.enough = 0, min(2 * size, num_items)
        slots = torch.arange(size)
        self.register_buffer("items", torch.full((size,), NO_STATE))
        self.register_buffer("partners", torch.full((size,), NO_STATE))
        # The dimension shows when the first embeddings come.
        self.register_buffer("embeddings", torch.zeros(size, 0))
        counts = num_items // max(size, 1) + (slots < num_items % max(size, 1))
        self.register_buffer("log_counts", counts.float().log())

    def set_counts(self, counts: Tensor, weigh: bool) -> None:
        """Tell in how many pairs each item (N,) is; in a corpus that is made of pairs it weighs so much."""
        if not self.num_slots:
            return
        self.enough = min(2 * self.num_slots, int(counts.sum()))
        if weigh:
            slots = torch.arange(len(counts), device=counts.device) % self.num_slots
            total = torch.zeros_like(self.log_counts, dtype=torch.float64).index_add_(0, slots, counts.double())
            self.log_counts.copy_(total.log())

    def add(self, items: Tensor, partners: Tensor, embeddings: Tensor) -> None:
        """Take in items (n,), their partners (n,) and embeddings (n, D), alike on all ranks."""
        if embeddings.shape[1] != self.embeddings.shape[1]:
            self.embeddings = embeddings.new_zeros(self.num_slots, embeddings.shape[1], dtype=self.log_counts.dtype)
        rows = first_rows(items % self.num_slots)
        items, slots = items[rows], items[rows] % self.num_slots
        self.items[slots], self.partners[slots] = items, partners[rows]
        self.embeddings[slots] = embeddings[rows].detach().to(self.embeddings)

    def visited(self, count: int) -> bool:
        """Note that batches brought so many items; true once, when all of a small corpus or most slots have come."""
        seen, self.num_seen = self.num_seen, self.num_seen + count
        return seen < self.enough <= self.num_seen

    @torch.no_grad()
    def look(self, anchors: Anchors, uniform: Tensor, draw: bool) -> tuple[Tensor, ...]:
        """What anchors (A,) see here.

        Args:
            anchors: for which all that is here, but their positives, are negatives.
            uniform: (A,) draws in (0, 1).
            draw: whether any of them needs one of the items; else none are drawn.

        Returns:
            (A,) each: log of the sum and of the number of exp(s/τ) over the corpus that is stood for, -inf for none;
            item, partner and similarity of a draw from the softmax, -1, -1 and -inf for none.
        """

        def rows(some: Anchors, uniform: Tensor) -> tuple[Tensor, ...]:
            allowed = some.is_negative(ids_of(self.items, some.views)) & (self.items != NO_STATE)
            if not some.views:
                allowed &= some.ids[:, None] != self.partners
            similarities = some.embeddings @ self.embeddings.to(some.embeddings).T
            log_counts = self.log_counts.to(similarities).expand_as(allowed).masked_fill(~allowed, -torch.inf)
            logits = similarities / some.temperature + log_counts
            log_sum = torch.logsumexp(logits, dim=1)
            log_count = torch.logsumexp(log_counts, dim=1)
            if not draw:
                return log_sum, log_count, *nothing(some)
            possible = torch.isfinite(log_sum)
            drawn = inverse_cdf(torch.exp(logits - log_sum[:, None]).nan_to_num(0.0), uniform)
            item, partner = (torch.where(possible, ids[drawn], NO_STATE) for ids in (self.items, self.partners))
            return log_sum, log_count, item, partner, torch.where(possible, at(similarities, drawn), -torch.inf)

        def nothing(some: Anchors) -> tuple[Tensor, ...]:
            nowhere = torch.full_like(some.ids, NO_STATE)
            return nowhere, nowhere, torch.full_like(some.positive_similarities, -torch.inf)

        if self.embeddings.shape[1] == 0:
            none = torch.full_like(uniform, -torch.inf)
            return none, none, *nothing(anchors)
        return anchors.statistics(rows, uniform, row_entries=2 * self.num_slots)

    def log_mean(self, log_sum: Tensor, log_count: Tensor, state: Tensor, logit: Tensor, otherwise: Tensor) -> Tensor:
        """(A,) estimate of the log of the mean of exp(s/τ) over all negatives.

        All of the corpus may be here; then it is exact, but for the age of the embeddings. Else the mean of what is
        here errs low (Jensen), and with the state added high (a size-biased sample): halfway between both the errors
        nearly cancel (bidirectional Monte Carlo, Grosse et al. 2015, arXiv:1511.02543).

        Args:
            log_sum, log_count: (A,) what `look` gives.
            state, logit: (A,) the chain's item, -1 for none, and its s/τ.
            otherwise: (A,) the estimate where nothing is here.
        """
        if not self.num_slots:
            return otherwise
        slots = state % self.num_slots
        low = log_sum - log_count
        log_weight = self.log_counts[slots].to(low)
        high = torch.logaddexp(log_sum, logit + log_weight) - torch.logaddexp(log_count, log_weight)
        beside = (state != NO_STATE) & (self.items[slots] != state)
        mean = torch.where(beside, (low + high) / 2, low)
        return torch.where(torch.isfinite(mean), mean, otherwise)

    def get_extra_state(self) -> Tensor:
        """How many rows came in, and how many are enough, for the state dict."""
        return torch.tensor([self.num_seen, self.enough])

    def set_extra_state(self, state: Tensor) -> None:
        """Continue from a saved position."""
        self.num_seen, self.enough = (int(number) for number in state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "embeddings")
        if saved is not None and len(saved) == self.num_slots:
            self.embeddings = self.embeddings.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@dataclass
class Step:
    """What a kernel sees. Similarities, not logits, so that stored ones stay valid when the temperature is learned.

    Attributes:
        items: (C,) the proposals.
        similarities: (A, C) cosines with the proposals.
        allowed: (A, C) whether a proposal is a negative of the anchor.
        state: (A,) item that the chain comes with, -1 for none.
        places: (A, S) the proposals that are the same as what the state stands for, -1 where there is none.
        beside: (A,) whether the state counts beside the proposals: it is not among them, or they are other copies.
        score: (A,) similarity of the state, stored or fresh; -inf for none.
        outside: (A, S) similarities of what the state stands for; -inf where they are not known.
        log_density: (C,) log of how often each proposal is proposed, over uniform proposals.
        state_log_density: (A,) the same of the state.
        temperature: scalar τ.
    """

    items: Tensor
    similarities: Tensor
    allowed: Tensor
    state: Tensor
    places: Tensor
    beside: Tensor
    score: Tensor
    outside: Tensor
    log_density: Tensor
    state_log_density: Tensor
    temperature: Tensor


class Move(NamedTuple):
    """What a kernel gives: the negatives' weights, and where the chain is now.

    weights: (A, C) of the proposals; outside_weights: (A, S) of what the state stands for, where it is not among
    them; together they sum to 1 (to 0 where the anchor has no negative at all). column: (A,) the proposal that is the
    next state, -1 where the chain stays where it is.
    """

    weights: Tensor
    outside_weights: Tensor
    column: Tensor


def at(values: Tensor, column: Tensor) -> Tensor:
    """(A,) of each row of values (A, C) the entry in its column (A,)."""
    return values.gather(1, column[:, None])[:, 0]


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """(A,) a column drawn from each row of weights (A, C) ≥ 0, which need not sum to 1; any for rows of zeros.

    Args:
        weights: (A, C).
        uniform: (A,) draws in (0, 1); they never lead to a column of weight 0.
    """
    cumulative = weights.cumsum(dim=1)
    drawn = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:])[:, 0]
    return drawn.clamp(max=weights.shape[1] - 1)


@torch.no_grad()
def log_mean_of_negatives(step: Step) -> Tensor:
    """(A,) estimate of the log of the mean of exp(s/τ) over all negatives.

    The mean over uniform proposals errs low (Jensen), the mean over proposals and state errs high (they are a
    size-biased sample); halfway between both the errors nearly cancel (bidirectional Monte Carlo, Grosse et al. 2015).
    """
    log_weight = (-step.log_density).expand_as(step.allowed).masked_fill(~step.allowed, -torch.inf)
    log_sum = torch.logsumexp(step.similarities / step.temperature + log_weight, dim=1)
    log_count = torch.logsumexp(log_weight, dim=1)
    low = log_sum - log_count
    with_state = torch.logaddexp(log_sum, step.score / step.temperature - step.state_log_density)
    high = with_state - torch.logaddexp(log_count, -step.state_log_density)
    high = torch.where(step.beside, high, low)
    return torch.where(torch.isfinite(log_count), (low + high) / 2, high).nan_to_num(nan=0.0, neginf=0.0)


def ids_of(items: Tensor, views: bool) -> Tensor:
    """The ids of items, of any shape."""
    return items // 2 if views else items


def left_view(items: Tensor) -> Tensor:
    """The left view of each item's image; -1 stays."""
    return torch.where(items < 0, items, items // 2 * 2)


def items_of(ids: Tensor, views: bool) -> Tensor:
    """(A, K) lists of ids padded with -1 -> the same as items (A, K), or with views both of each image (A, 2K)."""
    if not views:
        return ids
    return torch.cat([torch.where(ids < 0, ids, 2 * ids), torch.where(ids < 0, ids, 2 * ids + 1)], dim=1)


def candidate_items(anchors: Anchors) -> Tensor:
    """(C,) the candidates as items."""
    ids = anchors.candidate_ids
    if not anchors.views:
        return ids
    half = len(ids) // 2
    return torch.cat([2 * ids[:half], 2 * ids[half:] + 1])


def find(items: Tensor, wanted: Tensor) -> Tensor:
    """(A,) the first position in items (C,) of each wanted one (A,), -1 where it is not there."""
    if not len(items):
        return torch.full_like(wanted, -1)
    ordered, order = items.sort(stable=True)
    place = torch.searchsorted(ordered, wanted).clamp(max=len(items) - 1)
    return torch.where(ordered[place] == wanted, order[place], -1)


def embed(items: Tensor, encode: Encode, anchors: Anchors) -> Tensor:
    """(n, D) embeddings of items (n,), each distinct one encoded once; this rank's own needs, no collective."""
    if not len(items):
        return anchors.embeddings[:0]
    distinct, row = torch.unique(items, return_inverse=True)
    if not anchors.views:
        return encode(anchors.candidate_side, distinct)[row]
    embeddings = anchors.embeddings.new_zeros(len(distinct), anchors.embeddings.shape[1])
    sides: tuple[Side, ...] = ("left", "right")
    for view, side in enumerate(sides):
        place = (distinct % 2 == view).nonzero()[:, 0]
        if len(place):
            ids = ids_of(distinct[place], views=True)
            embeddings = embeddings.index_put((place,), encode(side, ids))
    return embeddings[row]


def similarities_beside(anchors: Anchors, rows: Tensor, embeddings: Tensor, num_each: int) -> Tensor:
    """(A, S) similarities of the anchors at `rows` (n,) with embeddings (n·S, D) of their own; -inf elsewhere."""
    empty = anchors.positive_similarities.new_full((len(anchors.ids), num_each), -torch.inf)
    if not len(rows):
        return empty
    own = embeddings.view(len(rows), num_each, embeddings.shape[-1])
    return empty.index_put((rows,), torch.einsum("ad,asd->as", anchors.embeddings[rows], own))


class Neighbors(nn.Module):
    """For each of m anchors a list of k ids near it; empty at first. Part of the state, whatever its shape."""

    ids: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.zeros(0, 0, dtype=torch.long))

    def set(self, ids: Tensor, num_anchors: int, num_items: int) -> None:
        """Replace the lists by ids (m, k) in [0, num_items), padded with -1.

        Raises:
            DualencError: another shape, no integers, or ids out of range.
        """
        if ids.dim() != 2 or len(ids) != num_anchors or ids.is_floating_point():
            raise DualencError(f"neighbours have shape {tuple(ids.shape)}; they must be integers ({num_anchors}, k)")
        if ids.numel() and (int(ids.min()) < -1 or int(ids.max()) >= num_items):
            raise DualencError(f"neighbours lie in [{int(ids.min())}, {int(ids.max())}]; ids end at {num_items}")
        self.ids = ids.to(self.ids.device, torch.long)

    def near(self, anchors: Tensor) -> Tensor:
        """(L,) the ids near any of the anchors (A,), sorted, each as often as it is listed."""
        listed = self.ids[anchors].flatten().sort().values
        return listed[listed >= 0]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "ids")
        if saved is not None:
            self.ids = self.ids.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@dataclass
class Mixture:
    """Ids in [0, N): uniform, or with some probability from a list.

    Attributes:
        corpus_size: N.
        like: device and precision of the densities.
        near: (L,) sorted ids, each as likely as it is often listed.
        share: probability that a draw comes from the list.
    """

    corpus_size: int
    like: Tensor
    near: Tensor | None = None
    share: float = 0.0

    @property
    def is_uniform(self) -> bool:
        """Whether all ids are equally likely."""
        return self.near is None

    def with_list(self, near: Tensor, share: float) -> Mixture:
        """The same with a share from a list; an empty one changes nothing."""
        return replace(self, near=near, share=share) if len(near) else self

    def draw(self, count: int, random: SharedRandom) -> Tensor:
        """(count,) independent draws."""
        device = self.like.device
        ids = random.integers(self.corpus_size, count, device=device)
        if self.near is None:
            return ids
        from_list = random.uniform(count, like=self.like) < self.share
        return torch.where(from_list, self.near[random.integers(len(self.near), count, device=device)], ids)

    def log_density(self, ids: Tensor) -> Tensor:
        """(n,) log of the probability of each id, over that of a uniform draw."""
        if self.near is None:
            return self.like.new_zeros(len(ids))
        listed = torch.searchsorted(self.near, ids, right=True) - torch.searchsorted(self.near, ids)
        return torch.log(1 - self.share + self.share * self.corpus_size / len(self.near) * listed.to(self.like))
