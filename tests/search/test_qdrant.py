"""Qdrant against numpy, by the exact search of its client: what is pushed, found, filtered, resumed
and refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qdrant_client
from hypothesis import given, settings
from hypothesis import strategies as st
from qdrant_client import models

from dualenc.errors import DualencError
from dualenc.search import Embeddings
from dualenc.search.engines.factory import push_embeddings
from dualenc.search.engines.qdrant import QdrantIndex
from dualenc.search.where import parse_conditions
from tests.helpers.conditions import KINDS, conditions, met_by_pandas
from tests.helpers.edge_qdrant import EdgeClient
from tests.helpers.local_qdrant import CLIENT, url_of, use_folders
from tests.helpers.pushed import DIM, NUM, check_results, embeddings, frame, vectors

TARGET = os.environ.get("DUALENC_TEST_QDRANT")
"""URL of a Qdrant server for the same tests over HTTP."""
FILTER = json.dumps(
    {
        "must": [
            {"key": "year", "range": {"gte": 2019}},
            {"key": "lang", "match": {"any": ["en", "it's"]}},
            {"key": "open", "match": {"value": False}},
        ]
    }
)


def pushed(
    folder: Path, source: Embeddings | None = None, **options: Any
) -> tuple[QdrantIndex, int]:
    index, sent = push_embeddings(
        source or embeddings(), TARGET or url_of(folder / "store"), "items", **options
    )
    index.close()
    return QdrantIndex(index.provenance), sent


@pytest.fixture(scope="module", autouse=True)
def local() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if TARGET is None:
            use_folders(patch)
        yield


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QdrantIndex]:
    index = pushed(tmp_path_factory.mktemp("qdrant"))[0]
    yield index
    index.close()


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "dtype"), [("cosine", "float16"), ("ip", "float32")])
def test_results_are_those_of_numpy(tmp_path: Path, metric: Any, dtype: str) -> None:
    source = embeddings(dtype, unit=False)
    index, sent = pushed(tmp_path, source, metric=metric)
    assert sent == NUM
    check_results(index, source, metric)
    index.close()


def test_a_filter_restricts_the_search(filled: QdrantIndex) -> None:
    rows = frame()
    met = np.flatnonzero(
        (rows.year >= 2019) & rows.lang.isin(["en", "it's"]) & (rows.open == False)  # noqa: E712
    )
    query = vectors(1, seed=100)[0]
    everything = filled.search(query, NUM, filter=FILTER)[0]
    assert sorted(hit.id for hit in everything) == sorted(embeddings().ids[row] for row in met)
    best = met[np.argsort(-(vectors()[met] @ query), kind="stable")][:4]
    assert [hit.id for hit in filled.search(query, 4, filter=FILTER)[0]] == [
        embeddings().ids[row] for row in best
    ]


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(conditions(), min_size=1, max_size=3))
def test_conditions_are_those_of_pandas(filled: QdrantIndex, words: list[str]) -> None:
    met = np.flatnonzero(met_by_pandas(frame(), words))
    hits = filled.search(vectors(1, seed=9), NUM, where=parse_conditions(words, KINDS))[0]
    assert {hit.id for hit in hits} == {embeddings().ids[row] for row in met}


def test_vectors_of_ids(filled: QdrantIndex) -> None:
    wanted = [embeddings().ids[row] for row in (17, 3, 40)]
    np.testing.assert_allclose(filled.vectors(wanted), vectors()[[17, 3, 40]], atol=1e-5)


@pytest.mark.parametrize("filter", ["year > 1", '{"must": [{"key": 3}]}', '{"must":[' * 3000])
def test_a_wrong_filter_is_one_line(filled: QdrantIndex, filter: str) -> None:
    with pytest.raises(DualencError, match="the filter is not a Qdrant filter") as error:
        filled.search(vectors(1), 3, filter=filter)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"), [({"k": 0}, "k is 0"), ({"nprobe": 3}, "nprobe is 3")]
)
def test_wrong_queries(filled: QdrantIndex, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DualencError, match=message):
        filled.search(np.zeros((1, DIM)), **options)


def test_a_collection_without_points_ends(tmp_path: Path) -> None:
    index = pushed(tmp_path)[0]
    index.remove_others([])
    assert index.count_rows() == 0
    assert index.texts_by_id() == {}
    index.close()


KILLED = """
import os, sys
import pytest
from dualenc.search.engines.factory import push_embeddings
from dualenc.search.engines.qdrant import QdrantIndex
from dualenc.search.where import parse_conditions
from tests.helpers.local_qdrant import use_folders
from tests.helpers.pushed import embeddings
use_folders(pytest.MonkeyPatch())
add = QdrantIndex.add
calls = []
def dying(*batch):
    calls.append(1)
    if len(calls) == 4:
        os.kill(os.getpid(), 9)
    add(*batch)
