"""Print messages: information of workflows on stdout, warnings and trainings on stderr."""

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
    """Print what workflows and trainings log, and all warnings, until the context ends."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(logger.level, logger.propagate) for logger in loggers]
    handler = NoticeHandler()
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        # A root handler, if a library has installed one, would print the same lines again.
        logger.propagate = False
    # Warnings of other modules. `logging.basicConfig`, which open_clip and others call, then adds
    # no handler of its own, which would print them with a prefix and through the bars.
    root = logging.getLogger()
    warnings = NoticeHandler(logging.WARNING)
    root.addHandler(warnings)
    try:
        yield
    finally:
        root.removeHandler(warnings)
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.propagate = propagate
            logger.removeHandler(handler)
