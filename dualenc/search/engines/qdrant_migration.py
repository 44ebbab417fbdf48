"""Migrate a collection of Qdrant: pending points, and writes to them, for both ways to do it.

Qdrant has no transactions. Beside each new vector the payload gets a checksum of what the vector
was made of, so whatever clients insert or change meanwhile becomes pending by itself, and passes
over the collection find it.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from qdrant_client import models

from dualenc.search.engines.migration_record import FILLING, Migration, Whole
from dualenc.search.engines.qdrant_collection import MARK, QdrantCollection
from dualenc.search.engines.qdrant_owner import Owner

SETTLE_SECONDS = 2.0
"""How long clients are expected to write by a record that they read before."""
MAX_PASSES = 200
"""Passes after a switch; clients that change texts all the time would keep them going."""
INDEX_SECONDS = 600
"""How long a switch waits for the server's index, which clients' writes may keep unfinished."""


class PendingPoint(NamedTuple):
    """A point without a new vector of its text.

    Attributes:
        id: its id in Qdrant.
        name: its id for judgements and data.
        text: its whole text; None without one.
        stored: its text in the payload.
        checksum: checksum of what the vector is made of.
        mark: checksum in its payload; None without one.
        payload: the fields that were read.
        vectors: its other vectors, if they are copied.
    """

    id: Any
    name: str
    text: str | None
    stored: str | None
    checksum: str
    mark: str | None
    payload: dict[str, Any]
    vectors: dict[str, Any]


class PointMigration(ABC):
    """The migration of a collection to vectors of another model.

    Args:
        collection: the collection.
        owner: its owner, which is checked before each write.
        notes: the notes of the record: names of collections, vectors and fields.
        whole: see `Whole`.
    """

    def __init__(
        self, collection: QdrantCollection, owner: Owner, notes: dict[str, Any], whole: Whole
    ) -> None:
        self.collection = collection
        self.client = collection.client
        self.owner = owner
        self.source = str(notes["source"])
        self.target = str(notes["target"])
        self.old = str(notes["old"])
        self.new = str(notes["new"])
        self.text = str(notes["text"])
        self.id = notes.get("id")
        self.dim = int(notes["dim"])
        self.whole = whole
        self.is_switched = False

    @abstractmethod
    def start(self, record: Migration) -> None:
        """Write the record, and add what is filled, unless it exists."""

    @abstractmethod
    def scan(self, ids: Sequence[Any] | None) -> Iterator[list[PendingPoint]]:
        """Yield the pending points in pages, of all points or of those with some ids."""

    def pending(self, size: int, ids: Sequence[Any] | None = None) -> Iterator[list[PendingPoint]]:
        """Yield pending points.

        Args:
            size: maximum number of points at once.
            ids: only points with these ids.
        """
        for page in self.scan(ids):
            for start in range(0, len(page), size):
                yield page[start : start + size]

    def store(self, rows: Sequence[PendingPoint], vectors: Sequence[np.ndarray | None]) -> None:
        """Store the vectors (D,) of pending points, None for a text without one.

        A point whose text changes meanwhile stays pending.
        """
        kept = list(zip(rows, vectors))
        while kept:
            self.owner.check()
            try:
                self.put(kept)
                return
            except Exception:
                # A client may have deleted a point, which the server reports as an error.
                stored = self.collection.retrieve(self.source, [row.id for row, _ in kept])
                left = [(row, vector) for row, vector in kept if row.id in stored]
                if len(left) == len(kept):
                    raise
                kept = left

    @abstractmethod
    def put(self, rows: Sequence[tuple[PendingPoint, np.ndarray | None]]) -> None:
        """Write vectors, and then their checksums."""

    def remove_deleted(self) -> int:
        """Remove from a copy what clients have deleted; return how many points."""
        return 0

    @abstractmethod
    def switch(self, record: Migration) -> None:
        """Record the new vectors as those to search."""

    @abstractmethod
    def switch_back(self, record: Migration) -> None:
        """Record the old vectors as those to search; the new ones stay."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the new vectors, the checksums and the record."""

    @abstractmethod
    def finish(self, record: Migration) -> None:
        """Remove the old vectors and the checksums."""

    def repeat(self, step: Callable[[], int]) -> None:
        """Repeat a step that returns how much it has found until it finds no less."""
        before = None
        while found := step():
            if before is not None and found >= before:
                return
            before = found

    def settle(self, step: Callable[[], int]) -> bool:
        """Repeat a step until clients have read a record that was just written.

        Returns:
            False if the last repetition has still found something.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        for _ in range(MAX_PASSES):
            found = step()
            if not found and time.monotonic() > deadline:
                return True
            time.sleep(0.05)
        return False

    def wait_for_index(self) -> bool:
        """Wait until the server has indexed the new vectors; return whether it has."""
        deadline = time.monotonic() + INDEX_SECONDS
        while self.client.get_collection(self.target).status == "yellow":
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def count_missing(self, record: Migration) -> int:
        """Return the number of points without a vector that searches find."""
        is_new = record.state != FILLING
        lacking = without_vector(self.new if is_new else self.old)
        name = self.target if is_new else self.source
        return int(self.client.count(name, lacking, exact=True).count)

    def name_of(self, point: Any) -> str:
        """Return the id of a point in the data: a field of its payload, or its own."""
        return str((point.payload or {}).get(self.id, point.id) if self.id else point.id)

    def _row(self, point: Any, checksum: str, vectors: dict[str, Any]) -> PendingPoint:
        """Return a pending point."""
        payload = dict(point.payload or {})
        mark = payload.pop(MARK, None)
        stored = payload.get(self.text)
        stored = stored if isinstance(stored, str) else None
        name = self.name_of(point)
        whole = self.whole(name, stored)
        return PendingPoint(point.id, name, whole, stored, checksum, mark, payload, vectors)

    def unmark(self, name: str) -> None:
        """Remove the checksums from the payload of a collection."""
        for page in self.collection.points(name, [MARK]):
            if ids := [point.id for point in page if MARK in (point.payload or {})]:
                selector = models.FilterSelector(
                    filter=models.Filter(must=[models.HasIdCondition(has_id=ids)])
                )
                self.client.delete_payload(name, [MARK], selector, wait=True)


def set_marks(marks: Sequence[tuple[Any, str]]) -> list[Any]:
    """Return the operations that write checksums into the payloads of points."""
    operations = []
    for id, mark in marks:
        # By a condition: by its id, a point that was deleted meanwhile would be an error.
        has_id = models.Filter(must=[models.HasIdCondition(has_id=[id])])
        change = models.SetPayload(payload={MARK: mark}, filter=has_id)
        operations.append(models.SetPayloadOperation(set_payload=change))
    return operations


def without_vector(name: str) -> models.Filter:
    """Return the condition that a point lacks a vector."""
    return models.Filter(must_not=[models.HasVectorCondition(has_vector=name)])


def md5(text: str) -> str:
    """Return the checksum of a text."""
    return hashlib.md5(text.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()
