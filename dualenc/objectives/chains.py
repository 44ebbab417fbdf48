"""What EMC2 and ISIR share: the chains' memory, where they start, what is proposed to them, and the loss's value.

An *item* is what a chain can be on: an id of the candidates' side, or with views one view of an image, its left view
as 2·id and its right view as 2·id + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import AnchorLosses, Encode, Objective
from dualenc.objectives.item_state import ItemState
from dualenc.objectives.looks import Asking, upload
from dualenc.objectives.state import SharedRandom, first_rows
from dualenc.types import Side

NO_STATE = -1


class Chains(ItemState):
    """The item that each chain is on, -1 before the first step, and what an objective wants to remember with it.

    Args:
        num_chains: m.
        remembers: name of each further value, and what it is before the first step.
    """

    state: Tensor
    score: Tensor
    partner: Tensor

    def __init__(self, num_chains: int, remembers: Mapping[str, float], on_cpu: bool = False) -> None:
        super().__init__(on_cpu)
        self.before = {"state": NO_STATE, **remembers}
        for name, value in self.before.items():
            self.register_buffer(name, torch.full((num_chains,), value))

    def store(
        self, anchors: Anchors, chains: Tensor, known: Tensor | None, state: Tensor, **remembered: Tensor
    ) -> None:
        """Write where the chains (A,) of all ranks' anchors are now; of several rows of a chain the first counts.

        Args:
            known: the chains of all ranks on the CPU, where the host knows them.
        """
        rows, chains, state = (distributed.gather(of, anchors.sizes) for of in (anchors.rows, chains, state))
        some, new = state != NO_STATE, {"state": state}
        new |= {name: distributed.gather(values, anchors.sizes) for name, values in remembered.items()}
        if not anchors.distinct_rows:
            # Rows without a state stand behind all others.
            in_order = torch.where(some, rows, anchors.num_global + rows).argsort()
            chosen = in_order[first_rows(chains[in_order])][in_order.argsort()]
            some, new = some[chosen], {name: values[chosen] for name, values in new.items()}
        self.put(chains, known, some, **new)

    def forget(self) -> None:
        """Back to before the first step."""
        self.settle()
        for name, value in self.before.items():
            getattr(self, name).fill_(value)


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
        self.num_items = num_items
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

    def add(self, items: Tensor, partners: Tensor, embeddings: Tensor, distinct: bool = False) -> None:
        """Take in items (n,), their partners (n,) and embeddings (n, D), alike on all ranks; no item comes twice if
        `distinct`."""
        if embeddings.shape[1] != self.embeddings.shape[1]:
            self.embeddings = embeddings.new_zeros(self.num_slots, embeddings.shape[1], dtype=self.log_counts.dtype)
        slots, embeddings = items, embeddings.detach()
        if not (distinct and self.num_slots == self.num_items):
            rows = first_rows(items % self.num_slots)
            items, partners, embeddings = items[rows], partners[rows], embeddings[rows]
            slots = items % self.num_slots
        self.items[slots], self.partners[slots], self.embeddings[slots] = (
            items,
            partners,
            embeddings.to(self.embeddings),
        )

    @property
    def hold_the_corpus(self) -> bool:
        """Whether every item keeps its own embedding, and some have come."""
        return self.num_slots == self.num_items and self.embeddings.shape[1] > 0

    @torch.no_grad()
    def look(self, anchors: Anchors, usable: Tensor, random: SharedRandom) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What anchors (A,) see here, where all items but their positives are negatives.

        Args:
            anchors: those of this rank.
            usable: (A,) whether a chain needs no start.
            random: for the draws.

        Returns:
            (A,) each: item, partner and similarity of a draw from the softmax, -1, -1 and -inf for none; and the log
            of the mean of exp(s/τ) over the negatives that are here, -inf for none.
        """
        infinite, nowhere = anchors.embeddings.new_full(anchors.ids.shape, -torch.inf), torch.full_like(anchors.ids, -1)
        nothing = nowhere, nowhere, infinite, infinite
        if not self.num_slots:
            return nothing
        uniform = random.uniform(anchors.num_global, like=infinite)[anchors.rows]
        # On the CPU a look costs nothing and may save the comparison; a GPU would wait longer than it compares.
        nothing_drawn = usable.device.type == "cpu" and bool(usable.all())
        if self.embeddings.shape[1] == 0 or (nothing_drawn and not self.hold_the_corpus):
            return nothing

        def rows(some: Anchors, uniform: Tensor) -> tuple[Tensor, ...]:
            hidden = ~some.is_negative(ids_of(self.items, some.views)) | (self.items == NO_STATE)
            if not some.views:
                hidden |= some.ids[:, None] == self.partners
            similarities = some.embeddings @ self.embeddings.to(some.embeddings).T
            log_counts = self.log_counts.to(similarities).expand_as(hidden).masked_fill(hidden, -torch.inf)
            logits = similarities / some.temperature + log_counts
            log_sum = torch.logsumexp(logits, dim=1)
            impossible = log_sum == -torch.inf
            log_mean = (log_sum - torch.logsumexp(log_counts, dim=1)).masked_fill(impossible, -torch.inf)
            if nothing_drawn:
                return (log_mean,)
            drawn = inverse_cdf(torch.exp(logits - log_sum[:, None]).nan_to_num(0.0), uniform)
            item, partner = (ids[drawn].masked_fill(impossible, NO_STATE) for ids in (self.items, self.partners))
            return item, partner, at(similarities, drawn).masked_fill(impossible, -torch.inf), log_mean

        *drawn, log_mean = anchors.by_rows(rows, uniform, row_entries=2 * self.num_slots)
        item, partner, similarity = drawn or nothing[:3]
        return item, partner, similarity, log_mean

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


