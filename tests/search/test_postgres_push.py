"""Pushes to PostgreSQL: what is really there, names and URLs as others write them, readers while a
push replaces."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dualenc.errors import DualencError
from dualenc.search import Embeddings
from dualenc.search.documents import open_documents
from dualenc.search.engines.engine import read_pushed
from dualenc.search.engines.factory import open_engine, push_embeddings
from dualenc.search.engines.postgres import PostgresIndex
from dualenc.search.engines.postgres_url import libpq_url, without_secrets
from dualenc.search.where import parse_conditions
from tests.helpers.postgres_rows import check_whole, execute
from tests.helpers.pushed import DIM, IDS, NUM, embeddings, vectors

pytestmark = pytest.mark.slow

FORK = multiprocessing.get_context("fork")


def vector_indexes(target: str, table: str) -> list[str]:
    query = "SELECT indexdef FROM pg_indexes WHERE tablename = %s AND indexdef ~ 'hnsw|ivfflat'"
    return [definition for (definition,) in execute(target, query, table)]


def tables(target: str, beginning: str) -> list[str]:
    query = "SELECT tablename FROM pg_tables WHERE starts_with(tablename, %s) ORDER BY 1"
    return [name for (name,) in execute(target, query, beginning)]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("kind", ["hnsw", "ivfflat"])
@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ("DELETE FROM gone WHERE id LIKE 'id 7%%'", 11),
        ("TRUNCATE gone", NUM),
        ("DROP INDEX gone_vectors", 0),
    ],
)
def test_a_push_sends_what_is_not_there(
    postgres: str, change: str, missing: int, kind: Any, replace: bool
) -> None:
    execute(postgres, "DROP TABLE IF EXISTS gone")
    push_embeddings(embeddings(), postgres, "gone", index=kind)
    name = execute(
        postgres,
        "SELECT indexname FROM pg_indexes WHERE indexdef ~ 'hnsw|ivfflat' AND tablename = 'gone'",
    )
    execute(postgres, f'ALTER INDEX "{name[0][0]}" RENAME TO gone_vectors')
    execute(postgres, change.replace("%%", "%"))
    index, sent = push_embeddings(embeddings(), postgres, "gone", index=kind, replace=replace)
    assert sent == missing
    check_whole(postgres, "gone", embeddings())
    assert len(vector_indexes(postgres, "gone")) == 1
    assert [hits[0].id for hits in index.search(vectors(), k=1, exact=True)] == IDS
    assert push_embeddings(embeddings(), postgres, "gone", index=kind)[1] == 0
    index.close()


def test_rows_of_others_are_said_and_removed_on_request(
    tmp_path: Path, postgres: str, caplog: pytest.LogCaptureFixture
) -> None:
    push_embeddings(embeddings(), postgres, "more")[0].save(tmp_path)
    execute(
        postgres,
        "ALTER TABLE more ALTER embedding DROP NOT NULL; INSERT INTO more (id) VALUES ('theirs')",
    )
    execute(postgres, "DELETE FROM more WHERE id = %s", IDS[3])
    index = open_engine(tmp_path)
    assert len(index.search(vectors(1), NUM)[0]) == NUM - 1
    with pytest.raises(DualencError, match="no vector of 'theirs' is stored any more"):
        index.vectors(["theirs"])
    assert push_embeddings(embeddings(), postgres, "more")[1] == 1
    assert "has rows that are not from these embeddings: 1; --replace removes them" in caplog.text
    # A row without a vector is not found, and no document.
    assert len(open_documents(tmp_path, tmp_path / "work")) == NUM
    execute(
        postgres, "UPDATE more SET embedding = %s WHERE id = 'theirs'", str(vectors(1)[0].tolist())
    )
    with pytest.raises(
        DualencError, match=r"holds 121 vectors, and 120 were pushed; run .* with --replace"
    ):
        open_documents(tmp_path, tmp_path / "work")
    assert push_embeddings(embeddings(), postgres, "more", replace=True)[1] == 0
    check_whole(postgres, "more", embeddings())


def test_a_dot_divides_schema_and_table_and_quotes_keep_it(tmp_path: Path, postgres: str) -> None:
    execute(postgres, "CREATE SCHEMA lib")
    for name, place in {
        "lib.papers": ("lib", "papers"),
        '"lib.papers"': ("public", "lib.papers"),
        'lib."a.""b"""': ("lib", 'a."b"'),
        "lib.Papers": ("lib", "Papers"),
    }.items():
        index = push_embeddings(embeddings(), postgres, name)[0]
        query = "SELECT count(*) FROM pg_tables WHERE (schemaname, tablename) = (%s, %s)"
        assert execute(postgres, query, *place) == [(1,)]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        index.save(folder)
        assert open_engine(folder).search(vectors(1), 1)[0][0].id == IDS[0]
        assert repr(name) in index.location
        assert push_embeddings(embeddings(), postgres, name)[1] == 0
    for name, message in {
        "nowhere.papers": (
            "schema 'nowhere' does not exist; create it, or write --table '\"nowhere.papers\"'"
        ),
        "db.lib.papers": "write TABLE or SCHEMA.TABLE",
        '"papers': "write TABLE or SCHEMA.TABLE",
        "lib.": "write TABLE or SCHEMA.TABLE",
    }.items():
        with pytest.raises(DualencError) as error:
            push_embeddings(embeddings(), postgres, name)
        assert message in str(error.value)


