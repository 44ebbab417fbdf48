"""A collection of Qdrant gets another model's vectors: points, settings, refusals, rollbacks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qdrant_client
from qdrant_client import models

from dualenc.data import Corpus
from dualenc.encoders import load_model
from dualenc.errors import DualencError
from dualenc.search.embed.encode import embed
from dualenc.search.engines import qdrant_migration, qdrant_owner
from dualenc.search.engines.qdrant_collection import KEY, MARK
from dualenc.workflows import migrate_collection as workflow
from tests.helpers import toy
from tests.helpers.http_qdrant import http_server
from tests.helpers.in_process import failure, run
from tests.helpers.local_qdrant import CLIENT
from tests.helpers.migrated_collection import (
    URL,
    all_points,
    check_points,
    make_collection,
    marks_of,
    migrate,
    old_vectors,
    searched,
    vector_in,
)
from tests.helpers.migrated_table import OLD_DIM, embedded
from tests.helpers.pages import code
from tests.helpers.served_qdrant import ServedClient

pytestmark = pytest.mark.slow

NAMED = [True, False]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrate-databases.md"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qdrant_owner, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(qdrant_migration, "SETTLE_SECONDS", 0.1)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    client = ServedClient(None)
    monkeypatch.setattr(qdrant_client, "QdrantClient", lambda *_, **__: client)
    yield client
    client.client.close()


def back(name: str, **options: Any) -> Any:
    return workflow.roll_back_collection(URL, name, **options)


def test_a_named_vector_is_added_and_the_old_one_removed(served: Any, toy_text: Path) -> None:
    texts = make_collection(served, "docs", True)
    report = migrate("docs", toy_text)
    assert (report.state, report.missing) == ("switched", 0)
    collection, vector, is_new = searched(served, "docs")
    assert (collection, vector[:9], is_new) == ("docs", "toy-text-", True)
    assert report.place == f"vector {vector!r}"
    vectors = served.get_collection("docs").config.params.vectors
    assert {name: each.size for name, each in vectors.items()} == {"old": OLD_DIM, vector: 32}
    check_points(served, "docs", toy_text, dict(enumerate(texts)))
    query = embedded(toy_text, texts[7:8])[0].tolist()
    assert served.query_points("docs", query, using=vector, limit=1).points[0].id == 7
    old = old_vectors(60)
    for point in all_points(served, "docs"):
        expected = old[point.id] / np.linalg.norm(old[point.id])
        np.testing.assert_allclose(point.vector["old"], expected, atol=1e-6)
    assert workflow.finish_collection(URL, "docs").state == "finished"
    assert list(served.get_collection("docs").config.params.vectors) == [vector]
    assert marks_of(served, "docs") == []
    assert migrate("docs", toy_text).state == "finished"
    with pytest.raises(DualencError, match="the old vectors are gone"):
        back("docs")


def test_settings_of_the_old_vector_are_those_of_the_new_one(
    served: Any, toy_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = toy.texts(5)
    params = models.VectorParams(
        size=4,
        distance=models.Distance.DOT,
        datatype=models.Datatype.FLOAT16,
        hnsw_config=models.HnswConfigDiff(m=8),
        quantization_config=models.ScalarQuantization(
            scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8)
        ),
        on_disk=True,
    )
    served.create_collection("docs", {"a": params, "b": params})
    points = [
        models.PointStruct(id=i, vector={}, payload={"a text.": t}) for i, t in enumerate(texts)
    ]
    served.upsert("docs", points)
    asked: list[Any] = []
    for name in ("create_vector_name", "update_collection"):
        monkeypatch.setattr(served, name, recording(served, name, asked), raising=False)
    with pytest.raises(DualencError, match=r"'a', 'b' could be --vector; name it: --vector NAME"):
        migrate("docs", toy_text)
    columns = workflow.TableColumnNames(vector="a")
    assert migrate("docs", toy_text, columns=columns).missing == 0
    [dense] = [each[2].dense for each in asked if len(each) == 3]
    assert (dense.size, dense.distance, dense.datatype) == (32, "Dot", "float16")
    [changed] = [each["vectors_config"] for each in asked if "vectors_config" in each]
    [difference] = changed.values()
    assert difference.hnsw_config == params.hnsw_config
    assert difference.quantization_config == params.quantization_config
    assert difference.on_disk is True


def recording(client: Any, name: str, asked: list[Any]) -> Any:
    """A method of the client that notes its arguments."""
    method = getattr(client, name)

    def recorded(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments if len(arguments) > 1 else options)
        return method(*arguments, **options)

    return recorded


def test_a_second_collection_is_like_the_first(
    served: Any, toy_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    texts = make_collection(
        served,
        "docs-1",
        False,
        alias="docs",
        metadata={"team": "search"},
        sparse_vectors_config={"words": models.SparseVectorParams()},
    )
    words = models.SparseVector(indices=[3], values=[0.5])
    served.update_vectors("docs-1", [models.PointVectors(id=4, vector={"words": words})])
    schema = {"year": models.PayloadIndexInfo(data_type="integer", points=60)}
    seen = served.get_collection

    def with_index(name: str) -> Any:
        info = seen(name)
        return info.model_copy(update={"payload_schema": schema}) if name == "docs-1" else info

    monkeypatch.setattr(served, "get_collection", with_index, raising=False)
    monkeypatch.setattr(
        served, "create_payload_index", recording(served, "create_payload_index", asked), False
    )
    report = migrate("docs", toy_text)
    assert (report.state, report.place, report.missing) == ("switched", "", 0)
    target, vector, _ = searched(served, "docs")
    assert target.startswith("docs-")
    assert vector == ""
    assert asked == [(target, "year", "integer")]
    info = served.get_collection("docs")
    assert (info.config.params.vectors.size, info.config.metadata["team"]) == (32, "search")
    check_points(served, "docs", toy_text, dict(enumerate(texts)))
    [point] = served.retrieve("docs", [4], with_vectors=True)
    assert point.vector["words"] == words
    # The old collection answers under its own name, until the end.
    assert served.query_points("docs-1", old_vectors(60)[9].tolist()).points[0].id == 9
    workflow.finish_collection(URL, "docs")
    assert [each.name for each in served.get_collections().collections] == [target]
    assert [each.alias_name for each in served.get_aliases().aliases] == ["docs"]
    assert all(point.payload.keys() == {"body", "year"} for point in all_points(served, "docs"))


def test_a_name_that_is_no_alias_is_one_in_the_end(served: Any, toy_text: Path) -> None:
    texts = make_collection(served, "docs", False)
    report = migrate("docs", toy_text)
    target = searched(served, "docs")[0]
    assert report.place == f"collection {target!r}"
    check_points(served, "docs", toy_text, dict(enumerate(texts)))
    assert served.query_points("docs", old_vectors(60)[9].tolist()).points[0].id == 9
    workflow.finish_collection(URL, "docs")
    [alias] = served.get_aliases().aliases
    assert (alias.alias_name, alias.collection_name) == ("docs", target)
    check_points(served, "docs", toy_text, dict(enumerate(texts)))


def test_an_older_server_copies_named_vectors(
    served: Any, toy_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.version = "1.17.2"
    params = models.VectorParams(size=OLD_DIM, distance=models.Distance.COSINE)
    served.create_collection("docs-1", {"old": params, "other": params})
    vectors = old_vectors(20).tolist()
    points = [
        models.PointStruct(id=i, vector={"old": v, "other": v[::-1]}, payload={"t": t})
        for i, (v, t) in enumerate(zip(vectors, toy.texts(20)))
    ]
    served.upsert("docs-1", points)
    migrate("docs-1", toy_text, columns=workflow.TableColumnNames(vector="old"))
    target, vector, _ = searched(served, "docs-1")
    assert (target != "docs-1", vector) == (True, "old")
    for point in all_points(served, target):
        expected = np.array(vectors[point.id][::-1])
        np.testing.assert_allclose(
            point.vector["other"], expected / np.linalg.norm(expected), atol=1e-6
        )
        assert len(point.vector["old"]) == 32
    served.version = "1.15.5"
    with pytest.raises(DualencError, match=r"Qdrant 1\.15\.5 keeps no record of a migration"):
        migrate("docs-1", toy_text)


@pytest.mark.parametrize("named", NAMED)
def test_only_a_report_changes_nothing(served: Any, toy_text: Path, named: bool) -> None:
    make_collection(served, "docs", named)
    before = all_points(served, "docs")
    shown: list[Any] = []
    report = migrate("docs", toy_text, report_only=True, on_report=shown.append)
    assert shown == [report]
    assert report.state == "measured"
    assert all_points(served, "docs") == before
    assert not served.get_collection("docs").config.metadata
    # Random vectors find what another model finds by chance alone: 10 of 59.
    overlap, low, high = report.systems[0]["recall@10"]
    assert low < 10 / 59 < high
    assert 0 < overlap < 0.4


@pytest.mark.parametrize("named", NAMED)
def test_blank_texts_have_no_vector_and_are_counted(
    served: Any, toy_text: Path, caplog: pytest.LogCaptureFixture, named: bool
) -> None:
    make_collection(served, "docs", named)
    for id, text in {3: None, 4: "", 5: " \t\u200b"}.items():
        served.set_payload("docs", {"body": text}, points=[id])
    served.delete_payload("docs", ["body"], points=[6])
    columns = workflow.TableColumnNames(text="body")
    with caplog.at_level(logging.WARNING):
        assert migrate("docs", toy_text, columns=columns).missing == 4
    assert "4 texts have no vector" in caplog.text
    target, vector, _ = searched(served, "docs")
    without = {p.id for p in all_points(served, target) if not vector_in(p, vector)}
    assert without == {3, 4, 5, 6}
    assert served.count(target).count == 60


@pytest.mark.parametrize("named", NAMED)
def test_a_rollback_keeps_what_clients_wrote_after_the_switch(
    served: Any, toy_text: Path, named: bool
) -> None:
    make_collection(served, "docs-1", named, alias="docs")
    before = {point.id: vector_in(point, "old") for point in all_points(served, "docs-1")}
    migrate("docs", toy_text)
    target, vector, _ = searched(served, "docs")
    new: Any = embedded(toy_text, ["hen fox", "gnu"]).tolist()
    for id, text, value in ((5, "hen fox", new[0]), (1000, "gnu", new[1])):
        vectors = {vector: value} if named else value
        point = models.PointStruct(id=id, vector=vectors, payload={"body": text})
        served.upsert(target, [point])
    served.set_payload(target, {"year": 1}, points=[8])
    served.set_payload(target, {"body": "ant"}, points=[9])
    served.delete(target, models.PointIdsList(points=[7]))
    done = back("docs")
    # 5, 9 and 1000 have texts that are newer than the switch.
    assert (done.switched, done.missing) == (True, 3)
    points = {point.id: point for point in all_points(served, "docs")}
    assert points.keys() == (set(range(60)) | {1000}) - {7}
    texts = {5: "hen fox", 9: "ant", 1000: "gnu"}
    assert {id: points[id].payload["body"] for id in texts} == texts
    assert points[8].payload["year"] == 1
    for id, point in points.items():
        stored = vector_in(point, "old")
        assert not stored if id in texts else stored == before[id]
    assert searched(served, "docs")[0] == "docs-1"
    migrate("docs", toy_text)
    expected = {id: point.payload["body"] for id, point in points.items()}
    check_points(served, "docs", toy_text, expected)
    assert back("docs", discard=True).discarded
    assert marks_of(served, "docs-1") == []
    assert not (served.get_collection("docs").config.metadata or {}).get(KEY)
    assert len(served.get_collections().collections) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_late_writes_to_the_old_collection_never_replace_newer_points(
    served: Any, toy_text: Path, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    texts = make_collection(served, "docs-1", False, alias="docs")
    if strict:
        seen = served.get_collection

        def strictly(name: str) -> Any:
            info = seen(name)
            info.config.strict_mode_config = models.StrictModeConfigOutput(enabled=True)
            return info

        monkeypatch.setattr(served, "get_collection", strictly, raising=False)
    migrate("docs", toy_text)
    target = searched(served, "docs")[0]
    old, new = [1.0] * OLD_DIM, embedded(toy_text, ["hen fox"])[0].tolist()
    # Written to the new collection by the record, and to the old one by a client that is late.
    served.upsert(target, [models.PointStruct(id=5, vector=new, payload={"body": "hen fox"})])
    served.delete(target, models.PointIdsList(points=[6]))
    for id in (5, 8, 1000):
        served.upsert("docs-1", [models.PointStruct(id=id, vector=old, payload={"body": "gnu"})])
    served.set_payload("docs-1", {"body": "ant"}, points=[9])
    served.delete("docs-1", models.PointIdsList(points=[10]))
    migrate("docs", toy_text)
    expected = dict(enumerate(texts)) | {5: "hen fox", 8: "gnu", 1000: "gnu", 9: "ant"}
    del expected[6], expected[10]
    check_points(served, "docs", toy_text, expected)


def test_late_writes_get_the_named_vector(served: Any, toy_text: Path) -> None:
    texts = make_collection(served, "docs", True)
    migrate("docs", toy_text)
    vector = searched(served, "docs")[1]
    old, new = [1.0] * OLD_DIM, embedded(toy_text, ["hen fox"])[0].tolist()
    for id, vectors, text in ((5, {vector: new}, "hen fox"), (1000, {"old": old}, "gnu")):
        served.upsert("docs", [models.PointStruct(id=id, vector=vectors, payload={"body": text})])
    served.set_payload("docs", {"body": "ant"}, points=[9])
    migrate("docs", toy_text)
    expected = dict(enumerate(texts)) | {5: "hen fox", 1000: "gnu", 9: "ant"}
    check_points(served, "docs", toy_text, expected)
    # The vector that the client wrote is its own.
    assert MARK not in served.retrieve("docs", [5])[0].payload


@pytest.mark.parametrize("named", NAMED)
def test_a_text_that_changes_while_it_is_embedded_stays_pending(
    served: Any, toy_text: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Also if it is deleted, or changes back and forth."""
    texts = make_collection(served, "docs", named)
    embed = workflow.RowVectors.embed
    calls: list[int] = []

    def meanwhile(*arguments: Any) -> Any:
        found = embed(*arguments)
        calls.append(1)
        if len(calls) == 1:
            served.set_payload("docs", {"body": "gnu gnu"}, points=[1])
            served.delete("docs", models.PointIdsList(points=[2]))
        if len(calls) == 5:
            served.set_payload("docs", {"body": texts[1]}, points=[1])
        return found

    monkeypatch.setattr(workflow.RowVectors, "embed", meanwhile)
    migrate("docs", toy_text)
    expected = dict(enumerate(texts))
    del expected[2]
    check_points(served, "docs", toy_text, expected)


