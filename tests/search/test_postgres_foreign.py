"""A table that other software filled is searched, read, measured and checked; it is never
written."""

from __future__ import annotations

import json
import logging
import shlex
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from psycopg.sql import SQL, Identifier

from dualenc.encoders import load_model
from dualenc.errors import DualencError
from dualenc.search.documents import fingerprint, open_documents
from dualenc.search.engines.factory import open_engine
from dualenc.search.searcher import Searcher
from dualenc.workflows.check_vectors import check
from dualenc.workflows.migrate_table import (
    TableColumnNames,
    finish_table,
    migrate_table,
    roll_back_table,
)
from dualenc.workflows.record_table import record_table
from tests.helpers import toy
from tests.helpers.in_process import failure, found, run
from tests.helpers.migrated_table import embedded
from tests.helpers.pages import ROOT, code
from tests.helpers.postgres_rows import execute

pytestmark = pytest.mark.slow

QUERY = "fox hen owl"


def make(
    target: str,
    name: str,
    model: Path,
    columns: str = "id bigint PRIMARY KEY, body text, year int, embedding vector(32)",
    index: str = "USING hnsw (embedding vector_cosine_ops)",
    scale: float = 1.0,
) -> tuple[list[str], np.ndarray]:
    """A table with the model's vectors of 60 texts; returns texts and vectors."""
    texts = toy.texts(60)
    vectors = embedded(model, texts) * scale
    with psycopg.connect(target, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        table = Identifier(name)
        connection.execute(SQL(f"CREATE TABLE {{}} ({columns})").format(table))  # type: ignore[arg-type]
        insert = SQL("INSERT INTO {} VALUES (%s, %s, %s, %s)").format(table)
        for row, text in enumerate(texts):
            connection.execute(insert, [row, text, 2000 + row % 7, str(vectors[row].tolist())])
        if index:
            connection.execute(SQL(f"CREATE INDEX ON {{}} {index}").format(table))  # type: ignore[arg-type]
    return texts, vectors


def plan(target: str, folder: Path) -> str:
    """How PostgreSQL executes the statement of a search, without comparing all rows."""
    engine: Any = open_engine(folder)
    query = (
        f"EXPLAIN SELECT FROM {engine.table.quoted} ORDER BY "
        + engine.vector_column.distance.as_string(engine.database.connection)
    )
    values = {"query": str([1.0] + [0.0] * (engine.dim - 1))}
    with psycopg.connect(target) as connection:
        connection.execute("SET enable_seqscan = off; SET enable_sort = off")
        rows = connection.execute(query + " LIMIT 5", values).fetchall()  # type: ignore[call-overload]
    engine.close()
    return "\n".join(row for (row,) in rows)


@pytest.mark.parametrize(
    ("columns", "index", "kind", "metric"),
    [
        ("embedding vector(32)", "USING hnsw (embedding vector_cosine_ops)", "hnsw", "cosine"),
        ("embedding vector(32)", "USING hnsw (embedding vector_l2_ops)", "hnsw", "cosine"),
        ("embedding vector(32)", "USING hnsw (embedding vector_ip_ops)", "hnsw", "ip"),
        (
            "embedding vector(32)",
            "USING hnsw ((embedding::halfvec(32)) halfvec_cosine_ops)",
            "hnsw",
            "cosine",
        ),
        (
            "embedding halfvec(32)",
            "USING ivfflat (embedding halfvec_cosine_ops) WITH (lists = 3)",
            "ivfflat",
            "cosine",
        ),
        ("embedding vector", "", "none", "cosine"),
    ],
)
def test_searches_give_what_numpy_gives_and_use_the_index(
    postgres: str, toy_text: Path, tmp_path: Path, columns: str, index: str, kind: str, metric: str
) -> None:
    name = f"Of others {abs(hash(columns + index)) % 10**6}"
    layout = f'"the key" bigint PRIMARY KEY, body text, year int, {columns}'
    texts, vectors = make(postgres, name, toy_text, layout, index)
    about = record_table(
        postgres, f'"{name}"', tmp_path / "docs", columns=["year"], model=str(toy_text)
    )
    assert (about.index, about.metric, about.count, about.dim) == (kind, metric, 60, 32)
    searcher = Searcher.open(tmp_path / "docs")
    vector = load_model(str(toy_text)).encode_query([QUERY])[0]
    scores = vectors @ vector
    best = np.argsort(-scores)[:5]
    hits = searcher.search(QUERY, k=5)
    np.testing.assert_allclose([hit.score for hit in hits], scores[best], atol=2e-3)
    for hit in hits:
        assert hit.snippet == texts[int(hit.id)]
        assert hit.columns == {"year": 2000 + int(hit.id) % 7}
        np.testing.assert_allclose(hit.score, scores[int(hit.id)], atol=2e-3)
    years = {hit.columns["year"] for hit in searcher.search(QUERY, k=5, where=["year>=2004"])}
    assert min(years) >= 2004
    assert ("Index Scan" in plan(postgres, tmp_path / "docs")) == (kind != "none")
    documents = open_documents(tmp_path / "docs", tmp_path / "work")
    rows = [int(id) for id in documents.ids]
    np.testing.assert_allclose(documents.vectors[:], vectors[rows], atol=2e-3)
    checked = check(tmp_path / "docs")
    assert checked.alarms == []
    assert {each.name: each.state for each in checked.findings}["canaries"] == "ok"


def test_commands_take_the_folder_and_write_nothing_into_the_table(
    postgres: str,
    toy_text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    make(postgres, "shop", toy_text)
    execute(postgres, "CREATE ROLE reader LOGIN; GRANT SELECT ON shop TO reader")
    reader = postgres.replace("//me@", "//reader@")
    folder = tmp_path / "shop-table"
    options = ("--table", "shop", "--model", toy_text, "--columns", "year", "--out", folder)
    before = execute(postgres, "SELECT xmin, ctid, id FROM shop ORDER BY id")
    with caplog.at_level(logging.INFO):
        record_table(reader, "shop", folder)
    said = "id id, text body, vector embedding; cosine, searched by its hnsw index"
    assert said in caplog.text
    run("index", reader, *options)
    assert "60 vectors of dimension 32 stay in the table" in capsys.readouterr().out
    assert len(found(capsys, folder, QUERY, "--where", "year>=2003", "-k", 4)) == 4
    run("check", folder)
    toy.write_beir(tmp_path / "beir", documents=60, queries=12)
    judged = "query-id\tcorpus-id\tscore\n" + "".join(f"q{n}\t{n}\t1\n" for n in range(12))
    lines = [json.dumps({"_id": f"q{n}", "text": toy.texts(60)[n]}) for n in range(12)]
    (tmp_path / "beir" / "queries.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "beir" / "qrels" / "test.tsv").write_text(judged)
    evaluation = ("evaluate", "retrieval", toy_text, tmp_path / "beir", "--documents", folder)
    run(*evaluation, "--out", tmp_path / "evaluation")
    clicks = "".join(f"{toy.texts(60)[n]},{n}\n" for n in range(60))
    (tmp_path / "clicks.csv").write_text("query,document_id\n" + clicks)
    run("adapt", folder, tmp_path / "clicks.csv", "--out", tmp_path / "adapted", "--keep", 0.5)
    assert ", the same after as before" in (tmp_path / "adapted" / "report.html").read_text()
    (tmp_path / "filters.jsonl").write_text('{"filter": "year > 2003"}\n')
    run("evaluate", "engine", folder, "--filters", tmp_path / "filters.jsonl")
    assert len(found(capsys, folder, QUERY, "--model", tmp_path / "adapted" / "model")) == 10
    assert execute(postgres, "SELECT xmin, ctid, id FROM shop ORDER BY id") == before
    assert execute(postgres, "SELECT to_regclass('dualenc_migrations')") == [(None,)]


def test_clients_may_change_rows_all_the_time(
    postgres: str, toy_text: Path, tmp_path: Path
) -> None:
    _, vectors = make(postgres, "busy", toy_text)
    record_table(postgres, "busy", tmp_path / "docs", model=str(toy_text))
    searcher = Searcher.open(tmp_path / "docs")
    done, errors = threading.Event(), []

    def write() -> None:
        random = np.random.default_rng(0)
        with psycopg.connect(postgres, autocommit=True) as connection:
            while not done.is_set():
                id, row = int(random.integers(50, 90)), int(random.integers(60))
                connection.execute("DELETE FROM busy WHERE id = %s", [id])
                text = toy.texts(60)[row]
                values = [id, text, 2000, str(vectors[row].tolist()) if row % 5 else None]
                try:
                    connection.execute("INSERT INTO busy VALUES (%s, %s, %s, %s)", values)
                except psycopg.Error as error:
                    errors.append(error)
                time.sleep(0.001)

    writer = threading.Thread(target=write)
    writer.start()
    for round in range(15):
        assert len(searcher.search(QUERY, k=10)) == 10
        documents = open_documents(tmp_path / "docs", tmp_path / f"work {round}")
        assert set(map(str, range(50))) <= set(documents.ids)
        np.testing.assert_allclose(
            documents.vectors[:5], vectors[[int(i) for i in documents.ids[:5]]], atol=2e-3
        )
    assert {each.name for each in check(tmp_path / "docs").alarms} <= {"counts", "duplicates"}
    done.set()
    writer.join()
    assert errors == []
    # A copy is made again when vectors change under the same ids.
    before = fingerprint(tmp_path / "docs")
    open_documents(tmp_path / "docs", tmp_path / "work")
    execute(postgres, "UPDATE busy SET embedding = %s WHERE id = 3", str(vectors[4].tolist()))
    assert fingerprint(tmp_path / "docs") != before
    documents = open_documents(tmp_path / "docs", tmp_path / "work")
    np.testing.assert_allclose(documents.vectors[documents.ids.index("3")], vectors[4], atol=2e-3)


@pytest.mark.parametrize("is_named", [True, False])
def test_searches_use_the_model_of_the_moment(
    postgres: str, toy_text: Path, tmp_path: Path, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"moment_{is_named}".lower()
    texts, _ = make(postgres, name, toy_text)
    new = toy.text_model(tmp_path / "new", seed=1)
    execute(postgres, f"CREATE ROLE looker_{is_named} LOGIN")
    execute(postgres, f"GRANT SELECT ON {name} TO looker_{is_named}")
    looker = postgres.replace("//me@", f"//looker_{is_named}@".lower())
    record_table(looker, name, tmp_path / "early", model=str(toy_text))
    opened = Searcher.open(tmp_path / "early")

    def scores(folder: Path, model: Path) -> None:
        """The folder's search gives what numpy finds with the model."""
        vector = load_model(str(model)).encode_query([QUERY])[0]
        expected = np.sort(embedded(model, texts) @ vector)[::-1][:5]
        hits = Searcher.open(folder).search(QUERY, k=5)
        np.testing.assert_allclose([hit.score for hit in hits], expected, atol=2e-3)

    options: dict[str, Any] = {"progress": False, "device": "cpu"}
    old = str(toy_text) if is_named else None
    migrate_table(postgres, name, str(new), old_model=old, **options)
    with pytest.raises(DualencError, match="since it was opened; open it again"):
        opened.search(QUERY)
    with pytest.raises(DualencError, match="nothing names their model; GRANT SELECT"):
        Searcher.open(tmp_path / "early")
    execute(postgres, f"GRANT SELECT ON dualenc_migrations TO looker_{is_named}")
    scores(tmp_path / "early", new)
    assert f"its vectors are of {new} now" in caplog.text
    assert check(tmp_path / "early").alarms == []
    record_table(postgres, name, tmp_path / "late", model=str(new))
    scores(tmp_path / "late", new)
    roll_back_table(postgres, name)
    scores(tmp_path / "early", toy_text)
    if is_named:
        scores(tmp_path / "late", toy_text)
    else:
        with pytest.raises(DualencError, match="does not record which model made it; name"):
            Searcher.open(tmp_path / "late")
    # The folder names table and columns.
    assert migrate_table(str(tmp_path / "late"), None, str(new), **options).state == "switched"
    finish_table(str(tmp_path / "late"), None)
    scores(tmp_path / "early", new)
    scores(tmp_path / "late", new)
    execute(postgres, "DELETE FROM dualenc_migrations")
    with pytest.raises(DualencError, match="in another column now, and nothing names their model"):
        open_engine(tmp_path / "early")


def test_the_commands_of_the_page_run(
    postgres: str, toy_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = "id bigint PRIMARY KEY, body text, year int, embedding vector(32), lang text"
    make(postgres, "docs", toy_text, layout)
    # The page leaves lang to the reader; body and lang are both texts.
    execute(postgres, "ALTER TABLE docs ALTER lang TYPE boolean USING true")
    monkeypatch.chdir(tmp_path)
    toy.text_model(tmp_path / "new", seed=1)
    lines = [json.dumps({"_id": str(n), "text": text}) for n, text in enumerate(toy.texts(60))]
    (tmp_path / "my_beir" / "qrels").mkdir(parents=True)
    for name in ("corpus", "queries"):
        (tmp_path / "my_beir" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    judged = "query-id\tcorpus-id\tscore\n" + "".join(f"{n}\t{n + 1}\t1\n" for n in range(30))
    (tmp_path / "my_beir" / "qrels" / "test.tsv").write_text(judged)
    events = {"query": toy.texts(60), "document_id": list(map(str, range(60)))}
    pq.write_table(pa.table(events), tmp_path / "events.parquet")
    names = {
        "postgresql://me@localhost/shop": postgres,
        "MODEL": str(toy_text),
        "NEW_MODEL": str(tmp_path / "new"),
    }
    blocks = "\n".join(code(ROOT / "docs" / "other-indexes.md", "bash")).splitlines()
    commands = [shlex.split(line)[1:] for line in blocks if "docs-table" in line]
    assert len(commands) == 6
    for words in commands:
        run(*[names.get(word, word) for word in words])
    assert Searcher.open("docs-table").index.provenance.model == str(tmp_path / "new")


def test_what_leaves_a_choice_or_is_no_table_is_refused(
    postgres: str, toy_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(postgres, "choices", toy_text)
    out = tmp_path / "out"

    def refused(*words: Any) -> str:
        line = failure(capsys, "index", postgres, "--table", "choices", "--out", out, *words)
        assert not (out / "meta.json").exists()
        return line

    assert "there is no column 'yaer' to filter by (did you mean year" in refused(
        "--columns", "yaer"
    )
    assert "a table does not go with --bm25" in refused("--bm25")
    assert "a table does not go with --factory" in refused("--factory", "Flat")
    small = toy.text_model(tmp_path / "small", dim=16)
    assert "has vectors of dimension 16, and embedding 32" in refused("--model", small)
    execute(postgres, "CREATE INDEX ip ON choices USING hnsw (embedding vector_ip_ops)")
    line = refused()
    assert "its indexes compare differently: choices_embedding_idx (cosine) and ip (ip)" in line
    execute(postgres, "ALTER TABLE choices ADD title text")
    assert "body and title could be --text; name it: --text body" in refused()
    named = tmp_path / "filtered"
    about = record_table(postgres, "choices", named, columns=["title"], metric="ip")
    assert about.names["text"] == "body", "a column to filter by is not the text"
    execute(postgres, "CREATE VIEW seen AS SELECT * FROM choices")
    words = ("index", postgres, "--table", "seen", "--out", out)
    assert "is not a table" in failure(capsys, *words)
    assert "there is no such table" in failure(
        capsys, "index", postgres, "--table", "x", "--out", out
    )
    assert "give --table TABLE --out FOLDER" in failure(capsys, "index", postgres)
    assert "--table without postgresql://" in failure(capsys, "index", tmp_path, "--table", "x")
    about = record_table(
        postgres, "choices", out, names=TableColumnNames(text="body"), metric="ip", model="an-api"
    )
    assert (about.metric, about.model, about.names["text"]) == ("ip", "an-api", "body")


def test_lengths_decide_whether_an_l2_index_serves(
    postgres: str, toy_text: Path, tmp_path: Path
) -> None:
    make(postgres, "far", toy_text, index="USING hnsw (embedding vector_l2_ops)", scale=3)
    with pytest.raises(DualencError, match="compares by L2 distance, and lengths are 3 to 3"):
        record_table(postgres, "far", tmp_path / "far")
    about = record_table(postgres, "far", tmp_path / "far", metric="cosine", model=str(toy_text))
    assert about.index == "none"
    assert len(Searcher.open(tmp_path / "far").search(QUERY, k=5)) == 5


def test_a_table_without_texts_is_searched(postgres: str, toy_text: Path, tmp_path: Path) -> None:
    make(postgres, "bare", toy_text)
    execute(postgres, "ALTER TABLE bare DROP body")
    about = record_table(postgres, "bare", tmp_path / "bare", model=str(toy_text))
    assert dict(about.names) == {"id": "id", "vector": "embedding"}
    hits = Searcher.open(tmp_path / "bare").search(QUERY, k=3)
    assert [hit.snippet for hit in hits] == ["", "", ""]
    execute(postgres, "DROP TABLE bare")
    with pytest.raises(DualencError, match="there is no such table"):
        open_engine(tmp_path / "bare")
