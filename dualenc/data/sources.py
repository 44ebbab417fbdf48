"""Open any supported source; its format is detected from its files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dualenc.data.beir import BeirPairs, is_beir, read_corpus
from dualenc.data.corpus import Corpus, table_corpus
from dualenc.data.images import IMAGE_SUFFIXES, ImageFiles, find_images, split_folder
from dualenc.data.labels import labels_of_folders
from dualenc.data.line_tables import ColumnKind, listed
from dualenc.data.metadata import check_column_names
from dualenc.data.pairs import PairDataset
from dualenc.data.skips import Skips
from dualenc.data.table_pairs import CAPTION_NAMES, IMAGE_NAMES, ImageFolderPairs, MinedPairs, TablePairs
from dualenc.data.tables import (
    ONLY_SPLIT,
    TABLE_FORMATS,
    check_whole,
    first_of,
    has_one_split,
    is_saved,
    open_table,
    peek_columns,
    usual_column,
)
from dualenc.data.urls import display_name, file_format, is_url, url_suffix
from dualenc.data.vectors import ID_NAMES, is_vectors, open_vectors, usual_ids
from dualenc.data.webdataset import IMAGES, WebDatasetPairs, is_tars, tar_corpus
from dualenc.errors import DualencError
from dualenc.types import Modality, OnError

_SURELY_IMAGES = ("image", "img", "image_path")
_TEXTS = ("text", "contents", "content", "passage", "document", "body", "abstract", "query", "question", "sentence")
_QUERIES = ("query", "question", "anchor", "sentence1")
_DOCUMENTS = ("document", "positive", "passage", "answer", "sentence2", "text", "abstract")


def open_corpus(
    path: str | Path,
    *,
    part: str = "corpus",
    modality: Modality | None = None,
    text_column: str | None = None,
    title_column: str | None = None,
    image_column: str | None = None,
    vector_column: str | None = None,
    id_column: str | None = None,
    label_column: str | None = None,
    columns: Sequence[str] = (),
    split: str = "train",
    subset: str | None = None,
    limit: int | None = None,
    quotes: bool | None = None,
    allow_outside: bool = False,
    on_error: OnError = "skip",
) -> Corpus:
    """Open items to embed: a BEIR folder, a table, a folder of images, tars, texts line by line, or vectors.

    Args:
        path: file, folder, glob, hub name, or URL (`dualenc.data.remote`) of tables or tars.
        part: "corpus" or "queries" of a BEIR folder; of a table with a column of each, its documents or its queries.
        modality: "text", "image" or "vector", where a table or tar holds several; images, then texts, are preferred.
        text_column: by default `text` or another usual name, or the only column. A list of texts gives several items.
        title_column: joined in front of the text; by default `title`, if there is one next to a default text column.
        image_column: by default `image` or another usual name.
        vector_column: lists of numbers; by default `vector` or another usual name.
        id_column: ids; by default `_id` or another usual name, and the row's number if there is none.
        label_column: classes of images; by default `label`.
        columns: further columns of a table or BEIR folder, to keep for filters.
        split: of a folder of tables, a folder of images with a subfolder for each split, a saved data set or hub name;
            of tables a slice such as train[:90%].
        subset: configuration of a hub data set.
        limit: read the first rows of a table only.
        quotes: whether `"` encloses fields; by default of csv files, and of tsv files whose header is in quotes.
        allow_outside: whether image paths may lead out of the table's folder; only for a table that you trust.
        on_error: "skip" leaves out, counts and reports bad samples; "raise" stops at the first.

    Returns:
        The items; `labels` and `class_names` are set for labelled images, also from the names of subfolders.

    Raises:
        DualencError: nothing there, nothing usable, or no telling which column to take.
        BadSample: an empty item, a missing or repeated id, a malformed line, under on_error="raise".
    """
    if is_url(path) and url_suffix(str(path)) == ".npy":
        name = display_name(path)
        raise DualencError(f"{name}: .npy files are read from this machine only; download it and give the file")
    check_column_names(columns)
    # BEIR folders and embeddings may hold images too; their own files decide.
    image_folder = is_image_folder(path) and not (is_beir(path) or is_vectors(path))
    if columns and (is_tars(path) or image_folder):
        raise DualencError(
            f"{display_name(path)}: has no columns to keep; give a table that names the images and their columns"
        )
    if is_tars(path):
        check_whole(path, split)
        return tar_corpus(path, "txt" if modality == "text" else IMAGES, on_error=on_error)
    skips = Skips(path, on_error)
    if image_folder:
        folder = split_folder(path, split)
        names = find_images(folder, skips)
        numbers, class_names = labels_of_folders(names) or (None, None)
        corpus = Corpus(names, ImageFiles(folder, names), "image", labels=numbers, class_names=class_names)
        corpus.skipped = skips.report()
        return corpus
    how: dict[str, Any] = {"split": split, "subset": subset, "limit": limit}
    if is_beir(path):
        corpus = read_corpus(path, part, columns=columns, skips=skips)
    elif is_vectors(path):
        corpus = open_vectors(path, split=split, columns=columns, skips=skips)
    elif modality == "vector" or vector_column is not None:
        id_column = id_column or usual_ids(path, split, subset)
        corpus = open_vectors(path, vector_column, id_column=id_column, columns=columns, skips=skips, **how)
    else:
        named = {"text_column": text_column, "title_column": title_column, "image_column": image_column}
        named |= {"id_column": id_column, "label_column": label_column}
        roles = _column_roles(path, peek_columns(path, split, subset, limit, quotes), part, modality, **named)
        corpus = _read_roles(path, roles, columns, skips, quotes=quotes, allow_outside=allow_outside, **how)
    corpus.skipped = skips.report()
    return corpus


def open_pairs(
    path: str | Path,
    left_column: str | None = None,
    right_column: str | None = None,
    *,
    split: str = "train",
    subset: str | None = None,
    left_modality: Modality | None = None,
    right_modality: Modality | None = None,
    deduplicate: bool = True,
    limit: int | None = None,
    quotes: bool | None = None,
    allow_outside: bool = False,
    on_error: OnError = "skip",
) -> PairDataset:
    """Open training pairs: a BEIR folder, tars, a folder of images with captions, mined negatives, or a table.

    A table's columns of lists of floating-point numbers are vectors. All other arguments are those of `open_corpus`.

    Args:
        left_column: of a table; by default `image` or `query` or another usual name.
        right_column: of a table; by default `captions`, `document` or another usual name.
        left_modality: of a table: "text", "image" or "vector"; by default as the values look.
        right_modality: the same for the right column.
        deduplicate: equal texts, images and vectors of a table or tar are the same item and share an id.

    Raises:
        DualencError: nothing there, nothing usable, or no telling which columns to take.
        BadSample: what the reader of the format raises, under on_error="raise".
    """
    if is_beir(path):
        return BeirPairs(path, split, on_error=on_error)
    if is_tars(path):
        check_whole(path, split)
        return WebDatasetPairs(path, deduplicate=deduplicate, on_error=on_error)
    if is_image_folder(path):
        folder = split_folder(path, split)
        return ImageFolderPairs(folder, deduplicate=deduplicate, quotes=quotes, on_error=on_error)
    kinds = peek_columns(path, split, subset, limit, quotes)
    # Only without named columns: files of mined negatives may have further ones to train on.
    if left_column is None and right_column is None and {"pos", "positive_passages"} & kinds.keys():
        return MinedPairs(path, split=split, limit=limit, on_error=on_error)
    left = left_column or usual_column(path, kinds, (*_SURELY_IMAGES, *_QUERIES, "title", "file_name"), "left_column")
    right = right_column or usual_column(path, kinds, (*CAPTION_NAMES[:2], *_DOCUMENTS), "right_column", but=left)
    how: dict[str, Any] = {"split": split, "subset": subset, "limit": limit, "allow_outside": allow_outside}
    how |= {"left_modality": left_modality, "right_modality": right_modality, "quotes": quotes}
    return TablePairs(path, left, right, deduplicate=deduplicate, on_error=on_error, **how)


def usual_split(path: str | Path, default: str) -> str:
    """The split to read where the user names none: the only one of a source without splits, else the default."""
    if has_one_split(path) or is_tars(path) or is_vectors(path):
        return ONLY_SPLIT
    return default


def is_image_folder(path: str | Path) -> bool:
    """Whether a folder has no table in it but images, or nothing but folders."""
    folder = Path(path)
    if not folder.is_dir() or is_saved(folder):
        return False
    entries = list(folder.iterdir())
    images = any(entry.suffix.lower() in IMAGE_SUFFIXES for entry in entries)
    tables = any(entry.is_file() and file_format(entry) in TABLE_FORMATS for entry in entries)
    return images or (not tables and not (folder / "data").is_dir())


class _ColumnRoles(NamedTuple):
    """Which columns of a table hold what; None for what it does not hold."""

    main: str
    kind: ColumnKind
    modality: Modality
    title: str | None
    label: str | None
    id: str | None


def _column_roles(
    path: str | Path,
    kinds: dict[str, ColumnKind],
    part: str,
    modality: Modality | None,
    *,
    text_column: str | None,
    title_column: str | None,
    image_column: str | None,
    id_column: str | None,
    label_column: str | None,
) -> _ColumnRoles:
    """The columns that the user named, and usual names for the others."""
    main, modality = _main_column(display_name(path), kinds, part, modality, text_column, image_column)
    # Titles belong to texts, classes to images.
    if modality == "image":
        title_column = None
        label_column = label_column or first_of(kinds, ("label",), but=main)
    else:
        label_column = None
        # Next to a text column that the user chose, a title is only joined when it is named too.
        if text_column is None:
            title_column = title_column or first_of(kinds, ("title",), but=main)
    id_column = id_column or first_of(kinds, ID_NAMES, but=main)
    return _ColumnRoles(main, kinds.get(main, "value"), modality, title_column, label_column, id_column)


def _read_roles(
    path: str | Path,
    roles: _ColumnRoles,
    columns: Sequence[str],
    skips: Skips,
    *,
    split: str,
    subset: str | None,
    limit: int | None,
    quotes: bool | None,
    allow_outside: bool,
) -> Corpus:
    """The items of a table."""
    # A column may have two roles, such as text and filter.
    others = [name for name in (roles.title, roles.label, roles.id, *columns) if name is not None]
    to_read: dict[str, ColumnKind] = {**dict.fromkeys(others, "value"), roles.main: roles.kind}
    how: dict[str, Any] = {"split": split, "subset": subset, "limit": limit, "quotes": quotes}
    table = open_table(path, to_read, skips, allow_outside=allow_outside, **how)
    own: dict[str, Any] = {"title_column": roles.title, "label_column": roles.label, "id_column": roles.id}
    return table_corpus(table, roles.main, roles.modality, columns=columns, **own)


def _main_column(
    source: str,
    kinds: dict[str, ColumnKind],
    part: str,
    modality: Modality | None,
    text_column: str | None,
    image_column: str | None,
) -> tuple[str, Modality]:
    """The column to embed and what it holds."""
    if text_column is not None and modality != "image":
        return text_column, "text"
    if image_column is not None:
        return image_column, "image"
    texts: tuple[str, ...] = _TEXTS
    if part == "queries":
        texts = (*_QUERIES, *_TEXTS)
    elif first_of(kinds, _QUERIES) is not None:
        # The right column of such pairs, as in `open_pairs`.
        texts = (*_DOCUMENTS, *_TEXTS)
    usual: list[tuple[tuple[str, ...], Modality]]
    usual = [(_SURELY_IMAGES, "image"), (texts, "text"), (CAPTION_NAMES, "text"), (IMAGE_NAMES, "image")]
    for names, kind in usual:
        name = first_of(kinds, names)
        if name is not None and modality in (kind, None):
            return name, kind
    if len(kinds) == 1:
        return next(iter(kinds)), modality or "text"
    argument = {"text": "text_column", "image": "image_column", None: "text_column or image_column"}[modality]
    raise DualencError(f"{source}: no telling which column to read; name {argument} (columns: {listed(kinds)})")
