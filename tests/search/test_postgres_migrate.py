"""A table of PostgreSQL gets another model's vectors: values by SQL, refusals, and rollbacks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from zlib import crc32

import psycopg
import pytest

from dualenc.errors import DualencError
from dualenc.search.engines.factory import open_engine, push_embeddings
from dualenc.search.engines.postgres_connection import PostgresConnection
from dualenc.search.engines.postgres_migration import TableMigration
from dualenc.search.engines.postgres_vectors import MAX_DIM
from dualenc.search.engines.postgres_version import hnsw_problem
from dualenc.workflows.migrate_table import (
    TableColumnNames,
    finish_table,
    migrate_table,
    roll_back_table,
)
from tests.helpers.migrated_table import OLD_DIM, check_vectors, embedded, make_table
from tests.helpers.postgres_rows import execute
from tests.helpers.pushed import embeddings

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


def test_only_a_report_changes_nothing(postgres: str, toy_text: Path) -> None:
    make_table(postgres, "reported")
    before = columns_of(postgres, "reported"), indexes(postgres, "reported")
    shown: list[Any] = []
    report = migrate(postgres, "reported", toy_text, report_only=True, on_report=shown.append)
    assert shown == [report]
    assert report.state == "measured"
    assert (columns_of(postgres, "reported"), indexes(postgres, "reported")) == before
    # Random vectors find what another model finds by chance alone: 10 of 59.
    overlap, low, high = report.systems[0]["recall@10"]
    assert low < 10 / 59 < high
    assert 0 < overlap < 0.4
    assert execute(postgres, "SELECT count(*) FROM reported WHERE embedding IS NULL") == [(0,)]


def test_blank_texts_have_no_vector_and_are_counted(
    postgres: str, toy_text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_table(postgres, "blank")
    execute(postgres, "UPDATE blank SET body = NULL WHERE id = 3")
    execute(postgres, "UPDATE blank SET body = '' WHERE id = 4")
    execute(postgres, "UPDATE blank SET body = E' \\t\\u200b' WHERE id IN (5, 6)")
    execute(postgres, "ALTER TABLE blank ALTER embedding SET NOT NULL")
    with caplog.at_level(logging.WARNING):
        assert migrate(postgres, "blank", toy_text).missing == 4
    assert "4 texts have no vector, which is NULL; the first, 3: its text is NULL" in caplog.text
    assert execute(postgres, "SELECT id FROM blank WHERE embedding IS NULL ORDER BY 1") == [
        (3,),
        (4,),
        (5,),
        (6,),
    ]
    # The old column must not refuse what clients insert now.
    execute(postgres, "INSERT INTO blank (id, body) VALUES (1000, 'fox')")
    with caplog.at_level(logging.WARNING):
        assert finish_table(postgres, "blank").missing == 5
    assert "was NOT NULL, and has rows without a vector now" in caplog.text


def test_not_null_is_kept(postgres: str, toy_text: Path) -> None:
    make_table(postgres, "required")
    execute(postgres, "ALTER TABLE required ALTER embedding SET NOT NULL")
    migrate(postgres, "required", toy_text)
    finish_table(postgres, "required")
    query = "SELECT attnotnull FROM pg_attribute WHERE attrelid = 'required'::regclass"
    checks = (
        "SELECT count(*) FROM pg_constraint WHERE conrelid = 'required'::regclass AND contype = 'c'"
    )
    assert execute(postgres, checks) == [(0,)]
    assert execute(postgres, f"{query} AND attname = 'embedding'") == [(True,)]


def test_a_rollback_gives_the_old_vectors_and_none_for_newer_texts(
    postgres: str, toy_text: Path
) -> None:
    make_table(postgres, "back")
    before = dict(execute(postgres, "SELECT id, embedding::text FROM back"))
    definitions = indexes(postgres, "back")
    with pytest.raises(DualencError, match="no migration is under way"):
        roll_back_table(postgres, "back")
    migrate(postgres, "back", toy_text)
    execute(postgres, "UPDATE back SET body = 'fox fox' WHERE id = 7")
    execute(postgres, "INSERT INTO back (id, body) VALUES (1000, 'hen')")
    done = roll_back_table(postgres, "back")
    assert (done.switched, done.discarded, done.missing) == (True, False, 2)
    after = dict(execute(postgres, "SELECT id, embedding::text FROM back"))
    assert after == {**before, 7: None, 1000: None}
    assert indexes(postgres, "back").items() > definitions.items()
    # The new vectors are there, so that only the two changed rows are embedded.
    assert migrate(postgres, "back", toy_text).state == "switched"
    check_vectors(postgres, "back", toy_text)
    roll_back_table(postgres, "back", discard=True)
    assert indexes(postgres, "back") == definitions
    assert columns_of(postgres, "back").keys() == {"id", "body", "year", "embedding"}


def test_rows_outside_of_the_conditions_have_no_vector(postgres: str, toy_text: Path) -> None:
    make_table(postgres, "partly")
    report = migrate(postgres, "partly", toy_text, where=["year>=2003"])
    old = execute(postgres, "SELECT count(*) FROM partly WHERE year < 2003")
    assert old == [(report.missing,)]
    query = "SELECT count(*) FROM partly WHERE (embedding IS NULL) <> (year < 2003)"
    assert execute(postgres, query) == [(0,)]
    assert roll_back_table(postgres, "partly").missing == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("ALTER TABLE {} ADD title text", "body and title could be --text; name it: --text body"),
        ("ALTER TABLE {} ADD other vector(3)", "embedding and other could be --vector"),
        ("ALTER TABLE {} DROP CONSTRAINT {}_pkey", "has not a unique column that is never NULL"),
        ("ALTER TABLE {} ADD embedding_new int", "has a column 'embedding_new', which no recorded"),
        (
            "CREATE VIEW over_{} AS SELECT embedding FROM {}",
            "rule _RETURN on view over_.* would keep the old vectors; drop it",
        ),
        (
            "CREATE INDEX ON {} USING hnsw ((binary_quantize(embedding)::bit(8)) bit_hamming_ops)",
            "of the vectors cannot be built for others",
        ),
        ('COMMENT ON TABLE {} IS \'dualenc {{"fingerprint": "", "index": null}}\'', "push"),
        ("ALTER TABLE {} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY", "row security"),
    ],
)
def test_what_cannot_migrate_is_refused(
    postgres: str, toy_text: Path, change: str, message: str, request: pytest.FixtureRequest
) -> None:
    name = f"refused_{crc32(request.node.name.encode())}"
    make_table(postgres, name)
    execute(postgres, change.format(*[name] * 2))
    target = postgres
    if "row security" in message:
        execute(postgres, f"CREATE ROLE plain LOGIN; ALTER TABLE {name} OWNER TO plain")
        execute(postgres, "GRANT CREATE ON SCHEMA public TO plain")
        target = postgres.replace("//me@", "//plain@")
    before = columns_of(postgres, name)
    with pytest.raises(DualencError, match=message) as error:
        migrate(target, name, toy_text)
    assert "\n" not in str(error.value)
    assert columns_of(postgres, name) == before


def test_another_role_is_refused(postgres: str, toy_text: Path) -> None:
    make_table(postgres, "owned")
    execute(postgres, "CREATE ROLE guest LOGIN; GRANT ALL ON owned TO guest")
    with pytest.raises(DualencError, match="belongs to another role; connect as its owner"):
        migrate(postgres.replace("//me@", "//guest@"), "owned", toy_text)
    with pytest.raises(DualencError, match="there is no such table"):
        migrate(postgres, "nowhere", toy_text)
    with pytest.raises(DualencError, match=r"no column 'bodi' .did you mean body"):
        migrate(postgres, "owned", toy_text, columns=TableColumnNames(text="bodi"))


def test_records_of_somebody_else_are_refused(postgres: str, toy_text: Path) -> None:
    execute(postgres, "CREATE SCHEMA other; CREATE TABLE other.dualenc_migrations (id int)")
    make_table(postgres, "moved")
    execute(postgres, "ALTER TABLE moved SET SCHEMA other")
    with pytest.raises(DualencError, match="dualenc_migrations was not made by dualenc"):
        migrate(postgres, "other.moved", toy_text)


def test_grants_on_the_column_are_kept(postgres: str, toy_text: Path) -> None:
    make_table(postgres, "granted")
    execute(postgres, 'CREATE ROLE "A b" LOGIN; GRANT SELECT (id, embedding) ON granted TO "A b"')
    migrate(postgres, "granted", toy_text)
    reader = postgres.replace("//me@", "//A%20b@")
    assert len(execute(reader, "SELECT id, embedding FROM granted")) == 60


@pytest.mark.parametrize(
    ("version", "is_safe"),
    [("0.8.4", True), ("0.9", True), ("0.10.0", True), ("0.8.3", False), ("0.8", False)],
)
def test_versions_whose_vacuum_corrupts_hnsw(version: str, is_safe: bool) -> None:
    assert (hnsw_problem(version) == "") == is_safe


def test_an_old_pgvector_is_refused_for_hnsw_alone_and_push_warns(
    postgres: str,
    toy_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load = PostgresConnection.load_extension

    def older(database: PostgresConnection) -> str:
        load(database)
        return "0.8.2"

    monkeypatch.setattr(PostgresConnection, "load_extension", older)
    make_table(postgres, "older")
    with pytest.raises(DualencError, match=r"has pgvector 0.8.2, and before 0.8.4 vacuum may"):
        migrate(postgres, "older", toy_text)
    with caplog.at_level(logging.WARNING):
        push_embeddings(embeddings(), postgres, "older pushed")[0].save(tmp_path)
        open_engine(tmp_path)
    assert caplog.text.count("vacuum may corrupt an HNSW index; install 0.8.4 or later") == 2
    make_table(postgres, "older ivf", index="ivfflat", options="WITH (lists = 2)")
    assert migrate(postgres, "older ivf", toy_text).state == "switched"


def test_ids_of_other_types_and_odd_names(postgres: str, toy_text: Path) -> None:
    name = 'it"s {} 日本'
    quoted = '"it""s {} 日本"'
    make_table(postgres, name)
    for statement in (
        "ALTER TABLE {} ALTER id TYPE text USING 'id ' || id || '\"'';'",
        'ALTER TABLE {} RENAME embedding TO "my ""vec"" {{}}"',
        'ALTER TABLE {} RENAME body TO "select"',
    ):
        execute(
            postgres,
            statement.format(quoted.replace("{", "{{").replace("}", "}}"))
            .replace("{{", "{")
            .replace("}}", "}"),
        )
    migrate(postgres, quoted, toy_text)
    query = f'SELECT count("my ""vec"" {{}}") FROM {quoted}'
    assert execute(postgres, query) == [(60,)]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_small_tables(postgres: str, toy_text: Path, count: int) -> None:
    name = f"small_{count}"
    make_table(postgres, name, count)
    report = migrate(postgres, name, toy_text)
    assert len(report.systems) == (2 if count > 1 else 0)
    assert check_vectors(postgres, name, toy_text) == count if count else True


def test_an_index_and_a_view_that_are_made_meanwhile_are_seen(
    postgres: str, toy_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(postgres, "meanwhile")
    switch = TableMigration.switch
    change = "CREATE VIEW meanwhile_view AS SELECT embedding FROM meanwhile"

    def later(*arguments: Any) -> bool:
        execute(postgres, change)
        return switch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TableMigration, "switch", later)
        with pytest.raises(DualencError, match="meanwhile_view would keep the old vectors"):
            migrate(postgres, "meanwhile", toy_text)
        execute(postgres, "DROP VIEW meanwhile_view")
        change = "CREATE INDEX IF NOT EXISTS l2 ON meanwhile USING hnsw (embedding vector_l2_ops)"
        assert migrate(postgres, "meanwhile", toy_text).state == "switched"
    assert {"l2", "l2_old"} <= indexes(postgres, "meanwhile").keys()
    assert "(embedding vector_l2_ops)" in indexes(postgres, "meanwhile")["l2"]


def test_long_vectors_are_indexed_in_half_precision(
    postgres: str, toy_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_DIM, "vector", 16)
    make_table(postgres, "long")
    migrate(postgres, "long", toy_text)
    assert (
        "((embedding)::halfvec(32)) halfvec_cosine_ops" in indexes(postgres, "long")["long_vectors"]
    )
    # An index over the cast is copied, too.
    finish_table(postgres, "long")
    monkeypatch.undo()
    execute(postgres, "DELETE FROM dualenc_migrations WHERE table_name = 'long'")
    migrate(postgres, "long", toy_text)
    assert "(embedding vector_cosine_ops)" in indexes(postgres, "long")["long_vectors"]


def test_pending_rows_are_found_by_the_index(postgres: str, toy_text: Path) -> None:
    make_table(postgres, "planned", 3000, index="")
    migrate(postgres, "planned", toy_text, batch_size=256)
    checksum = "embedding_checksum IS DISTINCT FROM coalesce(md5(body), '')"
    for query in (
        f"SELECT count(*) FROM planned WHERE {checksum}",
        f"SELECT id FROM planned WHERE {checksum} AND id > 5 ORDER BY id LIMIT 9",
    ):
        with psycopg.connect(postgres) as connection:
            connection.execute("SET enable_seqscan = off")
            plan = connection.execute(f"EXPLAIN {query}").fetchall()  # type: ignore[call-overload]
        assert "dualenc_pending_" in str(plan), plan
