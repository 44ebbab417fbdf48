"""What EMC2 and ISIR share: the chains' memory, where they start, what is proposed to them, and the loss's value.

An *item* is what a chain can be on: an id of the candidates' side, or with views one view of an image, its left view
as 2·id and its right view as 2·id + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.anchors import Anchors, WithGradient, joined, listed
from dualenc.objectives.base import Encode, Objective
from dualenc.objectives.item_state import ItemState
from dualenc.objectives.looks import Asking, upload
from dualenc.objectives.state import SharedRandom, first_rows
from dualenc.types import Side

NO_STATE = -1


class ChainNumbers(NamedTuple):
    """Which chains some anchors have.

    Attributes:
        own: (A,) those of this rank's anchors.
        known, all_known: the same, and those of all ranks' anchors in the order of ranks, on the CPU; None where the
            host does not know them.
    """

    own: Tensor
    known: Tensor | None
    all_known: Tensor | None


class Chains(ItemState):
    """The item that each chain is on, -1 before the first step, and what an objective wants to remember with it.

    Args:
        num_left, num_right: chains of left anchors, which stand first, and of right ones.
        remembers: name of each further value, and what it is before the first step.
    """

    state: Tensor
    score: Tensor
    partner: Tensor

    def __init__(self, num_left: int, num_right: int, remembers: Mapping[str, float], on_cpu: bool = False) -> None:
        super().__init__(on_cpu)
        # Holds nothing, but its shape tells a saved state of other sizes, even of the same sum.
        self.register_buffer("sides", torch.zeros(num_left, num_right, 0))
        self.before = {"state": NO_STATE, **remembers}
        for name, value in self.before.items():
            self.register_buffer(name, torch.full((num_left + num_right,), value))

    def store(self, anchors: Anchors, numbers: ChainNumbers, **values: Tensor) -> None:
        """Write the state (A,) that the anchors' chains are on now and what they remember with it (A,), of the anchors
        of all ranks; of several rows of a chain the first counts."""
        sizes = [len(anchors.directions) * size for size in anchors.sizes]
        chains = distributed.gather(numbers.own, sizes)
        new = {name: distributed.gather(of, sizes) for name, of in values.items()}
        # Whoever has a negative has a state.
        some = None if anchors.all_have_negatives else new["state"] != NO_STATE
        if not anchors.distinct_rows:
            # Rows without a state stand behind all others.
            rows, some = distributed.gather(anchors.rows, sizes), new["state"] != NO_STATE
            in_order = torch.where(some, rows, anchors.num_rows + rows).argsort()
            chosen = in_order[first_rows(chains[in_order])][in_order.argsort()]
            some, new = some[chosen], {name: values[chosen] for name, values in new.items()}
        self.put(chains, numbers.all_known, some, **new)

    def forget(self, some: slice) -> None:
        """Back to before the first step."""
        self.settle()
        for name, value in self.before.items():
            getattr(self, name)[some] = value


class RecentItems(nn.Module):
    """The latest embeddings of up to K items of each of X directions: where chains start, and what the loss is worth.

    Item k has slot k mod K. With K ≥ N every item keeps its own latest embedding; with more items each slot holds
    the latest of its class, and stands for all of that class (a stratified sample of the corpus).

    Args:
        num_slots: the most that K may be; 0 remembers nothing.
        num_items: N of the candidates of each direction.
    """

    items: Tensor
    partners: Tensor
    embeddings: Tensor
    log_counts: Tensor
    directions: Tensor

    def __init__(self, num_slots: int, num_items: Sequence[int]) -> None:
        super().__init__()
        self.num_items = max(num_items)
        self.num_slots = size = min(num_slots, self.num_items)
        self.num_seen, self.enough = 0, [min(2 * size, number) for number in num_items]
        shape, slots = (len(num_items), size), torch.arange(size)
        self.register_buffer("items", torch.full(shape, NO_STATE))
        self.register_buffer("partners", torch.full(shape, NO_STATE))
        # The dimension shows when the first embeddings come.
        self.register_buffer("embeddings", torch.zeros(*shape, 0))
        counts = [number // max(size, 1) + (slots < number % max(size, 1)) for number in num_items]
        self.register_buffer("log_counts", torch.stack(counts).float().log())
        self.register_buffer("directions", torch.arange(len(num_items))[:, None], persistent=False)
        self.paired_once = False

    def set_counts(self, counts: Sequence[Tensor], weigh: bool) -> None:
        """Tell in how many pairs each item (N,) is; in a corpus that is made of pairs it weighs so much."""
        if not self.num_slots:
            return
        self.paired_once = all(bool((of == 1).all()) for of in counts)
        for number, of in enumerate(counts):
            self.enough[number] = min(2 * min(self.num_slots, len(of)), int(of.sum()))
            if weigh:
                slots = torch.arange(len(of), device=of.device) % self.num_slots
                total = torch.zeros_like(self.log_counts[number], dtype=torch.float64)
                self.log_counts[number] = total.index_add_(0, slots, of.double()).log()

    @torch.no_grad()
    def add(self, items: Tensor, partners: Tensor, embeddings: Tensor, distinct: bool = False, first: int = 0) -> None:
        """Take in items (X, n), their partners (X, n) and embeddings (X, n, D), alike on all ranks; no item comes twice
        if `distinct`. Of fewer directions, they are those from the `first` on."""
        if embeddings.shape[2] != self.embeddings.shape[2]:
            shape = (*self.items.shape, embeddings.shape[2])
            self.embeddings = embeddings.new_zeros(shape, dtype=self.log_counts.dtype)
        slots = items if self.num_slots == self.num_items else items % self.num_slots
        if not (distinct and slots is items):
            rows = torch.stack([first_rows(of) for of in slots])
            slots, items, partners = (of.gather(1, rows) for of in (slots, items, partners))
            embeddings = torch.stack([of[some] for of, some in zip(embeddings, rows, strict=True)])
        every = len(items) == len(self.directions)
        where = self.directions if every else self.directions[first : first + len(items)], slots
        self.items[where], self.partners[where] = items, partners
        self.embeddings[where] = embeddings.to(self.embeddings)

    @property
    def hold_the_corpus(self) -> bool:
        """Whether every item keeps its own embedding, and some have come."""
        return self.num_slots == self.num_items and self.embeddings.shape[2] > 0

    @torch.no_grad()
    def look(
        self,
        anchors: Anchors,
        usable: Tensor,
        uniform: Tensor,
        beside: Literal["partner", "similarity"],
        never_nothing: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What anchors (A,) see here, where all items but their positives are negatives.

        Args:
            anchors: those of this rank.
            usable: (A,) whether a chain needs no start.
            uniform: (A, 1) draws in [0, 1).
            beside: what to tell of an item besides.
            never_nothing: it is known that a negative of every anchor is here.

        Returns:
            (A,) each: the item of a draw from the softmax, and its partner or its similarity, -1 and -1 or -inf for
            none; and the log of the mean of exp(s/τ) over the negatives that are here, 0 for an anchor without any,
            -inf where nothing is kept.
        """

        def nothing() -> tuple[Tensor, Tensor, Tensor]:
            item = torch.full_like(anchors.ids, NO_STATE)
            none = torch.full_like(item, -torch.inf, dtype=anchors.embeddings.dtype)
            return item, item if beside == "partner" else none, none

        # On the CPU a look costs nothing and may save the comparison; a GPU would wait longer than it compares.
        nothing_drawn = usable.device.type == "cpu" and bool(usable.all())
        if self.embeddings.shape[2] == 0 or (nothing_drawn and not self.hold_the_corpus):
            return nothing()
        # What is not there yet counts nothing.
        here = self.log_counts.to(anchors.embeddings).masked_fill(self.items == NO_STATE, -torch.inf)
        ids, known = ids_of(self.items, anchors.views), self.embeddings.to(anchors.embeddings)

        def rows(some: Anchors, uniform: Tensor) -> tuple[Tensor, ...]:
            # All with X directions first, of which `some` may be one.
            num = len(some.directions)
            hidden = listed(some.positive_ids.view(num, -1, some.positive_ids.shape[1]), of_directions(ids, some))
            # Who stands in one pair is hidden as the positive of its partner.
            if not (some.views or self.paired_once):
                hidden |= some.ids.view(num, -1, 1) == of_directions(self.partners, some)[:, None]
            log_weights = of_directions(here, some)[:, None].masked_fill(hidden, -torch.inf)
            own = some.embeddings.view(num, -1, some.embeddings.shape[1])
            similarities = torch.bmm(own, of_directions(known, some).mT)
            logits = similarities / some.temperature + log_weights
            if some.directions[0].guide is not None:
                # In the mean below these count as 0: they are in the corpus.
                logits.masked_fill_(_taken_for_positives(some, of_directions(self.items, some)), -torch.inf)
            log_sum = torch.logsumexp(logits, dim=2)
            log_mean = (log_sum - torch.logsumexp(log_weights, dim=2)).view(-1)
            if not never_nothing:
                log_mean = log_mean.nan_to_num(neginf=0.0)
            if nothing_drawn:
                return (log_mean,)
            drawn = inverse_cdf(torch.softmax(logits, dim=2), uniform.view(num, -1, 1))
            slot = drawn[:, :, 0]
            item = of_directions(self.items, some).gather(1, slot).view(-1)
            if beside == "partner":
                told = of_directions(self.partners, some).gather(1, slot).view(-1)
            else:
                told = similarities.gather(2, drawn).view(-1)
            if never_nothing:
                return item, told, log_mean
            impossible = log_sum.view(-1) == -torch.inf
            none = NO_STATE if beside == "partner" else -torch.inf
            return item.masked_fill_(impossible, NO_STATE), told.masked_fill_(impossible, none), log_mean

        *drawn, log_mean = anchors.by_rows(rows, uniform, row_entries=self.num_slots)
        item, told = drawn or nothing()[:2]
        return item, told, log_mean

    def get_extra_state(self) -> Tensor:
        """How many rows came in, and how many are enough of each direction, for the state dict."""
        return torch.tensor([self.num_seen, *self.enough])

    def set_extra_state(self, state: Tensor) -> None:
        """Continue from a saved position."""
        self.num_seen, *self.enough = (int(number) for number in state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "embeddings")
        if saved is not None and saved.shape[:2] == self.items.shape:
            self.embeddings = self.embeddings.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _taken_for_positives(some: Anchors, items: Tensor) -> Tensor:
    """(X, a, n) what a guide takes for positives of some rows of the anchors among items (X, n) of each direction."""
    guides = [of.guide for of in some.directions]
    return torch.stack([of.of_items(these) for of, these in zip(guides, items, strict=True) if of is not None])


