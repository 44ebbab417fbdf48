"""EMC²: a Markov chain per anchor draws its negatives from the softmax over the whole corpus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.anchors import Anchors, Side
from dualenc.objectives.base import AnchorLosses, Encode, Objective
from dualenc.objectives.chains import NO_STATE, Chains, Move, Step, at, log_mean_of_negatives
from dualenc.objectives.isir import iterated_sir, log_copies
from dualenc.objectives.metropolis import metropolis_hastings
from dualenc.objectives.neighbors import Mixture, Neighbors
from dualenc.objectives.outside import candidate_items, embed, find, ids_of, left_view, similarities_beside
from dualenc.objectives.random import SharedRandom
from dualenc.objectives.row_draws import RowDraws


class EMC2(Objective):
    """Negatives weigh what a Markov chain on the corpus, kept per anchor from step to step, gives them.

    The law of a chain at fixed parameters is the softmax over all negatives of its anchor, so the gradient is that of
    the global loss whatever the batch size. Source: emc2.txt (Yau et al. 2024), Algorithm 1 and Eq. 11.

    With views, an image's two views share one chain: both walk on from its state, and the first view's walk is kept. So
    at frozen views the law is exact for the first view and a little off for the second; a chain per view
    (`shared_chain=False`) is exact for both.
    Mined negatives are no uniform proposals and take no part.

    Args:
        kernel: "mh", Metropolis–Hastings: a weight is the share of steps after burn-in that the chain spends on the
            item. "isir", iterated sampling importance resampling: the weights are the softmax over the state and all
            proposals, the next state is drawn from it; less variance, and the state is always encoded anew.
        score: "mh" compares with the state's similarity as "stored" when it was accepted (m floats, as on the paper's
            poster), or with a "fresh" one (exact at the current parameters; each out-of-batch state is encoded).
        proposals: "batch", the other items of the batch in random order: the corpus is then the multiset of the pairs'
            items. Or R: so many items drawn uniformly from the whole id space, encoded once and shared by all chains:
            every item of the corpus then counts once.
        burn_in: share of the proposals before "mh" counts, in [0, 1).
        neighbor_share: share in [0, 1) of the R draws that comes from the neighbours of the batch's anchors, told by
            `set_neighbors` (the trainer does so at the start of every epoch, after a pass over the data); acceptance
            and weights are corrected by the density of the proposals, so that harder proposals make chains faster and
            not biased.
        neighbors: how many neighbours of each item to be told.
        shared_chain: with views, one chain for an image's two views (the paper's Fig. 2), or one for each of them.
        **common: see `Objective`; num_left (and num_right) are needed, and `encode` in forward.
    """

    needs_num_left = True
    needs_encode = True

    def __init__(
        self,
        *,
        kernel: Literal["mh", "isir"] = "mh",
        score: Literal["stored", "fresh"] = "stored",
        proposals: Literal["batch"] | int = "batch",
        burn_in: float = 0.5,
        neighbor_share: float = 0.0,
        neighbors: int = 16,
        shared_chain: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        for argument, value, choices in (("kernel", kernel, ("mh", "isir")), ("score", score, ("stored", "fresh"))):
            if value not in choices:
                raise DualencError(f"EMC2: {argument} is {value!r}; it must be one of {', '.join(choices)}")
        if proposals != "batch" and (not isinstance(proposals, int) or proposals < 1):
            raise DualencError(f'EMC2: proposals is {proposals!r}; it must be "batch" or a number of draws, at least 1')
        if not 0 <= burn_in < 1:
            raise DualencError(f"EMC2: burn_in is {burn_in}; it must lie in [0, 1), a share of the proposals")
        if not 0 <= neighbor_share < 1 or (neighbor_share and proposals == "batch"):
            raise DualencError(
                f"EMC2: neighbor_share is {neighbor_share}; it must lie in [0, 1), and needs proposals to be a number"
            )
        if neighbors < 1:
            raise DualencError(f"EMC2: neighbors is {neighbors}; it must be at least 1")
        self.kernel, self.score, self.proposals, self.burn_in = kernel, score, proposals, burn_in
        self.neighbor_share = neighbor_share
        self.num_neighbors = neighbors if neighbor_share else 0
        self.encodes_every_state = kernel == "isir" or score == "fresh"
        # i-SIR moves between images, each with its two views; Metropolis–Hastings between single views.
        self.moves_images = self.views and kernel == "isir"
        # How many matrices the kernels hold at once: the jumps of Metropolis–Hastings take many.
        self.matrices = 4 if kernel == "mh" else 2
        self.shared_chain = shared_chain or not self.views
        self.left_chains = Chains((self.num_left or 1) * (1 if self.shared_chain else 2))
        self.right_chains = self.left_chains if self.views else Chains(self.num_right or 1)
        self.left_neighbors, self.right_neighbors = Neighbors(), Neighbors()
        self.random = SharedRandom(self.seed)

    def set_neighbors(self, side: Side, ids: Tensor) -> None:
        """Tell which items are near each anchor, from an index over the current embeddings; any list keeps the law.

        Args:
            side: of the anchors, "left" or "right".
            ids: (m, k) ids of the other side's items (with views: of images), padded with -1; row i is for anchor i.
        """
        if side == "left":
            self.left_neighbors.set(ids, self.num_left or 1, self.num_right or 1)
        else:
            self.right_neighbors.set(ids, self.num_right or 1, self.num_left or 1)

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> AnchorLosses:
        assert encode is not None
        chains = self.left_chains if anchors.side == "left" else self.right_chains
        items, mixture = self._proposed(anchors)
        own = self._chain_of(anchors)
        state, column = self._states(chains.state[own], anchors, items, mixture)
        log_density, state_log_density = self._log_densities(mixture, items, state)
        away = (state != NO_STATE) & (column < 0)
        now = away.nonzero()[:, 0] if self.encodes_every_state else state[:0]
        proposed, outside = self._encoded(anchors, items, state, now, encode)
        kernel = self._kernel(anchors, items)

        def walk(
            some: Anchors, state: Tensor, column: Tensor, stored: Tensor, outside: Tensor, density: Tensor
        ) -> tuple[Tensor, ...]:
            allowed, similarities = self._compared(some, items, proposed)
            with torch.no_grad():
                score = self._scores(stored, similarities, state, column, outside)
                step = Step(
                    items, similarities, allowed, state, column, score, outside, log_density, density, some.temperature
                )
                move = kernel(step, some.rows)
            among = (move.weights * similarities).sum(dim=1)
            return among, move.outside_weights, move.state, move.score, log_mean_of_negatives(step)

        rows = (state, column, chains.score[own], outside.detach(), state_log_density)
        found = anchors.by_rows(walk, *rows, row_entries=self.matrices * len(items))
        among, outside_weights, next_state, next_score, log_mean = found
        chains.store(anchors, own, next_state, next_score)
        if not self.encodes_every_state:
            late = (away & (outside_weights[:, 0] > 0)).nonzero()[:, 0]
            if len(late):
                outside = similarities_beside(anchors, late, embed(state[late], encode, anchors), num_each=1)
        negatives = among + (outside_weights * torch.where(outside_weights > 0, outside, 0.0)).sum(dim=1)
        surrogate = negatives / anchors.temperature - anchors.positive_logits
        value = log_mean + self.log_corpus_size(anchors) - anchors.positive_logits
        return AnchorLosses(surrogate, value.detach())

    def _chain_of(self, anchors: Anchors) -> Tensor:
        """(A,) the number of each anchor's chain."""
        if self.shared_chain:
            return anchors.ids
        # The second views are the second half of all anchors.
        return 2 * anchors.ids + (anchors.rows >= anchors.num_global // 2)

    def _proposed(self, anchors: Anchors) -> tuple[Tensor, Mixture]:
        """(C,) the proposed items, and what they were drawn from."""
        neighbors = self.left_neighbors if anchors.side == "left" else self.right_neighbors
        mixture = Mixture(self.num_items(anchors.candidate_side) or 1, anchors.embeddings.detach())
        if self.proposals == "batch":
            return candidate_items(anchors)[: anchors.num_in_batch], mixture
        if self.neighbor_share and len(neighbors.ids):
            near = neighbors.near(distributed.gather(anchors.ids, anchors.sizes))
            mixture = mixture.with_list(near, self.neighbor_share)
        ids = mixture.draw(self.proposals, self.random)
        if not self.views:
            return ids, mixture
        if self.moves_images:
            return torch.cat([2 * ids, 2 * ids + 1]), mixture
        return 2 * ids + self.random.integers(2, self.proposals, device=ids.device), mixture

    def _log_densities(self, mixture: Mixture, items: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(C,) and (A,) log of how often proposals and states are proposed, over uniform proposals."""
        proposed, states = (mixture.log_density(ids_of(some, self.views)) for some in (items, state))
        if self.kernel == "isir" and mixture.is_uniform:
            proposed = proposed + log_copies(items)
        return proposed, states

    def _states(self, state: Tensor, anchors: Anchors, items: Tensor, mixture: Mixture) -> tuple[Tensor, Tensor]:
        """(A,) the states, -1 where the item is no negative of this anchor, and (A,) their columns, -1 for none."""
        if self.moves_images:
            state, items = left_view(state), left_view(items)
        negative = anchors.is_negative(ids_of(state, self.views)[:, None])[:, 0]
        state = torch.where(negative, state, NO_STATE)
        if self.kernel == "isir" and not mixture.is_uniform:
            # Draws of unequal density cannot stand for the state: it counts beside them.
            return state, torch.full_like(state, -1)
        return state, find(items, state)

    def _encoded(
        self, anchors: Anchors, items: Tensor, state: Tensor, rows: Tensor, encode: Encode
    ) -> tuple[Tensor, Tensor]:
        """(C, D) the proposals, and (A, S) similarities with what the states of some rows (n,) stand for."""
        wanted, num_each = state[rows], 1
        if self.moves_images:
            wanted, num_each = torch.stack([wanted, wanted + 1], dim=1).flatten(), 2
        if self.proposals == "batch":
            beside = similarities_beside(anchors, rows, embed(wanted, encode, anchors), num_each)
            return anchors.candidates[: anchors.num_in_batch], beside
        own, sizes = distributed.share(items)
        embeddings = embed(torch.cat([own, wanted]), encode, anchors)
        proposed = distributed.gather_with_grad(embeddings[: len(own)], sizes)
        return proposed, similarities_beside(anchors, rows, embeddings[len(own) :], num_each)

    def _compared(self, anchors: Anchors, items: Tensor, proposed: Tensor) -> tuple[Tensor, Tensor]:
        """(A, C) whether the proposals are negatives of the anchors, and (A, C) the similarities."""
        if self.proposals == "batch":
            own = slice(anchors.num_in_batch)
            return anchors.allowed[:, own], anchors.similarities[:, own]
        return anchors.is_negative(ids_of(items, self.views)), anchors.embeddings @ proposed.T

    def _scores(self, stored: Tensor, similarities: Tensor, state: Tensor, column: Tensor, outside: Tensor) -> Tensor:
        """(A,) similarity of each state, -inf for none."""
        score = stored.to(similarities)
        if self.encodes_every_state:
            score = torch.where(column >= 0, at(similarities, column.clamp(min=0)), outside.mean(dim=1))
        return torch.where(state == NO_STATE, -torch.inf, score)

    def _kernel(self, anchors: Anchors, items: Tensor) -> Callable[[Step, Tensor], Move]:
        """The move of some rows (n,) of the global batch; all that is random is settled here, alike on all ranks."""
        if self.kernel == "isir":
            uniform = self.random.uniform(anchors.num_global, like=anchors.embeddings)
            return lambda step, rows: iterated_sir(step, uniform[rows])
        draws = RowDraws(self.random, anchors.num_global, len(items))
        order = self.random.permutation(len(items), device=items.device)
        like = anchors.embeddings.detach()
        return lambda step, rows: metropolis_hastings(step, draws.of(rows, like), order, self.burn_in)
