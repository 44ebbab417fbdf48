"""An index that others change, or try to, while `dualenc migrate` is at work on it, stopped, or
killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from dualenc.data.store.vector_shards import Embeddings
from dualenc.io.files import locked
from dualenc.search import Index
from dualenc.search.migration.stages import SHARES, Migration
from dualenc.workflows import migrate_model
from tests.helpers import toy
from tests.helpers.folder_contents import contents
from tests.helpers.in_process import failure, found, run
from tests.helpers.index_changes import changes
from tests.helpers.waiting import wait_for

DOCUMENTS = 300
FORK = multiprocessing.get_context("fork")
AT_WORK = (
    "`dualenc migrate` is changing its model, and would undo the change; "
    "wait for its end, or stop it and run"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models, a collection, the index of the first model, and what to add and to remove."""
    folder = tmp_path_factory.mktemp("changes")
    toy.write_beir(folder / "beir", documents=DOCUMENTS, queries=40)
    for seed, name in enumerate(("old", "new", "third")):
        toy.text_model(folder / name, seed)
    words = ("--factory", "Flat", "--texts", "--bm25")
    run("index", folder / "old", folder / "beir", "--out", folder / "index", *words)
    rows = [{"_id": f"n{i}", "text": f"wing flutter {i}"} for i in range(5)]
    (folder / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "gone.txt").write_text("d1\nd2\n")
    return folder


