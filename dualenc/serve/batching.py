"""Dynamic batching: one worker thread, and a queue of bounded length."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple


class QueueFull(Exception):
    """The queue has no room for an item."""


class _Job(NamedTuple):
    item: Any
    answer: Future[Any]
    arrived: float


class Batcher:
    """Batches the items of any number of threads for a single worker thread.

    A batch begins when an item waits and the thread is free. It is complete with `batch_size` items, or once its first
    item has waited for `wait_s`: under load, where items wait for the thread anyway, there is no further wait.
    An item whose future was cancelled is left out. If a batch fails, its items are tried one by one, so that one
    that cannot be processed costs the others only time. The thread survives whatever `work` raises.

    Args:
        work: gives an answer for each item of a batch, in order; an answer that is an exception is raised.
        batch_size: items per batch.
        wait_s: seconds that the first item of a batch waits for others.
        queue_size: items that may wait.
        observe: called with the size of each batch.
    """

    def __init__(
        self,
        work: Callable[[list[Any]], Sequence[Any]],
        *,
        batch_size: int = 32,
        wait_s: float = 0.002,
        queue_size: int = 256,
        observe: Callable[[int], object] = lambda size: None,
    ) -> None:
        self.work = work
        self.batch_size = batch_size
        self.wait_s = wait_s
        self.queue_size = queue_size
        self.observe = observe
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """How many items wait."""
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        """Whether the worker thread is running."""
        return self._thread.is_alive()

    def submit(self, items: Sequence[Any]) -> list[Future[Any]]:
        """Put all items into the queue, or none; the futures bring their answers.

        Raises:
            QueueFull: there is no room for all.
        """
        now = time.monotonic()
        jobs = [_Job(item, Future(), now) for item in items]
        with self._changed:
            if self._closed or len(self._waiting) + len(jobs) > self.queue_size:
                raise QueueFull(f"up to {self.queue_size} queries wait at a time; try again")
            self._waiting.extend(jobs)
            self._changed.notify()
        return [job.answer for job in jobs]

    def close(self) -> None:
        """Answer what waits, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._next():
            # From here on a future can no longer be cancelled.
            batch = [job for job in batch if job.answer.set_running_or_notify_cancel()]
            if batch:
                self.observe(len(batch))
                self._answer(batch)

    def _next(self) -> list[_Job]:
        """The next batch; empty at the end."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            while self._waiting and len(self._waiting) < self.batch_size and not self._closed:
                remaining = self._waiting[0].arrived + self.wait_s - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(remaining)
            return [self._waiting.popleft() for _ in range(min(self.batch_size, len(self._waiting)))]

    def _answer(self, batch: list[_Job]) -> None:
        try:
            answers = self.work([job.item for job in batch])
            pairs = list(zip(batch, answers, strict=True))
        except BaseException as error:  # a panic of Rust, as in tokenizers, is no Exception
            if len(batch) > 1:
                for job in batch:
                    self._answer([job])
                return
            if not isinstance(error, Exception):
                error = RuntimeError(f"{type(error).__name__}: {error}")
            pairs = [(batch[0], error)]
        for job, answer in pairs:
            if isinstance(answer, Exception):
                job.answer.set_exception(answer)
            else:
                job.answer.set_result(answer)
