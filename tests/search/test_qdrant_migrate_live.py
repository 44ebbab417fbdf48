"""A collection of Qdrant migrates while clients read and write, and processes die."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qdrant_client
from qdrant_client import models

from dualenc.errors import DualencError
from dualenc.search.engines import qdrant_migration, qdrant_owner
from dualenc.search.engines.qdrant_named_vector import NamedVectorMigration
from dualenc.search.engines.qdrant_second_collection import SecondCollectionMigration
from dualenc.workflows import migrate_collection as workflow
from tests.helpers import toy
from tests.helpers.edge_server import EdgeServer
from tests.helpers.migrated_collection import (
    URL,
    Clients,
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
from tests.helpers.served_qdrant import ServedClient

pytestmark = pytest.mark.slow

FORK = multiprocessing.get_context("fork")
NAMED = [True, False]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qdrant_owner, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(qdrant_migration, "SETTLE_SECONDS", 0.3)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    client = ServedClient()
    monkeypatch.setattr(qdrant_client, "QdrantClient", lambda **_: client)
    yield client
    client.client.close()


@pytest.mark.parametrize("alias", ["docs", ""])
@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("engine", ["local mode", "edge"])
def test_clients_read_and_write_while_it_runs(
    served: Any, toy_text: Path, tmp_path: Path, engine: str, named: bool, alias: str
) -> None:
    if engine == "edge":
        served.client = EdgeServer(tmp_path)
    texts = make_collection(served, "docs-1", named, 400, alias)
    name = alias or "docs-1"
    clients = Clients(served, name, toy_text, texts)
    report = clients.run(lambda: migrate(name, toy_text))
    assert clients.errors == []
    assert report.state == "switched"
    assert clients.written == 400
    assert min(clients.searches.values()) > 5
    check_points(served, name, toy_text, clients.expected)
    workflow.finish_collection(URL, name)
    check_points(served, name, toy_text, clients.expected)
    assert marks_of(served, name) == []


@pytest.mark.parametrize("named", NAMED)
@pytest.mark.parametrize("engine", ["local mode", "edge"])
def test_clients_read_and_write_while_it_is_rolled_back(
    served: Any, toy_text: Path, tmp_path: Path, engine: str, named: bool
) -> None:
    if engine == "edge":
        served.client = EdgeServer(tmp_path)
    texts = make_collection(served, "docs-1", named, 400, alias="docs")
    migrate("docs", toy_text)
    clients = Clients(served, "docs", toy_text, texts)
    clients.run(lambda: workflow.roll_back_collection(URL, "docs"))
    assert clients.errors == []
    assert min(clients.searches.values()) > 5
    points = all_points(served, "docs")
    assert {point.id: point.payload["body"] for point in points} == clients.expected
    first = old_vectors(400)
    outdated = 0
    for point in points:
        text, vector = point.payload["body"], vector_in(point, "old")
        outdated += not vector
        if vector and text in clients.pool:
            known = [clients.old[clients.pool.index(text)]]
            known += [first[point.id]] if texts[point.id] == text else []
            alike = [np.dot(vector, each) / np.linalg.norm(each) for each in known]
            np.testing.assert_allclose(max(alike), 1, atol=1e-4)
    assert 0 < outdated < len(points)


KINDS = {True: NamedVectorMigration, False: SecondCollectionMigration}
KILLS = [
    ("start", 1, 0),
    ("start", 1, 1),
    ("scan", 1, 1),
    ("put", 1, 1),
    ("put", 4, 0),
    ("set_marks", 2, 0),
    ("remove_deleted", 1, 1),
    ("wait_for_index", 1, 0),
    ("switch", 1, 0),
    ("_point_aliases", 1, 0),
    ("switch", 1, 1),
    ("settle", 1, 1),
]


def die_at(patch: Any, owner: Any, function: str, call: int, after: int) -> None:
    """Let a process die before or after a call of a function."""
    original = getattr(owner, function)
    calls: list[int] = []

    def dying(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **options)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    patch.setattr(owner, function, dying)


def in_child(folder: Path, action: Any, *death: Any) -> None:
    """Run an action on a folder of collections, and die in it."""

    def run() -> None:
        with pytest.MonkeyPatch.context() as patch:
            client = ServedClient(folder)
            patch.setattr(qdrant_client, "QdrantClient", lambda **_: client)
            die_at(patch, *death)
            action()

    child = FORK.Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def place_of(named: bool, function: str) -> Any:
    if function == "set_marks":
        kind = KINDS[named]
        return __import__(kind.__module__, fromlist=["set_marks"])
    return KINDS[named]


@pytest.mark.parametrize(("function", "call", "after"), KILLS)
@pytest.mark.parametrize("named", NAMED)
def test_the_same_command_resumes_after_a_kill(
    tmp_path: Path,
    toy_text: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: bool,
    function: str,
    call: int,
    after: int,
) -> None:
    if named and function == "_point_aliases":
        pytest.skip("named vectors need no alias")
    folder = tmp_path / "server"
    first = ServedClient(folder)
    texts = make_collection(first, "docs-1", named, alias="docs")
    first.client.close()
    place = place_of(named, function)
    in_child(folder, lambda: migrate("docs", toy_text), place, function, call, after)
    served = ServedClient(folder)
    monkeypatch.setattr(qdrant_client, "QdrantClient", lambda **_: served)
    assert served.count("docs-1").count == 60
    served.set_payload("docs-1", {"body": "hen hen fox"}, points=[5])
    assert migrate("docs", toy_text).state == "switched"
    expected = dict(enumerate(texts)) | {5: "hen hen fox"}
    check_points(served, "docs", toy_text, expected)
    workflow.finish_collection(URL, "docs")
    check_points(served, "docs", toy_text, expected)
    assert marks_of(served, "docs") == []
    assert len(served.get_collections().collections) == 1
    served.client.close()


ENDS = {"finish": workflow.finish_collection, "rollback": workflow.roll_back_collection}


@pytest.mark.parametrize("function", ["unmark", "_delete", "write", "switch_back", "_bring_back"])
@pytest.mark.parametrize("end", list(ENDS))
@pytest.mark.parametrize("named", NAMED)
def test_a_killed_end_is_ended_by_the_same_command(
    tmp_path: Path,
    toy_text: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: bool,
    end: str,
    function: str,
) -> None:
    unused = {"finish": ("switch_back", "_bring_back"), "rollback": ("unmark", "_delete")}[end]
    if function in unused or (named and function in ("_delete", "_bring_back")):
        pytest.skip("not called")
    folder = tmp_path / "server"
    first = ServedClient(folder)
    texts = make_collection(first, "docs", named)
    with monkeypatch.context() as patch:
        patch.setattr(qdrant_client, "QdrantClient", lambda **_: first)
        migrate("docs", toy_text)
    first.client.close()
    owner = workflow.QdrantCollection if function == "write" else KINDS[named]
    in_child(folder, lambda: ENDS[end](URL, "docs"), owner, function, 1, 1)
    served = ServedClient(folder)
    monkeypatch.setattr(qdrant_client, "QdrantClient", lambda **_: served)
    ENDS[end](URL, "docs")
    if end == "rollback":
        assert served.count("docs").count == 60
        migrate("docs", toy_text)
        workflow.finish_collection(URL, "docs")
    check_points(served, "docs", toy_text, dict(enumerate(texts)))
    assert marks_of(served, "docs") == []
    served.client.close()


@pytest.mark.parametrize("named", NAMED)
def test_two_at_once_are_refused(served: Any, toy_text: Path, named: bool) -> None:
    make_collection(served, "docs", named)
    said = []

    def second(_: Any) -> None:
        for action in (lambda: migrate("docs", toy_text), lambda: ENDS["rollback"](URL, "docs")):
            with pytest.raises(DualencError) as error:
                action()
            said.append(str(error.value))

    migrate("docs", toy_text, on_report=second)
    assert len(said) == 2
    for line in said:
        assert "another migration of this collection is running; wait for its end" in line


def test_two_that_start_in_the_same_moment(served: Any, toy_text: Path) -> None:
    texts = make_collection(served, "docs", True)
    outcomes: list[str] = []
    together = threading.Barrier(2)

    def start() -> None:
        together.wait()
        try:
            outcomes.append(migrate("docs", toy_text).state)
        except DualencError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "switched" in outcomes
    check_points(served, "docs", toy_text, dict(enumerate(texts)))


def test_one_that_has_lost_the_collection_stops(
    served: Any, toy_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_collection(served, "docs", True)

    def take(_: Any) -> None:
        served.update_collection("docs", metadata={qdrant_owner.KEY: ["another", 1]})
        threading.Event().wait(0.4)

    with pytest.raises(DualencError, match="another migration of this collection is running"):
        migrate("docs", toy_text, on_report=take)
    assert served.get_collection("docs").config.metadata[qdrant_owner.KEY] == ["another", 1]


def test_another_model_is_refused_until_the_end(
    served: Any, toy_text: Path, tmp_path: Path
) -> None:
    toy.text_model(tmp_path / "third", seed=5)
    texts = make_collection(served, "docs", True)
    migrate("docs", toy_text)
    with pytest.raises(DualencError, match=r"a migration to .* is under way; resume it with that"):
        migrate("docs", tmp_path / "third")
    workflow.finish_collection(URL, "docs")
    migrate("docs", tmp_path / "third")
    check_points(served, "docs", tmp_path / "third", dict(enumerate(texts)))


@pytest.mark.nightly
@pytest.mark.parametrize("named", NAMED)
def test_twenty_kills_at_random_moments(
    tmp_path: Path,
    toy_text: Path,
    monkeypatch: pytest.MonkeyPatch,
    named: bool,
    record_property: Callable[[str, object], None],
) -> None:
    """Between them clients write to what the record names, and now and then it is rolled back."""
    random = np.random.default_rng(int(os.environ.get("DUALENC_TEST_SEED", "0")))
    folder = tmp_path / "server"
    client = ServedClient(folder)
    expected = dict(enumerate(make_collection(client, "docs-1", named, 200, alias="docs")))
    pool = sorted(set(toy.texts(120)))
    new, old = embedded(toy_text, pool), np.ones((len(pool), OLD_DIM))
    monkeypatch.setattr(qdrant_client, "QdrantClient", lambda **_: client)
    kills = 0
    states: list[bool] = []
    while kills < 20:
        client.client.close()

        def work() -> None:
            with pytest.MonkeyPatch.context() as patch:
                served = ServedClient(folder)
                patch.setattr(qdrant_client, "QdrantClient", lambda **_: served)
                migrate("docs", toy_text)

        child = FORK.Process(target=work)
        child.start()
        child.join(random.uniform(0.2, 3.0))
        child.kill()
        child.join()
        kills += child.exitcode == -signal.SIGKILL
        client = ServedClient(folder)
        collection, vector, is_new = searched(client, "docs")
        states.append(is_new)
        for id in random.integers(0, 260, size=4).tolist():
            row = int(random.integers(len(pool)))
            value: Any = (new if is_new else old)[row].tolist()
            point = models.PointStruct(
                id=id, vector={vector: value} if vector else value, payload={"body": pool[row]}
            )
            client.upsert(collection, [point])
            expected[id] = pool[row]
        gone = int(random.integers(0, 260))
        client.delete(collection, models.PointIdsList(points=[gone]))
        expected.pop(gone, None)
        if is_new and random.random() < 0.5:
            workflow.roll_back_collection(URL, "docs")
    migrate("docs", toy_text)
    check_points(client, "docs", toy_text, expected)
    workflow.finish_collection(URL, "docs")
    check_points(client, "docs", toy_text, expected)
    record_property("switched", sum(states))
    client.client.close()
