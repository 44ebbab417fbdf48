"""The exact global loss of a model on a finite set of pairs, the squared norm of its gradient, and its embeddings.

Source: Yau et al. 2024 (arXiv:2404.10575), Eq. 1, Eq. 4 and §4.5 (Figure 7). Every anchor is compared with all
negatives of the set, in chunks: neither all similarities nor all activations are in memory at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dualenc.errors import DualencError
from dualenc.evaluation.probe import check_labels, unit_rows
from dualenc.types import Inputs, Integers, Vectors

_BLOCK = 1024
BIN_EDGES: npt.NDArray[np.float64] = np.linspace(-1, 1, 101)


def alignment(left: Vectors, right: Vectors, power: float = 2) -> float:
    """Mean of ‖x − y‖^α over positive pairs of unit vectors (Wang & Isola 2020, Eq. 7); 0 is perfect.

    Args:
        left: (M, D) embeddings; scaled to unit norm here.
        right: (M, D) embedding of the positive of each.
        power: α.

    Raises:
        DualencError: the shapes differ.
    """
    if left.shape != right.shape:
        raise DualencError(f"left has shape {left.shape}, right {right.shape}; row i of each must be a pair")
    difference = unit_rows(left, "left embeddings") - unit_rows(right, "right embeddings")
    return float(np.mean(np.linalg.norm(difference.astype(np.float64), axis=1) ** power))


def uniformity(embeddings: Vectors, temperature: float = 2) -> float:
    """log of the mean of exp(−t‖x − y‖²) over pairs of different rows (Wang & Isola 2020, Eq. 8); lower is more even.

    Args:
        embeddings: (N, D), N ≥ 2; scaled to unit norm here.
        temperature: t.

    Raises:
        DualencError: fewer than two rows.
    """
    rows = unit_rows(embeddings, "embeddings")
    if len(rows) < 2:
        raise DualencError(f"{len(rows)} embedding; uniformity needs two or more")
    total = 0.0
    for _, similarities in _similarity_blocks(rows):
        squared_distances = 2 - 2 * similarities.astype(np.float64)
        total += float(np.exp(-temperature * squared_distances).sum())
    # A row with itself adds exp(0) = 1 to the sum.
    return math.log((total - len(rows)) / (len(rows) * (len(rows) - 1)))


def effective_rank(embeddings: Vectors) -> float:
    """exp of the entropy of the normalised singular values (RankMe: Garrido et al. 2023, Eq. 1–2); D at most.

    Args:
        embeddings: (N, D), as they are: neither centred nor scaled.

    Raises:
        DualencError: not a matrix, or not finite.
    """
    rows = np.asarray(embeddings, dtype=np.float64)
    if rows.ndim != 2 or rows.size == 0 or not np.isfinite(rows).all():
        raise DualencError(f"embeddings of shape {rows.shape} have no rank; a matrix of finite numbers is needed")
    # The singular values of a tall matrix, through its (D, D) Gram matrix where that is much smaller.
    small = rows if min(rows.shape) == rows.shape[0] else np.linalg.qr(rows, mode="r")
    values = np.linalg.svd(small, compute_uv=False)
    if values.sum() == 0:
        return 0.0
    shares = values / values.sum()
    shares = shares[shares > 0]
    return float(np.exp(-np.sum(shares * np.log(shares))))


@dataclass(frozen=True)
class SimilarityHistogram:
    """How often each similarity occurs among positive and among negative pairs.

    Attributes:
        edges: (K + 1,) edges of the bins on [−1, 1].
        positives: (K,) number of positive pairs in each bin.
        negatives: (K,) number of negative pairs in each bin.
        positive_mean: mean cosine of the positive pairs.
        negative_mean: mean cosine of the negative pairs.
    """

    edges: npt.NDArray[np.float64]
    positives: npt.NDArray[np.int64]
    negatives: npt.NDArray[np.int64]
    positive_mean: float
    negative_mean: float

    @property
    def overlap(self) -> float:
        """Common area of the two histograms, each scaled to area 1: 0 if disjoint, 1 if equal."""
        positives = self.positives / self.positives.sum()
        negatives = self.negatives / self.negatives.sum()
        return float(np.minimum(positives, negatives).sum())

    def to_plain(self) -> dict[str, Any]:
        """The same as numbers and lists, for JSON."""
        plain = dict(vars(self))
        for name in ("edges", "positives", "negatives"):
            plain[name] = plain[name].tolist()
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> SimilarityHistogram:
        """Restore from `to_plain()`."""
        arrays: dict[str, Any] = {name: np.asarray(v) if isinstance(v, list) else v for name, v in plain.items()}
        return cls(**arrays)


def pair_similarities(
    left: Vectors,
    right: Vectors,
    left_id: Integers | None = None,
    right_id: Integers | None = None,
    left_positives: Integers | None = None,
) -> SimilarityHistogram:
    """Cosines of row i of `left` with row i of `right` (positives) and with every other row (negatives).

    Args:
        left: (M, D) embeddings; scaled to unit norm here.
        right: (M, D) embedding of the positive of each.
        left_id: (M,) ids: items of one id are never negatives of each other's partners. By default all rows differ.
        right_id: (M,) ids of the right side, in the same way.
        left_positives: (M, K) right ids that are positive with each left item, padded with −1.

    Raises:
        DualencError: the shapes differ, or there is no negative pair.
    """
    if left.shape != right.shape:
        raise DualencError(f"left has shape {left.shape}, right {right.shape}; row i of each must be a pair")
    rows = unit_rows(left, "left embeddings")
    columns = unit_rows(right, "right embeddings")
    left_group, right_group = (np.arange(len(rows)) if ids is None else np.asarray(ids) for ids in (left_id, right_id))
    listed = np.empty((len(rows), 0), np.int64) if left_positives is None else np.asarray(left_positives)
    none = np.zeros(0, np.float32)

    def parts() -> Iterator[tuple[Vectors, Vectors]]:
        yield np.sum(rows * columns, axis=1), none
        for start in range(0, len(rows), _BLOCK):
            block = slice(start, start + _BLOCK)
            same = (left_group[block, None] == left_group) | (right_group[block, None] == right_group)
            for column in listed[block].T:
                same |= column[:, None] == right_group
            yield none, (rows[block] @ columns.T)[~same]

    return _histogram(parts())


def label_similarities(embeddings: Vectors, labels: Integers) -> SimilarityHistogram:
    """Cosines of all pairs of different images, of equal label (positives) and of different label (negatives).

    These are the histograms of Robinson et al. 2021 (arXiv:2010.04592), Figures 3 and 4.

    Args:
        embeddings: (N, D); scaled to unit norm here.
        labels: (N,) class numbers from 0.

    Raises:
        DualencError: lengths differ, or there is no pair of one kind.
    """
    classes = check_labels(embeddings, labels, "test")
    rows = unit_rows(embeddings, "embeddings")

    def parts() -> Iterator[tuple[Vectors, Vectors]]:
        for start, similarities in _similarity_blocks(rows):
            numbers = np.arange(start, start + len(similarities))
            # Every pair once.
            later = np.arange(len(rows))[None, :] > numbers[:, None]
            same = classes[numbers][:, None] == classes[None, :]
            yield similarities[later & same], similarities[later & ~same]

    return _histogram(parts())


def _histogram(parts: Iterable[tuple[Vectors, Vectors]]) -> SimilarityHistogram:
    """Count similarities of positive and of negative pairs, part by part."""
    counts = np.zeros((2, len(BIN_EDGES) - 1), np.int64)
    sums = np.zeros(2)
    for part in parts:
        for kind, similarities in enumerate(part):
            # Rounding takes a cosine beyond ±1, out of the last bin.
            counts[kind] += np.histogram(np.clip(similarities, -1, 1), BIN_EDGES)[0]
            sums[kind] += similarities.sum(dtype=np.float64)
    totals = counts.sum(axis=1)
    for name, total in zip(("positive", "negative"), totals):
        if total == 0:
            raise DualencError(f"there is no {name} pair among these embeddings; give more images or classes")
    return SimilarityHistogram(BIN_EDGES, *counts, *(sums / totals).tolist())


def _similarity_blocks(rows: npt.NDArray[np.float32]) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """(n, N) cosines of consecutive unit rows with all of them, with the number of the first."""
    for start in range(0, len(rows), _BLOCK):
        yield start, rows[start : start + _BLOCK] @ rows.T


_MAX_ANCHORS = 512


@dataclass(frozen=True)
class FiniteSet:
    """M pairs by their ids; items of a pair are never negatives of each other.

    Attributes:
        left_id: (M,) id of each pair's left item.
        right_id: (M,) id of each pair's right item.
        left_positives: (M, K) right ids positive with each left item, padded with −1; by default only its own pairs'.
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
        pairs: The pairs and their positives.
        temperature: τ > 0.

    Returns:
        The loss, and its gradient with respect to `left` and to `right`, (M, D) each, all in float64.

    Raises:
        DualencError: shapes do not fit, embeddings are not finite, τ is not positive, or an anchor has no negative.
    """
    _check_embeddings(left, right, pairs, temperature)
    left = left.detach().double().requires_grad_()
    right = right.detach().double().requires_grad_()
    directions = (
        (left, right, pairs.left_positives, pairs.right_id),
        (right, left, pairs.right_positives, pairs.left_id),
    )
    total = 0.0
    for rows in torch.arange(len(pairs), device=pairs.left_id.device).split(_MAX_ANCHORS):
        same = (pairs.left_id[rows, None] == pairs.left_id) | (pairs.right_id[rows, None] == pairs.right_id)
        for anchors, others, listed, ids in directions:
            excluded = _excluded(same, rows, listed, ids)
            own = rows.to(left.device)
            positive = (anchors[own] * others[own]).sum(dim=1) / temperature
            candidates = others
            if pairs.views:
                # An image's own side brings negatives, too: the same views of other images.
                candidates = torch.cat([others, anchors])
                excluded = torch.cat([excluded, excluded], dim=1)
            logits = anchors[own] @ candidates.T / temperature
            logits = logits.masked_fill(excluded.to(left.device), -torch.inf)
            losses = torch.logsumexp(logits, dim=1) - positive
            part = losses.sum() / (2 * len(pairs))
            # Block by block, so that only one block of similarities is in memory.
            part.backward()
            total += part.item()
    assert left.grad is not None
    assert right.grad is not None
    return total, left.grad, right.grad


def _check_embeddings(left: Tensor, right: Tensor, pairs: FiniteSet, temperature: float) -> None:
    if left.shape != right.shape or left.dim() != 2 or len(left) != len(pairs):
        raise DualencError(
            f"embeddings have shapes {tuple(left.shape)} and {tuple(right.shape)}; "
            f"both must be ({len(pairs)}, dimension), one row for each pair"
        )
    if not (torch.isfinite(left).all() and torch.isfinite(right).all()):
        raise DualencError("the embeddings are not finite; did the training end in NaN?")
    if not temperature > 0:
        raise DualencError(f"temperature={temperature}: it must be above 0")


def _excluded(same: Tensor, rows: Tensor, listed: Tensor | None, ids: Tensor) -> Tensor:
    """(n, M): whether the other item of each pair is no negative of the anchors `rows` (n,)."""
    excluded = same.clone()
    if listed is not None:
        for column in listed[rows].unbind(dim=1):
            excluded |= column[:, None] == ids[None, :]
    without_negative = excluded.all(dim=1)
    if without_negative.any():
        row = int(rows[without_negative][0])
        raise DualencError(f"pair {row} has no negative in this set: all others are its positives; give more pairs")
    return excluded


class ExactPoint(NamedTuple):
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


def exact_gradient(
    model: nn.Module,
    encode: Callable[[str, Inputs], Tensor],
    left_chunks: Sequence[Inputs],
    right_chunks: Sequence[Inputs],
    pairs: FiniteSet,
    temperature: float,
) -> ExactPoint:
    """The exact loss of a model and the squared norm of its gradient with respect to the trainable weights.

    The set is encoded twice: without a graph for the loss, and then chunk by chunk to backpropagate the loss's gradient
    on the embeddings. Put the model into evaluation mode, so that no item's embedding depends on its batch.

    Args:
        model: The model; gradients of its weights are cleared.
        encode: `encode(side, inputs)` gives (n, D) unit-norm embeddings, with a graph where gradients are enabled.
        left_chunks: Prepared inputs of the M left items, chunk by chunk, in order.
        right_chunks: The same of the right items.
        pairs: The pairs and their positives.
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
            # A tower whose weights are all frozen gives embeddings without a graph.
            if embeddings.requires_grad:
                embeddings.backward(gradient[start : start + len(embeddings)].to(embeddings))
            start += len(embeddings)
    squared = 0.0
    for weight in model.parameters():
        # Fixed weights have no gradient.
        if weight.grad is not None:
            squared += float(weight.grad.double().square().sum())
    model.zero_grad(set_to_none=True)
    return ExactPoint(loss, squared, left.float().cpu().numpy(), right.float().cpu().numpy())
