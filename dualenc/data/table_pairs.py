"""Pairs from tables and folders: columns of any table, mined negatives, images with captions, views of images."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from dualenc.data.columns import (
    Chained,
    Column,
    ColumnImages,
    Labels,
    Picked,
    Texts,
    labels_of_folders,
    number_distinct,
)
from dualenc.data.corpus import Corpus, table_corpus
from dualenc.data.images import ImageFiles, find_images
from dualenc.data.lines import read_text_lines
from dualenc.data.pairs import Items, PairDataset, Ragged, Skips
from dualenc.data.remote import shown
from dualenc.data.tables import TABLE_FORMATS, ColumnKind, DataTable, open_table, peek_columns, peek_lines
from dualenc.data.vectors import (
    Faults,
    VectorColumn,
    VectorKeys,
    holds_vectors,
    is_vectors,
    open_vectors,
    usable,
    usual_ids,
)
from dualenc.errors import DualencError
from dualenc.types import Modality, OnError

IMAGE_NAMES = ("file_name", "image", "filename", "image_path", "path", "file")
CAPTION_NAMES = ("captions", "caption", "text", "texts", "description")


class ColumnPairs(PairDataset):
    """Pairs between the values of two columns of an opened table; the arguments are those of `TablePairs`.

    Pair by pair in the order of rows; a row with a list on the right makes one pair for each entry, which share
    their left item. Ids are numbered in order of appearance. With `left_vectors` and `right_vectors` the columns hold
    ids of these vectors. `score_columns` hold a teacher's scores of the right and of the negative column's values.
    """

    def __init__(
        self,
        table: DataTable,
        left_column: str,
        right_column: str,
        negative_column: str | None = None,
        *,
        weight_column: str | None = None,
        score_columns: tuple[str, str] | None = None,
        left_modality: Modality | None = None,
        right_modality: Modality | None = None,
        left_vectors: Corpus | None = None,
        right_vectors: Corpus | None = None,
        deduplicate: bool = True,
        max_negatives: int | None = None,
    ) -> None:
        left = _Values(table, left_column, left_modality, left_vectors)
        right = _Values(table, right_column, right_modality, right_vectors)
        if left.is_list:
            raise DualencError(f"{table.source}: column {left_column!r} holds lists; name it as right_column instead")
        good, there = usable(left.faults, len(table)), usable(right.faults, len(right.items))
        left.tell(~good)
        weights = None if weight_column is None else _weights(table, weight_column)
        if weights is not None:
            unweighted = ~np.isfinite(weights) & good
            table.tell(
                f"no weight of 0 or more in column {weight_column!r}", np.flatnonzero(unweighted), "mend the row"
            )
            good = good & ~unweighted
        without = np.bincount(right.rows, minlength=len(table)) == 0
        right.tell(~there & good[right.rows], np.flatnonzero(without & good))
        right_at = np.flatnonzero(there & good[right.rows])  # position of the right value of every pair
        rows = right.rows[right_at]
        table.skips.demand(len(rows), "pair")
        left_first, left_number = _number(left.items, left.keys if deduplicate else None, np.unique(rows))
        items, keys, pool = right.items, right.keys, right_at
        mined = None
        if negative_column is not None:  # its values lie behind those of the right column
            negative = _Values(table, negative_column, right.modality, right_vectors, right.dim)
            filled = usable(negative.faults, len(negative.items))
            negative.tell(~filled)
            paired = np.bincount(rows, minlength=len(table)) > 0
            kept = np.flatnonzero(filled & paired[negative.rows])
            mined = Ragged.from_sorted(negative.rows[kept], len(items) + kept, len(table))
            if max_negatives is not None:
                rank = np.arange(len(kept)) - np.repeat(mined.offsets[:-1], mined.lengths)
                mined = mined.keep(rank < max_negatives)
            items = Chained(items, negative.items)
            keys = None if keys is None or negative.keys is None else Chained(keys, negative.keys)
            pool = np.concatenate([pool, np.unique(mined.values)])
        right_first, right_number = _number(items, keys if deduplicate else None, pool)
        super().__init__(
            Picked(left.items, left_first),
            Picked(items, right_first),
            left_number[rows],
            right_number[right_at],
            weights=None if weights is None else weights[rows],
            scores=None if score_columns is None else _scores(table, score_columns[0], right.rows)[right_at],
            left_modality=left.modality,
            right_modality=right.modality,
        )
        if self.scores is not None and np.isnan(self.scores).all():
            told = "no positive has a teacher's score; mine them with `dualenc mine`, or leave scores out"
            raise DualencError(f"{table.source}: {told}")
        if mined is not None:
            ids = Ragged(right_number[mined.values], mined.offsets).take(rows)
            query = np.repeat(self.left_id, ids.lengths)
            positive = np.isin(query * self.num_right + ids.values, self.left_id * self.num_right + self.right_id)
            if positive.any():
                pair = np.repeat(np.arange(len(self)), ids.lengths)[np.argmax(positive)]
                reason = "negative that is also a positive"
                where = table.where(int(rows[pair]))
                table.skips.bad(reason, where, "remove it from the negatives", int(positive.sum()))
            self.negatives = ids.keep(~positive)
            if score_columns is not None:
                of_values = _scores(table, score_columns[1], negative.rows)
                self.negative_scores = of_values[mined.take(rows).values - len(right.items)][~positive]
        self.skipped = table.skips.report()


class _Values:
    """One column as items, its lists laid flat: n values.

    Args:
        table: the rows.
        name: one of its columns.
        modality: what it holds; found out from the values by default.
        vectors: what the values are ids of, if they are ids.
        dim: size that vectors in the column must have; by default the most frequent one.

    Attributes:
        is_list: whether a row may hold several values.
        rows: (n,) the row that each value stands in.
        items: (n,) texts, images or vectors.
        keys: strings that are equal for equal items; None where they would cost reading every image.
        faults: which values cannot be used; the first reason is also that of a row without any.
        dim: size of the vectors in the column.
    """

    def __init__(
        self,
        table: DataTable,
        name: str,
        modality: Modality | None,
        vectors: Corpus | None = None,
        dim: int | None = None,
    ) -> None:
        self.table, self.dim = table, dim
        self.items: Items
        self.keys: Items | None
        if vectors is None and (modality == "vector" or (modality is None and holds_vectors(table, name))):
            found = VectorColumn(table, name, dim)
            self.modality: Modality = "vector"
            self.is_list, self.rows, self.dim = found.is_list, found.rows, found.dim
            self.items, self.keys = found.items, VectorKeys(found.items)
            self.faults: Faults = found.faults
            return
        column = Column(table, name, "text" if vectors is not None else modality, lists=True)
        texts, there = Texts(column), column.filled()
        self.is_list, self.rows = column.is_list, column.row_of_values()
        self.modality = column.modality if vectors is None else vectors.modality
        self.items = texts if column.modality == "text" else ColumnImages(table, column)
        self.keys = texts if column.modality == "text" or column.holds_strings else None
        what = "id" if vectors is not None else column.modality
        self.faults = {f"no {what} in column {name!r}": (~there, "fill it in or remove the row")}
        if vectors is not None:
            place = column.places_in(vectors.ids)
            self.items = Picked(vectors.items, place)
            self.faults["id without a vector"] = (there & (place < 0), f"column {name!r} names what is not embedded")

    def tell(self, bad: np.ndarray, without: np.ndarray | None = None) -> None:
        """Count the bad ones (n,) of the values, and rows that hold none."""
        for number, (reason, (mask, mend)) in enumerate(self.faults.items()):
            rows = self.rows[mask & bad]
            if number == 0 and without is not None:
                rows = np.sort(np.concatenate([without, rows]))
            self.table.tell(reason, rows, mend)


def _weights(table: DataTable, name: str) -> np.ndarray:
    """The weight (M,) of each row, float32; NaN where the column holds no number of 0 or more."""
    texts = [str(value) for value in table.dataset.data.column(name).to_pylist()]
    weights = np.full(len(texts), np.nan, np.float32)
    for row, text in enumerate(texts):
        with suppress(ValueError):
            weights[row] = float(text)
    weights[~np.isfinite(weights) | (weights < 0)] = np.nan
    return weights


def _scores(table: DataTable, name: str, rows: np.ndarray) -> np.ndarray:
    """A teacher's score (n,) of each value of a column of lists, float32; NaN where there is none.

    Args:
        table: the rows.
        name: the column of scores, a list for each row; one of another length than the row's values is told.
        rows: (n,) ascending, the row that each value stands in.
    """
    count = np.bincount(rows, minlength=len(table))
    starts = np.concatenate([[0], np.cumsum(count)])
    scores = np.full(len(rows), np.nan, np.float32)
    unfit = []
    for row, given in enumerate(table.dataset.data.column(name).to_pylist()):
        if given is not None and len(given) == count[row]:
            scores[starts[row] : starts[row + 1]] = [np.nan if score is None else score for score in given]
        elif count[row]:
            unfit.append(row)
    table.tell(f"{name} that are not one for each text", np.array(unfit), "give a number each, or leave scores out")
    scores[~np.isfinite(scores)] = np.nan
    return scores


def _number(items: Items, keys: Items | None, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First position of each item that is distinct by its key; the item's number by position, else -1."""
    first, inverse = (positions, np.arange(len(positions))) if keys is None else number_distinct(keys, positions)
    number = np.full(len(items), -1, dtype=np.int64)
    number[positions] = inverse
    return first, number


