"""Zero-shot classification: the embedding of a class is the mean of its prompts' embeddings.

Source: Radford et al. 2021, arXiv 2103.00020, section 3.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from dualenc.errors import DualencError, explain
from dualenc.evaluation.metrics import Scores
from dualenc.evaluation.probe import unit_rows
from dualenc.io.reading import open_regular
from dualenc.types import Integers, StrPath, Vectors, check_several, one_or_several

TEMPLATES: tuple[str, ...] = (
    "a photo of a {}.",
    "a picture that shows a {}.",
    "a small, blurry photo of a {}.",
    "a sharp close-up of a {}.",
    "a {} seen from afar.",
    "part of a {}.",
    "several {} together.",
    "a drawing of a {}.",
)
"""Prompts for objects of any kind; `{}` stands for the class."""


def read_lines(path: StrPath) -> Iterator[tuple[str, str]]:
    """Yield the lines of a text file that are not blank, stripped, each after its location.

    Args:
        path: text file in UTF-8, with or without a byte order mark.

    Raises:
        DualencError: if the file cannot be read or is not UTF-8.
    """
    with explain(f"{path}: cannot be read", "name a text file"), open_regular(path) as stream:
        for number, line in enumerate(stream, start=1):
            location = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig").strip()
            except UnicodeDecodeError as error:
                raise DualencError(
                    f"not UTF-8 text (byte 0x{line[error.start]:02x})",
                    fix="save the file as UTF-8",
                    where=location,
                ) from None
            if text:
                yield location, text


def read_templates(path: StrPath) -> list[str]:
    """Read prompt templates from a text file, one per line; `{}` stands for the class.

    Args:
        path: text file; blank lines are skipped.

    Raises:
        DualencError: if a line does not have `{}` exactly once, or the file is empty.
    """
    templates = []
    for location, line in read_lines(path):
        if line.count("{}") != 1:
            raise DualencError(
                "a template needs {} once, where the class goes",
                fix="fix the line",
                where=location,
            )
        templates.append(line)
    if not templates:
        raise DualencError(
            "does not contain a template",
            fix="write one on each line, with {} where the class goes",
            where=path,
        )
    return templates


def readable_class(name: str) -> str:
    """Return a class name for prompts: without a leading WordNet id, spaces for underscores."""
    # ImageNet's class folders may be named "n01440764_tench".
    return re.sub(r"^n\d{8}[\s_-]+(?=\S)", "", name).replace("_", " ").strip()


def class_prompts(class_names: Sequence[str], templates: Sequence[str] = TEMPLATES) -> list[str]:
    """Fill every template with every class.

    Args:
        class_names: C class names.
        templates: T templates, with `{}` for the class.

    Returns:
        C · T texts, all of the first class first.
    """
    check_several("class_names", class_names)
    templates = list(one_or_several(templates))
    return [template.replace("{}", name) for name in class_names for template in templates]


def class_embeddings(prompts: Vectors, num_classes: int) -> Vectors:
    """Average the embeddings of the prompts of each class.

    Args:
        prompts: (C · T, D) embeddings of `class_prompts`.
        num_classes: C.

    Returns:
        (C, D) unit vectors, each the normalized mean of T unit vectors.
    """
    rows = unit_rows(prompts, "prompts")
    by_class = rows.reshape(num_classes, -1, rows.shape[1])
    return unit_rows(by_class.mean(axis=1), "classes")


def zero_shot_accuracy(
    ranks: Integers,
    labels: Sequence[int] | Integers,
    num_classes: int,
    cutoffs: Sequence[int] = (1, 5),
) -> Scores:
    """Return the share of images whose class is among the first k, and mean accuracy per class.

    Args:
        ranks: (A,) rank from 1 of each image's own class among all classes.
        labels: (A,) class numbers.
        num_classes: C; a cutoff of C or more is left out, because it is always reached.
        cutoffs: the values of k.

    Returns:
        "top@k" by cutoff, and "mean_per_class", the mean of top-1 over classes.
    """
    labels = np.asarray(labels)
    scores = {}
    for k in cutoffs:
        if k == 1 or k < num_classes:
            scores[f"top@{k}"] = float(np.mean(ranks <= k))
    # Only classes that occur: a test set may lack some.
    per_class = [np.mean(ranks[labels == number] <= 1) for number in np.unique(labels)]
    scores["mean_per_class"] = float(np.mean(per_class))
    return scores
