"""`dualenc evaluate image-text`: captions by image and images by caption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dualenc import distributed
from dualenc.commands.evaluation import (
    MOST_ITEMS,
    check_range,
    display_name,
    embed_into,
    open_model,
    output_folder,
    start_processes,
)
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.image_text import both_ways_ranks, both_ways_recall, match_captions, owners_of
from dualenc.evaluation.metrics import recall_at
from dualenc.evaluation.report import Figure, Gallery, Item, Table, print_table, rank_galleries, write_report
from dualenc.evaluation.retrieval import write_per_query
from dualenc.files import write_json
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.data import PairDataset
    from dualenc.encoders import DualEncoder
    from dualenc.types import Side

CUTOFFS = (1, 5, 10)
CURVE = (1, 2, 5, 10, 20, 50, 100)


def image_text(
    model: str,
    data: str,
    *,
    out: str | None = None,
    split: str = "test",
    left_column: str | None = None,
    right_column: str | None = None,
    batch_size: int = 64,
    device: str | None = None,
) -> None:
    """Evaluate image-text retrieval both ways: recall@1, @5 and @10, with any number of captions per image.

    Writes metrics.json, report.html and a per-query log for each direction. Embeddings are kept below OUT, so that an
    interrupted evaluation goes on where it stopped.

    Args:
        model: model folder or name.
        data: images with captions: a table (parquet, jsonl, csv, a folder of them, a hub name), webdataset tars, or a
            folder of images.
        out: folder to write; by default evaluations/image-text/MODEL-DATA.
        split: of a folder or hub name.
        left_column: of a table; by default `image` or another usual name.
        right_column: of a table, one caption or a list of them in each row; by default `captions` or another usual
            name.
        batch_size: items encoded at once.
        device: such as cpu or cuda:0; by default a GPU if there is one.

    Raises:
        DualencError: the model is of another kind, or the data has no such split or columns.
    """
    check_range(1, MOST_ITEMS, batch_size=batch_size)
    target = output_folder(out, "image-text", model, data)
    device_to_use = start_processes(device)
    pairs = _read_pairs(data, split, left_column, right_column)
    encoder = open_model(model, "image-text", device_to_use)
    folder = target / "embeddings"
    images = _embed(encoder, "left", pairs, folder / f"images-{split}", model, batch_size)
    texts = _embed(encoder, "right", pairs, folder / f"texts-{split}", model, batch_size)
    matched = match_captions(pairs.left_id, pairs.right_id, images.ids, texts.ids)
    images, texts = images.take(matched.image_rows), texts.take(matched.text_rows)
    ranks = both_ways_ranks(images.vectors, texts.vectors, matched.captions)
    if distributed.is_main():
        galleries = _galleries(pairs, images, texts, matched.captions, ranks)
        # Every caption is a query, as in the literature, also where several images have the same one.
        ranks["text_to_image"] = ranks["text_to_image"][matched.text_of_pair]
        _conclude(ranks, galleries, target, {"model": model, "data": data, "split": split})
    distributed.barrier()


class _Side(NamedTuple):
    """Item numbers (n,) of one side and their vectors (n, D)."""

    ids: list[int]
    vectors: npt.NDArray[np.float32]

    def take(self, rows: npt.NDArray[np.int64]) -> _Side:
        return _Side([self.ids[row] for row in rows], self.vectors[rows])


def _read_pairs(data: str, split: str, left_column: str | None, right_column: str | None) -> PairDataset:
    from dualenc.data import open_pairs

    pairs = open_pairs(data, left_column, right_column, split=split)
    if (pairs.left_modality, pairs.right_modality) != ("image", "text"):
        raise DualencError(
            f"{data}: pairs of {pairs.left_modality} and {pairs.right_modality}, not of image and text; "
            "name the columns with --left_column and --right_column"
        )
    return pairs


def _embed(encoder: DualEncoder, side: Side, pairs: PairDataset, folder: Path, model: str, batch_size: int) -> _Side:
    from dualenc.data import Corpus

    items = pairs.left_items if side == "left" else pairs.right_items
    corpus = Corpus([str(number) for number in range(len(items))], items, "image" if side == "left" else "text")
    found = embed_into(folder, encoder, side, corpus, model, batch_size)
    return _Side([int(name) for name in found.ids], np.asarray(found.vectors, np.float32))


def _galleries(
    pairs: PairDataset, images: _Side, texts: _Side, captions: list[list[int]], ranks: dict[str, npt.NDArray[np.int64]]
) -> list[Gallery]:
    def image(row: int) -> Item:
        return Item(image=pairs.item("left", images.ids[row]))

    def text(row: int) -> Item:
        return Item(text=pairs.item("right", texts.ids[row]))

    owners = owners_of(captions, len(texts.ids))
    return [
        *rank_galleries("Image to text", ranks["image_to_text"], images.vectors, texts.vectors, captions, image, text),
        *rank_galleries("Text to image", ranks["text_to_image"], texts.vectors, images.vectors, owners, text, image),
    ]


def _conclude(
    ranks: dict[str, npt.NDArray[np.int64]], galleries: Sequence[Gallery], out: Path, facts: dict[str, Any]
) -> None:
    """Write and print what came out."""
    scores = both_ways_recall(ranks, CUTOFFS)
    sizes = {"images": len(ranks["image_to_text"]), "texts": len(ranks["text_to_image"])}
    write_json(out / "metrics.json", {"task": "image-text", **facts, **sizes, "metrics": scores})
    for direction, of_queries in ranks.items():
        (out / direction).mkdir(parents=True, exist_ok=True)
        per_query = {
            str(number): recall_at(of_queries[number : number + 1], CUTOFFS) | {"mrr": float(1 / rank)}
            for number, rank in enumerate(of_queries)
        }
        write_per_query(out / direction / "per_query.ndjson", per_query, direction)
    rows: list[dict[str, object]] = [
        {"direction": direction.replace("_", " "), "queries": len(of_queries), **recall_at(of_queries, CUTOFFS)}
        for direction, of_queries in ranks.items()
    ]
    table = Table("Image-text retrieval", rows)
    title = f"Image-text retrieval: {display_name(facts['model'])} on {display_name(facts['data'])}"
    figures = [Figure("Recall among the first k", _curve(ranks))]
    write_report(
        out / "report.html", title, facts={**facts, **sizes}, tables=[table], figures=figures, galleries=galleries
    )
    print_table(table)
    print(printable(f"metrics and report.html are in {out}"))


def _curve(ranks: dict[str, npt.NDArray[np.int64]]) -> Any:
    series = {
        direction.replace("_", " "): (CURVE, list(recall_at(of_queries, CURVE).values()))
        for direction, of_queries in ranks.items()
    }
    return plots.lines(series, xlabel="k", ylabel="recall@k")