def of_directions(values: Tensor, some: Anchors) -> Tensor:
    """Of values (X, ...) of each direction those that some rows of the anchors are of."""
    if len(some.directions) == len(values):
        return values
    return values[1:] if some.side == "right" else values[:1]


def inverse_cdf(weights: Tensor, uniform: Tensor) -> Tensor:
    """(…, 1) a column drawn from each row of weights (…, C) ≥ 0, which need not sum to 1; any for rows of zeros or NaN.

    Draws (…, 1) of `uniform` in [0, 1 − 2⁻²⁴] never lead to a column of weight 0: no product with the sum rounds to it.
    """
    cumulative = weights.cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True)
    return drawn.clamp_(max=weights.shape[-1] - 1)


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
    there, place = find_in_rows(items, wanted)
    return place.masked_fill_(~there, -1)


def find_in_rows(items: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(…, A) whether each wanted one (…, A) is in its row of items (…, C), C > 0, and its first position there; any
    where it is not."""
    ordered, order = items.sort(dim=-1, stable=True)
    place = torch.searchsorted(ordered, wanted).clamp_(max=items.shape[-1] - 1)
    return ordered.gather(-1, place) == wanted, order.gather(-1, place)


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

    Shapes: X directions that these anchors are of, A anchors, A/X of each direction, C proposals to each direction.

    Attributes:
        chains: which they are.
        usable: (A,) whether the chain is on a negative of the anchor; else it starts anew.
        state: (A,) the item that each chain comes with, -1 for none.
        told: (A,) of what starts anew, the partner or the similarity of its item; see `RecentItems.look`.
        log_mean: (A,) what `RecentItems.look` gives.
        items, partners: (X, C) the proposals, and the other ids of the pairs that they come from, -1 if from none.
        drawn: of each direction (C,) the proposals, if they are not the batch: on the CPU where they are `uniform`.
        near: of each direction (L,) sorted ids, after -1 for none, that `neighbor_share` of the draws come from if
            there are any, each as likely as it is often listed; None where all are uniform.
    """

    chains: ChainNumbers
    usable: Tensor
    state: Tensor
    told: Tensor
    log_mean: Tensor
    items: Tensor
    partners: Tensor
    drawn: list[Tensor]
    near: list[Tensor | None]

    @property
    def uniform(self) -> bool:
        """Whether all proposals are drawn uniformly."""
        return all(near is None for near in self.near)

    def find(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """(A, 1) whether an item (A,) is among the proposals to its direction, and its first position there, or any."""
        there, place = find_in_rows(self.items, state.view(len(self.items), -1))
        return there.view(-1, 1), place.view(-1, 1)

    def column(self, state: Tensor) -> Tensor:
        """(A, 1) the first position of an item (A,) among the C proposals to its direction, C where it is not there."""
        there, place = find_in_rows(self.items, state.view(len(self.items), -1))
        return place.masked_fill_(~there, self.items.shape[1]).view(-1, 1)

    def by_row(self, values: Tensor, some: Anchors) -> Tensor:
        """(a, C) of values (X, C) of each direction those for each of some rows of the anchors."""
        own = of_directions(values, some)
        return own[:, None].expand(-1, some.num_own // len(own), -1).flatten(0, 1)

    def after(self, moved: Tensor, place: Tensor, *tables: tuple[Tensor, Tensor]) -> list[Tensor]:
        """(A,) what chains are on after those that `moved` went to a place (A,) of the proposals.

        Args:
            moved, place: (A,); a place may also be (A, 1).
            tables: of the values (X, C) that proposals have, and (A,) where chains were: the items, and others.
        """
        place = place.view(len(self.items), -1)
        return [torch.where(moved, of.gather(1, place).view(-1), was) for of, was in tables]


class ChainObjective(Objective):
    """Base of the objectives whose negatives come from a Markov chain per anchor that is kept from step to step.

    Where a chain starts never changes its law, but decides when the law is reached. On an anchor's first visit it
    starts on a draw from the softmax over the latest embeddings of up to `recent` items; once these are there for the
    first time (after an epoch, or 2·`recent` items of a larger corpus) every chain starts anew.

    Chains give the gradient of the loss and not its value. Where the corpus has no more than `recent` items, the value
    takes the partition function from their latest embeddings: exact at fixed parameters from the second epoch on. Of
    a larger corpus they are a sample, which errs low by nats at small τ: `reports_loss` is False then, and `loss` has
    only the value of the surrogate.

    With a guide (`guide_margin`, `guide_relative`) the law of a chain is the softmax over those negatives that the
    guide leaves to the pair (x, y), with g how alike it finds two items:

        p(z|x, y) ∝ exp(s(x, z)/τ)·1[g(x, z) ≤ limit(g(x, y))]

    A proposal that is left out has weight 0: it is no step of EMC2, and no share of ISIR. A chain that is on such an
    item, from before there was a guide, begins anew as on a first visit. So no chain is ever on what the guide leaves
    out, cold start included. The limit is that of the pair. Of an anchor with several positives the sets of allowed
    items are nested: a state that lies in the smaller one follows its law, any other begins anew, and back in the
    larger one the chain has to mix.

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
    both_at_once = True
    takes_mined = False
    remembers: ClassVar[dict[str, float]] = {}
    """What chains remember besides the item that they are on; see `Chains`."""
    beside: Literal["partner", "similarity"]
    """What of an item that a chain starts on is wanted; see `RecentItems.look`."""

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
        of_left = num_left if self.shared_chain else 2 * num_left
        self.chains = Chains(of_left, 0 if self.views else num_right, self.remembers, on_cpu)
        self.left_neighbors, self.right_neighbors = Neighbors(on_cpu), Neighbors(on_cpu)
        # Of right items for the chains of left anchors, and the other way round; with views both are the same.
        num_views = 2 if self.views else 1
        self.recent = RecentItems(recent * num_views, [2 * num_left] if self.views else [num_right, num_left])
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
        counts = [left_counts.repeat_interleave(2)] if self.views else [right_counts, left_counts]
        self.recent.set_counts(counts, weigh=self.corpus_of_pairs)

    def items_drawn(self, ids: Tensor) -> Tensor:
        """(C,) the items that drawn ids (R,) propose, on the device of these."""
        raise TypeError(f"{type(self).__name__} does not define items_drawn")

    def visit(self, anchors: Anchors) -> Visit:
        """Take in the batch's embeddings; where the anchors' chains are, and what is proposed to them."""
        items = torch.stack([candidate_items(of) for of in anchors.directions])
        # Two views come in no pair.
        partners = torch.full_like(items, NO_STATE) if self.views else items.flip(0)
        if self.updates_state and self.recent.num_slots:
            candidates = torch.stack([of.candidates for of in anchors.directions])
            self.recent.add(items, partners, candidates, anchors.distinct)
            seen, self.recent.num_seen = self.recent.num_seen, self.recent.num_seen + anchors.num_global
            for of, enough in zip(anchors.directions, self.recent.enough, strict=True):
                if seen < enough <= self.recent.num_seen:
                    # All of a small corpus or most slots have come: chains that began before that begin anew.
                    self.chains.forget(self.chains_of(of.side))
        chains = self._numbers(anchors)
        state = self.take("state", chains)
        usable = anchors.allows_each(state) & (state != NO_STATE)
        uniform = anchors.of_rank(self.random.uniform(anchors.num_rows, 1, like=anchors.embeddings))
        # The batch is there by now, and with a slot for every item nothing of it displaced another part.
        every_slot = self.updates_state and self.recent.num_slots == self.recent.num_items
        never_nothing = every_slot and anchors.all_have_negatives
        item, told, log_mean = self.recent.look(anchors, usable, uniform, self.beside, never_nothing)
        found, num = (chains, usable, torch.where(usable, state, item), told, log_mean), len(items)
        self._watch(anchors, *found[1:3])
        if self.proposals == "batch":
            return Visit(*found, items, partners, [], [None] * num)
        proposals = [self._draw(of) for of in anchors.directions]
        items = torch.stack([upload(drawn, items.device) for drawn, _ in proposals])
        drawn, near = zip(*proposals, strict=True)
        return Visit(*found, items, torch.full_like(items, NO_STATE), list(drawn), list(near))

    def take(self, name: str, chains: ChainNumbers) -> Tensor:
        """(A,) what chains remember."""
        return self.chains.take(name, chains.own, chains.known)

    def store(self, anchors: Anchors, chains: ChainNumbers, state: Tensor, **remembered: Tensor) -> None:
        """Write where the anchors' chains are now (A,), and what they remember with it (A,)."""
        self.chains.store(anchors, chains, state=state, **remembered)
        side = anchors.directions[0].side
        self.watched[side] = (*self.watched[side][:2], state)

    def diagnostics(self) -> dict[str, Tensor]:
        """The share of chains that moved on in the last step, and of those that began anew in it."""
        kept = [of for of in self.watched.values() if len(of) == 3]
        if not kept:
            return {}
        usable, before, after = (torch.cat(of) for of in zip(*kept, strict=True))
        number = (before != NO_STATE).sum().clamp(min=1)
        moved = ((before != NO_STATE) & (after != before)).sum() / number
        return {"chains_moved": moved, "chains_begun": (~usable).sum() / max(len(usable), 1)}

    def chains_of(self, side: Side) -> slice:
        """Which chains a side's items have; with views all."""
        if self.views:
            return slice(None)
        return slice(self.num_left) if side == "left" else slice(self.num_left, None)

    def _numbers(self, anchors: Anchors) -> ChainNumbers:
        """Which chains the anchors have."""
        known = [of.known for of in anchors.directions if of.known is not None]
        if not self.shared_chain:
            # The second views are the second half of all anchors.
            half = anchors.num_global // 2
            own = 2 * anchors.ids + (anchors.rows >= half)
            if not known:
                return ChainNumbers(own, None, None)
            (of,) = known
            return ChainNumbers(
                own, 2 * of.own + (anchors.rows_on_cpu >= half), 2 * of.all_anchors + (of.all_rows >= half)
            )
        first = [self.chains_of(of.side).start or 0 for of in anchors.directions]

        def numbers(ids: Sequence[Tensor]) -> list[Tensor]:
            return [of + start if start else of for of, start in zip(ids, first, strict=True)]

        own = joined(numbers([of.ids for of in anchors.directions]))
        if not known:
            return ChainNumbers(own, None, None)
        by_rank = zip(*(of.split(anchors.sizes) for of in numbers([of.all_anchors for of in known])), strict=True)
        everyone = torch.cat([part for of_rank in by_rank for part in of_rank])
        return ChainNumbers(own, joined(numbers([of.own for of in known])), everyone)

    def _draw(self, anchors: Anchors) -> tuple[Tensor, Tensor | None]:
        """(C,) proposals from the corpus to the anchors of a direction, and what is near (L,): see `Visit`."""
        neighbors, near = self.left_neighbors if anchors.side == "left" else self.right_neighbors, None
        if self.neighbor_share and len(neighbors.ids):
            everyone = distributed.gather(anchors.ids, anchors.sizes)
            near = neighbors.take("ids", everyone, anchors.known and anchors.known.all_anchors)
            near = near.flatten().sort().values
        # Uniform draws are made on the CPU, which then knows them without a look.
        device = torch.device("cpu") if near is None else anchors.ids.device
        size, count = self.num_items(anchors.candidate_side) or 1, self.proposals
        assert isinstance(count, int)
        drawn = self.random.integers(size, count, device=device)
        if near is not None and len(near):
            share, num_near = self._share_of_near(near)
            uniform = self.random.uniform(2, count, like=near.double())
            # What is listed stands at the end.
            place = len(near) - 1 - (uniform[0] * num_near).long().clamp(max=num_near - 1).clamp(min=0)
            drawn = torch.where(uniform[1] < share, near[place], drawn)
        return self.items_drawn(drawn), near

    def log_density(self, anchors: Anchors, visit: Visit, items: Tensor) -> Tensor:
        """(X, n) log of the probability that a proposal is one of some items (X, n), over that of a uniform draw."""
        found = []
        for of, near, ids in zip(anchors.directions, visit.near, ids_of(items, self.views), strict=True):
            if near is None:
                found.append(torch.zeros_like(ids, dtype=anchors.temperature.dtype))
                continue
            size, (share, num_near) = self.num_items(of.candidate_side) or 1, self._share_of_near(near)
            copies = torch.searchsorted(near, ids, right=True) - torch.searchsorted(near, ids)
            found.append(torch.log(1 - share + share * size / num_near.clamp(min=1) * copies).to(anchors.temperature))
        return torch.stack(found)

    def _share_of_near(self, near: Tensor) -> tuple[Tensor, Tensor]:
        """The share of the draws that comes from a list (L,), 0 if it holds nothing but -1; and how much it holds."""
        number = (near >= 0).sum()
        return self.neighbor_share * (number > 0).double(), number

    def embed_proposals(
        self, anchors: Anchors, visit: Visit, state: Tensor | None, num_views: int, encode: Encode
    ) -> Asking[tuple[list[Tensor], Tensor | None]]:
        """Embed the proposals, and states outside the batch of this rank's anchors, each item once.

        Args:
            state: (A,) items, -1 for what need not be encoded; None for none.
            num_views: 2 to embed of each state also the item that follows it.

        Returns:
            (C, D) of each direction the proposals; and (A, num_views) similarities with the states, with gradient, any
            where there is none; None where there is none at all.
        """
        in_batch, unknown = self.proposals == "batch", not visit.uniform
        asked = ([] if state is None else [state]) + ([visit.items.view(-1)] if unknown else [])
        answer = (yield joined(asked)) if asked else torch.zeros(0, dtype=torch.long)
        states, drawn = answer, visit.drawn
        if unknown:
            states, learned = answer.split([len(answer) - visit.items.numel(), visit.items.numel()])
            drawn = list(learned.view(visit.items.shape))
        proposed, of_states, wanted_states = [], [], borrowed(states, anchors, num_views)
        for number, (of, wanted) in enumerate(zip(anchors.directions, wanted_states, strict=True)):
            if in_batch:
                of_states.append(embed(wanted, encode, of))
                proposed.append(of.candidates)
                continue
            own, sizes = distributed.share(drawn[number])
            embeddings = embed(torch.cat([own, wanted]), encode, of)
            of_states.append(embeddings[len(own) :])
            proposed.append(distributed.gather_with_grad(embeddings[: len(own)], sizes))
            if self.updates_state and self.recent.num_slots and visit.near[number] is None:
                come = (visit.items[number, None], visit.partners[number, None], proposed[-1][None])
                self.recent.add(*come, first=number)
        of_all = of_anchors(anchors, of_states, num_views)
        if of_all is None:
            return proposed, None
        if num_views == 1:
            return proposed, (anchors.embeddings * of_all).sum(dim=1, keepdim=True)
        return proposed, (anchors.embeddings[:, None] * of_all.view(-1, num_views, of_all.shape[1])).sum(dim=2)

    def embed_states(self, anchors: Anchors, state: Tensor, encode: Encode) -> Asking[Tensor | None]:
        """(A,) similarities with states (A,), -1 for none; see `embed_proposals`."""
        states = borrowed((yield state), anchors, 1)
        parts = [embed(these, encode, of) for of, these in zip(anchors.directions, states, strict=True)]
        of_all = of_anchors(anchors, parts)
        return None if of_all is None else (anchors.embeddings * of_all).sum(dim=1)

    def compare(self, some: Anchors, visit: Visit, proposed: list[Tensor]) -> tuple[Tensor, Tensor]:
        """(a, C) s/τ of some rows of the anchors with the proposals (C, D) of each direction; and the same, -inf where
        a proposal is no negative."""
        if self.proposals == "batch":
            return some.scores, some.logits

        def scores_of(of: Anchors) -> tuple[Tensor, Tensor]:
            number = 1 if of.side == "right" else 0
            scores = of.embeddings @ proposed[number].T / of.temperature
            return scores, scores.masked_fill(of.hides(visit.items[number]), -torch.inf)

        return some.by_direction(scores_of)

    @property
    def reports_loss(self) -> bool:
        """A corpus that `recent` holds gives the partition function; of a larger one it is not known."""
        return self.recent.hold_the_corpus

    def losses_of(self, some: Anchors, scores: Tensor, weights: Tensor, log_mean: Tensor) -> Tensor:
        """(a,) the loss of some rows of the anchors; its gradient is Σ_c weight·∇score.

        Args:
            scores: (a, C) with gradient; first those of the batch, where it makes the proposals.
            weights: (a, C); changed in place.
            log_mean: (a,) see `Visit`.
        """
        in_batch = self.proposals == "batch"
        if not in_batch:
            scores = torch.cat([scores, some.positive_logits[:, None]], dim=1)
        with torch.no_grad():
            # The positive is no negative, and pulls with −1.
            weights = weights.scatter_(1, some.positive_place, -1.0) if in_batch else pad(weights, (0, 1), value=-1.0)
            if self.reports_loss:
                positive = some.positive_scores if in_batch else some.positive_logits
                value = log_mean + self.log_corpus_size(some) - positive
            else:
                value = (weights * scores).sum(dim=1)
        return WithGradient.apply(value, scores, weights)


def borrowed(states: Tensor, anchors: Anchors, num_views: int) -> list[Tensor]:
    """Of each direction (n·num_views,) items of states (A,) on the CPU, and those that follow; (0,) without any. Who
    alone has none, -1, borrows one, and what comes of it counts nothing."""
    if not len(states):
        return [states] * len(anchors.directions)
    found = []
    for of in states.numpy().reshape(len(anchors.directions), -1):
        some = of.max(initial=NO_STATE)
        items = np.where(of < 0, some, of) if some >= 0 else of[:0]
        found.append(torch.from_numpy((items[:, None] + np.arange(num_views)).ravel()))
    return found


def of_anchors(anchors: Anchors, embeddings: list[Tensor], num_views: int = 1) -> Tensor | None:
    """(A·num_views, D) what `borrowed` gave, embedded, of each direction, for all anchors; None if there is nothing."""
    if not any(map(len, embeddings)):
        return None
    # A direction without any gets zeros.
    return joined(
        [
            part if len(part) else of.embeddings.new_zeros(num_views * len(of.ids), of.embeddings.shape[1])
            for of, part in zip(anchors.directions, embeddings, strict=True)
        ]
    )
