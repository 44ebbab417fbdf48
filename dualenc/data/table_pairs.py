"""Pairs from tables and folders: columns of any table, mined negatives, images with captions, views of images."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import numpy as np

from dualenc.data.columns import (
    Chained,
    Column,
    ColumnImages,
    Labels,
    Picked,
    Texts,
    labels_of_column,
    labels_of_folders,
    number_distinct,
)
from dualenc.data.images import ImageFiles, find_images
from dualenc.data.lines import read_text_lines
from dualenc.data.pairs import Items, PairDataset, Ragged, Skips
from dualenc.data.tables import TABLE_FORMATS, DataTable, Kind, open_table, peek_columns
from dualenc.errors import DualencError
from dualenc.types import Modality, OnError

IMAGE_NAMES = ("file_name", "image", "filename", "image_path", "path", "file")
CAPTION_NAMES = ("captions", "caption", "text", "texts", "description")


class ColumnPairs(PairDataset):
    """Pairs between the values of two columns of an opened table.

    Pair by pair in the order of rows; a row with a list on the right makes one pair for each entry, which share
    their left item. Ids are numbered in order of appearance.

    Args:
        table: the rows.
        left_column: one item in each row.
        right_column: an item or a list of items in each row.
        negative_column: mined negatives of the row's left item, a text or a list of texts.
        left_modality: "text" or "image"; found out from the values by default.
        right_modality: the same for the right column.
        deduplicate: equal texts, and equal image paths, of one side are the same item and share an id.
        max_negatives: keep that many negatives of each row, from the front.

    Raises:
        DualencError: nothing usable, or a list in the left column.
        BadSample: an empty cell, under on_error="raise".
    """

    def __init__(
        self,
        table: DataTable,
        left_column: str,
        right_column: str,
        negative_column: str | None = None,
        *,
        left_modality: Modality | None = None,
        right_modality: Modality | None = None,
        deduplicate: bool = True,
        max_negatives: int | None = None,
    ) -> None:
        left = _Values.of(table, left_column, left_modality)
        right = _Values.of(table, right_column, right_modality)
        if left.column.is_list:
            raise DualencError(f"{table.source}: column {left_column!r} holds lists; name it as right_column instead")
        good, there = left.column.filled(), right.column.filled()
        left.tell_empty(table, np.flatnonzero(~good))
        without = np.flatnonzero(np.bincount(right.rows, minlength=len(table)) == 0)
        empty = np.concatenate([without, right.rows[~there]])
        right.tell_empty(table, np.sort(empty[good[empty]]))
        right_at = np.flatnonzero(there & good[right.rows])  # position of the right value of every pair
        rows = right.rows[right_at]
        table.skips.demand(len(rows), "pair")
        left_first, left_number = left.number(np.unique(rows), deduplicate)
        negatives = Ragged.from_sorted(np.zeros(0, dtype=np.int64), np.zeros(0), len(table))
        if negative_column is not None:
            negative = _Values.of(table, negative_column, right.modality)
            negatives = _negatives_of_rows(table, negative, rows, max_negatives)
            right = right.chained(negative)
            negatives = negatives._replace(values=negatives.values + len(right.items) - len(negative.items))
        pool = np.concatenate([right_at, np.unique(negatives.values)])
        right_first, right_number = right.number(pool, deduplicate)
        super().__init__(
            Picked(left.items, left_first),
            Picked(right.items, right_first),
            left_number[rows],
            right_number[right_at],
            left_modality=left.modality,
            right_modality=right.modality,
        )
        if negative_column is not None:
            ids = Ragged(right_number[negatives.values], negatives.offsets).take(rows)
            self.negatives = self._without_positives(ids, rows, table)
        self.skipped = table.skips.report()

    def _without_positives(self, negatives: Ragged, rows: np.ndarray, table: DataTable) -> Ragged:
        """Leave out, and count, what is listed as a negative of its own positive pair partner."""
        left = np.repeat(self.left_id, negatives.lengths)
        positive = np.isin(left * self.num_right + negatives.values, self.left_id * self.num_right + self.right_id)
        if positive.any():
            pair = np.repeat(np.arange(len(self)), negatives.lengths)[np.argmax(positive)]
            reason = "negative that is also a positive"
            table.skips.bad(reason, table.where(int(rows[pair])), "remove it from the negatives", int(positive.sum()))
        return negatives.keep(~positive)


class _Values(NamedTuple):
    """One column laid flat, or two behind one another."""

    items: Items
    modality: Modality
    column: Column
    rows: np.ndarray  # the row each value stands in
    keys: Items | None  # strings that are equal for equal items, where that is cheap to know

    @classmethod
    def of(cls, table: DataTable, name: str, modality: Modality | None) -> _Values:
        modality = modality or Column(table.dataset, name).modality()
        column = Column.of(table, name, modality, lists=True)
        items = Texts(column) if modality == "text" else ColumnImages(table, column)
        keys = Texts(column) if modality == "text" or column.holds_strings else None
        return cls(items, modality, column, column.row_of_values(), keys)

    def chained(self, other: _Values) -> _Values:
        keys = None if self.keys is None or other.keys is None else Chained(self.keys, other.keys)
        return self._replace(items=Chained(self.items, other.items), keys=keys)

    def number(self, positions: np.ndarray, deduplicate: bool) -> tuple[np.ndarray, np.ndarray]:
        """First position of each distinct item, and by position the number of its item (-1: not among them)."""
        first, inverse = positions, np.arange(len(positions))
        if deduplicate and self.keys is not None:
            first, inverse = number_distinct(self.keys, positions)
        number = np.full(len(self.items), -1, dtype=np.int64)
        number[positions] = inverse
        return first, number

    def tell_empty(self, table: DataTable, rows: np.ndarray) -> None:
        """Count rows without a usable value."""
        if len(rows):
            reason = f"no {self.modality} in column {self.column.name!r}"
            table.skips.bad(reason, table.where(int(rows[0])), "fill it in or remove the row", len(rows))


def _negatives_of_rows(table: DataTable, negative: _Values, rows: np.ndarray, most: int | None) -> Ragged:
    """Positions of the filled negatives of each row that makes a pair."""
    there = negative.column.filled()
    negative.tell_empty(table, negative.rows[~there])
    paired = np.zeros(len(table), dtype=bool)
    paired[rows] = True
    kept = np.flatnonzero(there & paired[negative.rows])
    ragged = Ragged.from_sorted(negative.rows[kept], kept, len(table))
    rank = np.arange(len(kept)) - np.repeat(ragged.offsets[:-1], ragged.lengths)
    return ragged if most is None else ragged.keep(rank < most)


class TablePairs(ColumnPairs):
    """Pairs from any table: local files, a saved data set, or the Hugging Face hub.

    Args:
        path: a .jsonl, .json, .csv, .tsv, .txt or .parquet file, a glob or folder of such files, a folder written by
            `datasets.save_to_disk`, or a hub name.
        left_column: query or image. Images may be file contents, `datasets` images, or paths relative to the table.
        right_column: document or caption; a list of captions makes one pair each.
        negative_column: mined negatives, a text or a list of texts.
        split: of a folder, saved data set or hub name.
        subset: configuration of a hub data set.
        left_modality: "text" or "image"; found out from the values by default.
        right_modality: the same for the right column.
        image_root: where relative image paths start, and where images must lie; by default the table's folder.
        allow_outside: whether image paths may lead out of that folder; only for a table that you trust.
        deduplicate: equal texts, and equal image paths, of one side are the same item and share an id.
        max_negatives: keep that many negatives of each row, from the front.
        limit: read the first rows only.
        quotes: whether `"` encloses fields of csv and tsv files.
        on_error: "skip" leaves out, counts and reports bad rows; "raise" stops at the first.

    Raises:
        DualencError: no such file, column or split; nothing usable; a broken file.
        BadSample: a malformed line or an empty cell, under on_error="raise".
    """

    def __init__(
        self,
        path: str | Path,
        left_column: str,
        right_column: str,
        negative_column: str | None = None,
        *,
        split: str = "train",
        subset: str | None = None,
        left_modality: Modality | None = None,
        right_modality: Modality | None = None,
        image_root: str | Path | None = None,
        allow_outside: bool = False,
        deduplicate: bool = True,
        max_negatives: int | None = None,
        limit: int | None = None,
        quotes: bool = True,
        on_error: OnError = "skip",
    ) -> None:
        columns: dict[str, Kind] = {left_column: "value", right_column: "list"}
        if negative_column is not None:
            columns[negative_column] = "list"
        table = open_table(
            path,
            columns,
            Skips(path, on_error),
            split=split,
            subset=subset,
            limit=limit,
            quotes=quotes,
            allow_outside=allow_outside,
        )
        table.root = table.root if image_root is None else Path(image_root)
        super().__init__(
            table,
            left_column,
            right_column,
            negative_column,
            left_modality=left_modality,
            right_modality=right_modality,
            deduplicate=deduplicate,
            max_negatives=max_negatives,
        )


class MinedPairs(ColumnPairs):
    """Pairs with mined negatives, one query a line, as FlagEmbedding and Tevatron write them.

    FlagEmbedding: `{"query": …, "pos": [text, …], "neg": [text, …]}`. Tevatron: `{"query": …, "positive_passages":
    [{"docid", "title", "text"}, …], "negative_passages": […]}`. A query with several positives makes one pair each.
    Equal texts are the same item, wherever they stand.

    Args:
        path: a .jsonl file, or a glob of them.
        titles: join a passage's title to its text.
        max_negatives: keep that many negatives of each query, from the front.
        limit: read the first queries only.
        on_error: "skip" leaves out, counts and reports bad lines; "raise" stops at the first.

    Raises:
        DualencError: no such file, neither layout, nothing usable.
        BadSample: a malformed line, an empty query or passage, under on_error="raise".
    """

    def __init__(
        self,
        path: str | Path,
        *,
        titles: bool = True,
        max_negatives: int | None = None,
        limit: int | None = None,
        on_error: OnError = "skip",
    ) -> None:
        columns: dict[str, Kind] = {"query": "value", "pos": "list", "neg": "list"}
        reshape = _mined_with_titles if titles else _mined
        table = open_table(path, columns, Skips(path, on_error), optional=("neg",), limit=limit, reshape=reshape)
        super().__init__(
            table, "query", "pos", "neg", left_modality="text", right_modality="text", max_negatives=max_negatives
        )


def _mined(record: dict[str, Any], titles: bool = False) -> dict[str, Any]:
    """Tevatron's nested passages as FlagEmbedding's lists of texts; the reading of columns judges all else."""

    def text_of(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        parts = (entry.get("title") if titles else None, entry.get("text"))
        if any(not isinstance(part, (str, NoneType)) for part in parts):
            raise TypeError("a passage's title or text is no string")
        return " ".join(part or "" for part in parts).strip()

    names = {"pos": "positive_passages", "neg": "negative_passages"}
    if names["pos"] not in record:
        return record
    lists = {new: record.get(old) for new, old in names.items()}
    texts = {new: [text_of(entry) for entry in old] if isinstance(old, list) else old for new, old in lists.items()}
    return {**record, **texts}


def _mined_with_titles(record: dict[str, Any]) -> dict[str, Any]:
    return _mined(record, titles=True)


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
        usual = [folder / f"{stem}{end}" for stem in ("metadata", "captions") for end in TABLE_FORMATS if end != ".txt"]
        file = next(filter(Path.is_file, usual), None) if captions is None else Path(captions)
        if file is None:
            image_column, caption_column = "image", "captions"
            table = _table_of_text_files(folder, names, Skips(path, on_error))
        else:
            image_column = image_column or _first(file, IMAGE_NAMES, "image_column")
            caption_column = caption_column or _first(file, CAPTION_NAMES, "caption_column")
            table = open_table(file, {image_column: "value", caption_column: "list"}, Skips(file, on_error))
            table = _only_images(table, folder, image_column, set(names))
        super().__init__(
            table, image_column, caption_column, left_modality="image", right_modality="text", deduplicate=deduplicate
        )


def _table_of_text_files(folder: Path, names: list[str], skips: Skips) -> DataTable:
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
    return DataTable(str(folder), Dataset.from_list(rows, features=features), skips, folder, allow_outside=True)


def _only_images(table: DataTable, folder: Path, column: str, known: set[str]) -> DataTable:
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


def _first(file: Path, names: tuple[str, ...], argument: str) -> str:
    columns = peek_columns(file)
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
        table = open_table(
            path,
            columns,
            Skips(path, on_error),
            optional=() if label_column else (label,),
            split=split,
            subset=subset,
            limit=limit,
            allow_outside=allow_outside,
        )
        column = Column.of(table, image_column, "image")
        there = column.filled()
        missing = np.flatnonzero(~there)
        if len(missing):
            reason = f"no image in column {image_column!r}"
            table.skips.bad(reason, table.where(int(missing[0])), "fill it in or remove the row", len(missing))
        rows = np.flatnonzero(there)
        table.skips.demand(len(rows), "image")
        labels = labels_of_column(table, label).take(rows) if table.has(label) else None
        super().__init__(Picked(ColumnImages(table, column), rows), labels)
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
