"""Clients that write and read while something else happens."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tests.helpers.waiting import wait_for


class WorkingClients(ABC):
    """A client that writes and one that reads, in threads.

    Attributes:
        errors: what the clients have raised.
        written: how often the first one has written, which it counts.
        done: set when the reader has to end.
    """

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.written = 0
        self.done = threading.Event()

    @abstractmethod
    def write(self) -> None:
        """Write, and count it in `written`."""

    @abstractmethod
    def read(self) -> None:
        """Read until `done` is set."""

    def run(self, action: Callable[[], Any]) -> Any:
        """Run an action while both clients work; the reader goes on until the writer has ended."""

        def caught(function: Callable[[], None]) -> None:
            try:
                function()
            except BaseException as error:
                self.errors.append(error)

        writer = threading.Thread(target=caught, args=(self.write,))
        reader = threading.Thread(target=caught, args=(self.read,))
        writer.start()
        reader.start()
        wait_for(lambda: self.written > 20 or self.errors)
        try:
            return action()
        finally:
            writer.join()
            self.done.set()
            reader.join()
