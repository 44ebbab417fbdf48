"""`dualenc push`, and `search` and `evaluate retrieval` on what it leaves, as a user types them."""

from __future__ import annotations

import json
import pickle
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dualenc.search import Embeddings
from dualenc.search.exact import exact_search
from tests.commands import toy
from tests.commands.in_process import failure, run

ENGINES = ("qdrant", "lancedb")
FILTERS = {
    "lancedb": "year >= 2004 AND lang IN ('no', 'x, y')",
    "qdrant": '{"must": [{"key": "year", "range": {"gte": 2004}}, {"key": "lang", "match": {"value": "no"}}]}',
}


@pytest.fixture(scope="module")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 documents with columns year and lang, and 8 queries."""
    folder = toy.write_beir(tmp_path_factory.mktemp("data") / "beir")
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"year": 2000 + number % 10, "lang": "no" if number % 2 else "en"}
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def emb(tmp_path_factory: pytest.TempPathFactory, toy_text: Path, beir: Path) -> Path:
    folder = tmp_path_factory.mktemp("embeddings") / "emb"
    run("embed", toy_text, beir, "--out", folder, "--columns", "year,lang", "--dtype", "float16")
    return folder


def found(capsys: pytest.CaptureFixture[str], *words: Any) -> list[dict[str, Any]]:
    capsys.readouterr()
    run("search", *words, "--json")
    return json.loads(capsys.readouterr().out)["results"]


def store(kind: str, folder: Path) -> tuple[Any, ...]:
    """What names the store of an embedded engine whose files can run code."""
    return ("--qdrant-path", folder / "data") if kind == "qdrant" else ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENGINES)
def test_push_search_and_push_again(
    tmp_path: Path, toy_text: Path, emb: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    words = ("push", emb, tmp_path / "data", "--to", kind, "--out", tmp_path / "engine")
    run(*words)
    shown = capsys.readouterr().out
    assert "40 vectors of dimension 32 (cosine, float16, quantization none)" in shown
    assert "collection 'emb'; 40 sent" in shown
    assert "recall@10 against exact search: 1.0000 (40 queries)" in shown
    run(*words)
    assert "; 0 sent" in capsys.readouterr().out

    run("index", emb, "--out", tmp_path / "index")
    by_faiss = found(capsys, tmp_path / "index", "wing flow", "-k", 7)
    engine = (tmp_path / "engine", "wing flow", *store(kind, tmp_path))
    by_engine = found(capsys, *engine, "-k", 7)
    assert [hit["id"] for hit in by_engine] == [hit["id"] for hit in by_faiss]
    assert [hit["snippet"] for hit in by_engine] == [hit["snippet"] for hit in by_faiss]
    np.testing.assert_allclose([h["score"] for h in by_engine], [h["score"] for h in by_faiss], atol=2e-3)

    everything = pd.DataFrame(found(capsys, *engine, "-k", 40))
    wanted = everything[(everything.year >= 2004) & (everything.lang == "no")].id.tolist()
    assert [hit["id"] for hit in found(capsys, *engine, "-k", 40, "--filter", FILTERS[kind])] == wanted
    run("search", *engine, "-k", 2)
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("rank", "id", "score", "year", "lang", "snippet"))
    assert f" {everything.year[0]} " in shown, "a year has no thousands"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENGINES)
def test_evaluation_compares_the_engine_with_exact_search(
    tmp_path: Path, toy_text: Path, beir: Path, emb: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    run("push", emb, tmp_path / "data", "--to", kind, "--out", tmp_path / "engine", "--recall-queries", 0)
    words = ("evaluate", "retrieval", toy_text, beir, "--engine", tmp_path / "engine", *store(kind, tmp_path))
    run(*words, "--out", tmp_path / "all")
    shown = capsys.readouterr().out
    assert "Engine against exact search" in shown
    metrics = json.loads((tmp_path / "all" / "metrics.json").read_text())
    assert metrics["engine"]["recall@10 of exact"] == 1.0
    assert metrics["engine"]["ms per query (p50)"] > 0
    exact, engine = metrics["systems"].values()
    for name, value in exact["mean"].items():
        assert engine["mean"][name] == pytest.approx(value, abs=1e-6), name

    run(*words, "--out", tmp_path / "some", "--filter", FILTERS[kind], "--keep-self-matches")
    lines = (tmp_path / "some" / "engine" / "run.trec").read_text().splitlines()
    by_query = pd.DataFrame([line.split() for line in lines]).groupby(0)[2].apply(list)
    documents, queries = Embeddings.open(emb), Embeddings.open(tmp_path / "some" / "embeddings" / "queries-test")
    assert documents.columns is not None
    columns = documents.columns.to_pandas()
    rows = np.flatnonzero((columns.year >= 2004) & (columns.lang == "no"))
    found_rows = exact_search(np.asarray(queries.vectors), np.asarray(documents.vectors)[rows], 99)[1]
    for query, order in zip(queries.ids, found_rows):
        assert sorted(by_query[query]) == sorted(documents.ids[rows[place]] for place in order)
        assert by_query[query][:3] == [documents.ids[rows[place]] for place in order[:3]]


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["data", "x://../data", "{}/data"])
def test_an_embedded_qdrant_that_only_the_folder_names_is_not_opened(
    tmp_path: Path,
    toy_text: Path,
    beir: Path,
    emb: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
) -> None:
    run("push", emb, tmp_path / "data", "--to", "qdrant", "--out", tmp_path / "engine", "--recall-queries", 0)
    assert f"--qdrant-path {tmp_path / 'data'}" in capsys.readouterr().out
    with sqlite3.connect(next(tmp_path.glob("data/collection/*/storage.sqlite"))) as database:
        database.execute("UPDATE points SET point = ?", (pickle.dumps(Payload(tmp_path / "ran")),))
    meta = json.loads((tmp_path / "engine" / "meta.json").read_text())
    (tmp_path / "engine" / "meta.json").write_text(json.dumps(meta | {"target": target.format(tmp_path)}))
    (tmp_path / "x:").mkdir()
    monkeypatch.chdir(tmp_path)
    evaluate = ("evaluate", "retrieval", toy_text, beir, "--out", tmp_path / "out", "--engine", tmp_path / "engine")
    for words in (("search", tmp_path / "engine", "wing"), ("serve", tmp_path / "engine", "--port", 0), evaluate):
        assert "names an embedded Qdrant, whose files can run code" in failure(capsys, *words), words
    run("index", tmp_path / "engine", beir, "--texts")
    assert "no URL of a Qdrant server" in failure(capsys, "push", emb, "x://../data", "--to", "qdrant", "--out", "new")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_store_that_is_named_is_trusted_aloud(
    tmp_path: Path, emb: Path, beir: Path, toy_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("push", emb, tmp_path / "data", "--to", "qdrant", "--out", tmp_path / "engine", "--recall-queries", 0)
    run(*words)
    assert "unpickles" not in capsys.readouterr().err, "a new one holds nothing"
    for again in (words, ("search", tmp_path / "engine", "wing", "--qdrant-path", tmp_path / "data")):
        run(*again)
        assert "unpickles what it holds, which can run code" in capsys.readouterr().err
    run("push", emb, tmp_path / "lake", "--to", "lancedb", "--out", tmp_path / "other", "--recall-queries", 0)
    run("index", emb, "--out", tmp_path / "index")
    evaluate = ("evaluate", "retrieval", toy_text, beir, "--out", tmp_path / "out")
    for others, message in (
        (("search", tmp_path / "other", "wing"), "names no embedded Qdrant"),
        (("search", tmp_path / "index", "wing"), "remembers no engine"),
        (evaluate, "name it with --engine"),
    ):
        assert message in failure(capsys, *others, "--qdrant-path", tmp_path / "data")


@pytest.mark.slow
def test_mistakes_end_in_one_line(
    tmp_path: Path, toy_text: Path, beir: Path, emb: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    push = ("push", emb, tmp_path / "data", "--to", "lancedb", "--out", tmp_path / "engine")
    run(*push)
    run("embed", toy_text, beir, "--out", tmp_path / "emb")
    run("index", tmp_path / "emb", "--out", tmp_path / "index")
    other = toy.text_model(tmp_path / "other", seed=5)
    evaluate = ("evaluate", "retrieval", toy_text, beir, "--out", tmp_path / "out")
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((*push[:-1], tmp_path / "data"), "TARGET and --out are the same folder"),
        ((*push[:-1], tmp_path / "emb"), "holds no collection"),
        (("push", tmp_path, *push[2:]), "meta.json: no such file"),
        (("push", tmp_path / "emb", *push[2:], "--collection", "emb"), "push with --replace"),
        ((*push, "--collection", "a b"), "--collection is 'a b'"),
        ((*push, "--batch-size", 0), "--batch-size is 0"),
        ((*push[:4], "elasticsearch"), "argument --to: invalid choice"),
        (("push", emb, tmp_path / "new", "--to", "parquet", "--metric", "ip"), "leave the options out"),
        (("push", emb, "http://127.0.0.1:9", "--to", "qdrant"), "no answer from Qdrant"),
        (("push", emb, "localhost:6333", "--to", "qdrant"), "write http://localhost:6333"),
        (("search", tmp_path / "engine", "wing", "--filter", "yaer>1"), "No field named yaer"),
        (("search", tmp_path / "engine", "wing", "--where", "year>1"), "in its own language (SQL); give a filter"),
        (("search", tmp_path / "index", "wing", "--where", "year>1"), "built without --columns"),
        (("search", tmp_path / "index", "wing", "--filter", "year>1"), "only an engine takes a filter"),
        ((*evaluate, "--engine", tmp_path / "engine", "--where", "year>1"), "give --filter instead of --where"),
        ((*evaluate, "--filter", "year>1"), "are for an engine"),
        ((*evaluate, "--engine", tmp_path / "engine", "--filter", "year>3000"), "none of 40 documents is kept"),
        ((*evaluate, "--engine", tmp_path / "index"), "was not written by `dualenc push`"),
        (
            ("evaluate", "retrieval", other, beir, "--out", tmp_path / "out", "--engine", tmp_path / "engine"),
            "from embeddings of another model",
        ),
    ]
    for words, message in cases:
        assert message in failure(capsys, *words), words
    run("push", tmp_path / "emb", *push[2:], "--collection", "emb", "--replace")
    monkeypatch.setitem(sys.modules, "lancedb", None)
    assert "pip install 'dualenc[lancedb]'" in failure(capsys, "search", tmp_path / "engine", "wing")
    monkeypatch.undo()
    (tmp_path / "data").rename(tmp_path / "moved")
    assert "does not exist; run `dualenc push` again" in failure(capsys, "search", tmp_path / "engine", "wing")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{"model": 5}, {"model": ["x"]}, {"model_checksum": 1}, {"side": "up"}, {"output": 7}]
)
def test_a_folder_with_an_unusable_meta_json_is_refused(
    tmp_path: Path, emb: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]
) -> None:
    run("push", emb, tmp_path / "lake", "--to", "lancedb", "--out", tmp_path / "engine", "--recall-queries", 0)
    path = tmp_path / "engine" / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = failure(capsys, "search", tmp_path / "engine", "wing")
    assert f"meta.json: {next(iter(change))} is " in message
    assert "run `dualenc push` again" in message


def test_push_to_parquet(tmp_path: Path, emb: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for new in (1, 0):
        run("push", emb, tmp_path / "out", "--to", "parquet")
        assert f"40 vectors of dimension 32: 1 files, {new} new" in capsys.readouterr().out
    read = pd.read_parquet(tmp_path / "out")
    opened = Embeddings.open(emb)
    assert read.id.tolist() == opened.ids
    np.testing.assert_array_equal(np.stack(read.vector.tolist()), np.asarray(opened.vectors, np.float32))
    assert read.year.tolist() == [2000 + number % 10 for number in range(40)]
