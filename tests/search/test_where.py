"""Filter conditions against pandas, independent of Arrow, SQL and Qdrant."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data.store.metadata import plain_columns
from dualenc.errors import DualencError
from dualenc.search.where import (
    Condition,
    Kinds,
    column_kinds,
    meets,
    parse_conditions,
)
from tests.helpers.conditions import KINDS, conditions, met_by_pandas, rows


@given(rows(), st.lists(conditions(), max_size=3))
def test_rows_that_meet_conditions_are_those_of_pandas(
    made: list[dict[str, Any]], where: list[str]
) -> None:
    table = pa.Table.from_pylist(made, schema=SCHEMA)
    assert column_kinds(table) == KINDS
    found = meets(parse_conditions(where, KINDS), table)
    np.testing.assert_array_equal(
        found, met_by_pandas(pd.DataFrame(made, columns=list(KINDS)), where)
    )


SCHEMA = pa.schema(
    [
        ("year", pa.int64()),
        ("weight", pa.float64()),
        ("lang", pa.large_string()),
        ("open", pa.bool_()),
    ]
)


def test_what_conditions_mean() -> None:
    found = parse_conditions(["year >= 2020", "lang=en", "de", "open!=TRUE", "weight==2"], KINDS)
    assert found == [
        Condition("year", ">=", (2020,)),
        Condition("lang", "=", ("en", "de")),
        Condition("open", "!=", (True,)),
        Condition("weight", "=", (2.0,)),
    ]
    assert parse_conditions(["lang=en,de,year=1"], KINDS) == parse_conditions(
        ["lang=en", "de", "year=1"], KINDS
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["year"], "'year' is not a condition; write for example"),
        (["year>2020", "2021"], "'2021' is not a condition"),
        (["yaer=1"], "no column 'yaer'; there are year, weight, lang, open"),
        (["year=2020.5"], "column 'year' is compared with '2020.5'; give a whole number"),
        (["weight<heavy"], "give a number"),
        (["open=maybe"], "give true or false"),
        (["lang="], "give a text"),
        (["lang>en"], "orders a column of text values"),
        (['lang="Doe, Jane'], "does not end with the quote it begins with"),
        (['year>=2020,"lang=a, b"'], "is not a condition"),
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


PRECISION = [
    ("x=0.1", "1000"),
    ("x!=0.3", "1011"),
    ("x=0.1,2.5", "1010"),
    ("x>0.1", "0110"),
    ("x>=0.1", "1110"),
    ("x<0.3", "1001"),
    ("x<=0.3", "1101"),
    ("x=0.1000000001", "0000"),
]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("is_widened", [False, True])
@pytest.mark.parametrize(("word", "rows"), PRECISION)
def test_numbers_compare_in_the_precision_of_their_column(
    kind: Any, is_widened: bool, word: str, rows: str
) -> None:
    """As they are kept now, and as indexes of earlier versions have them: widened to float64."""
    table = pa.table({"x": np.array([0.1, 0.3, 2.5, -1.1], kind)})
    table = (
        pa.table({"x": table["x"].to_numpy().astype(np.float64)})
        if is_widened
        else plain_columns(table)
    )
    met = meets(parse_conditions([word], {"x": "number"}), table)
    assert "".join("01"[int(each)] for each in met) == rows


def test_a_fraction_is_not_rounded_to_a_whole_number() -> None:
    table = pa.table({"x": [8388608.0, 16777216.0]})
    for word in ("x=8388608.3", "x=16777217.5"):
        assert not meets(parse_conditions([word], {"x": "number"}), table).any()
