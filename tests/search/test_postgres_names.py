"""Names of tables and WHERE clauses, without a server."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("psycopg")

from dualenc.search.engines.postgres_names import parse_name, written_name
from dualenc.search.engines.postgres_settings import default_settings, ladder

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(st.none() | NAMES, NAMES)
def test_a_written_name_is_read_back(schema: str | None, table: str) -> None:
    names = {"collection": table} | ({"schema": schema} if schema else {})
    assert parse_name(written_name(schema or "", table)) == names


@pytest.mark.parametrize("kind", ["hnsw", "ivfflat"])
def test_each_step_of_the_ladder_compares_more_and_sets_the_same(kind: str) -> None:
    default = default_settings(kind, 9_000)  # type: ignore[arg-type]
    steps = list(ladder(kind, default))  # type: ignore[arg-type]
    assert all(step.keys() == default.keys() for step in steps)
    first = "ef_search" if kind == "hnsw" else "probes"
    assert (np.diff([step[first] for step in steps]) > 0).all()
