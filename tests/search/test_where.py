"""Filter conditions against pandas, independent of Arrow, SQL and Qdrant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.errors import DualencError
from dualenc.search.where import (
    Condition,
    Kinds,
    column_kinds,
    meets,
    parse_conditions,
)
from tests.search.conditions import KINDS, conditions, met_by_pandas, rows


@given(rows(), st.lists(conditions(), max_size=3))
def test_rows_that_meet_conditions_are_those_of_pandas(made: list[dict[str, Any]], where: list[str]) -> None:
    table = pa.Table.from_pylist(made, schema=SCHEMA)
    assert column_kinds(table) == KINDS
    found = meets(parse_conditions(where, KINDS), table)
    np.testing.assert_array_equal(found, met_by_pandas(pd.DataFrame(made, columns=list(KINDS)), where))


SCHEMA = pa.schema([("year", pa.int64()), ("weight", pa.float64()), ("lang", pa.large_string()), ("open", pa.bool_())])


def test_what_conditions_mean() -> None:
    found = parse_conditions(["year >= 2020", "lang=en", "de", "open!=TRUE", "weight==2"], KINDS)
    assert found == [
        Condition("year", ">=", (2020,)),
        Condition("lang", "=", ("en", "de")),
        Condition("open", "!=", (True,)),
        Condition("weight", "=", (2.0,)),
    ]
    assert parse_conditions(["lang=en,de,year=1"], KINDS) == parse_conditions(["lang=en", "de", "year=1"], KINDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["year"], "'year' is no condition; write for example"),
        (["year>2020", "2021"], "'2021' is no condition"),
        (["yaer=1"], "no column 'yaer'; there are year, weight, lang, open"),
        (["year=2020.5"], "column 'year' is compared with '2020.5'; give a whole number"),
        (["weight<heavy"], "give a number"),
        (["open=maybe"], "give true or false"),
        (["lang="], "give a text"),
        (["lang>en"], "orders a column of text values"),
        (['lang="Doe, Jane'], "does not end with the quote it begins with"),
        (['year>=2020,"lang=a, b"'], "is no condition"),
    ],
)
def test_what_is_no_condition_is_told(words: list[str], message: str) -> None:
    with pytest.raises(DualencError, match=message) as error:
        parse_conditions(words, KINDS)
    assert "\n" not in str(error.value)
    with pytest.raises(DualencError, match="none were kept; embed with --columns"):
        parse_conditions(["year=1"], {})


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ('lang="Doe, Jane"', ["Doe, Jane"]),
        ("lang='Doe, Jane'", ["Doe, Jane"]),
        ('"lang=""Doe, Jane"""', ["Doe, Jane"]),
        ('lang = "Doe, Jane" , en,"x=1, y" ', ["Doe, Jane", "en", "x=1, y"]),
        ("lang=' en '", [" en "]),
        ("lang=O'Brien,'t Hooft,5\" disk", ["O'Brien", "'t Hooft", '5" disk']),
    ],
)
def test_values_with_commas_are_quoted(word: str, values: list[str]) -> None:
    kinds: Kinds = {"lang": "text", "year": "integer"}
    for sign in ("=", "!="):
        written = [word.replace("=", sign, 1), 'year="2020"']
        assert parse_conditions(written, kinds) == [
            Condition("lang", sign, (*values,)),
            Condition("year", "=", (2020,)),
        ]
