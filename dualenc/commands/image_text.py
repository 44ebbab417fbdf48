"""`dualenc evaluate image-text`: captions by image and images by caption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dualenc import distributed
from dualenc.commands.checks import MAX_ITEMS, check_range
from dualenc.commands.evaluation import Evaluation, display_name, open_model
from dualenc.data import Corpus, open_pairs
from dualenc.data.sources import usual_split
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.embedding import embed_into
from dualenc.evaluation.image_text import both_ways_ranks, both_ways_recall, match_captions, owners_of
from dualenc.evaluation.metrics import recall_at
from dualenc.evaluation.report import Figure, Gallery, Item, Table, rank_galleries
from dualenc.evaluation.runs import write_per_query

CUTOFFS = (1, 5, 10)
CURVE = (1, 2, 5, 10, 20, 50, 100)


def image_text(
    model: str,
    data: str,
    *,
    out: str | None = None,
    split: str | None = None,
    left_column: str | None = None,
    right_column: str | None = None,
    batch_size: int = 64,
    device: str | None = None,
) -> None:
    """Evaluate image-text retrieval both ways: recall@1, @5 and @10, with any number of captions per image.

    Writes metrics.json, report.html and a per-query log for each direction. Embeddings are kept below OUT, so that an
    interrupted evaluation resumes where it stopped.

    Args:
        model: model folder or name.
        data: images with captions: a table (parquet, jsonl, csv, a folder of them, a hub name), webdataset tars, or a
            folder of images.
        out: folder to write; by default evaluations/image-text/MODEL-DATA-HASH.
        split: of a folder or hub name, by default test; of a file a slice such as train[90%:], by default all.
        left_column: of a table; by default `image` or another usual name.
        right_column: of a table, one caption or a list of them in each row; by default `captions` or another usual
            name.
        batch_size: items encoded at once.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    check_range(1, MAX_ITEMS, batch_size=batch_size)
    evaluation = Evaluation("image-text", model, data, out, device)
    split = split or usual_split(data, "test")
    pairs = open_pairs(data, left_column, right_column, split=split)
    if (pairs.left_modality, pairs.right_modality) != ("image", "text"):
        raise DualencError(
            f"{data}: pairs of {pairs.left_modality} and {pairs.right_modality}, not of image and text; "
            "name the columns with --left_column and --right_column"
        )
    encoder = open_model(model, ("image-text",), evaluation.device)
    evaluation.check_weights(encoder.left, encoder.right)
    folder = evaluation.folder / "embeddings"
    left = Corpus([str(number) for number in range(len(pairs.left_items))], pairs.left_items, "image")
    right = Corpus([str(number) for number in range(len(pairs.right_items))], pairs.right_items, "text")
    images = embed_into(folder / f"images-{split}", encoder.left, left, batch_size, side="left", model=model)
    texts = embed_into(folder / f"texts-{split}", encoder.right, right, batch_size, side="right", model=model)

    image_ids = [int(name) for name in images.ids]
    text_ids = [int(name) for name in texts.ids]
    matched = match_captions(pairs.left_id, pairs.right_id, image_ids, text_ids)
    image_vectors = np.asarray(images.vectors, np.float32)[matched.image_rows]
    text_vectors = np.asarray(texts.vectors, np.float32)[matched.text_rows]
    ranks = both_ways_ranks(image_vectors, text_vectors, matched.captions)
    if distributed.is_main():

        def image(row: int) -> Item:
            return Item(image=pairs.item("left", image_ids[matched.image_rows[row]]))

        def text(row: int) -> Item:
            return Item(text=pairs.item("right", text_ids[matched.text_rows[row]]))

        to_text = ranks["image_to_text"]
        to_image = ranks["text_to_image"]
        owners = owners_of(matched.captions, len(text_vectors))
        galleries = [
            *rank_galleries("Image to text", to_text, image_vectors, text_vectors, matched.captions, image, text),
            *rank_galleries("Text to image", to_image, text_vectors, image_vectors, owners, text, image),
        ]
        # Every caption is a query, as in the literature, also where several images have the same one.
        ranks["text_to_image"] = to_image[matched.text_of_pair]
        _report(evaluation, {"model": model, "data": data, "split": split}, ranks, galleries)
    distributed.barrier()


def _report(
    evaluation: Evaluation,
    facts: Mapping[str, object],
    ranks: dict[str, np.ndarray],
    galleries: Sequence[Gallery],
) -> None:
    """Write the per-query logs of both directions, the metrics and the report."""
    rows: list[dict[str, object]] = []
    curves = {}
    for direction, ranks_of_queries in ranks.items():
        name = direction.replace("_", " ")
        rows.append({"direction": name, "queries": len(ranks_of_queries), **recall_at(ranks_of_queries, CUTOFFS)})
        curves[name] = (CURVE, list(recall_at(ranks_of_queries, CURVE).values()))
        per_query = {
            str(number): recall_at(ranks_of_queries[number : number + 1], CUTOFFS) | {"mrr": float(1 / rank)}
            for number, rank in enumerate(ranks_of_queries)
        }
        (evaluation.folder / direction).mkdir(parents=True, exist_ok=True)
        write_per_query(evaluation.folder / direction / "per_query.ndjson", per_query, direction)
    sizes = {"images": len(ranks["image_to_text"]), "texts": len(ranks["text_to_image"])}
    evaluation.conclude(
        f"Image-text retrieval: {display_name(evaluation.model)} on {display_name(str(facts['data']))}",
        {**facts, **sizes},
        {"metrics": both_ways_recall(ranks, CUTOFFS)},
        [Table("Image-text retrieval", rows)],
        figures=[Figure("Recall among the first k", plots.lines(curves, xlabel="k", ylabel="recall@k"))],
        galleries=galleries,
    )
