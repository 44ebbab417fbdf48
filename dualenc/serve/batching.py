"""Concurrent calls as batches: one thread that works, a queue that is never longer than said."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple


class QueueFull(Exception):
    """So much waits already that one more would wait too long."""


class _Job(NamedTuple):
    item: Any
    answer: Future[Any]
    arrived: float


class Batcher:
    """Items from any number of threads, worked on together by a single one.

    A batch begins when an item waits and the thread is free. It is complete with `batch_size` items, or once its first
    item has waited for `wait_s`: under load, when items wait for the thread anyway, nobody waits for the sake of it.
    An item whose future was cancelled is left out. If a batch fails, its items are tried one by one, so that one
    that cannot be worked on costs the others time and nothing else. Whatever `work` raises, the thread goes on.

    Args:
        work: gives an answer for each item of a batch, in order; an answer that is an exception is raised.
        batch_size: items worked on together.
        wait_s: seconds that the first item of a batch waits for others.
        queue_size: items that may wait.
        observe: told the size of each batch.
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
        self.work, self.batch_size, self.wait_s, self.queue_size = work, batch_size, wait_s, queue_size
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
        """Whether the thread is there to work."""
        return self._thread.is_alive()

    def submit(self, items: Sequence[Any]) -> list[Future[Any]]:
        """Put items into the queue, all of them or none; the futures bring their answers.

        Raises:
            QueueFull: there is not room for all.
        """
        now = time.monotonic()
        jobs = [_Job(item, Future(), now) for item in items]
        with self._changed:
            if self._closed or len(self._waiting) + len(jobs) > self.queue_size:
                raise QueueFull
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
                left = self._waiting[0].arrived + self.wait_s - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return [self._waiting.popleft() for _ in range(min(self.batch_size, len(self._waiting)))]

    def _answer(self, batch: list[_Job]) -> None:
        try:
            pairs = list(zip(batch, self.work([job.item for job in batch]), strict=True))
        except BaseException as error:  # a panic of Rust, as in tokenizers, is no Exception
            if len(batch) == 1:
                known = isinstance(error, Exception)
                batch[0].answer.set_exception(error if known else RuntimeError(f"{type(error).__name__}: {error}"))
                return
            for job in batch:
                self._answer([job])
            return
        for job, answer in pairs:
            if isinstance(answer, Exception):
                job.answer.set_exception(answer)
            else:
                job.answer.set_result(answer)
