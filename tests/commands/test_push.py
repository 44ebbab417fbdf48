"""`dualenc push`, and `search` and `evaluate retrieval` on what it leaves, as a user types them."""

from __future__ import annotations

import json
import pickle
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dualenc.search import Embeddings
from dualenc.search.exact import exact_search
from tests.commands import toy
from tests.commands.in_process import failure, run

FILTER = '{"must": [{"key": "year", "range": {"gte": 2004}}, {"key": "lang", "match": {"value": "no"}}]}'


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


@pytest.fixture
def engine(tmp_path: Path, emb: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Any, ...]:
    """A folder that `push` wrote, and the option that names its embedded store."""
    run("push", emb, tmp_path / "data", "--out", tmp_path / "engine")
    shown = capsys.readouterr().out
    assert "40 vectors of dimension 32 (cosine)" in shown
    assert "collection 'emb'; 40 sent" in shown
    assert f"--qdrant-path {tmp_path / 'data'}" in shown
    return tmp_path / "engine", "--qdrant-path", tmp_path / "data"


def results(capsys: pytest.CaptureFixture[str], index: Path, *words: Any) -> list[dict[str, Any]]:
    capsys.readouterr()
    run("search", index, "wing flow", *words, "--json")
    return json.loads(capsys.readouterr().out)["results"]


@pytest.mark.slow
def test_push_search_and_push_again(
    tmp_path: Path, emb: Path, engine: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run("push", emb, tmp_path / "data", "--out", tmp_path / "engine")
    assert "; 0 sent" in capsys.readouterr().out
    run("index", emb, "--out", tmp_path / "index")
    by_faiss = results(capsys, tmp_path / "index", "-k", 7)
    by_engine = results(capsys, *engine, "-k", 7)
    for name in ("id", "snippet", "year"):
        assert [hit[name] for hit in by_engine] == [hit[name] for hit in by_faiss]
    np.testing.assert_allclose([h["score"] for h in by_engine], [h["score"] for h in by_faiss], atol=2e-3)
    everything = pd.DataFrame(results(capsys, *engine, "-k", 40))
    wanted = everything[(everything.year >= 2004) & (everything.lang == "no")].id.tolist()
    assert [hit["id"] for hit in results(capsys, *engine, "-k", 40, "--filter", FILTER)] == wanted


@pytest.mark.slow
def test_evaluation_compares_the_engine_with_exact_search(
    tmp_path: Path, toy_text: Path, beir: Path, emb: Path, engine: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("evaluate", "retrieval", toy_text, beir, "--engine", *engine)
    run(*words, "--out", tmp_path / "all")
    assert "Engine against exact search" in capsys.readouterr().out
    metrics = json.loads((tmp_path / "all" / "metrics.json").read_text())
    assert metrics["engine"]["recall@10 of exact"] == 1.0
    assert metrics["engine"]["ms per query (p50)"] > 0
    by_exact, by_engine = metrics["systems"].values()
    assert by_engine["mean"] == pytest.approx(by_exact["mean"], abs=1e-6)

    run(*words, "--out", tmp_path / "some", "--filter", FILTER, "--keep-self-matches")
    lines = (tmp_path / "some" / "engine" / "run.trec").read_text().splitlines()
    by_query = pd.DataFrame([line.split() for line in lines]).groupby(0)[2].apply(list)
    documents = Embeddings.open(emb)
    queries = Embeddings.open(tmp_path / "some" / "embeddings" / "queries-test")
    assert documents.columns is not None
    columns = documents.columns.to_pandas()
    rows = np.flatnonzero((columns.year >= 2004) & (columns.lang == "no"))
    expected = exact_search(np.asarray(queries.vectors), np.asarray(documents.vectors)[rows], 99)[1]
    for query, order in zip(queries.ids, expected):
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
    engine: tuple[Any, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
) -> None:
    with sqlite3.connect(next(tmp_path.glob("data/collection/*/storage.sqlite"))) as database:
        database.execute("UPDATE points SET point = ?", (pickle.dumps(Payload(tmp_path / "ran")),))
    meta = json.loads((tmp_path / "engine" / "meta.json").read_text())
    (tmp_path / "engine" / "meta.json").write_text(json.dumps(meta | {"target": target.format(tmp_path)}))
    (tmp_path / "x:").mkdir()
    monkeypatch.chdir(tmp_path)
    evaluate = ("evaluate", "retrieval", toy_text, beir, "--out", tmp_path / "out", "--engine", engine[0])
    for words in (("search", engine[0], "wing"), ("serve", engine[0], "--port", 0), evaluate):
        assert "names an embedded Qdrant, whose files can run code" in failure(capsys, *words), words
    run("index", engine[0], beir, "--texts")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_mistakes_end_in_one_line(
    tmp_path: Path, toy_text: Path, beir: Path, emb: Path, engine: tuple[Any, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    run("index", emb, "--out", tmp_path / "index")
    other = toy.text_model(tmp_path / "other", seed=5)
    push = ("push", emb, tmp_path / "data", "--out")
    out = ("--out", tmp_path / "out")
    evaluate = ("evaluate", "retrieval", toy_text, beir, *out)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((*push, tmp_path / "data"), "name a folder other than --out"),
        ((*push, tmp_path / "index"), "holds no collection"),
        (("push", tmp_path, tmp_path / "data", *out), "meta.json: no such file"),
        ((*push, tmp_path / "out", "--metric", "ip"), "push with --replace"),
        (("push", emb, "http://127.0.0.1:9", *out), "refused"),
        (("search", *engine, "wing", "--where", "year>1"), "in its own language (JSON); give a filter"),
        (("search", tmp_path / "index", "wing", "--where", "yaer>1"), "no column 'yaer'"),
        (("search", tmp_path / "index", "wing", "--filter", "year>1"), "only an engine takes a filter"),
        (("search", tmp_path / "index", "wing", "--qdrant-path", "x"), "leave --qdrant-path out"),
        ((*evaluate, "--engine", *engine, "--where", "year>1"), "give --filter instead of --where"),
        ((*evaluate, "--filter", "year>1"), "are for an engine"),
        ((*evaluate, "--engine", *engine, "--filter", FILTER.replace("2004", "3000")), "none of 40 documents is kept"),
        ((*evaluate, "--engine", tmp_path / "index"), "was not written by `dualenc push`"),
        (("evaluate", "retrieval", other, beir, *out, "--engine", *engine), "from embeddings of another model"),
    ]
    for words, message in cases:
        assert message in failure(capsys, *words), words
    meta = json.loads((engine[0] / "meta.json").read_text())
    for name, value in {"model": 5, "model_checksum": 1, "side": "up", "output": 7}.items():
        (engine[0] / "meta.json").write_text(json.dumps(meta | {name: value}))
        message = failure(capsys, "search", *engine, "wing")
        assert f"meta.json: {name} is " in message
        assert "run `dualenc push` again" in message
