"""Print the notices of workflows: information on stdout, warnings on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dualenc.io.terminal import printable


class NoticeHandler(logging.Handler):
    """Print each message on one line, with control characters escaped."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message of a record."""
        # Look the streams up here: tests and notebooks replace them.
        stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        print(printable(record.getMessage()), file=stream)


@contextmanager
def printed_notices() -> Iterator[None]:
    """Print what workflows log, until the context ends."""
    logger = logging.getLogger("dualenc.workflows")
    handler = NoticeHandler()
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    # A root handler, if a library has installed one, would print the same lines again.
    logger.propagate = False
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.removeHandler(handler)
