"""Evaluate image-text retrieval: captions by image and images by caption."""

from __future__ import annotations

from typing import Unpack

import numpy as np

from dualenc import distributed
from dualenc.data import open_pairs
from dualenc.data.corpus import corpora
from dualenc.data.readers.detect import default_split
from dualenc.errors import DualencError
from dualenc.evaluation.image_text_retrieval import both_ways_recall, match_captions, ranks_of_pairs
from dualenc.evaluation.metrics import recall_at
from dualenc.evaluation.report_page import Table
from dualenc.types import Integers, StrPath
from dualenc.workflows.evaluation_folder import EvaluationFolder, EvaluationResult, evaluation_of
from dualenc.workflows.pair_columns import PairColumns
from dualenc.workflows.session import short_name

CUTOFFS = (1, 5, 10)


def evaluate_image_text(
    model: str,
    data: str,
    *,
    split: str | None = None,
    batch_size: int = 64,
    out: StrPath | None = None,
    device: str | None = None,
    progress: bool = True,
    **columns: Unpack[PairColumns],
) -> EvaluationResult:
    """Evaluate image-text retrieval both ways, with any number of captions per image.

    Measures recall@1, @5 and @10. Same as `dualenc evaluate image-text`.

        result = dualenc.evaluate_image_text("runs/clip/model", "data/flickr30k")
        result.metrics["metrics"]["image_to_text_recall@1"]

    Args:
        model: model folder or name, of kind image-text.
        data: images with captions: a table, webdataset tars, a folder of images, or a hub name.
        split: split to evaluate; by default "test", and all of a single file.
        batch_size: number of items per forward pass.
        out: folder to write; by default evaluations/image-text/MODEL-DATA-HASH.
        device: torch device such as "cpu" or "cuda:0"; by default a GPU if there is one.
        progress: show progress bars.
        columns: how the columns of a table are read, see
            `dualenc.workflows.pair_columns.PairColumns`.

    Returns:
        Recall of both directions, and the folder with all files.

    Raises:
        DualencError: if the pairs are not of image and text, or the model is of another kind.
    """
    with evaluation_of("image-text", model, data, out, device, progress) as evaluation:
        split = split or default_split(data)
        pairs = open_pairs(data, split=split, **columns).relevant()
        # Before the model is loaded: wrong columns are the more common mistake.
        if (pairs.left_modality, pairs.right_modality) != ("image", "text"):
            raise DualencError(
                f"pairs of {pairs.left_modality} and {pairs.right_modality}, not of image and text",
                fix="name the columns with --left-column and --right-column",
                where=data,
            )
        encoder = evaluation.open("image-text")
        left, right = corpora(pairs)
        images = evaluation.embed(f"embeddings/images-{split}", encoder, "left", left, batch_size)
        texts = evaluation.embed(f"embeddings/texts-{split}", encoder, "right", right, batch_size)

        # Embeddings lack unreadable items: pairs are matched by the ids that are left.
        image_ids = [int(name) for name in images.ids]
        text_ids = [int(name) for name in texts.ids]
        matched = match_captions(pairs.left_id, pairs.right_id, image_ids, text_ids)
        image_vectors = np.asarray(images.vectors, np.float32)
        ranks = ranks_of_pairs(image_vectors, np.asarray(texts.vectors, np.float32), matched)
        return distributed.from_main(lambda: _conclude(evaluation, data, split, ranks))


def _conclude(
    evaluation: EvaluationFolder, data: str, split: str, ranks: dict[str, Integers]
) -> EvaluationResult:
    """Write recall at each cutoff by direction."""
    rows = [
        {"direction": way.replace("_", " "), "queries": len(own), **recall_at(own, CUTOFFS)}
        for way, own in ranks.items()
    ]
    facts = {
        "data": data,
        "split": split,
        "images": len(ranks["image_to_text"]),
        # Each caption of a pair is a query, so duplicate captions count.
        "texts": len(ranks["text_to_image"]),
    }
    return evaluation.conclude(
        "Image-text retrieval",
        short_name(data),
        facts,
        {"metrics": both_ways_recall(ranks, CUTOFFS)},
        [Table("Image-text retrieval", rows)],
    )
