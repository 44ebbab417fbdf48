"""Open any supported source; its format is detected from its files."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from dualenc.data.bad_rows import report_once
from dualenc.data.corpus import Corpus, image_corpus, table_corpus
from dualenc.data.pairs import PairDataset
from dualenc.data.readers import column_names as names
from dualenc.data.readers.beir import BeirPairs, read_corpus
from dualenc.data.readers.captioned_images import ImageFolderPairs
from dualenc.data.readers.column_names import columns_named, first_of
from dualenc.data.readers.detect import RETRIEVAL_KINDS, detect
from dualenc.data.readers.id_columns import usual_id_column
from dualenc.data.readers.images import split_folder
from dualenc.data.readers.mined_pairs import MinedPairs, are_mined
from dualenc.data.readers.read_options import ReadOptions, check_split
from dualenc.data.readers.table_pairs import TablePairs
from dualenc.data.readers.tables import TableSource
from dualenc.data.readers.vectors import matrix_corpus, vector_corpus
from dualenc.data.readers.webdataset import WebDatasetPairs, tar_corpus
from dualenc.data.store.metadata import check_column_names
from dualenc.errors import DualencError
from dualenc.io.reading import with_home
from dualenc.types import Modality, OnError, StrPath, one_or_several

logger = logging.getLogger("dualenc.data")

# A sentence rather than the name of a column: it ends with a punctuation mark, or has many words.
_SENTENCE = re.compile(r"\s.*[.?!]\s*$|(\S+\s+){5}\S")
_MAX_NAME = 80


def open_corpus(
    path: StrPath,
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
    quotes: bool | None = None,
    allow_outside: bool = False,
    on_error: OnError = "skip",
) -> Corpus:
    """Open items to embed: a BEIR folder, table, image folder, tars, text lines, or vectors.

        open_corpus("docs.csv", text_column="body").ids

    Args:
        path: file, folder, glob, or hub name.
        part: "corpus" or "queries" of a retrieval collection; for a table with a column of each,
            its documents or its queries.
        modality: "text", "image" or "vector", for a table or tar that holds several; by default
            images are preferred, then texts.
        text_column: column of texts; by default `text` or another common name, or the only column.
            A list of texts gives several items.
        title_column: column of titles of a table, to prepend to its texts; by default `title`,
            unless the table has queries or `text_column` is named.
        image_column: column of images; by default `image` or another common name.
        vector_column: column of lists of numbers; by default `vector` or another common name.
        id_column: column of ids; by default `_id` or another common name. Without one, or for
            `none`, ids are row numbers.
        label_column: column of image classes; by default `label`.
        columns: further columns of a table or BEIR folder, to keep for filters.
        split: which split of a folder of tables or images, saved data set or hub name.
        quotes: whether `"` encloses fields; by default true for csv files, and for tsv files whose
            header is in quotes.
        allow_outside: whether image paths may lead out of the table's folder; only for a table that
            you trust.
        on_error: "skip" leaves out, counts and reports bad samples; "raise" stops at the first.

    Raises:
        DualencError: nothing found, nothing usable, or columns that have to be named.
        BadSample: an empty item, a missing or repeated id, or a malformed line, under
            on_error="raise".
    """
    columns = list(one_or_several(columns))
    check_column_names(columns)
    path = with_home(path)
    kind = detect(path)
    if columns and kind in ("tars", "images"):
        raise DualencError(
            "a folder of images or tars lacks columns to keep",
            fix="give a table of image paths and columns",
            where=path,
        )
    options = ReadOptions(split, quotes, allow_outside, on_error)
    bad_rows = options.bad_rows(path)
    if kind in ("tars", "vectors"):
        check_split(path, split)
    if kind == "tars":
        corpus = tar_corpus(path, "text" if modality == "text" else "image", bad_rows)
    elif kind == "vectors":
        corpus = matrix_corpus(path, columns, bad_rows)
    elif kind == "images":
        corpus = image_corpus(split_folder(path, split))
        if label_column is not None and corpus.labels is None:
            raise DualencError(
                "its images are not in class folders, and a folder lacks columns",
                fix=f"give the table that has {label_column!r}",
                where=path,
            )
    elif kind in RETRIEVAL_KINDS:
        corpus = read_corpus(path, part, columns=columns, bad_rows=bad_rows)
    else:
        source = TableSource(path, bad_rows, kind=kind, options=options)
        if modality == "vector" or vector_column is not None:
            corpus = vector_corpus(source, vector_column, id_column=id_column, columns=columns)
        else:
            main, modality = _main_column(source, part, modality, text_column, image_column)
            if modality == "image":
                label_column = label_column or first_of(source.kinds, ("label",), but=main)
                title_column = None
            else:
                label_column = None
                # A title that the user did not name belongs to documents read by default.
                by_default = text_column is None and part == "corpus"
                own_title = _title_column(source, main) if by_default else None
                title_column = title_column or own_title
            corpus = table_corpus(
                source,
                main,
                modality,
                title_column=title_column,
                label_column=label_column,
                id_column=_usual_ids(source, main, part) if id_column is None else id_column,
                columns=columns,
            )
    corpus.skipped = bad_rows.report()
    return corpus


def _title_column(source: TableSource, main: str) -> str | None:
    """Return the column of titles to prepend to documents."""
    # Beside queries, a title may be theirs rather than the document's.
    if first_of(source.kinds, names.QUERIES) is not None:
        return None
    return first_of(source.kinds, (names.TITLE,), but=main)


def open_pairs(
    path: str | Path,
    left_column: str | None = None,
    right_column: str | None = None,
    *,
    split: str = "train",
    left_modality: Modality | None = None,
    right_modality: Modality | None = None,
    weight_column: str | None = None,
    quotes: bool | None = None,
    allow_outside: bool = False,
    on_error: OnError = "skip",
) -> PairDataset:
    """Open training pairs: a BEIR folder, tars, captioned images, mined negatives, or a table.

        open_pairs("pairs.csv", "question", "answer")[0]

    Args:
        path: file, folder, glob, or hub name.
        left_column: left column of a table; by default `image`, `query` or another common name.
        right_column: right column of a table; by default `captions`, `document` or another common
            name.
        split: which split of a folder of tables or images, saved data set or hub name.
        left_modality: "text", "image" or "vector", for a table; by default inferred from the
            values.
        right_modality: the same for the right column.
        weight_column: column of weights of a table, see `TablePairs`.
        quotes: whether `"` encloses fields, see `open_corpus`.
        allow_outside: whether image paths may lead out of the table's folder; only for a table that
            you trust.
        on_error: "skip" leaves out, counts and reports bad samples; "raise" stops at the first.

    Raises:
        DualencError: nothing found, nothing usable, or columns that have to be named.
        BadSample: a bad sample under on_error="raise".
    """
    path = with_home(path)
    kind = detect(path)
    if kind in RETRIEVAL_KINDS:
        return BeirPairs(path, split, on_error=on_error)
    if kind == "tars":
        check_split(path, split)
        return WebDatasetPairs(path, on_error=on_error)
    if kind == "images":
        folder = split_folder(path, split)
        return ImageFolderPairs(
            folder, weight_column=weight_column, quotes=quotes, on_error=on_error
        )
    options = ReadOptions(split, quotes, allow_outside, on_error)
    source = TableSource(path, options.bad_rows(path), kind=kind, options=options)
    # A user who names columns may want others of such a file than `pos` and `neg`.
    if left_column is None and right_column is None and are_mined(source):
        return MinedPairs(path, split=split, on_error=on_error)
    left_names = (*names.IMAGES, *names.QUERIES, "filepath", names.TITLE, "file_name")
    right_names = (*names.CAPTIONS[:2], *names.DOCUMENTS, names.TITLE)
    left_column = left_column or source.default_column(
        left_names, "left_column", but=right_column, fix="name it (--left-column)"
    )
    right_column = right_column or source.default_column(
        right_names, "right_column", but=left_column, fix="name it (--right-column)"
    )
    return TablePairs.from_source(
        source,
        left_column,
        right_column,
        left_modality=left_modality,
        right_modality=right_modality,
        weight_column=weight_column,
    )


def _usual_ids(source: TableSource, main: str, part: str) -> str | None:
    """Return the column of ids of the texts in the main column, which may be queries."""
    if part == "queries" or main in columns_named(source.kinds, names.QUERIES):
        own = usual_id_column(source, main, of_queries=True)
        # If the table also holds documents, the remaining ids are theirs, not those of queries.
        if own is not None or first_of(source.kinds, names.DOCUMENTS, but=main) is not None:
            return own
    return usual_id_column(source, main)


def _main_column(
    source: TableSource,
    part: str,
    modality: Modality | None,
    text_column: str | None,
    image_column: str | None,
) -> tuple[str, Modality]:
    """Return the column to embed and its modality."""
    if text_column is not None and modality != "image":
        return text_column, "text"
    if image_column is not None:
        return image_column, "image"
    texts: tuple[str, ...] = names.TEXTS
    if part == "queries":
        texts = (*names.QUERIES, *names.TEXTS)
    elif first_of(source.kinds, names.QUERIES) is not None:
        # A table of pairs: embed the column that `open_pairs` would use on the right.
        texts = (*names.DOCUMENTS, *names.TEXTS)
    # In order of preference: a table of images often has captions and labels, but a table of
    # texts rarely has images. `file` and `path` come last, since texts may have them, too.
    defaults: list[tuple[tuple[str, ...], Modality]]
    defaults = [
        (names.IMAGES, "image"),
        (texts, "text"),
        (names.CAPTIONS, "text"),
        (names.IMAGE_FILES, "image"),
    ]
    for usual, kind in defaults:
        name = first_of(source.kinds, usual)
        if name is not None and modality in (kind, None):
            return name, kind
    if len(source.kinds) == 1:
        return _only_column(source), modality or "text"
    argument = "text_column or image_column" if modality is None else f"{modality}_column"
    columns = ", ".join(source.kinds)
    raise DualencError(
        "it is unclear which column to read",
        fix=f"name {argument} (columns: {columns})",
        where=source.path,
    )


def _only_column(source: TableSource) -> str:
    """Return the only column of a table, which has an uncommon name.

    In csv it may be a text, if the header is missing.
    """
    (name,) = source.kinds
    if source.has_header:
        if _SENTENCE.search(name) or len(name) > _MAX_NAME:
            raise DualencError(
                f"its first line ({name[:60]!r}) looks like a text, not like the name of a column",
                fix=(
                    "write a line `text` above it, name the file .txt, or name the column "
                    "(text_column, --text-column)"
                ),
                where=source.path,
            )
        report_once(
            f"{source.path}: the first line is read as the name of the only column, {name!r}"
        )
    return name
