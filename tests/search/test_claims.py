"""Workers that share nothing but a folder: claims, kills, late joiners, and the bytes of one process."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualenc.data import Corpus
from dualenc.errors import DualencError
from dualenc.files import this_process
from dualenc.search.claims import Claims
from dualenc.search.embed import embed
from dualenc.search.embeddings import Embeddings
from tests.fake_towers import LetterTower, corpus, texts

FORK = multiprocessing.get_context("fork")
ROWS, SHARDS = 800, 8


@pytest.fixture(autouse=True)
def short_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 rows."""
    monkeypatch.setattr("dualenc.search.embeddings.MIN_SHARD_ROWS", 100)


def work(folder: Path, delay: float = 0.0, data: Corpus | None = None, **options: Any) -> Embeddings:
    """Embed as one worker; `delay` seconds for each of a shard's four batches."""
    return embed(LetterTower(delay=delay), data or corpus(ROWS), folder, progress=False, **options)


@contextmanager
def worker(*arguments: Any, **options: Any) -> Iterator[Any]:
    """Another process that does this."""
    process = FORK.Process(target=work, args=arguments, kwargs=options)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def claim(folder: Path, name: str, **holder: Any) -> Path:
    """The claim of another worker, made now."""
    path = folder / f"{name}.claim"
    path.write_text(json.dumps({**this_process(), "token": "theirs", **holder}))
    return path


@pytest.fixture
def alone(tmp_path: Path) -> dict[str, bytes]:
    """What one worker writes that is by itself."""
    work(tmp_path / "alone")
    return contents(tmp_path / "alone")


class TestClaims:
    def test_one_of_many_threads_has_it(self, tmp_path: Path) -> None:
        everyone, start, got = [Claims(tmp_path) for _ in range(8)], threading.Barrier(8), []

        def compete(claims: Claims) -> None:
            start.wait()
            got.extend(name for name in map(str, range(50)) if claims.take(name))

        threads = [threading.Thread(target=compete, args=(claims,)) for claims in everyone]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert sorted(got) == sorted(map(str, range(50)))

    def test_released_at_the_end_and_on_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError), Claims(tmp_path) as claims:
            assert claims.take("a")
            assert claims.take("b")
            claims.release("a")
            assert os.listdir(tmp_path) == ["b.claim"]
            assert (tmp_path / "b.claim").stat().st_size > 128, "embed tells by it that a folder is in use"
            raise ZeroDivisionError
        assert os.listdir(tmp_path) == []

    def test_a_living_process_keeps_its_claim(self, tmp_path: Path) -> None:
        claim(tmp_path, "a")
        assert not Claims(tmp_path).take("a")

    def test_that_of_a_process_that_is_gone_is_taken_at_once(self, tmp_path: Path) -> None:
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            ended.wait()
        claim(tmp_path, "a", pid=ended.pid, started="1")
        assert Claims(tmp_path).take("a")

    @pytest.mark.parametrize("holder", [{"host": "elsewhere"}, {}])
    def test_one_out_of_sight_or_stopped_is_taken_when_it_was_not_touched(self, tmp_path: Path, holder: dict) -> None:
        path = claim(tmp_path, "a", **holder)
        assert not Claims(tmp_path, take_over=60).take("a")
        os.utime(path, (time.time() - 70,) * 2)
        assert Claims(tmp_path, take_over=60).take("a")

    def test_half_a_claim_counts_by_its_age(self, tmp_path: Path) -> None:
        (tmp_path / "a.claim").write_text('{"host": ')
        assert not Claims(tmp_path, take_over=60).take("a")
        os.utime(tmp_path / "a.claim", (1, 1))
        assert Claims(tmp_path, take_over=60).take("a")

    def test_one_of_the_future_is_not_waited_for(self, tmp_path: Path) -> None:
        path = claim(tmp_path, "a", host="elsewhere")
        os.utime(path, (time.time() + 30,) * 2)
        assert not Claims(tmp_path, take_over=60).take("a"), "clocks differ a little"
        os.utime(path, (time.time() + 86_400,) * 2)
        assert Claims(tmp_path, take_over=60).take("a")

    def test_a_wrong_clock_takes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        claim(tmp_path, "a", host="elsewhere")
        monkeypatch.setattr(time, "time", lambda: 1e10)
        assert not Claims(tmp_path, take_over=60).take("a")

    def test_it_stays_fresh_while_its_owner_works(self, tmp_path: Path) -> None:
        with Claims(tmp_path, take_over=0.5) as owner:
            assert owner.take("a")
            for _ in range(12):
                time.sleep(0.1)
                assert not Claims(tmp_path, take_over=0.5).take("a")
            assert owner.held("a")

    def test_whoever_lost_a_claim_finds_out_and_leaves_the_new_one(self, tmp_path: Path) -> None:
        with Claims(tmp_path) as slow:
            assert slow.take("a")
            os.utime(tmp_path / "a.claim", (1, 1))
            with Claims(tmp_path) as quick:
                assert quick.take("a")
                assert not slow.held("a")
                slow.release("a")
                assert quick.held("a")

    def test_of_several_that_take_over_one_has_it(self, tmp_path: Path) -> None:
        os.utime(claim(tmp_path, "a", host="elsewhere"), (1, 1))
        everyone, start = [Claims(tmp_path) for _ in range(6)], threading.Barrier(6)

        def compete(claims: Claims) -> None:
            start.wait()
            claims.take("a")

        threads = [threading.Thread(target=compete, args=(claims,)) for claims in everyone]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert sum(claims.held("a") for claims in everyone) == 1

    def test_a_folder_that_is_gone_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(DualencError, match="gone while it was written to; run the same command again"):
            Claims(tmp_path / "nowhere").take("a")

    @pytest.mark.parametrize("take_over", [0, -1, float("nan")])
    def test_a_time_that_is_none(self, tmp_path: Path, take_over: float) -> None:
        with pytest.raises(DualencError, match="give a time above 0"):
            Claims(tmp_path, take_over)


