"""Labelled images for evaluations: opening and features."""

from __future__ import annotations

from typing import Any

import numpy as np

from dualenc.commands.output import Evaluation
from dualenc.data import Corpus, open_corpus
from dualenc.data.labels import rows_with_label
from dualenc.data.readers.detect import detect
from dualenc.data.readers.images import split_folder
from dualenc.data.store.items import rows_of
from dualenc.encoders import Tower, load_model
from dualenc.errors import DualencError
from dualenc.workflows.session import embed_into, recorded_name


def random_rows(total: int, limit: int | None, seed: int) -> np.ndarray:
    """All row numbers below `total`, or a sample of `limit`: files are often sorted by class."""
    return np.sort(np.random.default_rng(seed).permutation(total)[:limit])


def open_images(
    data: str,
    split: str,
    label_column: str | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
) -> Corpus:
    """Open images and their labels, if there are any; `limit` of them at random.

    If some images have labels, those without are left out, counted and reported.
    """
    images = open_corpus(data, modality="image", split=split, label_column=label_column)
    if images.modality != "image":
        raise DualencError(f"{data}: holds {images.modality}; give images")
    if images.labels is not None:
        rows = rows_with_label(images.labels, data, images.ids)
        images = images if len(rows) == len(images) else images.take(rows)
    if limit is None or limit >= len(images):
        return images
    return images.take(random_rows(len(images), limit, seed))


def require_other_images(train: str, train_split: str, data: str, split: str) -> None:
    """Refuse to test a probe on the images that it was trained on."""
    parts: set[Any] = {train_split, split}
    is_same = recorded_name(train) == recorded_name(data)
    if is_same and detect(data) == "images":
        parts = {split_folder(data, part) for part in parts}
    if is_same and len(parts) == 1:
        raise DualencError(
            f"{data}: a probe would be tested on its own images; name others: --train"
        )


def require_labels(corpus: Corpus, what: str, *, for_training: bool = False) -> np.ndarray:
    """The (N,) labels of a corpus that `open_images` opened; for training two classes or more."""
    if corpus.labels is None:
        raise DualencError(
            f"{what}: there are no labels; name their column with --label-column, or use class folders"
        )
    if for_training and len(np.unique(corpus.labels)) < 2:
        raise DualencError(f"{what}: all images are of one class; a probe needs two or more")
    return corpus.labels


def labelled_features(
    evaluation: Evaluation,
    part: str,
    tower: Tower,
    corpus: Corpus,
    labels: np.ndarray,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Features (N, D) and labels (N,) of the images that could be read, stored below `features` of
    the output."""
    folder = evaluation.folder / "features" / part
    embedded = evaluation.noted(embed_into(folder, tower, corpus, output="features", **options))
    return np.asarray(embedded.vectors, np.float32), labels[rows_of(corpus.ids, embedded.ids)]


def open_image_tower(evaluation: Evaluation) -> Tower:
    """The image tower of a model of kind image or image-text, in evaluation mode."""
    encoder = load_model(evaluation.model, device=str(evaluation.device))
    if encoder.left.modality != "image":
        raise DualencError(
            f"{evaluation.model}: is of kind {encoder.kind} and encodes no images; give a model of kind image"
        )
    encoder.eval()
    evaluation.check_weights(encoder.left)
    return encoder.left
