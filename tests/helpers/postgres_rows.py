"""What is in a PostgreSQL table, read without the package."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import psycopg

from dualenc.search import Embeddings
from tests.helpers.conditions import KINDS


def execute(target: str, statement: str, *values: Any) -> list[Any]:
    """The rows that a statement gives."""
    with psycopg.connect(target, autocommit=True) as connection:
        cursor = connection.execute(statement, values or None)  # type: ignore[call-overload]
        return cursor.fetchall() if cursor.description else []


def check_whole(target: str, table: str, source: Embeddings) -> None:
    """Each row is there once, as pgvector's own text shows its vector."""
    rows = execute(
        target, f'SELECT id, embedding::text, text, year, weight, lang, open FROM "{table}"'
    )
    assert len(rows) == len(source)
    columns = [source.columns.column(name).to_pylist() for name in KINDS]  # type: ignore[union-attr]
    stored = {row[0]: row[1:] for row in rows}
    for number, name in enumerate(source.ids):
        vector, text, *values = stored[name]
        np.testing.assert_array_equal(
            np.array(json.loads(vector), source.vectors.dtype), source.vectors[number]
        )
        assert text == f"snippet {number}"
        assert values == [column[number] for column in columns]