def test_a_table_in_a_later_schema_of_the_search_path_is_found(postgres: str) -> None:
    push_embeddings(embeddings(), postgres, "later")
    execute(postgres, "CREATE SCHEMA earlier")
    path = f"{postgres}?options=-csearch_path%3Dearlier,public"
    assert push_embeddings(embeddings(), path, "later")[1] == 0
    push_embeddings(embeddings(), path, "first")
    query = "SELECT schemaname FROM pg_tables WHERE tablename = 'first'"
    assert execute(postgres, query) == [("earlier",)]
    with pytest.raises(
        DualencError, match=r"no schema of the search path exists; write SCHEMA\.docs"
    ):
        push_embeddings(embeddings(), f"{postgres}?options=-csearch_path%3Dnone", "docs")


@pytest.mark.parametrize(("dim", "kind"), [(DIM, "hnsw"), (2001, "ivfflat")])
def test_the_extension_may_be_in_any_schema(postgres: str, dim: int, kind: Any) -> None:
    database = f"elsewhere_{dim}"
    execute(postgres, f"CREATE DATABASE {database}")
    target = f"{postgres.rpartition('/')[0]}/{database}"
    execute(target, "CREATE SCHEMA ext")
    execute(target, "CREATE EXTENSION vector SCHEMA ext")
    stored = np.random.default_rng(0).normal(size=(8, dim)).astype(np.float32)
    source = Embeddings(list("abcdefgh"), stored, None, None, pa.table({"year": list(range(8))}))
    index = push_embeddings(source, target, "docs", index=kind)[0]
    assert [hits[0].id for hits in index.search(stored, k=1)] == source.ids
    np.testing.assert_array_equal(index.vectors(source.ids), stored)
    hits = index.search(
        stored[:1],
        9,
        filter="year > 5",
        where=parse_conditions(["year!=6"], index.column_kinds),
    )[0]
    assert [hit.id for hit in hits] == ["h"]
    # pgvector is loaded: it refuses a setting that it does not know.
    index.record(settings={"nonsense": 1})
    with pytest.raises(DualencError, match="nonsense"):
        index.search(stored[:1], 1)
    index.close()


def test_what_never_resumes_is_not_said_to(postgres: str) -> None:
    source = Embeddings(["a", "b\0\x1b"], np.eye(2, dtype=np.float32))
    with pytest.raises(
        DualencError, match=r"id 'b\\x00\\x1b' has a NUL, which PostgreSQL cannot store; rename it"
    ):
        push_embeddings(source, postgres, "nul")
    assert tables(postgres, "nul") == []
    source = Embeddings(
        ["".join(map(chr, np.random.default_rng(0).integers(200, 50000, 3000)))], np.eye(1)
    )
    with pytest.raises(DualencError, match="index row requires") as error:
        push_embeddings(source, postgres, "long id")
    assert "resumes" not in str(error.value)
    push_embeddings(embeddings(), postgres, "altered")
    execute(postgres, "ALTER TABLE altered DROP COLUMN text; DELETE FROM altered")
    with pytest.raises(DualencError, match='column "text"') as error:
        push_embeddings(embeddings(), postgres, "altered")
    assert "resumes" not in str(error.value)


