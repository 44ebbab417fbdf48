"""A table that `dualenc push` filled gets another model's vectors, and its folder follows."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shlex
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualenc.encoders import load_model
from dualenc.errors import DualencError
from dualenc.search import Embeddings
from dualenc.search.documents import open_documents
from dualenc.search.engines.factory import open_engine
from dualenc.search.searcher import Searcher
from dualenc.workflows.check_vectors import check
from dualenc.workflows.migrate_table import finish_table, migrate_table, roll_back_table
from dualenc.workflows.push_vectors import push
from dualenc.workflows.table_folder import TableFolder
from tests.helpers import toy
from tests.helpers.in_process import run
from tests.helpers.migrated_table import embedded
from tests.helpers.pages import ROOT, code
from tests.helpers.postgres_rows import execute
from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.slow

FORK = multiprocessing.get_context("fork")
COUNT = 60


def whole_texts() -> dict[str, str]:
    """Texts of up to 52 words, of which the database stores the first 240 characters."""
    words = toy.texts(COUNT)
    long = "picture number " * 25
    others = {3: long, 7: f"{long} ant ant", 9: "fox\n hen  of text"}
    return {f"d{row}": others.get(row, words[row]) for row in range(COUNT)}


@pytest.fixture
def pushed(postgres: str, toy_text: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder of a table with the toy model's vectors."""
    lines = [{"_id": id, "text": text, "year": 2000} for id, text in whole_texts().items()]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run("embed", toy_text, tmp_path / "docs.jsonl", "--columns", "year", "--out", tmp_path / "emb")
    kind: Any = getattr(request, "param", "hnsw")
    table = f"docs_{abs(hash(tmp_path)) % 10**9}"
    push(tmp_path / "emb", postgres, table=table, index=kind, progress=False)
    return tmp_path / "emb-engine"


def meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "meta.json").read_text())


def migrate(folder: Path, model: Path, **options: Any) -> Any:
    options = {"progress": False, "device": "cpu", "batch_size": 4, **options}
    return migrate_table(str(folder), None, str(model), **options)


def stored(postgres: str, folder: Path) -> dict[str, np.ndarray]:
    rows = execute(postgres, f"SELECT id, embedding::text FROM {meta(folder)['collection']}")
    return {id: np.array(json.loads(vector)) for id, vector in rows}


def check_rows(postgres: str, folder: Path, model: Path, texts: dict[str, str]) -> None:
    """Each row has the model's vector of its whole text."""
    found = stored(postgres, folder)
    assert found.keys() == texts.keys()
    expected = embedded(model, list(texts.values()))
    np.testing.assert_allclose([found[id] for id in texts], expected, atol=2e-3)


def check_searches(folder: Path, model: Path, texts: dict[str, str]) -> None:
    """A search gives what numpy finds with the model."""
    vector = load_model(str(model)).encode_query(["fox hen owl"])[0]
    scores = embedded(model, list(texts.values())) @ vector
    searcher = Searcher.open(folder)
    hits = searcher.search("fox hen owl", k=5)
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(scores)[::-1][:5], atol=2e-3)
    assert searcher.search("fox", k=3, where=["year>=2001"]) == []
    searcher.close()


