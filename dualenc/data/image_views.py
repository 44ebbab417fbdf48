"""Unimodal data: images without partners; left and right are two augmentations of the same image."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualenc.data.arrow_cache import Kind
from dualenc.data.columns import Column, Images, Picked, filled
from dualenc.data.images import ImageFiles, find_images
from dualenc.data.labels import Labels, labels_of_column, labels_of_folders
from dualenc.data.pairs import Items, PairDataset
from dualenc.data.skips import OnError, Skips
from dualenc.data.tables import open_table


class ImageViews(PairDataset):
    """Images that are their own partners: `left_id == right_id == index`.

    Args:
        images: raw images.
        labels: their classes, where known; training does not look at them.

    Attributes:
        labels: (N,) class numbers, -1 for an image without one; None if there are no labels.
        class_names: name of each class number, or None.
    """

    views = True

    def __init__(self, images: Items, labels: Labels | None = None) -> None:
        super().__init__(images, images, left_modality="image", right_modality="image")
        self.labels: np.ndarray | None = None if labels is None else labels.numbers
        self.class_names: list[str] | None = None if labels is None else labels.names

    def subset(self, rows: np.ndarray) -> ImageViews:
        """The images of some rows (n,), in their order."""
        labels = None if self.labels is None else Labels(self.labels[rows], self.class_names or [])
        return ImageViews(Picked(self.left_items, rows), labels)

    def sample(self, count: int, seed: int = 0) -> ImageViews:
        """A random part of the images, each at most once; files are often sorted by class, so their head is no sample.

        Args:
            count: how many; all of them, in random order, if there are fewer.
            seed: of the draw.
        """
        return self.subset(np.random.default_rng(seed).permutation(len(self))[:count])


class TableViews(ImageViews):
    """Images of a table: a parquet or other local file, a saved data set, or the Hugging Face hub.

    Args:
        path: what `TablePairs` takes.
        image_column: file contents, `datasets` images, or paths relative to the table.
        label_column: class numbers or names; by default `label`, if there is such a column.
        split: of a folder, saved data set or hub name.
        subset: configuration of a hub data set.
        limit: read the first rows only.
        allow_outside: whether image paths may lead out of the table's folder; only for a table that you trust.
        on_error: "skip" leaves out, counts and reports rows without an image; "raise" stops at the first.

    Raises:
        DualencError: no such file, column or split; no usable image.
        BadSample: a row without an image, under on_error="raise".
    """

    def __init__(
        self,
        path: str | Path,
        image_column: str = "image",
        label_column: str | None = None,
        *,
        split: str = "train",
        subset: str | None = None,
        limit: int | None = None,
        allow_outside: bool = False,
        on_error: OnError = "skip",
    ) -> None:
        label = label_column or "label"
        columns: dict[str, Kind] = {image_column: "value", label: "value"}
        optional = () if label_column else (label,)
        table = open_table(
            path,
            columns,
            Skips(path, on_error),
            optional=optional,
            split=split,
            subset=subset,
            limit=limit,
            allow_outside=allow_outside,
        )
        column = Column.of(table, image_column, "image")
        there = filled(column)
        missing = np.flatnonzero(~there)
        if len(missing):
            reason = f"no image in column {image_column!r}"
            table.skips.bad(reason, table.where(int(missing[0])), "fill it in or remove the row", len(missing))
        rows = np.flatnonzero(there)
        table.skips.demand(len(rows), "image")
        labels = labels_of_column(table, label).take(rows) if table.has(label) else None
        super().__init__(Picked(Images(table, column), rows), labels)
        self.skipped = table.skips.report()


class ImageFolderViews(ImageViews):
    """Images of a folder and its subfolders, sorted by name; the first subfolder, if there is one, is the class.

    Args:
        path: the folder.

    Raises:
        DualencError: no such folder, or no image in it.
    """

    def __init__(self, path: str | Path) -> None:
        names = find_images(path)
        super().__init__(ImageFiles(path, names), labels_of_folders(names))
