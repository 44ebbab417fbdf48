"""Zero-shot classification: an image-text model names the class of images from prompts."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from dualenc import distributed
from dualenc.commands.labelled_images import open_images, require_labels
from dualenc.commands.output import Evaluation
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
from dualenc.workflows.session import short_name

if TYPE_CHECKING:
    from dualenc.commands.evaluate import ZeroShotOptions
    from dualenc.commands.options import OutputOptions

CUTOFFS = (1, 5)


def evaluate_zero_shot(
    model: str, data: str, options: ZeroShotOptions, output: OutputOptions
) -> None:
    """Give each image the class whose prompts are nearest."""
    evaluation = Evaluation("zero-shot", model, data, output)
    templates = TEMPLATES if options.templates is None else read_templates(options.templates)
    split = options.split or default_split(data)
    images = open_images(data, split, options.label_column)
    labels = require_labels(images, f"{data}, {split}")
    names, labels = _class_names(options.class_names, images.class_names, labels, data)
    prompts = class_prompts(names, templates)
    corpus = Corpus([str(number) for number in range(len(prompts))], prompts, "text")
    encoder = evaluation.open("image-text")
    embedded = evaluation.embed(
        f"embeddings/images-{split}", encoder, "left", images, options.batch_size
    )
    vectors = np.asarray(embedded.vectors, np.float32)
    embedded_prompts = evaluation.embed(
        "embeddings/prompts", encoder, "right", corpus, options.batch_size
    )
    classes = class_embeddings(np.asarray(embedded_prompts.vectors, np.float32), len(names))
    # Of the images that could be read.
    labels = labels[rows_of(images.ids, embedded.ids)]
    ranks = best_positive_ranks(vectors, classes, labels[:, None].tolist())
    if distributed.is_main():
        by_class: list[dict[str, Any]] = []
        for number in np.unique(labels).tolist():
            own = ranks[labels == number]
            by_class.append(
                {"class": names[number], "images": len(own), "top@1": float(np.mean(own == 1))}
            )
        scores = zero_shot_accuracy(ranks, labels, len(names), CUTOFFS)
        sizes = {"images": len(ranks), "classes": len(names)}
        evaluation.conclude(
            "Zero-shot classification",
            short_name(data),
            {"model": model, "data": data, "split": split},
            {**sizes, "metrics": scores, "per_class": by_class},
            [
                Table("Zero-shot classification", [{"data": short_name(data), **sizes, **scores}]),
                Table("By class, hardest first", sorted(by_class, key=itemgetter("top@1"))),
            ],
            printed=1,
        )
    distributed.barrier()


def _class_names(
    file: str | None, own: Sequence[str] | None, labels: np.ndarray, data: str
) -> tuple[list[str], np.ndarray]:
    """Readable names of all classes, from a file or from the data, and the labels (N,) in their
    numbers."""
    own = own or ()
    lines = own if file is None else [line for _, line in read_lines(file)]
    names = [readable_class(line) for line in lines]
    if are_numbers(names):
        raise DualencError(
            f"{data}: the classes have no names; give them with --class_names FILE, one on each line"
        )
    if not are_numbers(own) and set(own) <= {*lines, *(line.split()[0] for line in lines)}:
        # A file may list the classes of the data in another order, and others among them.
        return names, align_labels(labels, own, lines, data)
    if (
        file is not None
        and are_numbers(own)
        and labels.min(initial=2) == 1
        and labels.max() == len(names)
    ):
        if distributed.is_main():
            print("class numbers begin at 1: the first name is that of class 1")
        labels = labels - 1
    if labels.max(initial=-1) >= len(names):
        problem = f"{len(names)} class names, but there is a label {labels.max()}"
        raise DualencError(f"{file or data}: {problem}; name every class, that of label 0 first")
    listed, recorded = ([readable_class(name).casefold() for name in each] for each in (lines, own))
    if len(set(listed)) == len(listed) and set(recorded) <= set(listed):
        return names, align_labels(labels, recorded, listed, data)
    moved = [name for name, line in zip(recorded, listed) if name != line and name in listed]
    if (moved or len(recorded) != len(names)) and not are_numbers(recorded):
        problem = (
            f"{len(names)} class names for {len(recorded)} classes, which it does not list by name"
        )
        if moved:
            problem = f"lists {moved[0]} at the place of another class of the data, and not all of them by name"
        raise DualencError(f"{file}: {problem}; name each class of the data, or use its names")
    return names, labels
