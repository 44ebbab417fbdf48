"""Who is compared with whom: rows of anchors against candidates, with ranks, directions, views and masks settled.

Shapes: b pairs of this rank, P pairs of all ranks, A anchors, C candidates, D dimension, K known positives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.guide import Judgement, PairGuide
from dualenc.objectives.looks import upload
from dualenc.types import Side

PADDING = -1

Rows = TypeVar("Rows", bound=Tensor | tuple[Tensor, ...] | None)

# Entries of a matrix that is held at once: 1024 anchors against 1024 candidates. An accelerator has memory for more,
# and waits for the host's many operations at every block.
BLOCK_ENTRIES = 2**20
BLOCKS_ON_ACCELERATOR = 4


class KnownIds(NamedTuple):
    """Ids on the CPU.

    Attributes:
        own: (A,) of this rank's anchors.
        all_anchors, all_rows: of the anchors of all ranks, in the order of ranks, and their positions in the batch.
        candidates: (C,) of the candidates; None with mined negatives.
    """

    own: Tensor
    all_anchors: Tensor
    all_rows: Tensor
    candidates: Tensor | None


@dataclass(repr=False)
class Anchors:
    """This rank's anchors of one direction against the candidates of the global batch; or some of its rows.

    Attributes:
        side: whose items the anchors are, and so whose state table they index ("left" also for two views).
        candidate_side: whose items the candidates are: what `encode` is asked for.
        ids: (A,) ids of the anchors.
        places: (A,) on the CPU, positions of the anchors among those of their direction in the global batch.
        known: ids as the host knows them; None where it does not, or where they are on the CPU anyway.
        sizes: number of anchors on every rank, for gathering without asking again.
        embeddings: (A, D) with gradient.
        partners: (A, D) embeddings of the anchors' own positives, with gradient.
        positive_column: (A,) the candidates that these are.
        candidates: (C, D) embeddings of the candidates, with gradient: first those of the batch, as many as it has
            anchors, then mined negatives.
        candidate_ids: (C,) ids of the candidates.
        positive_ids: (A, K) distinct ids of the candidate side that are known to be no negatives: the anchor's own
            positive, listed ones, and those of other pairs with the anchor's item; padded with -1.
        temperature: scalar τ, with gradient when learned.
        views: candidates are first all left, then all right views of the batch.
        distinct: no item comes twice and no further positives are listed: each anchor has its own pair as positive,
            and all other candidates as negatives.
        mirror: the same pairs' anchors of the other direction, where similarities with them are the transposed ones.
        with_grad: whether similarities carry a gradient, whoever asks for them first.
        num_before: how many anchors of the other direction are counted before these.
        guide: what a guide takes for positives besides; None without one.
    """

    side: Side
    candidate_side: Side
    ids: Tensor
    places: Tensor
    sizes: list[int]
    embeddings: Tensor
    partners: Tensor
    positive_column: Tensor
    candidates: Tensor
    candidate_ids: Tensor
    positive_ids: Tensor
    temperature: Tensor
    views: bool = False
    distinct: bool = False
    mirror: Anchors | None = None
    known: KnownIds | None = None
    with_grad: bool = field(default_factory=torch.is_grad_enabled)
    num_before: int = 0
    guide: Judgement | None = None

    def by_rows(self, function: Callable[..., Rows], *tensors: Tensor, row_entries: int | None = None) -> Rows:
        """Apply a function to all rows at once where its matrices are small, else to one block of rows at a time.

        With gradient, a block's matrices are computed again in the backward pass. The function must be pure: equal
        results when called again, and each row's result its own.

        Args:
            function: takes the `Anchors` of some rows and those rows (a, ...) of the tensors; returns one tensor
                (a, ...) or several.
            tensors: (A, ...) each.
            row_entries: how many numbers the function holds per row; by default C.

        Returns:
            What the function returns, for all rows.
        """
        size = max(1, self.block_entries // max(1, row_entries or self.num_candidates))
        if self.num_own <= size:
            return function(self, *tensors)

        def block(start: int) -> Rows:
            rows = slice(start, start + size)
            by_row = ("ids", "places", "embeddings", "partners", "positive_column", "positive_ids")
            own: dict[str, Any] = {name: getattr(self, name)[rows] for name in by_row}
            own["known"] = self.known and self.known._replace(own=self.known.own[rows])
            if self.guide is not None:
                own["guide"] = self.guide.rows(rows)
            some = replace(self, **own, mirror=None, with_grad=torch.is_grad_enabled())
            return function(some, *(tensor[rows] for tensor in tensors))

        starts = range(0, self.num_own, size)
        if not torch.is_grad_enabled():
            return joined([block(start) for start in starts])
        return joined([checkpoint(block, start, use_reentrant=False, preserve_rng_state=False) for start in starts])

    @property
    def block_entries(self) -> int:
        """How many entries of a matrix are held at once."""
        return BLOCK_ENTRIES * (1 if self.temperature.device.type == "cpu" else BLOCKS_ON_ACCELERATOR)

    def by_direction(self, function: Callable[..., Rows], *tensors: Tensor) -> Rows:
        """Apply a function to the `Anchors` of each direction and its rows (a, ...) of the tensors (A, ...).

        Returns:
            What the function returns, for all rows.
        """
        return function(self, *tensors)

    def of_rank(self, values: Tensor) -> Tensor:
        """(A, ...) of values (num_rows, ...), alike on all ranks, those of this rank's anchors."""
        return values if len(self.sizes) == 1 else values[self.rows]

    @property
    def directions(self) -> tuple[Anchors, ...]:
        """The `Anchors` of each direction."""
        return (self,)

    @cached_property
    def rows_on_cpu(self) -> Tensor:
        """(A,) positions of the anchors among all anchors of the global batch, for random draws shared by ranks."""
        return self.places + self.num_before if self.num_before else self.places

    @cached_property
    def rows(self) -> Tensor:
        """(A,) the same on the anchors' device."""
        return upload(self.rows_on_cpu, self.temperature.device)

    @property
    def num_own(self) -> int:
        """A, how many anchors of this rank these are."""
        return len(self.ids)

    @property
    def num_candidates(self) -> int:
        """C, how many candidates an anchor has."""
        return len(self.candidate_ids)

    @property
    def num_rows(self) -> int:
        """How many anchors the global batch has."""
        return sum(self.sizes)

    @property
    def num_global(self) -> int:
        """How many anchors of a direction the global batch has, and how many candidates that are not mined."""
        return sum(self.sizes)

    @property
    def distinct_rows(self) -> bool:
        """Whether it is known that no anchor stands in two rows of the global batch."""
        return self.distinct and not self.views

    @cached_property
    def positive_similarities(self) -> Tensor:
        """(A,) cosine with the anchor's own positive, with gradient."""
        if self.mirror is not None:
            return self.mirror.positive_similarities
        with torch.set_grad_enabled(self.with_grad):
            return (self.embeddings * self.partners).sum(dim=1)

    @cached_property
    def positive_logits(self) -> Tensor:
        """(A,) s(x, y)/τ, with gradient."""
        if self.mirror is not None:
            return self.mirror.positive_logits
        with torch.set_grad_enabled(self.with_grad):
            return self.positive_similarities / self.temperature

    @property
    def positive_scores(self) -> Tensor:
        """(A,) s(x, y)/τ, read from the matrix of scores, with gradient."""
        return self.scores.gather(1, self.positive_place)[:, 0]

    @cached_property
    def positive_place(self) -> Tensor:
        """(A, 1) the candidates that are the anchors' own positives."""
        return self.positive_column[:, None]

    @cached_property
    def excluded(self) -> Tensor:
        """(A, C) true where a candidate is no negative of the anchor."""
        known = listed(self.positive_ids, self.candidate_ids)
        return known if self.guide is None else known | self.guide.of_candidates()

    @cached_property
    def allowed(self) -> Tensor:
        """(A, C) true where a candidate is a negative of the anchor."""
        return ~self.excluded

    @cached_property
    def similarities(self) -> Tensor:
        """(A, C) cosines with every candidate, with gradient."""
        with torch.set_grad_enabled(self.with_grad):
            if (transposed := self._transposed) is not None:
                return transposed.similarities.T
            return self.embeddings @ self.candidates.T

    @cached_property
    def scores(self) -> Tensor:
        """(A, C) s/τ with every candidate, with gradient."""
        with torch.set_grad_enabled(self.with_grad):
            if (transposed := self._transposed) is not None:
                return transposed.scores.T
            return self.similarities / self.temperature

    @cached_property
    def logits(self) -> Tensor:
        """(A, C) s/τ with gradient, -inf where a candidate is no negative."""
        with torch.set_grad_enabled(self.with_grad):
            if self.distinct_rows:
                return self.scores.scatter(1, self.positive_place, -torch.inf)
            return self.scores.masked_fill(self.excluded, -torch.inf)

    @property
    def logits_with_positive(self) -> Tensor:
        """(A, C) s/τ with gradient, -inf where a candidate is neither a negative nor the anchor's own positive."""
        if self.distinct_rows:
            return self.scores
        others = self.excluded.scatter(1, self.positive_place, False)
        with torch.set_grad_enabled(self.with_grad):
            return self.scores.masked_fill(others, -torch.inf)

    @cached_property
    def num_negatives(self) -> Tensor:
        """(A,) how many candidates are negatives."""
        if self.distinct:
            return torch.full_like(self.ids, self.num_global - (2 if self.views else 1))
        with torch.no_grad():
            return self.by_rows(lambda block: block.excluded.shape[1] - block.excluded.sum(dim=1))

    @property
    def all_have_negatives(self) -> bool:
        """Whether it is known that no anchor is without."""
        return self.distinct and self.num_global > (2 if self.views else 1)

    @cached_property
    def log_num_negatives(self) -> Tensor | float:
        """(A,) log of how many candidates are negatives, 0 without any; a number where it is known to be the same."""
        if self.distinct:
            return math.log(max(self.num_global - (2 if self.views else 1), 1))
        return self.num_negatives.clamp(min=1).to(self.embeddings.dtype).log()

    @property
    def log_mean_exp(self) -> Tensor:
        """(A,) log of the mean of exp(s/τ) over the negatives, with gradient; -inf without any."""
        return torch.logsumexp(self.logits, dim=1) - self.log_num_negatives

    def hides(self, items: Tensor) -> Tensor:
        """(A, n) true where an item (n,) of the candidates' whole side is no negative; with views an item is a view:
        2·id is an image's left one, 2·id + 1 its right one."""
        known = listed(self.positive_ids, items // 2 if self.views else items)
        return known if self.guide is None else known | self.guide.of_items(items)

    def allows_each(self, items: Tensor) -> Tensor:
        """(A,) whether items (A,), one of each anchor, are negatives; of -1, which stands for none, anything."""
        ids = items // 2 if self.views else items
        if self.positive_ids.shape[1] == 1:
            allowed = ids != self.positive_ids[:, 0]
        else:
            allowed = (ids[:, None] != self.positive_ids).all(dim=1)
        if self.directions[0].guide is None:
            return allowed

        def judged(of: Anchors, items: Tensor) -> Tensor:
            assert of.guide is not None
            return of.guide.of_each(items)

        return allowed & ~self.by_direction(judged, items)

    @property
    def _transposed(self) -> Anchors | None:
        """The other direction where it has the same similarities: one process, and no mined negatives."""
        other = self.mirror
        same = other is not None and other.candidates is self.embeddings and other.embeddings is self.candidates
        return other if same else None


class BothDirections(Anchors):
    """The anchors of both directions as one, first the left ones, with half the operations of a small batch.

    What has a row per anchor is joined when somebody asks for it; what belongs to a side, its ids, tables, and the
    candidates, is found in the two `directions`, whose rows `by_direction` hands out.

    Args:
        left, right: of the same pairs, with as many candidates.
    """

    _BY_ROW = ("ids", "places", "embeddings", "partners", "positive_column", "positive_ids")

    def __init__(self, left: Anchors, right: Anchors) -> None:
        self._halves = (left, replace(right, num_before=left.num_global))
        self.sizes, self.temperature, self.with_grad = left.sizes, left.temperature, left.with_grad
        self.distinct, self.views, self.mirror, self.known = left.distinct and right.distinct, False, None, None

    def __getattr__(self, name: str) -> Tensor:
        if name not in self._BY_ROW:
            raise AttributeError(name)
        left, right = (getattr(half, name) for half in self._halves)
        if name == "positive_ids" and left.shape[1] != right.shape[1]:
            width = max(left.shape[1], right.shape[1])
            left, right = (pad(of, (0, width - of.shape[1]), value=PADDING) for of in (left, right))
        setattr(self, name, torch.cat([left, right]))
        return self.__dict__[name]

    def by_rows(self, function: Callable[..., Rows], *tensors: Tensor, row_entries: int | None = None) -> Rows:
        # One after the other, both directions would hold as much until the backward pass.
        if self.num_own // 2 * (row_entries or self.num_candidates) <= self.block_entries:
            return function(self, *tensors)

        def rows_of(half: Anchors, *tensors: Tensor) -> Rows:
            return half.by_rows(function, *tensors, row_entries=row_entries)

        return self.by_direction(rows_of, *tensors)

    def by_direction(self, function: Callable[..., Rows], *tensors: Tensor) -> Rows:
        chunks = [tensor.chunk(2) for tensor in tensors]
        return joined([function(half, *(chunk[n] for chunk in chunks)) for n, half in enumerate(self._halves)])

    @property
    def directions(self) -> tuple[Anchors, ...]:
        return self._halves

    @cached_property
    def rows_on_cpu(self) -> Tensor:
        return torch.cat([half.rows_on_cpu for half in self._halves])

    @property
    def num_own(self) -> int:
        return 2 * len(self._halves[0].ids)

    @property
    def num_candidates(self) -> int:
        return len(self._halves[0].candidate_ids)

    @property
    def num_rows(self) -> int:
        return 2 * self.num_global

    @cached_property
    def positive_similarities(self) -> Tensor:
        return torch.cat([half.positive_similarities for half in self._halves])

    @cached_property
    def positive_logits(self) -> Tensor:
        return torch.cat([half.positive_logits for half in self._halves])

    @cached_property
    def excluded(self) -> Tensor:
        return torch.cat([half.excluded for half in self._halves])

    @cached_property
    def similarities(self) -> Tensor:
        with torch.set_grad_enabled(self.with_grad):
            return torch.cat([half.similarities for half in self._halves])

    @cached_property
    def scores(self) -> Tensor:
        with torch.set_grad_enabled(self.with_grad):
            return torch.cat([half.scores for half in self._halves])


def joined(parts: list[Any]) -> Any:
    """Tensors (a, ...), or tuples of such, one after the other; None for None."""
    if parts[0] is None or len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def listed(ids: Tensor, candidate_ids: Tensor) -> Tensor:
    """(A, C): whether a candidate's id (C,) stands in the anchor's list (A, K); -1 stands for no id. Or with further
    dimensions first, the same of both."""
    if ids.shape[-1] == 1:
        return ids == (candidate_ids if ids.dim() == 2 else candidate_ids[..., None, :])
    if ids.dim() > 2:
        return torch.stack([listed(*of) for of in zip(ids, candidate_ids, strict=True)])
    if not len(candidate_ids):
        return torch.zeros(len(ids), 0, dtype=torch.bool, device=ids.device)
    # Every id of a list is looked up among the sorted candidates, and marks the first of its copies there.
    num_candidates = len(candidate_ids)
    ordered = candidate_ids.sort().values
    place = torch.searchsorted(ordered, ids).clamp(max=num_candidates - 1)
    place = torch.where(ordered[place] == ids, place, num_candidates)
    marked = torch.zeros(len(ids), num_candidates + 1, dtype=torch.bool, device=ids.device).scatter_(1, place, True)
    return marked[:, torch.searchsorted(ordered, candidate_ids)]


def weighted_sum(weights: Tensor, scores: Tensor) -> Tensor:
    """(A,) Σ_c weights·scores over candidates; its gradient is the weighted gradient of the scores.

    Args:
        weights: (A, C), used as constants, no gradient flows through a weight; zero where masked.
        scores: (A, C), finite everywhere.
    """
    return ((weights.detach() if weights.requires_grad else weights) * scores).sum(dim=1)


def refuse_second_derivatives() -> None:
    """Called in a backward pass: its gradient takes weights for constants, so that its own derivative would be wrong.

    torch's `once_differentiable` lets that pass where the incoming gradient is a constant, as that of a loss is.
    """
    if torch.is_grad_enabled():
        raise DualencError("an objective has no second derivatives; call backward without create_graph")


class WithGradient(torch.autograd.Function):
    """`WithGradient.apply(value, scores, weights)`: losses (A,) with a value (A,) of their own, whose gradient with
    respect to scores (A, C) or (A,) is weights of that shape, besides that of the value; weights are constants, so that
    there is no second derivative."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, scores: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        refuse_second_derivatives()
        (weights,), (of_loss,) = ctx.saved_tensors, grad_outputs
        return of_loss, (of_loss if weights.dim() == 1 else of_loss[:, None]) * weights, None


@dataclass(frozen=True)
class Pairs:
    """The pairs of a batch, checked and in full precision: b of this rank, and all P.

    Attributes:
        left, right: (b, D) this rank's embeddings.
        left_id, right_id: (b,) their ids.
        left_positives, right_positives: (b, K) further ids of the opposite side that are positive with each row, padded
            with -1; None without any.
        all_left, all_right: (P, D) embeddings of all ranks.
        all_left_id, all_right_id: (P,) their ids.
        negatives, negative_id: (n, D) and (n,) mined right items of all ranks.
        sizes: number of pairs on every rank.
        left_copies, right_copies: how many pairs of the batch share one left item, at most; one right item.
        on_cpu: all_left_id and all_right_id on the CPU, where asked for.
        guide: what a guide says of them; None without one.
    """

    left: Tensor
    right: Tensor
    left_id: Tensor
    right_id: Tensor
    left_positives: Tensor | None
    right_positives: Tensor | None
    all_left: Tensor
    all_right: Tensor
    all_left_id: Tensor
    all_right_id: Tensor
    negatives: Tensor
    negative_id: Tensor
    sizes: list[int]
    left_copies: int
    right_copies: int
    on_cpu: tuple[Tensor, Tensor] | None = None
    guide: PairGuide | None = None

    def rows(self) -> tuple[Tensor, Tensor]:
        """(b,) positions of this rank's pairs in the global batch, on the device and on the CPU."""
        start = sum(self.sizes[: distributed.rank()])
        rows = torch.arange(start, start + len(self.left_id))
        return upload(rows, self.left_id.device), rows

    def without_mined(self) -> Pairs:
        """The same, as if no negatives were mined."""
        if not len(self.negative_id):
            return self
        guide = None if self.guide is None else self.guide.without_mined()
        return replace(self, negatives=self.negatives[:0], negative_id=self.negative_id[:0], guide=guide)

    def detached(self, left: Tensor, right: Tensor) -> Pairs:
        """The same without gradient, with copies (b, D) of this rank's embeddings."""
        alone = self.all_left is self.left
        return replace(
            self,
            left=left,
            right=right,
            all_left=left if alone else self.all_left.detach(),
            all_right=right if alone else self.all_right.detach(),
            negatives=self.negatives.detach(),
        )


def pair_anchors(pairs: Pairs, temperature: Tensor) -> Iterator[Anchors]:
    """Two towers: left anchors against all right items (and mined negatives), then right against left."""
    (rows, rows_on_cpu), mined = pairs.rows(), len(pairs.negative_id) > 0
    once = pairs.left_copies <= 1 and pairs.right_copies <= 1 and pairs.guide is None

    def known(anchors: Tensor, candidates: Tensor, mined: bool = False) -> KnownIds:
        return KnownIds(anchors[rows_on_cpu], anchors, torch.arange(len(anchors)), None if mined else candidates)

    left_id, right_id, all_left_id, all_right_id = pairs.left_id, pairs.right_id, pairs.all_left_id, pairs.all_right_id
    left = Anchors(
        side="left",
        candidate_side="right",
        ids=left_id,
        places=rows_on_cpu,
        sizes=pairs.sizes,
        embeddings=pairs.left,
        partners=pairs.right,
        positive_column=rows,
        candidates=torch.cat([pairs.all_right, pairs.negatives]) if mined else pairs.all_right,
        candidate_ids=torch.cat([all_right_id, pairs.negative_id]) if mined else all_right_id,
        positive_ids=known_positives(
            left_id, right_id, all_left_id, all_right_id, pairs.left_copies, pairs.left_positives
        ),
        known=known(*pairs.on_cpu, mined) if pairs.on_cpu else None,
        temperature=temperature,
        distinct=once and not mined and pairs.left_positives is None,
        guide=None if pairs.guide is None else pairs.guide.of_side("left"),
    )
    yield left
    yield replace(
        left,
        side="right",
        candidate_side="left",
        ids=right_id,
        embeddings=pairs.right,
        partners=pairs.left,
        candidates=pairs.all_left,
        candidate_ids=all_left_id,
        positive_ids=known_positives(
            right_id, left_id, all_right_id, all_left_id, pairs.right_copies, pairs.right_positives
        ),
        distinct=once and pairs.right_positives is None,
        mirror=left,
        guide=None if pairs.guide is None else pairs.guide.of_side("right"),
        known=known(*pairs.on_cpu[::-1]) if pairs.on_cpu else None,
    )


def view_anchors(pairs: Pairs, temperature: Tensor) -> Iterator[Anchors]:
    """Two views of each image: 2b anchors against the 2P views of the global batch."""
    (rows, rows_on_cpu), total = pairs.rows(), sum(pairs.sizes)
    ids, all_ids = pairs.left_id, pairs.all_left_id
    further = (pairs.left_positives, pairs.right_positives)
    positives, known = known_positives(ids, ids, all_ids, all_ids, 1, *further), None
    if pairs.on_cpu is not None:
        every, of_ranks = pairs.on_cpu[0], torch.arange(total).split(pairs.sizes)
        all_rows = torch.cat([half for of in of_ranks for half in (of, of + total)])
        known = KnownIds(every[rows_on_cpu].repeat(2), every[all_rows % total], all_rows, every.repeat(2))
    yield Anchors(
        side="left",
        candidate_side="left",
        ids=torch.cat([ids, ids]),
        places=torch.cat([rows_on_cpu, rows_on_cpu + total]),
        sizes=[2 * size for size in pairs.sizes],
        embeddings=torch.cat([pairs.left, pairs.right]),
        partners=torch.cat([pairs.right, pairs.left]),
        positive_column=torch.cat([rows + total, rows]),
        candidates=torch.cat([pairs.all_left, pairs.all_right]),
        candidate_ids=torch.cat([all_ids, all_ids]),
        positive_ids=torch.cat([positives, positives]),
        known=known,
        temperature=temperature,
        views=True,
        distinct=pairs.left_copies <= 1 and all(more is None for more in further) and pairs.guide is None,
        guide=None if pairs.guide is None else pairs.guide.of_views(),
    )


def known_positives(
    ids: Tensor, partners: Tensor, all_ids: Tensor, all_partners: Tensor, copies: int, *further: Tensor | None
) -> Tensor:
    """(A, K) distinct ids that are no negatives of the anchors, padded with -1.

    Args:
        ids, partners: (A,) the anchors' items, and those that they are paired with.
        all_ids, all_partners: (P,) both items of every pair of the batch.
        copies: an item stands in at most so many pairs, each of which tells a positive.
        further: (A, K) more positives, padded with -1.
    """
    known = partners[:, None]
    if copies > 1:
        ordered, order = all_ids.sort(stable=True)
        place = torch.searchsorted(ordered, ids)[:, None] + torch.arange(copies, device=ids.device)
        inside = place.clamp(max=len(ordered) - 1)
        shared = (ordered[inside] == ids[:, None]) & (place < len(ordered))
        known = torch.where(shared, all_partners[order[inside]], PADDING)
    given = [more for more in further if more is not None]
    if copies <= 1 and not given:
        return known
    known = torch.cat([*given, known], dim=1).sort(dim=1).values if given else known.sort(dim=1).values
    repeated = torch.zeros_like(known, dtype=torch.bool)
    repeated[:, 1:] = known[:, 1:] == known[:, :-1]
    return known.masked_fill(repeated, PADDING)
