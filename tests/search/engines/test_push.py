"""Both embedded engines against numpy: what is pushed, found, filtered, resumed and refused."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.errors import DualencError, UnknownId
from dualenc.search import Embeddings
from dualenc.search.embeddings import EmbeddingWriter
from dualenc.search.engines import Engine, EngineIndex, open_engine, push
from dualenc.search.engines.parquet import export_parquet
from dualenc.search.engines.qdrant import Qdrant
from tests.search.engines.made import KINDS, LANGUAGES

NUM, DIM = 120, 16
ENGINES = ("qdrant", "lancedb")


def vectors(count: int = NUM, unit: bool = True, seed: int = 0) -> np.ndarray:
    made = np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True) if unit else made


@functools.cache
def frame(count: int = NUM) -> pd.DataFrame:
    random = np.random.default_rng(1)

    def some(values: list[Any]) -> list[Any]:
        return [None if random.random() < 0.2 else values[random.integers(len(values))] for _ in range(count)]

    columns = {"year": [2018, 2019, 2020], "weight": [-1.5, 0.0, 2.0], "lang": list(LANGUAGES), "open": [True, False]}
    return pd.DataFrame({name: pd.Series(some(values), dtype=object) for name, values in columns.items()})


@functools.cache
def embeddings(dtype: str = "float32", unit: bool = True, seed: int = 0) -> Embeddings:
    kinds = [pa.int64(), pa.float64(), pa.large_string(), pa.bool_()]
    arrays = [pa.array(frame()[name].tolist(), kind) for name, kind in zip(KINDS, kinds)]
    ids = [f"id {i} “é”" for i in range(NUM)]
    snippets = [f"snippet {i}" for i in range(NUM)]
    stored = vectors(unit=unit, seed=seed).astype(dtype)
    return Embeddings(ids, stored, {"normalized": unit}, snippets, pa.table(arrays, names=list(KINDS)))


QUERIES = vectors(5, seed=3)


SERVER = "DUALENC_TEST_QDRANT"
"""Environment variable with the URL of a Qdrant server, for the same tests over HTTP."""


def opened(kind: str, folder: Path) -> Iterator[Engine]:
    """An engine with no collection yet; of a server, a collection of our own that is removed afterwards."""
    if kind == "server" and SERVER not in os.environ:
        pytest.skip(f"no Qdrant server; name one in ${SERVER}")
    on_server = ("qdrant", os.environ.get(SERVER, ""), f"dualenc-test-{uuid.uuid4().hex}")
    engine = open_engine(*(on_server if kind == "server" else (kind, str(folder / "data"), "items")))
    yield engine
    if kind == "server":
        engine.client.delete_collection(engine.collection)
    engine.close()


@pytest.fixture(params=(*ENGINES, "server"))
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    yield from opened(request.param, tmp_path)


@pytest.fixture(scope="module", params=(*ENGINES, "server"))
def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineIndex]:
    for engine in opened(request.param, tmp_path_factory.mktemp("engine")):
        yield push(embeddings(), engine)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "dtype"), [("cosine", "float16"), ("ip", "float32")])
def test_results_are_those_of_numpy(engine: Engine, metric: Any, dtype: str) -> None:
    pushed = embeddings(dtype, unit=False)
    index, sent = push(pushed, engine, metric=metric)
    assert sent == NUM
    assert index.meta["recall_at_10"] == 1.0
    queries = vectors(7, unit=False, seed=5)
    stored = np.asarray(pushed.vectors, np.float64)
    if metric == "cosine":
        stored = stored / np.linalg.norm(stored, axis=1, keepdims=True)
        asked = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    else:
        asked = queries
    scores = asked @ stored.T
    for row, hits in enumerate(index.search(queries, k=5)):
        best = np.argsort(-scores[row])[:5]
        assert [hit.id for hit in hits] == [pushed.ids[i] for i in best]
        np.testing.assert_allclose([hit.score for hit in hits], scores[row][best], rtol=3e-3, atol=3e-3)
        assert hits[0].snippet == f"snippet {best[0]}"
        assert hits[0].columns == {k: v for k, v in frame().iloc[best[0]].items() if v is not None}
    assert len(index.search(queries[0], k=NUM + 5)[0]) == NUM


FILTERS = {
    "lancedb": "year >= 2019 AND lang IN ('en', 'it''s') AND NOT open",
    "qdrant": json.dumps(
        {
            "must": [
                {"key": "year", "range": {"gte": 2019}},
                {"key": "lang", "match": {"any": ["en", "it's"]}},
                {"key": "open", "match": {"value": False}},
            ]
        }
    ),
}


@pytest.mark.slow
def test_a_filter_in_the_language_of_the_engine(filled: EngineIndex) -> None:
    rows = frame()
    met = np.flatnonzero((rows.year >= 2019) & rows.lang.isin(["en", "it's"]) & (rows.open == False))  # noqa: E712
    text = FILTERS[filled.engine.kind]
    assert sorted(filled.engine.ids(text)) == sorted(embeddings().ids[row] for row in met)
    query = vectors(1, seed=100)[0]
    best = met[np.argsort(-(vectors()[met] @ query), kind="stable")][:4]
    assert [hit.id for hit in filled.search(query, 4, text)[0]] == [embeddings().ids[row] for row in best]
    matching = filled.matching(embeddings(), text)
    asked = vectors(3, seed=1)
    assert filled.recall(matching, asked, found=filled.search(asked, 11, text)) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "yaer > 1", "{}}", '{"must": [{"keys": 1}]}', "year >", "drop table items"])
def test_a_filter_that_the_engine_does_not_understand(filled: EngineIndex, text: str) -> None:
    if not text:
        assert len(filled.search(QUERIES, 3, text)[0]) == 3
        return
    with pytest.raises(DualencError, match=r"No field|Invalid input|LanceDB says|no Qdrant filter") as error:
        filled.search(QUERIES, 3, text)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_same_again_sends_nothing_and_changes_nothing(engine: Engine) -> None:
    first, sent = push(embeddings(), engine, batch_size=25)
    before = [[hit._replace(score=round(hit.score, 4)) for hit in hits] for hits in first.search(QUERIES, k=20)]
    again, sent_again = push(embeddings(), engine, batch_size=50)
    assert (sent, sent_again) == (NUM, 0)
    assert engine.num_stored(embeddings().ids) == NUM
    after = [[hit._replace(score=round(hit.score, 4)) for hit in hits] for hits in again.search(QUERIES, k=20)]
    assert after == before
    assert again.meta == first.meta


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", [0, 3])
def test_an_interrupted_push_sends_only_what_is_missing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    calls, add = itertools.count(), engine.add

    def failing(*batch: Any) -> None:
        if next(calls) == fails_at:
            raise KeyboardInterrupt
        add(*batch)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "add", failing)
        with pytest.raises(KeyboardInterrupt):
            push(embeddings(), engine, batch_size=25)
    assert engine.num_stored(embeddings().ids) == 25 * fails_at
    index, sent = push(embeddings(), engine, batch_size=50)
    assert sent == NUM - 25 * fails_at
    hits = index.search(vectors()[:NUM], k=1)
    assert [hit[0].id for hit in hits] == embeddings().ids


KILLED = """
import os, sys
from tests.search.engines.test_push import embeddings, open_engine, push
engine = open_engine(sys.argv[1], sys.argv[2], "items")
add, calls = engine.add, []
def dying(*batch):
    calls.append(1)
    if len(calls) == 4:
        os.kill(os.getpid(), 9)
    add(*batch)
