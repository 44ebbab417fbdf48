"""Workers that share nothing but a folder: locks, kills, late joiners, and the bytes of one
process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from dualenc.search.embed.encode import embed
from dualenc.search.embed.writer import work_lock
from tests.helpers.fake_towers import LetterTower, corpus
from tests.helpers.folder_contents import contents
from tests.helpers.waiting import wait_for

FORK = multiprocessing.get_context("fork")
ROWS, SHARDS = 800, 8


@pytest.fixture(autouse=True)
def short_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 rows."""
    monkeypatch.setattr("dualenc.search.embed.writer.MIN_SHARD_ROWS", 100)


def work(folder: Path, delay: float = 0.0) -> None:
    """Embed as one worker; `delay` seconds for each of a shard's four batches."""
    embed(LetterTower(delay=delay), corpus(ROWS), folder, progress=False)


@contextmanager
def worker(*arguments: Any) -> Iterator[Any]:
    """Another process that does this."""
    process = FORK.Process(target=work, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, bytes]:
    """What one worker writes that is by itself."""
    work(tmp_path / "alone")
    return contents(tmp_path / "alone")


def test_a_lock_is_held_by_one_of_many_threads(tmp_path: Path) -> None:
    done = threading.Barrier(8)

    def compete(_: int) -> list[int]:
        with ExitStack() as held:
            got = [
                name
                for name in range(50)
                if held.enter_context(work_lock(tmp_path / f"{name}.lock"))
            ]
            done.wait()
        return got

    with ThreadPoolExecutor(8) as threads:
        assert sorted(chain.from_iterable(threads.map(compete, range(8)))) == list(range(50))
    with pytest.raises(FileNotFoundError), work_lock(tmp_path / "nowhere" / "a.lock"):
        pass
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_workers_that_start_in_the_same_moment_write_what_one_writes(
    tmp_path: Path, alone: dict[str, bytes], attempt: int
) -> None:
    folder = tmp_path / "new" / "emb"
    with worker(folder, 0.05) as first, worker(folder, 0.05) as second:
        tower = LetterTower(delay=0.05)
        embed(tower, corpus(ROWS), folder, progress=False)
        for process in (first, second):
            process.join(60)
            assert process.exitcode == 0
    assert contents(folder) == alone
    assert sum(rows for rows, _ in tower.widths) < ROWS, "the others had a share"


@pytest.mark.slow
def test_the_bar_ends_with_the_work_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with worker(tmp_path / "emb", 0.05) as other:
        tower = LetterTower(delay=0.05)
        embed(tower, corpus(ROWS), tmp_path / "emb", progress=True)
        other.join(60)
    share = sum(rows for rows, _ in tower.widths)
    assert share < ROWS
    last = capsys.readouterr().err.strip().rsplit("\r", 1)[-1]
    assert last.startswith("embed: 100%")
    assert f" {share}/{share} [" in last


@pytest.mark.slow
def test_a_killed_worker_loses_its_shard_and_no_more(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    folder = tmp_path / "emb"
    with worker(folder, 0.05) as victim:
        wait_for(lambda: (folder / "data-00002.lock").exists())
        finished = {path.name: path.stat().st_mtime_ns for path in folder.glob("data-*.arrow")}
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        tower = LetterTower()
        embed(tower, corpus(ROWS), folder, progress=False)
    assert {name: (folder / name).stat().st_mtime_ns for name in finished} == finished
    assert sum(rows for rows, _ in tower.widths) == ROWS - 200
    assert contents(folder) == alone


@pytest.mark.slow
def test_whoever_waits_writes_what_a_killed_worker_leaves(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    """The victim has the first shard, in which it would stay for half a minute; the other one waits
    for it."""
    folder = tmp_path / "emb"
    with worker(folder, 8) as victim:
        wait_for(lambda: (folder / "data-00000.lock").exists())
        with worker(folder) as waiting:
            wait_for(lambda: len(list(folder.glob("data-*.arrow"))) == SHARDS - 1)
            assert waiting.is_alive()
            os.kill(victim.pid, signal.SIGKILL)
            waiting.join(20)
            assert waiting.exitcode == 0
    assert contents(folder) == alone


def test_a_worker_that_comes_when_all_is_done_removes_the_locks_of_the_dead(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    for name in ("data-00003.lock", "finish.lock"):
        (tmp_path / "alone" / name).touch()
    tower = LetterTower()
    embed(tower, corpus(ROWS), tmp_path / "alone", progress=False)
    assert tower.widths == []
    assert contents(tmp_path / "alone") == alone
