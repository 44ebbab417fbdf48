"""PostgreSQL with pgvector against numpy and pandas: what is pushed, searched, filtered, resumed
and refused."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import sql
from scipy.stats import binomtest

from dualenc.cli import main
from dualenc.errors import DualencError
from dualenc.search import Embeddings
from dualenc.search.documents import fingerprint, open_documents
from dualenc.search.engines.factory import open_engine, push_embeddings
from dualenc.search.engines.filter_recall import tune_folder, wilson_interval
from dualenc.search.engines.postgres import PostgresIndex
from dualenc.search.where import parse_conditions
from tests.helpers.conditions import KINDS, conditions, met_by_pandas
from tests.helpers.postgres_rows import check_whole, execute
from tests.helpers.pushed import DIM, IDS, NUM, check_results, embeddings, frame, vectors

pytestmark = pytest.mark.slow

FORK = multiprocessing.get_context("fork")
ODD_NAMES = ("it's", '"; DROP TABLE docs; --', "100% %s %(k)s", "日本 😀", "a\\b", "{}")


@pytest.fixture(scope="module")
def filled(postgres: str) -> PostgresIndex:
    return push_embeddings(embeddings(), postgres, "filled", index="none")[0]


@pytest.mark.parametrize("metric", ["cosine", "ip"])
@pytest.mark.parametrize(
    ("dtype", "kind"), [("float16", "hnsw"), ("float32", "ivfflat"), ("float32", "none")]
)
def test_rows_and_results_are_those_of_numpy(
    postgres: str, metric: Any, dtype: str, kind: Any
) -> None:
    source = embeddings(dtype, unit=False)
    table = f"docs {metric} {kind}"
    index, sent = push_embeddings(source, postgres, table, metric=metric, index=kind)
    assert sent == NUM
    check_whole(postgres, table, source)
    np.testing.assert_array_equal(index.vectors(source.ids[::-1]), np.float32(source.vectors)[::-1])
    check_results(index, source, metric)
    index.close()


@settings(max_examples=25)
@given(st.lists(conditions(), min_size=1, max_size=3))
def test_conditions_are_those_of_pandas(filled: PostgresIndex, words: list[str]) -> None:
    met = np.flatnonzero(met_by_pandas(frame(), words))
    hits = filled.search(vectors(1, seed=9), NUM, where=parse_conditions(words, KINDS))[0]
    assert {hit.id for hit in hits} == {IDS[row] for row in met}


def test_a_filter_is_sql(filled: PostgresIndex) -> None:
    rows = frame()
    for filter, met in {
        "year >= 2019 AND lang = 'it''s' -- a comment": (rows.year >= 2019) & (rows.lang == "it's"),
        "lang LIKE '100%' OR lang = 'a\"b'": rows.lang.isin(["100%", 'a"b']),
        "weight IS NULL": rows.weight.isna(),
    }.items():
        expected = {IDS[number] for number in np.flatnonzero(met)}
        assert {hit.id for hit in filled.search(vectors(1), NUM, filter=filter)[0]} == expected
        assert expected


@pytest.mark.parametrize(
    ("filter", "message"),
    [
        ("year >", "syntax error"),
        ("true) OR (true", "syntax error"),
        ("true; DROP TABLE filled", "multiple commands"),
        ("true) UNION SELECT 0, '', '' FROM filled WHERE (true", "syntax error"),
        ("true /*", "unterminated"),
        ("writes()", "read-only transaction"),
    ],
)
def test_a_filter_is_one_expression_that_only_reads(
    filled: PostgresIndex, filter: str, message: str
) -> None:
    body = "DELETE FROM filled; SELECT true"
    target = filled.database.target
    execute(target, f"CREATE OR REPLACE FUNCTION writes() RETURNS boolean LANGUAGE sql AS '{body}'")
    with pytest.raises(DualencError, match=message) as error:
        filled.search(vectors(1), 3, filter=filter)
    assert "\n" not in str(error.value)
    assert execute(target, "SELECT count(*) FROM filled") == [(NUM,)]


def test_names_and_ids_are_quoted(postgres: str) -> None:
    for table in ("it's", '"""; DROP TABLE docs; --"', "日本 {} 😀"):
        columns = pa.table({"select": list(range(len(ODD_NAMES))), "Order": list(ODD_NAMES)})
        snippets = [f"{name}\0" for name in ODD_NAMES]
        source = Embeddings(ODD_NAMES, vectors(len(ODD_NAMES)), None, snippets, columns)
        index, sent = push_embeddings(source, postgres, table)
        assert sent == len(ODD_NAMES)
        for number, hits in enumerate(index.search(vectors(len(ODD_NAMES)), k=1)):
            assert hits[0].id == hits[0].columns["Order"] == ODD_NAMES[number]
            assert hits[0].snippet == f"{ODD_NAMES[number]}\ufffd"
        one = index.search(
            vectors(1),
            9,
            where=parse_conditions(['Order="""; DROP TABLE docs; --"'], index.column_kinds),
        )
        assert [hit.id for hit in one[0]] == [ODD_NAMES[1]]
        assert push_embeddings(source, postgres, table)[1] == 0
        index.close()


