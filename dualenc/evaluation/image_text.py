"""Image-text retrieval both ways, with any number of captions per image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.evaluation.metrics import Scores, best_positive_ranks, recall_at, rows_at_once

Vectors = npt.NDArray[np.floating]


def both_ways_ranks(
    images: Vectors, texts: Vectors, captions: Sequence[Iterable[int]]
) -> dict[str, npt.NDArray[np.int64]]:
    """Rank of the best right answer of every image among the texts, and of every text among the images.

    Args:
        images: (I, D) embeddings.
        texts: (T, D) embeddings.
        captions: For each image its texts, as rows of `texts`; negative numbers are padding. A text may
            describe several images.

    Returns:
        "image_to_text": (I,) and "text_to_image": (T,) ranks from 1; ties count against the model.

    Raises:
        DualencError: the shapes do not fit, an image has no caption or a text no image.
    """
    texts_of = [[text for text in own if text >= 0] for own in captions]
    owners: list[list[int]] = [[] for _ in range(len(texts))]
    for image, own in enumerate(texts_of):
        if not own:
            raise DualencError(f"image {image} has no caption; leave it out")
        if max(own) >= len(texts):
            raise DualencError(f"image {image}: caption {max(own)} is out of range: there are {len(texts)} texts")
        for text in own:
            owners[text].append(image)
    lonely = next((text for text, own in enumerate(owners) if not own), None)
    if lonely is not None:
        raise DualencError(f"text {lonely} describes no image; leave it out")
    return {
        "image_to_text": _shared_ranks(images, texts, texts_of),
        "text_to_image": _shared_ranks(texts, images, owners),
    }


def both_ways_recall(ranks: dict[str, npt.NDArray[np.int64]], cutoffs: Sequence[int] = (1, 5, 10)) -> Scores:
    """Recall@k of both directions, such as "image_to_text_recall@1", and their mean "mean_recall".

    Image to text, any one of the image's captions among the first k counts, as in the literature on Flickr30k and
    COCO (Karpathy and Fei-Fei 2015).

    Args:
        ranks: What `both_ways_ranks` returns.
        cutoffs: The k of recall@k.
    """
    scores = {
        f"{direction}_{name}": value
        for direction, of_queries in ranks.items()
        for name, value in recall_at(of_queries, cutoffs).items()
    }
    return {**scores, "mean_recall": float(np.mean(list(scores.values())))}


def _shared_ranks(queries: Vectors, candidates: Vectors, positives: list[list[int]]) -> npt.NDArray[np.int64]:
    """`best_positive_ranks`, each process doing its share of blocks of the same size, whatever their number."""
    rows = rows_at_once(len(candidates))
    starts = range(0, len(queries), rows)
    own = [
        best_positive_ranks(queries[start : start + rows], candidates, positives[start : start + rows])
        for start in starts[distributed.rank_slice(len(starts))]
    ]
    return np.concatenate([ranks for share in distributed.gather_objects(own) for ranks in share])