QdrantIndex.add = dying
QdrantIndex.batch_rows = 12
push_embeddings(embeddings(), sys.argv[1], "items")
"""


@pytest.mark.slow
def test_a_killed_push_is_resumed_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [sys.executable, "-c", KILLED, url_of(tmp_path / "store")]
    assert subprocess.run(words, capture_output=True, check=False).returncode == -9
    monkeypatch.setattr(QdrantIndex, "batch_rows", 30)
    index, sent = pushed(tmp_path)
    assert sent == NUM - 36
    assert [hits[0].id for hits in index.search(vectors(), k=1)] == embeddings().ids
    index.close()
    assert pushed(tmp_path)[1] == 0


@pytest.mark.slow
def test_other_embeddings_are_refused_and_replaced_on_request(tmp_path: Path) -> None:
    pushed(tmp_path)[0].close()
    for source, options in ((embeddings(seed=1), {}), (embeddings(), {"metric": "ip"})):
        with pytest.raises(
            DualencError,
            match="holds other embeddings, or with another metric; push with --replace",
        ):
            pushed(tmp_path, source, **options)
    index, sent = pushed(tmp_path, embeddings(seed=1), replace=True)
    assert sent == NUM
    assert [hits[0].id for hits in index.search(vectors(seed=1), k=1)] == embeddings().ids
    index.close()


def test_a_push_notices_that_another_one_has_replaced_its_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EdgeClient(tmp_path)
    monkeypatch.setattr(qdrant_client, "QdrantClient", lambda **_: server)
    monkeypatch.setattr(QdrantIndex, "batch_rows", 50)
    add = QdrantIndex.add

    def replaced(index: QdrantIndex, *batch: Any) -> None:
        add(index, *batch)
        server.metadata[index.beside] = {"dualenc": "of other embeddings"}

    monkeypatch.setattr(QdrantIndex, "add", replaced)
    with pytest.raises(DualencError, match="another process has removed or replaced it"):
        push_embeddings(embeddings(), "http://edge", "items")
    assert [server.count(name, exact=True).count for name in server.shards] == [50]
    assert not server.collection_exists("items")


def test_collections_of_others_are_never_touched(tmp_path: Path) -> None:
    client = CLIENT(path=str(tmp_path / "store"))
    client.create_collection(
        "items", vectors_config=models.VectorParams(size=DIM, distance=models.Distance.DOT)
    )
    client.close()
    with pytest.raises(DualencError, match="was not made by `dualenc push`"):
        push_embeddings(embeddings(), url_of(tmp_path / "store"), "items", replace=True)


@pytest.mark.parametrize(
    ("target", "collection", "message"),
    [
        ("{}/store", "items", "is not the URL of PostgreSQL or a Qdrant server"),
        ("http://127.0.0.1:9", "a/../b", "collection is 'a/../b'"),
        ("localhost:6333", "items", "is not the URL of PostgreSQL or a Qdrant server"),
        ("http://127.0.0.1:9", "items", "refused"),
        ("http://127.0.0.1:port", "items", "port"),
        ("http://user:word@127.0.0.1:9", "items", "contains a key or query; set QDRANT_API_KEY"),
        ("http://user:se/word@127.0.0.1:9", "items", "contains a key or query; set QDRANT_API_KEY"),
        (
            "mysql://user:word@127.0.0.1:9",
            "items",
            "is not the URL of PostgreSQL or a Qdrant server",
        ),
    ],
)
def test_unusable_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, collection: str, message: str
) -> None:
    monkeypatch.setenv("QDRANT_API_KEY", "s3cret")
    monkeypatch.setattr(qdrant_client, "QdrantClient", CLIENT)
    with pytest.raises(DualencError, match=message) as error:
        push_embeddings(embeddings(), target.format(tmp_path), collection)
    assert not any(part in str(error.value) for part in ("\n", "word", "s3cret"))


def test_a_missing_package_is_named(filled: QdrantIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    for module in ("qdrant", "qdrant_connection"):
        monkeypatch.delitem(sys.modules, f"dualenc.search.engines.{module}")
    with pytest.raises(DualencError, match=r"pip install 'dualenc\[qdrant\]'"):
        push_embeddings(embeddings(), filled.provenance.target, "items")
