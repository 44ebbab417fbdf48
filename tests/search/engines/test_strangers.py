"""Filters of requests: comparisons pass, and what could harm the process is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualenc.errors import DualencError
from dualenc.search.engines import push
from dualenc.search.engines.index import MAX_FILTER_CHARACTERS
from dualenc.search.engines.lance import Lance, check_sql
from dualenc.search.engines.qdrant import Qdrant
from tests.search.engines.test_push import FILTERS, embeddings


@pytest.mark.parametrize(
    "sql",
    [
        "year >= 2020 AND lang = 'en'",
        "lang IN ('en', 'it''s') or not (weight < -1.5)",
        "`year` BETWEEN 2018 AND 2020 AND open IS NOT NULL",
        "lang LIKE '%repeat(%' AND lang != 'a;--' AND open = true",
    ],
)
def test_comparisons_pass(sql: str) -> None:
    check_sql(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "length(repeat(id, 100000000)) > 3",  # aborts the process
        "LENGTH (id) > 3",
        "`length`(id) > 3",
        'lang = "x"(id)',
        "year + 1 > 3",
        "year > 3; drop table items",
        "lang || lang = 'a'",
        "year::text = '1'",
        "lang = 'en",
        "year in (range(1, 1000000000))",
        "lang = 'a' 'b' AND cast(year AS text) = '1'",
    ],
)
def test_what_could_harm_is_refused(sql: str) -> None:
    with pytest.raises(DualencError, match="the filter"):
        check_sql(sql)


def test_each_engine_checks_in_its_own_language(tmp_path: Path) -> None:
    lance = Lance(str(tmp_path / "lance"), "items")
    index, _ = push(embeddings(), lance, recall_queries=0)
    with pytest.raises(DualencError, match="the filter has 24,008 characters"):
        index.check_filter("year = 1" + " OR year = 1" * MAX_FILTER_CHARACTERS)
    lance.check_filter(FILTERS["lancedb"])
    with pytest.raises(DualencError, match="No field named yaer"):
        lance.check_filter("yaer > 1")
    qdrant = Qdrant(str(tmp_path / "qdrant"), "items")
    qdrant.check_filter(FILTERS["qdrant"])
    for text in ("year > 1", '{"must": [{"key": 3}]}', '{"must":[' * 3000, '{"must":[' * 200 + "]}" * 200):
        with pytest.raises(DualencError, match="the filter"):
            qdrant.check_filter(text)
    qdrant.close()
