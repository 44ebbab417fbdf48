"""Print what workflows and trainings log: information on stdout, the rest on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dualenc.io.terminal import printable

TRAINING = "dualenc.training"
LOGGERS = ("dualenc.workflows", TRAINING)


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
    """Print what workflows and trainings log, until the context ends."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    handler = NoticeHandler()
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        # A root handler, if a library has installed one, would print the same lines again.
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.propagate = propagate
            logger.removeHandler(handler)
