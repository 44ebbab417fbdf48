"""One migration of a collection at a time: its owner is recorded in the metadata, and beats.

Qdrant has neither locks nor a compare-and-set of metadata. A migration writes its token, and then a
number every few seconds. Another one that finds a token waits: if the number moves, it is refused,
and otherwise it takes over from a killed one. Two that write their tokens within the same moment
see it when they read the metadata again, at the latest at the next beat; then one of them stops.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dualenc.errors import DualencError
from dualenc.search.engines.qdrant_collection import QdrantCollection

logger = logging.getLogger("dualenc.search")

KEY = "dualenc_owner"
BEAT_SECONDS = 5.0
MISSED_BEATS = 3
"""So many beats without a change, and the owner is taken for dead."""


class Owner:
    """The owner of a collection's migration, which beats in a thread."""

    def __init__(self, collection: QdrantCollection) -> None:
        self.collection = collection
        record = collection.record()
        # An alias of the collection may be switched meanwhile.
        source = collection.name if record is None else record.notes["source"]
        is_there = collection.client.collection_exists(source)
        self.name = source if is_there else collection.name
        self.token = uuid.uuid4().hex
        self.beats = 0
        self.is_lost = False
        self.stopped = threading.Event()

    def check(self) -> None:
        """Raise if another migration has become the owner."""
        if self.is_lost:
            raise DualencError(
                "another migration of this collection is running",
                fix="wait for its end",
                where=self.collection.location,
            )

    def acquire(self) -> None:
        """Become the owner; raise if another one is alive."""
        known = self._read()
        if known:
            logger.info("%s: looking whether another migration is alive", self.collection.location)
        deadline = time.monotonic() + MISSED_BEATS * BEAT_SECONDS
        while known and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 4)
            found = self._read()
            self.is_lost = bool(found) and found != known
            self.check()
            # It has ended in the meantime.
            known = known if found else []
        self._write()
        time.sleep(BEAT_SECONDS / 5)
        self.is_lost = not self._is_own()
        self.check()

    def beat(self) -> None:
        """Beat until the end, or until another one is the owner."""
        while not self.stopped.wait(BEAT_SECONDS):
            # A server that restarts is away for some beats.
            with suppress(Exception):
                self.is_lost = self.is_lost or not self._is_own()
                if self.is_lost:
                    return
                self._write()

    def release(self) -> None:
        """Leave the collection without an owner, if it still exists."""
        with suppress(Exception):
            if self._is_own():
                self.collection.client.update_collection(self.name, metadata={KEY: None})

    def _read(self) -> list[object]:
        config = self.collection.client.get_collection(self.name).config
        return list((config.metadata or {}).get(KEY) or [])

    def _is_own(self) -> bool:
        return self._read()[:1] == [self.token]

    def _write(self) -> None:
        self.beats += 1
        entry = {KEY: [self.token, self.beats]}
        self.collection.client.update_collection(self.name, metadata=entry)


@contextmanager
def only_migration(collection: QdrantCollection) -> Iterator[Owner]:
    """Own the migration of a collection in this context.

    Raises:
        DualencError: another migration of it is running.
    """
    owner = Owner(collection)
    owner.acquire()
    thread = threading.Thread(target=owner.beat, daemon=True)
    thread.start()
    try:
        yield owner
    finally:
        owner.stopped.set()
        thread.join()
        owner.release()
