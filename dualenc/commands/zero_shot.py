"""`dualenc evaluate zero-shot`: an image-text model names the class of images from prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from dualenc import distributed
from dualenc.commands.checks import MAX_ITEMS, check_range
from dualenc.commands.evaluation import Evaluation, display_name, open_model
from dualenc.data import Corpus
from dualenc.data.sources import usual_split
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.embedding import embed_into
from dualenc.evaluation.images import open_images, require_labels
from dualenc.evaluation.report import Figure, Gallery, Item, Table, rank_galleries
from dualenc.evaluation.runs import read_lines, write_per_query
from dualenc.evaluation.zero_shot import (
    TEMPLATES,
    class_embeddings,
    class_prompts,
    read_templates,
    readable_class,
    zero_shot_accuracy,
    zero_shot_ranks,
)

CUTOFFS = (1, 5)


def zero_shot(
    model: str,
    data: str,
    *,
    out: str | None = None,
    split: str | None = None,
    label_column: str | None = None,
    class_names: str | None = None,
    templates: str | None = None,
    batch_size: int = 64,
    device: str | None = None,
) -> None:
    """Evaluate zero-shot classification: each image gets the class whose prompts are nearest.

    Writes metrics.json, report.html and a per-query log. Embeddings are kept below OUT, so that an interrupted
    evaluation resumes where it stopped.

    Args:
        model: model folder or name.
        data: labelled images: a table (parquet, a folder of them, a hub name), or a folder with one folder per class.
        out: folder to write; by default evaluations/zero-shot/MODEL-DATA-HASH.
        split: of a folder of tables or a hub name, by default test; of a file a slice such as train[90%:], by default
            all.
        label_column: of a table, class numbers or names; by default `label`.
        class_names: text file with the name of each class on a line; by default the names that the data brings.
        templates: text file with prompt templates, one on a line, {} for the class; by default a set of eight.
        batch_size: items encoded at once.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    check_range(1, MAX_ITEMS, batch_size=batch_size)
    evaluation = Evaluation("zero-shot", model, data, out, device)
    prompt_templates = TEMPLATES if templates is None else read_templates(templates)
    split = split or usual_split(data, "test")
    images = open_images(data, split, label_column=label_column)
    labels = require_labels(images, f"{data}, {split}")
    names = _class_names(class_names, images.class_names, labels, data)
    prompts = class_prompts(names, prompt_templates)
    encoder = open_model(model, ("image-text",), evaluation.device)
    evaluation.check_weights(encoder.left, encoder.right)
    folder = evaluation.folder / "embeddings"
    embedded = embed_into(folder / f"images-{split}", encoder.left, images, batch_size, side="left", model=model)
    corpus = Corpus([str(number) for number in range(len(prompts))], prompts, "text")
    prompt_vectors = embed_into(
        folder / "prompts", encoder.right, corpus, batch_size, side="right", model=model
    ).vectors
    classes = class_embeddings(np.asarray(prompt_vectors, np.float32), len(names))
    # The images that could be read, by their rows in the data.
    row_of = {name: row for row, name in enumerate(images.ids)}
    rows = [row_of[name] for name in embedded.ids]
    labels = labels[rows]
    vectors = np.asarray(embedded.vectors, np.float32)
    ranks = zero_shot_ranks(vectors, classes, labels)
    if distributed.is_main():
        galleries = rank_galleries(
            "Images and their nearest classes",
            ranks,
            vectors,
            classes,
            [[label] for label in labels.tolist()],
            lambda number: Item(names[labels[number]], images[rows[number]]),
            lambda column: Item(names[column]),
        )
        per_image = {
            images.ids[row]: {f"top@{k}": float(rank <= k) for k in CUTOFFS} | {"mrr": float(1 / rank)}
            for row, rank in zip(rows, ranks)
        }
        write_per_query(evaluation.folder / "per_query.ndjson", per_image, display_name(data))
        _report(evaluation, {"model": model, "data": data, "split": split}, ranks, labels, names, galleries)
    distributed.barrier()


def _class_names(file: str | None, recorded: Sequence[str] | None, labels: np.ndarray, data: str) -> list[str]:
    """Readable names of all classes, from a file or from the data."""
    names = recorded
    if file is not None:
        names = [line.strip() for _, line in read_lines(file)]
        if not names:
            raise DualencError(f"{file}: holds no class name; write one on each line")
    if names is None or all(name.isdecimal() for name in names):
        raise DualencError(f"{data}: the classes have no names; give them with --class_names FILE, one on each line")
    if labels.max(initial=-1) >= len(names):
        problem = f"{len(names)} class names, but there is a label {labels.max()}"
        raise DualencError(f"{file or data}: {problem}; name every class")
    return [readable_class(name) for name in names]


def _report(
    evaluation: Evaluation,
    facts: Mapping[str, object],
    ranks: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    galleries: Sequence[Gallery],
) -> None:
    """The accuracy, overall and of each class."""
    by_class: list[dict[str, Any]] = []
    for number in np.unique(labels).tolist():
        own = ranks[labels == number]
        by_class.append({"class": names[number], "images": len(own), "top@1": float(np.mean(own == 1))})
    scores = zero_shot_accuracy(ranks, labels, len(names), CUTOFFS)
    sizes = {"images": len(ranks), "classes": len(names)}
    data = display_name(str(facts["data"]))
    spread = plots.histograms({"top@1": [row["top@1"] for row in by_class]}, xlabel="top@1 of a class", bins=20)
    evaluation.conclude(
        f"Zero-shot classification: {display_name(evaluation.model)} on {data}",
        facts,
        {**sizes, "metrics": scores, "per_class": by_class},
        [
            Table("Zero-shot classification", [{"data": data, **sizes, **scores}]),
            Table("By class, hardest first", sorted(by_class, key=itemgetter("top@1"))),
        ],
        printed=1,
        figures=[Figure("Accuracy over classes", spread)],
        galleries=galleries,
    )
