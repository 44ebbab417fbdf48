"""Images of a folder with their captions, from a table in it or a text file beside each image."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from pathlib import Path

from dualenc.data.bad_rows import BadRows
from dualenc.data.columns import Column, read_column
from dualenc.data.readers.column_names import CAPTIONS, IMAGE_FILES
from dualenc.data.readers.column_pairs import ColumnPairs, open_with_weights
from dualenc.data.readers.detect import CAPTION_FILES
from dualenc.data.readers.images import existing_file, find_images, split_folder
from dualenc.data.readers.lines import read_records
from dualenc.data.readers.read_options import ONLY_SPLIT, ReadOptions
from dualenc.data.readers.tables import DataTable, TableSource
from dualenc.io.reading import is_utf8, with_home
from dualenc.types import OnError


class ImageFolderPairs(ColumnPairs):
    """Images of a folder with their captions.

    The captions are in a table `metadata.*` or `captions.*` in the folder, with a column of file
    names (file_name, image, filename, path) and one of captions, or lists of them (captions,
    caption, text). Without a table, `photo.txt` holds the captions of `photo.jpg`, one per line.

        ImageFolderPairs("photos")[0].right

    Args:
        path: the folder of images; if it is divided into splits (`train`, `val`, …), its subfolder
            `train` is read.
        weight_column: column of weights, see `TablePairs`.
        deduplicate: equal captions, and equal paths of images, are the same item and share an id.
        quotes: whether `"` encloses fields of the table, see `TablePairs`.
        on_error: "skip" leaves out, counts and reports bad rows; "raise" stops at the first.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        weight_column: str | None = None,
        deduplicate: bool = True,
        quotes: bool | None = None,
        on_error: OnError = "skip",
    ) -> None:
        folder = with_home(Path(path))
        file = _captions_file(folder)
        # A table of captions in the folder itself covers all its splits.
        if file is None:
            folder = split_folder(folder, ONLY_SPLIT)
            file = _captions_file(folder)
        bad_rows = BadRows(path if file is None else file, on_error)
        names = find_images(folder)
        likely: list[str] = []
        if file is None:
            image_column = "image"
            caption_column = "captions"
            table = _table_of_text_files(folder, names, bad_rows)
        else:
            # Links among a folder's images are followed.
            # Only rows whose image was found in the folder are kept below, so paths are safe.
            options = ReadOptions(quotes=quotes, allow_outside=True)
            source = TableSource(file, bad_rows, options=options)
            other = "or read the table with TablePairs, as the recipe image-captions does"
            image_column = source.default_column(
                IMAGE_FILES, "file_name", fix=f"rename it to file_name, {other}"
            )
            caption_column = source.default_column(
                CAPTIONS, "caption", fix=f"rename it to caption, {other}"
            )
            table, weight_column, likely = open_with_weights(
                source, {image_column: "value", caption_column: "list"}, weight_column
            )
            table = _rows_of_files(table, image_column, names)
        super().__init__(
            read_column(table, image_column, "image"),
            read_column(table, caption_column, "text"),
            weight_column=weight_column,
            likely_labels=likely,
            deduplicate=deduplicate,
        )


def _captions_file(folder: Path) -> Path | None:
    """Return the table of captions in a folder; None without one."""
    return next((folder / name for name in CAPTION_FILES if (folder / name).is_file()), None)


def _rows_of_files(table: DataTable, image_column: str, names: list[str]) -> DataTable:
    """Return the rows whose image is in the folder.

    Rows are matched by name, so their paths cannot lead out of the folder.
    """
    # macOS decomposes accents in file names (NFD), most tables compose them (NFC).
    known = {unicodedata.normalize("NFC", name) for name in names}
    rows = []
    for row, name in enumerate(Column(table, image_column, "text").values()):
        if not name or unicodedata.normalize("NFC", Path(name).as_posix()) in known:
            rows.append(row)
        else:
            fix = f"{name!r} is not in {table.root}"
            table.bad_rows.add("image that is not in the folder", table.position(row), fix)
    # `select` only adds an index of rows; Arrow data is read directly, so it must be flattened.
    if len(rows) == len(table):
        return table
    return replace(table, dataset=table.dataset.select(rows).flatten_indices())


def _table_of_text_files(folder: Path, names: list[str], bad_rows: BadRows) -> DataTable:
    """Return a table of the captions in `photo.txt` for each `photo.jpg`, one per line."""
    from datasets import Dataset, Features, List, Value

    rows = []
    for name in names:
        if not is_utf8(name):
            bad_rows.add(
                "image whose name is not UTF-8", ascii(str(folder / name)), "rename the file"
            )
            continue
        # webdataset and img2dataset unpack to such pairs of files.
        file = existing_file(folder, str(Path(name).with_suffix(".txt")))
        records = read_records(file, bad_rows) if file.is_file() else ()
        captions = [record["text"].strip() for _, record in records]
        if captions:
            rows.append({"image": name, "captions": captions})
        else:
            fix = f"write one to {file.name}"
            bad_rows.add("image without a caption", str(folder / name), fix)
    bad_rows.require(len(rows), "image with a caption")
    # Explicit, because the type of an empty first list cannot be inferred.
    features = Features({"image": Value("string"), "captions": List(Value("string"))})
    dataset = Dataset.from_list(rows, features=features)
    return DataTable(str(folder), dataset, bad_rows, folder, allow_outside=True)
