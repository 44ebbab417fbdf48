"""The exact global loss of a model on a finite set of pairs, the squared norm of its gradient, and its embeddings.

Source: Yau et al. 2024 (arXiv:2404.10575), Eq. 1, Eq. 4 and §4.5 (Figure 7).
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

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.evaluation.objectives import FrozenPairs
from dualenc.evaluation.probe import unit_rows
from dualenc.types import Inputs, Integers, Side, Vectors

_BLOCK = 1024
_EDGES: npt.NDArray[np.float64] = np.linspace(-1, 1, 101)
_COUNTS = ("positives", "negatives")


def alignment(left: Vectors, right: Vectors, power: float = 2) -> float:
    """Mean of ‖x − y‖^α over positive pairs of unit vectors (Wang & Isola 2020, Eq. 7); 0 is perfect.

    Args:
        left, right: (M, D) embeddings of the pairs; scaled to unit norm here.
        power: α.
    """
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
    """
    rows = np.asarray(embeddings, dtype=np.float64)
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
        positives: (K,) number of positive pairs in each of K equal bins on [−1, 1].
        negatives: (K,) number of negative pairs in each bin.
        positive_mean: mean cosine of the positive pairs.
        negative_mean: mean cosine of the negative pairs.
    """

    positives: npt.NDArray[np.int64]
    negatives: npt.NDArray[np.int64]
    positive_mean: float
    negative_mean: float

    @property
    def edges(self) -> npt.NDArray[np.float64]:
        """(K + 1,) edges of the bins."""
        return np.linspace(-1, 1, len(self.positives) + 1)

    @property
    def overlap(self) -> float:
        """Common area of the two histograms, each scaled to area 1: 0 if disjoint, 1 if equal."""
        positives = self.positives / self.positives.sum()
        negatives = self.negatives / self.negatives.sum()
        return float(np.minimum(positives, negatives).sum())

    def merged(self, num_bins: int) -> SimilarityHistogram:
        """The same in fewer bins."""
        positives, negatives = (counts.reshape(num_bins, -1).sum(axis=1) for counts in (self.positives, self.negatives))
        return SimilarityHistogram(positives, negatives, self.positive_mean, self.negative_mean)

    def to_plain(self) -> dict[str, Any]:
        """The same as numbers and lists, for JSON."""
        return {name: value.tolist() if name in _COUNTS else value for name, value in vars(self).items()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> SimilarityHistogram:
        """Restore from untrusted `to_plain()`.

        Raises:
            ValueError: counts that are no histograms, or means that are no numbers.
        """
        positives, negatives = (np.array(plain[name], np.int64) for name in _COUNTS)
        means = (float(plain["positive_mean"]), float(plain["negative_mean"]))
        if positives.shape != negatives.shape or positives.ndim != 1 or not np.isfinite(means).all():
            raise ValueError("histograms of different shapes")
        if any(counts.min(initial=0) < 0 or not counts.sum() for counts in (positives, negatives)):
            raise ValueError("an empty histogram")
        return cls(positives, negatives, *means)


def pair_similarities(
    left: Vectors,
    right: Vectors,
    left_id: Integers | None = None,
    right_id: Integers | None = None,
    left_positives: Integers | None = None,
) -> SimilarityHistogram:
    """Cosines of row i of `left` with row i of `right` (positives) and with every other row (negatives).

    Args:
        left, right: (M, D) embeddings of the pairs; scaled to unit norm here.
        left_id, right_id: (M,) ids: items of one id are never negatives of each other's partners. By default all rows
            differ.
        left_positives: (M, K) right ids that are positive with each left item, padded with −1.

    Raises:
        DualencError: there is no negative pair.
    """
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
        labels: (N,) class numbers.

    Raises:
        DualencError: there is no pair of one kind.
    """
    rows = unit_rows(embeddings, "embeddings")

    def parts() -> Iterator[tuple[Vectors, Vectors]]:
        for start, similarities in _similarity_blocks(rows):
            numbers = np.arange(start, start + len(similarities))
            # Every pair once.
            later = np.arange(len(rows))[None, :] > numbers[:, None]
            same = labels[numbers][:, None] == labels[None, :]
            yield similarities[later & same], similarities[later & ~same]

    return _histogram(parts())


def _histogram(parts: Iterable[tuple[Vectors, Vectors]]) -> SimilarityHistogram:
    """Count similarities of positive and of negative pairs, part by part."""
    counts = np.zeros((2, len(_EDGES) - 1), np.int64)
    sums = np.zeros(2)
    for part in parts:
        for kind, similarities in enumerate(part):
            # Rounding takes a cosine beyond ±1, out of the last bin.
            counts[kind] += np.histogram(np.clip(similarities, -1, 1), _EDGES)[0]
            sums[kind] += similarities.sum(dtype=np.float64)
    totals = counts.sum(axis=1)
    for name, total in zip(("positive", "negative"), totals):
        if total == 0:
            raise DualencError(f"there is no {name} pair among these embeddings; give more images or classes")
    return SimilarityHistogram(*counts, *(sums / totals).tolist())


def _similarity_blocks(rows: npt.NDArray[np.float32]) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """(n, N) cosines of consecutive unit rows with all of them, with the number of the first."""
    for start in range(0, len(rows), _BLOCK):
        yield start, rows[start : start + _BLOCK] @ rows.T


class ExactPoint(NamedTuple):
    """One model on the curve of a run.

    Attributes:
        loss: L(θ), the mean of −s(x, y)/τ + log Σ_z exp(s(x, z)/τ) over all anchors x and their negatives z.
        squared_gradient_norm: ‖∇L(θ)‖².
        pairs: the embeddings.
    """

    loss: float
    squared_gradient_norm: float
    pairs: FrozenPairs


def exact_gradient(
    model: nn.Module,
    encode: Callable[[Side, Inputs], Tensor],
    chunks: Mapping[Side, Sequence[Inputs]],
    pairs: Callable[[Tensor, Tensor], FrozenPairs],
    temperature: float,
) -> ExactPoint:
    """The exact loss of a model and the squared norm of its gradient with respect to the trainable weights.

    The set is encoded twice: without a graph for the loss, and then chunk by chunk to backpropagate the loss's gradient
    on the embeddings. Put the model into evaluation mode, so that no item's embedding depends on its batch.

    Args:
        model: The model; gradients of its weights are cleared.
        encode: `encode(side, inputs)` gives (n, D) unit-norm embeddings, with a graph where gradients are enabled.
        chunks: Prepared inputs of the items of each side, left first, chunk by chunk, in order.
        pairs: From the embeddings of both sides, such as `FrozenPairs.one_to_one`.
        temperature: τ > 0.
    """
    with torch.no_grad():
        left, right = (torch.cat([encode(side, inputs) for inputs in own]) for side, own in chunks.items())
    frozen = pairs(left.double(), right.double())
    # Every process measures a model of its own.
    with distributed.single_process():
        gradient, loss = frozen.exact(temperature)
    model.zero_grad(set_to_none=True)
    for (side, own), on_side in zip(chunks.items(), gradient.split([len(left), len(right)])):
        start = 0
        for inputs in own:
            embeddings = encode(side, inputs)
            # A tower whose weights are all frozen gives embeddings without a graph.
            if embeddings.requires_grad:
                embeddings.backward(on_side[start : start + len(embeddings)].to(embeddings))
            start += len(embeddings)
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    squared = sum(float(own.double().square().sum()) for own in gradients)
    model.zero_grad(set_to_none=True)
    return ExactPoint(loss, squared, frozen)