def test_judgements_stop_a_worse_model_and_queries_decide_the_order(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.write_beir(tmp_path / "beir", documents=60, queries=30)
    old = toy.text_model(tmp_path / "old", seed=1)
    new = toy.text_model(tmp_path / "new", seed=2)
    lines = (tmp_path / "beir" / "corpus.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    texts = [f"{row['title']} {row['text']}" for row in rows]
    params = models.VectorParams(size=32, distance=models.Distance.COSINE)
    served.create_collection("docs", {"v": params})
    vectors = embedded(Path(old), texts).tolist()
    points = [
        models.PointStruct(id=i, vector={"v": v}, payload={"doc": row["_id"], "body": text})
        for i, (v, row, text) in enumerate(zip(vectors, rows, texts))
    ]
    served.upsert("docs", points)
    columns = workflow.TableColumnNames(id="doc", text="body")
    options = {"columns": columns, "data": str(tmp_path / "beir")}
    with pytest.raises(DualencError, match="judged queries need the model of the old vectors"):
        migrate("docs", Path(new), **options)
    report = migrate("docs", Path(new), old_model=str(old), report_only=True, **options)
    assert report.facts["queries"] == 30
    assert report.systems[0]["ndcg@10"][0] > 0
    first: list[Any] = []
    scan = workflow.NamedVectorMigration.scan

    def noting(migration: Any, ids: Any) -> Any:
        first.append(ids)
        return scan(migration, ids)

    monkeypatch.setattr(workflow.NamedVectorMigration, "scan", noting)
    queries = str(tmp_path / "beir" / "queries.jsonl")
    options |= {"queries": queries, "anyway": True, "old_model": str(old)}
    migrate("docs", Path(new), **options)
    tower = load_model(str(old)).left
    asked = [json.loads(line)["text"] for line in Path(queries).read_text().splitlines()]
    corpus = Corpus(list(map(str, range(30))), asked)
    found = np.asarray(embed(tower, corpus, progress=False).vectors)
    nearest = np.argsort(-(found @ np.array(vectors).T), axis=1)[:, :10]
    counts = np.bincount(nearest.ravel(), minlength=60)
    expected = sorted(np.flatnonzero(counts), key=lambda i: (-counts[i], rows[i]["_id"]))
    assert first[0] == expected


def test_refusals(served: Any, toy_text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_collection(served, "docs", True)
    served.set_payload("docs", {"title": "a title"}, points=list(range(60)))
    several = models.VectorParams(
        size=4,
        distance=models.Distance.COSINE,
        multivector_config=models.MultiVectorConfig(comparator="max_sim"),
    )
    served.create_collection("multi", {"v": several})
    model = str(toy_text)
    base = ("migrate", URL, model)
    cases = [
        ((*base, "--table", "nothing"), "there is no such collection; name it: --table"),
        ((*base, "--table", "docs"), "'body', 'title' could be --text; name it: --text NAME"),
        ((*base, "--table", "docs", "--text", "bdy"), "has no 'bdy' (did you mean body?)"),
        ((*base, "--table", "docs", "--vector", "v"), "has no 'v'; --vector can be: 'old'"),
        ((*base, "--table", "docs", "--where", "year>2000"), "--where is of PostgreSQL"),
        ((*base, "--table", "multi"), "its vectors are several per point"),
        (base, "a database has many tables; name one: --table TABLE"),
        (("migrate", "http://u:s3cret@h", model, "--table", "docs"), "contains a key or query"),
        (("migrate", URL, "--table", "docs", "--finish"), "no migration is under way"),
    ]
    for words, message in cases:
        said = failure(capsys, *words)
        assert message in said
        assert "s3cret" not in said
    run(*base, "--table", "docs", "--text", "body", "--device", "cpu")
    said = failure(capsys, *base, "--table", "docs", "--text", "title")
    assert "the migration under way has --text 'body'; end it first" in said
    served.update_collection("docs", metadata={KEY: {"state": "filling"}})
    assert f"its metadata has a corrupt '{KEY}'; remove it" in failure(
        capsys, *base, "--table", "docs"
    )


def test_the_command_says_what_to_search_and_what_is_next(
    served: Any, toy_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_collection(served, "docs", False)
    run("migrate", URL, toy_text, "--table", "docs", "--device", "cpu")
    target = searched(served, "docs")[0]
    printed = capsys.readouterr().out
    assert f"'docs': search collection '{target}' with {toy_text} now; the old ones stay" in printed
    assert f"until dualenc migrate {URL} --table docs --finish, and come back by" in printed
    run("migrate", URL, "--table", "docs", "--rollback", "--discard")
    assert "searches find the old vectors again; those of" in capsys.readouterr().out
    make_collection(served, "named", True)
    run("migrate", URL, toy_text, "--table", "named", "--device", "cpu")
    vector = searched(served, "named")[1]
    assert f"'named': search vector '{vector}' with" in capsys.readouterr().out
    run("migrate", URL, "--table", "named", "--finish")
    assert "'named': the old vectors are dropped" in capsys.readouterr().out


@pytest.mark.parametrize("named", NAMED)
def test_what_the_page_tells_clients_to_do(served: Any, toy_text: Path, named: bool) -> None:
    texts = make_collection(served, "docs", named)
    migrate("docs", toy_text)
    [block] = [each for each in code(PAGE, "python") if "qdrant_client" in each]

    def embed_query(model: str, _: str) -> list[float]:
        return embedded(Path(model), texts[7:8])[0].tolist()

    names: dict[str, Any] = {"embed": embed_query}
    exec(compile(block, str(PAGE), "exec"), names)
    assert names["hits"].points[0].id == 7


@pytest.mark.parametrize("named", NAMED)
def test_requests_over_http(toy_text: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    """What the client sends, parsed by its own models, which refuse unknown fields."""
    monkeypatch.setattr(qdrant_client, "QdrantClient", CLIENT)
    behind = ServedClient()
    texts = make_collection(behind, "docs-1", named, alias="docs")
    old: Any = old_vectors(60)[3].tolist()
    payload = {"body": texts[3], "year": None}
    point = models.PointStruct(id=3, vector={"old": old} if named else old, payload=payload)
    behind.upsert("docs-1", [point])
    with http_server(behind) as url:
        options: dict[str, Any] = {"progress": False, "device": "cpu"}
        report = workflow.migrate_collection(url, "docs", str(toy_text), **options)
        assert (report.state, report.missing) == ("switched", 0)
        check_points(behind, "docs", toy_text, dict(enumerate(texts)))
        collection, vector, _ = searched(behind, "docs")
        new: Any = embedded(toy_text, ["hen fox"])[0].tolist()
        point = models.PointStruct(
            id=5, vector={vector: new} if named else new, payload={"body": "hen fox"}
        )
        behind.upsert(collection, [point])
        behind.set_payload(collection, {"year": 1}, points=[6])
        behind.delete(collection, models.PointIdsList(points=[7]))
        assert workflow.roll_back_collection(url, "docs").missing == 1
        assert behind.count("docs").count == 59
        workflow.migrate_collection(url, "docs", str(toy_text), **options)
        workflow.finish_collection(url, "docs")
    expected = dict(enumerate(texts)) | {5: "hen fox"}
    del expected[7]
    check_points(behind, "docs", toy_text, expected)
    assert behind.retrieve("docs", [3])[0].payload == payload
    behind.client.close()


@pytest.mark.parametrize("done", [0, 1, 2])
@pytest.mark.parametrize("switched", [False, True])
def test_a_server_that_dies_within_a_request_leaves_points_pending(
    served: Any, toy_text: Path, monkeypatch: pytest.MonkeyPatch, done: int, switched: bool
) -> None:
    texts = make_collection(served, "docs", True)
    if switched:
        migrate("docs", toy_text)
        # Clients that are late: a text alone, and a point without the new vector.
        served.set_payload("docs", {"body": "ant"}, points=[9])
        late = models.PointStruct(id=8, vector={"old": [1.0] * OLD_DIM}, payload={"body": "bee"})
        served.upsert("docs", [late])
        texts[9], texts[8] = "ant", "bee"
    batch = served.batch_update_points

    def dying(name: str, operations: list[Any], **options: Any) -> None:
        batch(name, operations[:done], **options) if done else None
        raise ConnectionError("the server is gone")

    with monkeypatch.context() as patch, pytest.raises(DualencError, match="the server is gone"):
        patch.setattr(served, "batch_update_points", dying, raising=False)
        migrate("docs", toy_text)
    migrate("docs", toy_text)
    check_points(served, "docs", toy_text, dict(enumerate(texts)))
