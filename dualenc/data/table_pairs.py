"""Pairs from tables: any columns of any table, and rows that bring mined negatives."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any

from dualenc.data.arrow_cache import Kind
from dualenc.data.column_pairs import ColumnPairs
from dualenc.data.pairs import Modality
from dualenc.data.skips import OnError, Skips
from dualenc.data.tables import open_table


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
    """Tevatron's nested passages as FlagEmbedding's lists of texts."""
    names = {"pos": "positive_passages", "neg": "negative_passages"}
    if names["pos"] not in record:
        return record
    lists = {new: _passages(record.get(old), titles) for new, old in names.items()}
    return {**record, **lists}


def _mined_with_titles(record: dict[str, Any]) -> dict[str, Any]:
    return _mined(record, titles=True)


def _passages(passages: Any, titles: bool) -> Any:
    return [_passage(entry, titles) for entry in passages] if isinstance(passages, list) else passages


def _passage(entry: Any, titles: bool) -> Any:
    """Title and text joined; anything else is left for the reading of the column to judge."""
    if not isinstance(entry, dict):
        return entry
    parts = (entry.get("title") if titles else None, entry.get("text"))
    if any(not isinstance(part, (str, NoneType)) for part in parts):
        raise TypeError("a passage's title or text is no string")
    return " ".join(part or "" for part in parts).strip()
