"""Classes of images, from columns, names or folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dualenc.data.bad_rows import BadRows
from dualenc.data.columns import Column
from dualenc.data.tables import DataTable

_WHOLE_FLOAT = re.compile(r"-?[0-9]{1,6}(\.0)?|nan")
# Larger numbers are keys of something: a list of their names would fill memory.
_CLASS_NUMBER = re.compile("-?[0-9]{1,6}")


class Labels(NamedTuple):
    """Class numbers (N,) int64, -1 where there is none, and the name of each class number."""

    numbers: np.ndarray
    names: list[str]


def labels_of_names(names: Sequence[str]) -> Labels:
    """Number class names in sorted order; whole numbers below a million keep their value."""
    if all(_CLASS_NUMBER.fullmatch(name) for name in names):
        numbers = np.array([int(name) for name in names], dtype=np.int64)
        return Labels(numbers, [str(i) for i in range(int(numbers.max(initial=-1)) + 1)])
    classes, numbers = np.unique(np.array(names, dtype=object).astype(str), return_inverse=True)
    return Labels(numbers.astype(np.int64), classes.tolist())


def labels_of_column(table: DataTable, name: str) -> Labels | None:
    """The labels in a column of class numbers or names; `datasets.ClassLabel` names its numbers. None without any."""
    column = Column(table, name, "text")
    values = column.values()
    rows = np.flatnonzero(column.filled())
    texts = [str(values[row]) for row in rows.tolist()]
    # Beside missing values pandas writes class 3 as 3.0, and the missing ones in csv may be nan.
    if all(_WHOLE_FLOAT.fullmatch(text) for text in texts):
        rows = rows[[text != "nan" for text in texts]]
        texts = [text.partition(".")[0] for text in texts if text != "nan"]
    labels = labels_of_names(texts)
    if (labels.numbers < 0).all():
        return None
    numbers = np.full(len(column), -1, dtype=np.int64)
    numbers[rows] = labels.numbers
    names = getattr(table.dataset.features[name], "names", None)
    return Labels(numbers, labels.names if names is None else list(names))


def rows_with_label(labels: np.ndarray, source: object, ids: Sequence[str] | None = None) -> np.ndarray:
    """The rows (n,) of those labels (N,) that name a class; the others are counted and reported as bad samples."""
    without = np.flatnonzero(labels < 0)
    if len(without):
        bad_rows = BadRows(source)
        position = f"row {without[0]}" if ids is None else ids[without[0]]
        bad_rows.add("image without a label", position, "give it one", len(without))
        bad_rows.report()
    return np.flatnonzero(labels >= 0)


def labels_of_folders(names: Sequence[str]) -> Labels | None:
    """The first folder of each relative file name as its class; None unless every file is in one."""
    if not all("/" in name for name in names):
        return None
    return labels_of_names([name.split("/", 1)[0] for name in names])
