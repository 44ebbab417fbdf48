"""Batches: who is answered with what, together with whom, and what happens when too many come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.serve.batching import Batcher, QueueFull


class Held:
    """Work that waits until it may go on, and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.entered, self.may_go = threading.Semaphore(0), threading.Event()

    def __call__(self, items: list[Any]) -> list[Any]:
        self.batches.append(items)
        self.entered.release()
        assert self.may_go.wait(10)
        return [10 * item for item in items]


@pytest.fixture
def held() -> Iterator[Held]:
    work = Held()
    yield work
    work.may_go.set()


def test_what_arrives_during_a_batch_is_the_next_one(held: Held) -> None:
    batcher = Batcher(held, batch_size=3, wait_s=0)
    first = batcher.submit([1])
    assert held.entered.acquire(timeout=5)
    later = [future for item in (2, 3, 4, 5) for future in batcher.submit([item])]
    held.may_go.set()
    assert [future.result(5) for future in first + later] == [10, 20, 30, 40, 50]
    assert held.batches == [[1], [2, 3, 4], [5]]
    batcher.close()


@pytest.mark.slow
def test_a_batch_waits_for_others_no_longer_than_said() -> None:
    batches: list[int] = []
    batcher = Batcher(lambda items: items, batch_size=4, wait_s=0.3, observe=batches.append)
    begin = time.monotonic()
    for future in batcher.submit([1]) + batcher.submit([2]):
        future.result(5)
    assert 0.25 < time.monotonic() - begin < 2
    begin = time.monotonic()
    for future in batcher.submit([1, 2, 3, 4]):
        future.result(5)
    assert time.monotonic() - begin < 0.25, "a full batch does not wait"
    assert batches == [2, 4]
    batcher.close()


def test_the_queue_takes_all_of_a_request_or_nothing(held: Held) -> None:
    batcher = Batcher(held, batch_size=1, wait_s=0, queue_size=3)
    batcher.submit([0])
    assert held.entered.acquire(timeout=5)
    futures = batcher.submit([1, 2])
    with pytest.raises(QueueFull):
        batcher.submit([3, 4])
    assert len(batcher) == 2
    futures += batcher.submit([5])
    held.may_go.set()
    assert [future.result(5) for future in futures] == [10, 20, 50]
    batcher.close()
    with pytest.raises(QueueFull):
        batcher.submit([6])


def test_what_was_cancelled_is_not_worked_on(held: Held) -> None:
    batcher = Batcher(held, batch_size=8, wait_s=0)
    batcher.submit([1])
    assert held.entered.acquire(timeout=5)
    futures = batcher.submit([2, 3, 4])
    assert futures[1].cancel()
    held.may_go.set()
    assert (futures[0].result(5), futures[2].result(5)) == (20, 40)
    assert held.batches[1] == [2, 4]
    batcher.close()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 8))
def test_each_gets_its_own_answer_or_its_own_error(items: list[int], batch_size: int) -> None:
    def work(batch: list[int]) -> list[Any]:
        if 7 in batch:
            raise ZeroDivisionError(7)
        return [ValueError(item) if item == 3 else item * item for item in batch]

    batcher = Batcher(work, batch_size=batch_size, wait_s=0, queue_size=100)
    with ThreadPoolExecutor(4) as threads:
        futures = [future for batch in threads.map(lambda item: batcher.submit([item]), items) for future in batch]
    for item, future in zip(items, futures):
        if item in (3, 7):
            assert type(future.exception(5)) is (ValueError if item == 3 else ZeroDivisionError)
        else:
            assert future.result(5) == item * item
    batcher.close()


def test_the_thread_goes_on_whatever_the_work_raises() -> None:
    class PanicException(BaseException):
        """As pyo3 raises it for a panic of Rust."""

    def work(batch: list[str]) -> list[Any]:
        if "panic" in batch:
            raise PanicException("called `Option::unwrap()` on a `None` value")
        return [] if "short" in batch else batch

    batcher = Batcher(work, batch_size=8, wait_s=0)
    for item, kind in (("panic", RuntimeError), ("short", ValueError)):
        bad, good = (batcher.submit([word])[0] for word in (item, "fox"))
        assert type(bad.exception(5)) is kind
        assert good.result(5) == "fox"
        assert batcher.is_alive
    batcher.close()
    assert not batcher.is_alive
