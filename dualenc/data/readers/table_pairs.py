"""Pairs from tables and folders: table columns, mined negatives, captioned images, image views."""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from dualenc.data.bad_rows import BadRows
from dualenc.data.columns import Column, ItemColumn, read_column, read_ids
from dualenc.data.corpus import image_corpus, table_corpus
from dualenc.data.item_lists import Joined, Picked, number_items
from dualenc.data.pairs import PairDataset
from dualenc.data.ragged import Ragged, distinct
from dualenc.data.readers.column_names import (
    CAPTIONS,
    DOCUMENT_IDS,
    IMAGE_FILES,
    QUERY_IDS,
    first_of,
    is_none,
)
from dualenc.data.readers.detect import CAPTION_FILES
from dualenc.data.readers.images import existing_file, find_images, split_folder
from dualenc.data.readers.lines import Record, read_records
from dualenc.data.readers.read_options import ONLY_SPLIT, ReadOptions
from dualenc.data.readers.relevance import Labels, as_number, label_columns, read_labels
from dualenc.data.readers.tables import ColumnKind, DataTable, TableSource
from dualenc.data.readers.vectors import open_vectors
from dualenc.errors import DualencError
from dualenc.io.reading import is_utf8, with_home
from dualenc.types import Items, Modality, OnError

logger = logging.getLogger("dualenc.data")

# neg, negatives, hard_negative, negative_1, …: names in data sets of sentence-transformers.
_NEGATIVE_NAME = re.compile(r"(?:hard_)?neg(?:ative)?s?(?:_?(\d{1,4}))?")


class ColumnPairs(PairDataset):
    """Pairs between the items of two columns of a table, with ids in order of appearance."""

    has_distinct_items = True

    def __init__(
        self,
        left: ItemColumn,
        right: ItemColumn,
        negative_columns: Sequence[ItemColumn] = (),
        *,
        weight_column: str | None = None,
        labels: Labels | None = None,
        deduplicate: bool = True,
        max_negatives: int | None = None,
    ) -> None:
        table = left.table
        weights = None
        if weight_column is not None:
            weights = _weights(table, weight_column)
            reason = f"no weight >= 0 in column {weight_column!r}"
            # A fault of the row, so that it is counted once, even if it holds several captions.
            left = left.with_fault(reason, ~np.isfinite(weights), "fix the row")
        if labels is not None:
            left, right = without_unlabeled(left, right, labels)
        paired = paired_positions(left, right)
        rows = right.rows[paired]
        pair_weights = None if weights is None else weights[rows]
        if labels is not None:
            pair_weights = labels.of_pairs(right, paired)
            # All ones are the same as no weights.
            if (pair_weights == 1).all():
                pair_weights = None
        items = right.items
        used = paired
        negatives = None
        if negative_columns:
            negatives = _read_negatives(negative_columns, rows, len(right.items), max_negatives)
            # Positives and negatives share one space of positions, so that a text that is both
            # gets one id.
            items = Joined([items, *(column.items for column in negative_columns)])
            used = np.concatenate([paired, distinct(negatives.values)])
        # Only items that a pair uses get a number, so that ids are contiguous.
        used_rows, pair_row = np.unique(rows, return_inverse=True)
        left_first, left_number = number_items(left.items, used_rows, deduplicate)
        right_first, number = number_items(items, used, deduplicate)
        right_number = np.full(len(items), -1, dtype=np.int64)
        right_number[used] = number
        super().__init__(
            Picked(left.items, left_first),
            Picked(items, right_first),
            left_number[pair_row],
            right_number[paired],
            weights=pair_weights,
            left_modality=left.modality,
            right_modality=right.modality,
        )
        if negatives is not None:
            self._add_negatives(table, negatives.take(rows), right_number, rows)
        self.skipped = table.bad_rows.report()

    def _add_negatives(
        self, table: DataTable, positions: Ragged, right_number: np.ndarray, rows: np.ndarray
    ) -> None:
        """Give each pair the negatives of its row, without positives of its left item.

        A row with several positives makes several pairs, each with all negatives of the row.
        """
        ids = Ragged(right_number[positions.values], positions.offsets)
        query = np.repeat(self.left_id, ids.lengths)
        # Encode (query, document) as one integer: one `isin` then finds every negative that is a
        # positive of its query in any row.
        pairs = self.left_id * self.num_right + self.right_id
        positive = np.isin(query * self.num_right + ids.values, pairs)
        if positive.any():
            pair = np.repeat(np.arange(len(self)), ids.lengths)[np.argmax(positive)]
            position = table.position(int(rows[pair]))
            reason = "negative that is also a positive"
            table.bad_rows.add(
                reason, position, "remove it from the negatives", int(positive.sum())
            )
        # Equal texts share an id, so a negative may be listed twice in a row.
        self.negatives = ids.keep(~positive & ids.first_in_row())


