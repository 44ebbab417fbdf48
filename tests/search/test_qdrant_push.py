"""Pushes to Qdrant: what is really there, readers while a push replaces, integers that are no
doubles."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import qdrant_client
from qdrant_client import models

from dualenc.errors import DualencError
from dualenc.io.provenance import Provenance
from dualenc.search import Embeddings
from dualenc.search.documents import open_documents
from dualenc.search.engines.factory import open_engine, push_embeddings
from dualenc.search.engines.pushed_folder import embeddings_fingerprint
from dualenc.search.engines.qdrant import QdrantIndex
from dualenc.search.where import meets, parse_conditions
from tests.helpers.edge_qdrant import EdgeClient
from tests.helpers.local_qdrant import CLIENT, url_of, use_folders
from tests.helpers.pushed import DIM, NUM, embeddings, vectors

IDS = embeddings().ids


class SharedClient:
    """One client on a folder for all that connect to it, as to a server."""

    def __init__(self, folder: Path) -> None:
        self.client = CLIENT(path=str(folder))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def close(self) -> None:
        """A server goes on."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    shared = SharedClient(tmp_path / "server")
    monkeypatch.setattr(qdrant_client, "QdrantClient", lambda **_: shared)
    yield shared
    shared.client.close()


def push(
    source: Embeddings | None = None, name: str = "items", **options: Any
) -> tuple[QdrantIndex, int]:
    return push_embeddings(source or embeddings(), "http://server", name, **options)


def collections(server: Any) -> list[str]:
    return sorted(each.name for each in server.get_collections().collections)


def found(index: QdrantIndex, seed: int = 0) -> list[str]:
    return [hits[0].id for hits in index.search(vectors(seed=seed), k=1)]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("deleted", [slice(0, 100), slice(50, 60), slice(None)])
def test_a_push_sends_the_points_that_are_not_there(
    server: Any, deleted: slice, replace: bool
) -> None:
    push()
    points = [point.id for point in server.scroll("items", limit=NUM, with_payload=["id"])[0]]
    names = {point.id: point.payload["id"] for point in server.scroll("items", limit=NUM)[0]}
    gone = [point for point in points if names[point] in IDS[deleted]]
    server.delete("items", models.PointIdsList(points=gone))
    index, sent = push(replace=replace)
    assert sent == len(gone) == len(IDS[deleted])
    assert found(index) == IDS
    assert push()[1] == 0