class TablePairs(ColumnPairs):
    """Pairs from any table: local files, a saved data set, or the Hugging Face hub.

    Args:
        path: a .jsonl, .json, .csv, .tsv, .txt or .parquet file, a glob or folder of such files, a folder written by
            `datasets.save_to_disk`, or a hub name.
        left_column: query or image. Images may be file contents, `datasets` images, or paths relative to the table.
            Columns of lists of floating-point numbers are vectors.
        right_column: document or caption; a list of captions, or of vectors, makes one pair each.
        negative_column: mined negatives, one or a list of what the right column holds.
        split: of a folder, saved data set or hub name; of these and of files a slice such as train[:90%].
        subset: configuration of a hub data set.
        left_modality: "text", "image" or "vector"; found out from the values by default.
        right_modality: the same for the right column.
        image_root: where relative image paths start, and where images must lie; by default the table's folder.
        allow_outside: whether image paths may lead out of that folder; only for a table that you trust.
        weight_column: numbers, 0 or more, that each row's loss is multiplied by: graded pairs.
        deduplicate: equal texts, vectors and image paths of one side are the same item and share an id.
        max_negatives: keep that many negatives of each row, from the front.
        limit: read the first rows only.
        quotes: whether `"` encloses fields of csv and tsv files.
        on_error: "skip" leaves out, counts and reports bad rows; "raise" stops at the first. Vectors that are not
            finite, zero, or of another size than most are bad.

    Raises:
        DualencError: no such file, column or split; nothing usable; a broken file.
        BadSample: a malformed line, an empty cell or a bad vector, under on_error="raise".
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
        weight_column: str | None = None,
        deduplicate: bool = True,
        max_negatives: int | None = None,
        limit: int | None = None,
        quotes: bool = True,
        on_error: OnError = "skip",
    ) -> None:
        skips = Skips(path, on_error)
        columns: dict[str, ColumnKind] = {left_column: "value", right_column: "list"}
        kinds = peek_lines(path, split, quotes)
        for name, modality in ((left_column, left_modality), (right_column, right_modality)):
            if modality == "vector" or (modality is None and kinds.get(name) in ("vector", "vectors")):
                columns[name] = "vector" if columns[name] == "value" else "vectors"
        if negative_column is not None:
            columns[negative_column] = columns[right_column]
        if weight_column is not None:
            columns[weight_column] = "value"
        table = open_table(
            path,
            columns,
            skips,
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
            weight_column=weight_column,
            deduplicate=deduplicate,
            max_negatives=max_negatives,
        )


class MinedPairs(ColumnPairs):
    """Pairs with mined negatives, one query a line, as FlagEmbedding and Tevatron write them.

    FlagEmbedding: `{"query": …, "pos": [text, …], "neg": [text, …]}`. Tevatron: `{"query": …, "positive_passages":
    [{"docid", "title", "text"}, …], "negative_passages": […]}`. A query with several positives makes one pair each.
    Equal texts are the same item, wherever they stand.

    Vectors may stand in place of the texts, as lists of numbers in the file; or lie elsewhere, and the file names them:

        MinedPairs("mined.jsonl", queries="emb/queries", documents="emb/corpus")

    Then what is read of Tevatron's lines is `query_id` and each `docid`, so that one file serves for the texts and for
    their embeddings; and with `{"query", "pos", "neg"}`, these are ids.

    Args:
        path: a .jsonl file, or a glob of them.
        titles: join a passage's title to its text.
        max_negatives: keep that many negatives of each query, from the front.
        split: a slice such as train[:90%], and of a folder of files which of them.
        limit: read the first queries of that only.
        on_error: "skip" leaves out, counts and reports bad lines; "raise" stops at the first.
        queries: vectors of the queries: a folder of embeddings, a .npy file, or a table of vectors and ids.
        documents: likewise of positives and negatives.
        scores: read a teacher's scores, `pos_scores` and `neg_scores` or each passage's `score`, to distil from
            (`teacher` of every objective). `dualenc mine` writes them. Lists of another length count as bad.

    Raises:
        DualencError: no such file, neither layout, nothing usable.
        BadSample: a malformed line, an empty query or passage, a bad vector, an id without a vector, under
            on_error="raise".
    """

    def __init__(
        self,
        path: str | Path,
        *,
        titles: bool = True,
        max_negatives: int | None = None,
        split: str = "train",
        limit: int | None = None,
        on_error: OnError = "skip",
        queries: str | Path | None = None,
        documents: str | Path | None = None,
        scores: bool = False,
    ) -> None:
        if (queries is None) != (documents is None):
            raise DualencError(f"{shown(path)}: queries and documents are given together; name the vectors of both")
        skips = Skips(path, on_error)
        left, right = (_named(source, skips) for source in (queries, documents))
        columns: dict[str, ColumnKind] = {"query": "value", "pos": "list", "neg": "list"}
        reshape = _mined_ids if left is not None else _mined_with_titles if titles else _mined
        modality: Modality = "text"
        if left is None and peek_lines(path, split).get("query") == "vector":
            columns, modality = {"query": "vector", "pos": "vectors", "neg": "vectors"}, "vector"
        if scores:
            columns |= {"pos_scores": "vector", "neg_scores": "vector"}
        optional = ("neg", "neg_scores")
        table = open_table(path, columns, skips, optional=optional, split=split, limit=limit, reshape=reshape)
        super().__init__(
            table,
            "query",
            "pos",
            "neg",
            left_modality=modality,
            right_modality=modality,
            left_vectors=left,
            right_vectors=right,
            score_columns=("pos_scores", "neg_scores") if scores else None,
            max_negatives=max_negatives,
        )


def _named(source: str | Path | None, skips: Skips) -> Corpus | None:
    """Vectors with the ids that mined negatives know them by."""
    if source is None:
        return None
    return open_vectors(source, id_column=None if is_vectors(source) else usual_ids(source), skips=skips)


def _mined(record: dict[str, Any], titles: bool = False, ids: bool = False) -> dict[str, Any]:
    """Tevatron's nested passages as FlagEmbedding's lists of texts; the reading of columns judges all else."""

    def text_of(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        if ids:
            return entry.get("docid")
        parts = (entry.get("title") if titles else None, entry.get("text"))
        if any(not isinstance(part, (str, NoneType)) for part in parts):
            raise TypeError("a passage's title or text is no string")
        return " ".join(part or "" for part in parts).strip()

    names = {"pos": "positive_passages", "neg": "negative_passages"}
    if names["pos"] not in record:
        return record
    lists = {new: record.get(old) for new, old in names.items()}
    texts = {new: [text_of(entry) for entry in old] if isinstance(old, list) else old for new, old in lists.items()}
    for new, old in lists.items():
        if isinstance(old, list):
            texts[f"{new}_scores"] = [entry.get("score") if isinstance(entry, dict) else None for entry in old]
    return {**record, **texts, **({"query": record.get("query_id")} if ids else {})}


def _mined_with_titles(record: dict[str, Any]) -> dict[str, Any]:
    return _mined(record, titles=True)


def _mined_ids(record: dict[str, Any]) -> dict[str, Any]:
    return _mined(record, ids=True)


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
            table.root, table.allow_outside = folder, True  # links among a folder's images are followed
            column, known = Column(table, image_column, "text"), set(names)
            files = column.values(np.arange(len(column))).tolist()
            there = np.array([not name or Path(name).as_posix() in known for name in files], dtype=bool)
            for row in np.flatnonzero(~there).tolist():
                reason = "image that is not in the folder"
                table.skips.bad(reason, table.where(row), f"{files[row]!r} is not in {folder}")
            if not there.all():
                import datasets
                import pyarrow as pa

                table.dataset = datasets.Dataset(table.dataset.data.filter(pa.array(there)))
        super().__init__(
            table, image_column, caption_column, left_modality="image", right_modality="text", deduplicate=deduplicate
        )


def _table_of_text_files(folder: Path, names: list[str], skips: Skips) -> DataTable:
    """The captions in `photo.txt` beside each `photo.jpg`, one per line."""
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

    The arguments `path`, `split`, `subset`, `limit`, `allow_outside` and `on_error` are those of `TablePairs`.

    Args:
        image_column: file contents, `datasets` images, or paths relative to the table.
        label_column: class numbers or names; by default `label`, if there is such a column.

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
        columns: dict[str, ColumnKind] = {image_column: "value", label: "value"}
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
        corpus = table_corpus(table, image_column, "image", label_column=label if table.has(label) else None)
        labels = None if corpus.labels is None else Labels(corpus.labels, corpus.class_names or [])
        super().__init__(corpus.items, labels)
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
