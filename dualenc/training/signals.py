"""Signals during training: Ctrl-C, and SIGTERM and SIGUSR1, which job schedulers send."""

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
"""Seconds within which a second SIGINT belongs to the same Ctrl-C: the terminal signals all
processes, and a launcher signals them again."""

_STOPPING = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class Stopped(SystemExit):
    """Training was stopped by a signal n. A SystemExit, which ends a script with code 128 + n.

    Args:
        number: number n of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Interrupted(KeyboardInterrupt):
    """Training was stopped by Ctrl-C. A KeyboardInterrupt, which keeps an interactive session."""


class StopSignals:
    """Signal handlers of a run: in this context SIGTERM, SIGUSR1 and a first Ctrl-C are only noted.

    A second Ctrl-C acts as usual, and so does the first if stopping saves nothing. A signal that
    came too late to stop the training is sent again at the end. Ignored signals stay ignored.
    Outside the main thread, where Python runs no handlers, nothing changes.

    Example:
        with StopSignals() as signals:
            while not signals.agree(device):
                step()

    Args:
        saves: True if stopping the run saves a checkpoint.

    Attributes:
        noted: number of the received signal; 0 for none.
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
            # The handler is None if it was set in C. Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
        # The signal came after the last step. The rest of the program decides what it means.
        if self.noted and error is None:
            signal.raise_signal(self.noted)

    def agree(self, device: torch.device) -> int:
        """Return the signal that any rank has received, or 0. All ranks call it together.

        Args:
            device: device for the exchange between ranks.
        """
        # Signals reach the ranks at different times, but all must stop after the same step.
        noted_by_rank = distributed.rank_numbers([self.noted], device)[0]
        return max(noted_by_rank)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._note_ctrl_c(frame)
        self.noted = number

    def _note_ctrl_c(self, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._pressed_at is None:
            self._pressed_at = now
            if distributed.is_main():
                # Not with print, which the handler may have interrupted.
                os.write(2, b"\nfinishing this step; press Ctrl-C again to stop at once\n")
        elif now - self._pressed_at > SAME_PRESS:
            before = self._before[signal.SIGINT]
            handler = before if callable(before) else signal.default_int_handler
            handler(signal.SIGINT, frame)


def forgive_one_sigterm(_: int = 0) -> None:
    """Set the signal handlers of a worker process, so that the run can finish its step."""
    # A scheduler signals workers, too, but the run still needs them, and ends them itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
