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

Found = npt.NDArray[np.int64]
TIE = -1


def nearest_versions(features: Features) -> Found:
    """Which version each view finds among the views of the other kind of its image, by cosine.

    Args:
        features: (n, 2, K, D) first and second views of K versions of n images; scaled to unit norm here.

    Returns:
        (n, 2, K) numbers of versions: [:, 0] found by first views among the second ones, [:, 1] by second among first.
        −1 where the nearest two are equally near: an encoder that maps everything to one point finds nothing.

    Raises:
        DualencError: another shape, or not finite.
    """
    if features.ndim != 4 or features.shape[1] != 2 or features.shape[2] < 2:
        raise DualencError(f"features have shape {features.shape}; (images, 2 views, 2+ versions, dimension) is needed")
    rows = unit_rows(features.reshape(-1, features.shape[-1]), "embeddings").reshape(features.shape)
    # K candidates per query: a product of small matrices; an index for each image would only add to it.
    similarities = rows[:, 0] @ rows[:, 1].swapaxes(1, 2)
    return np.stack([_best_columns(similarities), _best_columns(similarities.swapaxes(1, 2))], axis=1)


def nearest_images(features: Features) -> Found:
    """Which image each view finds among the views of the other kind of all images, by cosine; exact search by FAISS.

    Args:
        features: (N, 2, D) first and second view of N images; scaled to unit norm here.

    Returns:
        (N, 2) numbers of images, −1 for a tie: as `nearest_versions`.

    Raises:
        DualencError: another shape, one image only, or not finite.
    """
    if features.ndim != 3 or features.shape[1] != 2 or len(features) < 2:
        raise DualencError(
            f"features have shape {features.shape}; (images, 2 views, dimension) of two images is needed"
        )
    first, second = (unit_rows(features[:, view], "embeddings") for view in (0, 1))
    return np.stack([_search(first, second), _search(second, first)], axis=1)


def summarise(found: Found, versions: Sequence[str] = ()) -> dict[str, float]:
    """Top-1 accuracies: of both directions together, of each, and of each version.

    Args:
        found: (N, 2) of `nearest_images`, or (N, 2, K) of `nearest_versions`.
        versions: K names, for the latter.

    Returns:
        "top1", "top1_first_to_second", "top1_second_to_first", and "top1/NAME" for each version.

    Raises:
        DualencError: there is no image.
    """
    if len(found) == 0:
        raise DualencError("no image was compared; the data is empty or every image is bad")
    hits = is_right(found)
    means = {
        "top1": float(hits.mean()),
        "top1_first_to_second": float(hits[:, 0].mean()),
        "top1_second_to_first": float(hits[:, 1].mean()),
    }
    return means | {f"top1/{name}": float(hits[:, :, k].mean()) for k, name in enumerate(versions)}


def is_right(found: Found) -> npt.NDArray[np.bool_]:
    """Whether each view found its own pair, in the shape of `found`: (N, 2) or (N, 2, K)."""
    return found == (np.arange(found.shape[2]) if found.ndim == 3 else np.arange(len(found))[:, None])


def confusions(found: Found) -> npt.NDArray[np.float64]:
    """(K, K) how often a view of version k (row) finds version j (column) first; rows sum to 1 less the ties.

    Args:
        found: (N, 2, K) of `nearest_versions`.
    """
    num_versions = found.shape[2]
    counts = (found[..., None] == np.arange(num_versions)).sum(axis=(0, 1))
    return counts / (2 * len(found))


def _best_columns(similarities: npt.NDArray[np.float32]) -> Found:
    """(n, K) number of the highest entry of each row of (n, K, K), −1 if another is as high."""
    best = similarities.max(axis=2, keepdims=True)
    tied = (similarities == best).sum(axis=2) > 1
    return np.where(tied, TIE, similarities.argmax(axis=2))


def _search(queries: npt.NDArray[np.float32], items: npt.NDArray[np.float32]) -> Found:
    scores, nearest = faiss.knn(queries, items, 2, faiss.METRIC_INNER_PRODUCT)
    return np.where(scores[:, 0] > scores[:, 1], nearest[:, 0], TIE)
