"""Markov chains on the corpus, one per anchor, kept from step to step: shared by EMC2 and ISIR.

Shapes as in `anchors`, with C proposals, S items per state (1; for ISIR with views the 2 views of
an image) and R draws from the corpus.

The state of a chain is one integer, the *key* of the pair that its item came with. It distinguishes
copies of a document that several queries share:

    key = item·(anchors' ids + 1) + (id of the pair's other item + 1)    two towers
    key = item·(anchors' ids + 1)                                        drawn without a pair
    key = item                                                           views
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from dualenc import distributed
from dualenc.objectives.anchors import PADDING, Anchors, find, is_listed, log_mean
from dualenc.objectives.base import CommonArguments, Estimate, Objective
from dualenc.objectives.checks import check_count
from dualenc.objectives.draws import SharedRandom
from dualenc.objectives.item_tables import first_occurrence, write_rows
from dualenc.objectives.memory import EmbeddingMemory, draw_per_anchor

NO_STATE = PADDING


class ChainState(NamedTuple):
    """The chains of this rank's anchors."""

    chains: Tensor  # (X, A) rows of the chains
    state: Tensor  # (X, A) key of each chain's state, or of its start; NO_STATE for none
    started: Tensor  # (X, A) True if the chain starts in this step
    start_scores: Tensor  # (X, A) s/τ of the start, with the remembered embedding
    log_partition: Tensor  # (X, A) log Z estimated from the memory; -inf if that is empty
    is_found: Tensor  # (X, A, S) True if an item of the state is among the proposals
    column: Tensor  # (X, A, S) its column there; any valid column if not found


class ChainPlan(NamedTuple):
    """One step of the chains, before anything is encoded."""

    chain: ChainState
    keys: Tensor  # (X, C) keys of the proposals
    # (X, r + A·S) this rank's share of the R draws, then the states outside the batch; -1 for none
    outside: Tensor
    num_drawn: list[int]  # draws that each rank encodes; empty if the batch makes the proposals
    walk: Any = None  # EMC2's `Walk`, if it needs no further embeddings


class ChainArguments(CommonArguments, total=False):
    """All keyword arguments of `ChainObjective`, for the constructors of its subclasses."""

    proposals: Literal["batch"] | int
    recent: int


