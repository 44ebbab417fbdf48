"""Image-text retrieval: captions by image and images by caption."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dualenc import distributed
from dualenc.commands.output import Evaluation
from dualenc.data import open_pairs
from dualenc.data.corpus import corpora
from dualenc.data.readers.detect import default_split
from dualenc.errors import DualencError
from dualenc.evaluation.image_text_retrieval import both_ways_recall, match_captions, ranks_of_pairs
from dualenc.evaluation.metrics import recall_at
from dualenc.evaluation.report_page import Table
from dualenc.workflows.session import short_name

if TYPE_CHECKING:
    from dualenc.commands.options import ColumnOptions, OutputOptions

CUTOFFS = (1, 5, 10)


def evaluate_image_text(
    model: str,
    data: str,
    split: str | None,
    columns: ColumnOptions,
    batch_size: int,
    output: OutputOptions,
) -> None:
    """Evaluate retrieval both ways."""
    evaluation = Evaluation("image-text", model, data, output)
    split = split or default_split(data)
    pairs = open_pairs(data, **vars(columns), split=split).relevant()
    if (pairs.left_modality, pairs.right_modality) != ("image", "text"):
        raise DualencError(
            f"{data}: pairs of {pairs.left_modality} and {pairs.right_modality}, not of image and text; "
            "name the columns with --left_column and --right_column"
        )
    encoder = evaluation.open("image-text")
    left, right = corpora(pairs)
    images = evaluation.embed(f"embeddings/images-{split}", encoder, "left", left, batch_size)
    texts = evaluation.embed(f"embeddings/texts-{split}", encoder, "right", right, batch_size)

    image_ids = [int(name) for name in images.ids]
    text_ids = [int(name) for name in texts.ids]
    matched = match_captions(pairs.left_id, pairs.right_id, image_ids, text_ids)
    image_vectors = np.asarray(images.vectors, np.float32)
    ranks = ranks_of_pairs(image_vectors, np.asarray(texts.vectors, np.float32), matched)
    if distributed.is_main():
        rows: list[dict[str, object]] = []
        for direction, own in ranks.items():
            name = direction.replace("_", " ")
            rows.append({"direction": name, "queries": len(own), **recall_at(own, CUTOFFS)})
        sizes = {"images": len(ranks["image_to_text"]), "texts": len(ranks["text_to_image"])}
        evaluation.conclude(
            "Image-text retrieval",
            short_name(data),
            {"model": model, "data": data, "split": split, **sizes},
            {"metrics": both_ways_recall(ranks, CUTOFFS)},
            [Table("Image-text retrieval", rows)],
        )
    distributed.barrier()
