"""Labeled images for evaluations: open them, and embed their features."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from dualenc.data import Corpus, open_corpus
from dualenc.data.labels import rows_with_label
from dualenc.data.readers.detect import detect
from dualenc.data.readers.images import split_folder
from dualenc.data.store.items import rows_of
from dualenc.encoders import Tower, load_model
from dualenc.errors import DualencError
from dualenc.workflows.evaluation_folder import EvaluationFolder
from dualenc.workflows.session import recorded_name

logger = logging.getLogger("dualenc.workflows")

TEST_SHARE = 0.2


def random_rows(total: int, limit: int | None, seed: int) -> np.ndarray:
    """Return all row numbers below `total`, or a random sample of `limit`, ascending.

    Random, because files are often sorted by class.
    """
    return np.sort(np.random.default_rng(seed).permutation(total)[:limit])


def open_images(
    data: str,
    split: str,
    label_column: str | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
) -> Corpus:
    """Open images and their labels, if there are any.

    If some images have labels, those without are left out, counted and logged.

    Args:
        data: images: a table, a hub name, or a folder of class folders.
        split: split of a data set that has several.
        label_column: column of a table; by default `label`.
        limit: open a random subset of this many images.
        seed: random seed of the subset.

    Raises:
        DualencError: if the data holds texts or vectors.
    """
    images = open_corpus(data, modality="image", split=split, label_column=label_column)
    if images.modality != "image":
        raise DualencError(f"holds {images.modality}", fix="give images", where=data)
    # An image without a label can be neither trained on nor counted as right or wrong.
    if images.labels is not None:
        rows = rows_with_label(images.labels, data, images.ids)
        images = images if len(rows) == len(images) else images.take(rows)
    if limit is None or limit >= len(images):
        return images
    return images.take(random_rows(len(images), limit, seed))


def split_images(
    data: str,
    split: str,
    label_column: str | None = None,
    *,
    limit: int | None = None,
    train_limit: int | None = None,
    seed: int = 0,
) -> tuple[Corpus, Corpus]:
    """Open images without splits, and return those to train a probe on and a fifth to test.

    Args:
        data: images, see `open_images`.
        split: the only split.
        label_column: column of a table; by default `label`.
        limit: test on a random subset of this many images.
        train_limit: train on a random subset of this many images.
        seed: random seed of the split.
    """
    images = open_images(data, split, label_column)
    rows = np.random.default_rng(seed).permutation(len(images))
    num_tested = max(1, round(TEST_SHARE * len(rows)))
    tested, others = rows[:num_tested][:limit], rows[num_tested:][:train_limit]
    logger.info(
        "%s: there are no splits; %d random images are tested, and %d others train the probe",
        data,
        len(tested),
        len(others),
    )
    return images.take(np.sort(others)), images.take(np.sort(tested))


def are_same_images(train: str, train_split: str, data: str, split: str) -> bool:
    """Return True if both names and splits lead to the same images."""
    parts: set[Any] = {train_split, split}
    is_same = recorded_name(train) == recorded_name(data)
    if is_same and detect(data) == "images":
        # Two split names may lead to one folder, if the folder is not divided into splits.
        parts = {split_folder(data, part) for part in parts}
    return is_same and len(parts) == 1


def require_other_images(train: str, train_split: str, data: str, split: str) -> None:
    """Raise if a probe would be tested on the images that it was trained on."""
    if are_same_images(train, train_split, data, split):
        raise DualencError(
            "a probe would be tested on its own training images",
            fix="name other images to train on: --train",
            where=data,
        )


def require_labels(corpus: Corpus, what: str, *, for_training: bool = False) -> np.ndarray:
    """Return the (N,) labels of a corpus that `open_images` opened.

    Args:
        corpus: N images.
        what: name of the images in errors.
        for_training: require two classes or more.

    Raises:
        DualencError: if the images lack labels, or there are too few classes.
    """
    if corpus.labels is None:
        raise DualencError(
            "the images lack labels",
            fix="name their column with --label-column, or use class folders",
            where=what,
        )
    if for_training and len(np.unique(corpus.labels)) < 2:
        raise DualencError(
            "all images are of one class", fix="a probe needs two or more", where=what
        )
    return corpus.labels


def labeled_features(
    evaluation: EvaluationFolder,
    part: str,
    tower: Tower,
    corpus: Corpus,
    labels: np.ndarray,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Return features (N, D) and labels (N,) of the images that could be read.

    Args:
        evaluation: output folder; the features are stored below `features/PART`.
        part: name of the part, "train" or "test".
        tower: image tower.
        corpus: images.
        labels: their class numbers.
        options: arguments of `dualenc.workflows.session.embed_into`.
    """
    embedded = evaluation.embed_items(
        f"features/{part}", tower, corpus, output="features", **options
    )
    # Unreadable images have been left out of the embeddings.
    rows = rows_of(corpus.ids, embedded.ids)
    return np.asarray(embedded.vectors, np.float32), labels[rows]


def open_image_tower(evaluation: EvaluationFolder) -> Tower:
    """Load the image tower of a model of kind image or image-text, in evaluation mode."""
    encoder = load_model(evaluation.model, device=str(evaluation.device))
    if encoder.left.modality != "image":
        raise DualencError(
            f"is of kind {encoder.kind} and does not encode images",
            fix="give a model of kind image",
            where=evaluation.model,
        )
    # Dropout and BatchNorm would make features depend on the batch.
    encoder.eval()
    evaluation.check_weights(encoder.left)
    return encoder.left