def paired_positions(left: ItemColumn, right: ItemColumn) -> np.ndarray:
    """Return the positions (M,) of right values that make a pair; count all other faults."""
    table = left.table
    if left.is_list:
        raise DualencError(
            "the left column holds lists",
            fix="name it as right_column instead",
            where=table.source,
        )
    good_rows = left.usable()
    in_good_row = good_rows[right.rows]
    # A row that is bad on the left counts once, whatever it holds on the right.
    left.skip()
    # An empty list lacks a value that could be counted as bad, so count its row.
    is_empty = np.bincount(right.rows, minlength=len(good_rows)) == 0
    right.skip(in_good_row, np.flatnonzero(is_empty & good_rows))
    paired = np.flatnonzero(right.usable() & in_good_row)
    table.bad_rows.require(len(paired), "pair")
    return paired


def without_unlabeled(
    left: ItemColumn, right: ItemColumn, labels: Labels
) -> tuple[ItemColumn, ItemColumn]:
    """Return the columns with a fault where a row, or an entry of its lists, is unlabeled."""
    is_missing = np.isnan(labels.values)
    fault = (f"no label in column {labels.name!r}", is_missing, "fill it in or remove the row")
    if labels.of_entries:
        return left, right.with_fault(*fault)
    return left.with_fault(*fault), right


def _read_negatives(
    columns: Sequence[ItemColumn], paired_rows: np.ndarray, start: int, max_negatives: int | None
) -> Ragged:
    """Return the positions, counted from `start`, of the negatives in each row of the table."""
    for column in columns:
        # An empty cell means that the pair lacks a negative, which is fine; an empty entry in a
        # list is a bad sample.
        column.skip(True if column.is_list else ~column.is_empty)
    usable = np.concatenate([column.usable() for column in columns])
    rows = np.concatenate([column.rows for column in columns])
    num_rows = len(columns[0].table)
    # Negatives of rows without a pair are never drawn, and would only enlarge the corpus.
    has_pair = np.bincount(paired_rows, minlength=num_rows) > 0
    to_use = np.flatnonzero(usable & has_pair[rows])
    # Stable, so that negatives of a row keep their order and max_negatives keeps the first ones.
    to_use = to_use[np.argsort(rows[to_use], kind="stable")]
    positions = Ragged.from_sorted(rows[to_use], start + to_use, num_rows)
    if max_negatives is not None:
        # Rank of each negative within its row.
        starts = np.repeat(positions.offsets[:-1], positions.lengths)
        rank = np.arange(len(to_use)) - starts
        positions = positions.keep(rank < max_negatives)
    return positions


def _weights(table: DataTable, name: str) -> np.ndarray:
    """Return the weight (M,) of each row, float32; NaN if the value is not a number >= 0."""
    weights = np.full(len(table), np.nan, np.float32)
    for row, value in enumerate(table.column(name).to_pylist()):
        with suppress(ValueError, TypeError):
            weights[row] = float(as_number(value))  # type: ignore[arg-type]
    weights[~np.isfinite(weights) | (weights < 0)] = np.nan
    return weights


