"""Image classes: numbered by name, read from columns and folders, aligned with another source."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from dualenc.data.bad_rows import BadRows
from dualenc.data.columns import Column
from dualenc.data.readers.tables import DataTable
from dualenc.errors import DualencError
from dualenc.types import Integers

ClassLabels = tuple[Integers, list[str]]
"""Class numbers (N,) int64, -1 where there is none, and the name of each class number."""
_WHOLE_LABEL = re.compile(r"-?[0-9]{1,6}(\.0)?|nan")
# Larger numbers are keys of something else, and a list of their names would fill memory.
_CLASS_NUMBER = re.compile("-?[0-9]{1,6}")


def labels_of_names(names: Sequence[str]) -> ClassLabels:
    """Assign numbers to class names in sorted order; integers below a million keep their value."""
    if all(_CLASS_NUMBER.fullmatch(name) for name in names):
        numbers = np.array(names, dtype=np.int64)
        num_classes = int(numbers.max(initial=-1)) + 1
        class_names = [str(number) for number in range(num_classes)]
        return numbers, class_names
    classes, numbers = np.unique(np.array(names, dtype=str), return_inverse=True)
    return numbers, classes.tolist()


def labels_of_column(table: DataTable, name: str) -> ClassLabels | None:
    """Return the labels in a column of class numbers or names; None without any.

    `datasets.ClassLabel` provides names for numbers.
    """
    column = Column(table, name, "text")
    values = column.values()
    rows = np.flatnonzero(column.filled())
    texts = [str(values[row]) for row in rows]
    # pandas writes class 3 as 3.0 beside missing values, and the missing ones as nan.
    if all(_WHOLE_LABEL.fullmatch(text) for text in texts):
        is_present = [text != "nan" for text in texts]
        rows = rows[is_present]
        texts = [text.partition(".")[0] for text in texts if text != "nan"]
    labeled, class_names = labels_of_names(texts)
    if (labeled < 0).all():
        return None
    numbers = np.full(len(column), -1, dtype=np.int64)
    numbers[rows] = labeled
    return numbers, getattr(table.dataset.features[name], "names", None) or class_names


def rows_with_label(labels: Integers, source: object, ids: Sequence[str] | None = None) -> Integers:
    """Return the rows (n,) whose label (N,) is a class; report the others as bad samples."""
    without = np.flatnonzero(labels < 0)
    if len(without):
        bad_rows = BadRows(source)
        position = f"row {without[0]}" if ids is None else ids[without[0]]
        bad_rows.add("image without a label", position, "give it one", len(without))
        bad_rows.report()
    return np.flatnonzero(labels >= 0)


def labels_of_folders(names: Sequence[str]) -> ClassLabels | None:
    """Return the first folder of each relative file name as its class.

    None unless every file is in a folder.
    """
    if not all("/" in name for name in names):
        return None
    return labels_of_names([name.split("/", 1)[0] for name in names])


def align_labels(
    labels: Integers, names: Sequence[str] | None, onto: Sequence[str] | None, what: str
) -> Integers:
    """Convert class numbers (N,) to the numbering of another source, by class name.

    A name matches an equal name, or one that begins with it as a word ("n01443537" and "n01443537
    goldfish"). Numbers are kept if one of the sources lacks names, or uses its numbers as names.

    Args:
        labels: class numbers (N,).
        names: class names of this source.
        onto: class names of the other source.
        what: name of this source in errors.

    Raises:
        DualencError: a class that occurs is not among those of the other source.
    """
    if names is None or onto is None or _is_numbering(names) or _is_numbering(onto):
        return labels
    numbers: dict[str, int] = {}
    # Reversed, so that the first of several names with the same first word wins. Whole names are
    # added last, so that they win over first words.
    for number, name in reversed(list(enumerate(onto))):
        numbers[name.split()[0]] = number
    numbers |= {name: number for number, name in enumerate(onto)}
    mapped = labels.copy()
    for number in np.unique(labels).tolist():
        if names[number] not in numbers:
            raise DualencError(
                f"class {names[number]} is not among the {len(onto)} classes of the training "
                "images",
                fix="give images of the same classes",
                where=what,
            )
        mapped[labels == number] = numbers[names[number]]
    return mapped


def _is_numbering(names: Sequence[str]) -> bool:
    """Return True if classes are named by their numbers."""
    return list(names) == [str(number) for number in range(len(names))]


def are_numbers(names: Sequence[str]) -> bool:
    """Return True if all class names are numbers, also without classes."""
    return all(name.isdecimal() for name in names)
