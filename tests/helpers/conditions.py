"""Rows with columns, conditions on them, and what pandas says of both."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
from hypothesis import strategies as st

from dualenc.search.where import Kind

KINDS: dict[str, Kind] = {"year": "integer", "weight": "number", "lang": "text", "open": "truth"}
LANGUAGES = ("en", "de", "it's", "日本", "e n", "100%", 'a"b', "a\\b", "`c`")


def rows(size: int = 12) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Rows in which every value may be missing."""
    row = {
        "year": st.none() | st.integers(2018, 2022),
        "weight": st.none() | st.sampled_from([-1.5, 0.0, 0.5, 2.0]),
        "lang": st.none() | st.sampled_from(LANGUAGES),
        "open": st.none() | st.booleans(),
    }
    return st.lists(st.fixed_dictionaries(row), min_size=1, max_size=size)


def conditions() -> st.SearchStrategy[str]:
    """Words such as year>=2020 and lang!=en,de."""
    signs, equal = st.sampled_from(["=", "!=", "<", "<=", ">", ">="]), st.sampled_from(["=", "!="])
    texts = st.lists(st.sampled_from(LANGUAGES), min_size=1, max_size=3).map(",".join)
    return st.one_of(
        st.builds("year{}{}".format, signs, st.integers(2017, 2023)),
        st.builds("weight{}{}".format, signs, st.sampled_from([-1.5, 0.0, 0.25, 2])),
        st.builds("lang{}{}".format, equal, texts),
        st.builds("open{}{}".format, equal, st.sampled_from(["true", "false"])),
    )


def met_by_pandas(frame: pd.DataFrame, words: list[str]) -> np.ndarray:
    """Which rows meet all conditions, by pandas."""
    met = pd.Series(True, index=frame.index)
    for word in words:
        match = re.fullmatch(r"(\w+?)(!=|<=|>=|=|<|>)(.*)", word)
        assert match is not None
        name, sign, text = match.groups()
        column = frame[name]
        if sign in ("=", "!="):
            values: list[Any] = {"lang": text.split(","), "open": [text == "true"]}.get(name) or [
                float(text)
            ]
            equal = column.map(lambda value, values=values: value is not None and value in values)
            met &= (equal if sign == "=" else ~equal) & column.notna()
        else:
            numbers = pd.to_numeric(column)
            met &= getattr(numbers, {"<": "lt", "<=": "le", ">": "gt", ">=": "ge"}[sign])(
                float(text)
            )
    return met.to_numpy(dtype=bool)
