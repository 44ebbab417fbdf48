"""What all objectives share: checking, precision, both directions or views, scaling over ranks, metrics.

An objective's own file holds its equation. Large batches are cut into blocks of rows, so that (A, C) matrices exist
for one block at a time, forward and backward; an objective sees a block, and what it keeps:

    statistics(block)            without gradient, per block: what the state needs to know
    update(anchors, *found)      once for all anchors of this rank: collectives and state, in `anchors.by_direction`
    losses(block, *known)        with gradient, per block: the equation

Shapes: b pairs of this rank, A its anchors of one direction, C candidates, D dimension, K known positives, N items.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.anchors import (
    PADDING,
    Anchors,
    BothDirections,
    Pairs,
    joined,
    pair_anchors,
    refuse_second_derivatives,
    view_anchors,
)
from dualenc.objectives.guide import LookUp, PairGuide, limits
from dualenc.objectives.item_state import ItemState
from dualenc.objectives.looks import NORM_TOLERANCE, Asking, Looks
from dualenc.objectives.state import SharedRandom
from dualenc.objectives.teacher import teacher_loss
from dualenc.types import Side

Encode = Callable[[Side, Tensor], Tensor]
"""`encode(side, ids)` embeds n items by id to (n, D). With several processes each of them calls it equally often and in
the same order, also for no items: the passes through a sharded model are made by all of them together."""

MIN_TEMPERATURE = 1e-3


class Metrics(Mapping[str, Tensor]):
    """Detached scalars for logging, computed when the first of them is read.

    Until then this holds the batch's embeddings without their graph, and nothing of the size of a similarity matrix.
    No other process is asked, so one may read them and another not.
    """

    NAMES = ("batch_estimate", "accuracy", "positive_similarity", "temperature")

    def __init__(self, compute: Callable[[], tuple[dict[str, Tensor], Tensor]]) -> None:
        self._compute: Callable[[], tuple[dict[str, Tensor], Tensor]] | None = compute
        self._values: dict[str, Tensor] = {}
        self._of_anchors: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._compute is not None and name in self.NAMES:
            (self._values, self._of_anchors), self._compute = self._compute(), None
        return self._values[name]

    @property
    def of_anchors(self) -> Tensor | None:
        """(A,) the `batch_estimate` of each anchor, in the order of `ObjectiveOutput.of_anchors`."""
        self["batch_estimate"]
        return self._of_anchors

    def __iter__(self) -> Iterator[str]:
        return iter(self.NAMES)

    def __len__(self) -> int:
        return len(self.NAMES)

    def __repr__(self) -> str:
        return repr({name: float(value) for name, value in self.items()})


class ObjectiveOutput(NamedTuple):
    """What an objective returns.

    `loss` is a scalar: its value is the objective's estimate of the loss (if `reports_loss`), its gradient the
    objective's gradient. On several ranks the average over ranks of the loss (and of the gradients) is that of the
    global batch.
    `metrics` are detached scalars for logging, averaged over this rank's anchors, and computed when read.
    `of_anchors` (A,) are the losses of this rank's anchors, first the left, then the right ones of its pairs; over all
    ranks their mean is `loss`, without what a teacher adds. None where an objective does not tell.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]
    of_anchors: Tensor | None = None


class AnchorLosses(NamedTuple):
    """Per anchor (A,): `surrogate` carries the gradient, `value` (no gradient) is reported, or else the surrogate."""

    surrogate: Tensor
    value: Tensor | None = None

    def with_positive(self) -> AnchorLosses:
        """Of −log(e⁺/(e⁺ + Z)) where these are of L = −log(e⁺/Z): log(1 + exp L), whose gradient is σ(L)·∇L."""
        value = self.surrogate.detach() if self.value is None else self.value
        return AnchorLosses(value.sigmoid() * self.surrogate, softplus(value))


