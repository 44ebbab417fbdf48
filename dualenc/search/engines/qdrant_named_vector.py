"""A second named vector in the same collection, filled while clients write.

The checksum of a point is that of its text. A point is pending while it lacks the new vector, or
while the checksum differs. Clients that replace a point remove both, and clients that change a text
alone make them differ. Each write blanks the checksum first, then writes the vector, and then the
checksum of the text that was embedded, so a point stays pending if only a part of it is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from qdrant_client import models

from dualenc.errors import DualencError
from dualenc.search.engines.migration_record import FILLING, FINISHED, SWITCHED, Migration
from dualenc.search.engines.qdrant_collection import MARK
from dualenc.search.engines.qdrant_migration import (
    PendingPoint,
    PointMigration,
    md5,
    set_marks,
    without_vector,
)

BEGUN = ""
"""Checksum of a point whose vector is being written."""
NONE = "none:"
"""Begins the checksum of a text without a vector, such as a blank one."""


class NamedVectorMigration(PointMigration):
    """The migration to a named vector of the same collection."""

    def start(self, record: Migration) -> None:
        """Write the record, and add the named vector with the settings of the old one."""
        params = self.client.get_collection(self.source).config.params
        known = self.collection.record()
        if self.new in params.vectors and (known is None or known.notes["new"] != self.new):
            raise DualencError(
                f"has vectors {self.new!r}, which no recorded migration has added",
                fix="remove them",
                where=self.collection.location,
            )
        self.collection.write(self.source, record)
        old = params.vectors[self.old]
        if self.new not in params.vectors:
            dense = models.DenseVectorConfig(
                size=self.dim, distance=old.distance, datatype=old.datatype
            )
            config = models.DenseVectorNameConfig(dense=dense)
            self.client.create_vector_name(self.source, self.new, config, wait=True)
        # A new vector takes no other settings when it is created.
        made = self.client.get_collection(self.source).config.params.vectors[self.new]
        names = ("hnsw_config", "quantization_config", "on_disk", "memory")
        settings = {name: getattr(old, name) for name in names}
        changed = {k: v for k, v in settings.items() if v is not None and v != getattr(made, k)}
        if changed:
            difference = {self.new: models.VectorParamsDiff(**changed)}
            self.client.update_collection(self.source, vectors_config=difference)

    def scan(self, ids: Sequence[Any] | None) -> Iterator[list[PendingPoint]]:
        """Yield points without the vector, and then those of which the text has changed."""
        payload = [name for name in (self.text, MARK, self.id) if name]
        if ids is not None:
            found = self.collection.retrieve(self.source, ids, payload, [self.new])
            points = [found[id] for id in ids if id in found]
            yield self._pending([p for p in points if not (p.vector or {}).get(self.new)], True)
            return
        for page in self.collection.points(self.source, payload, False, without_vector(self.new)):
            yield self._pending(page, True)
        for page in self.collection.points(self.source, payload):
            yield self._pending(page, False)

    def _pending(self, points: Sequence[Any], lacks_vector: bool) -> list[PendingPoint]:
        """Return those of the points that are pending, of which all or none lack the vector."""
        rows = []
        for point in points:
            row = self._row(point, "", {})
            checksum = md5(row.stored or "")
            marks = [NONE + checksum] if lacks_vector else [NONE + checksum, checksum]
            # After the switch clients write new vectors themselves, without a checksum.
            is_clients = self.is_switched and row.mark is None and not lacks_vector
            if row.mark not in marks and not is_clients:
                rows.append(row._replace(checksum=checksum))
        return rows

    def put(self, rows: Sequence[tuple[PendingPoint, np.ndarray | None]]) -> None:
        """Blank the checksums, write vectors, and then the checksums of their texts."""
        # Not removed: after the switch a point without a checksum is a client's own.
        all_rows = models.Filter(must=[models.HasIdCondition(has_id=[row.id for row, _ in rows])])
        begun = models.SetPayload(payload={MARK: BEGUN}, filter=all_rows)
        operations: list[Any] = [models.SetPayloadOperation(set_payload=begun)]
        vectors = {row.id: vector.tolist() for row, vector in rows if vector is not None}
        for is_marked in (False, True):
            points = [
                models.PointVectors(id=row.id, vector={self.new: vectors[row.id]})
                for row, _ in rows
                if row.id in vectors and (row.mark is not None) == is_marked
            ]
            # After the switch, a vector that a client has written since the text was read is newer.
            is_new = self.is_switched and not is_marked
            condition = without_vector(self.new) if is_new else None
            update = models.UpdateVectors(points=points, update_filter=condition)
            if points:
                operations.append(models.UpdateVectorsOperation(update_vectors=update))
        if blank := [row.id for row, _ in rows if row.id not in vectors]:
            by_id = models.Filter(must=[models.HasIdCondition(has_id=blank)])
            gone = models.DeleteVectors(filter=by_id, vector=[self.new])
            operations.append(models.DeleteVectorsOperation(delete_vectors=gone))
        prefix = {row.id: "" if row.id in vectors else NONE for row, _ in rows}
        marks = [(row.id, prefix[row.id] + row.checksum) for row, _ in rows]
        self.client.batch_update_points(self.source, operations + set_marks(marks), wait=True)

    def switch(self, record: Migration) -> None:
        """Record the new vector as the one to search."""
        self.owner.check()
        self.collection.write(self.source, record._replace(state=SWITCHED, model=record.new_model))
        self.is_switched = True

    def switch_back(self, record: Migration) -> None:
        """Record the old vector; those of texts that are newer than the switch are removed."""
        old_model = str(record.notes["old_model"])
        self.repeat(self._remove_outdated)
        self.collection.write(self.source, record._replace(state=FILLING, model=old_model))
        self.settle(self._remove_outdated)

    def _remove_outdated(self) -> int:
        """Remove old vectors of points of which the text has changed since the switch.

        Returns:
            The number of points.
        """
        found = 0
        for page in self.collection.points(self.source, [self.text, MARK]):
            ids = []
            for point in page:
                row = self._row(point, "", {})
                checksum = md5(row.stored or "")
                if row.mark is not None and row.mark not in (checksum, NONE + checksum):
                    ids.append(point.id)
            if ids:
                by_id = models.Filter(must=[models.HasIdCondition(has_id=ids)])
                gone = models.DeleteVectors(filter=by_id, vector=[self.old])
                # Once is enough: a client that follows the record writes the next one.
                keys = models.DeletePayload(keys=[MARK], filter=by_id)
                operations = [
                    models.DeleteVectorsOperation(delete_vectors=gone),
                    models.DeletePayloadOperation(delete_payload=keys),
                ]
                self.client.batch_update_points(self.source, operations, wait=True)
            found += len(ids)
        return found

    def discard(self) -> None:
        """Remove the new vector, the checksums and the record."""
        self.client.delete_vector_name(self.source, self.new, wait=True)
        self.unmark(self.source)
        self.collection.write(self.source, None)

    def finish(self, record: Migration) -> None:
        """Remove the old vector and the checksums."""
        # First the record: nobody may roll back to vectors that are being removed.
        self.collection.write(self.source, record._replace(state=FINISHED))
        self.client.delete_vector_name(self.source, self.old, wait=True)
        self.unmark(self.source)
