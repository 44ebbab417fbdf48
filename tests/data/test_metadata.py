"""Columns that are kept to filter results by: what their values become."""

from __future__ import annotations

import csv
import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.data import open_corpus
from dualenc.data.store.metadata import plain_columns
from dualenc.errors import DualencError
from tests.helpers.make import write_jsonl

ROWS: list[dict[str, Any]] = [
    {
        "id": "a",
        "text": "one",
        "year": 2020,
        "lang": "en",
        "weight": 1.5,
        "open": True,
        "code": "007",
    },
    {"id": "b", "text": "two", "year": None, "lang": "", "weight": 2, "open": False, "code": "1"},
    {"id": "c", "text": "", "year": 1, "lang": "no", "weight": 3.0, "open": True, "code": "2"},
    {
        "id": "d",
        "text": "four",
        "year": 1999,
        "lang": "de",
        "weight": None,
        "open": None,
        "code": None,
    },
]
KEPT = {
    "year": [2020, None, 1999],
    "lang": ["en", None, "de"],
    "weight": [1.5, 2.0, None],
    "open": [True, False, None],
    "code": ["007", "1", None],
}


def written(folder: Path, form: str) -> Path:
    path = folder / f"rows.{form}"
    if form == "jsonl":
        write_jsonl(path, ROWS)
    elif form == "csv":
        with open(path, "w", newline="") as stream:
            writer = csv.DictWriter(stream, ROWS[0])
            writer.writeheader()
            writer.writerows(ROWS)  # truth values as pandas writes them, too: True and False
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_columns_of_every_format_are_what_they_look_like(tmp_path: Path, form: str) -> None:
    corpus = open_corpus(written(tmp_path, form), columns=list(KEPT))
    assert corpus.ids == ["a", "b", "d"], "the row without a text is left out, here as there"
    assert corpus.columns.to_pydict() == KEPT
    kinds = [str(field.type) for field in corpus.columns.schema]
    assert kinds == ["int64", "large_string", "double", "bool", "large_string"]


def test_a_text_of_digits_in_a_typed_table_stays_a_text(tmp_path: Path) -> None:
    day = datetime.date(2020, 1, 2)
    frame = pd.DataFrame(
        {"text": ["x", "y"], "zip": ["10115", "20095"], "day": [day, None], "n": [1.0, np.nan]}
    )
    frame.to_parquet(tmp_path / "rows.parquet")
    corpus = open_corpus(tmp_path / "rows.parquet", columns=["zip", "day", "n"])
    assert corpus.columns.to_pydict() == {
        "zip": ["10115", "20095"],
        "day": ["2020-01-02", None],
        "n": [1.0, None],
    }


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize(("time", "text"), [("00:00:00", ""), ("10:05:00", " 10:05:00")])
def test_times_read_alike_whatever_their_unit(
    tmp_path: Path, unit: str, time: str, text: str
) -> None:
    moments = pa.array(
        [datetime.datetime.fromisoformat(f"2022-02-20 {time}"), None], pa.timestamp(unit)
    )
    pq.write_table(pa.table({"text": ["x", "y"], "day": moments}), tmp_path / "rows.parquet")
    corpus = open_corpus(tmp_path / "rows.parquet", columns=["day"])
    assert corpus.columns["day"].to_pylist() == [f"2022-02-20{text}", None]


def test_columns_of_beir_and_of_vectors(tmp_path: Path) -> None:
    (tmp_path / "beir" / "qrels").mkdir(parents=True)
    write_jsonl(tmp_path / "beir" / "corpus.jsonl", [{"_id": r["id"], **r} for r in ROWS])
    corpus = open_corpus(tmp_path / "beir", columns=["year"])
    assert corpus.columns.to_pydict() == {"year": KEPT["year"]}
    vectors = [{"id": r["id"], "vector": [1.0, i], "year": r["year"]} for i, r in enumerate(ROWS)]
    write_jsonl(tmp_path / "vectors.jsonl", vectors)
    corpus = open_corpus(tmp_path / "vectors.jsonl", modality="vector", columns=["year"])
    assert corpus.columns.to_pydict() == {"year": [2020, None, 1, 1999]}


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["yaer"], r"no column 'yaer' \(did you mean year\?\)"),
        (["year", "YEAR"], "given twice"),
        (["id"], "every result already has a field id"),
        (["a b"], "letters, digits and _"),
        (["tags"], "column 'tags' holds"),
    ],
)
def test_what_cannot_be_kept_is_told(tmp_path: Path, names: list[str], told: str) -> None:
    pq.write_table(
        pa.Table.from_pylist([{"text": "x", "year": 1, "tags": ["a"]}]), tmp_path / "rows.parquet"
    )
    with pytest.raises(DualencError, match=told):
        open_corpus(tmp_path / "rows.parquet", columns=names)


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32()])
def test_numbers_of_less_precision_are_kept_as_their_shortest_decimals(kind: pa.DataType) -> None:
    numbers = np.array(
        [0.1, -0.3, 1e-3, 65504, 2049, np.nan], np.float16 if kind == pa.float16() else np.float32
    )
    whole = [float(number) for number in numbers[3:5]]
    kept = plain_columns(pa.table({"x": pa.array(numbers, kind)})).column("x")
    assert kept.type == pa.float64()
    assert kept.to_pylist() == [0.1, -0.3, 1e-3, *whole, None]


def test_infinite_numbers_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert plain_columns(pa.table({"x": [1.5, np.inf, -np.inf]})).column("x").to_pylist() == [
        1.5,
        None,
        None,
    ]
    assert caplog.messages == ["column 'x': 2 infinite numbers become missing values"]