class Reported(torch.autograd.Function):
    """`Reported.apply(surrogate, value)`: the value of one tensor with the gradient of another of its shape; second
    derivatives are refused."""

    @staticmethod
    def forward(ctx: Any, surrogate: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivatives()
        return grad_outputs[0], None


class _OfAnyLength(type):
    """Makes of `SogCLR(dims=[64, 128], …)` a `Matryoshka` of two objectives of the class."""

    def __call__(cls, *args: Any, dims: Sequence[int] | None = None, **arguments: Any) -> Any:
        if dims is None:
            return super().__call__(*args, **arguments)
        from dualenc.objectives.matryoshka import Matryoshka

        return Matryoshka([cls(*args, **arguments) for _ in dims], list(dims))


class Objective(nn.Module, metaclass=_OfAnyLength):
    """Base of all objectives of the global contrastive loss; usable in any training loop.

        criterion = SogCLR(num_left=m, temperature=0.07)
        out = criterion(left, right, left_id, right_id)
        out.loss.backward()

    Args:
        num_left: size of the left id space; needed by objectives that keep state per item.
        num_right: size of the right id space (the corpus); defaults to num_left.
        temperature: τ ≥ 0.001 of the softmax over cosine similarities, a number.
        learnable_temperature: learn log τ with the model.
        views: left and right are two views of one image (unimodal training): 2B anchors, one shared id space.
        seed: of the objective's own random generator.
        state_device: where state per item is: "auto" is where the objective is, "cpu" the CPU's memory, pinned where
            there is a GPU, whatever device the objective is moved to; the rows of a step travel.
        positive_in_softmax: minimise −log(e⁺/(e⁺ + Z)) over the whole corpus, as InfoNCE does over the batch, where Z
            sums the negatives only: the gradient of −log(e⁺/Z) times an anchor's chance to miss its positive. For
            encoders that find most positives already, where the ratio alone never stops to push. Of objectives that
            know Z.
        teacher: learn from a teacher's scores of each pair's positive and its own mined negatives, too: "margin_mse"
            or "kl" (`dualenc.objectives.teacher`). Not with views.
        teacher_weight: what that loss is multiplied by before it is added.
        teacher_temperature: the teacher's scores are divided by it, as the encoder's cosines are by τ: 1 for the logits
            of a cross-encoder, for a teacher of cosines its own temperature.
        own_weight: what the objective's own loss is multiplied by; 0 leaves the teacher alone.
        guide_margin, guide_relative: with a guide (`trainer.guide_left`), no negative is what it finds more alike to
            the anchor than s⁺ − (1 − guide_relative)·|s⁺| − guide_margin, where s⁺ is how alike it finds the positive:
            a likely false negative (Solatorio 2024, arXiv 2402.16829, GISTEmbed: 0 and 1). What it leaves out has
            weight 0 wherever negatives come from: see `dualenc.objectives.guide`.
        dims: lengths at which the first components of the embeddings are trained, such as [64, 128, 256], so that they
            can be used alone: what is made is then a `Matryoshka` of as many objectives. By default the whole
            embeddings only.

    Raises:
        DualencError: an argument out of range; in `forward`, shapes or ids that do not fit, embeddings that are not
            finite or not of norm 1 (what `encode` gives may also be 0), weights or counts that are negative; in
            `load_state_dict`, the state of another objective or of other sizes.
    """

    left_counts: Tensor | None
    right_counts: Tensor | None

    needs_num_left = False
    needs_encode = False

    both_at_once = False
    """Whether `anchor_losses` may get the anchors of both directions as one (`BothDirections`)."""
    takes_mined = True
    """Whether mined negatives are candidates."""
    knows_partition = False
    """Whether every anchor's `AnchorLosses.value` is its loss, so that `positive_in_softmax` can be had."""

    @property
    def needs_uniform_batches(self) -> str | None:
        """What to set where some pairs meet more than others, for an objective that is right only if none do."""
        return None

    @property
    def reports_loss(self) -> bool:
        """Whether the value of `loss` is an estimate of the loss; else only its gradient is, and logs leave it out."""
        return True

    num_neighbors = 0
    """How many neighbours of each item the objective wants to be told (`set_neighbors`) at the start of every epoch."""
    corpus_of_pairs = True
    """Whether an item of the corpus weighs as often as it stands in a pair (`set_counts`), or once."""

    def __init__(
        self,
        *,
        num_left: int | None = None,
        num_right: int | None = None,
        temperature: float = 0.07,
        learnable_temperature: bool = False,
        views: bool = False,
        seed: int = 0,
        state_device: Literal["auto", "cpu"] = "auto",
        positive_in_softmax: bool = False,
        teacher: Literal["margin_mse", "kl"] | None = None,
        teacher_weight: float = 1.0,
        teacher_temperature: float = 1.0,
        own_weight: float = 1.0,
        guide_margin: float = 0.0,
        guide_relative: float = 1.0,
        dims: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if teacher not in (None, "margin_mse", "kl"):
            self._fail("teacher", f"is {teacher!r}; it must be one of margin_mse, kl, or null")
        if teacher is not None and views:
            self._fail("teacher", "scores pairs with mined negatives, and views=True has none; leave it out")
        for argument, factor in (("teacher_weight", teacher_weight), ("own_weight", own_weight)):
            if not 0 <= factor < math.inf:
                self._fail(argument, f"is {factor}; it must be 0 or more")
        if not 0 < teacher_temperature < math.inf:
            self._fail("teacher_temperature", f"is {teacher_temperature}; it must be above 0")
        if teacher is None and own_weight != 1:
            self._fail("own_weight", f"is {own_weight} without a teacher to weigh it against; set teacher or leave it")
        self.teacher, self.teacher_weight, self.own_weight = teacher, teacher_weight, own_weight
        self.teacher_temperature = teacher_temperature
        if not math.isfinite(guide_margin):
            self._fail("guide_margin", f"is {guide_margin}; it must be a number such as 0 or 0.05")
        if not 0 <= guide_relative <= 1:
            self._fail("guide_relative", f"is {guide_relative}; it must lie in [0, 1], such as 1 or 0.95")
        self.guide_margin, self.guide_relative = guide_margin, guide_relative
        if positive_in_softmax and not self.knows_partition:
            able = "SogCLR, ISogCLR, GlobalCache, NegativeCache or ExactGlobal"
            self._fail("positive_in_softmax", f"does not apply; leave it out, or take {able}")
        self.positive_in_softmax = positive_in_softmax
        if state_device not in ("auto", "cpu"):
            self._fail("state_device", f"is {state_device!r}; it must be one of auto, cpu")
        self.state_on_cpu = state_device == "cpu"
        if isinstance(temperature, Tensor):
            self._fail("temperature", "is a tensor; pass a number, and learnable_temperature=True to have it learned")
        if not (temperature >= MIN_TEMPERATURE and math.isfinite(temperature)):
            least = f"it must be a number such as 0.07, at least {MIN_TEMPERATURE}"
            self._fail("temperature", f"is {temperature}; {least}")
        if self.needs_num_left and num_left is None:
            self._fail("num_left", "is missing; pass the number of left items, e.g. len(pairs)")
        for argument, value in (("num_left", num_left), ("num_right", num_right)):
            if value is not None and value < 1:
                self._fail(argument, f"is {value}; it must be at least 1")
        self.num_left = num_left
        self.num_right = num_left if num_right is None or views else num_right
        self.views = views
        self.seed = seed
        log_temperature = torch.tensor(math.log(temperature), dtype=torch.float64).float()
        self.log_temperature = nn.Parameter(log_temperature, requires_grad=learnable_temperature)
        # Facts about the data, told anew in every run, and no state; absent where every item stands in one pair.
        self.register_buffer("left_counts", None, persistent=False)
        self.register_buffer("right_counts", None, persistent=False)
        self.num_pairs: int | None = None
        # What the last call left for `diagnostics`, by the side of its anchors: tensors that were there anyway.
        self.watched: dict[Side, tuple[Tensor, ...]] = {}

    @property
    def updates_state(self) -> bool:
        """Whether this call is part of training, and so may write state: tables, caches, chains, random positions.

        Evaluation, which is a call in eval mode or under `torch.no_grad()`, leaves all state as it is. Ask before
        entering a `no_grad` block of your own.
        """
        return self.training and torch.is_grad_enabled()

    @property
    def temperature(self) -> Tensor:
        """Scalar τ, never below 1e-3 however far a learned one drifts."""
        return self.log_temperature.exp().clamp(min=MIN_TEMPERATURE)

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
        teacher_scores: Tensor | None = None,
        teacher_rows: Tensor | None = None,
        guide_left: Tensor | None = None,
        guide_right: Tensor | None = None,
        guide_negatives: Tensor | None = None,
        guide: LookUp | None = None,
    ) -> ObjectiveOutput:
        """The loss of this rank's part of a batch.

        All ranks are given the same arguments, with as many rows as each has: none, where its part is empty. Lists of
        positives and mined negatives may be left out where a rank has none, and lists may differ in length.

        Args:
            left, right: (b, D) unit-norm embeddings of the pairs; b may differ between ranks.
            left_id, right_id: (b,) integer ids in [0, num_left) and [0, num_right); without right_id pairs share
                one index. Items with equal ids are never negatives of one another's partners.
            encode: `encode(side, ids (n,)) -> (n, D)`, asked for items outside the batch by objectives that need
                them, with ids on the CPU; honours `torch.is_grad_enabled()`. With views, "left" and "right" are an
                image's two views.
            left_positives: (b, K) right ids known to be relevant to each left item, padded with -1.
            right_positives: (b, K) left ids known to be relevant to each right item, padded with -1.
            negatives, negative_id: (n, D) and (n,) mined right items that join the candidates of left anchors; not
                with views.
            weights: (b,) what the loss of each pair, in both directions, is multiplied by, 0 or more; its part in other
                pairs' losses, as their negative, stays. On average 1, or the learning rate changes with them.
            teacher_scores: (b, 1 + K) with `teacher`: its scores of each pair's positive and of K of this rank's
                `negatives`; NaN where it has none.
            teacher_rows: (b, K) which rows of `negatives` these are, padded with -1.
            guide_left, guide_right: (b, G) a guide's unit vectors of the pairs; NaN where it has none.
            guide_negatives: (n, G) likewise of this rank's `negatives`, if there are any.
            guide: `guide(side, ids (n,)) -> (n, G)` looks such vectors up by id, on the device of the ids; in place of
                the three above, or besides them. Needed by objectives that compare with items outside the batch.
        """
        ids = {
            "left_id": left_id,
            "right_id": left_id if right_id is None else right_id,
            "left_positives": left_positives,
            "right_positives": right_positives,
            "negative_id": negative_id,
        }
        if self.teacher is None and (teacher_scores is not None or teacher_rows is not None):
            what = "and teacher_rows are given without a teacher; set teacher to margin_mse or kl, or leave them out"
            self._fail("teacher_scores", what)
        if weights is not None and weights.shape != left_id.shape:
            self._fail("weights", f"has shape {tuple(weights.shape)}; it must hold {len(left_id)} numbers")
        judged = {"weights": weights, "teacher_rows": teacher_rows}
        pairs, copies = self._checked({"left": left, "right": right, "negatives": negatives}, ids, judged)
        if guide is not None or guide_left is not None or guide_right is not None:
            pairs = self._guided(pairs, guide, guide_left, guide_right, guide_negatives, negatives)
        if self.needs_encode and encode is None:
            self._fail("encode", "is missing; pass encode(side, ids) -> (n, D) that embeds items by id")
        like, device = pairs.left, left.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        looks = Looks()

        def ask(side: Side, ids: Tensor) -> Tensor:
            assert encode is not None
            # Objectives compute in full precision, encoders in the caller's.
            with nullcontext() if autocast is None else torch.autocast(device, dtype=autocast):
                found = encode(side, ids)
            if found.shape != (expected := (len(ids), like.shape[1])):
                raise DualencError(f"encode gave shape {tuple(found.shape)} for {len(ids)} ids; it must be {expected}")
            looks.note(found)
            return found.to(like)

        # Outside of training, random draws are made but not counted.
        sources = [] if self.updates_state else [(m, m.draws) for m in self.modules() if isinstance(m, SharedRandom)]
        with torch.autocast(device, enabled=False):
            temperature = self.temperature.to(like.dtype)
            asked = None if encode is None else ask
            # Both directions at once, or one after the other, or, if they ask the device, in step.
            compared = pairs if self.takes_mined else pairs.without_mined()
            directions = list(self._anchors(compared, temperature))
            if self.both_at_once and len(directions) == 2 and not len(compared.negative_id):
                directions = [BothDirections(*directions)]
            losses = looks.together([self.anchor_losses(of, asked) for of in directions])
            if self.positive_in_softmax:
                losses = [of.with_positive() for of in losses]
            # Over all anchors of the global batch, so that the average over ranks is the global loss.
            scale = distributed.world_size() / max(2 * sum(pairs.sizes), 1)
            every = joined([of.surrogate for of in losses])
            of_anchors = None
            if weights is not None:
                weights = weights.to(like)
                of_anchors = weights.repeat(2)  # anchors are first the left, then the right ones of all pairs
            reported = every = every if of_anchors is None else every * of_anchors
            loss = every.sum()
            if any(of.value is not None for of in losses):
                values = joined([of.surrogate.detach() if of.value is None else of.value for of in losses])
                reported = values if of_anchors is None else values * of_anchors
                loss = Reported.apply(loss, reported.sum())
            loss = loss * scale
            if self.teacher is not None:
                learned = self._learned(pairs, negatives, teacher_scores, teacher_rows, temperature, weights)
                loss = self.own_weight * loss + self.teacher_weight * learned
        for random, draws in sources:
            random.draws = draws
        watched, temperature = pairs.detached(*copies), temperature.detach()
        return ObjectiveOutput(loss, Metrics(lambda: self._metrics(watched, temperature)), reported)

    def statistics(self, block: Anchors) -> tuple[Tensor, ...]:
        """(a,) each: what `update` needs to know of each of a block's rows; called without gradient."""
        return ()

    def update(self, anchors: Anchors, *found: Tensor) -> tuple[Tensor, ...]:
        """(A, …) each: what `losses` needs to know of each anchor, from its statistics (A,) and the state.

        Called once with all rows of a direction, or of both; writes state if `updates_state`.
        """
        return ()

    def losses(self, block: Anchors, *known: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """(a,) losses of a block's rows, or what carries their gradient and what is reported.

        Pure: a block may be worked off again in the backward pass, and each row's result is its own.
        """
        raise TypeError(f"{type(self).__name__} does not define losses")

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> AnchorLosses | Asking[AnchorLosses]:
        """One loss per anchor. Objectives that ask for out-of-batch items define this instead of the three above.

        `encode` wants ids on the CPU. One that computes them on the device learns them by `ids = yield ids_on_device`:
        a look at the device that both directions share.
        """
        with torch.no_grad():
            found = anchors.by_rows(self.statistics)
        losses = anchors.by_rows(self.losses, *self.update(anchors, *found))
        return AnchorLosses(losses) if isinstance(losses, Tensor) else AnchorLosses(*losses)

    def diagnostics(self) -> dict[str, Tensor]:
        """Scalars that tell how an objective's memory does as of its last call, averaged over this rank's anchors, such
        as moves of chains and logs of partition functions. They cost nothing until asked; all ranks ask together."""
        return {}

    def _watch(self, anchors: Anchors, *values: Tensor) -> None:
        """Keep tensors of this call for `diagnostics`."""
        self.watched[anchors.directions[0].side] = values

    def _spread(self, name: str, number: int = 0) -> dict[str, Tensor]:
        """Mean and standard deviation over anchors of what was kept at a place, as far as it is finite."""
        if not self.watched:
            return {}
        values = torch.cat([kept[number].detach() for kept in self.watched.values()]).double()
        some = torch.isfinite(values)
        count = some.sum().clamp(min=1)
        mean = torch.where(some, values, 0.0).sum() / count
        variance = torch.where(some, (values - mean).square(), 0.0).sum() / count
        return {name: mean, f"{name}_spread": variance.sqrt()}

    def set_progress(self, fraction: float) -> None:
        """Tell how much of the training is done, in [0, 1]; objectives with schedules listen."""

    def set_counts(self, left_counts: Tensor, right_counts: Tensor) -> None:
        """Tell how many pairs each left (num_left,) and right (num_right,) item is in; a pair that is trained on more
        often than others counts as often.

        The corpus is the multiset of the pairs' items. Without this, every item stands in one pair.

        Raises:
            DualencError: another number of items, counts that are negative or not finite, or sums that differ.
        """
        given: dict[Side, Tensor] = {"left": left_counts, "right": left_counts if self.views else right_counts}
        given = {side: counts for side, counts in given.items() if self.num_items(side) is not None}
        for side, counts in given.items():
            if counts.shape != (total := self.num_items(side),):
                self._fail(f"{side}_counts", f"has shape {tuple(counts.shape)}; it must hold {total} counts")
            if not bool(((counts >= 0) & torch.isfinite(counts)).all()):
                self._fail(f"{side}_counts", "holds negative or infinite counts, or NaN; they must be 0 or more")
        sums = [float(counts.double().sum()) for counts in given.values()]
        if given and not math.isclose(sums[0], sums[-1], rel_tol=1e-6):
            what = f"sum to {sums[0]:g} and {sums[-1]:g}; each pair counts once on either side"
            self._fail("left_counts and right_counts", what)
        for side, counts in given.items():
            uneven = bool((counts != 1).any())
            self.num_pairs = round(sums[0])
            setattr(self, f"{side}_counts", counts.to(self.log_temperature.device, torch.float32) if uneven else None)

    def set_neighbors(self, side: Side, ids: Tensor) -> None:
        """Tell which of the other side's items are near each item of a side, (m, k); chains listen."""

    def num_items(self, side: Side) -> int | None:
        """Size of a side's id space."""
        return self.num_left if side == "left" else self.num_right

    def counts(self, side: Side) -> Tensor | None:
        """(N,) how often each item of a side stands in the corpus; None where every one stands there once."""
        if not self.corpus_of_pairs:
            return None
        return self.left_counts if side == "left" else self.right_counts

    def corpus_size(self, side: Side) -> int | None:
        """N, a side's items, each as often as it stands in the corpus; None if unknown."""
        return self.num_items(side) if self.counts(side) is None else self.num_pairs

    def log_corpus_size(self, anchors: Anchors) -> Tensor | float:
        """(A,) log of the number of negatives an anchor has in the whole corpus, or in the batch, if N is unknown; one
        number for all of them where it is the same."""
        if isinstance(anchors, BothDirections):
            left, right = (self.log_corpus_size(half) for half in anchors.directions)
            if isinstance(left, float) and isinstance(right, float) and left == right:
                return left
            ones = torch.ones_like(anchors.directions[0].ids, dtype=anchors.temperature.dtype)
            return torch.cat([ones * left, ones * right])
        total, counts = self.corpus_size(anchors.candidate_side), self.counts(anchors.candidate_side)
        positives, num_views = anchors.positive_ids, 2 if anchors.views else 1
        if total is None:
            number = anchors.num_negatives
        elif counts is not None:
            number = total - counts[positives.clamp(min=0)].masked_fill(positives == PADDING, 0.0).sum(dim=1)
        elif positives.shape[1] == 1:
            return math.log(num_views * max(total - 1, 1))
        else:
            number = total - (positives != PADDING).sum(dim=1)
        number = number if total is None else num_views * number
        return number.clamp(min=1).to(anchors.embeddings.dtype).log()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Objective:
        """As of `torch.nn.Module`, but `half()` and `bfloat16()` leave the precision of τ, averages and tables: the
        changes of a step are smaller than what half precision tells apart."""

        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            lowered = moved.dtype != tensor.dtype and moved.dtype in (torch.float16, torch.bfloat16)
            return tensor.to(moved.device) if lowered else moved

        return super()._apply(keep_precision, recurse)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As of `torch.nn.Module`; what does not fit is told before anything is taken over.

        Raises:
            DualencError: a table has another size, or is missing.
        """
        for prefix, module in self.named_modules():
            if isinstance(module, ItemState):
                module.settle()
            # Modules with a way of their own to load know their sizes themselves.
            if type(module)._load_from_state_dict is not nn.Module._load_from_state_dict:
                continue
            for key, here in [*module.named_parameters(prefix, False), *module.named_buffers(prefix, False)]:
                saved = state_dict.get(key)
                if saved is not None and saved.shape != here.shape:
                    self._fail(
                        key,
                        f"has shape {tuple(saved.shape)} in the saved state, {tuple(here.shape)} here; "
                        "load it into an objective with the same num_left, num_right, views and options",
                    )
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except RuntimeError as error:
            raise DualencError(f"{type(self).__name__}: {' '.join(str(error).split())}") from error

    def _anchors(self, pairs: Pairs, temperature: Tensor) -> Iterator[Anchors]:
        return (view_anchors if self.views else pair_anchors)(pairs, temperature)

    @torch.no_grad()
    def _metrics(self, pairs: Pairs, temperature: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The same for every objective, so that runs can be compared: in-batch estimates of L(θ) and accuracy; and (A,)
        the estimate of each anchor."""

        def mean_and_hardest(block: Anchors) -> tuple[Tensor, ...]:
            logits = block.logits
            return block.log_mean_exp, logits.amax(dim=1) if logits.shape[1] else block.positive_logits

        found, estimates = [], []
        with torch.autocast(pairs.left.device.type, enabled=False):
            for anchors in self._anchors(pairs, temperature):
                positive, has_negatives = anchors.positive_logits, anchors.num_negatives > 0
                log_mean, hardest = anchors.by_rows(mean_and_hardest)
                estimate = torch.where(has_negatives, -positive + log_mean + self.log_corpus_size(anchors), 0.0)
                estimates.append(estimate)
                of_batch = estimate.sum() / has_negatives.sum().clamp(min=1)
                accuracy = (positive > hardest).to(positive.dtype).mean().nan_to_num()
                similarity = anchors.positive_similarities.mean().nan_to_num()
                found.append(torch.stack([of_batch, accuracy, similarity, temperature]))
        means = torch.stack(found).mean(dim=0).unbind()
        return dict(zip(Metrics.NAMES, means, strict=True)), torch.cat(estimates)

    def _checked(
        self,
        embeddings: Mapping[str, Tensor | None],
        ids: Mapping[str, Tensor | None],
        judged: Mapping[str, Tensor | None],
    ) -> tuple[Pairs, tuple[Tensor, Tensor]]:
        """The pairs of all ranks, once all shapes, types and values are right; and copies of this rank's embeddings
        that nobody changes later. `judged` are weights and a teacher's rows, of which the values are checked."""
        given = {name: tensor for name, tensor in embeddings.items() if tensor is not None}
        left, right, negatives = given["left"], given["right"], given.get("negatives")
        for name, tensor in given.items():
            if tensor.dim() != 2 or not tensor.is_floating_point():
                what = f"has shape {tuple(tensor.shape)} ({tensor.dtype})"
                self._fail(name, f"{what}; it must be a float (b, D) tensor")
        if left.shape != right.shape or any(tensor.shape[1] != left.shape[1] for tensor in given.values()):
            self._fail("left, right", f"have shapes {tuple(left.shape)}, {tuple(right.shape)}; both must be (b, D)")
        if self.views and negatives is not None:
            self._fail("negatives", "do not go with views=True, where every other image is a negative; leave them out")
        if (negatives is None) != (ids["negative_id"] is None):
            self._fail("negatives", "and negative_id must be given together, (n, D) and (n,)")
        known: dict[str, Tensor] = {}
        for name, some in ids.items():
            if some is None:
                continue
            of = negatives if name == "negative_id" and negatives is not None else left
            lists = name.endswith("positives")
            fits = some.shape[:1] == of.shape[:1] and some.dim() == (2 if lists else 1)
            if not fits or some.is_floating_point() or some.is_complex() or some.dtype == torch.bool:
                what = f"({len(of)}, K) integer ids" if lists else f"{len(of)} integer ids"
                self._fail(name, f"has shape {tuple(some.shape)} ({some.dtype}); it must hold {what}")
            if some.device != of.device:
                self._fail(name, f"is on {some.device}, the embeddings are on {of.device}; move it there")
            known[name] = some.long()
        left_id, right_id = known["left_id"], known["right_id"]
        # A rank may have no pair, no mined negative or no list of positives, and what there is decides on exchanges:
        # all ranks decide by what any of them has.
        num_mined = 0 if negatives is None else len(negatives)
        of_positives = ("left_positives", "right_positives")
        own_widths = [known[name].shape[1] if name in known else 0 for name in of_positives]
        sizes, mined, *widths_of_ranks = distributed.rank_numbers([len(left), num_mined, *own_widths], left.device)
        for name, widths in zip(of_positives, widths_of_ranks, strict=True):
            if width := max(widths):
                ids_of_rank = known.get(name, left_id.new_zeros(len(left), 0))
                known[name] = pad(ids_of_rank, (0, width - ids_of_rank.shape[1]), value=PADDING)
            else:
                known.pop(name, None)
        alone = not distributed.is_initialized()
        with torch.no_grad():
            both = torch.stack([left_id, right_id])
            both = both if alone else distributed.gather(both.T, sizes).T.contiguous()
            rows = torch.cat(list(given.values()))
            left_copies, right_copies, *on_cpu = self._look(given, rows, both, known, judged)
            parts = rows.split([len(tensor) for tensor in given.values()])
        precision = torch.float64 if left.dtype == torch.float64 else torch.float32
        left, right = left.to(precision), right.to(precision)
        negatives = right[:0] if negatives is None else negatives.to(precision)
        negative_id = known.get("negative_id", right_id[:0])
        pairs = Pairs(
            left=left,
            right=right,
            left_id=left_id,
            right_id=right_id,
            left_positives=known.get("left_positives"),
            right_positives=known.get("right_positives"),
            all_left=distributed.gather_with_grad(left, sizes),
            all_right=distributed.gather_with_grad(right, sizes),
            all_left_id=left_id if alone else both[0],
            all_right_id=right_id if alone else both[1],
            negatives=distributed.gather_with_grad(negatives, mined) if any(mined) else negatives,
            negative_id=distributed.gather(negative_id, mined) if any(mined) else negative_id,
            sizes=sizes,
            left_copies=left_copies,
            right_copies=right_copies,
            on_cpu=(on_cpu[0], on_cpu[1]) if on_cpu else None,
        )
        return pairs, (parts[0].to(precision), parts[1].to(precision))

    def _learned(
        self,
        pairs: Pairs,
        negatives: Tensor | None,
        scores: Tensor | None,
        rows: Tensor | None,
        temperature: Tensor,
        weights: Tensor | None,
    ) -> Tensor:
        """What the teacher's scores of this rank's pairs teach; arguments are those of `forward`."""
        like = pairs.left
        if scores is None or rows is None:
            self._fail("teacher_scores", "and teacher_rows are missing; pass what the teacher says of the pairs")
        if scores.shape != (len(like), 1 + rows.shape[-1]) or len(rows) != len(like):
            shapes = f"{tuple(scores.shape)}, teacher_rows {tuple(rows.shape)}"
            self._fail("teacher_scores", f"has shape {shapes}; they must be ({len(like)}, 1 + K) and (…, K)")
        given = like[:0] if negatives is None else negatives.to(like)
        scores = scores.to(like) / self.teacher_temperature
        assert self.teacher is not None
        return teacher_loss(self.teacher, like, pairs.right, given, rows, scores, temperature, weights)

    def _guided(
        self,
        pairs: Pairs,
        look_up: LookUp | None,
        left: Tensor | None,
        right: Tensor | None,
        mined: Tensor | None,
        negatives: Tensor | None,
    ) -> Pairs:
        """The pairs with what a guide says of those of all ranks; its arguments are those of `forward`."""
        if self.needs_encode and look_up is None:
            self._fail("guide", "is missing; pass guide(side, ids) -> (n, G) that looks up a guide's vectors by id")
        num_mined, num_pairs = 0 if negatives is None else len(negatives), len(pairs.left)
        if left is None and right is None and look_up is not None:
            left, right = look_up("left", pairs.left_id), look_up("right", pairs.right_id)
            start = sum(distributed.rank_sizes(num_mined, left.device)[: distributed.rank()])
            mined = look_up("right", pairs.negative_id[start : start + num_mined])
        if left is None or right is None or (num_mined and mined is None):
            self._fail("guide_left,", "guide_right and, with negatives, guide_negatives are given together")
        mined = right[:0] if mined is None else mined
        left, right, mined = (vectors.to(pairs.left) for vectors in (left, right, mined))
        given = [tuple(vectors.shape) for vectors in (left, right, mined)]
        if given != [(number, left.shape[-1]) for number in (num_pairs, num_pairs, num_mined)]:
            shapes = ", ".join(map(str, given))
            self._fail("guide_left,", f"guide_right and guide_negatives have shapes {shapes}; give a vector per item")
        sizes = distributed.rank_sizes(num_mined, mined.device)
        guide = PairGuide(
            left=left,
            right=right,
            all_left=distributed.gather(left, pairs.sizes),
            all_right=distributed.gather(right, pairs.sizes),
            mined=distributed.gather(mined, sizes) if any(sizes) else mined,
            limits=limits(left, right, self.guide_margin, self.guide_relative),
            look_up=look_up,
        )
        return replace(pairs, guide=guide)

    def _look(
        self,
        embeddings: dict[str, Tensor],
        rows: Tensor,
        both: Tensor,
        ids: dict[str, Tensor],
        judged: Mapping[str, Tensor | None],
    ) -> tuple[Any, ...]:
        """Check all values in one look: on a GPU each look waits for the work before it.

        Args:
            embeddings: by name.
            rows: (n, D) all of them.
            both: (2, P) left and right ids of the pairs of all ranks.
            ids: by name, this rank's.
            judged: weights of this rank's pairs, and a teacher's rows of this rank's negatives.

        Returns:
            How many pairs share one left item at most, and one right item; and where tables on the CPU need them, left
            and right ids of the pairs of all ranks there.
        """
        seen: dict[str, tuple[Tensor, ...]] = {}
        if len(rows):
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
            seen["norms"] = norms.aminmax(dim=0, keepdim=True)
        if both.shape[1]:
            ordered = both.sort(dim=1).values
            copies = torch.searchsorted(ordered, ordered, right=True) - torch.searchsorted(ordered, ordered)
            seen["pairs"] = (copies.amax(dim=1), *both.aminmax(dim=1))
        for name in ("left_positives", "right_positives", "negative_id"):
            if name in ids and ids[name].numel():
                seen[name] = ids[name].flatten().aminmax(dim=0, keepdim=True)
        if self.views and ids["left_id"] is not ids["right_id"] and len(ids["left_id"]):
            seen["differ"] = ((ids["left_id"] != ids["right_id"]).any()[None],)
        for name, numbers in judged.items():
            if numbers is not None and numbers.numel():
                seen[name] = numbers.to(both.device, torch.float64).flatten().aminmax(dim=0, keepdim=True)
        on_cpu: list[Tensor] = []
        looked = torch.cat([part for parts in seen.values() for part in parts]) if seen else torch.zeros(0)
        if self.state_on_cpu and both.device.type != "cpu":
            # Ids are exact in double precision.
            together = torch.cat([looked.to(both.device, torch.float64), both.flatten()]).cpu()
            looked, every = together.split([len(looked), both.numel()])
            on_cpu = list(every.long().view(2, -1))
        values = iter(looked.tolist())
        found = {name: list(islice(values, sum(map(len, parts)))) for name, parts in seen.items()}

        if not all(abs(norm - 1) <= NORM_TOLERANCE for norm in found.get("norms", [])):
            for name, tensor in embeddings.items():
                norms = torch.linalg.vector_norm(tensor.detach(), dim=1, dtype=torch.float64)
                if not bool(torch.isfinite(norms).all()):
                    self._fail(name, "holds NaN or infinite values; lower the learning rate or check the encoder")
                if len(norms) and float((norms - 1).abs().max()) > NORM_TOLERANCE:
                    ends = f"[{float(norms.min()):.4g}, {float(norms.max()):.4g}]"
                    self._fail(name, f"has rows of norm in {ends}; they must be unit vectors: normalise them")
        left_copies, right_copies, *ends_of_both = found.get("pairs", [0] * 6)
        found["left_id"], found["right_id"] = ends_of_both[0::2], ends_of_both[1::2]
        for name, side in (
            ("left_id", "left"),
            ("right_id", "right"),
            ("left_positives", "right"),
            ("right_positives", "left"),
            ("negative_id", "right"),
        ):
            low, high = found.get(name, (0, 0))
            limit, padded = self.num_left if side == "left" else self.num_right, name.endswith("positives")
            if low < (PADDING if padded else 0) or (limit is not None and high >= limit):
                most, padding = "N" if limit is None else limit, " (-1 is padding)" if padded else ""
                self._fail(name, f"holds ids in [{low:.0f}, {high:.0f}]; they must lie in [0, {most}){padding}")
        if any(found.get("differ", [])):
            self._fail("right_id", "differs from left_id; with views=True both views carry the image's id")
        low, high = found.get("weights", (0, 0))
        if not 0 <= low <= high < math.inf:
            self._fail("weights", f"holds numbers in [{low:.4g}, {high:.4g}]; they must be finite and 0 or more")
        low, high = found.get("teacher_rows", (PADDING, PADDING))
        num_mined = len(embeddings.get("negatives", ()))
        if low < PADDING or high >= num_mined:
            must = f"they must be rows of the {num_mined} negatives, or -1 (padding)"
            self._fail("teacher_rows", f"holds rows in [{low:.0f}, {high:.0f}]; {must}")
        return int(left_copies), int(right_copies), *on_cpu

    def _fail(self, argument: str, problem: str) -> NoReturn:
        raise DualencError(f"{type(self).__name__}: {argument} {problem}")
