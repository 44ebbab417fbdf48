"""Print messages: information of workflows on stdout, warnings and trainings on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dualenc.io.terminal import printable

TRAINING = "dualenc.training"
LEVELS = {
    "dualenc": logging.WARNING,
    "dualenc.workflows": logging.INFO,
    TRAINING: logging.INFO,
}
"""The lowest level of the messages that are printed, by logger."""


class NoticeHandler(logging.Handler):
    """Print each message on one line, with control characters escaped."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of a record."""
        # Imported late, so that help texts appear at once.
        from tqdm import tqdm

        # The lines of a training belong to its progress bar, which is on stderr.
        is_aside = record.levelno >= logging.WARNING or record.name == TRAINING
        # Look the streams up here: tests and notebooks replace them.
        stream = sys.stderr if is_aside else sys.stdout
        # Above the bars, which a plain `print` would break.
        tqdm.write(printable(record.getMessage()), file=stream)


@contextmanager
def printed_notices() -> Iterator[None]:
    """Print what workflows and trainings log, and all warnings, until the context ends."""
    loggers = {logging.getLogger(name): level for name, level in LEVELS.items()}
    before = [(logger.level, logger.propagate) for logger in loggers]
    handler = NoticeHandler()
    for logger, lowest in loggers.items():
        logger.addHandler(handler)
        logger.setLevel(lowest)
        # Handlers of other loggers, such as a root handler that a library has installed, would
        # print the same lines again.
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.propagate = propagate
            logger.removeHandler(handler)