def test_points_of_others_are_said_and_removed_on_request(
    tmp_path: Path, server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    index = push()[0]
    index.save(tmp_path / "engine")
    server.upsert("items", [models.PointStruct(id=7, vector=[1.0] * DIM)])
    assert "7" in {hit.id for hit in index.search(np.ones((1, DIM)), 5)[0]}
    assert push()[1] == 0
    assert "has rows that are not from these embeddings: 1; --replace removes them" in caplog.text
    with pytest.raises(
        DualencError, match=r"holds 121 vectors, and 120 were pushed; run .* with --replace"
    ):
        open_documents(tmp_path / "engine", tmp_path / "work")
    assert push(replace=True)[1] == 0
    assert server.count("items").count == NUM
    assert len(open_documents(tmp_path / "engine", tmp_path / "work")) == NUM
    with pytest.raises(DualencError, match="no vector of 'theirs' is stored any more"):
        index.vectors(["theirs"])


def test_the_old_embeddings_are_found_until_all_new_ones_are_stored(
    tmp_path: Path, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    push()[0].save(tmp_path / "engine")
    reader = open_engine(tmp_path / "engine")
    monkeypatch.setattr(QdrantIndex, "batch_rows", 30)
    add = QdrantIndex.add
    calls = []

    def watched(index: QdrantIndex, *batch: Any) -> None:
        add(index, *batch)
        calls.append(1)
        for old in (reader, open_engine(tmp_path / "engine")):
            assert found(old) == IDS

    monkeypatch.setattr(QdrantIndex, "add", watched)
    index, sent = push(embeddings(seed=1), replace=True)
    assert (sent, len(calls)) == (NUM, 4)
    assert found(index, seed=1) == IDS
    for read in (
        lambda: found(reader),
        lambda: reader.vectors(IDS[:2]),
        lambda: reader.texts_by_id(),
    ):
        with pytest.raises(
            DualencError, match="were replaced or removed since it was opened; open it again"
        ):
            read()
    with pytest.raises(DualencError, match="is gone, or holds other embeddings"):
        open_engine(tmp_path / "engine")
    assert len(collections(server)) == 1


def test_a_collection_of_an_earlier_version_is_filled_and_replaced(
    tmp_path: Path, server: Any
) -> None:
    """It had the name itself, without an alias."""
    index = push(name="new")[0]
    index.save(tmp_path / "engine")
    path = tmp_path / "engine" / "meta.json"
    path.write_text(path.read_text().replace('"new"', '"items"'))
    size = models.VectorParams(size=DIM, distance=models.Distance.COSINE)
    server.create_collection("items", size, metadata={"dualenc": index.items_checksum})
    assert push()[1] == NUM
    reader = open_engine(tmp_path / "engine")
    assert found(reader) == IDS
    assert found(push(embeddings(seed=1), replace=True)[0], seed=1) == IDS
    assert "items" not in collections(server)
    with pytest.raises(DualencError, match="were replaced or removed since it was opened"):
        found(reader)


def test_what_replaced_pushes_have_left_is_removed_and_nothing_else(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(name="items-2")
    push()
    server.update_collection_aliases(
        [
            models.CreateAliasOperation(
                create_alias=models.CreateAlias(
                    collection_name=collections(server)[0], alias_name="production"
                )
            )
        ]
    )
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(QdrantIndex, "swap", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        push(embeddings(seed=1), replace=True)
    assert len(collections(server)) == 3
    assert found(push()[0]) == IDS
    push(embeddings(seed=2), replace=True)
    assert len(collections(server)) == 2
    # An alias of the user's own on a collection that was pushed for another name.
    push(embeddings(seed=3), "production", replace=True)
    assert found(push(embeddings(), "items-2")[0]) == IDS
    assert len(collections(server)) == 3


def test_the_loser_of_two_replacements_says_so(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    push()
    monkeypatch.setattr(QdrantIndex, "batch_rows", 50)
    add = QdrantIndex.add
    calls = []

    def raced(index: QdrantIndex, *batch: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            push(embeddings(seed=2), replace=True)
        add(index, *batch)

    monkeypatch.setattr(QdrantIndex, "add", raced)
    with pytest.raises(
        DualencError, match="another process has removed or replaced it; run `dualenc push` again"
    ):
        push(embeddings(seed=1), replace=True)
    assert found(push(embeddings(seed=2))[0], seed=2) == IDS
    assert len(collections(server)) == 1


KILLED = """
import os, sys
import pytest
from dualenc.search.engines.factory import push_embeddings
from dualenc.search.engines.qdrant import QdrantIndex
from tests.helpers.local_qdrant import use_folders
from tests.helpers.pushed import embeddings
use_folders(pytest.MonkeyPatch())
function, call = sys.argv[2], int(sys.argv[3])
original = getattr(QdrantIndex, function)
calls = []
def dying(*arguments):
    calls.append(1)
    if len(calls) == call:
        os.kill(os.getpid(), 9)
    return original(*arguments)
setattr(QdrantIndex, function, dying)
QdrantIndex.batch_rows = 12
push_embeddings(embeddings(seed=1), sys.argv[1], "items", replace=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "call", "stored"), [("add", 4, 36), ("swap", 1, NUM), ("_delete_own", 1, NUM)]
)
def test_a_killed_replacement_leaves_the_old_points_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, call: int, stored: int
) -> None:
    use_folders(monkeypatch)
    url = url_of(tmp_path / "store")
    push_embeddings(embeddings(), url, "items")[0].close()
    words = [sys.executable, "-c", KILLED, url, function, str(call)]
    assert subprocess.run(words, capture_output=True, check=False).returncode == -9
    checksum = embeddings_fingerprint(embeddings(seed=1), "cosine")
    if function != "_delete_own":
        index = push_embeddings(embeddings(), url, "items")[0]
        assert found(index) == IDS
        assert index.leftovers() == [f"items-{checksum[:12]}"]
        index.close()
    index, sent = push_embeddings(embeddings(seed=1), url, "items", replace=True)
    # What a finished push did not get to remove stays until the next replacement.
    assert bool(index.leftovers()) == (function == "_delete_own")
    assert sent == NUM - stored
    assert found(index, seed=1) == IDS
    index.close()
    index = push_embeddings(embeddings(seed=2), url, "items", replace=True)[0]
    assert len(index.client.get_collections().collections) == 1
    index.close()


BIG = [
    *((1 << 53) + row for row in range(-3, 4)),
    *(1_700_000_000_000_000_000 + row for row in range(6)),
]
BIG += [
    (1 << 63) - 1,
    (1 << 63) - 2,
    -(1 << 63),
    -(1 << 63) + 1,
    1 << 60,
    (1 << 60) - 1,
    (1 << 60) + 1,
    0,
    None,
]
ORDERED = [value for value in BIG if value not in (None, -(1 << 63))]
WORDS = [f"ns{sign}{value}" for sign in ("<", "<=", ">", ">=", "=", "!=") for value in ORDERED]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["client", "engine"])
def test_integers_beyond_the_doubles_compare_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "server").mkdir()
    client: Any = (
        EdgeClient(tmp_path / "server") if kind == "engine" else SharedClient(tmp_path / "server")
    )
    monkeypatch.setattr(qdrant_client, "QdrantClient", lambda **_: client)
    table = pa.table({"ns": pa.array(BIG, pa.int64())})
    ids = [f"i{row}" for row in range(len(BIG))]
    index = push(Embeddings(ids, vectors(len(BIG)), Provenance(normalized=True), None, table))[0]
    for word in WORDS:
        conditions = parse_conditions([word], index.column_kinds)
        expected = {name for name, met in zip(ids, meets(conditions, table)) if met}
        assert {
            hit.id for hit in index.search(vectors(1), len(BIG), where=conditions)[0]
        } == expected, word


def test_a_filter_that_the_client_would_round_is_refused(server: Any) -> None:
    index = push()[0]
    for filter in (
        '{"must": [{"key": "year", "range": {"gte": 1700000000000000001}}]}',
        '{"must_not": {"should": [{"key": "year", "range": {"lt": -1700000000000000001}}]}}',
    ):
        with pytest.raises(
            DualencError, match="Qdrant rounds numbers beyond 2\\^53; write --where for that"
        ):
            index.search(vectors(1), 3, filter=filter)
    fine = '{"must": [{"key": "year", "range": {"gte": 9007199254740992}}]}'
    assert index.search(vectors(1), 3, filter=fine) == [[]]


def test_only_what_may_pass_is_said_to_resume(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    index = push()[0]
    monkeypatch.setattr(server, "query_points", lambda *_, **__: os.stat("/nowhere"), raising=False)
    with pytest.raises(DualencError, match="No such file") as error:
        index.search(vectors(1), 3)
    assert "resumes" not in str(error.value)
    # Nobody listens there.
    monkeypatch.setattr(qdrant_client, "QdrantClient", CLIENT)
    with pytest.raises(DualencError, match="refused") as error:
        push_embeddings(embeddings(), "http://127.0.0.1:9", "items")
    assert "\n" not in str(error.value)
