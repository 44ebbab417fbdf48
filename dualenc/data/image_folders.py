"""Folders of images with captions: a table of captions, or a text file beside each image."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualenc.data.columns import Column, Images, Labels, Picked, filled, labels_of_column, labels_of_folders
from dualenc.data.images import ImageFiles, find_images
from dualenc.data.lines import read_text_lines
from dualenc.data.pairs import Items, PairDataset
from dualenc.data.skips import Skips
from dualenc.data.table_pairs import ColumnPairs
from dualenc.data.tables import TABLE_FORMATS, Kind, Table, open_table, peek_columns
from dualenc.errors import DualencError
from dualenc.types import OnError

IMAGE_NAMES = ("file_name", "image", "filename", "image_path", "path", "file")
CAPTION_NAMES = ("captions", "caption", "text", "texts", "description")


class ImageFolderPairs(ColumnPairs):
    """Images of a folder with their captions.

    The captions stand in a table (.csv, .tsv, .jsonl, .parquet) with a column of file names and one of captions; a
    file may stand on several rows, and a row may hold a list of captions. Without a table, `photo.txt` beside
    `photo.jpg` holds its captions, one per line.

    Args:
        path: the folder of images.
        captions: the table; by default `metadata.*` or `captions.*` in the folder, and if there is none the text
            files.
        image_column: file names, relative to the folder; by default one of file_name, image, filename, path.
        caption_column: captions; by default one of captions, caption, text.
        deduplicate: equal captions are the same item and share an id.
        on_error: "skip" leaves out, counts and reports bad rows; "raise" stops at the first.

    Raises:
        DualencError: no such folder, file or column; nothing usable.
        BadSample: an empty caption, an image that is not in the folder or has no caption, under on_error="raise".
    """

    def __init__(
        self,
        path: str | Path,
        captions: str | Path | None = None,
        *,
        image_column: str | None = None,
        caption_column: str | None = None,
        deduplicate: bool = True,
        on_error: OnError = "skip",
    ) -> None:
        folder, names = Path(path), find_images(path)
        file = _captions_file(folder) if captions is None else Path(captions)
        if file is None:
            image_column, caption_column = "image", "captions"
            table = _table_of_text_files(folder, names, Skips(path, on_error))
        else:
            columns = list(peek_columns(file))
            image_column = image_column or _first(file, columns, IMAGE_NAMES, "image_column")
            caption_column = caption_column or _first(file, columns, CAPTION_NAMES, "caption_column")
            table = open_table(file, {image_column: "value", caption_column: "list"}, Skips(file, on_error))
            table = _only_images(table, folder, image_column, set(names))
        super().__init__(
            table, image_column, caption_column, left_modality="image", right_modality="text", deduplicate=deduplicate
        )


def _table_of_text_files(folder: Path, names: list[str], skips: Skips) -> Table:
    from datasets import Dataset, Features, List, Value

    rows = []
    for name in names:
        file = (folder / name).with_suffix(".txt")
        lines = read_text_lines(file, skips) if file.is_file() else ()
        captions = [line.strip() for _, line in lines if line.strip()]
        if captions:
            rows.append({"image": name, "captions": captions})
        else:
            skips.bad("image without a caption", str(folder / name), f"write one to {file.name}, pass captions=TABLE")
    skips.demand(len(rows), "image with a caption")
    features = Features({"image": Value("string"), "captions": List(Value("string"))})
    return Table(str(folder), Dataset.from_list(rows, features=features), skips, folder, allow_outside=True)


def _only_images(table: Table, folder: Path, column: str, known: set[str]) -> Table:
    """The rows whose images are in the folder; the others are told to the table's `skips`."""
    import pyarrow as pa
    from datasets import Dataset

    names = Column.of(table, column, "text")
    files = names.values(np.arange(len(names))).tolist()
    there = np.array([not file or Path(file).as_posix() in known for file in files], dtype=bool)
    for row in np.flatnonzero(~there).tolist():
        table.skips.bad("image that is not in the folder", table.where(row), f"{files[row]!r} is not in {folder}")
    table.root, table.allow_outside = folder, True  # links in a folder of images are followed, as without captions
    if not there.all():
        table.dataset = Dataset(table.dataset.data.filter(pa.array(there)))
    return table


def _captions_file(folder: Path) -> Path | None:
    wanted = [folder / f"{stem}{suffix}" for stem in ("metadata", "captions") for suffix in TABLE_FORMATS]
    return next((file for file in wanted if file.is_file() and file.suffix != ".txt"), None)


def _first(file: Path, columns: list[str], names: tuple[str, ...], argument: str) -> str:
    found = next((name for name in names if name in columns), None)
    if found is None:
        raise DualencError(f"{file}: none of the columns {', '.join(columns)} is known; name one by {argument}=")
    return found


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
