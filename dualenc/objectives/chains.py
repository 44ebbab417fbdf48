"""Markov chains on the corpus, one per anchor and kept from step to step: what EMC2 and ISIR share.

Shapes as in `anchors`, with C proposals, S items that a state stands for (1; for ISIR with views an
image's 2), R draws from the corpus.

The state of a chain is one integer, the *key* of the pair that its item came with, so that copies
of a document that several queries share are distinguished:

    key = item·(anchors' ids + 1) + (id of the pair's other item + 1)      two towers; + 0 for a
    draw without a pair key = item                                                             views
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dualenc import distributed
from dualenc.objectives.anchors import PADDING, Anchors, find, is_listed, log_mean
from dualenc.objectives.base import Estimate, Objective
from dualenc.objectives.checks import check_count
from dualenc.objectives.draws import SharedRandom
from dualenc.objectives.item_tables import first_occurrence, write_rows
from dualenc.objectives.memory import EmbeddingMemory, draw_per_anchor

NO_STATE = PADDING


class ChainState(NamedTuple):
    """Where the chains of this rank's anchors are."""

    chains: Tensor  # (X, A) rows of the chains
    state: Tensor  # (X, A) the key that each chain is on, or starts on; NO_STATE for none
    started: Tensor  # (X, A) whether the chain starts in this step
    start_scores: Tensor  # (X, A) s/τ of what it starts on, with the remembered embedding
    log_partition: Tensor  # (X, A) log Z by what is remembered; -inf where nothing is
    is_found: Tensor  # (X, A, S) whether an item of the state is among the proposals
    column: Tensor  # (X, A, S) where; any number where it is not


class ChainPlan(NamedTuple):
    """A step of chains before anything is encoded."""

    chain: ChainState
    keys: Tensor  # (X, C) the proposals
    outside: Tensor  # (X, r + A·S) this rank's share of the R draws, then states outside the batch; or -1
    num_drawn: list[
        int
    ]  # how many draws each rank encodes; empty where the batch makes the proposals
    walk: Any = None  # of EMC2, where it needs nothing that is yet to be encoded