@pytest.mark.parametrize(
    "scheme",
    ["postgresql", "postgres", "postgresql+psycopg", "postgresql+psycopg2", "postgresql+asyncpg"],
)
def test_urls_of_sqlalchemy_and_django(postgres: str, tmp_path: Path, scheme: str) -> None:
    target = postgres.replace("postgresql", scheme).replace("me@", "me:p@s:s@")
    index = push_embeddings(embeddings(), target, "urls")[0]
    shown = postgres.replace("postgresql", scheme)
    assert index.provenance.target == shown
    assert index.location == f"{shown} 'urls'"
    index.save(tmp_path)
    assert open_engine(tmp_path).search(vectors(1), 1)[0][0].id == IDS[0]


@pytest.mark.parametrize(
    ("typed", "read", "shown"),
    [
        ("postgresql://me:p@ss@h:5/db", "postgresql://me:p%40ss@h:5/db", "postgresql://me@h:5/db"),
        (
            "postgresql://me@srv:pw@h/db",
            "postgresql://me%40srv:pw@h/db",
            "postgresql://me%40srv@h/db",
        ),
        (
            "postgres://me:@[::1]:5,b:6/db",
            "postgresql://me:@[::1]:5,b:6/db",
            "postgres://me@[::1]:5,b:6/db",
        ),
        (
            "postgresql://:pw@/db?host=%2Ftmp&password=x&sslpassword=y&sslmode=disable",
            "postgresql://:pw@/db?host=%2Ftmp&password=x&sslpassword=y&sslmode=disable",
            "postgresql:///db?host=%2Ftmp&sslmode=disable",
        ),
        (
            "postgresql://?user=me&dbname=db",
            "postgresql://?user=me&dbname=db",
            "postgresql://?user=me&dbname=db",
        ),
    ],
)
def test_urls_as_libpq_reads_them_and_without_secrets(typed: str, read: str, shown: str) -> None:
    assert libpq_url(typed) == read
    assert without_secrets(typed) == shown


@pytest.mark.parametrize(
    "target",
    [
        "postgresql://me:s3cret/s3cret@host/db",
        "postgresql://me:12/s3cret@host/db",
        "postgresql://me:s3cret?s3cret@host/db",
        "postgresql://me:12?s3cret=s3cret@host/db",
        "postgresql://me:s3cret%zz@host/db",
        "postgresql://me:s3c@s3cret@127.0.0.1:9/db",
        "postgresql://me:s3c#s3cret@127.0.0.1:9/db",
    ],
)
def test_no_part_of_a_password_is_shown(target: str) -> None:
    with pytest.raises(DualencError) as error:
        push_embeddings(embeddings(), target, "docs")
    assert not any(part in str(error.value) for part in ("\n", "s3c"))


def test_parameters_of_other_drivers_are_named() -> None:
    with pytest.raises(
        DualencError, match=r"PostgreSQL does not know: conn_max_age, ssl_require; leave them out"
    ):
        push_embeddings(
            embeddings(),
            "postgres://me@h/db?conn_max_age=600&ssl_require=1&sslmode=require",
            "docs",
        )


def test_a_reader_stops_when_other_vectors_are_in_place(tmp_path: Path, postgres: str) -> None:
    writer = push_embeddings(embeddings(), postgres, "swapped")[0]
    writer.save(tmp_path / "engine")
    reader = open_engine(tmp_path / "engine")
    new = push_embeddings(embeddings(seed=1), postgres, "swapped", replace=True)[0]
    for stale in (reader, writer):
        for read in (
            lambda stale=stale: stale.search(vectors(1), 3),
            lambda stale=stale: stale.search(vectors(1), 3, filter="true", exact=True),
            lambda stale=stale: stale.vectors(IDS[:1]),
            lambda stale=stale: stale.texts_by_id(),
        ):
            with pytest.raises(
                DualencError, match="were replaced or removed since it was opened; open it again"
            ):
                read()
    assert new.search(vectors(1, seed=1), 1)[0][0].id == IDS[0]
    execute(postgres, "DROP TABLE swapped")
    with pytest.raises(DualencError, match="were replaced or removed since it was opened"):
        new.search(vectors(1), 1)


