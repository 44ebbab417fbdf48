"""Signals during training: SIGTERM and SIGUSR1, which schedulers send before they end a job, and
Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

import torch

from dualenc import distributed

SAME_PRESS = 0.5
"""Seconds in which a second SIGINT is the same Ctrl-C: a terminal sends it to all processes, a
launcher once more."""

_STOPPING = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class Stopped(SystemExit):
    """A signal has stopped the training: a SystemExit of 128 + its number, so that no script
    continues."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Interrupted(KeyboardInterrupt):
    """The same after Ctrl-C: a KeyboardInterrupt, which does not end an interactive session."""


class StopSignals:
    """Signal handlers of a run: in this context SIGTERM, SIGUSR1 and a first Ctrl-C are only noted.

    A second Ctrl-C, and the first where stopping saves nothing, does what it would have done
    before. A signal that came too late to stop the training is sent again at the end. Ignored
    signals stay ignored; outside the main thread, where Python has no handlers, nothing changes.
    `noted` is the number of the received signal, 0 for none.
    """

    def __init__(self, saves: bool = True) -> None:
        self.saves = saves
        self.noted = 0
        self._before: dict[int, Any] = {}
        self._pressed_at: float | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            numbers = [*_STOPPING, signal.SIGINT] if self.saves else _STOPPING
            for number in numbers:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for number, handler in self._before.items():
            # None: it was set by something in C, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
        # After the last step: what the signal means to the rest of the program is not decided here.
        if self.noted and error is None:
            signal.raise_signal(self.noted)

    def agree(self, device: torch.device) -> int:
        """The signal that any rank has received, or 0; all ranks call it together, to stop at the
        same step."""
        return max(distributed.rank_numbers([self.noted], device)[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._note_ctrl_c(frame)
        self.noted = number

    def _note_ctrl_c(self, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._pressed_at is None:
            self._pressed_at = now
            if distributed.is_main():
                # Not by print: a handler may come in the middle of one.
                os.write(2, b"\nfinishing this step; press Ctrl-C again to stop at once\n")
        elif now - self._pressed_at > SAME_PRESS:
            before = self._before[signal.SIGINT]
            handler = before if callable(before) else signal.default_int_handler
            handler(signal.SIGINT, frame)


def forgive_one_sigterm(_: int = 0) -> None:
    """Signal handlers of a worker process: the first SIGTERM was meant for the run, which ends its
    workers itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