def at(values: Tensor, column: Tensor) -> Tensor:
    """(A,) of each row of values (A, C) the entry in its column (A,)."""
    return values.gather(1, column[:, None])[:, 0]


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """(A,) a column drawn from each row of weights (A, C) ≥ 0, which need not sum to 1; any for rows of zeros.

    Draws (A,) of `uniform` in (0, 1) never lead to a column of weight 0.
    """
    cumulative = weights.cumsum(dim=1)
    drawn = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:])[:, 0]
    return drawn.clamp(max=weights.shape[1] - 1)


def ids_of(items: Tensor, views: bool) -> Tensor:
    """The ids of items, of any shape."""
    return items // 2 if views else items


def items_of(ids: Tensor, views: bool) -> Tensor:
    """(A, K) lists of ids padded with -1 -> the same as items (A, K), or with views both of each image (A, 2K)."""
    if not views:
        return ids
    return torch.cat([torch.where(ids < 0, ids, 2 * ids), torch.where(ids < 0, ids, 2 * ids + 1)], dim=1)


def candidate_items(anchors: Anchors) -> Tensor:
    """(C,) the candidates as items."""
    return _items_of_batch(anchors.candidate_ids, anchors.views)


def known_candidate_items(anchors: Anchors) -> Tensor | None:
    """(C,) the same on the CPU, where the host knows them."""
    known = anchors.known.candidates if anchors.known else None
    return None if known is None else _items_of_batch(known, anchors.views)


def _items_of_batch(ids: Tensor, views: bool) -> Tensor:
    if not views:
        return ids
    half = len(ids) // 2
    return torch.cat([2 * ids[:half], 2 * ids[half:] + 1])


def find(items: Tensor, wanted: Tensor) -> Tensor:
    """(A,) the first position in items (C,) of each wanted one (A,), -1 where it is not there."""
    if not len(items):
        return torch.full_like(wanted, -1)
    ordered, order = items.sort(stable=True)
    place = torch.searchsorted(ordered, wanted).clamp(max=len(items) - 1)
    return order[place].masked_fill(ordered[place] != wanted, -1)


