"""The cache of candidates' vectors: whole vectors only, whoever is killed, reads or writes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import time
from pathlib import Path

import numpy as np
import pytest

from dualenc.search.migration.vector_cache import VectorCache
from tests.helpers.clusters import clustered

FORK = multiprocessing.get_context("fork")
COUNT, DIM = 600, 16
IDS = [f"doc {row}" for row in range(COUNT)]


@pytest.fixture
def cache(tmp_path: Path) -> VectorCache:
    made = VectorCache(tmp_path / "candidates-0.sqlite", DIM)
    made.create()
    return made


def vectors() -> np.ndarray:
    rows = clustered(COUNT)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def check(cache: VectorCache, ids: list[str]) -> None:
    """The cache has these ids, with their vectors."""
    assert cache.ids() == set(ids)
    stored = cache.get(IDS)
    assert stored.keys() == set(ids)
    for name, vector in stored.items():
        assert (vector == vectors()[IDS.index(name)]).all()


def test_vectors_come_back_as_they_were(cache: VectorCache) -> None:
    assert cache.get(IDS) == {}
    cache.put(IDS[:5], vectors()[:5])
    cache.put(IDS[3:8], -vectors()[3:8])  # the first ones stay
    stored = cache.get(["doc 4", "doc 7", "doc 9"])
    assert stored.keys() == {"doc 4", "doc 7"}
    assert (stored["doc 4"] == vectors()[4]).all()
    assert (stored["doc 7"] == -vectors()[7]).all()
    cache.create()  # again
    assert len(cache.ids()) == 8


def die_while_writing(path: Path) -> None:
    """Write so much that SQLite changes the file before the commit, and be killed there."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA cache_size = 1")
    connection.execute("BEGIN EXCLUSIVE")
    rows = [(name, row.tobytes()) for name, row in zip(IDS, vectors())]
    connection.executemany("INSERT OR IGNORE INTO vectors VALUES (?, ?)", rows)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_killed_in_a_write_leaves_what_was_before(cache: VectorCache) -> None:
    cache.put(IDS[:7], vectors()[:7])
    size = cache.path.stat().st_size
    process = FORK.Process(target=die_while_writing, args=(cache.path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert cache.path.stat().st_size > size, "nothing was written before the kill"
    assert cache.path.with_name(f"{cache.path.name}-journal").exists()
    check(cache, IDS[:7])
    cache.put(IDS[7:9], vectors()[7:9])
    check(cache, IDS[:9])


def write_all(path: Path, start: int) -> None:
    cache = VectorCache(path, DIM)
    for row in range(start, COUNT, 2):
        cache.put([IDS[row], IDS[row - 1]], vectors()[[row, row - 1]])


@pytest.mark.slow
def test_two_writers_and_a_reader_at_once(cache: VectorCache) -> None:
    writers = [FORK.Process(target=write_all, args=(cache.path, start)) for start in (1, 2)]
    for process in writers:
        process.start()
    while any(process.is_alive() for process in writers):
        for name, vector in cache.get(IDS).items():
            assert (vector == vectors()[IDS.index(name)]).all()
        time.sleep(0.01)
    assert [process.exitcode for process in writers] == [0, 0]
    check(cache, IDS)


def test_a_removed_file_stays_away_without_a_word(
    cache: VectorCache, caplog: pytest.LogCaptureFixture
) -> None:
    other = VectorCache(cache.path, DIM)
    cache.remove()
    other.put(IDS[:2], vectors()[:2])
    assert other.get(IDS) == {}
    assert not os.listdir(cache.path.parent)
    cache.remove()
    assert not caplog.records


def test_a_corrupt_file_is_an_empty_cache_and_said_once(
    cache: VectorCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.path.write_bytes(b"no database, " * 100)
    for _ in range(2):
        assert cache.get(IDS) == {}
        cache.put(IDS[:2], vectors()[:2])
    [record] = caplog.records
    assert "cannot be used (file is not a database); candidates are embedded" in record.getMessage()
    cache.create()
    cache.put(IDS[:2], vectors()[:2])
    check(cache, IDS[:2])


def test_damaged_vectors_are_missing(cache: VectorCache) -> None:
    cache.put(IDS[:5], vectors()[:5])
    damaged = {"doc 0": b"", "doc 1": b"\xff" * 4 * DIM, "doc 2": bytes(4 * DIM), "doc 3": "text"}
    with sqlite3.connect(cache.path) as connection:
        for name, value in damaged.items():
            connection.execute("UPDATE vectors SET vector = ? WHERE id = ?", (value, name))
    assert cache.get(IDS).keys() == {"doc 4"}
