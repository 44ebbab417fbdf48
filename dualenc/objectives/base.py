"""The base of all objectives: check, gather, plan, encode, compute losses, average over the global
batch.

An objective is its equation, in one file:

    plan(anchors) -> plan                      # no gradient; `plan.outside` (X, n): items to embed,
    -1 for none losses(anchors, plan, outside) -> (X, A)   # the equation, and the update of the
    objective's memory

or, of the batch alone, `block_losses(block) -> (X, a)`, or `anchor_losses(anchors, encoder) -> (X,
A)`, where it encodes more than once (`NegativeCache`, `ExactGlobal`). Shapes: see `anchors`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.anchors import Anchors
from dualenc.objectives.batch import EncodedBatch, gather_batch, two_towers, two_views, with_mined
from dualenc.objectives.batch_metrics import batch_metrics
from dualenc.objectives.checks import (
    as_numbers,
    check_count,
    check_range,
    check_seed,
    check_tensors,
    fail,
    given,
    names_class,
)
from dualenc.objectives.corpus_sizes import SampledCorpus
from dualenc.objectives.draws import SharedRandom
from dualenc.objectives.outside_items import Encode, OutsideEncoder

MIN_TEMPERATURE = 1e-3


@dataclass
class ObjectiveOutput:
    """What an objective returns.

    Attributes:
        loss: scalar. Its value is the objective's estimate of L(θ) (if `reports_loss`), its
            gradient the objective's. The mean over ranks, of losses and of gradients, is that of
            the global batch.
        per_anchor: (2b,) the losses of this rank's anchors, left ones first, or (b,) of left ones
            alone (`FrozenCorpus`); over all ranks their mean is `loss`.
    """

    loss: Tensor
    per_anchor: Tensor
    compute_metrics: Callable[[], dict[str, Tensor]]

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        """Detached scalars for logging, averaged over this rank's anchors; computed when first
        read."""
        return self.compute_metrics()


class Objective(nn.Module):
    """Base of all objectives of the global contrastive loss; usable in any training loop.

        criterion = SogCLR(num_left=m, temperature=0.07)
        out = criterion(left, right, left_id, right_id)
        out.loss.backward()

    Args:
        num_left: size of the left id space; needed by objectives that keep state per item. Where
            items are in several pairs, `set_counts` says in how many.
        num_right: size of the right id space (the corpus); defaults to num_left.
        temperature: τ ≥ 0.001 of the softmax over cosine similarities.
        learnable_temperature: learn log τ with the model.
        views: left and right are two views of one image (unimodal training): 2B anchors, one shared
            id space.
        seed: of the objective's own random draws.
        positive_in_softmax: minimise −log(e⁺/(e⁺ + Z)) over the whole corpus, as InfoNCE does over
            the batch, where Z sums the negatives only. Only for objectives that estimate Z.
    """

    needs_num_left = False  # keeps state per item
    needs_encode = False  # asks for items outside the batch
    takes_mined = True  # mined negatives are candidates
    anchors_per_pair = 2  # both items, or both views
    # Every loss is −log(e⁺/Z) with Z estimated, so that `positive_in_softmax` applies.
    estimates_partition = False
    encodes_in_backward = False  # calls `encode` again in the backward pass
    # μ of the moving average of the towers whose embeddings `forward` takes as keys; see
    # `MomentumQueue`.
    momentum: float | None = None
    # The option that lifts the assumption of uniformly random batches.
    remedy_for_other_batches: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = names_class(cls.__init__)  # type: ignore[method-assign]

    @names_class
    def __init__(
        self,
        *,
        num_left: int | None = None,
        num_right: int | None = None,
        temperature: float = 0.07,
        learnable_temperature: bool = False,
        views: bool = False,
        seed: int = 0,
        positive_in_softmax: bool = False,
    ) -> None:
        super().__init__()
        if self.needs_num_left and num_left is None:
            fail("num_left", "is missing; pass the number of left items, e.g. len(pairs)")
        for argument, value in (("num_left", num_left), ("num_right", num_right)):
            if value is not None:
                check_count(argument, value)
        check_range("temperature", temperature, f"[{MIN_TEMPERATURE}, inf)")
        check_seed(seed)
        if positive_in_softmax and not self.estimates_partition:
            able = "SogCLR, ISogCLR, GlobalCache, NegativeCache, ExactGlobal or FrozenCorpus"
            fail("positive_in_softmax", f"does not apply; leave it out, or take {able}")
        self.num_left = num_left
        self.num_right = num_left if num_right is None or views else num_right
        self.views = views
        self.num_views = 2 if views else 1
        self.directions = (0,) if views else (0, 1)  # of `Anchors`
        self.seed = seed
        self.corpus = SampledCorpus(self.num_left, self.num_right, views)
        self.positive_in_softmax = positive_in_softmax
        log_temperature = torch.tensor(math.log(temperature), dtype=torch.float64).float()
        self.log_temperature = nn.Parameter(log_temperature, requires_grad=learnable_temperature)
        if self.needs_num_left:
            # Holds nothing, but its shape names both sizes: tables hold both sides, and would fit
            # swapped ones.
            self.register_buffer("sizes", torch.zeros(self.num_left or 0, self.num_right or 0, 0))
        # Whether the present call is training: not in eval mode or without gradient.
        self.updates_state = False
        self._recorded: dict[str, list[Tensor]] = {}

    def plan(self, anchors: Anchors) -> Any:
        """Decide, without gradient, which items outside the batch to embed: `plan.outside`; None
        for nothing."""
        return None

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        """(X, A) losses of this rank's anchors; writes the objective's memory if `updates_state`.

        Args:
            anchors: see `Anchors`; large batches go through `anchors.in_blocks`.
            plan: what `plan` returned.
            outside: (X, n, D) embeddings of `plan.outside` with gradient, zeros where that is -1.
        """
        return anchors.in_blocks(self.block_losses)

    def block_losses(self, block: Anchors) -> Tensor:
        """(X, a) losses of a block of anchors, of objectives of the batch alone."""
        raise TypeError(f"{type(self).__name__} defines neither losses nor block_losses")

    def anchor_losses(self, anchors: Anchors, encoder: OutsideEncoder | None) -> Tensor:
        """(X, A) losses: plan, encode, compute."""
        with torch.no_grad():
            plan = self.plan(anchors)
        outside = None
        if plan is not None and encoder is not None:
            outside = encoder(plan.outside, anchors.directions)
        return self.losses(anchors, plan, outside)

    @names_class
    def forward(
        self,
        left: Tensor,
        right: Tensor,
        left_id: Tensor,
        right_id: Tensor | None = None,
        encode: Encode | None = None,
        *,
        left_positives: Tensor | None = None,
        right_positives: Tensor | None = None,
        negatives: Tensor | None = None,
        negative_id: Tensor | None = None,
        weights: Tensor | None = None,
        keys_left: Tensor | None = None,
        keys_right: Tensor | None = None,
    ) -> ObjectiveOutput:
        """The loss of this rank's part of a batch.

        Args:
            left, right: (b, D) unit-norm embeddings of the pairs; b may differ between ranks.
            left_id, right_id: (b,) integer ids in [0, num_left) and [0, num_right); without
                right_id pairs share one index. Items with equal ids are never negatives of one
                another's partners. Ids and weights may be lists or arrays.
            encode: `encode(side, ids (n,)) -> (n, D)` embeds items outside the batch, with ids on
                the CPU; honours `torch.is_grad_enabled()`. With views, "left" and "right" are an
                image's two views.
            left_positives: (b, K) right ids known to be relevant to each left item, padded with -1.
            right_positives: (b, K) left ids known to be relevant to each right item, padded with
                -1.
            negatives, negative_id: (n, D) and (n,) mined right items that join the candidates of
                left anchors; not with views, and only of objectives with `takes_mined`.
            weights: (b,) factors of the losses of each pair, 0 or more.
            keys_left, keys_right: (b, D) unit-norm embeddings of the same pairs by the momentum
                encoder, without gradient; of objectives with `momentum`.
        """
        embeddings = given(negatives=negatives, keys_left=keys_left, keys_right=keys_right)
        ids = given(
            negative_id=negative_id,
            left_positives=left_positives,
            right_positives=right_positives,
        )
        self._check_given(encode, embeddings.keys() | ids.keys())
        embeddings = {"left": left, "right": right} | embeddings
        check_tensors(embeddings)
        self._check_dimension(left.shape[-1])
        ids = {"left_id": left_id, "right_id": left_id if right_id is None else right_id} | ids
        ids = {name: as_numbers(name, value, left.device) for name, value in ids.items()}
        if weights is not None:
            weights = as_numbers("weights", weights, left.device)
        batch = gather_batch(self, embeddings, ids, weights)
        encoder = None if encode is None else OutsideEncoder(encode, self.views, batch.embeddings)
        self._recorded = {}
        self.updates_state = self.training and torch.is_grad_enabled()
        if self.updates_state:
            self.log_temperature.data.clamp_(min=math.log(MIN_TEMPERATURE))
        draws = [module for module in self.modules() if isinstance(module, SharedRandom)]
        positions = [random.position for random in draws]
        with torch.autocast(left.device.type, enabled=False):
            temperature = self.temperature.to(batch.embeddings.dtype)
            directions = self._directions(batch, temperature)
            losses = torch.cat(
                [self.anchor_losses(anchors, encoder).flatten() for anchors in directions]
            )
        if not self.updates_state:
            # Outside of training, random draws are made but not counted.
            for random, position in zip(draws, positions, strict=True):
                random.position = position
        if self.positive_in_softmax:
            # Of L = log(Z/e⁺): log((e⁺ + Z)/e⁺), whose gradient is σ(L)·∇L.
            losses = softplus(losses)
        if weights is not None:
            losses = losses * weights.to(losses).repeat(self.anchors_per_pair)
        # Over all anchors of the global batch, so that the mean over ranks is the global loss.
        num_anchors = self.anchors_per_pair * sum(batch.sizes)
        loss = losses.sum() * distributed.world_size() / max(num_anchors, 1)
        return ObjectiveOutput(
            loss, losses.detach(), lambda: self._metrics(batch, temperature.detach())
        )

    @property
    def name(self) -> str:
        """What logs and model cards call it."""
        return type(self).__name__

    @property
    def settings(self) -> dict[str, float | str | list[int]]:
        """The arguments that are plain values which training does not move."""
        classes = [cls for cls in type(self).__mro__ if issubclass(cls, Objective)]
        names = {name for cls in classes for name in inspect.signature(cls).parameters}
        values = {name: getattr(self, name, None) for name in sorted(names)}
        if not self.log_temperature.requires_grad:
            values["temperature"] = float(f"{self.temperature.item():.4g}")
        return {
            name: value
            for name, value in values.items()
            if isinstance(value, int | float | str | list)
        }

    @property
    def temperature(self) -> Tensor:
        """Scalar τ, never below MIN_TEMPERATURE."""
        tau = self.log_temperature.exp()
        # Straight through, so that a learned one can leave the bound.
        return tau + (tau.clamp(min=MIN_TEMPERATURE) - tau).detach()

    @property
    def reports_loss(self) -> bool:
        """Whether the value of `loss` is an estimate of L(θ); else only its gradient is, and logs
        leave it out."""
        return True

    def diagnostics(self) -> dict[str, Tensor]:
        """Scalars about the objective's memory in the last call, over this rank's anchors: the mean
        and the standard deviation of what it recorded."""
        scalars = {}
        for name, recorded in self._recorded.items():
            values = torch.cat([value.flatten() for value in recorded]).double()
            values = values[values.isfinite()]
            if not len(values):
                values = values.new_zeros(1)
            scalars[name] = values.mean()
            if recorded[0].dim():
                scalars[f"{name}_spread"] = values.std(correction=0)
        return scalars

    @names_class
    def set_counts(self, left_counts: Tensor, right_counts: Tensor) -> None:
        """Set how many pairs each left (num_left,) and right (num_right,) item is in.

        The corpus is the multiset of the pairs' items. Without this, every item is in one pair.
        """
        if self.num_left is None or self.num_right is None:
            return
        self.corpus.set_counts(left_counts, right_counts, self.log_temperature.device)
        for direction, memory in zip(self.directions, getattr(self, "memories", ()), strict=False):
            # An epoch shows pairs, so that items in many pairs come many times.
            counts = self.corpus.item_counts(direction)
            # Items in no pair are remembered only as mined negatives, and count once; others may in
            # part.
            counts = None if counts is None else counts.where(counts > 0, 1)
            memory.expect(self.corpus.num_pairs * self.num_views, counts)

    def _check_given(self, encode: Encode | None, names: Set[str]) -> None:
        """Refuse a call without what the objective needs, or with what it would ignore."""
        if self.needs_encode and not callable(encode):
            fail("encode", "is missing; pass encode(side, ids) -> (n, D) that embeds items by id")
        has_keys = [name in names for name in ("keys_left", "keys_right")]
        if self.momentum is not None and not all(has_keys):
            advice = "pass the momentum encoder's embeddings, as Trainer does"
            fail("keys_left", f"and keys_right are missing; {advice}")
        if self.momentum is None and any(has_keys):
            fail("keys_left", "and keys_right do not apply; leave them out, or take MomentumQueue")
        if not self.takes_mined and not names.isdisjoint({"negatives", "negative_id"}):
            fail("negatives", "do not apply; leave them and negative_id out, as Trainer does")

    def _check_dimension(self, dimension: int) -> None:
        """Refuse embeddings of another size than those that are remembered."""
        for name, buffer in self.named_buffers():
            is_memory = name.rpartition(".")[2] == "embeddings" and buffer.dim() == 2
            if is_memory and buffer.shape[1] not in (0, dimension):
                sizes = f"has {dimension} components, and remembered embeddings {buffer.shape[1]}"
                fail("left", f"{sizes}; take a new objective for another encoder")

    def log_odds(self, log_partition: Tensor, positive: Tensor) -> Tensor:
        """(X, A) log(Z/e⁺) without gradient. Of an anchor without negatives, whose log Z is -inf,
        −s⁺/τ; or with `positive_in_softmax` -inf, which makes its loss and gradient 0."""
        if not self.positive_in_softmax:
            log_partition = log_partition.masked_fill(log_partition == -torch.inf, 0.0)
        return log_partition.detach() - positive.detach()

    def record(self, **values: Tensor) -> None:
        """Keep tensors of this call, of each anchor or scalars, for `diagnostics`."""
        for name, value in values.items():
            self._recorded.setdefault(name, []).append(value.detach())

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Restore from `state_dict()`; DualencError for a state of other sizes or of another
        objective."""
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except RuntimeError as error:
            advice = "the state is of another objective, or of other num_left, num_right, views or options"
            problem = " ".join(str(error).split())
            raise DualencError(f"{type(self).__name__}: {problem}; {advice}") from error

    def _apply(self, fn: Any, recurse: bool = True) -> Objective:
        """Move and convert, but never to half precision: temperatures and averages would lose
        theirs."""

        def keep_precision(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            if converted.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(converted.device)
            return converted

        return super()._apply(keep_precision, recurse)

    def _directions(self, batch: EncodedBatch, temperature: Tensor) -> list[Anchors]:
        """The anchors, both directions at once where they have the same number of candidates."""
        if self.views:
            return [two_views(batch, temperature)]
        if self.takes_mined and len(batch.negative_id):
            return with_mined(batch, self.num_left or 0, temperature)
        return [two_towers(batch, self.num_left or 0, temperature)]

    @torch.no_grad()
    def _metrics(self, batch: EncodedBatch, temperature: Tensor) -> dict[str, Tensor]:
        with torch.autocast(batch.ids.device.type, enabled=False):
            return batch_metrics(
                self._directions(batch, temperature), self.corpus.log_num_negatives
            )


class Estimate(torch.autograd.Function):
    """`Estimate.apply(value, scores, weights, positive)`: losses with a value (X, A) and the
    gradient of Σ_c w_c·s_c − s⁺, of scores (X, A, C) with constant weights (X, A, C) and, if given,
    the positive's score (X, A): that of L is Σ_c p_c·∇s_c/τ − ∇s⁺/τ, while its value needs the
    whole corpus."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, scores: Tensor, weights: Tensor, positive: Tensor | None = None
    ) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.has_positive = positive is not None
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor, None, Tensor | None]:
        # torch's `once_differentiable` lets them pass where the incoming gradient is a constant.
        if torch.is_grad_enabled():
            raise DualencError(
                "an objective has no second derivatives; call backward without create_graph"
            )
        (weights,) = ctx.saved_tensors
        (gradient,) = grad_outputs
        return None, gradient[..., None] * weights, None, -gradient if ctx.has_positive else None


def temperature_term(positive_scores: Tensor, weight_sum: Tensor) -> Tensor:
    """(X, A) zeros with the gradient (1 − Σ_c w_c)·∇(s⁺/τ), to add where an estimator's weights
    need not sum to 1: L is a function of s − s⁺, and without this term every error of the sum (X,
    A) would move τ by as much as s⁺/τ.

    Args:
        positive_scores: (X, A) s⁺/τ with a detached s⁺, so that the term reaches τ alone; of a
            kernel q, log q⁺.
    """
    missing = (1 - weight_sum).detach()[..., None]
    return Estimate.apply(torch.zeros_like(weight_sum), positive_scores[..., None], missing)
