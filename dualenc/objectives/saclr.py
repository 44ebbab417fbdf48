"""SACLR: an unnormalised kernel whose scale is tracked instead of a softmax."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.objectives.anchors import Anchors
from dualenc.objectives.base import AnchorLosses, Encode, Objective
from dualenc.objectives.state import LogAverages, SharedRandom, log_average


class SACLR(Objective):
    """−log q⁺ + s·(q⁺ + n·mean_{c ∈ M} q_c) per anchor, with q an unnormalised kernel and 1/s a moving average.

    The I-divergence between the matrix of positives and s·q ("Stochastic approximation to contrastive learning"): row
    form Eq. 11 and Algorithm 1 (one scale per item), matrix form Eq. 6 and Algorithm 2 (one scale). N items, n of them
    negatives (with views two for each other image).

    variant="equations" takes the scale from Eq. 4,

        1/s ← ρ/s + (1 − ρ)·ξ,   ξ = (α·N + 1 − α)·q⁺ + (1 − α)·n·mean_{c ∈ M} q_c,

    so with views the mean kernels of positives and negatives weigh α : 2(1 − α). The positive stands once in the
    repulsive sum, as in Eq. 10, and not among the sampled negatives; so α = 0, all candidates and an exact scale are
    SimCLR (Theorem 1). A step uses the scale that it has updated, and an item's first visit sets it: the repulsion
    s·(q⁺ + n·mean q) is then at most 1/((1 − ρ)(1 − α)), whatever the temperature, in the row form for every anchor,
    in the matrix form on average over the anchors.

    variant="authors" is what Algorithm 1 and the authors' program do: ξ = n·(α·q⁺ + (1 − α)·mean q_c), weights
    α : 1 − α; the positive stands in the scale only; a step uses the scale from before its update; and 1/s starts at
    0.01·n (appendix A.1.5). Far below the paper's temperature its repulsion is not bounded.

    The matrix form's 1/s is the mean of ξ over anchors: Eq. 7's sum over rows as well would leave the repulsion N times
    too weak against the attraction, which sums to N rather than, as in its source (SCE), to 1.

    Args:
        form: "row" keeps a scale per item, "matrix" one for all.
        negatives: "all" candidates of the batch, or 1 drawn uniformly per anchor (with views, both its views).
        alpha: share of the positives in the scale, in [0, 1].
        rho: forgetting rate in [0, 1): share of the old scale.
        kernel: "gaussian" exp(−‖x − z‖²/(2τ)), or "cauchy" 1/(1 + ‖x − z‖²/(2τ)). The paper's Gaussian is
            exp(−‖x − z‖²/(2τ²)): its τ = 0.5 is temperature=0.25 here.
        variant: "equations" or "authors", see above.
        **common: see `Objective`.
    """

    needs_num_left = True
    both_at_once = True

    def __init__(
        self,
        *,
        form: Literal["row", "matrix"] = "row",
        negatives: Literal[1, "all"] = "all",
        alpha: float = 0.125,
        rho: float = 0.9,
        kernel: Literal["gaussian", "cauchy"] = "gaussian",
        variant: Literal["equations", "authors"] = "equations",
        **common: Any,
    ) -> None:
        super().__init__(**common)
        if not 0 <= alpha <= 1:
            self._fail("alpha", f"is {alpha}; it must lie in [0, 1]")
        if not 0 <= rho < 1:
            self._fail("rho", f"is {rho}; it must lie in [0, 1)")
        self.form, self.negatives, self.alpha, self.rho, self.kernel = form, negatives, alpha, rho, kernel
        self.variant = variant
        # The authors' scales are kept as 1/(s·n), a mean of kernels, since n differs between anchors.
        start = math.log(0.01) if variant == "authors" else math.nan
        on_cpu = self.state_on_cpu and form == "row"
        self.left_scales = LogAverages(self.num_left or 1 if form == "row" else 1, start, on_cpu)
        self.right_scales = self.left_scales
        if not self.views:
            self.right_scales = LogAverages(self.num_right or 1 if form == "row" else 1, start, on_cpu)
        self.random = SharedRandom(self.seed)

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> AnchorLosses:
        def log_kernel(similarities: Tensor) -> Tensor:
            # On the unit sphere ‖x − z‖²/2 = 1 − s.
            distance = (1 - similarities) / anchors.temperature
            return -distance if self.kernel == "gaussian" else -torch.log1p(distance.clamp(min=0))

        def mean_of_negatives(block: Anchors, draws: Tensor | None = None) -> tuple[Tensor, Tensor]:
            """(a,) log of the mean of q over the sampled negatives, very small without any; (a,) if there are."""
            log_q, hidden = log_kernel(block.similarities), block.excluded
            log_count, some = block.log_num_negatives, block.num_negatives > 0
            if draws is not None:
                # One negative pair per anchor; with views, both views of one image.
                allowed = ~(hidden[:, : block.num_global // 2] if block.views else hidden)
                count = allowed.sum(dim=1)
                place = (draws * count).long().clamp(max=(count - 1).clamp(min=0))
                others = ~allowed | (allowed.cumsum(dim=1) - 1 != place[:, None])
                hidden = hidden | (torch.cat([others, others], dim=1) if block.views else others)
                log_count = math.log(2) if block.views else 0.0
            # A finite floor: a row of -inf has a NaN gradient.
            return torch.logsumexp(log_q.masked_fill(hidden, -1e4), dim=1) - log_count, some

        log_positive, draws = log_kernel(anchors.positive_similarities), []
        if self.negatives == 1:
            draws = [anchors.of_rank(self.random.uniform(anchors.num_rows, like=anchors.embeddings))]
        log_mean, some = anchors.by_rows(mean_of_negatives, *draws)
        log_count = some.to(log_mean) * self.log_corpus_size(anchors)

        authors = self.variant == "authors"
        log_scale = anchors.by_direction(self._scale, log_positive.detach(), log_mean.detach(), log_count)
        log_sum = log_mean if authors else torch.logaddexp(log_positive, log_mean + log_count)
        repulsion = torch.exp(log_sum - log_scale)
        # At the exact scale the I-divergence is the cross-entropy: −log q⁺ + log(1/s) + s·Σq − 1 (Eq. 13).
        value = log_scale + (log_count if authors else 0.0) + repulsion - 1 - log_positive
        return AnchorLosses(repulsion - log_positive, value.detach())

    def diagnostics(self) -> dict[str, Tensor]:
        """The logs of the scales 1/s, or in the authors' variant 1/(s·n)."""
        return self._spread("log_scale")

    def _scale(self, anchors: Anchors, positive: Tensor, negatives: Tensor, log_count: Tensor) -> Tensor:
        """(A,) log 1/s of anchors of one direction with this step counted in; in the authors' variant log 1/(s·n) from
        before.

        Args:
            positive: (A,) log q⁺.
            negatives: (A,) log of the mean of q over the sampled negatives.
            log_count: (A,) log n.
        """
        authors, by_item = self.variant == "authors", self.form == "row"
        # log ξ, or in the authors' variant log ξ/n.
        if authors:
            terms = ((self.alpha, positive), (1 - self.alpha, negatives))
            shares = [log_q + math.log(share) for share, log_q in terms if share]
            log_new = torch.logsumexp(torch.stack(shares), dim=0)
        else:
            total = self.corpus_size(anchors.candidate_side) or 1
            log_new = positive + math.log(self.alpha * total + 1 - self.alpha)
            if self.alpha < 1:
                log_new = torch.logaddexp(log_new, negatives + log_count + math.log1p(-self.alpha))
        table, ids = self.left_scales if anchors.side == "left" else self.right_scales, anchors.ids
        if not by_item:
            everyone, ids = distributed.gather(log_new, anchors.sizes), torch.zeros_like(ids)
            mean = torch.logsumexp(everyone, dim=0) - math.log(max(anchors.num_global, 1))
            log_new = mean.expand_as(log_new)
        known = anchors.known if by_item else None
        old = table.take("log_u", ids, known and known.own).to(log_new)
        log_scale = log_average(old, log_new, 1 - self.rho, all_usable=True)
        if self.updates_state:
            values = None if by_item and anchors.distinct_rows else log_new
            table.store(ids, log_scale, values, anchors.sizes, known=known)
        self._watch(anchors, log_scale)
        return old if authors else log_scale
