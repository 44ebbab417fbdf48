"""A table of PostgreSQL gets another model's vectors: values by SQL, refusals, and rollbacks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualenc.errors import DualencError
from dualenc.search.engines.postgres_version import hnsw_problem
from dualenc.workflows.migrate_table import (
    TableColumnNames,
    finish_table,
    migrate_table,
    roll_back_table,
)
from tests.helpers.migrated_table import OLD_DIM, check_vectors, embedded, make_table
from tests.helpers.postgres_rows import execute

pytestmark = pytest.mark.slow


def migrate(target: str, table: str, model: Path, **options: Any) -> Any:
    return migrate_table(target, table, str(model), progress=False, device="cpu", **options)


def columns_of(target: str, table: str) -> dict[str, str]:
    query = """
        SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
        WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped
    """
    return dict(execute(target, query, f'"{table}"'))


def indexes(target: str, table: str) -> dict[str, str]:
    query = "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = %s"
    return dict(execute(target, query, table))


@pytest.mark.parametrize(
    ("kind", "index", "options"),
    [
        ("vector", "hnsw", "WITH (m = 8, ef_construction = 32)"),
        ("halfvec", "hnsw", "WHERE year > 2001"),
        ("halfvec", "ivfflat", "WITH (lists = 3)"),
        ("vector", "", ""),
    ],
)
def test_rows_and_index_are_those_of_sql(
    postgres: str, toy_text: Path, kind: str, index: str, options: str
) -> None:
    name = f"Docs {kind} {index}"
    texts = make_table(postgres, name, kind=kind, index=index, options=options)
    before = indexes(postgres, name)
    report = migrate(postgres, f'"{name}"', toy_text)
    assert (report.state, report.missing) == ("switched", 0)
    assert columns_of(postgres, name)["embedding"] == f"{kind}(32)"
    assert columns_of(postgres, name)["embedding_old"] == f"{kind}({OLD_DIM})"
    check_vectors(postgres, name, toy_text)
    if index:
        # The same statement, over the column that has the old name now.
        assert indexes(postgres, name)[f"{name}_vectors"] == before[f"{name}_vectors"]
    query = embedded(toy_text, texts[7:8])[0]
    nearest = f'SELECT id FROM "{name}" ORDER BY embedding <=> %s::{kind} LIMIT 1'
    assert execute(postgres, nearest, str(query.tolist())) == [(7,)]
    assert migrate(postgres, f'"{name}"', toy_text).state == "switched"
    assert finish_table(postgres, f'"{name}"').state == "finished"
    assert columns_of(postgres, name).keys() == {"id", "body", "year", "embedding"}
    assert len(indexes(postgres, name)) == len(before)
    model = "SELECT model, state FROM dualenc_migrations WHERE table_name = %s"
    assert execute(postgres, model, name) == [(str(toy_text), "finished")]
    with pytest.raises(DualencError, match="the old vectors are gone"):
        roll_back_table(postgres, f'"{name}"')