class TablePairs(ColumnPairs):
    """Pairs from two columns of a table: local files, a saved data set, or the Hugging Face hub.

    Equal items share an id by default, so that copies of a positive are never its negatives.

        TablePairs("photos.parquet", left_column="image", right_column="captions")

    Args:
        path: a .jsonl, .json, .csv, .tsv, .txt or .parquet file, a glob or folder of such files, a
            folder written by `datasets.save_to_disk`, or a hub name.
        left_column: query or image. Images are file contents, `datasets` images, or paths relative
            to the table.
        right_column: document or caption; a list of captions makes one pair each.
        negative_column: mined negatives, one item or a list of items like those of the right
            column; or several such columns. By default those named `negative`, `negative_1`, …; []
            reads none.
        split: which split of a folder, saved data set or hub name.
        subset: configuration of a hub data set.
        left_modality: "text", "image" or "vector"; by default inferred from the values.
        right_modality: the same for the right column.
        allow_outside: whether image paths may lead out of the table's folder; only for a table that
            you trust.
        weight_column: numbers >= 0 that multiply each row's loss (graded pairs). When evaluating on
            the pairs, weight 0 means not relevant and any other weight relevant. By default a
            column with a common name (label, score, clicked, …) that holds labels: 0 becomes weight
            0, any higher grade weight 1. `none` reads no weights.
        deduplicate: equal texts, vectors and images (by contents or path) of one side share an id.
        quotes: whether `"` encloses fields; by default true for csv files, and for tsv files whose
            header is in quotes.
        on_error: "skip" leaves out, counts and reports bad rows; "raise" stops at the first.
    """

    def __init__(
        self,
        path: str | Path,
        left_column: str,
        right_column: str,
        negative_column: str | Sequence[str] | None = None,
        *,
        split: str = "train",
        subset: str | None = None,
        left_modality: Modality | None = None,
        right_modality: Modality | None = None,
        allow_outside: bool = False,
        weight_column: str | None = None,
        deduplicate: bool = True,
        quotes: bool | None = None,
        on_error: OnError = "skip",
    ) -> None:
        options = ReadOptions(split, quotes, allow_outside, on_error)
        source = TableSource(path, options.bad_rows(path), options=options, subset=subset)
        self._read(
            source,
            left_column,
            right_column,
            negative_column,
            left_modality=left_modality,
            right_modality=right_modality,
            weight_column=weight_column,
            deduplicate=deduplicate,
        )

    @classmethod
    def from_source(
        cls,
        source: TableSource,
        left_column: str,
        right_column: str,
        *,
        left_modality: Modality | None = None,
        right_modality: Modality | None = None,
        weight_column: str | None = None,
    ) -> TablePairs:
        """Read pairs from a table whose columns have been examined, without examining it again."""
        pairs = cls.__new__(cls)
        pairs._read(
            source,
            left_column,
            right_column,
            left_modality=left_modality,
            right_modality=right_modality,
            weight_column=weight_column,
        )
        return pairs

    def _read(
        self,
        source: TableSource,
        left_column: str,
        right_column: str,
        negative_column: str | Sequence[str] | None = None,
        *,
        left_modality: Modality | None,
        right_modality: Modality | None,
        weight_column: str | None,
        deduplicate: bool = True,
    ) -> None:
        kinds = source.kinds
        # `None` looks for columns by name, [] reads none.
        if negative_column is None:
            negative_column = _default_negatives(source, (left_column, right_column))
        negatives = [negative_column] if isinstance(negative_column, str) else list(negative_column)
        columns: dict[str, ColumnKind] = {left_column: "value", right_column: "list"}
        if (left_modality or kinds.get(left_column)) == "vector":
            columns[left_column] = "vector"
        elif source.written_lists.get(left_column) == "list":
            # Opened as lists only to be refused by a clear message: left items are single.
            columns[left_column] = "list"
        if (right_modality or kinds.get(right_column)) == "vector":
            columns[right_column] = "vector"
        # Negatives are right items, so they are read the same way.
        columns |= dict.fromkeys(negatives, columns[right_column])
        likely = label_columns(kinds, columns) if weight_column is None else []
        weight_column = None if is_none(weight_column) else weight_column
        columns |= {name: source.label_kind(name) for name in likely}
        if weight_column is not None:
            columns[weight_column] = "value"
        table = source.open(columns)
        left = read_column(table, left_column, left_modality)
        right = read_column(table, right_column, right_modality)
        beside_images = "image" in (left.modality, right.modality)
        ColumnPairs.__init__(
            self,
            left,
            right,
            [read_column(table, name, right.modality) for name in negatives],
            weight_column=weight_column,
            labels=read_labels(table, likely, right, "weight_column", beside_images=beside_images),
            deduplicate=deduplicate,
        )


