"""Image-text retrieval in both directions, with any number of captions per image."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.evaluation.metrics import Scores, best_positive_ranks, recall_at, rows_at_once
from dualenc.types import Integers, Vectors


class Matched(NamedTuple):
    """Embedded images and texts that belong together: (I,) and (T,) rows of their embeddings.

    `captions` are for each of the I images its texts, counted among the T; `text_of_pair` (M,) is
    for each pair its text, so that a duplicate caption is a query twice.
    """

    image_rows: Integers
    text_rows: Integers
    captions: list[list[int]]
    text_of_pair: Integers


def match_captions(
    left_id: Integers, right_id: Integers, image_ids: Sequence[int], text_ids: Sequence[int]
) -> Matched:
    """Match pairs, (M,) image and text ids, with the ids of the rows of embeddings.

    A pair that lost a side to a bad sample is left out.
    """
    image_row = {number: row for row, number in enumerate(image_ids)}
    text_row = {number: row for row, number in enumerate(text_ids)}
    embedded = []
    for image_id, text_id in zip(left_id.tolist(), right_id.tolist(), strict=True):
        if image_id in image_row and text_id in text_row:
            embedded.append((image_row[image_id], text_row[text_id]))
    if not embedded:
        raise DualencError("no image is left that has a caption; check the columns of the data")
    rows = np.array(embedded, np.int64)
    image_rows, image_of_pair = np.unique(rows[:, 0], return_inverse=True)
    text_rows, text_of_pair = np.unique(rows[:, 1], return_inverse=True)
    captions: list[list[int]] = [[] for _ in image_rows]
    # A caption that a data set repeats for an image is one caption.
    for image, text in sorted(set(zip(image_of_pair.tolist(), text_of_pair.tolist()))):
        captions[image].append(text)
    return Matched(image_rows, text_rows, captions, text_of_pair)


def both_ways_ranks(
    images: Vectors, texts: Vectors, captions: Sequence[Iterable[int]]
) -> dict[str, Integers]:
    """Rank of the best right answer of every image among the texts, and of every text among the
    images.

    Args:
        images, texts: (I, D) and (T, D) embeddings.
        captions: for each image its texts, as rows of `texts`.

    Returns:
        "image_to_text": (I,) and "text_to_image": (T,) ranks from 1; ties count against the model.
    """
    images_of: list[list[int]] = [[] for _ in texts]
    for image, own in enumerate(captions):
        for text in own:
            images_of[text].append(image)
    return {
        "image_to_text": _shared_ranks(images, texts, captions),
        "text_to_image": _shared_ranks(texts, images, images_of),
    }


def ranks_of_pairs(images: Vectors, texts: Vectors, matched: Matched) -> dict[str, Integers]:
    """`both_ways_ranks` of matched embeddings; every caption is a query, as in the literature, also
    where several images have the same one: "text_to_image" is of the M pairs."""
    ranks = both_ways_ranks(images[matched.image_rows], texts[matched.text_rows], matched.captions)
    return ranks | {"text_to_image": ranks["text_to_image"][matched.text_of_pair]}


def both_ways_recall(ranks: dict[str, Integers], cutoffs: Sequence[int] = (1, 5, 10)) -> Scores:
    """Recall@k of both directions, such as "image_to_text_recall@1", and their mean "mean_recall".

    Image to text, any one of the image's captions among the first k counts, as in the literature on
    Flickr30k and COCO (Karpathy and Fei-Fei 2015).
    """
    scores: Scores = {}
    for direction, query_ranks in ranks.items():
        for name, value in recall_at(query_ranks, cutoffs).items():
            scores[f"{direction}_{name}"] = value
    return {**scores, "mean_recall": float(np.mean(list(scores.values())))}


def _shared_ranks(
    queries: Vectors, candidates: Vectors, positives: Sequence[Iterable[int]]
) -> Integers:
    """`best_positive_ranks` shared among the processes by whole blocks, so that they are those of
    one process."""
    rows = rows_at_once(len(candidates))
    blocks = distributed.rank_slice(math.ceil(len(queries) / rows))
    own = slice(blocks.start * rows, blocks.stop * rows)
    return np.concatenate(
        distributed.gather_objects(best_positive_ranks(queries[own], candidates, positives[own]))
    )