engine.add = dying
push(embeddings(), engine, batch_size=12)
"""


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.slow
def test_a_killed_push_is_resumed_by_another_process(tmp_path: Path, kind: str) -> None:
    run = subprocess.run([sys.executable, "-c", KILLED, kind, str(tmp_path / "data")], capture_output=True, check=False)
    assert run.returncode == -9, run.stderr
    engine = open_engine(kind, str(tmp_path / "data"), "items")
    assert engine.info() is not None
    assert engine.num_stored(embeddings().ids) == 36
    index, sent = push(embeddings(), engine)
    assert sent == NUM - 36
    assert index.meta["recall_at_10"] == 1.0
    engine.close()


@pytest.mark.slow
def test_rows_that_two_processes_have_appended_are_noticed(tmp_path: Path) -> None:
    engine = open_engine("lancedb", str(tmp_path / "data"), "items")
    push(embeddings(), engine)
    engine.add(next(embeddings().record_batches(20)))
    with pytest.raises(DualencError, match="holds duplicates or other rows; push with --replace"):
        push(embeddings(), engine)
    assert push(embeddings(), engine, replace=True)[1] == NUM


@pytest.mark.slow
def test_other_embeddings_are_refused_and_replaced_on_request(engine: Engine) -> None:
    push(embeddings(), engine)
    with pytest.raises(DualencError, match="holds other embeddings; push with --replace") as error:
        push(embeddings(seed=1), engine)
    assert "\n" not in str(error.value)
    with pytest.raises(DualencError, match="holds metric cosine; push with --replace"):
        push(embeddings(), engine, metric="ip")
    with pytest.raises(DualencError, match="holds quantization none; push with --replace"):
        push(embeddings(), engine, quantization="scalar")
    index, sent = push(embeddings(seed=1), engine, replace=True)
    assert sent == NUM
    hits = index.search(vectors(seed=1), k=1)
    assert [hit[0].id for hit in hits] == embeddings().ids


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["scalar", "binary"])
def test_compressed_vectors_are_scored_again(engine: Engine, quantization: Any) -> None:
    index, _ = push(embeddings(), engine, quantization=quantization)
    assert index.meta["recall_at_10"] > 0.9
    query = vectors(1, seed=9)[0]
    for hit in index.search(query, k=5)[0]:
        row = embeddings().ids.index(hit.id)
        assert hit.score == pytest.approx(float(vectors()[row] @ query), abs=1e-4)


def test_an_engine_folder_finds_its_collection_again(filled: EngineIndex, tmp_path: Path) -> None:
    filled.save(tmp_path / "engine")
    written = (tmp_path / "engine" / "meta.json").read_text()
    assert json.loads(written)["collection"] == "items"
    if not isinstance(filled.engine, Qdrant) or filled.engine.is_remote:  # its embedded mode is open already
        found = EngineIndex.open(tmp_path / "engine")
        query = vectors(1, seed=2)
        assert found.search(query, 3) == filled.search(query, 3)
    else:
        with pytest.raises(DualencError, match="another process uses this folder"):
            EngineIndex.open(tmp_path / "engine", qdrant_path=filled.engine.target)


@pytest.mark.parametrize(
    ("queries", "k", "message"),
    [
        (np.zeros((2, DIM + 1)), 3, "dimension"),
        (np.full((1, DIM), np.nan), 3, "not finite"),
        (np.zeros((1, DIM)), 0, "at least 1"),
    ],
)
def test_wrong_queries_are_refused(filled: EngineIndex, queries: np.ndarray, k: int, message: str) -> None:
    with pytest.raises(DualencError, match=message):
        filled.search(queries, k)


def test_vectors_of_known_ids_come_back(filled: EngineIndex) -> None:
    given = embeddings()
    wanted = [given.ids[row] for row in (17, 3, 40)]
    stored = filled.vectors(wanted)
    np.testing.assert_allclose(stored, given.vectors[[17, 3, 40]], atol=1e-5)
    with pytest.raises(UnknownId, match="has no item \"nobody' OR '1'='1\""):
        filled.vectors([wanted[0], "nobody' OR '1'='1"])


def test_collections_of_others_are_never_touched(tmp_path: Path) -> None:
    import lancedb
    from qdrant_client import QdrantClient, models

    lancedb.connect(tmp_path / "lance").create_table("items", pa.table({"id": ["theirs"]}))
    client = QdrantClient(path=str(tmp_path / "qdrant"))
    client.create_collection("items", vectors_config=models.VectorParams(size=DIM, distance=models.Distance.DOT))
    client.close()
    for kind, folder in (("lancedb", "lance"), ("qdrant", "qdrant")):
        engine = open_engine(kind, str(tmp_path / folder), "items")
        with pytest.raises(DualencError, match="holds no embeddings that dualenc pushed"):
            push(embeddings(), engine, replace=True)
        engine.close()
    assert lancedb.connect(tmp_path / "lance").open_table("items").count_rows() == 1


@pytest.mark.parametrize("kind", ENGINES)
def test_unusable_targets_are_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    wrong = {"file": "file", "qdrant": "full"}
    for name in {"file", wrong.get(kind, "file")}:
        with pytest.raises(DualencError, match=str(tmp_path / name)):
            open_engine(kind, str(tmp_path / name), "items")
    with pytest.raises(DualencError, match="--collection is"):
        open_engine(kind, str(tmp_path / "new"), "a/../b")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("kind", "url", "message"),
    [
        ("qdrant", "http://127.0.0.1:9", "no answer from Qdrant .*refused"),
        ("qdrant", "http://user:word@127.0.0.1:9", "carries a key or query; set QDRANT_API_KEY"),
        ("qdrant", "http://127.0.0.1:9?api_key=word", "carries a key or query"),
        ("qdrant", "http://127.0.0.1:port", "is no URL"),
        ("lancedb", "db://mine", "LanceDB says api_key is required"),
    ],
)
def test_unreachable_servers_are_reported_without_credentials(
    monkeypatch: pytest.MonkeyPatch, kind: str, url: str, message: str
) -> None:
    monkeypatch.setenv("QDRANT_API_KEY", "s3cret")
    with pytest.raises(DualencError, match=message) as error:
        push(embeddings(), open_engine(kind, url, "items"))
    assert "\n" not in str(error.value)
    assert "word" not in str(error.value)
    assert "s3cret" not in str(error.value)


class Failing(BaseHTTPRequestHandler):
    """A server that answers every request with the next status of a list, then with an acknowledgement."""

    statuses: ClassVar[list[int]] = []
    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.append((self.path, self.headers["api-key"]))
        status = self.statuses.pop(0) if self.statuses else 200
        answer = {"result": {"operation_id": 1, "status": "completed"}, "status": "ok", "time": 0.1}
        content = json.dumps(answer if status == 200 else {"status": {"error": "Not\nnow"}, "time": 0}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Qdrant]:
    """A collection on a server that fails: how Qdrant answers is not what these tests are about."""
    monkeypatch.setenv("QDRANT_API_KEY", "s3cret")
    monkeypatch.setattr(Failing, "seen", [])
    with HTTPServer(("127.0.0.1", 0), Failing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        engine = open_engine("qdrant", f"http://127.0.0.1:{server.server_port}", "items")
        assert isinstance(engine, Qdrant)
        yield engine
        engine.close()
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_a_batch_is_tried_again_while_the_server_is_busy(failing: Qdrant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failing, "statuses", [503, 429, 500])
    failing.add(next(embeddings().record_batches(1)))
    assert Failing.seen == [("/collections/items/points?wait=true", "s3cret")] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statuses", "message", "requests"),
    [
        ([401] * 9, "answers HTTP 401; set QDRANT_API_KEY", 5),
        ([400] * 9, "answers HTTP 400 .*Not", 5),
        ([503] * 9, "answers HTTP 503", 5),
    ],
)
def test_refusals_of_a_server_are_one_line(
    failing: Qdrant, monkeypatch: pytest.MonkeyPatch, statuses: list[int], message: str, requests: int
) -> None:
    monkeypatch.setattr(Failing, "statuses", statuses)
    with pytest.raises(DualencError, match=message) as error, failing.one_line_errors():
        failing.add(next(embeddings().record_batches(1)))
    assert "\n" not in str(error.value)
    assert "s3cret" not in str(error.value)
    assert len(Failing.seen) == requests


@pytest.mark.parametrize(("kind", "module"), [("qdrant", "qdrant_client"), ("lancedb", "lancedb")])
def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DualencError, match=rf"pip install 'dualenc\[{kind}\]'"):
        open_engine(kind, str(tmp_path / "new"), "items")


def test_parquet_is_read_by_pandas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualenc.search.engines.parquet.ROWS_PER_FILE", 1000)
    made = embeddings("float16")
    how = {"snippet": "text {}".format, "columns": pa.table({"year": pa.array(range(2500), pa.int64())})}
    writer = EmbeddingWriter(tmp_path / "emb", [f"d{i}" for i in range(2500)], DIM, "float16", {}, **how)
    matrix = vectors(2500).astype(np.float16)
    for number, rows in enumerate(writer.ranges):
        writer.write(number, matrix[rows.start : rows.stop])
    opened = writer.finish()
    num_files = 5  # 1,000 rows at most, and none across shards
    assert export_parquet(opened, tmp_path / "out") == (num_files, num_files)
    read = pd.read_parquet(tmp_path / "out")
    assert read["id"].tolist() == opened.ids
    assert read["year"].tolist() == list(range(2500))
    assert read["text"][7] == "text 7"
    np.testing.assert_array_equal(np.stack(read["vector"].tolist()), matrix.astype(np.float32))
    assert pq.read_schema(tmp_path / "out" / "part-00000.parquet").field("vector").type == pa.list_(pa.float32())

    (tmp_path / "out" / "part-00001.parquet").unlink()
    assert export_parquet(opened, tmp_path / "out") == (1, num_files), "only what is missing is written"
    assert export_parquet(opened, tmp_path / "out") == (0, num_files)
    with pytest.raises(DualencError, match="vectors of other embeddings; push with --replace"):
        export_parquet(made, tmp_path / "out")
    assert export_parquet(made, tmp_path / "out", replace=True) == (1, 1)
    assert len(pd.read_parquet(tmp_path / "out")) == NUM
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(DualencError, match="holds no export"):
        export_parquet(made, tmp_path / "mine", replace=True)