def killed_push(target: str, table: str, function: str, call: int) -> None:
    """Push in batches of 12, and die at a call of a function."""
    original = getattr(PostgresIndex, function)
    calls = []

    def dying(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), 9)
        return original(*arguments)

    setattr(PostgresIndex, function, dying)
    PostgresIndex.batch_rows = 12
    push_embeddings(embeddings(), target, table)


POINTS = [
    ("create", 1, 0),
    ("add", 1, 0),
    ("add", 4, 36),
    ("_write_state", 4, 24),
    ("finish", 1, 120),
]
POINTS += [("_write_state", 12, 120)]
LATER: list[Any] = [
    pytest.param("add", call, 12 * call - 12, marks=pytest.mark.nightly) for call in (2, 3, 5, 7, 9)
]


@pytest.mark.parametrize(("function", "call", "stored"), POINTS + LATER)
def test_a_killed_push_resumes_without_loss_or_copies(
    postgres: str, function: str, call: int, stored: int
) -> None:
    table = f"killed {function} {call}"
    child = FORK.Process(target=killed_push, args=(postgres, table, function, call))
    child.start()
    child.join()
    assert child.exitcode == -9
    index, sent = push_embeddings(embeddings(), postgres, table)
    assert sent == NUM - stored
    check_whole(postgres, table, embeddings())
    assert [hits[0].id for hits in index.search(vectors(), k=1)] == IDS
    assert push_embeddings(embeddings(), postgres, table)[1] == 0


def push_in_small_batches(target: str, results: Any) -> None:
    PostgresIndex.batch_rows = 5
    results.put(push_embeddings(embeddings(), target, "shared")[1])


def test_pushes_at_the_same_time_share_the_rows(postgres: str) -> None:
    results = FORK.Queue()
    children = [
        FORK.Process(target=push_in_small_batches, args=(postgres, results)) for _ in range(3)
    ]
    for child in children:
        child.start()
    assert sum(results.get(timeout=60) for _ in children) == NUM
    for child in children:
        child.join()
    check_whole(postgres, "shared", embeddings())
    indexes = execute(
        postgres,
        "SELECT count(*) FROM pg_indexes WHERE tablename = 'shared' AND indexdef LIKE '%hnsw%'",
    )
    assert indexes == [(1,)]


FULL_DISK = """
CREATE OR REPLACE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql
AS $$ BEGIN IF NEW.id LIKE 'id 30 %' THEN RAISE disk_full; END IF; RETURN NEW; END $$;
CREATE TRIGGER full_disk BEFORE INSERT ON {table} FOR EACH ROW EXECUTE FUNCTION full_disk();
"""
"""Fails within the third batch, as the server does whose disk is full; rolled back with it."""


