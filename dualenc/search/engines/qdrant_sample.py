"""Points of a collection to measure a migration with."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

from dualenc.search.engines.migration_record import SampledRow
from dualenc.search.engines.qdrant_collection import quoted, vector_of
from dualenc.search.engines.qdrant_migration import PointMigration, md5
from dualenc.types import Vectors

DISTANCES = {"Cosine": "cosine", "Dot": "ip"}


class QdrantSample:
    """Points of a collection with their old vectors; see `dualenc.workflows.measure_table.Rows`.

    Args:
        migration: the migration of the collection.
        parameters: parameters of its old vectors.
    """

    def __init__(self, migration: PointMigration, parameters: Any) -> None:
        self.migration = migration
        self.distance = DISTANCES.get(parameters.distance.value, parameters.distance.value)
        self.dim = int(parameters.size)
        self.point_of: dict[str, Any] = {}

    def count(self) -> int:
        """Return the number of points."""
        return int(self.migration.client.count(self.migration.source, exact=True).count)

    def ids(self) -> list[str]:
        """Return the ids of all points, as the data has them."""
        if not self.point_of:
            field = self.migration.id
            wanted = [field] if field else False
            for page in self.migration.collection.points(self.migration.source, wanted):
                self.point_of.update({self.migration.name_of(point): point.id for point in page})
        return list(self.point_of)

    def draw(self, size: int, others: Sequence[str]) -> list[SampledRow]:
        """Return a sample of points with text and vector, and those with other ids."""
        # An order that does not depend on how points are stored.
        names = heapq.nsmallest(size, self.ids(), key=md5)
        names += sorted(set(others) & self.point_of.keys() - set(names))
        migration = self.migration
        payload = [field for field in (migration.text, migration.id) if field]
        vectors = [migration.old] if migration.old else True
        ids = [self.point_of[name] for name in names]
        found = migration.collection.retrieve(migration.source, ids, payload, vectors)
        rows = []
        for point in found.values():
            stored = (point.payload or {}).get(migration.text)
            text = migration.whole(migration.name_of(point), stored)
            vector = vector_of(point, migration.old)
            if isinstance(text, str) and vector is not None:
                rows.append(SampledRow(migration.name_of(point), text, vector))
        return rows

    def nearest(self, vectors: Vectors, count: int) -> list[list[str]]:
        """Return the ids of the nearest points of vectors (Q, D) of the old model."""
        migration = self.migration
        found = []
        for vector in vectors.tolist():
            answer = migration.client.query_points(
                migration.source,
                vector,
                using=migration.old or None,
                limit=count,
                with_payload=quoted([migration.id] if migration.id else False),
            )
            names = [migration.name_of(point) for point in answer.points]
            self.point_of.update(zip(names, [point.id for point in answer.points]))
            found.append(names)
        return found
