"""What all objectives share: checking, precision, both directions or views, scaling over ranks, metrics.

An objective's own file holds its equation: `anchor_losses` turns `Anchors` into one loss per anchor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.objectives.anchors import (
    Anchors,
    Batch,
    Side,
    log_mean_exp,
    pair_anchors,
    view_anchors,
)
from dualenc.objectives.positives import PADDING

Encode = Callable[[Side, Tensor], Tensor]


class ObjectiveOutput(NamedTuple):
    """What an objective returns.

    `loss` is a scalar: its value is the objective's estimate of the loss, its gradient the objective's gradient. On
    several ranks the average over ranks of the loss (and of the gradients) is that of the global batch.
    `metrics` are detached scalars for logging, averaged over this rank's anchors.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


class AnchorLosses(NamedTuple):
    """Per anchor (A,): `surrogate` carries the gradient, `value` (no gradient) what is reported."""

    surrogate: Tensor
    value: Tensor


class Objective(nn.Module):
    """Base of all objectives of the global contrastive loss; usable in any training loop.

        criterion = SogCLR(num_left=m, temperature=0.07)
        out = criterion(left, right, left_id, right_id)
        out.loss.backward()

    Args:
        num_left: size of the left id space; needed by objectives that keep state per item.
        num_right: size of the right id space (the corpus); defaults to num_left.
        temperature: τ > 0 of the softmax over cosine similarities.
        learnable_temperature: learn log τ with the model.
        views: left and right are two views of one image (unimodal training): 2B anchors, one shared id space.
        seed: of the objective's own random generator.

    Raises:
        DualencError: an argument out of range; in `forward`, shapes or ids that do not fit, non-finite embeddings.
    """

    needs_num_left = False
    needs_encode = False
    num_neighbors = 0
    """How many neighbours of each item the objective wants to be told (`set_neighbors`) at the start of every epoch."""

    def __init__(
        self,
        *,
        num_left: int | None = None,
        num_right: int | None = None,
        temperature: float = 0.07,
        learnable_temperature: bool = False,
        views: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not (temperature > 0 and math.isfinite(temperature)):
            raise DualencError(f"{name}: temperature is {temperature}; it must be a positive number such as 0.07")
        if self.needs_num_left and num_left is None:
            raise DualencError(f"{name}: num_left is missing; pass the number of left items, e.g. len(pairs)")
        for argument, value in (("num_left", num_left), ("num_right", num_right)):
            if value is not None and value < 1:
                raise DualencError(f"{name}: {argument} is {value}; it must be at least 1")
        self.num_left = num_left
        self.num_right = num_left if num_right is None or views else num_right
        self.views = views
        self.seed = seed
        log_temperature = torch.tensor(math.log(temperature), dtype=torch.float64).float()
        self.log_temperature = nn.Parameter(log_temperature, requires_grad=learnable_temperature)

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
        return self.log_temperature.exp().clamp(min=1e-3)

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
    ) -> ObjectiveOutput:
        """The loss of this rank's part of a batch.

        Args:
            left, right: (b, D) unit-norm embeddings of the pairs; b may differ between ranks.
            left_id, right_id: (b,) integer ids in [0, num_left) and [0, num_right); without right_id pairs share
                one index. Items with equal ids are never negatives of one another's partners.
            encode: `encode(side, ids (n,)) -> (n, D)`, asked for items outside the batch by objectives that need
                them; honours `torch.is_grad_enabled()`. With views, "left" and "right" are an image's two views.
            left_positives: (b, K) right ids known to be relevant to each left item, padded with -1.
            right_positives: (b, K) left ids known to be relevant to each right item, padded with -1.
            negatives, negative_id: (n, D) and (n,) mined right items that join the candidates of left anchors.
        """
        given = (left_id, right_id, left_positives, right_positives, negatives, negative_id)
        batch = self._checked(left, right, *given)
        if self.needs_encode and encode is None:
            raise DualencError(
                f"{type(self).__name__}: encode is missing; pass encode(side, ids) -> (n, D) that embeds items by id"
            )
        encode = _as_called(encode, left.device.type)
        with torch.autocast(left.device.type, enabled=False):
            build = view_anchors if self.views else pair_anchors
            # One direction after the other: what the first one held is gone before the second begins.
            directions = build(batch, self.temperature.to(batch.left.dtype))
            outputs = [self._direction_loss(anchors, encode) for anchors in directions]
        loss = torch.stack([loss for loss, _ in outputs]).mean()
        metrics = {k: torch.stack([m[k] for _, m in outputs]).mean() for k in outputs[0][1]}
        return ObjectiveOutput(loss, metrics)

    def anchor_losses(self, anchors: Anchors, encode: Encode | None) -> AnchorLosses:
        """One loss per anchor: the equation of the objective."""
        raise TypeError(f"{type(self).__name__} does not define anchor_losses")

    def set_progress(self, fraction: float) -> None:
        """Tell how much of the training is done, in [0, 1]; objectives with schedules listen."""

    def set_counts(self, left_counts: Tensor, right_counts: Tensor) -> None:
        """Tell how many pairs each left (num_left,) and right (num_right,) item is in; the oracle listens."""

    def set_neighbors(self, side: Side, ids: Tensor) -> None:
        """Tell which of the other side's items are near each item of a side, (m, k); chains listen."""

    def num_items(self, side: Side) -> int | None:
        """Size of a side's id space."""
        return self.num_left if side == "left" else self.num_right

    def log_corpus_size(self, anchors: Anchors) -> Tensor:
        """(A,) log of the number of negatives an anchor has in the whole corpus; in the batch, if N is unknown."""
        if anchors.log_corpus_size is None:
            anchors.log_corpus_size = self._log_corpus_size(anchors)
        return anchors.log_corpus_size

    def _log_corpus_size(self, anchors: Anchors) -> Tensor:
        total = self.num_items(anchors.candidate_side)
        if total is None:
            return anchors.num_negatives.clamp(min=1).to(anchors.embeddings.dtype).log()
        ordered = anchors.positive_ids.sort(dim=1).values
        distinct = (ordered != PADDING) & (ordered != ordered.roll(1, dims=1))
        distinct[:, 0] = ordered[:, 0] != PADDING
        count = (total - distinct.sum(dim=1)).clamp(min=1) * (2 if anchors.views else 1)
        return count.to(anchors.embeddings.dtype).log()

    def _direction_loss(self, anchors: Anchors, encode: Encode | None) -> tuple[Tensor, dict[str, Tensor]]:
        losses = self.anchor_losses(anchors, encode)
        per_anchor = losses.surrogate + (losses.value - losses.surrogate).detach()
        scale = distributed.world_size() / max(anchors.num_global, 1)
        return per_anchor.sum() * scale, self._metrics(anchors)

    @torch.no_grad()
    def _metrics(self, anchors: Anchors) -> dict[str, Tensor]:
        """The same for every objective, so that runs can be compared: in-batch estimates of L(θ) and accuracy."""
        positive = anchors.positive_logits
        has_negatives = anchors.num_negatives > 0
        log_mean, hardest = anchors.statistics(_mean_and_hardest)
        estimate = torch.where(has_negatives, -positive + log_mean + self.log_corpus_size(anchors), 0.0)
        return {
            "batch_estimate": estimate.sum() / has_negatives.sum().clamp(min=1),
            "accuracy": (positive > hardest).to(positive.dtype).mean().nan_to_num(),
            "positive_similarity": anchors.positive_similarities.mean().nan_to_num(),
            "temperature": anchors.temperature.detach(),
        }

    def _checked(
        self,
        left: Tensor,
        right: Tensor,
        left_id: Tensor,
        right_id: Tensor | None,
        left_positives: Tensor | None,
        right_positives: Tensor | None,
        negatives: Tensor | None,
        negative_id: Tensor | None,
    ) -> Batch:
        right_id = left_id if right_id is None else right_id
        nothing = left_id.new_full((len(left_id), 0), PADDING)
        negatives = right[:0] if negatives is None else negatives
        negative_id = right_id[:0] if negative_id is None else negative_id
        embeddings = {"left": left, "right": right, "negatives": negatives}
        ids = {"left_id": (left_id, self.num_left), "right_id": (right_id, self.num_right)}
        ids["negative_id"] = negative_id, self.num_right
        self._check_embeddings(embeddings)
        if left.shape != right.shape or negatives.shape[1:] != right.shape[1:]:
            self._fail("left, right", f"have shapes {tuple(left.shape)}, {tuple(right.shape)}; both must be (b, D)")
        for of, (name, (values, _)) in zip(embeddings.values(), ids.items(), strict=True):
            self._check_ids(name, values, of)
        self._check_values(embeddings, ids)
        if self.views and right_id is not left_id and not torch.equal(left_id, right_id):
            self._fail("right_id", "differs from left_id; with views=True both views carry the image's id")
        precision = torch.float64 if left.dtype == torch.float64 else torch.float32
        return Batch(
            left=left.to(precision),
            right=right.to(precision),
            left_id=left_id,
            right_id=right_id,
            left_positives=nothing if left_positives is None else left_positives,
            right_positives=nothing if right_positives is None else right_positives,
            negatives=negatives.to(precision),
            negative_id=negative_id,
        )

    def _check_embeddings(self, embeddings: dict[str, Tensor]) -> None:
        for name, tensor in embeddings.items():
            if tensor.dim() != 2 or not tensor.is_floating_point():
                self._fail(
                    name,
                    f"has shape {tuple(tensor.shape)} ({tensor.dtype}); it must be a float (b, D) tensor",
                )

    def _check_ids(self, name: str, ids: Tensor, of: Tensor) -> None:
        if ids.shape != of.shape[:1] or ids.is_floating_point():
            self._fail(name, f"has shape {tuple(ids.shape)} ({ids.dtype}); it must hold {len(of)} integer ids")
        if ids.device != of.device:
            self._fail(name, f"is on {ids.device}, the embeddings are on {of.device}; move it there")

    def _check_values(self, embeddings: dict[str, Tensor], ids: dict[str, tuple[Tensor, int | None]]) -> None:
        """All values in one look: on a GPU each look waits for the work before it."""
        named = {name: (values, limit) for name, (values, limit) in ids.items() if len(values)}
        # A norm is finite when all entries are, and takes one pass.
        norms = [torch.linalg.vector_norm(tensor.detach()).double() for tensor in embeddings.values()]
        bounds = [bound.double() for values, _ in named.values() for bound in values.aminmax()]
        found = torch.stack([*norms, *bounds]).tolist()
        for name, norm in zip(embeddings, found, strict=False):
            if not math.isfinite(norm):
                self._fail(name, "holds NaN or infinite values; lower the learning rate or check the encoder")
        lows, highs = found[len(norms) :: 2], found[len(norms) + 1 :: 2]
        for (name, (_, limit)), low, high in zip(named.items(), lows, highs, strict=True):
            if low < 0 or (limit is not None and high >= limit):
                most = limit if limit is not None else "N"
                self._fail(name, f"holds ids in [{low:.0f}, {high:.0f}]; they must lie in [0, {most})")

    def _fail(self, argument: str, problem: str) -> None:
        raise DualencError(f"{type(self).__name__}: {argument} {problem}")


def _mean_and_hardest(anchors: Anchors) -> tuple[Tensor, ...]:
    """(A,) log of the mean of exp(s/τ) over the negatives, and (A,) the largest s/τ."""
    logits = anchors.logits
    return log_mean_exp(logits), logits.amax(dim=1) if logits.shape[1] else anchors.positive_logits


def _as_called(encode: Encode | None, device: str) -> Encode | None:
    """`encode` under the autocast setting of the caller: objectives compute in full precision, encoders do not."""
    if encode is None or not torch.is_autocast_enabled(device):
        return encode
    dtype = torch.get_autocast_dtype(device)

    def wrapped(side: Side, ids: Tensor) -> Tensor:
        with torch.autocast(device, dtype=dtype):
            return encode(side, ids)

    return wrapped
