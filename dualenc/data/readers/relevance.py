"""Labels of pairs: find columns that say which rows match, by their names and all their values.

Labels are 0 and 1, truth values, yes and no, or grades from 0: 0 does not match, anything above
does. A column that looks like labels but does not say which rows match (similarities, classes) is
refused, because a row that does not match would be trained as a positive.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualenc.data.columns import Column, ItemColumn
from dualenc.data.readers.column_names import (
    CLASS_LABELS,
    CLICKED,
    COUNTS,
    KINDS,
    LABELS,
    columns_named,
    normalized,
)
from dualenc.data.readers.plain_types import is_type
from dualenc.data.readers.tables import DataTable
from dualenc.errors import DualencError

logger = logging.getLogger("dualenc.data")

MAX_GRADE = 10
_TEXTS = "its values"
_MAX_WORDS = 20  # a column with more distinct texts does not hold classes
_MAX_VALUES = 10_000  # a column with more distinct values does not hold labels
_YES = (
    "1 true t yes y relevant match matched matching positive pos correct clicked click duplicate "
    "similar paraphrase"
)
_NO = (
    "0 false f no n irrelevant mismatch unmatched negative neg incorrect wrong skipped different "
    "dissimilar unrelated"
)
_WORDS = {**dict.fromkeys(_YES.split(), 1.0), **dict.fromkeys(_NO.split(), 0.0)}
_NOT = re.compile(r"(?:not|no|non|un|ir|in|mis|dis)[ _-]?(.+)")
_NAME_OF_CLASS = re.compile(r"[^\W\d_][^\W\d]{0,29}(?:[ /-][^\W\d]{1,29}){0,3}|[\[{].*[\]}]")


@dataclass(frozen=True)
class Labels:
    """Whether each row (M,), or each entry of its lists, matches: 1, 0, or NaN if unlabeled."""

    name: str
    values: np.ndarray
    of_entries: bool

    def of_pairs(self, right: ItemColumn, paired: np.ndarray) -> np.ndarray:
        """Return the labels of the right values at these positions (n,)."""
        return self.values[paired if self.of_entries else right.rows[paired]]


def as_number(value: object) -> object:
    """Return 1 or 0 for a text that says whether a row matches; return other values unchanged."""
    text = _plain(value)
    negated = _NOT.fullmatch(text)
    if negated and text not in _WORDS and negated[1] in _WORDS:
        return 1 - _WORDS[negated[1]]
    return _WORDS.get(text, value)


def label_columns(columns: Iterable[str], but: Collection[str]) -> list[str]:
    """Return the columns with a common name of labels, except those in `but`."""
    return [name for name in columns_named(columns, LABELS) if name not in but]


def looks_like_labels(values: Iterable[object], name: str) -> bool:
    """Return True for columns with a common name of labels.

    A column `clicked` may hold labels or ids, so its values decide.
    """
    if normalized(name) in CLICKED:
        return normalized(name) in LABELS and all(
            _plain(value) in _WORDS for value in values if _plain(value)
        )
    return normalized(name) in LABELS


def read_labels(
    table: DataTable,
    columns: Sequence[str],
    right: ItemColumn,
    option: str,
    *,
    beside_images: bool = False,
    effect: str = "do not match (weight 0)",
) -> Labels | None:
    """Return the labels among columns with common names, if one holds labels, and log which.

    Args:
        table: table in which these columns are open.
        columns: columns with a common name of labels.
        right: right items; lists of labels label the entries of its lists.
        option: name of the argument that selects a column of labels, or none.
        beside_images: whether the pairs hold images, whose class columns have the same names.
        effect: how the log describes the treatment of rows labeled 0.

    Raises:
        DualencError: two columns look like labels, or values do not say which rows match.
    """
    verdicts = _verdicts(table, columns, beside_images)
    if not verdicts:
        return None
    if len(verdicts) > 1:
        names = " and ".join(map(repr, list(verdicts)[:2]))
        raise DualencError(
            f"columns {names} both look like labels of the pairs",
            fix=f"name one as {option} ({_flag(option)}), or pass {option}=none to read none",
            where=table.source,
        )
    ((name, verdict),) = verdicts.items()
    if isinstance(verdict, str):
        raise DualencError(
            f"column {name!r} looks like labels of the pairs, but {verdict}",
            fix=_advice(option, not verdict.startswith(_TEXTS)),
            where=table.source,
        )
    if beside_images and normalized(name) in CLASS_LABELS:
        raise DualencError(
            f"column {name!r} may hold labels of the pairs or classes of the images",
            fix=_advice(option, True),
            where=table.source,
        )
    return _checked(table, name, verdict, right, option, effect)


def _verdicts(
    table: DataTable, columns: Sequence[str], beside_images: bool
) -> dict[str, np.ndarray | str]:
    """Return the labels of columns, or why they cannot be used; log those that are not labels."""
    verdicts: dict[str, np.ndarray | str] = {}
    for name in columns:
        verdict = _judge(table, name)
        # Labels that cannot be used are classes of images. Usable ones remain ambiguous: two
        # classes look like labels.
        if beside_images and normalized(name) in CLASS_LABELS and isinstance(verdict, str):
            verdict = None
        if verdict is not None:
            verdicts[name] = verdict
        elif pc.any(pc.is_valid(table.column(name))).as_py():
            logger.warning(
                "%s: column %r is ignored: its values are not labels of pairs", table.source, name
            )
    return verdicts


def named_labels(
    table: DataTable, name: str, right: ItemColumn, option: str, effect: str
) -> Labels:
    """Return the labels of the column that the user named; any number above 0 matches."""
    verdict = _judge(table, name, is_named=True)
    if verdict is None or isinstance(verdict, str):
        problem = verdict or f"{_TEXTS} are not labels"
        raise DualencError(
            f"column {name!r}: {problem}",
            fix="write 1 and 0",
            where=table.source,
        )
    return _checked(table, name, verdict, right, option, effect)


def _checked(
    table: DataTable, name: str, values: np.ndarray, right: ItemColumn, option: str, effect: str
) -> Labels:
    """Log that labels are read; raise if list lengths differ from the right column or all are 0."""
    column = Column(table, name, "text", lists=True)
    if column.is_list and not np.array_equal(column.rows, right.rows):
        raise DualencError(
            f"column {name!r} holds lists whose lengths differ from those of the right column",
            fix=f"give a label for each entry, or pass {option}=none",
            where=table.source,
        )
    if not (values > 0).any():
        raise DualencError(
            f"column {name!r} is read as labels, but none of them is above 0",
            fix=f"pass {option}=none if it does not hold labels",
            where=table.source,
        )
    # A warning even if all is well: a wrong guess here would change what is trained.
    logger.warning(
        "%s: column %r is read as labels: %s of %s %s are labeled 0 and %s; %s=none reads none",
        table.source,
        name,
        f"{int((values == 0).sum()):,}",
        f"{len(values):,}",
        "entries" if column.is_list else "rows",
        effect,
        option,
    )
    return Labels(name, values, column.is_list)


def _advice(option: str, are_numbers: bool) -> str:
    read = (
        f"name it as {option} ({_flag(option)}) to read it"
        if are_numbers
        else "write 1 and 0 in it"
    )
    return f"{read}, or pass {option}=none to read none"


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _judge(table: DataTable, name: str, is_named: bool = False) -> np.ndarray | str | None:
    """Return 1, 0 or NaN for each value of a column of labels.

    Return the reason if labels cannot be used, None if the column does not hold labels.
    """
    try:
        column = Column(table, name, "text", lists=True)
        codes = column.array.dictionary_encode().combine_chunks()
    except (DualencError, pa.ArrowInvalid, pa.ArrowNotImplementedError):
        # Label Studio writes {"choices": ["Relevant"]}: labels, although not readable ones.
        is_record = is_type(table.column(name).type, "struct")
        return f"{_TEXTS} are records" if is_record else None
    # Decide on the distinct values, of which there are few even in tables of millions of rows.
    values = codes.dictionary[: None if is_named else _MAX_VALUES].to_pylist()
    # `datasets.ClassLabel` stores numbers; its names say what they mean.
    names = getattr(table.dataset.features[name], "names", None)
    if names and all(isinstance(value, int) for value in values):
        values = [names[value] if 0 <= value < len(names) else None for value in values]
    texts = [_plain(value) for value in values]
    nonblank = [text for text in texts if text]
    meaning = _meanings(nonblank, normalized(name), is_named)
    if meaning is None or isinstance(meaning, str):
        return meaning
    if len(texts) < len(codes.dictionary):
        return "it holds too many different values"
    # Look up the meaning of each row's code. The last entry is for missing values.
    values_of_codes = [meaning.get(text, np.nan) for text in texts]
    by_code = np.array([*values_of_codes, np.nan], np.float32)
    indices = codes.indices.fill_null(len(texts))
    return by_code[indices.to_numpy(zero_copy_only=False)]


def _plain(value: object) -> str:
    """Return a value in lower case, whole numbers without a fraction; "" for a missing one."""
    text = " ".join(str("" if value is None else value).split()).lower().strip("'\"")
    if text in ("nan", "none", "null"):
        return ""
    return re.sub(r"^(-?[0-9]+)\.0+$", r"\1", text)


def _meanings(texts: Sequence[str], name: str, is_named: bool) -> dict[str, float] | str | None:
    """Return the meaning of each distinct value, 1 or 0.

    Return the reason if it is unknown, None if the values are not labels.
    """
    distinct = sorted(set(texts))
    if not distinct:
        return None
    if all(text in _WORDS for text in distinct):
        return {text: _WORDS[text] for text in distinct}
    # Numbers may be mixed with words, such as 1 and "no".
    numbers = _numbers(distinct)
    if numbers is not None:
        return _of_numbers(numbers, name, is_named)
    negated = {text: match[1] for text in distinct if (match := _NOT.fullmatch(text))}
    # Two values of which one negates the other, such as "toxic" and "not toxic".
    if len(distinct) == 2 and len(negated) == 1:
        (other, plain) = next(iter(negated.items()))
        if plain in distinct:
            return {other: 0.0, plain: 1.0}
    if all(text in _WORDS or negated.get(text) in _WORDS for text in distinct):
        opposites = {text: 1 - _WORDS[word] for text, word in negated.items() if word in _WORDS}
        known = {**opposites, **_WORDS}
        return {text: known[text] for text in distinct}
    if len(distinct) <= _MAX_WORDS and all(_NAME_OF_CLASS.fullmatch(text) for text in distinct):
        shown = [repr(text[:30]) for text in distinct[:3]]
        if len(distinct) > 3:
            shown.append("…")
        return f"{_TEXTS} ({', '.join(shown)}) do not say which rows match"
    return None


def _numbers(texts: Sequence[str]) -> dict[str, float] | None:
    """Return the numbers that texts spell; None if one does not."""
    try:
        numbers = {text: float(_WORDS.get(text, text)) for text in texts}
    except ValueError:
        return None
    return numbers if np.isfinite(list(numbers.values())).all() else None


def _of_numbers(
    numbers: dict[str, float], name: str, is_named: bool
) -> dict[str, float] | str | None:
    values = sorted(set(numbers.values()))
    lowest = values[0]
    highest = values[-1]
    meanings = {text: float(number > 0) for text, number in numbers.items()}
    is_whole = all(value.is_integer() for value in values)
    is_count = is_whole and lowest >= 0 and name in COUNTS
    if is_named or is_count or values == [-1, 1]:
        return meanings
    if not is_whole:
        # Fractions in these ranges may be similarities or scores, which need a threshold; others
        # are quantities of something else.
        if lowest >= 0 or (lowest >= -1 and highest <= 1):
            return f"its numbers ({lowest:g} to {highest:g}) do not say from where on rows match"
        return None
    if lowest < 0:
        return None if highest > MAX_GRADE else f"it holds negative numbers ({lowest:g})"
    if highest > MAX_GRADE:
        # Large numbers in a column such as `label` are classes; elsewhere their scale is unclear.
        return None if name in KINDS else f"its numbers go up to {highest:g}"
    if lowest > 0:
        # On a scale from 1 to 5 it is unclear where a match begins.
        return f"its numbers ({lowest:g} to {highest:g}) have no 0 for rows that do not match"
    if name in KINDS:
        return f"its numbers (0 to {highest:g}) may be grades, or stand for kinds"
    return meanings
