"""Image-text retrieval in both directions, with any number of captions per image.

Captions are matched with images by ids, because unreadable items are not embedded.
"""

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
    """Embedded images and texts of which each has a partner. `match_captions` makes it.

        matched = match_captions(pairs.left_id, pairs.right_id, image_ids, text_ids)
        ranks = ranks_of_pairs(image_vectors, text_vectors, matched)

    Attributes:
        image_rows: (I,) rows of the matched images among the embeddings.
        text_rows: (T,) rows of the matched texts among the embeddings.
        captions: numbers of the texts of each of the I images, from 0 to T - 1.
        text_of_pair: (M,) number of the text of each pair. A caption of two images occurs twice.
    """

    image_rows: Integers
    text_rows: Integers
    captions: list[list[int]]
    text_of_pair: Integers


def match_captions(
    left_id: Integers,
    right_id: Integers,
    image_ids: Sequence[int],
    text_ids: Sequence[int],
) -> Matched:
    """Match pairs with the rows of embeddings; a pair without an embedded side is left out.

    Args:
        left_id: (M,) image ids of the pairs.
        right_id: (M,) text ids of the pairs.
        image_ids: ids of the embedded images.
        text_ids: ids of the embedded texts.

    Raises:
        DualencError: if no pair is left.
    """
    sides = []
    for embedded_ids, own in ((image_ids, left_id), (text_ids, right_id)):
        row_of = {number: row for row, number in enumerate(embedded_ids)}
        sides.append([row_of.get(number, -1) for number in own.tolist()])
    rows = np.array(sides, np.int64)  # (2, M)
    is_embedded = (rows >= 0).all(axis=0)
    if not is_embedded.any():
        raise DualencError(
            "no readable image has a readable caption", fix="check the columns of the data"
        )
    # Rows of the embedded images and texts, renumbered without gaps.
    image_rows, image_of_pair = np.unique(rows[0, is_embedded], return_inverse=True)
    text_rows, text_of_pair = np.unique(rows[1, is_embedded], return_inverse=True)
    captions: list[list[int]] = [[] for _ in image_rows]
    # Data sets may repeat a caption for the same image: it counts once.
    distinct = set(zip(image_of_pair.tolist(), text_of_pair.tolist()))
    for image, text in sorted(distinct):
        captions[image].append(text)
    return Matched(image_rows, text_rows, captions, text_of_pair)


def both_ways_ranks(
    images: Vectors,
    texts: Vectors,
    captions: Sequence[Iterable[int]],
) -> dict[str, Integers]:
    """Rank the best match of every image among the texts, and of every text among the images.

    Args:
        images: (I, D) embeddings.
        texts: (T, D) embeddings.
        captions: rows of the texts that belong to each image.

    Returns:
        "image_to_text": (I,) and "text_to_image": (T,) ranks from 1; ties count against the model.
    """
    images_of: list[list[int]] = [[] for _ in texts]
    for image, own in enumerate(captions):
        for text in own:
            images_of[text].append(image)
    image_to_text = _shared_ranks(images, texts, captions)
    text_to_image = _shared_ranks(texts, images, images_of)
    return {"image_to_text": image_to_text, "text_to_image": text_to_image}


def ranks_of_pairs(images: Vectors, texts: Vectors, matched: Matched) -> dict[str, Integers]:
    """Rank matched embeddings both ways, with every caption as a query.

    Args:
        images: (N, D) embeddings of all images.
        texts: (M, D) embeddings of all texts.
        matched: rows that belong together.

    Returns:
        Ranks as of `both_ways_ranks`, but "text_to_image" has one rank per pair.
    """
    own_images = images[matched.image_rows]
    own_texts = texts[matched.text_rows]
    ranks = both_ways_ranks(own_images, own_texts, matched.captions)
    # As in the literature, a caption that two images share is two queries.
    ranks["text_to_image"] = ranks["text_to_image"][matched.text_of_pair]
    return ranks


def both_ways_recall(ranks: dict[str, Integers], cutoffs: Sequence[int] = (1, 5, 10)) -> Scores:
    """Return recall@k of both directions, such as "image_to_text_recall@1", and "mean_recall".

    From image to text, any one of the image's captions among the first k counts, as in the
    literature on Flickr30k and COCO (Karpathy and Fei-Fei 2015, arXiv 1412.2306).

    Args:
        ranks: ranks from 1 by direction, as of `ranks_of_pairs`.
        cutoffs: the values of k.
    """
    scores: Scores = {}
    for direction, query_ranks in ranks.items():
        for name, value in recall_at(query_ranks, cutoffs).items():
            scores[f"{direction}_{name}"] = value
    scores["mean_recall"] = float(np.mean(list(scores.values())))
    return scores


def recall_of_queries(
    ranks: dict[str, Integers], name: str, cutoffs: Sequence[int] = (1, 5, 10)
) -> list[float]:
    """Return one metric of `both_ways_recall` of each query, images first; their mean is that.

    Args:
        ranks: ranks from 1 by direction.
        name: name of the metric; that of one direction has the queries of this direction alone.
        cutoffs: the values of k.
    """
    total = sum(map(len, ranks.values()))
    parts = []
    for direction, query_ranks in ranks.items():
        if name == "mean_recall":
            hits = np.mean([query_ranks <= k for k in cutoffs], axis=0)
            # Both directions count alike, whatever their numbers of queries.
            parts.append(hits * total / (len(ranks) * len(query_ranks)))
        elif name.startswith(f"{direction}_recall@"):
            parts.append((query_ranks <= int(name.rpartition("@")[2])).astype(float))
    values: list[float] = np.concatenate(parts).tolist()
    return values


def _shared_ranks(
    queries: Vectors,
    candidates: Vectors,
    positives: Sequence[Iterable[int]],
) -> Integers:
    """Return `best_positive_ranks`, computed by all processes together."""
    # Processes take whole blocks: a matrix product depends on its shape in the last bits, and the
    # ranks must not depend on the number of processes.
    rows = rows_at_once(len(candidates))
    num_blocks = math.ceil(len(queries) / rows)
    blocks = distributed.rank_slice(num_blocks)
    own = slice(blocks.start * rows, blocks.stop * rows)
    ranks = best_positive_ranks(queries[own], candidates, positives[own])
    return np.concatenate(distributed.gather_objects(ranks))