def _default_negatives(source: TableSource, but: tuple[str, str]) -> list[str]:
    """Return the columns named like mined negatives, in the order of their numbers.

    Columns of numbers are not negatives of texts.
    """
    place = {}
    for name in source.kinds:
        match = _NEGATIVE_NAME.fullmatch(name)
        if match and name not in but:
            if source.holds_numbers(name) and not source.holds_numbers(but[1]):
                logger.warning(
                    "%s: column %r holds numbers and is not read as mined negatives",
                    source.path,
                    name,
                )
                continue
            place[name] = int(match[1] or 0)
    return sorted(place, key=place.__getitem__)


def are_mined(source: TableSource) -> bool:
    """Return True for tables with mined negatives; `pos` must not hold numbers (a sentiment)."""
    return "positive_passages" in source.kinds or (
        "pos" in source.kinds and not source.holds_numbers("pos")
    )


class MinedPairs(ColumnPairs):
    """Pairs with mined negatives, one query per line, as FlagEmbedding and Tevatron write them.

    FlagEmbedding: `{"query": …, "pos": [text, …], "neg": [text, …]}`. Tevatron: `{"query": …,
    "positive_passages": [{"docid", "title", "text"}, …], "negative_passages": […]}`; titles are
    prepended to the texts. A query with several positives makes one pair each.

        MinedPairs("mined.jsonl", max_negatives=4)[0].negatives

    With `queries` and `documents` the file holds ids of these vectors: `query_id` and each `docid`
    of Tevatron's lines, so that one file serves for the texts and for their embeddings, or `query`,
    `pos` and `neg`.

    Args:
        path: a .jsonl file, or a glob of them.
        max_negatives: keep only the first `max_negatives` negatives of each query.
        split: which split of a folder of files.
        on_error: "skip" leaves out, counts and reports bad lines; "raise" stops at the first.
        queries: vectors of the queries: a folder of embeddings, a .npy file, or a table of vectors
            and ids.
        documents: vectors of positives and negatives, likewise.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        max_negatives: int | None = None,
        split: str = "train",
        on_error: OnError = "skip",
        queries: str | Path | None = None,
        documents: str | Path | None = None,
    ) -> None:
        if (queries is None) != (documents is None):
            raise DualencError(
                "queries and documents must be given together",
                fix="name the vectors of both",
                where=path,
            )
        bad_rows = BadRows(path, on_error)
        columns: dict[str, ColumnKind] = {"query": "value", "pos": "list", "neg": "list"}
        if queries is None or documents is None:
            source = _mined_source(path, bad_rows, split, _mined_texts)
            table = source.open(columns, optional=("neg",))
            query, pos, neg = (read_column(table, name, "text") for name in columns)
        else:
            left = open_vectors(queries, bad_rows=bad_rows)
            right = open_vectors(documents, bad_rows=bad_rows)
            # The vectors are in `queries` and `documents`; the file only holds their ids.
            source = _mined_source(path, bad_rows, split, _mined_ids)
            table = source.open(columns, optional=("neg",))
            query = read_ids(table, "query", left.ids, left.items)
            pos = read_ids(table, "pos", right.ids, right.items)
            neg = read_ids(table, "neg", right.ids, right.items)
        for name in label_columns(source.kinds, columns):
            if source.kinds[name] == "value":
                logger.warning(
                    "%s: column %r is ignored: pos and neg decide what matches", path, name
                )
        super().__init__(query, pos, [neg], max_negatives=max_negatives)


def _mined_source(
    path: str | Path, bad_rows: BadRows, split: str, reshape: Callable[[Record], Record]
) -> TableSource:
    """Open a table of mined negatives; parquet rows with nested passages are read as records."""
    source = TableSource(path, bad_rows, options=ReadOptions(split=split), reshape=reshape)
    if "positive_passages" in source.kinds and source.dataset is None:
        return replace(source, as_records=True)
    if "positive_passages" in source.kinds:
        raise DualencError(
            "nested passages can only be read from files",
            fix='save it with Dataset.to_json("mined.jsonl") and give that file',
            where=path,
        )
    return source


# Named functions, not partials or lambdas: the cache of a table is keyed by the function's name.


def _mined_texts(record: Record) -> Record:
    """Convert Tevatron's nested passages to FlagEmbedding's lists of texts, unchecked."""
    return _flat_passages(record, _text_of_passage)


def _mined_ids(record: Record) -> Record:
    flat = _flat_passages(
        record, lambda passage: passage.get(first_of(passage, DOCUMENT_IDS) or "id")
    )
    return (
        {**flat, "query": record.get(first_of(record, QUERY_IDS) or "query_id")}
        if flat is not record
        else record
    )


def _flat_passages(record: Record, value_of: Callable[[Record], Any]) -> Record:
    """Return a record with lists `pos` and `neg` in place of nested passages, if it has any."""
    if "positive_passages" not in record:
        return record
    flat = dict(record)
    for name, nested in (("pos", "positive_passages"), ("neg", "negative_passages")):
        passages = record.get(nested)
        flat[name] = passages
        if isinstance(passages, list):
            flat[name] = [
                value_of(entry) if isinstance(entry, dict) else entry for entry in passages
            ]
    return flat


def _text_of_passage(passage: Record) -> str | Record:
    parts = [passage.get(name) for name in ("title", "text")]
    # Unchanged, so that the reader of the column refuses it and names the line.
    if any(not isinstance(part, (str, NoneType)) for part in parts):
        return passage
    return " ".join(part or "" for part in parts).strip()


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
            table = _table_of_text_files(folder, names, bad_rows)
            image_column = "image"
            caption_column = "captions"
        else:
            # Links among a folder's images are followed.
            # Only rows whose image was found in the folder are kept below, so paths are safe.
            options = ReadOptions(quotes=quotes, allow_outside=True)
            source = TableSource(file, bad_rows, options=options)
            image_column = source.default_column(IMAGE_FILES, "image_column")
            caption_column = source.default_column(CAPTIONS, "caption_column")
            columns: dict[str, ColumnKind] = {image_column: "value", caption_column: "list"}
            likely = label_columns(source.kinds, columns) if weight_column is None else []
            weight_column = None if is_none(weight_column) else weight_column
            columns |= {name: source.label_kind(name) for name in likely}
            if weight_column is not None:
                columns[weight_column] = "value"
            table = source.open(columns)
            table = _rows_of_files(table, image_column, names)
        captions = read_column(table, caption_column, "text")
        super().__init__(
            read_column(table, image_column, "image"),
            captions,
            weight_column=weight_column,
            labels=read_labels(table, likely, captions, "weight_column", beside_images=True),
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

    def subset(self, rows: np.ndarray) -> ImageViews:
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