@pytest.fixture
def index(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("dualenc.search.migration.stages.MIN_SAMPLE", 120)
    return Path(shutil.copytree(made / "index", tmp_path / "index"))


class Migrating:
    """`dualenc migrate` in a process that is stopped when it has embedded up to a share of the
    documents."""

    def __init__(self, index: Path, model: Path, stop: int) -> None:
        self.sign = index.with_name("sign")
        self.go = index.with_name("go")
        self.process = FORK.Process(target=self._run, args=(index, model, stop))
        self.process.start()
        wait_for(self.sign.exists)
        os.kill(self.pid, signal.SIGSTOP)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def _run(self, index: Path, model: Path, stop: int) -> None:
        embed = migrate_model._Steps._embed_documents

        def slow(steps: Any, rows: Any, name: str, bar: str) -> Embeddings:
            embedded = embed(steps, rows, name, bar)
            if name == ("sample" if stop == 0 else f"embeddings-{stop}"):
                self.sign.touch()
                wait_for(self.go.exists)  # stopped here
            return embedded

        migrate_model._Steps._embed_documents = slow  # type: ignore[method-assign]
        run("migrate", index, model)

    def go_on(self) -> None:
        self.go.touch()
        os.kill(self.pid, signal.SIGCONT)
        self.process.join()
        assert self.process.exitcode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.sign.unlink()


@pytest.fixture(params=[[0.0, *SHARES[1:]], [1.0]], ids=["mapped", "the old one"])
def served(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The shares at which the index is replaced: from the beginning on, or at the end alone."""
    shares: list[float] = request.param
    monkeypatch.setattr("dualenc.evaluation.migration_measures.served_shares", lambda _: shares)
    return shares


def check_whole(index: Path) -> None:
    """All documents are there, and texts and BM25 are theirs."""
    opened = Index.open(index)
    assert list(opened.ids) == [f"d{row}" for row in range(DOCUMENTS)]
    assert not opened.provenance.mapped
    run("verify", index)
    run("index", index, "--texts", "--bm25")


@pytest.mark.slow
@pytest.mark.parametrize("stop", [0, 60])
def test_a_change_while_a_migration_is_at_work_is_refused(
    made: Path, index: Path, served: list[float], stop: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be undone by the next replacement, in the first second as well as later."""
    migrating = Migrating(index, made / "new", stop)
    before = contents(index)
    for words in changes(made, index).values():
        line = failure(capsys, *words)
        assert line == f"{index}: {AT_WORK} dualenc migrate {index} --rollback"
    assert contents(index) == before
    run("index", index, "--texts", "--bm25")  # of the same items
    migrating.go_on()
    check_whole(index)
    # Then the index is free.
    run("append", index, made / "new", made / "more.jsonl")
    assert len(Index.open(index)) == DOCUMENTS + 5
    assert "n0" in {hit["id"] for hit in found(capsys, index, "wing flutter", "--hybrid", "rrf")}


@pytest.mark.slow
def test_a_change_after_a_kill_is_refused_and_the_same_command_resumes(
    made: Path, index: Path, served: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    Migrating(index, made / "new", 60).kill()
    for words in changes(made, index).values():
        line = failure(capsys, *words)
        finish = (
            f"finish it: dualenc migrate {index} {made / 'new'}, "
            f"or end it: dualenc migrate {index} --rollback"
        )
        assert line == (
            f"{index}: its model is being changed to {made / 'new'}, in index.migration; {finish}"
        )
    run("migrate", index, made / "new")
    check_whole(index)


@pytest.mark.slow
def test_a_rollback_keeps_what_was_embedded_until_it_is_discarded(
    made: Path, index: Path, served: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(index)
    Migrating(index, made / "new", 60).kill()
    was_replaced = served[0] == 0
    for replaced in (was_replaced, False):  # a second one changes nothing
        capsys.readouterr()
        run("migrate", index, "--rollback")
        told = capsys.readouterr().out
        assert ("the old index is back" in told) == replaced
        kept = embedded(index)
        assert (
            f"{kept:,} vectors of {made / 'new'} stay in {index}.migration; go on: dualenc migrate"
            in told
        )
        assert kept > 120
        assert contents(index) == before
    # What is kept is gone on with, and embedded once.
    shard = Path(f"{index}.migration", "embeddings-60", "data-00000.arrow").stat().st_mtime_ns
    Migrating(index, made / "new", 150).kill()
    assert (
        Path(f"{index}.migration", "embeddings-60", "data-00000.arrow").stat().st_mtime_ns == shard
    )
    run("migrate", index, "--rollback")
    # The index may change again, which the vectors do not fit: nothing is lost, and nothing is
    # discarded unasked.
    run(*changes(made, index)["append"])
    line = failure(capsys, "migrate", index, made / "new")
    kept = embedded(index)
    assert (
        f"holds {kept} vectors of a migration with other items that was rolled back; "
        "remove them: dualenc"
    ) in line
    assert line.endswith(f"migrate {index} --rollback --discard")
    assert embedded(index) == kept
    run("migrate", index, "--rollback", "--discard")
    told = capsys.readouterr().out
    assert (
        f"the index is unchanged; removed: the measurements and {kept} vectors of {made / 'new'}"
        in told
    )
    assert not Path(f"{index}.migration").exists()
    assert len(Index.open(index)) == DOCUMENTS + 5
    run("migrate", index, made / "new")
    assert len(Index.open(index)) == DOCUMENTS + 5
    assert Index.open(index).provenance.mapped == 0


def embedded(index: Path) -> int:
    """Vectors in the work folder, by its shards."""
    shards = Path(f"{index}.migration").glob("*/meta.json")
    metas = [
        json.loads(path.read_text()) for path in shards if path.parent.name not in ("old", "next")
    ]
    return sum(sum(meta.get("shard_rows", ())) for meta in metas)


def test_discarding_is_for_a_rollback(
    made: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = failure(capsys, "migrate", index, made / "new", "--discard")
    assert line == (
        "--discard removes what a migration has embedded; give it with --rollback, or leave it out"
    )


@pytest.mark.slow
def test_a_change_that_came_first_is_kept(
    made: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A migration that starts while an append embeds is refused, and later has the appended
    documents."""
    holder = FORK.Process(target=append_slowly, args=(made, index))
    holder.start()
    wait_for(index.with_name("embedding").exists)
    line = failure(capsys, "migrate", index, made / "new")
    assert line.startswith(f"another dualenc process is writing {index}; wait for it")
    assert not Path(f"{index}.migration").exists()
    index.with_name("go").touch()
    holder.join()
    assert holder.exitcode == 0
    run("migrate", index, made / "new")
    assert len(Index.open(index)) == DOCUMENTS + 5


def append_slowly(made: Path, index: Path) -> None:
    """Hold the lock of an index, as an append does while it embeds, and then append."""
    with locked(index):
        index.with_name("embedding").touch()
        wait_for(index.with_name("go").exists)
        run(*changes(made, index)["append"])


@pytest.fixture
def by_hand(made: Path, tmp_path: Path) -> Path:
    """An index that is put in the place of another one without a lock."""
    shutil.copytree(made / "index", tmp_path / "by-hand")
    run("remove", tmp_path / "by-hand", made / "gone.txt")
    return tmp_path / "by-hand"


@pytest.mark.slow
def test_an_index_that_was_replaced_by_other_means_is_not_overwritten(
    made: Path, index: Path, by_hand: Path, served: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    Migrating(index, made / "new", 60).kill()
    shutil.rmtree(index)
    shutil.move(by_hand, index)
    before = contents(index)
    assert "a migration with other items is under way" in failure(
        capsys, "migrate", index, made / "new"
    )
    run("migrate", index, "--rollback")
    assert contents(index) == before
    run("migrate", index, "--rollback", "--discard")
    assert contents(index) == before


@pytest.mark.slow
def test_an_index_that_was_replaced_during_the_work_is_not_overwritten(
    made: Path,
    index: Path,
    by_hand: Path,
    served: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    swap = Migration.swap

    def replace_first(self: Migration, *arguments: Any) -> None:
        shutil.rmtree(index)
        shutil.copytree(by_hand, index)
        swap(self, *arguments)

    monkeypatch.setattr(Migration, "swap", replace_first)
    line = failure(capsys, "migrate", index, made / "new")
    assert (
        "something else has replaced it while its model was being changed, so it is left unchanged"
        in line
    )
    assert contents(index) == contents(by_hand)
