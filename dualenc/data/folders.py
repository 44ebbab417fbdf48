"""Folders of images with captions: a table of captions, or a text file beside each image."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualenc.data.column_pairs import ColumnPairs
from dualenc.data.columns import Column
from dualenc.data.images import find_images
from dualenc.data.lines import read_text_lines
from dualenc.data.skips import OnError, Skips
from dualenc.data.tables import TABLE_FORMATS, Table, open_table, peek_columns
from dualenc.errors import DualencError

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