@pytest.mark.parametrize(
    ("pushed", "dim"), [("hnsw", 32), ("none", 16), ("ivfflat", 16)], indirect=["pushed"]
)
def test_rows_searches_and_folder_are_of_the_new_model_and_of_the_old_after_a_rollback(
    postgres: str,
    toy_text: Path,
    tmp_path: Path,
    pushed: Path,
    dim: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = toy.text_model(tmp_path / "new", seed=1, dim=dim)
    (tmp_path / "filters.jsonl").write_text('{"filter": ""}\n')
    run("evaluate", "engine", pushed, "--filters", tmp_path / "filters.jsonl")
    assert (pushed / "recall.json").is_file()
    before, rows = meta(pushed), stored(postgres, pushed)
    opened = Searcher.open(pushed)
    assert migrate(pushed, model, report_only=True).state == "measured"
    assert (meta(pushed), stored(postgres, pushed).keys()) == (before, rows.keys())
    with caplog.at_level(logging.INFO):
        report = migrate(pushed, model)
    assert (report.state, report.missing) == ("switched", 0)
    assert f"{COUNT} texts come from the data, and 0, which clients" in caplog.text
    assert "recall.json and queries.npy are of the old vectors and dropped" in caplog.text
    assert not {"recall.json", "queries.npy"} & set(os.listdir(pushed))
    check_rows(postgres, pushed, model, whole_texts())
    check_searches(pushed, model, whole_texts())
    with pytest.raises(DualencError, match="were replaced or removed since it was opened; open"):
        opened.search("fox")
    assert [finding.line for finding in check(pushed).alarms] == []
    documents = open_documents(pushed, tmp_path / "documents")
    texts = whole_texts()
    expected = embedded(model, [texts[id] for id in documents.ids])
    np.testing.assert_allclose(documents.vectors[:], expected, atol=2e-3)
    done = roll_back_table(str(pushed), None)
    assert (done.switched, done.missing) == (True, 0)
    back = stored(postgres, pushed)
    assert all((back[id] == rows[id]).all() for id in rows)
    assert meta(pushed) == {**before, "live": True}
    check_searches(pushed, toy_text, whole_texts())
    assert migrate(pushed, model).state == "switched"
    check_searches(pushed, model, whole_texts())
    finish_table(str(pushed), None)
    check_searches(pushed, model, whole_texts())
    columns = "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0"
    columns += " AND NOT attisdropped"
    names = {name for (name,) in execute(postgres, columns, before["collection"])}
    assert names == {"id", "embedding", "text", "year"}
    assert migrate(pushed, model).state == "finished"
    with pytest.raises(DualencError, match="the old vectors are gone"):
        roll_back_table(str(pushed), None)


def test_what_clients_wrote_is_embedded_as_it_is_and_rows_without_vectors_are_filled(
    postgres: str, toy_text: Path, tmp_path: Path, pushed: Path
) -> None:
    model = toy.text_model(tmp_path / "new", seed=1)
    table = meta(pushed)["collection"]
    new = f"INSERT INTO {table} (id, text, embedding) SELECT %s, %s, embedding FROM {table} LIMIT 1"
    execute(postgres, new, "theirs", "owl owl hen")
    execute(postgres, f"UPDATE {table} SET text = 'ant ant' WHERE id = 'd3'")
    execute(postgres, f"DELETE FROM {table} WHERE id = 'd5'")
    texts = {**whole_texts(), "theirs": "owl owl hen", "d3": "ant ant"}
    migrate(pushed, model)
    # A resumption that meets nothing but a client's text, which ends as if it were cut.
    roll_back_table(str(pushed), None)
    execute(postgres, f"UPDATE {table} SET text = 'ant cat…' WHERE id = 'd3'")
    texts["d3"] = "ant cat…"
    del texts["d5"]
    migrate(pushed, model)
    check_rows(postgres, pushed, model, texts)
    # After the switch: one row without a vector, one whose client has cleared it, and a blank one.
    execute(postgres, f"INSERT INTO {table} (id, text) VALUES ('later', 'bee fox'), ('blank', ' ')")
    execute(postgres, f"UPDATE {table} SET text = 'cow', embedding = NULL WHERE id = 'd8'")
    [counts] = [each for each in check(pushed).findings if each.name == "counts"]
    assert counts.state == "alarm"
    assert counts.line == "59 rows have a vector, and 2 with a text have none"
    assert len(open_documents(pushed, tmp_path / "documents")) == 59
    assert migrate(pushed, model).missing == 1
    execute(postgres, f"DELETE FROM {table} WHERE id = 'blank'")
    check_rows(postgres, pushed, model, {**texts, "later": "bee fox", "d8": "cow"})
    assert check(pushed).alarms == []
    finish_table(str(pushed), None)


def test_the_data_is_needed_and_must_be_that_of_the_rows(
    postgres: str, tmp_path: Path, pushed: Path
) -> None:
    model = toy.text_model(tmp_path / "new", seed=1)
    (tmp_path / "docs.jsonl").rename(tmp_path / "moved.jsonl")
    with pytest.raises(DualencError, match=r"docs\.jsonl is gone; name it by --data"):
        migrate(pushed, model)
    (tmp_path / "other.jsonl").write_text('{"_id": "d1", "text": "of another collection"}\n')
    with pytest.raises(DualencError, match="texts are beginnings, and none is of a text in the"):
        migrate(pushed, model, data=str(tmp_path / "other.jsonl"))
    assert migrate(pushed, model, data=str(tmp_path / "moved.jsonl")).state == "switched"
    check_rows(postgres, pushed, model, whole_texts())
    with pytest.raises(DualencError, match="its folder names the table and the columns; leave"):
        migrate_table(str(pushed), "docs", str(model))


def test_pushes_are_refused_meanwhile_and_replace_it_afterwards(
    postgres: str, toy_text: Path, tmp_path: Path, pushed: Path
) -> None:
    model = toy.text_model(tmp_path / "new", seed=1)
    table = meta(pushed)["collection"]
    again: dict[str, Any] = {"table": table, "out": tmp_path / "again", "progress": False}
    migrate(pushed, model)
    for replace in (False, True):
        with pytest.raises(DualencError) as error:
            push(tmp_path / "emb", postgres, replace=replace, **again)
        assert "\n" not in str(error.value)
    assert "its model is being changed to" in str(error.value)
    assert "dualenc migrate FOLDER --finish, or --rollback --discard" in str(error.value)
    finish_table(str(pushed), None)
    with pytest.raises(DualencError, match=r"holds other embeddings, .* push with --replace"):
        push(tmp_path / "emb", postgres, **again)
    assert push(tmp_path / "emb", postgres, replace=True, **again).sent == COUNT
    check_searches(tmp_path / "again", toy_text, whole_texts())
    with pytest.raises(DualencError, match="holds other embeddings than"):
        open_engine(pushed)
    # Nothing of the first migration is left.
    query = "SELECT count(*) FROM dualenc_migrations WHERE table_name = %s"
    assert execute(postgres, query, table) == [(0,)]
    assert migrate(tmp_path / "again", model).state == "switched"
    check_rows(postgres, tmp_path / "again", model, whole_texts())
    roll_back_table(str(tmp_path / "again"), None, discard=True)
    assert push(tmp_path / "emb", postgres, **again).sent == 0
    check_searches(tmp_path / "again", toy_text, whole_texts())


def dies_before_the_folder(pushed: Path, action: Any) -> None:
    """Run an action that is killed when it begins to write the folder."""

    def killed(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(TableFolder, "_write", killed)  # noqa: B010
    action()


@pytest.mark.parametrize("is_rollback", [False, True])
def test_the_same_command_mends_a_folder_that_is_behind(
    toy_text: Path, postgres: str, tmp_path: Path, pushed: Path, is_rollback: bool
) -> None:
    model = toy.text_model(tmp_path / "new", seed=1)
    shutil.copytree(pushed, tmp_path / "copy")
    if is_rollback:
        migrate(pushed, model)

    def action() -> None:
        if is_rollback:
            roll_back_table(str(pushed), None)
        else:
            migrate(pushed, model)

    child = FORK.Process(target=dies_before_the_folder, args=(pushed, action))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    with pytest.raises(DualencError, match="run the same `dualenc migrate` again"):
        Searcher.open(pushed)
    assert [alarm.name for alarm in check(pushed).alarms] == ["opens"]
    action()
    now = toy_text if is_rollback else model
    check_searches(pushed, now, whole_texts())
    check_rows(postgres, pushed, now, whole_texts())
    # Another folder of the table is mended in the same way.
    migrate(tmp_path / "copy", model)
    check_searches(tmp_path / "copy", model, whole_texts())


def test_searches_that_open_the_folder_never_fail(
    toy_text: Path, tmp_path: Path, pushed: Path
) -> None:
    model = toy.text_model(tmp_path / "new", seed=1, dim=16)
    done, failures, dims = threading.Event(), [], []

    def search() -> None:
        while not done.is_set():
            try:
                searcher = Searcher.open(pushed)
                assert len(searcher.search("fox hen", k=5)) == 5
                dims.append(searcher.index.dim)
                searcher.close()
            except DualencError as error:
                # Opened before the switch, and searched after it.
                if "since it was opened" not in str(error):
                    failures.append(error)

    reader = threading.Thread(target=search)
    reader.start()
    for _ in range(2):
        wait_for(lambda: dims[-1:] == [32] or failures)
        migrate(pushed, model)
        wait_for(lambda: dims[-1:] == [16] or failures)
        roll_back_table(str(pushed), None)
    done.set()
    reader.join()
    # Loading models in two threads at once may leave all logging disabled.
    logging.disable(logging.NOTSET)
    assert failures == []


def test_the_commands_of_the_page_run(tmp_path: Path, pushed: Path) -> None:
    model = toy.text_model(tmp_path / "new", seed=1)
    names = {"emb-engine": str(pushed), "NEW_MODEL": str(model)}
    lines = "\n".join(code(ROOT / "docs" / "migrate-databases.md", "bash")).splitlines()
    commands = [shlex.split(line)[1:] for line in lines if "emb-engine" in line]
    assert len(commands) == 2
    for words in commands:
        run(*[names.get(word, word) for word in words])
    check_searches(pushed, model, whole_texts())


def test_images_and_queries_are_refused(tmp_path: Path, postgres: str, pushed: Path) -> None:
    model = toy.text_model(tmp_path / "new", seed=1)
    entries = meta(pushed)
    (pushed / "meta.json").write_text(json.dumps({**entries, "modality": "image"}))
    with pytest.raises(DualencError, match="holds image, right, embedding; only documents"):
        migrate(pushed, model)
    (pushed / "meta.json").write_text(json.dumps({**entries, "target": "http://localhost:1"}))
    with pytest.raises(DualencError, match="only tables of PostgreSQL migrate in place"):
        migrate(pushed, model)
    assert len(Embeddings.open(tmp_path / "emb")) == COUNT
