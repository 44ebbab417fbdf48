"""`dualenc evaluate zero-shot`: an image-text model names the class of images from prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from dualenc.commands.probe import open_images, require_labels
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.report import Figure, Gallery, Item, Table, print_table, rank_galleries, write_report
from dualenc.evaluation.retrieval import read_lines, write_per_query
from dualenc.evaluation.zero_shot import (
    TEMPLATES,
    class_embeddings,
    class_prompts,
    read_templates,
    readable_class,
    zero_shot_accuracy,
    zero_shot_ranks,
)
from dualenc.files import write_json
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.encoders import DualEncoder

CUTOFFS = (1, 5)
Ranks = npt.NDArray[np.int64]


def zero_shot(
    model: str,
    data: str,
    *,
    out: str | None = None,
    split: str = "test",
    label_column: str | None = None,
    class_names: str | None = None,
    templates: str | None = None,
    batch_size: int = 64,
    device: str | None = None,
) -> None:
    """Evaluate zero-shot classification: each image gets the class whose prompts are nearest.

    Writes metrics.json, report.html and a per-query log. Embeddings are kept below OUT, so that an interrupted
    evaluation goes on where it stopped.

    Args:
        model: model folder or name.
        data: labelled images: a table (parquet, a folder of them, a hub name), or a folder with one folder per class.
        out: folder to write; by default evaluations/zero-shot/MODEL-DATA.
        split: of a folder of tables or a hub name.
        label_column: of a table, class numbers or names; by default `label`.
        class_names: text file with the name of each class on a line; by default the names that the data brings.
        templates: text file with prompt templates, one on a line, {} for the class; by default a set of eight.
        batch_size: items encoded at once.
        device: such as cpu or cuda:0; by default a GPU if there is one.

    Raises:
        DualencError: the model is of another kind, or labels, class names or templates are missing.
    """
    check_range(1, MOST_ITEMS, batch_size=batch_size)
    target = output_folder(out, "zero-shot", model, data)
    device_to_use = start_processes(device)
    filled = TEMPLATES if templates is None else read_templates(templates)
    images = open_images(data, split, label_column=label_column)
    labels = require_labels(images, f"{data}, {split}")
    names = _class_names(images, data, class_names)
    encoder = open_model(model, "image-text", device_to_use)
    folder = target / "embeddings"
    found = embed_into(folder / f"images-{split}", encoder, "left", images, model, batch_size)
    classes = _embed_classes(encoder, names, filled, folder / "prompts", model, batch_size)
    row_of = {name: row for row, name in enumerate(images.ids)}
    shown = _Shown(images, [row_of[name] for name in found.ids], names, labels)
    vectors = np.asarray(found.vectors, np.float32)
    ranks = zero_shot_ranks(vectors, classes, shown.labels)
    if distributed.is_main():
        galleries = _galleries(shown, vectors, classes, ranks)
        _conclude(ranks, shown, galleries, target, {"model": model, "data": data, "split": split})
    distributed.barrier()


class _Shown:
    """The images that could be read, with their labels (A,) and the names of the classes (C,)."""

    def __init__(self, images: Corpus, rows: list[int], names: list[str], labels: npt.NDArray[np.int64]) -> None:
        self.images, self.rows, self.names, self.labels = images, rows, names, labels[rows]

    def image(self, number: int) -> Item:
        """An image with its class."""
        return Item(self.names[self.labels[number]], self.images[self.rows[number]])


def _class_names(images: Corpus, data: str, file: str | None) -> list[str]:
    """Readable names, one for each class number."""
    names = images.class_names
    if file is not None:
        names = [line.strip() for _, line in read_lines(file)]
        if not names:
            raise DualencError(f"{file}: holds no class name; write one on each line")
    if names is None or all(name.isdecimal() for name in names):
        raise DualencError(f"{data}: the classes have no names; give them with --class_names FILE, one on each line")
    highest = -1 if images.labels is None else int(images.labels.max(initial=-1))
    if highest >= len(names):
        raise DualencError(
            f"{file or data}: {len(names)} class names, but there is a label {highest}; name every class"
        )
    return [readable_class(name) for name in names]


def _embed_classes(
    encoder: DualEncoder, names: list[str], templates: Sequence[str], folder: Path, model: str, batch_size: int
) -> npt.NDArray[np.float32]:
    """(C, D) class embeddings."""
    from dualenc.data import Corpus

    prompts = class_prompts(names, templates)
    corpus = Corpus([str(number) for number in range(len(prompts))], prompts, "text")
    found = embed_into(folder, encoder, "right", corpus, model, batch_size)
    return class_embeddings(np.asarray(found.vectors, np.float32), len(names))


def _galleries(
    shown: _Shown, vectors: npt.NDArray[np.float32], classes: npt.NDArray[np.float32], ranks: Ranks
) -> list[Gallery]:
    own = [[label] for label in shown.labels.tolist()]
    what = "Images and their nearest classes"
    return rank_galleries(what, ranks, vectors, classes, own, shown.image, lambda column: Item(shown.names[column]))


def _conclude(ranks: Ranks, shown: _Shown, galleries: Sequence[Gallery], out: Path, facts: dict[str, Any]) -> None:
    """Write and print what came out."""
    scores = zero_shot_accuracy(ranks, shown.labels, len(shown.names), CUTOFFS)
    sizes = {"images": len(ranks), "classes": len(shown.names)}
    by_class = _by_class(ranks, shown)
    hardest = sorted(by_class, key=lambda row: float(row["top@1"]))
    measured = {"task": "zero-shot", **facts, **sizes, "metrics": scores, "per_class": by_class}
    write_json(out / "metrics.json", measured)
    per_image = {
        shown.images.ids[row]: {f"top@{k}": float(rank <= k) for k in CUTOFFS} | {"mrr": float(1 / rank)}
        for row, rank in zip(shown.rows, ranks)
    }
    data = display_name(facts["data"])
    write_per_query(out / "per_query.ndjson", per_image, data)
    summary = Table("Zero-shot classification", [{"data": data, **sizes, **scores}])
    spread = plots.histograms({"top@1": [row["top@1"] for row in by_class]}, xlabel="top@1 of a class", bins=20)
    write_report(
        out / "report.html",
        f"Zero-shot classification: {display_name(facts['model'])} on {data}",
        facts=facts,
        tables=[summary, Table("By class, hardest first", hardest)],
        figures=[Figure("Accuracy over classes", spread)],
        galleries=galleries,
    )
    print_table(summary)
    print(printable(f"metrics and report.html are in {out}"))


def _by_class(ranks: Ranks, shown: _Shown) -> list[dict[str, Any]]:
    rows = []
    for number in np.unique(shown.labels).tolist():
        own = ranks[shown.labels == number]
        rows.append({"class": shown.names[number], "images": len(own), "top@1": float(np.mean(own == 1))})
    return rows
