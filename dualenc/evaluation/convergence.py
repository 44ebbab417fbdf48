"""The exact global loss of a model on a finite set of pairs, and the squared norm of its gradient.

Source: emc2.txt Eq. 1, Eq. 4 and §4.5 (Figure 7). Every anchor is compared with all negatives of the set, in chunks:
neither the similarities nor the encoder's activations of the whole set are in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dualenc.errors import DualencError

Inputs = dict[str, Tensor]
_ANCHORS_AT_ONCE = 512


@dataclass(frozen=True)
class FiniteSet:
    """M pairs by their ids: whose items are never negatives of one another.

    Attributes:
        left_id: (M,) id of each pair's left item.
        right_id: (M,) id of each pair's right item.
        left_positives: (M, K) right ids positive with each left item, padded with −1; of `left_id` alone by default.
        right_positives: (M, K') left ids positive with each right item, padded with −1.
        views: left and right are two views of one image: 2M anchors, the 2M − 2 views of other images negatives.
    """

    left_id: Tensor
    right_id: Tensor
    left_positives: Tensor | None = None
    right_positives: Tensor | None = None
    views: bool = False

    def __post_init__(self) -> None:
        if self.left_id.shape != self.right_id.shape or self.left_id.dim() != 1 or not len(self.left_id):
            raise DualencError(
                f"left_id has shape {tuple(self.left_id.shape)}, right_id {tuple(self.right_id.shape)}; "
                "give one id of each side for every pair"
            )
        if self.views and not torch.equal(self.left_id, self.right_id):
            raise DualencError("right_id differs from left_id; both views of an image carry the image's id")

    def __len__(self) -> int:
        return len(self.left_id)


def exact_loss(left: Tensor, right: Tensor, pairs: FiniteSet, temperature: float) -> tuple[float, Tensor, Tensor]:
    """L(θ) = mean of −s(x, y)/τ + log Σ_z exp(s(x, z)/τ) over anchors x, and its gradient on the embeddings.

    z runs over all negatives of x among the pairs: a right item that is in three pairs counts three times. With two
    towers it is the mean of both directions.

    Args:
        left: (M, D) unit-norm embeddings.
        right: (M, D) unit-norm embedding of the positive of each.
        pairs: Who belongs to whom.
        temperature: τ > 0.

    Returns:
        The loss, and its gradient with respect to `left` and to `right`, (M, D) each, all in float64.

    Raises:
        DualencError: shapes do not fit, embeddings are not finite, τ is not positive, or an anchor has no negative.
    """
    _check(left, right, pairs, temperature)
    left = left.detach().double().requires_grad_()
    right = right.detach().double().requires_grad_()
    total = 0.0
    for losses in _anchor_losses(left, right, pairs, temperature):
        part = losses.sum() / (2 * len(pairs))
        part.backward()
        total += part.item()
    assert left.grad is not None
    assert right.grad is not None
    return total, left.grad, right.grad


def exact_gradient(
    model: nn.Module,
    encode: Callable[[str, Inputs], Tensor],
    left_chunks: Sequence[Inputs],
    right_chunks: Sequence[Inputs],
    pairs: FiniteSet,
    temperature: float,
) -> ExactPoint:
    """The exact loss of a model and the squared norm of its gradient with respect to the trainable weights.

    The set is encoded without a graph; the loss gives the gradient on the embeddings; then chunk after chunk is
    encoded once more and the gradient sent through. The model is used as it is: put it into evaluation mode, so that
    no item's embedding depends on the items beside it.

    Args:
        model: Whose weights; their gradients are cleared.
        encode: `encode(side, inputs)` gives (n, D) unit-norm embeddings, with a graph where gradients are enabled.
        left_chunks: Prepared inputs of the M left items, chunk by chunk, in order.
        right_chunks: The same of the right items.
        pairs: Who belongs to whom.
        temperature: τ > 0.

    Raises:
        DualencError: what `exact_loss` raises.
    """
    sides = (("left", left_chunks), ("right", right_chunks))
    with torch.no_grad():
        left, right = (torch.cat([encode(side, inputs) for inputs in chunks]) for side, chunks in sides)
    loss, *gradients = exact_loss(left, right, pairs, temperature)
    model.zero_grad(set_to_none=True)
    for (side, chunks), gradient in zip(sides, gradients):
        start = 0
        for inputs in chunks:
            embeddings = encode(side, inputs)
            if embeddings.requires_grad:  # not so for a tower whose weights are all fixed
                embeddings.backward(gradient[start : start + len(embeddings)].to(embeddings))
            start += len(embeddings)
    squared = squared_norm(parameter.grad for parameter in model.parameters())
    model.zero_grad(set_to_none=True)
    return ExactPoint(loss, squared, left.float().cpu().numpy(), right.float().cpu().numpy())


@dataclass(frozen=True)
class ExactPoint:
    """One model on the curve of a run.

    Attributes:
        loss: L(θ).
        squared_gradient_norm: ‖∇L(θ)‖².
        left: (M, D) embeddings of the left items.
        right: (M, D) of the right items.
    """

    loss: float
    squared_gradient_norm: float
    left: npt.NDArray[np.float32]
    right: npt.NDArray[np.float32]


def squared_norm(gradients: Iterable[Tensor | None]) -> float:
    """Sum of the squares of all entries, in float64; a missing gradient counts as zero."""
    return sum(float(gradient.double().square().sum()) for gradient in gradients if gradient is not None)


def _anchor_losses(left: Tensor, right: Tensor, pairs: FiniteSet, temperature: float) -> Iterator[Tensor]:
    """Losses of all 2M anchors, some at a time, each with its own graph down to the embeddings."""
    for rows in torch.arange(len(pairs), device=left.device).split(_ANCHORS_AT_ONCE):
        negative = _negatives(pairs, rows.to(pairs.left_id.device)).to(left.device)
        for anchors, others, is_negative in ((left, right, negative[0]), (right, left, negative[1])):
            positive = (anchors[rows] * others[rows]).sum(dim=1) / temperature
            # With views an image's own side brings negatives too: the same views of other images.
            candidates = torch.cat([others, anchors]) if pairs.views else others
            logits = anchors[rows] @ candidates.T / temperature
            allowed = torch.cat([is_negative, is_negative], dim=1) if pairs.views else is_negative
            yield torch.logsumexp(logits.masked_fill(~allowed, -torch.inf), dim=1) - positive


def _negatives(pairs: FiniteSet, rows: Tensor) -> Tensor:
    """(2, n, M): whether each pair's right item is a negative of these left anchors, and the reverse."""
    same = (pairs.left_id[rows, None] == pairs.left_id) | (pairs.right_id[rows, None] == pairs.right_id)
    masks = []
    for listed, ids in ((pairs.left_positives, pairs.right_id), (pairs.right_positives, pairs.left_id)):
        positive = same.clone()
        for column in () if listed is None else listed[rows].unbind(dim=1):
            positive |= column[:, None] == ids[None, :]
        if positive.all(dim=1).any():
            row = int(rows[positive.all(dim=1)][0])
            raise DualencError(f"pair {row} has no negative in this set: all others are its positives; give more pairs")
        masks.append(~positive)
    return torch.stack(masks)


def _check(left: Tensor, right: Tensor, pairs: FiniteSet, temperature: float) -> None:
    if left.shape != right.shape or left.dim() != 2 or len(left) != len(pairs):
        raise DualencError(
            f"embeddings have shapes {tuple(left.shape)} and {tuple(right.shape)}; "
            f"both must be ({len(pairs)}, dimension), one row for each pair"
        )
    if not (torch.isfinite(left).all() and torch.isfinite(right).all()):
        raise DualencError("the embeddings are not finite; did the training end in NaN?")
    if not temperature > 0:
        raise DualencError(f"temperature={temperature}: it must be above 0")
