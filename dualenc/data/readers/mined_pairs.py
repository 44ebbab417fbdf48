"""Pairs with mined negatives, in the layouts of FlagEmbedding and Tevatron."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

from dualenc.data.bad_rows import BadRows
from dualenc.data.columns import read_column, read_ids
from dualenc.data.readers.column_kinds import ColumnKind
from dualenc.data.readers.column_names import DOCUMENT_IDS, QUERY_IDS, first_of
from dualenc.data.readers.column_pairs import ColumnPairs
from dualenc.data.readers.lines import Record
from dualenc.data.readers.read_options import ReadOptions
from dualenc.data.readers.relevance import label_columns
from dualenc.data.readers.tables import TableSource
from dualenc.data.readers.vectors import open_vectors
from dualenc.errors import DualencError
from dualenc.types import OnError, StrPath

logger = logging.getLogger("dualenc.data")


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
        # The vectors are in `queries` and `documents`; the file only holds their ids.
        sides = [
            open_vectors(vectors, bad_rows=bad_rows)
            for vectors in (queries, documents)
            if vectors is not None
        ]
        source = _mined_source(path, bad_rows, split, _mined_ids if sides else _mined_texts)
        table = source.open(columns, optional=("neg",))
        if sides:
            left, right = sides
            query = read_ids(table, "query", left.ids, left.items)
            pos, neg = (read_ids(table, name, right.ids, right.items) for name in ("pos", "neg"))
        else:
            query, pos, neg = (read_column(table, name, "text") for name in columns)
        for name in label_columns(source.kinds, columns):
            if source.kinds[name] == "value":
                logger.warning(
                    "%s: column %r is ignored: pos and neg decide what matches", path, name
                )
        super().__init__(query, pos, [neg], max_negatives=max_negatives)


def _mined_source(
    path: StrPath, bad_rows: BadRows, split: str, reshape: Callable[[Record], Record]
) -> TableSource:
    """Open a table of mined negatives; parquet rows with nested passages are read as records."""
    source = TableSource(path, bad_rows, options=ReadOptions(split=split), reshape=reshape)
    if "positive_passages" not in source.kinds:
        return source
    if source.dataset is None:
        # Structs become dicts, as the lines of Tevatron's files are, for `reshape` to take apart.
        return replace(source, as_records=True)
    raise DualencError(
        "nested passages can only be read from files",
        fix='save it with Dataset.to_json("mined.jsonl") and give that file',
        where=path,
    )


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
