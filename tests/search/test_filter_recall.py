"""Recall under filters of Qdrant's own engine and of FAISS indexes, against brute force;
regressions are noticed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import qdrant_client

from dualenc.cli import main
from dualenc.io.provenance import Provenance
from dualenc.search import Embeddings, Index
from dualenc.search.engines.factory import push_embeddings
from dualenc.search.engines.filter_recall import tune, tune_folder
from dualenc.search.where import parse_conditions
from tests.helpers.clusters import clustered, exact_rows
from tests.helpers.conditions import KINDS, met_by_pandas
from tests.helpers.edge_qdrant import EdgeClient
from tests.helpers.in_process import failure, run
from tests.helpers.pushed import embeddings, frame, vectors

pytestmark = pytest.mark.slow

NUM = 4000
SHARES = np.random.default_rng(0).random(NUM)
"""A random column: filters on it keep a share of the rows."""


def below(share: float) -> str:
    """A filter of Qdrant that keeps a share of the rows."""
    return json.dumps({"must": [{"key": "share", "range": {"lt": share}}]})


def brute_force(stored: np.ndarray, rows: np.ndarray, queries: np.ndarray) -> list[set[str]]:
    """The ids of the 10 nearest of some rows to each query."""
    return [set(map(str, rows[best])) for best in exact_rows(stored[rows], queries, 10)]


class LateIndexes(EdgeClient):
    """A server whose graph is built before its payload indexes."""

    fields: tuple[tuple[str, str, str], ...] = ()

    def create_payload_index(self, *field: str) -> None:
        self.fields = (*self.fields, field)  # type: ignore[assignment]

    def build(self, name: str) -> None:
        super().build(name)
        for _, *field in self.fields:
            super().create_payload_index(name, *field)


def test_qdrants_graph_is_built_for_the_filters_that_a_push_makes_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(1)
    stored = random.normal(size=(NUM, 32)).astype(np.float16)
    source = Embeddings(
        [str(row) for row in range(NUM)], stored, None, None, pa.table({"share": SHARES})
    )
    queries = random.normal(size=(240, 32)).astype(np.float32)
    filters = ["", below(0.2), below(0.05)]
    for name in ("ours", "late"):
        (tmp_path / name).mkdir()
    servers = {"ours": EdgeClient(tmp_path / "ours"), "late": LateIndexes(tmp_path / "late")}
    for server in servers.values():
        monkeypatch.setattr(qdrant_client, "QdrantClient", lambda server=server, **_: server)
        index, sent = push_embeddings(source, "http://edge", "items", metric="cosine")
        assert sent == NUM
    monkeypatch.setattr(qdrant_client, "QdrantClient", lambda **_: servers["ours"])
    index = push_embeddings(source, "http://edge", "items", metric="cosine")[0]
    folder = tmp_path / "engine"
    index.save(folder)
    measured = tune_folder(folder, index, queries, filters, 0.95)
    assert index.provenance.settings == {"hnsw_ef": 64}
    unit = np.float64(stored) / np.linalg.norm(np.float64(stored), axis=1, keepdims=True)
    recalls = []
    for number, filter in enumerate(filters):
        rows = np.flatnonzero((1, 0.2, 0.05)[number] > SHARES)
        asked = queries[1::2][number::3]
        for hits, best in zip(
            index.search(asked, 10, filter=filter), brute_force(unit, rows, asked)
        ):
            recalls.append(len({hit.id for hit in hits} & best) / 10)
    assert measured.recall == pytest.approx(np.mean(recalls), abs=0.003)
    assert measured.low >= 0.95
    assert [result["rows"] for result in measured.filters] == [10, 10, 10]
    run("evaluate", "engine", folder)
    # The same vectors on a server that has made the graph first.
    monkeypatch.setattr(qdrant_client, "QdrantClient", lambda **_: servers["late"])
    assert main(["evaluate", "engine", str(folder)]) == 1
    assert "below 0.95" in capsys.readouterr().err
    late = push_embeddings(source, "http://edge", "items", metric="cosine")[0]
    assert tune(late, queries, filters, 0.95).low >= 0.95
    assert late.provenance.settings == {"exact": True}, "no graph search suffices"


def test_conditions_of_qdrants_engine_are_those_of_pandas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EdgeClient(tmp_path)
    monkeypatch.setattr(qdrant_client, "QdrantClient", lambda **_: server)
    index = push_embeddings(embeddings(), "http://edge", "items")[0]
    # The package makes 1 of True.
    cases = (
        ["year>=2019"],
        ["year!=2018", "lang=en,it's"],
        ["weight=-1.5"],
        ["weight!=0", "year<2020"],
    )
    for words in cases:
        expected = {f"id {row} “é”" for row in np.flatnonzero(met_by_pandas(frame(), words))}
        hits = index.search(vectors(1), len(frame()), where=parse_conditions(words, KINDS))[0]
        assert {hit.id for hit in hits} == expected, words
        assert expected


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """An index of vectors around centres whose column `group` says on which side of the space each
    lies."""
    stored = clustered(NUM)
    group = np.where(stored[:, 0] > np.quantile(stored[:, 0], 0.8), "right", "left")
    columns = pa.table({"group": group, "share": SHARES})
    source = Embeddings(
        [str(row) for row in range(NUM)], stored, Provenance(normalized=True), None, columns
    )
    Index.build(source, factory="HNSW16", folder=tmp_path / "index")
    (tmp_path / "workload.jsonl").write_text(
        '{"filter": ""}\n{"filter": "group=right, share<0.5"}\n'
    )
    return tmp_path / "index"


def test_filters_of_an_index_are_exact_up_to_a_number_of_rows(index: Path) -> None:
    stored = clustered(NUM)
    queries = clustered(60, seed=1)
    searched = Index.open(index)
    right = stored[:, 0] > np.quantile(stored[:, 0], 0.8)
    for filter, rows in (
        ("group=right", right),
        ("group=left, share<0.1", ~right & (SHARES < 0.1)),
        ("", SHARES < 1),
    ):
        best = brute_force(stored, np.flatnonzero(rows), queries)
        for exact in (True, False) if filter else (True,):
            assert [
                {hit.id for hit in hits}
                for hits in searched.search(
                    queries, 10, exact=exact, **searched.workload_filter(filter)
                )
            ] == best
    searched.record(settings={"exact_rows": 0})
    approximate = [
        {hit.id for hit in hits} for hits in searched.search(queries, 10, where="group=right")
    ]
    best = brute_force(stored, np.flatnonzero(right), queries)
    assert np.mean([len(ids & nearest) / 10 for ids, nearest in zip(approximate, best)]) < 0.9


def test_recall_of_an_index_is_chosen_kept_and_checked(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("evaluate", "engine", index)
    assert "no recall was measured" in failure(capsys, *words)
    monkeypatch.setattr("dualenc.search.index.open.default_exact_rows", lambda dim: 30)
    run(*words, "--recall", 0.9, "--filters", tmp_path / "workload.jsonl")
    recorded = json.loads((index / "recall.json").read_text())
    assert recorded["low"] >= 0.9
    assert recorded["settings"] == {"exact_rows": 480}, (
        "30 and 120 do not reach the 400 rows of the filter"
    )
    assert Index.open(index, verify=True).provenance.settings == recorded["settings"]
    run(*words)
    (tmp_path / "gone.txt").write_text("7\n")
    (tmp_path / "workload.jsonl").write_text('{"filter": "year>2000"}\n')
    assert "no column 'year'" in failure(capsys, *words, "--filters", tmp_path / "workload.jsonl")
    meta = json.loads((index / "meta.json").read_text())
    (index / "meta.json").write_text(json.dumps(meta | {"settings": {"exact_rows": 0}}))
    capsys.readouterr()
    assert main(["evaluate", "engine", str(index)]) == 1
    assert "below 0.9" in capsys.readouterr().err


def test_the_measurement_follows_a_change_of_the_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = clustered(NUM)
    source = Embeddings(
        [str(row) for row in range(NUM)], stored, None, None, pa.table({"share": SHARES})
    )
    Index.build(source, factory="IVF16,Flat", folder=tmp_path / "index")
    (tmp_path / "workload.jsonl").write_text('{"filter": "share<0.5"}\n')
    run("evaluate", "engine", tmp_path / "index", "--filters", tmp_path / "workload.jsonl")
    (tmp_path / "gone.txt").write_text("7\n")
    run("remove", tmp_path / "index", tmp_path / "gone.txt")
    run("evaluate", "engine", tmp_path / "index")
    assert "recall@10 1.000" in capsys.readouterr().out
