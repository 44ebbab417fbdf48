"""Retrieval of the other view of an image: among its own corrupted versions, and among all images.

Source: minibatch-contrastive.txt §6.2. Of every corrupted version of an image two augmented views are made. A first
view has to find the second view of the same version among the second views of all versions of that image, and the
other way round; negatives are one picture under other corruptions. The plain task finds the second view of an
image among the second views of all images.
"""

from __future__ import annotations

from collections.abc import Sequence

import faiss
import numpy as np
import numpy.typing as npt

from dualenc.errors import DualencError
from dualenc.evaluation.knn import Features, unit_rows

Hits = npt.NDArray[np.bool_]


def match_versions(features: Features) -> Hits:
    """Whether each view finds its pair among the versions of its image, by cosine.

    A tie is a miss: an encoder that maps everything to one point finds nothing.

    Args:
        features: (n, 2, K, D) first and second views of K versions of n images; scaled to unit norm here.

    Returns:
        (n, 2, K): [:, 0] for first views looking among the second ones, [:, 1] for second among first.

    Raises:
        DualencError: another shape, or not finite.
    """
    if features.ndim != 4 or features.shape[1] != 2 or features.shape[2] < 2:
        raise DualencError(f"features have shape {features.shape}; (images, 2 views, 2+ versions, dimension) is needed")
    rows = unit_rows(features.reshape(-1, features.shape[-1]), "embeddings").reshape(features.shape)
    # K candidates per query: a product of small matrices; an index for each image would only add to it.
    similarities = rows[:, 0] @ rows[:, 1].swapaxes(1, 2)
    return np.stack([_diagonal_wins(similarities), _diagonal_wins(similarities.swapaxes(1, 2))], axis=1)


def match_images(features: Features) -> Hits:
    """Whether each view finds its pair among all images, by cosine; exact search by FAISS. A tie is a miss.

    Args:
        features: (N, 2, D) first and second view of N images; scaled to unit norm here.

    Returns:
        (N, 2): [:, 0] for first views looking among the second ones, [:, 1] for second among first.

    Raises:
        DualencError: another shape, one image only, or not finite.
    """
    if features.ndim != 3 or features.shape[1] != 2 or len(features) < 2:
        raise DualencError(
            f"features have shape {features.shape}; (images, 2 views, dimension) of two images is needed"
        )
    first, second = (unit_rows(features[:, view], "embeddings") for view in (0, 1))
    return np.stack([_finds_own(first, second), _finds_own(second, first)], axis=1)


def summarise(hits: Hits, versions: Sequence[str] = ()) -> dict[str, float]:
    """Top-1 accuracies: of both directions together and of each, and of each version.

    Args:
        hits: (N, 2) or (N, 2, K), of `match_images` or `match_versions`.
        versions: K names.

    Returns:
        "top1", "top1_first_to_second", "top1_second_to_first", and "top1/NAME" for each version.
    """
    if len(hits) == 0:
        raise DualencError("no image was compared; the data is empty or every image is bad")
    means = {
        "top1": float(hits.mean()),
        "top1_first_to_second": float(hits[:, 0].mean()),
        "top1_second_to_first": float(hits[:, 1].mean()),
    }
    return means | {f"top1/{name}": float(hits[:, :, k].mean()) for k, name in enumerate(versions)}


def _diagonal_wins(similarities: npt.NDArray[np.float32]) -> Hits:
    """(n, K) whether entry [k, k] is above every other of its row in (n, K, K)."""
    own = np.diagonal(similarities, axis1=1, axis2=2)
    others = similarities.copy()
    others[:, range(own.shape[1]), range(own.shape[1])] = -np.inf
    return own > others.max(axis=2)


def _finds_own(queries: npt.NDArray[np.float32], items: npt.NDArray[np.float32]) -> Hits:
    scores, nearest = faiss.knn(queries, items, 2, faiss.METRIC_INNER_PRODUCT)
    return (nearest[:, 0] == np.arange(len(queries))) & (scores[:, 0] > scores[:, 1])
