"""Lists written as text, as in csv files of pandas: JSON, Python literals or NumPy arrays."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from typing import Any

_MAX_CHARACTERS = 1 << 24  # parsing takes many times the memory of the text
_LIST = re.compile(r"\s*\[.*\]\s*", re.DOTALL)
# Adjacent strings: Python joins them, but in a printed NumPy array they are two entries.
_NEIGHBORS = re.compile(r"""['"]\s+[A-Za-z]{0,2}['"]""")
_NUMBERS = re.compile(
    r"\s*\[\s*(?:[-+0-9.eE]+|nan|inf|-inf)(?:\s+(?:[-+0-9.eE]+|nan|inf|-inf))*\s*\]\s*"
)


def parse_list(text: object) -> list[Any] | None:
    """Return the texts or numbers of a list written as text; None for anything else.

    The text is parsed, never executed.
    """
    if not isinstance(text, str) or len(text) > _MAX_CHARACTERS or not _LIST.fullmatch(text):
        return None
    values: Any
    try:
        values = _of_numpy(text) if _NUMBERS.fullmatch(text) else _parsed(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, tokenize.TokenError):
        return None
    # Nested lists, records and truth values are not items, and mixed lists lack a single kind.
    is_plain = isinstance(values, list) and all(
        value is None or (isinstance(value, (str, int, float)) and not isinstance(value, bool))
        for value in values
    )
    if not is_plain:
        return None
    are_texts = {isinstance(value, str) for value in values if value is not None}
    return values if len(are_texts) < 2 else None


def _of_numpy(text: str) -> list[Any]:
    """Return the numbers of a printed array, `[1. 2.]`; integers stay integers."""
    words = text.strip()[1:-1].split()
    unsigned = [word.lstrip("+-") for word in words]
    convert = int if all(word.isdecimal() for word in unsigned) else float
    return [
        None if without_sign in ("nan", "inf") else convert(word)
        for word, without_sign in zip(words, unsigned)
    ]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=lambda name: None)
    except ValueError:
        pass
    if not _NEIGHBORS.search(text):
        return ast.literal_eval(text.strip())
    values = []
    for token in tokenize.generate_tokens(io.StringIO(" ".join(text.split("\n"))).readline):
        if token.type == tokenize.STRING:
            values.append(ast.literal_eval(token.string))
        elif token.string not in ("[", "]", ",", "") and token.type != tokenize.NEWLINE:
            raise ValueError("not a list of strings")
    return values