class ChainObjective(Objective):
    """Base of the objectives whose negatives come from a Markov chain per anchor that is kept from
    step to step.

    A chain starts on a draw from the softmax over the latest embeddings of up to `recent` items,
    and once more when these are complete for the first time. From them comes the value of the loss,
    too, where the corpus has no more than `recent` items; the proposals of a larger one
    underestimate log Z by several nats at small τ, so `reports_loss` is False then.

    Args:
        proposals: "batch", the other items of the batch: the corpus is then the multiset of the
            pairs' items. Or R, the number of items drawn uniformly from the whole id space, encoded
            once and shared by all chains: every item then counts once.
        recent: of how many items of each side the latest embeddings are kept, for chains to start
            on and for the value of the loss. 0 keeps none: chains start on their first batch.
        **common: see `Objective`; num_left (and num_right) are needed, and `encode` in forward.
    """

    state: Tensor
    keys_per_item: Tensor
    memories: Sequence[EmbeddingMemory]  # of each direction's candidates; none with recent=0

    needs_num_left = True
    needs_encode = True
    takes_mined = False  # they are no uniform proposals

    def __init__(
        self, *, proposals: Literal["batch"] | int = "batch", recent: int = 4096, **common: Any
    ) -> None:
        super().__init__(**common)
        if proposals != "batch":
            check_count("proposals", proposals)  # type: ignore[arg-type]
        check_count("recent", recent, 0)
        self.proposals = proposals
        self.recent = recent
        # In-batch proposals are uniform in random batches only; draws from the corpus weigh every
        # item once.
        self.remedy_for_other_batches = "proposals=64" if proposals == "batch" else None
        self.corpus.counts_pairs = proposals == "batch"
        # With views one for each view: a chain for both would be biased at small τ.
        num_chains = self.corpus.num_rows * self.num_views
        self.register_buffer("state", torch.full((num_chains,), NO_STATE))
        # Keys of views name no pair: an image is in one only.
        key_sizes = [1]
        if not self.views:
            key_sizes = [1 + (self.num_left or 0), 1 + (self.num_right or 0)]
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
        """Whether the memories hold the whole corpus, and so its partition function."""
        return len(self.memories) > 0 and all(memory.holds_corpus for memory in self.memories)

    def items_of(self, keys: Tensor) -> Tensor:
        """(X, …) the items of keys (X, …); -1 for NO_STATE, which floor division keeps."""
        num_trailing = keys.dim() - 1
        return keys // self.keys_per_item.view(-1, *[1] * num_trailing)

    def keys_of(self, items: Tensor) -> Tensor:
        """(X, n) the keys of items (X, n) of no pair."""
        return items * self.keys_per_item[:, None]

    def items_of_state(self, state: Tensor) -> Tensor:
        """(X, A, S) the items that states (X, A) stand for."""
        return self.items_of(state)[..., None]

    def keys_of_draws(self, ids: Tensor) -> Tensor:
        """(X, C) keys that drawn ids (X, R) propose."""
        raise TypeError(f"{type(self).__name__} does not define keys_of_draws")

    def visit(self, anchors: Anchors) -> tuple[ChainState, Tensor]:
        """Remember the batch; where the anchors' chains are, and the keys (X, C) that are proposed
        to them."""
        batch_keys = self.keys_of(anchors.candidate_items)
        if self.proposals == "batch" and not self.views:
            # The other item of its pair distinguishes copies of an item.
            batch_keys = batch_keys + anchors.candidate_ids.flip(0) + 1
        if self.updates_state:
            self._remember(anchors, batch_keys)

        chains = anchors.rows
        if self.views:
            chains = anchors.candidate_items[:, anchors.batch_rows]
        state = self.state[chains]
        # A state may have become a positive since it was stored: lists of positives come with the
        # batch.
        is_positive = is_listed(self.items_of(state)[..., None], anchors.hidden_items)[..., 0]
        started = (state == NO_STATE) | is_positive
        self.record(chains_begun=started.double().mean())
        start_keys, start_scores, log_partition = self._starts(anchors, started)
        state = torch.where(started, start_keys, state)

        keys = batch_keys
        if self.proposals != "batch":
            sizes = [self.corpus.num_ids(direction) or 1 for direction in anchors.directions]
            number = int(self.proposals)
            drawn = [self.draws.integers(size, number, device=state.device) for size in sizes]
            keys = self.keys_of_draws(
                torch.stack(drawn)
            )  # of (X, R) uniform draws from the id spaces
        is_found, column = find(self.items_of(keys), self.items_of_state(state))
        return ChainState(
            chains, state, started, start_scores, log_partition, is_found, column
        ), keys

    def plan_encoding(self, chain: ChainState, keys: Tensor, needed: Tensor) -> ChainPlan:
        """What to embed: this rank's share of the draws, and the states needed (X, A) that no
        proposal stands for."""
        items = self.items_of_state(chain.state)  # (X, A, S)
        is_known = chain.is_found | ~needed[..., None]
        states = items.masked_fill(is_known, PADDING).flatten(1)
        if self.proposals == "batch":
            return ChainPlan(chain, keys, states, [])
        # All ranks made the same draws; each encodes a part of them.
        own, sizes = distributed.share(self.items_of(keys).T)
        return ChainPlan(chain, keys, torch.cat([own.T, states], dim=1), sizes)

    def embedded(
        self, anchors: Anchors, plan: ChainPlan, outside: Tensor
    ) -> tuple[Anchors, Tensor]:
        """The anchors with the proposals as candidates; and (X, A, S) s/τ of states outside them,
        with gradient."""
        num_drawn = 0
        if plan.num_drawn:
            num_drawn = plan.num_drawn[distributed.rank()]
            own = outside[:, :num_drawn].transpose(0, 1).contiguous()
            drawn = distributed.gather_with_grad(own, plan.num_drawn).transpose(0, 1)
            if self.updates_state:
                for memory, keys, embeddings in zip(self.memories, plan.keys, drawn, strict=False):
                    memory.write(keys, embeddings)
            items = self.items_of(plan.keys)
            anchors = anchors.with_candidates(drawn, items // self.num_views)
        states = outside[:, num_drawn:].unflatten(1, plan.chain.is_found.shape[1:])  # (X, A, S, D)
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
        """(X, a) losses with the gradient Σ_c w_c·∇(s_c/τ) − ∇(s⁺/τ), over scores (X, a, C) of the
        proposals and (X, a, S) of the states, with weights (X, a, C + S)."""
        all_scores = torch.cat([scores, state_scores], dim=-1)
        positive = block.positive_scores
        log_partition = chain.log_partition
        if not self.reports_loss:
            # The proposals are uniform draws from the corpus, but fewer than what is remembered of
            # a small one.
            logits = scores.detach().masked_fill(block.not_negative, -torch.inf)
            by_proposals = log_mean(logits) + self.corpus.log_num_negatives(block)
            by_memory = log_partition.isfinite() & all(
                memory.has_every_slot for memory in self.memories
            )
            log_partition = torch.where(by_memory, log_partition, by_proposals)
        return Estimate.apply(self.log_odds(log_partition, positive), all_scores, weights, positive)

    def store(
        self, anchors: Anchors, chain: ChainState, state: Tensor, *tables: tuple[Tensor, Tensor]
    ) -> None:
        """Write new states (X, A) and values (X, A) of further tables; a chain takes its first
        anchor's state."""
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
        """Write the batch into the memory; chains that began before it was complete begin anew."""
        states = [self.state]
        if not self.views:
            states = list(self.state.tensor_split([self.num_left or 0]))
        for x, memory in enumerate(self.memories):
            memory.write(batch_keys[x], anchors.candidates[x])
            if memory.count(anchors.num_batch):
                # A view of the buffer, so that this side's chains alone are cleared.
                states[x].fill_(NO_STATE)

    def _starts(self, anchors: Anchors, started: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(X, A) keys to start on, (X, A) their s/τ, (X, A) log Z by what is remembered; NO_STATE
        and -inf for none."""
        no_scores = torch.full_like(anchors.positive_scores, -torch.inf)
        # Drawn even where unused: the number of draws must not depend on what is remembered.
        uniform = self.draws.uniform(2, len(anchors.directions), anchors.num_batch, like=no_scores)
        # The memory is divided among ranks, so that all of them draw from it or none does.
        is_needed = distributed.all_reduce(started.any().long(), "max")
        if not self.memories or not (self.reports_loss or bool(is_needed)):
            return torch.full_like(anchors.rows, NO_STATE), no_scores, no_scores
        keys, scores, log_mean = draw_per_anchor(self.memories, anchors, uniform)
        # Items that are not remembered are taken to be like those that are.
        return keys, scores, log_mean + self.corpus.log_num_negatives(anchors)