def read_all_the_time(folder: Path, opened: Any, done: Any, results: Any) -> None:
    """Open and search until it is over; what is found must be whole, and of one of two models."""
    expected = {seed: vectors(seed=seed) for seed in (0, 1)}
    counts = {"refused": 0, "wrong": 0, "stopped": 0}
    while not done.is_set():
        try:
            engine = open_engine(folder)
        except DualencError:
            counts["refused"] += 1
            continue
        opened.value += 1
        try:
            for _ in range(3):
                hits = engine.search(vectors(1, seed=3), NUM, exact=True)[0]
                scores = {hit.id: hit.score for hit in hits}
                query = vectors(1, seed=3)[0]
                right = [
                    len(hits) == NUM
                    and np.allclose([scores[name] for name in IDS], stored @ query, atol=1e-5)
                    for stored in expected.values()
                ]
                counts["wrong"] += not any(right)
        except DualencError as error:
            counts["stopped" if "since it was opened" in str(error) else "wrong"] += 1
        engine.close()
    results.put(counts)


def test_readers_always_find_the_old_or_the_new_embeddings(tmp_path: Path, postgres: str) -> None:
    push_embeddings(embeddings(), postgres, "busy")[0].save(tmp_path)
    opened, done, results = FORK.Value("i", 0), FORK.Event(), FORK.Queue()
    reader = FORK.Process(target=read_all_the_time, args=(tmp_path, opened, done, results))
    reader.start()
    turn = 0
    while reader.is_alive() and (turn < 8 or opened.value < 9):
        turn += 1
        index = push_embeddings(embeddings(seed=turn % 2), postgres, "busy", replace=True)[0]
        index.save(tmp_path)
        index.close()
        time.sleep(0.02)
    done.set()
    counts = results.get(timeout=60)
    reader.join()
    assert (counts["refused"], counts["wrong"]) == (0, 0)
    assert tables(postgres, "busy") == ["busy"]


def replace_and_die(target: str, function: str, call: int) -> None:
    original = getattr(PostgresIndex, function)
    calls: list[int] = []

    def dying(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), 9)
        return original(*arguments)

    setattr(PostgresIndex, function, dying)
    PostgresIndex.batch_rows = 12
    push_embeddings(embeddings(seed=1), target, f"replaced {function} {call}", replace=True)


@pytest.mark.parametrize(
    ("function", "call", "stored"),
    [
        ("create", 1, 0),
        ("add", 4, 36),
        ("finish", 1, NUM),
        ("swap", 1, NUM),
        ("_write_state", 12, NUM),
    ],
)
def test_a_killed_replacement_leaves_the_old_table_and_resumes(
    tmp_path: Path, postgres: str, function: str, call: int, stored: int
) -> None:
    name = f"replaced {function} {call}"
    push_embeddings(embeddings(), postgres, name)[0].save(tmp_path)
    child = FORK.Process(target=replace_and_die, args=(postgres, function, call))
    child.start()
    child.join()
    assert child.exitcode == -9
    assert [hits[0].id for hits in open_engine(tmp_path).search(vectors(), k=1)] == IDS
    check_whole(postgres, name, embeddings())
    with pytest.raises(DualencError, match="push with --replace"):
        push_embeddings(embeddings(seed=1), postgres, name)
    index, sent = push_embeddings(embeddings(seed=1), postgres, name, replace=True)
    assert sent == NUM - stored
    check_whole(postgres, name, embeddings(seed=1))
    assert [hits[0].id for hits in index.search(vectors(seed=1), k=1)] == IDS
    assert tables(postgres, name) == [name]


def test_what_an_abandoned_replacement_has_left_is_removed_by_the_next(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_embeddings(embeddings(), postgres, "left")
    push_embeddings(embeddings(), postgres, "left-over")

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PostgresIndex, "finish", fail)
        push_embeddings(embeddings(seed=1), postgres, "left", replace=True)
    assert len(tables(postgres, "left")) == 3
    push_embeddings(embeddings(seed=2), postgres, "left", replace=True)
    assert tables(postgres, "left") == ["left", "left-over"]


