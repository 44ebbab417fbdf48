"""Base class of all objectives: check, gather, plan, encode, compute losses, average.

An objective is its equation, in one file:

    plan(anchors) -> plan      # no gradient; `plan.outside` (X, n): items to embed, padded with -1
    losses(anchors, plan, outside) -> (X, A)  # the equation, and the update of the memory

Objectives of the batch alone define `block_losses(block) -> (X, a)` instead. Objectives that encode
more than once (`NegativeCache`, `ExactGlobal`) define `anchor_losses(anchors, encoder) -> (X, A)`.
Shapes: see `anchors`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.anchors import Anchors
from dualenc.objectives.batch import GatheredBatch, gather_batch, two_towers, two_views, with_mined
from dualenc.objectives.batch_metrics import batch_metrics
from dualenc.objectives.checks import (
    as_numbers,
    check_count,
    check_range,
    check_seed,
    check_tensors,
    fail,
    names_class,
)
from dualenc.objectives.corpus_sizes import SampledCorpus
from dualenc.objectives.draws import rewound
from dualenc.objectives.outside_items import Encode, OutsideEncoder
from dualenc.objectives.pair_batch import PairBatch, given

MIN_TEMPERATURE = 1e-3


class DataArguments(TypedDict, total=False):
    """Keyword arguments of `Objective`, but for the temperature; lets editors complete them."""

    num_left: int | None
    num_right: int | None
    views: bool
    seed: int
    positive_in_softmax: bool


class CommonArguments(DataArguments, total=False):
    """All keyword arguments of `Objective`, for the constructors of its subclasses."""

    temperature: float
    learnable_temperature: bool


@dataclass
class ObjectiveOutput:
    """The result of an objective for one batch.

        out = InfoNCE()(left, right, ids)
        out.loss.backward()
        out.metrics["accuracy"]

    Attributes:
        loss: scalar. Its gradient is the objective's; its value estimates L(θ) if `reports_loss`.
            The mean over ranks, of losses and of gradients, is that of the global batch.
        per_anchor: (2b,) losses of this rank's anchors, left ones first; (b,) for `FrozenCorpus`,
            which has left anchors only. Their mean over all ranks is `loss`.
        compute_metrics: function that computes `metrics`.
    """

    loss: Tensor
    per_anchor: Tensor
    compute_metrics: Callable[[], dict[str, Tensor]]

    @cached_property
    def metrics(self) -> dict[str, Tensor]:
        """Detached scalars for logging, averaged over this rank's anchors; computed on access."""
        return self.compute_metrics()