def test_several_workers_write_what_one_writes(tmp_path: Path, alone: dict[str, bytes]) -> None:
    folder = tmp_path / "emb"
    with worker(folder, 0.05) as first, worker(folder, 0.05) as second:
        wait_for(lambda: len(list(folder.glob("shard-*.claim"))) == 2)
        tower = LetterTower(delay=0.05)
        embeddings = embed(tower, corpus(ROWS), folder, progress=False)
        for process in (first, second):
            process.join(60)
            assert process.exitcode == 0
    assert contents(folder) == alone
    assert sum(rows for rows, _ in tower.widths) < ROWS, "the others had a share"
    np.testing.assert_array_equal(np.asarray(embeddings.vectors), np.asarray(Embeddings.open(folder).vectors))


def test_workers_that_start_in_the_same_moment_in_a_new_folder(tmp_path: Path, alone: dict[str, bytes]) -> None:
    for attempt in range(5):
        folder = tmp_path / "new" / str(attempt)
        with worker(folder) as first, worker(folder) as second, worker(folder) as third:
            for process in (first, second, third):
                process.join(60)
                assert process.exitcode == 0
        assert contents(folder) == alone


def test_a_killed_worker_loses_its_shard_and_no_more(tmp_path: Path, alone: dict[str, bytes]) -> None:
    folder = tmp_path / "emb"
    with worker(folder, 0.05) as victim:
        wait_for(lambda: (folder / "shard-00002.claim").exists())
        finished = {path.name: path.stat().st_mtime_ns for path in folder.glob("shard-*.npy")}
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        assert (folder / "shard-00002.claim").exists()
        tower = LetterTower()
        started = time.monotonic()
        embed(tower, corpus(ROWS), folder, progress=False)
    assert time.monotonic() - started < 30, "the claim of a process that is seen to be gone is not waited for"
    assert {name: (folder / name).stat().st_mtime_ns for name in finished} == finished
    assert sum(rows for rows, _ in tower.widths) == ROWS - 200
    assert contents(folder) == alone


def test_whoever_waits_takes_over_what_a_killed_worker_leaves(tmp_path: Path, alone: dict[str, bytes]) -> None:
    """The victim has the last shard, in which it would stay for half a minute; the other one waits for it."""
    folder = tmp_path / "emb"
    with worker(folder, 8) as victim:
        wait_for(lambda: (folder / "shard-00000.claim").exists())
        with worker(folder) as waiting:
            wait_for(lambda: len(list(folder.glob("shard-*.json"))) == SHARDS - 1)
            assert waiting.is_alive()
            os.kill(victim.pid, signal.SIGKILL)
            waiting.join(20)
            assert waiting.exitcode == 0
    assert contents(folder) == alone


def test_a_stale_claim_of_another_host_is_taken_over(tmp_path: Path, alone: dict[str, bytes]) -> None:
    folder = tmp_path / "emb"
    with worker(folder, 0.05):
        wait_for(lambda: (folder / "shard-00000.json").exists())
    lost = claim(folder, "shard-00005", host="preempted")
    os.utime(lost, (1, 1))
    claim(folder, "finish", host="preempted")
    os.utime(folder / "finish.claim", (1, 1))
    work(folder)
    assert contents(folder) == alone


def test_a_worker_that_is_killed_behind_its_shard_leaves_no_claim(tmp_path: Path, alone: dict[str, bytes]) -> None:
    """It has written the shard, and has not given its claim back."""
    folder = tmp_path / "emb"
    with worker(folder, 0.05):
        wait_for(lambda: (folder / "shard-00001.json").exists())
    claim(folder, "shard-00000")
    work(folder)
    assert contents(folder) == alone


