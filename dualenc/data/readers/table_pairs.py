"""Pairs from two columns of a table."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dualenc.data.columns import read_column
from dualenc.data.readers.column_kinds import ColumnKind
from dualenc.data.readers.column_pairs import ColumnPairs, open_with_weights
from dualenc.data.readers.read_options import ReadOptions
from dualenc.data.readers.tables import TableSource, check_columns
from dualenc.types import Modality, OnError, one_or_several

logger = logging.getLogger("dualenc.data")

# neg, negatives, hard_negative, negative_1, …: names in data sets of sentence-transformers.
_NEGATIVE_NAME = re.compile(r"(?:hard_)?neg(?:ative)?s?(?:_?(\d{1,4}))?")


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
        cls, source: TableSource, left_column: str, right_column: str, **options: Any
    ) -> TablePairs:
        """Read pairs from a table whose columns have been examined, without examining it again."""
        pairs = cls.__new__(cls)
        pairs._read(source, left_column, right_column, **options)
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
        # Here, where it is known which argument has the wrong name.
        for argument, name in (("left_column", left_column), ("right_column", right_column)):
            check_columns(f"{source.path}: {argument}", source.kinds, [name])
        # `None` looks for columns by name, [] reads none.
        if negative_column is None:
            negative_column = _default_negatives(source, (left_column, right_column))
        negatives = list(one_or_several(negative_column))
        columns: dict[str, ColumnKind] = {
            left_column: source.item_kind(left_column, left_modality),
            right_column: source.list_kind(right_column, right_modality),
        }
        # Negatives are right items, so they are read the same way.
        columns |= dict.fromkeys(negatives, columns[right_column])
        table, weight_column, likely = open_with_weights(source, columns, weight_column)
        left = read_column(table, left_column, left_modality)
        right = read_column(table, right_column, right_modality)
        super().__init__(
            left,
            right,
            [read_column(table, name, right.modality) for name in negatives],
            weight_column=weight_column,
            likely_labels=likely,
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
