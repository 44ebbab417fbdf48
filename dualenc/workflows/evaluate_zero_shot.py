"""Evaluate zero-shot classification: an image-text model classifies images by text prompts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from dualenc import distributed
from dualenc.data import Corpus
from dualenc.data.labels import align_labels, are_numbers
from dualenc.data.readers.detect import default_split
from dualenc.data.store.items import rows_of
from dualenc.errors import DualencError
from dualenc.evaluation.metrics import best_positive_ranks
from dualenc.evaluation.report_page import Table
from dualenc.evaluation.zero_shot import (
    TEMPLATES,
    class_embeddings,
    class_prompts,
    read_lines,
    read_templates,
    readable_class,
    zero_shot_accuracy,
)
from dualenc.types import Integers, StrPath
from dualenc.workflows.evaluation_folder import EvaluationFolder, EvaluationResult, evaluation_of
from dualenc.workflows.labeled_images import open_images, require_labels
from dualenc.workflows.session import short_name

logger = logging.getLogger("dualenc.workflows")

CUTOFFS = (1, 5)


def evaluate_zero_shot(
    model: str,
    data: str,
    *,
    split: str | None = None,
    label_column: str | None = None,
    class_names: str | None = None,
    templates: str | None = None,
    batch_size: int = 64,
    out: StrPath | None = None,
    device: str | None = None,
    progress: bool = True,
) -> EvaluationResult:
    """Evaluate zero-shot classification: each image gets the class with the nearest prompts.

    Same as `dualenc evaluate zero-shot`.

        result = dualenc.evaluate_zero_shot("runs/clip/model", "data/cifar10")
        result.metrics["metrics"]["top@1"]

    Args:
        model: model folder or name, of kind image-text.
        data: labeled images: a table, a hub name, or a folder with one folder per class.
        split: split to test; by default "test", and all of a single file.
        label_column: column of a table with class numbers or names; by default `label`.
        class_names: text file with the name of each class on a line, in the order of the class
            numbers, or in any order if it lists the names in the data. By default the names in the
            data.
        templates: text file with one prompt template per line, {} standing for the class; by
            default a set of eight.
        batch_size: number of items per forward pass.
        out: folder to write; by default evaluations/zero-shot/MODEL-DATA-HASH.
        device: torch device such as "cpu" or "cuda:0"; by default a GPU if there is one.
        progress: show progress bars.

    Returns:
        Accuracies of all images and by class, and the folder with all files.

    Raises:
        DualencError: if the images lack labels or the classes lack names.
    """
    with evaluation_of("zero-shot", model, data, out, device, progress) as evaluation:
        # Mistakes in the user's files show before the model is loaded.
        prompt_templates = TEMPLATES if templates is None else read_templates(templates)
        split = split or default_split(data)
        images = open_images(data, split, label_column)
        labels = require_labels(images, f"{data}, {split}")
        names, labels = _name_classes(class_names, images.class_names, labels, data)
        prompts = class_prompts(names, prompt_templates)
        corpus = Corpus([str(number) for number in range(len(prompts))], prompts, "text")
        encoder = evaluation.open("image-text")
        embedded = evaluation.embed(
            f"embeddings/images-{split}", encoder, "left", images, batch_size
        )
        embedded_prompts = evaluation.embed(
            "embeddings/prompts", encoder, "right", corpus, batch_size
        )
        prompt_vectors = np.asarray(embedded_prompts.vectors, np.float32)
        class_vectors = class_embeddings(prompt_vectors, len(names))
        # Images that could not be read are not embedded.
        labels = labels[rows_of(images.ids, embedded.ids)]
        vectors = np.asarray(embedded.vectors, np.float32)
        ranks = best_positive_ranks(vectors, class_vectors, labels[:, None].tolist())
        return distributed.from_main(
            lambda: _conclude(evaluation, data, split, names, labels, ranks)
        )


def _name_classes(
    file: str | None, recorded: Sequence[str] | None, labels: np.ndarray, data: str
) -> tuple[list[str], np.ndarray]:
    """Return readable names of all classes, and the labels (N,) in their numbers.

    Args:
        file: text file with one class name per line; None uses the names in the data.
        recorded: class names in the data, in the order of their numbers.
        labels: (N,) class numbers of the data.
        data: name of the data in errors.

    Raises:
        DualencError: if a class lacks a name, or the file does not match the data.
    """
    recorded = recorded or ()
    lines = recorded if file is None else [line for _, line in read_lines(file)]
    names = [readable_class(line) for line in lines]
    # A prompt such as "a photo of a 7" would measure nothing.
    if are_numbers(names):
        raise DualencError(
            "the classes are not named",
            fix="give them with --class-names FILE, one on each line",
            where=data,
        )
    # A line may start with an id that the folder of the class has, such as a WordNet id.
    listed_or_ids = {*lines, *(line.split()[0] for line in lines)}
    if not are_numbers(recorded) and set(recorded) <= listed_or_ids:
        # A file may list the classes of the data in another order, and others among them.
        return names, align_labels(labels, recorded, lines, data)
    starts_at_one = labels.min(initial=2) == 1 and labels.max() == len(names)
    if file is not None and are_numbers(recorded) and starts_at_one:
        if distributed.is_main():
            logger.info("class numbers begin at 1: the first name is that of class 1")
        labels = labels - 1
    if labels.max(initial=-1) >= len(names):
        raise DualencError(
            f"{len(names)} class names, but there is a label {labels.max()}",
            fix="name every class, that of label 0 first",
            where=file or data,
        )
    listed = [name.casefold() for name in names]
    own = [readable_class(name).casefold() for name in recorded]
    if len(set(listed)) == len(listed) and set(own) <= set(listed):
        return names, align_labels(labels, own, listed, data)
    if not are_numbers(own):
        _check_order(file, listed, own)
    return names, labels


def _check_order(file: str | None, listed: Sequence[str], recorded: Sequence[str]) -> None:
    """Raise unless the names in a file can stand for the classes of the data in their order."""
    moved = [name for name, line in zip(recorded, listed) if name != line and name in listed]
    if moved:
        problem = f"lists {moved[0]} at the place of another class of the data, and not all of them"
    elif len(recorded) != len(listed):
        problem = f"{len(listed)} class names for {len(recorded)} classes, which it does not list"
    else:
        return
    fix = "name each class of the data, or use its names"
    raise DualencError(f"{problem} by name", fix=fix, where=file or "")


def _conclude(
    evaluation: EvaluationFolder,
    data: str,
    split: str,
    names: Sequence[str],
    labels: np.ndarray,
    ranks: Integers,
) -> EvaluationResult:
    """Write accuracies over all images and by class."""
    by_class: list[dict[str, Any]] = []
    for number in np.unique(labels).tolist():
        own = ranks[labels == number]
        by_class.append(
            {
                "class": names[number],
                "images": len(own),
                "top@1": float(np.mean(own == 1)),
            }
        )
    scores = zero_shot_accuracy(ranks, labels, len(names), CUTOFFS)
    name = short_name(data)
    sizes = {"images": len(ranks), "classes": len(names)}
    return evaluation.conclude(
        "Zero-shot classification",
        name,
        {"data": data, "split": split},
        {**sizes, "metrics": scores, "per_class": by_class},
        [
            Table("Zero-shot classification", [{"data": name, **sizes, **scores}]),
            Table("By class, hardest first", sorted(by_class, key=itemgetter("top@1"))),
        ],
    )