def test_a_fresh_claim_of_another_host_is_respected_until_it_is_stale(tmp_path: Path, alone: dict[str, bytes]) -> None:
    folder = tmp_path / "emb"
    with worker(folder, 0.05):
        wait_for(lambda: (folder / "shard-00000.json").exists())
    claim(folder, "shard-00005", host="busy")
    started = time.monotonic()
    work(folder, take_over=2.0)
    assert 2 <= time.monotonic() - started < 20
    assert contents(folder) == alone


def test_what_a_worker_leaves_that_is_killed_while_it_tidies_up_is_swept(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    """By whoever waits for it, and, when nobody does, by the next run."""
    folder = tmp_path / "emb"
    with worker(folder, 0.05) as waiting:
        wait_for(lambda: (folder / "shard-00000.claim").exists())
        holder = claim(folder, "finish", host="preempted")
        wait_for(lambda: len(list(folder.glob("shard-*.json"))) == SHARDS and not list(folder.glob("shard-*.claim")))
        assert list(folder.glob("shard-*.shown"))
        names = (name for name in alone if not name.startswith("shard-"))
        for name in sorted(names, key=lambda name: name == "meta.json"):
            (folder / f"{name}.new").write_bytes(alone[name])
            os.replace(folder / f"{name}.new", folder / name)
        time.sleep(0.3)
        assert waiting.is_alive(), "the finisher may still be at it"
        os.utime(holder, (1, 1))
        waiting.join(20)
        assert waiting.exitcode == 0
    assert contents(folder) == alone
    (folder / "shard-00003.shown").write_bytes(b"left")
    os.utime(claim(folder, "finish", host="preempted"), (1, 1))
    work(folder)
    assert contents(folder) == alone


def test_a_worker_that_was_stopped_for_long_does_no_harm(tmp_path: Path, alone: dict[str, bytes]) -> None:
    folder = tmp_path / "emb"
    with worker(folder, 0.1) as sleeper:
        wait_for(lambda: (folder / "shard-00001.claim").exists())
        os.kill(sleeper.pid, signal.SIGSTOP)
        os.utime(folder / "shard-00001.claim", (1, 1))
        work(folder)
        assert contents(folder) == alone
        os.kill(sleeper.pid, signal.SIGCONT)
        sleeper.join(60)
        assert sleeper.exitcode == 0
    assert contents(folder) == alone


def test_a_worker_that_comes_when_all_is_done_writes_nothing(tmp_path: Path, alone: dict[str, bytes]) -> None:
    tower = LetterTower()
    embed(tower, corpus(ROWS), tmp_path / "alone", progress=False)
    assert tower.widths == []
    assert contents(tmp_path / "alone") == alone


@pytest.mark.parametrize(
    ("tower", "data", "told"),
    [
        (LetterTower(prompt="x"), corpus(ROWS), "holds embeddings with model_checksum"),
        (LetterTower(), corpus(ROWS - 1), "holds embeddings with ids_checksum"),
    ],
)
def test_a_worker_with_another_model_or_data_is_refused(
    tmp_path: Path, alone: dict[str, bytes], tower: LetterTower, data: Corpus, told: str
) -> None:
    folder = tmp_path / "emb"
    with worker(folder, 0.05) as first:
        wait_for(lambda: (folder / "meta.json").exists())
        with pytest.raises(DualencError, match=told) as error:
            embed(tower, data, folder, progress=False)
        assert "\n" not in str(error.value)
        assert tower.widths == []
        first.join(60)
    assert contents(folder) == alone


def test_workers_that_see_other_texts_under_the_same_ids_do_not_finish(tmp_path: Path) -> None:
    folder = tmp_path / "emb"
    changed = Corpus(corpus(ROWS).ids, [f"{text}!" for text in texts(ROWS)])
    with worker(folder, 0.05) as first:
        wait_for(lambda: (folder / "shard-00000.json").exists())
        with pytest.raises(DualencError, match="another worker saw other data under the same ids") as error:
            # Whichever of the two ends the work finds shards of the other; it need not be this one.
            work(folder, 0.05, changed)
        assert "\n" not in str(error.value)
        first.join(60)
        assert first.exitcode != 0
    with pytest.raises(DualencError, match="not finished"):
        Embeddings.open(folder)
    again = work(folder, data=changed)
    np.testing.assert_array_equal(np.asarray(again.vectors), embed(LetterTower(), changed, progress=False).vectors)


def test_a_failing_worker_leaves_its_shard_and_the_folder_to_the_others(
    tmp_path: Path, alone: dict[str, bytes]
) -> None:
    folder = tmp_path / "emb"
    with worker(folder, 0.1) as good:
        wait_for(lambda: (folder / "shard-00000.claim").exists())
        bad = LetterTower()
        bad.forward = lambda inputs: LetterTower.forward(bad, inputs) * np.nan  # type: ignore[method-assign]
        with pytest.raises(DualencError, match="not finite"):
            embed(bad, corpus(ROWS), folder, progress=False)
        good.join(60)
        assert good.exitcode == 0
    assert contents(folder) == alone