class ChainObjective(Objective):
    """Base of the objectives whose negatives come from a persistent Markov chain per anchor.

    A chain starts on a draw from the softmax over the latest embeddings of up to `recent` items,
    and starts again when these are complete for the first time. If the corpus has at most `recent`
    items, they also give the value of the loss. For a larger corpus the proposals give it, which
    underestimate log Z by several nats at small τ, so `reports_loss` is False then.

    Args:
        proposals: "batch" for the other items of the batch; the corpus is then the multiset of the
            pairs' items. Or R, the number of items drawn uniformly from the whole id space, which
            are encoded once and shared by all chains; every item then counts once.
        recent: number of items per side whose latest embeddings are kept, for warm starts of chains
            and for the value of the loss. 0 keeps none: chains start on their first batch.
        **common: see `Objective`. num_left is required (and num_right, if it differs), and `encode`
            in `forward`.
    """

    state: Tensor
    keys_per_item: Tensor
    memories: Sequence[EmbeddingMemory]  # for each direction's candidates; none with recent=0

    needs_num_left = True
    needs_encode = True
    takes_mined = False  # mined negatives are not uniform proposals

    def __init__(
        self,
        *,
        proposals: Literal["batch"] | int = "batch",
        recent: int = 4096,
        **common: Unpack[CommonArguments],
    ) -> None:
        super().__init__(**common)
        if proposals != "batch":
            check_count("proposals", proposals)  # type: ignore[arg-type]
        check_count("recent", recent, 0)
        self.proposals = proposals
        self.recent = recent
        # In-batch proposals are uniform in random batches only. Draws from the corpus weigh every
        # item once, whatever the batch.
        self.remedy_for_other_batches = "proposals=64" if proposals == "batch" else None
        self.corpus.counts_pairs = proposals == "batch"
        # With views each view has its own chain: one chain for both would be biased at small τ.
        num_chains = self.corpus.num_rows * self.num_views
        self.register_buffer("state", torch.full((num_chains,), NO_STATE))
        # Keys of views contain no pair, because an image occurs in one pair only.
        key_sizes = [1]
        if not self.views:
            num_left = self.num_left or 0
            num_right = self.num_right or 0
            key_sizes = [1 + num_left, 1 + num_right]
        self.register_buffer("keys_per_item", torch.tensor(key_sizes), persistent=False)
        self.draws = SharedRandom(self.seed)
        memories = []
        if recent:
            for direction, keys_per_item in zip(self.directions, key_sizes, strict=True):
                num_items = self.corpus.num_items(direction)
                memories.append(EmbeddingMemory(num_items, recent * self.num_views, keys_per_item))
        self.memories = nn.ModuleList(memories)  # type: ignore[assignment]

    @property
    def reports_loss(self) -> bool:
        """True if the memories hold the whole corpus, and therefore its partition function."""
        return len(self.memories) > 0 and all(memory.holds_corpus for memory in self.memories)

    def items_of(self, keys: Tensor) -> Tensor:
        """Return (X, …) the items of keys (X, …); -1 for NO_STATE, which floor division keeps."""
        num_trailing = keys.dim() - 1
        return keys // self.keys_per_item.view(-1, *[1] * num_trailing)

    def keys_of(self, items: Tensor) -> Tensor:
        """Return (X, n) the keys of items (X, n) without a pair."""
        return items * self.keys_per_item[:, None]

    def items_of_state(self, state: Tensor) -> Tensor:
        """Return (X, A, S) the items that states (X, A) stand for."""
        return self.items_of(state)[..., None]

    def keys_of_draws(self, ids: Tensor) -> Tensor:
        """Return (X, C) the keys that drawn ids (X, R) propose."""
        raise TypeError(f"{type(self).__name__} does not define keys_of_draws")

    def visit(self, anchors: Anchors) -> tuple[ChainState, Tensor]:
        """Write the batch to the memory, then look up the chains of its anchors.

        Returns:
            The chains' states, and (X, C) the keys proposed to them.
        """
        batch_keys = self.keys_of(anchors.candidate_items)
        if self.proposals == "batch" and not self.views:
            # The other item of the pair distinguishes copies of an item.
            batch_keys = batch_keys + anchors.candidate_ids.flip(0) + 1
        if self.updates_state:
            self._remember(anchors, batch_keys)

        chains = anchors.rows
        if self.views:
            chains = anchors.candidate_items[:, anchors.batch_rows]
        state = self.state[chains]
        # Positives are listed with each batch, so a stored state may have become a positive since.
        # It must not be a negative: the chain starts again.
        state_items = self.items_of(state)[..., None]  # (X, A, 1)
        is_positive = is_listed(state_items, anchors.hidden_items)[..., 0]
        started = (state == NO_STATE) | is_positive
        self.record(chains_begun=started.double().mean())
        start_keys, start_scores, log_partition = self._starts(anchors, started)
        state = torch.where(started, start_keys, state)

        keys = batch_keys
        if self.proposals != "batch":
            sizes = [self.corpus.num_ids(direction) or 1 for direction in anchors.directions]
            number = int(self.proposals)
            # (X, R) uniform draws from the id spaces
            drawn = [self.draws.integers(size, number, device=state.device) for size in sizes]
            keys = self.keys_of_draws(torch.stack(drawn))
        is_found, column = find(self.items_of(keys), self.items_of_state(state))
        chain = ChainState(chains, state, started, start_scores, log_partition, is_found, column)
        return chain, keys

    def plan_encoding(self, chain: ChainState, keys: Tensor, needed: Tensor) -> ChainPlan:
        """Choose the items to embed: this rank's share of the draws, and needed states (X, A).

        States that are among the proposals are not embedded a second time.
        """
        items = self.items_of_state(chain.state)  # (X, A, S)
        is_known = chain.is_found | ~needed[..., None]
        states = items.masked_fill(is_known, PADDING).flatten(1)
        if self.proposals == "batch":
            return ChainPlan(chain, keys, states, [])
        # All ranks made the same draws; each encodes its share of them.
        own, sizes = distributed.share(self.items_of(keys).T)
        return ChainPlan(chain, keys, torch.cat([own.T, states], dim=1), sizes)

    def embedded(
        self, anchors: Anchors, plan: ChainPlan, outside: Tensor
    ) -> tuple[Anchors, Tensor]:
        """Use the embedded proposals as candidates.

        Returns:
            The anchors against the proposals, and (X, A, S) s/τ, with gradient, of the states that
            are not among them.
        """
        num_drawn = 0
        if plan.num_drawn:
            num_drawn = plan.num_drawn[distributed.rank()]
            # Gathered with gradient: each rank encoded its share, and all anchors use all draws.
            own = outside[:, :num_drawn].transpose(0, 1).contiguous()
            drawn = distributed.gather_with_grad(own, plan.num_drawn).transpose(0, 1)
            if self.updates_state:
                for memory, keys, embeddings in zip(self.memories, plan.keys, drawn, strict=False):
                    memory.write(keys, embeddings)
            items = self.items_of(plan.keys)
            anchors = anchors.with_candidates(drawn, items // self.num_views)
        shape = plan.chain.is_found.shape[1:]  # (A, S)
        states = outside[:, num_drawn:].unflatten(1, shape)  # (X, A, S, D)
        similarities = (anchors.embeddings[:, :, None] * states).sum(dim=-1)
        return anchors, similarities / anchors.temperature

    def chain_losses(
        self,
        block: Anchors,
        chain: ChainState,
        weights: Tensor,
        scores: Tensor,
        state_scores: Tensor,
    ) -> Tensor:
        """Return (X, a) losses with the gradient Σ_c w_c·∇(s_c/τ) − ∇(s⁺/τ).

        Args:
            block: block of a anchors.
            chain: the anchors' chains.
            weights: (X, a, C + S) weights w of proposals and states.
            scores: (X, a, C) s/τ of the proposals, with gradient.
            state_scores: (X, a, S) s/τ of the states, with gradient.
        """
        all_scores = torch.cat([scores, state_scores], dim=-1)
        positive = block.positive_scores
        log_partition = chain.log_partition
        if not self.reports_loss:
            # Proposals are uniform draws from the corpus, whose mean estimates Z/n. The memory of a
            # small corpus has more items than that, so it is preferred.
            logits = scores.detach().masked_fill(block.not_negative, -torch.inf)
            by_proposals = log_mean(logits) + self.corpus.log_num_negatives(block)
            has_every_slot = all(memory.has_every_slot for memory in self.memories)
            by_memory = log_partition.isfinite() & has_every_slot
            log_partition = torch.where(by_memory, log_partition, by_proposals)
        return Estimate.apply(self.log_odds(log_partition, positive), all_scores, weights, positive)

    def store(
        self, anchors: Anchors, chain: ChainState, state: Tensor, *tables: tuple[Tensor, Tensor]
    ) -> None:
        """Write new states (X, A), and values (X, A) of further tables.

        Several anchors of a batch may share a chain, which then takes the state of the first one.
        """
        had_state = ~chain.started
        moved = had_state & (state != chain.state)
        self.record(chains_moved=moved.sum() / had_state.sum().clamp(min=1))
        if not self.updates_state:
            return
        rows = anchors.gather(chain.chains).flatten()  # (X·G,)
        state = anchors.gather(state).flatten()
        has_state = state != NO_STATE
        first = first_occurrence(rows, preferred=has_state)
        write_rows(self.state, rows, state[first], has_state[first])
        for table, values in tables:
            values = anchors.gather(values).flatten()
            write_rows(table, rows, values[first], has_state[first])

    def _remember(self, anchors: Anchors, batch_keys: Tensor) -> None:
        """Write the batch into the memory; once that is complete, restart earlier chains."""
        states = [self.state]
        if not self.views:
            states = list(self.state.tensor_split([self.num_left or 0]))
        for x, memory in enumerate(self.memories):
            memory.write(batch_keys[x], anchors.candidates[x])
            if memory.count(anchors.num_batch):
                # A view of the buffer, so that this side's chains alone are cleared.
                states[x].fill_(NO_STATE)

    def _starts(self, anchors: Anchors, started: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw a start for each chain from the memory.

        Returns:
            (X, A) keys, (X, A) their s/τ and (X, A) log Z estimated from the memory; NO_STATE and
            -inf if the memory is empty.
        """
        no_scores = torch.full_like(anchors.positive_scores, -torch.inf)
        # Drawn even if unused: the position of the random stream must not depend on the memory.
        uniform = self.draws.uniform(2, len(anchors.directions), anchors.num_batch, like=no_scores)
        # The memory is divided among ranks, so either all ranks draw from it or none does.
        is_needed = distributed.all_reduce(started.any().long(), "max")
        if not self.memories or not (self.reports_loss or bool(is_needed)):
            return torch.full_like(anchors.rows, NO_STATE), no_scores, no_scores
        keys, scores, log_mean = draw_per_anchor(self.memories, anchors, uniform)
        # Items outside the memory are assumed to have the same mean as those in it.
        return keys, scores, log_mean + self.corpus.log_num_negatives(anchors)