def test_the_loser_of_two_replacements_says_so(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_embeddings(embeddings(), postgres, "contested")
    exclusive = PostgresIndex.exclusive
    calls: list[int] = []

    def raced(index: PostgresIndex) -> Any:
        calls.append(1)
        if len(calls) == 3:
            push_embeddings(embeddings(seed=2), postgres, "contested", replace=True)[0].close()
        return exclusive(index)

    monkeypatch.setattr(PostgresIndex, "batch_rows", 50)
    monkeypatch.setattr(PostgresIndex, "exclusive", raced)
    with pytest.raises(
        DualencError, match="another process has removed or replaced it; run `dualenc push` again"
    ):
        push_embeddings(embeddings(seed=1), postgres, "contested", replace=True)
    check_whole(postgres, "contested", embeddings(seed=2))
    assert tables(postgres, "contested") == ["contested"]


def replace_often(target: str, seed: int, results: Any) -> None:
    PostgresIndex.batch_rows = 30
    said = []
    for _ in range(6):
        try:
            push_embeddings(embeddings(seed=seed), target, "fought over", replace=True)[0].close()
        except DualencError as error:
            said.append(str(error))
    results.put(said)


def test_replacements_at_the_same_time_end_whole(postgres: str) -> None:
    push_embeddings(embeddings(), postgres, "fought over")
    results = FORK.Queue()
    children = [
        FORK.Process(target=replace_often, args=(postgres, seed, results)) for seed in (1, 2)
    ]
    for child in children:
        child.start()
    said = [line for _ in children for line in results.get(timeout=60)]
    for child in children:
        child.join()
    assert all("another process has removed or replaced it" in line for line in said), said
    push_embeddings(embeddings(seed=1), postgres, "fought over", replace=True)
    check_whole(postgres, "fought over", embeddings(seed=1))
    assert tables(postgres, "fought over") == ["fought over"]


def test_readers_keep_their_rights_and_lost_indexes_are_named(
    tmp_path: Path, postgres: str, caplog: pytest.LogCaptureFixture
) -> None:
    push_embeddings(embeddings(), postgres, "granted")
    execute(
        postgres,
        'CREATE ROLE "Reader" LOGIN; GRANT SELECT ON granted TO "Reader"; '
        "CREATE INDEX years ON granted (year)",
    )
    with caplog.at_level(logging.WARNING):
        index = push_embeddings(embeddings(seed=1), postgres, "granted", replace=True)[0]
    assert (
        "the indexes on columns of the replaced table are gone: years; create them again"
        in caplog.text
    )
    index.save(tmp_path)
    path = tmp_path / "meta.json"
    path.write_text(path.read_text().replace("//me@", "//Reader@"))
    assert open_engine(tmp_path).search(vectors(1, seed=1), 1)[0][0].id == IDS[0]
    execute(postgres, "CREATE VIEW over_granted AS SELECT id FROM granted")
    with pytest.raises(DualencError, match="other objects depend on it"):
        push_embeddings(embeddings(), postgres, "granted", replace=True)
    assert tables(postgres, "granted") == ["granted"]


def test_tables_and_folders_of_an_earlier_version(tmp_path: Path, postgres: str) -> None:
    """A name with a dot was literal, the comment had three entries, and an unfinished table had the
    name itself."""
    index = push_embeddings(embeddings(), postgres, '"old.docs"')[0]
    state = {"fingerprint": index.items_checksum, "rows": NUM, "index": "hnsw"}
    execute(postgres, f"COMMENT ON TABLE \"old.docs\" IS 'dualenc {json.dumps(state)}'")
    host, database = postgres.split("@")[1].split("/")
    old_target = f"postgresql://?user=me&host={host}&dbname={database}"
    index.record(settings={**index.provenance.settings, "ef_search": 77})
    index.save(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    assert "schema" not in meta
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"target": old_target}))
    assert open_engine(tmp_path).search(vectors(1), 1)[0][0].id == IDS[0]
    again, sent = push_embeddings(embeddings(), postgres, '"old.docs"')
    assert sent == 0
    assert again.is_remembered(read_pushed(tmp_path))
    state |= {"rows": 12, "index": None}
    execute(postgres, f"COMMENT ON TABLE \"old.docs\" IS 'dualenc {json.dumps(state)}'")
    execute(postgres, "DELETE FROM \"old.docs\" WHERE id > 'id 5'")
    with pytest.raises(DualencError, match="its push was not finished"):
        open_engine(tmp_path)
    push_embeddings(embeddings(), postgres, '"old.docs"')
    check_whole(postgres, "old.docs", embeddings())
    assert len(vector_indexes(postgres, "old.docs")) == 1


def test_big_integers_compare_exactly(postgres: str) -> None:
    numbers = [(1 << 53) + row for row in range(8)]
    source = Embeddings(list("abcdefgh"), vectors(8), None, None, pa.table({"ns": numbers}))
    index = push_embeddings(source, postgres, "big")[0]
    hits = index.search(
        vectors(1), 8, where=parse_conditions([f"ns>={numbers[5]}"], index.column_kinds)
    )[0]
    assert {hit.id for hit in hits} == set("fgh")