@pytest.mark.parametrize("failure", ["lost", "full_disk"])
def test_a_failing_server_is_one_line_and_loses_nothing(
    postgres: str, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    add = PostgresIndex.add
    calls = []

    def failing(index: PostgresIndex, *batch: Any) -> None:
        calls.append(1)
        if len(calls) == 3 and failure == "full_disk":
            index.database.connection.execute(
                sql.SQL(FULL_DISK).format(table=index.filled_table.sql)
            )
        elif len(calls) == 3:
            execute(
                postgres,
                "SELECT pg_terminate_backend(%s)",
                index.database.connection.info.backend_pid,
            )
        add(index, *batch)

    monkeypatch.setattr(PostgresIndex, "add", failing)
    monkeypatch.setattr(PostgresIndex, "batch_rows", 12)
    with pytest.raises(DualencError, match="the same command again resumes") as error:
        push_embeddings(embeddings(), postgres, failure)
    assert "\n" not in str(error.value)
    index, sent = push_embeddings(embeddings(), postgres, failure)
    assert sent == NUM - 24
    check_whole(postgres, failure, embeddings())
    # A search connects again.
    execute(postgres, "SELECT pg_terminate_backend(%s)", index.database.connection.info.backend_pid)
    assert [hits[0].id for hits in index.search(vectors(), k=1)] == IDS


def test_tables_of_others_are_refused_and_own_ones_replaced_on_request(postgres: str) -> None:
    push_embeddings(embeddings(), postgres, "mine")
    longer = Embeddings(["a"], np.ones((1, DIM + 1), np.float32))
    for source, options in (
        (embeddings(seed=1), {}),
        (embeddings(), {"metric": "ip"}),
        (longer, {}),
    ):
        with pytest.raises(
            DualencError,
            match="holds other embeddings, or with another metric; push with --replace",
        ):
            push_embeddings(source, postgres, "mine", **options)
    check_whole(postgres, "mine", embeddings())
    assert push_embeddings(embeddings(seed=1), postgres, "mine", replace=True)[1] == NUM
    check_whole(postgres, "mine", embeddings(seed=1))
    push_embeddings(embeddings(seed=1), postgres, "mine", index="ivfflat")
    kinds = execute(
        postgres,
        "SELECT indexdef FROM pg_indexes WHERE tablename = 'mine' AND indexdef LIKE '%embedding%'",
    )
    assert "ivfflat" in kinds[0][0]
    assert len(kinds) == 1
    execute(postgres, "CREATE TABLE theirs (id text)")
    execute(postgres, "COMMENT ON TABLE theirs IS 'dualenc {}'")
    with pytest.raises(DualencError, match="was not made by `dualenc push`"):
        push_embeddings(embeddings(), postgres, "theirs", replace=True)
    assert execute(postgres, "SELECT count(*) FROM theirs") == [(0,)]


@pytest.mark.parametrize(
    ("dim", "dtype", "kind"), [(2001, "float32", "hnsw"), (4001, "float16", "none")]
)
def test_long_vectors(postgres: str, dim: int, dtype: str, kind: Any) -> None:
    stored = np.random.default_rng(0).normal(size=(6, dim)).astype(dtype)
    source = Embeddings(list("abcdef"), stored)
    index = push_embeddings(source, postgres, f"long {dim}", index=kind)[0]
    assert [hits[0].id for hits in index.search(stored, k=1)] == source.ids
    np.testing.assert_array_equal(index.vectors(source.ids), stored.astype(np.float32))
    if kind == "none":
        with pytest.raises(DualencError, match="indexes up to 4000 dimensions"):
            push_embeddings(source, postgres, f"long {dim}")


def test_the_folder_holds_no_password_and_is_opened_as_documents(
    tmp_path: Path, postgres: str
) -> None:
    push_embeddings(embeddings("float16"), postgres, "kept")
    secret = postgres.replace("me@", "me:s3cret@") + "?sslpassword=s3cret2&application_name=mine"
    index, sent = push_embeddings(embeddings("float16"), secret, "kept")
    assert sent == 0
    index.save(tmp_path / "engine")
    text = (tmp_path / "engine" / "meta.json").read_text()
    assert "s3cret" not in text
    assert "application_name=mine" in text
    assert len(open_engine(tmp_path / "engine").search(vectors(1), 4)[0]) == 4
    documents = open_documents(tmp_path / "engine", tmp_path / "work")
    assert documents.ids == sorted(IDS)
    rows = [int(name.split()[1]) for name in documents.ids]
    np.testing.assert_allclose(documents.vectors, vectors()[rows], atol=1e-3)
    assert documents.snippets == [f"snippet {row}" for row in rows]
    before = fingerprint(tmp_path / "engine")
    execute(postgres, "DELETE FROM kept WHERE id LIKE 'id 7%'")
    with pytest.raises(DualencError, match="holds 109 of 120 vectors"):
        open_documents(tmp_path / "engine", tmp_path / "work")
    assert fingerprint(tmp_path / "engine") == before
    execute(postgres, "DROP TABLE kept")
    with pytest.raises(DualencError, match="is gone"):
        open_engine(tmp_path / "engine")
    for target in (
        "postgresql://me:s3cret@127.0.0.1:9/db",
        "postgresql://me:s3cret@[/db",
        "postgresql://a?s3cret",
    ):
        with pytest.raises(DualencError) as error:
            push_embeddings(embeddings(), target, "docs")
        assert not any(part in str(error.value) for part in ("\n", "s3cret"))


def test_recall_under_filters_holds_and_a_regression_is_noticed(
    tmp_path: Path, postgres: str, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    count = 4000
    stored = random.normal(size=(count, 32)).astype(np.float16)
    shares = random.random(count)
    source = Embeddings(
        [str(row) for row in range(count)], stored, None, None, pa.table({"share": shares})
    )
    index = push_embeddings(source, postgres, "filtered", metric="cosine")[0]
    filters = ["", "share < 0.2", "share < 0.05"]
    queries = random.normal(size=(240, 32)).astype(np.float32)
    index.record(settings={"ef_search": 1, "iterative_scan": "off"})
    index.save(tmp_path)
    measured = tune_folder(tmp_path, index, queries, filters, 0.9)
    unit = np.float64(stored) / np.linalg.norm(np.float64(stored), axis=1, keepdims=True)
    recalls = []
    for number, filter in enumerate(filters):
        rows = np.flatnonzero(shares < (float(filter[8:]) if filter else 1))
        for query in queries[1::2][number::3]:
            best = {str(row) for row in rows[np.argsort(-(unit[rows] @ query))[:10]]}
            recalls.append(
                len(best & {hit.id for hit in index.search(query, 10, filter=filter)[0]}) / 10
            )
    assert measured.recall == pytest.approx(np.mean(recalls), abs=0.003)
    assert measured.low >= 0.9
    assert [result["rows"] for result in measured.filters] == [10, 10, 10]
    assert main(["evaluate", "engine", str(tmp_path)]) == 0
    assert main(["evaluate", "engine", str(tmp_path), "--recall", "0.999"]) == 1
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta["settings"]["iterative_scan"] = "off"
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    capsys.readouterr()
    assert main(["evaluate", "engine", str(tmp_path)]) == 1
    assert "below 0.9" in capsys.readouterr().err


def test_the_interval_is_wilsons() -> None:
    for hits, count in ((0, 20), (19, 20), (500, 500), (480, 500)):
        interval = binomtest(hits, count).proportion_ci(0.95, method="wilson")
        assert wilson_interval(hits / count, count) == pytest.approx(
            (interval.low, interval.high), abs=1e-6
        )