def embed(items: Tensor, encode: Encode, anchors: Anchors) -> Tensor:
    """(n, D) embeddings of items (n,) on the CPU, each distinct one encoded once; of this rank.

    No collective of its own, but one of several ranks calls `encode` without items too: see `Encode`.
    """
    several = distributed.is_initialized()
    if not len(items) and not several:
        return anchors.embeddings[:0]
    if not anchors.views:
        distinct, row = torch.unique(items, return_inverse=True)
        embeddings = encode(anchors.candidate_side, distinct)
    else:
        # First the left views, then the right ones.
        distinct, row = torch.unique(torch.stack([items % 2, items // 2]), dim=1, return_inverse=True)
        sides: tuple[Side, ...] = ("left", "right")
        parts = distinct[1].split([int((distinct[0] == view).sum()) for view in (0, 1)])
        embeddings = torch.cat(
            [encode(side, ids) for side, ids in zip(sides, parts, strict=True) if len(ids) or several]
        )
    return embeddings[upload(row, anchors.ids.device)]


def known_rows(items: Tensor, anchors: Anchors) -> tuple[Tensor, Tensor]:
    """Of items (A,) on the CPU, -1 for none: those that there are (n,), and their rows (n,) on the anchors' device."""
    rows = (items != NO_STATE).nonzero()[:, 0]
    return items[rows], upload(rows, anchors.ids.device)


class Neighbors(ItemState):
    """For each of m anchors a list of k ids near it; empty at first. Part of the state, whatever its shape."""

    ids: Tensor

    def __init__(self, on_cpu: bool = False) -> None:
        super().__init__(on_cpu)
        self.register_buffer("ids", torch.zeros(0, 0, dtype=torch.long))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "ids")
        if saved is not None:
            self.ids = self.ids.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@dataclass
class Visit:
    """Where some anchors' chains are, and what is proposed to them.

    Attributes:
        chains, recent: the tables that these anchors use.
        own: (A,) the number of each anchor's chain.
        known, all_known: (A,) the same on the CPU, and those of the anchors of all ranks; None where not known there.
        usable: (A,) whether the chain is on a negative of the anchor; else it starts anew.
        state: (A,) the item that each chain comes with, -1 for none.
        partner, similarity, log_mean: (A,) what `RecentItems.look` gives; the first two for what starts anew.
        items, partners: (C,) the proposals, and the other ids of the pairs that they come from, -1 if from none.
        drawn: (C,) the proposals on the CPU, where they were drawn there.
        near: (L,) sorted ids, after -1 for none, that `neighbor_share` of the draws come from if there are any, each as
            likely as it is often listed; None where all are uniform.
    """

    chains: Chains
    recent: RecentItems
    own: Tensor
    known: Tensor | None
    all_known: Tensor | None
    usable: Tensor
    state: Tensor
    partner: Tensor
    similarity: Tensor
    log_mean: Tensor
    items: Tensor
    partners: Tensor
    drawn: Tensor | None
    near: Tensor | None


class ChainObjective(Objective):
    """Base of the objectives whose negatives come from a Markov chain per anchor that is kept from step to step.

    Where a chain starts never changes its law, but decides when the law is reached. On an anchor's first visit it
    starts on a draw from the softmax over the latest embeddings of up to `recent` items; once these are there for the
    first time (after an epoch, or 2·`recent` items of a larger corpus) every chain starts anew.

    Chains give the gradient of the loss and not its value. Where the corpus has no more than `recent` items, the value
    takes the partition function from their latest embeddings: exact at fixed parameters from the second epoch on. Of
    a larger corpus they are a sample, which errs low by nats at small τ: `reports_loss` is False then, and `loss` has
    only the value of the surrogate.

    Mined negatives are no uniform proposals and take no part. In-batch proposals are uniform only if batches are
    random: with selected batches draw them from the corpus (`proposals=64`).

    Args:
        proposals: "batch", the other items of the batch: the corpus is then the multiset of the pairs' items, so that
            a document counts once for each of its queries (pairs that are listed twice are one). Or R: so many items
            drawn uniformly from the whole id space, encoded once and shared by all chains: every item of the corpus
            then counts once.
        neighbor_share: share in [0, 1) of the R draws that comes from the neighbours of the batch's anchors, told by
            `set_neighbors` (the trainer does so at the start of every epoch, after a pass over the data); the
            objective corrects for the density of the proposals, so that harder proposals make chains faster and not
            biased.
        neighbors: how many neighbours of each item to be told.
        shared_chain: with views, False gives each of an image's two views a chain of its own, which is exact. True is
            Fig. 2 of Yau et al. 2024: both walk on from one state, and the first view's walk is kept; that costs a
            relative bias of the gradient of 0.2 to 0.5 at τ ≤ 0.07.
        recent: of how many items of each side the latest embeddings are kept (`recent`·D floats besides the model), for
            chains to start on and for the value of the loss. 0 keeps none: chains start on their first batch.
        **common: see `Objective`; num_left (and num_right) are needed, and `encode` in forward.
    """

    needs_num_left = True
    needs_encode = True
    remembers: ClassVar[dict[str, float]] = {}
    """What chains remember besides the item that they are on; see `Chains`."""

    def __init__(
        self,
        *,
        proposals: Literal["batch"] | int = "batch",
        neighbor_share: float = 0.0,
        neighbors: int = 16,
        shared_chain: bool = False,
        recent: int = 4096,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if proposals != "batch" and (not isinstance(proposals, int) or proposals < 1):
            self._fail("proposals", f'is {proposals!r}; it must be "batch" or a number of draws, at least 1')
        if not 0 <= neighbor_share < 1 or (neighbor_share and proposals == "batch"):
            must = "it must lie in [0, 1), and needs proposals to be a number"
            self._fail("neighbor_share", f"is {neighbor_share}; {must}")
        if neighbors < 1:
            self._fail("neighbors", f"is {neighbors}; it must be at least 1")
        if recent < 0:
            self._fail("recent", f"is {recent}; it must be at least 0, a number of items")
        self.proposals, self.neighbor_share = proposals, neighbor_share
        # Draws from the corpus weigh every item once.
        self.corpus_of_pairs = proposals == "batch"
        self.num_neighbors = neighbors if neighbor_share else 0
        self.shared_chain = shared_chain or not self.views
        num_left, num_right = self.num_left or 1, self.num_right or 1
        on_cpu = self.state_on_cpu
        self.left_chains = Chains(num_left if self.shared_chain else 2 * num_left, self.remembers, on_cpu)
        self.right_chains = self.left_chains if self.views else Chains(num_right, self.remembers, on_cpu)
        self.left_neighbors, self.right_neighbors = Neighbors(on_cpu), Neighbors(on_cpu)
        # Of left items for the chains of right anchors, and the other way round; with views both are the same.
        num_views = 2 if self.views else 1
        self.recent_left = RecentItems(recent * num_views, num_left * num_views)
        self.recent_right = self.recent_left if self.views else RecentItems(recent, num_right)
        self.random = SharedRandom(self.seed)

    def set_neighbors(self, side: Side, ids: Tensor) -> None:
        """Tell which items are near each anchor, from an index over the current embeddings; any list keeps the law.

        Args:
            side: of the anchors, "left" or "right".
            ids: (m, k) ids of the other side's items (with views: of images), padded with -1; row i is for anchor i.

        Raises:
            DualencError: another shape, no integers, or ids out of range.
        """
        num_anchors, num_items, table = self.num_left, self.num_right, self.left_neighbors
        if side == "right":
            num_anchors, num_items, table = self.num_right, self.num_left, self.right_neighbors
        if ids.dim() != 2 or len(ids) != num_anchors or ids.is_floating_point():
            raise DualencError(f"neighbours have shape {tuple(ids.shape)}; they must be integers ({num_anchors}, k)")
        if ids.numel() and (int(ids.min()) < -1 or int(ids.max()) >= (num_items or 1)):
            raise DualencError(f"neighbours lie in [{int(ids.min())}, {int(ids.max())}]; ids end at {num_items}")
        table.ids = ids.to(table.ids.device, torch.long)

    @property
    def needs_uniform_batches(self) -> str | None:
        """In-batch proposals follow the law that chains assume in random batches only."""
        return "proposals=64" if self.proposals == "batch" else None

    def set_counts(self, left_counts: Tensor, right_counts: Tensor) -> None:
        """Tell how many pairs each item is in; where proposals come from the corpus, every item weighs the same."""
        super().set_counts(left_counts, right_counts)
        if self.views:
            left_counts = right_counts = left_counts.repeat_interleave(2)
        self.recent_left.set_counts(left_counts, weigh=self.corpus_of_pairs)
        self.recent_right.set_counts(right_counts, weigh=self.corpus_of_pairs)

    def items_drawn(self, ids: Tensor) -> Tensor:
        """(C,) the items that drawn ids (R,) propose, on the device of these."""
        raise TypeError(f"{type(self).__name__} does not define items_drawn")

    def visit(self, anchors: Anchors) -> Visit:
        """Take in the batch's embeddings; where the anchors' chains are, and what is proposed to them."""
        chains = self.left_chains if anchors.side == "left" else self.right_chains
        recent = self.recent_right if anchors.candidate_side == "right" else self.recent_left
        items = candidate_items(anchors)[: anchors.num_global]
        # Two views come in no pair.
        partners = torch.full_like(items, NO_STATE) if self.views else distributed.gather(anchors.ids, anchors.sizes)
        if self.updates_state and recent.num_slots:
            recent.add(items, partners, anchors.candidates[: anchors.num_global], anchors.distinct)
            seen, recent.num_seen = recent.num_seen, recent.num_seen + anchors.num_global
            if seen < recent.enough <= recent.num_seen:
                # All of a small corpus or most slots have come: chains that began while little was there begin anew.
                chains.forget()

        def chains_of(ids: Tensor, rows: Tensor) -> Tensor:
            # The second views are the second half of all anchors.
            return ids if self.shared_chain else 2 * ids + (rows >= anchors.num_global // 2)

        own, known, all_known = chains_of(anchors.ids, anchors.rows), None, None
        if anchors.known is not None:
            known = chains_of(anchors.known.own, anchors.rows_on_cpu)
            all_known = chains_of(anchors.known.all_anchors, anchors.known.all_rows)
        state = chains.take("state", own, known)
        barred = (ids_of(state, self.views)[:, None] == anchors.positive_ids).any(dim=1)
        usable = ~barred & (state != NO_STATE)
        item, partner, similarity, log_mean = recent.look(anchors, usable, self.random)
        state = torch.where(usable, state, item)
        drawn = near = None
        if self.proposals != "batch":
            neighbors = self.left_neighbors if anchors.side == "left" else self.right_neighbors
            if self.neighbor_share and len(neighbors.ids):
                everyone = distributed.gather(anchors.ids, anchors.sizes)
                near = neighbors.take("ids", everyone, anchors.known and anchors.known.all_anchors)
                near = near.flatten().sort().values
            # Uniform draws are made on the CPU, which then knows them without a look.
            device = torch.device("cpu") if near is None else items.device
            size, count = self.num_items(anchors.candidate_side) or 1, self.proposals
            drawn = self.random.integers(size, count, device=device)
            if near is not None and len(near):
                share, num_near = self._share_of_near(near)
                uniform = self.random.uniform(2, count, like=near.double())
                # What is listed stands at the end.
                place = len(near) - 1 - (uniform[0] * num_near).long().clamp(max=num_near - 1).clamp(min=0)
                drawn = torch.where(uniform[1] < share, near[place], drawn)
            drawn = self.items_drawn(drawn)
            items, drawn = upload(drawn, items.device), drawn if near is None else None
            partners = torch.full_like(items, NO_STATE)
        found = (usable, state, partner, similarity, log_mean)
        return Visit(chains, recent, own, known, all_known, *found, items, partners, drawn, near)

    def log_density(self, anchors: Anchors, visit: Visit, items: Tensor) -> Tensor:
        """(n,) log of the probability that a proposal is one of some items (n,), over that of a uniform draw."""
        if visit.near is None:
            return anchors.embeddings.new_zeros(len(items))
        ids, size = ids_of(items, self.views), self.num_items(anchors.candidate_side) or 1
        share, num_near = self._share_of_near(visit.near)
        listed = torch.searchsorted(visit.near, ids, right=True) - torch.searchsorted(visit.near, ids)
        return torch.log(1 - share + share * size / num_near.clamp(min=1) * listed).to(anchors.embeddings)

    def _share_of_near(self, near: Tensor) -> tuple[Tensor, Tensor]:
        """The share of the draws that comes from a list (L,), 0 if it holds nothing but -1; and how much it holds."""
        number = (near >= 0).sum()
        return self.neighbor_share * (number > 0).double(), number

    def embed_proposals(
        self, anchors: Anchors, visit: Visit, state: Tensor | None, num_views: int, encode: Encode
    ) -> Asking[tuple[Tensor, Tensor, Tensor]]:
        """Embed the proposals, and states outside the batch of this rank's anchors, each item once.

        Args:
            state: (A,) items, -1 for what need not be encoded; None for none.
            num_views: 2 to embed of each state also the item that follows it.

        Returns:
            (C, D) the proposals; (n,) the rows whose states are embedded; and (n, D) or (2n, D) their embeddings.
        """
        in_batch, known = self.proposals == "batch", visit.drawn
        asked = [state if state is not None else anchors.ids[:0]]
        if not in_batch and known is None:
            asked.append(visit.items)
        states, *drawn = (yield torch.cat(asked)).split([len(part) for part in asked])
        states, rows = known_rows(states, anchors)
        wanted = states if num_views == 1 else torch.stack([states, states + 1], dim=1).flatten()
        if in_batch:
            return anchors.candidates[: anchors.num_global], rows, embed(wanted, encode, anchors)
        own, sizes = distributed.share(drawn[0] if known is None else known)
        embeddings = embed(torch.cat([own, wanted]), encode, anchors)
        proposed = distributed.gather_with_grad(embeddings[: len(own)], sizes)
        if self.updates_state and visit.recent.num_slots and visit.near is None:
            visit.recent.add(visit.items, visit.partners, proposed)
        return proposed, rows, embeddings[len(own) :]

    def compare(self, anchors: Anchors, visit: Visit, proposed: Tensor) -> tuple[Tensor, Tensor]:
        """(A, C) similarities with the proposals (C, D), and (A, C) whether these are negatives of the anchors."""
        if self.proposals == "batch":
            own = slice(anchors.num_global)
            return anchors.similarities[:, own], anchors.allowed[:, own]
        return anchors.embeddings @ proposed.T, anchors.is_negative(ids_of(visit.items, self.views))

    @property
    def reports_loss(self) -> bool:
        """A corpus that `recent` holds gives the partition function; of a larger one it is not known."""
        return self.recent_left.hold_the_corpus and self.recent_right.hold_the_corpus

    def global_loss(self, anchors: Anchors, visit: Visit, negatives: Tensor) -> AnchorLosses:
        """The loss, from (A,) Σ_z p(z)·s_z with gradient."""
        surrogate = negatives / anchors.temperature - anchors.positive_logits
        if not visit.recent.hold_the_corpus:
            return AnchorLosses(surrogate)
        value = visit.log_mean.nan_to_num(neginf=0.0) + self.log_corpus_size(anchors) - anchors.positive_logits
        return AnchorLosses(surrogate, value.detach())
