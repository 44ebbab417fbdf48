"""Classes of images, from columns, names or folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dualenc.data.columns import Column
from dualenc.data.tables import DataTable

_CLASS_NUMBER = re.compile("-?[0-9]{1,6}")  # larger ones are keys of something: a list of their names would fill memory


class Labels(NamedTuple):
    """Class numbers (N,) int64, -1 where there is none, and the name of each class number."""

    numbers: np.ndarray
    names: list[str]

    def take(self, rows: np.ndarray) -> Labels:
        """The labels of some rows, with all classes."""
        return Labels(self.numbers[rows], self.names)


def labels_of_names(names: Sequence[str]) -> Labels:
    """Number class names in sorted order; whole numbers below a million keep their value."""
    if all(_CLASS_NUMBER.fullmatch(name) for name in names):
        numbers = np.array([int(name) for name in names], dtype=np.int64)
        return Labels(numbers, [str(i) for i in range(int(numbers.max(initial=-1)) + 1)])
    classes, numbers = np.unique(np.array(names, dtype=object).astype(str), return_inverse=True)
    return Labels(numbers.astype(np.int64), classes.tolist())


def labels_of_column(table: DataTable, name: str) -> Labels:
    """The labels in a column of class numbers or names; `datasets.ClassLabel` names its numbers."""
    column = Column(table, name, "text")
    values = column.values(np.arange(len(column))).tolist()
    labelled = np.array([value is not None for value in values])
    labels = labels_of_names([str(value) for value in values if value is not None])
    numbers = np.full(len(values), -1, dtype=np.int64)
    numbers[labelled] = labels.numbers
    names = getattr(table.dataset.features[name], "names", None)
    return Labels(numbers, labels.names if names is None else list(names))


def labels_of_folders(names: Sequence[str]) -> Labels | None:
    """The first folder of each relative file name as its class; None unless every file is in one."""
    if not all("/" in name for name in names):
        return None
    return labels_of_names([name.split("/", 1)[0] for name in names])
