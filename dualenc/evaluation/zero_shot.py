"""Zero-shot classification: a class is the mean embedding of its prompts (Radford et al. 2021,
§3.1)."""

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
    """The lines of a text file that are not blank, without spaces at their ends, each with its
    place."""
    with explain(f"{path}: cannot be read", "name a text file"), open_regular(path) as stream:
        for number, line in enumerate(stream, start=1):
            place = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig").strip()
            except UnicodeDecodeError as error:
                reason = f"byte 0x{line[error.start]:02x}"
                raise DualencError(
                    f"{place}: not UTF-8 text ({reason}); save the file as UTF-8"
                ) from None
            if text:
                yield place, text


def read_templates(path: StrPath) -> list[str]:
    """Prompt templates from a text file, one on each line, `{}` standing for the class; blank lines
    are left out."""
    templates = []
    for place, line in read_lines(path):
        if line.count("{}") != 1:
            raise DualencError(
                f"{place}: a template needs {{}} once, where the class goes; fix the line"
            )
        templates.append(line)
    if not templates:
        raise DualencError(
            f"{path}: holds no template; write one on each line, with {{}} where the class goes"
        )
    return templates


def readable_class(name: str) -> str:
    """A class name for prompts: without a leading WordNet id, spaces for underscores."""
    return re.sub(r"^n\d{8}[\s_-]+(?=\S)", "", name).replace("_", " ").strip()


def class_prompts(class_names: Sequence[str], templates: Sequence[str] = TEMPLATES) -> list[str]:
    """Every template filled with every class, (C · T) texts, all of the first class first."""
    check_several("class_names", class_names)
    templates = list(one_or_several(templates))
    return [template.replace("{}", name) for name in class_names for template in templates]


def class_embeddings(prompts: Vectors, num_classes: int) -> Vectors:
    """Ensemble the (C · T, D) embeddings of `class_prompts`: for each class the mean of its unit
    vectors, (C, D) unit vectors."""
    rows = unit_rows(prompts, "prompts")
    return unit_rows(rows.reshape(num_classes, -1, rows.shape[1]).mean(axis=1), "classes")


def zero_shot_accuracy(
    ranks: Integers,
    labels: Sequence[int] | Integers,
    num_classes: int,
    cutoffs: Sequence[int] = (1, 5),
) -> Scores:
    """Share of images whose class is among the first k ("top@k"), and the mean over classes of
    top-1.

    Args:
        ranks, labels: (A,) ranks, from 1, of each image's own class among all, and class numbers.
        num_classes: C; a cut-off of C or more is left out.
        cutoffs: the k.
    """
    labels = np.asarray(labels)
    scores = {f"top@{k}": float(np.mean(ranks <= k)) for k in cutoffs if k == 1 or k < num_classes}
    # Of the classes that occur: a test set may lack some.
    per_class = [float(np.mean(ranks[labels == number] <= 1)) for number in np.unique(labels)]
    return {**scores, "mean_per_class": float(np.mean(per_class))}
