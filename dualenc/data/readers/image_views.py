"""Images for unimodal training, from memory, tables and folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualenc.data.corpus import image_corpus, table_corpus
from dualenc.data.item_lists import Picked
from dualenc.data.pairs import PairDataset
from dualenc.data.readers.images import split_folder
from dualenc.data.readers.read_options import ONLY_SPLIT, ReadOptions
from dualenc.data.readers.tables import TableSource
from dualenc.types import Integers, Items, OnError


class ImageViews(PairDataset):
    """Images for unimodal training: both sides of a pair are views of one image.

    `left_id == right_id == index` for every pair. Labels are only used in evaluation.

        ImageViews(images, labels=np.zeros(len(images)))

    Args:
        images: raw images.
        labels: class numbers (N,), -1 for images without a class; None without classes.
        class_names: name of each class number.
    """

    views = True

    def __init__(
        self, images: Items, labels: np.ndarray | None = None, class_names: list[str] | None = None
    ) -> None:
        super().__init__(images, images, left_modality="image", right_modality="image")
        self.labels = labels
        self.class_names = class_names

    def subset(self, rows: Integers) -> ImageViews:
        """Return the images of some rows (n,), in their order."""
        labels = None if self.labels is None else self.labels[rows]
        return ImageViews(Picked(self.left_items, rows), labels, self.class_names)

    def sample(self, count: int, seed: int = 0) -> ImageViews:
        """Return at most `count` random images.

        Files are often sorted by class, so the first ones are not a random sample.
        """
        return self.subset(np.random.default_rng(seed).permutation(len(self))[:count])


class TableViews(ImageViews):
    """Images of a table: a parquet or other local file, a saved data set, or the Hugging Face hub.

    Each image is paired with itself, see `ImageViews`.

        TableViews("cifar10/train.parquet").class_names

    Args:
        path: table, see `TablePairs`.
        image_column: file contents, `datasets` images, or paths relative to the table.
        label_column: class numbers or names; by default `label`, if there is such a column.
        split: which split of a folder, saved data set or hub name.
        subset: configuration of a hub data set.
        allow_outside: whether image paths may lead out of the table's folder; only for a table that
            you trust.
        quotes: whether `"` encloses fields, see `TablePairs`.
        on_error: "skip" leaves out, counts and reports bad rows; "raise" stops at the first.
    """

    def __init__(
        self,
        path: str | Path,
        image_column: str = "image",
        label_column: str | None = None,
        *,
        split: str = "train",
        subset: str | None = None,
        allow_outside: bool = False,
        quotes: bool | None = None,
        on_error: OnError = "skip",
    ) -> None:
        options = ReadOptions(split, quotes, allow_outside, on_error)
        bad_rows = options.bad_rows(path)
        source = TableSource(path, bad_rows, options=options, subset=subset)
        # A column that the user named must exist; the default may be missing.
        optional = () if label_column else ("label",)
        label_column = label_column or "label"
        corpus = table_corpus(
            source, image_column, "image", optional=optional, label_column=label_column
        )
        super().__init__(corpus.items, corpus.labels, corpus.class_names)
        self.skipped = bad_rows.report()


class ImageFolderViews(ImageViews):
    """Images of a folder and its subfolders, sorted by name.

    The first subfolder of an image's path, if there is one, is its class.

        ImageFolderViews("photos").class_names

    Args:
        path: the folder; if it is divided into splits (`train`, `val`, …), its subfolder `train` is
            read.
    """

    def __init__(self, path: str | Path) -> None:
        corpus = image_corpus(split_folder(path, ONLY_SPLIT))
        super().__init__(corpus.items, corpus.labels, corpus.class_names)
