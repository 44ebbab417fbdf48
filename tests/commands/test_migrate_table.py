"""`dualenc migrate postgresql://…`: what it prints, measures, orders and refuses."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pytest

from dualenc.cli import main
from dualenc.encoders import load_model
from dualenc.search.engines.postgres_migration import TableMigration
from dualenc.workflows.migrate_table import migrate_table
from tests.helpers import toy
from tests.helpers.migrated_table import embedded, make_table
from tests.helpers.pages import ROOT, code
from tests.helpers.postgres_rows import execute

pytestmark = pytest.mark.slow


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    status = main(["migrate", *map(str, words)])
    out, err = capsys.readouterr()
    return status, out, err


def test_from_the_report_to_the_end(
    postgres: str, toy_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_table(postgres, "printed")
    execute(postgres, "UPDATE printed SET body = '' WHERE id = 1")
    place = (postgres, "--table", "printed")
    model = (toy_text, *place[1:])
    status, out, _ = run(capsys, postgres, *model, "--report-only")
    assert status == 0
    assert "'printed': id id (int8), text body (text), vector embedding (vector)" in out
    assert "unknown whether it finds more than the old one; nothing is changed" in out
    status, out, err = run(capsys, postgres, *model)
    assert status == 0
    assert f"searches find the vectors of {toy_text} now; 1 rows have no vector" in out
    assert f"until dualenc migrate {postgres} --table printed --finish, and come back by" in out
    assert "1 texts have no vector, which is NULL" in err
    status, out, _ = run(capsys, *place, "--rollback")
    assert (status, "searches find the old vectors again; those of" in out) == (0, True)
    # What is printed can be run: the columns are named again, and the password is not shown.
    secret = postgres.replace("me@", "me:secret@", 1)
    status, out, _ = run(capsys, secret, *model, "--text", "body")
    assert (status, "secret" in out) == (0, False)
    assert f"until dualenc migrate {postgres} --table printed --text body --finish," in out
    status, out, _ = run(capsys, *place, "--text", "body", "--finish")
    assert (status, "the old vectors are dropped; 1 rows have no vector" in out) == (0, True)
    status, out, _ = run(capsys, postgres, *model)
    assert (status, f"all vectors are of {toy_text}" in out) == (0, True)
    assert run(capsys, *place, "--rollback")[0] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["URL", "model"], "a database has many tables; name one: --table TABLE"),
        (
            ["ftp://localhost", "m", "--table", "t"],
            "is not the URL of PostgreSQL or a Qdrant server",
        ),
        (
            ["folder", "model", "--table", "t"],
            "--table is of a table of PostgreSQL or a collection of Qdrant",
        ),
        (["folder", "model", "--old-model", "m"], "--old-model is of a table of PostgreSQL"),
        (["URL", "--table", "t", "--finish", "--rollback"], "--finish does not go with --rollback"),
        (["URL", "--table", "t"], "dualenc migrate needs a model"),
        (["URL", "--table", "no such", "--finish"], "there is no such table; name it: --table"),
        (["URL", "--table", "a.b.c", "--finish"], "write TABLE or SCHEMA.TABLE"),
    ],
)
def test_refusals(
    postgres: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    status, _, err = run(capsys, *[postgres if word == "URL" else word for word in words])
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_the_commands_of_the_page_run(postgres: str, toy_text: Path) -> None:
    make_table(postgres, "docs")
    lines = "\n".join(code(ROOT / "docs" / "migrate-databases.md", "bash")).splitlines()
    place = "postgresql://me@localhost/shop"
    words = [shlex.split(line)[1:] for line in lines if place in line]
    assert len(words) == 3
    for command in words:
        names = {place: postgres, "NEW_MODEL": str(toy_text)}
        assert main([names.get(word, word) for word in command]) == 0


def beir_table(target: str, name: str, folder: Path, old: Path) -> dict[str, str]:
    """A BEIR folder, and its documents in a table with a model's vectors."""
    toy.write_beir(folder, documents=60, queries=12)
    lines = (folder / "corpus.jsonl").read_text().splitlines()
    texts = {row["_id"]: f"{row['title']} {row['text']}" for row in map(json.loads, lines)}
    vectors = embedded(old, list(texts.values()))
    execute(target, "CREATE EXTENSION IF NOT EXISTS vector")
    execute(target, f"CREATE TABLE {name} (id text PRIMARY KEY, body text, embedding vector(32))")
    with psycopg.connect(target) as connection:
        for (id, text), vector in zip(texts.items(), vectors):
            values = [id, text, str(vector.tolist())]
            connection.execute(f"INSERT INTO {name} VALUES (%s, %s, %s)", values)  # type: ignore[call-overload]
    return texts


def test_judged_queries_are_measured_with_both_models(
    postgres: str, toy_text: Path, tmp_path: Path
) -> None:
    new = toy.text_model(tmp_path / "new", seed=1)
    texts = beir_table(postgres, "judged", tmp_path / "beir", toy_text)
    options: dict[str, Any] = {"device": "cpu", "progress": False, "report_only": True}
    report = migrate_table(
        postgres,
        "judged",
        str(new),
        data=str(tmp_path / "beir"),
        old_model=str(toy_text),
        **options,
    )
    relevant = dict(
        line.split("\t")[:2]
        for line in (tmp_path / "beir" / "qrels" / "test.tsv").read_text().splitlines()[1:]
    )
    lines = (tmp_path / "beir" / "queries.jsonl").read_text().splitlines()
    queries = {row["_id"]: row["text"] for row in map(json.loads, lines)}
    for model, system in zip((toy_text, new), report.systems):
        encoder = load_model(str(model))
        documents = embedded(model, list(texts.values()))
        gains = []
        for query, document in relevant.items():
            vector = encoder.encode_query([queries[query]])[0]
            # A document with the id of the query is a copy of it.
            ids = [id for id in texts if id != query]
            scores = {id: documents[list(texts).index(id)] @ vector for id in ids}
            rank = sorted(ids, key=lambda id: -scores[id]).index(document) + 1
            gains.append(1 / math.log2(rank + 1) if rank <= 10 else 0.0)
        assert system["ndcg@10"][0] == pytest.approx(np.mean(gains), abs=1e-6)
    assert "nDCG@10" in report.verdict()


def test_rows_that_past_queries_find_are_filled_first(
    postgres: str, toy_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = toy.text_model(tmp_path / "new", seed=1)
    texts = beir_table(postgres, "ordered", tmp_path / "beir", toy_text)
    wanted = list(texts)[40]
    line = json.dumps({"_id": "q", "text": texts[wanted]})
    (tmp_path / "past.jsonl").write_text(f"{line}\n")
    stored: list[list[str]] = []
    store = TableMigration.store

    def recorded(migration: TableMigration, rows: Any, vectors: Any) -> int:
        stored.append([row.id for row in rows])
        return store(migration, rows, vectors)

    monkeypatch.setattr(TableMigration, "store", recorded)
    options: dict[str, Any] = {"device": "cpu", "progress": False, "batch_size": 4}
    past = str(tmp_path / "past.jsonl")
    migrate_table(postgres, "ordered", str(new), queries=past, old_model=str(toy_text), **options)
    encoder = load_model(str(toy_text))
    vector = encoder.encode_query([texts[wanted]])[0]
    scores = embedded(toy_text, list(texts.values())) @ vector
    nearest = {list(texts)[row] for row in np.argsort(-scores)[:10]}
    assert set(stored[0]) == nearest
    assert [len(ids) for ids in stored[1:4]] == [16, 16, 16]