class Objective(nn.Module):
    """Base class of all objectives of the global contrastive loss; works in any training loop.

        criterion = SogCLR(num_left=m, temperature=0.07)
        out = criterion(left, right, left_id, right_id)
        out.loss.backward()

    Args:
        num_left: size of the left id space. Required by objectives that keep state per item. If
            items occur in several pairs, call `set_counts` as well.
        num_right: size of the right id space (the corpus); defaults to num_left.
        temperature: τ ≥ 0.001 of the softmax over cosine similarities.
        learnable_temperature: learn log τ with the model.
        views: True if left and right are two views of the same images (unimodal training). There
            are then 2B anchors and one shared id space.
        seed: random seed of the objective's own draws.
        positive_in_softmax: minimize −log(e⁺/(e⁺ + Z)) over the whole corpus, as InfoNCE does over
            the batch, where Z sums the negatives only. Only for objectives that estimate Z.
    """

    needs_num_left = False  # keeps state per item
    needs_encode = False  # embeds items outside the batch
    takes_mined = True  # mined negatives join the candidates
    anchors_per_pair = 2  # both items, or both views
    # True if every loss is −log(e⁺/Z) with Z estimated, so that `positive_in_softmax` applies.
    estimates_partition = False
    encodes_in_backward = False  # calls `encode` again in the backward pass
    # Decay μ of the momentum encoder whose embeddings `forward` takes as keys (`MomentumQueue`).
    momentum: float | None = None
    # The option that lifts the assumption of uniformly random batches, or None.
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
            fail("num_left", "is missing", "pass the number of left items, e.g. len(pairs)")
        for argument, value in (("num_left", num_left), ("num_right", num_right)):
            if value is not None:
                check_count(argument, value)
        check_range("temperature", temperature, f"[{MIN_TEMPERATURE}, inf)")
        check_seed(seed)
        if positive_in_softmax and not self.estimates_partition:
            able = "SogCLR, ISogCLR, GlobalCache, NegativeCache, ExactGlobal or FrozenCorpus"
            fail("positive_in_softmax", "does not apply", f"leave it out, or use {able}")
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
            # An empty buffer whose shape records both sizes. Tables hold the rows of both sides, so
            # a checkpoint with left and right swapped would load without an error.
            self.register_buffer("sizes", torch.zeros(self.num_left or 0, self.num_right or 0, 0))
        # True during a training call: in train mode and with gradients enabled.
        self.updates_state = False
        self._recorded: dict[str, list[Tensor]] = {}

    def plan(self, anchors: Anchors) -> Any:
        """Choose the items outside the batch to embed (`plan.outside`), or None; no gradient."""
        return None

    def losses(self, anchors: Anchors, plan: Any = None, outside: Tensor | None = None) -> Tensor:
        """Return (X, A) losses of this rank's anchors, and write the memory if `updates_state`.

        Args:
            anchors: anchors and candidates of the batch; large ones go through `anchors.in_blocks`.
            plan: result of `plan`.
            outside: (X, n, D) embeddings of `plan.outside` with gradient; zeros where that is -1.
        """
        return anchors.in_blocks(self.block_losses)

    def block_losses(self, block: Anchors) -> Tensor:
        """Return (X, a) losses of a block of anchors, for objectives of the batch alone."""
        raise TypeError(f"{type(self).__name__} defines neither losses nor block_losses")

    def anchor_losses(self, anchors: Anchors, encoder: OutsideEncoder | None) -> Tensor:
        """Plan, encode and return (X, A) losses."""
        with torch.no_grad():
            plan = self.plan(anchors)
        outside = None
        if plan is not None and encoder is not None:
            outside = encoder(plan.outside, anchors.directions)
        return self.losses(anchors, plan, outside)

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
        """Return the loss of this rank's part of a batch.

        Args:
            left: (b, D) unit-norm embeddings of the left items; b may differ between ranks.
            right: (b, D) unit-norm embeddings of the right items.
            left_id: (b,) integer ids in [0, num_left). Ids and weights may be lists or arrays.
            right_id: (b,) integer ids in [0, num_right); defaults to left_id. Two items with the
                same id never serve as negatives of each other's partners.
            encode: function `encode(side, ids (n,)) -> (n, D)` that embeds items outside the batch.
                Ids are on the CPU; `torch.is_grad_enabled()` says whether a gradient is needed.
                With views, "left" and "right" are the two views of an image.
            left_positives: (b, K) right ids known to be relevant to each left item, padded with -1.
            right_positives: (b, K) left ids known to be relevant to each right item, padded with
                -1.
            negatives: (n, D) embeddings of mined right items, which join the candidates of left
                anchors; not with views, and only for objectives with `takes_mined`.
            negative_id: (n,) right ids of `negatives`.
            weights: (b,) loss weights of the pairs, 0 or more.
            keys_left: (b, D) unit-norm embeddings of the left items by the momentum encoder,
                without gradient; only for objectives with `momentum`.
            keys_right: (b, D) likewise of the right items.
        """
        batch = PairBatch(
            left_id=left_id,
            right_id=left_id if right_id is None else right_id,
            left_positives=left_positives,
            right_positives=right_positives,
            negative_id=negative_id,
            weights=weights,
            left=left,
            right=right,
            negatives=negatives,
            keys_left=keys_left,
            keys_right=keys_right,
        )
        return self.compute_loss(batch, encode)

    @names_class
    def compute_loss(self, batch: PairBatch, encode: Encode | None = None) -> ObjectiveOutput:
        """Return the loss of this rank's part of a batch; `forward` makes the batch and calls this.

        Wrappers override this method: a batch has all arguments of `forward` as one object.

        Args:
            batch: pairs with embeddings.
            encode: see `forward`.
        """
        self._check_given(batch, encode)
        check_tensors(batch.embeddings)
        left = batch.embeddings["left"]
        self._check_dimension(left.shape[-1])
        numbers = batch.ids | given(weights=batch.weights)
        tensors = {name: as_numbers(name, value, left.device) for name, value in numbers.items()}
        batch = replace(batch, **tensors)
        gathered = gather_batch(batch, self.corpus)
        self._begin_call()
        encoder = None
        if encode is not None:
            # Made here, under the caller's autocast, which encoders need.
            encoder = OutsideEncoder(encode, self.views, like=gathered.embeddings)
        # Scores keep the precision of the embeddings, which autocast would reduce.
        with torch.autocast(left.device.type, enabled=False):
            temperature = self.temperature.to(gathered.embeddings.dtype)
            losses = self._batch_losses(gathered, temperature, encoder)
        if batch.weights is not None:
            losses = losses * batch.weights.to(losses).repeat(self.anchors_per_pair)
        # Divided by the anchors of all ranks, so that the mean over ranks is the global loss.
        num_anchors = self.anchors_per_pair * sum(gathered.sizes)
        loss = losses.sum() * distributed.world_size() / max(num_anchors, 1)
        return ObjectiveOutput(
            loss=loss,
            per_anchor=losses.detach(),
            compute_metrics=lambda: self._metrics(gathered, temperature.detach()),
        )

    def _begin_call(self) -> None:
        self._recorded = {}
        self.updates_state = self.training and torch.is_grad_enabled()
        if self.updates_state:
            self.log_temperature.data.clamp_(min=math.log(MIN_TEMPERATURE))

    def _batch_losses(
        self, batch: GatheredBatch, temperature: Tensor, encoder: OutsideEncoder | None
    ) -> Tensor:
        """Return the losses of this rank's anchors: (2b,), or (b,) for left anchors alone."""
        # An evaluation makes random draws without counting them: training must not depend on it.
        counted = nullcontext() if self.updates_state else rewound(self)
        with counted:
            losses = [
                self.anchor_losses(anchors, encoder).flatten()
                for anchors in self._directions(batch, temperature)
            ]
        all_losses = torch.cat(losses)
        if self.positive_in_softmax:
            # With L = log(Z/e⁺), softplus(L) = log((e⁺ + Z)/e⁺); its gradient is σ(L)·∇L.
            return softplus(all_losses)
        return all_losses

    @property
    def name(self) -> str:
        """Name in logs and model cards."""
        return type(self).__name__

    @property
    def settings(self) -> dict[str, float | str | list[int]]:
        """Constructor arguments with plain values that stay fixed during training."""
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
        # Straight-through clamp: the forward pass uses the bound, while the gradient of a learned τ
        # passes, so that τ can leave the bound again.
        return tau + (tau.clamp(min=MIN_TEMPERATURE) - tau).detach()

    @property
    def reports_loss(self) -> bool:
        """True if the value of `loss` estimates L(θ). If False, only its gradient is meaningful."""
        return True

    def diagnostics(self) -> dict[str, Tensor]:
        """Return scalars about the objective's memory in the last call.

        They are the mean and standard deviation, over this rank's anchors, of what `record` kept.
        """
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
        """Set the number of pairs each left (num_left,) and right (num_right,) item occurs in.

        The corpus is the multiset of the pairs' items. Without this call every item counts once.
        """
        if self.num_left is None or self.num_right is None:
            return
        self.corpus.set_counts(left_counts, right_counts, self.log_temperature.device)
        for direction, memory in zip(self.directions, getattr(self, "memories", ()), strict=False):
            # Items in many pairs come many times per epoch, so the memory is complete after all
            # pairs, not after N rows. Items in no pair enter the memory only as mined negatives,
            # and count once; fractional counts stay.
            counts = self.corpus.item_counts(direction)
            counts = None if counts is None else counts.where(counts > 0, 1)
            memory.expect(self.corpus.num_pairs * self.num_views, counts)

    def _check_given(self, batch: PairBatch, encode: Encode | None) -> None:
        """Raise if a required argument is missing, or one is passed that would be ignored."""
        if self.needs_encode and not callable(encode):
            fix = "pass encode(side, ids) -> (n, D) that embeds items by id"
            fail("encode", "is missing", fix)
        has_keys = [keys is not None for keys in (batch.keys_left, batch.keys_right)]
        if self.momentum is not None and not all(has_keys):
            fix = "pass the momentum encoder's embeddings, as Trainer does"
            fail("keys_left", "and keys_right are missing", fix)
        if self.momentum is None and any(has_keys):
            fail("keys_left", "and keys_right do not apply", "leave them out, or use MomentumQueue")
        has_mined = batch.negatives is not None or batch.negative_id is not None
        if has_mined and not self.takes_mined:
            fail("negatives", "do not apply", "leave them and negative_id out, as Trainer does")

    def _check_dimension(self, dimension: int) -> None:
        """Raise if embeddings have another dimension than those in the memory."""
        for name, buffer in self.named_buffers():
            is_memory = name.rpartition(".")[2] == "embeddings" and buffer.dim() == 2
            if is_memory and buffer.shape[1] not in (0, dimension):
                problem = f"has {dimension} components, and remembered embeddings {buffer.shape[1]}"
                fail("left", problem, "make a new objective for another encoder")

    def log_odds(self, log_partition: Tensor, positive: Tensor) -> Tensor:
        """Return (X, A) log(Z/e⁺) without gradient.

        An anchor without negatives has log Z = -inf. Its value is −s⁺/τ; with `positive_in_softmax`
        it is -inf, which makes its loss and gradient 0.
        """
        if not self.positive_in_softmax:
            log_partition = log_partition.masked_fill(log_partition == -torch.inf, 0.0)
        return log_partition.detach() - positive.detach()

    def record(self, **values: Tensor) -> None:
        """Store tensors of this call, (X, A) or scalars, for `diagnostics`."""
        for name, value in values.items():
            self._recorded.setdefault(name, []).append(value.detach())

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Restore from `state_dict()`.

        Raises:
            DualencError: the state has other sizes, or comes from another objective.
        """
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except RuntimeError as error:
            raise DualencError(
                " ".join(str(error).split()),
                fix="the state is of another objective, "
                "or of other num_left, num_right, views or options",
                where=type(self).__name__,
            ) from error

    def _apply(self, fn: Any, recurse: bool = True) -> Objective:
        """Move and convert, but never to half precision, which loses temperatures and averages."""

        def keep_precision(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            if converted.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(converted.device)
            return converted

        return super()._apply(keep_precision, recurse)

    def _directions(self, batch: GatheredBatch, temperature: Tensor) -> list[Anchors]:
        """Return the anchors; both directions in one if they have the same number of candidates."""
        if self.views:
            return [two_views(batch, temperature)]
        if self.takes_mined and len(batch.negative_id):
            return with_mined(batch, self.num_left or 0, temperature)
        return [two_towers(batch, self.num_left or 0, temperature)]

    @torch.no_grad()
    def _metrics(self, batch: GatheredBatch, temperature: Tensor) -> dict[str, Tensor]:
        with torch.autocast(batch.ids.device.type, enabled=False):
            return batch_metrics(
                self._directions(batch, temperature), self.corpus.log_num_negatives
            )


class Estimate(torch.autograd.Function):
    """Losses with a given value (X, A) and a given gradient: Σ_c w_c·∇s_c − ∇s⁺.

    `Estimate.apply(value, scores, weights, positive)` takes scores (X, A, C), constant weights (X,
    A, C) and, optionally, the positive's score (X, A). The gradient of L is Σ_c p_c·∇s_c/τ − ∇s⁺/τ,
    which a few candidates can estimate, while the value of L needs the whole corpus.
    """

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, scores: Tensor, weights: Tensor, positive: Tensor | None = None
    ) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.has_positive = positive is not None
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, Tensor, None, Tensor | None]:
        # torch's `once_differentiable` does not raise if the incoming gradient is a constant.
        if torch.is_grad_enabled():
            raise DualencError(
                "second derivatives of an objective are not supported",
                fix="call backward without create_graph",
            )
        (weights,) = ctx.saved_tensors
        (gradient,) = grad_outputs
        return None, gradient[..., None] * weights, None, -gradient if ctx.has_positive else None


def temperature_term(positive_scores: Tensor, weight_sum: Tensor) -> Tensor:
    """Return (X, A) zeros with the gradient (1 − Σ_c w_c)·∇(s⁺/τ).

    L is a function of the differences s − s⁺. Where an estimator's weights need not sum to 1, every
    error of their sum would move τ by as much as s⁺/τ; this term cancels it.

    Args:
        positive_scores: (X, A) s⁺/τ with a detached s⁺, so that the term reaches τ alone; log q⁺
            for a kernel q.
        weight_sum: (X, A) Σ_c w_c.
    """
    missing = (1 - weight_sum).detach()[..., None]
    return Estimate.apply(torch.zeros_like(weight_sum), positive_scores[..., None], missing)
