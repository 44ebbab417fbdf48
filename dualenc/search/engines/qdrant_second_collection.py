"""A second collection, filled while clients write to the first, and the alias that is switched.

A point and its new vector are written at once, so the text in the payload is always that of the
vector. The checksum of a point is that of its id and payload. It is in the payload of both copies:
in the first collection, it shows which points have been copied as they are, and in the second one,
which points clients have not written since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from qdrant_client import models

from dualenc.errors import DualencError
from dualenc.search.engines.migration_record import FILLING, FINISHED, SWITCHED, Migration
from dualenc.search.engines.qdrant_collection import KEY, MARK, entries_of
from dualenc.search.engines.qdrant_migration import PendingPoint, PointMigration, md5, set_marks


class SecondCollectionMigration(PointMigration):
    """The migration to a second collection."""

    def start(self, record: Migration) -> None:
        """Write the record, and create the collection with the configuration of the first one."""
        exists = self.client.collection_exists(self.target)
        if exists and not (self.client.get_collection(self.target).config.metadata or {}).get(KEY):
            raise DualencError(
                f"a collection {self.target!r} exists, which no recorded migration has made",
                fix="remove it",
                where=self.collection.location,
            )
        self.collection.write(self.source, record)
        info = self.client.get_collection(self.source)
        if not exists:
            self._create(info.config, record)
        # Before the first point: Qdrant adds the links that filtered searches need only for
        # payload indexes that exist when the graph is built.
        made = self.client.get_collection(self.target).payload_schema
        for field, index in info.payload_schema.items():
            if field not in made:
                schema = index.params or index.data_type
                self.client.create_payload_index(self.target, field, schema, wait=True)

    def _create(self, config: Any, record: Migration) -> None:
        """Create the second collection."""
        params = config.params
        vectors = params.vectors
        if isinstance(vectors, dict):
            changed = vectors[self.old].model_copy(update={"size": self.dim})
            vectors = {**vectors, self.old: changed}
        else:
            vectors = vectors.model_copy(update={"size": self.dim})
        switched = record._replace(state=SWITCHED, model=record.new_model)
        metadata = {**(config.metadata or {}), **record.notes.get("metadata", {})}
        metadata = {name: value for name, value in metadata.items() if name != "dualenc_owner"}
        self.client.create_collection(
            self.target,
            vectors,
            sparse_vectors_config=params.sparse_vectors,
            shard_number=params.shard_number,
            replication_factor=params.replication_factor,
            write_consistency_factor=params.write_consistency_factor,
            on_disk_payload=params.on_disk_payload,
            payload=params.payload,
            id_tracker=params.id_tracker,
            hnsw_config=_as(models.HnswConfigDiff, config.hnsw_config),
            optimizers_config=_as(models.OptimizersConfigDiff, config.optimizer_config),
            wal_config=_as(models.WalConfigDiff, config.wal_config),
            quantization_config=config.quantization_config,
            strict_mode_config=_as(models.StrictModeConfig, config.strict_mode_config),
            metadata={**metadata, KEY: entries_of(switched)},
        )

    def _others(self) -> list[str]:
        """Return the names of the vectors that are copied."""
        params = self.client.get_collection(self.source).config.params
        dense = params.vectors if isinstance(params.vectors, dict) else {}
        return [name for name in (*dense, *(params.sparse_vectors or {})) if name != self.old]

    def scan(self, ids: Sequence[Any] | None) -> Iterator[list[PendingPoint]]:
        """Yield the points whose copy is missing or of another payload."""
        others = self._others()
        if ids is not None:
            found = self.collection.retrieve(self.source, ids, True, others or False)
            yield self._pending([found[id] for id in ids if id in found])
            return
        for page in self.collection.points(self.source, True, others or False):
            yield self._pending(page)

    def _pending(self, points: Sequence[Any]) -> list[PendingPoint]:
        """Return those of the points that have to be copied."""
        wanted = True if self.is_switched else [MARK]
        copies = self.collection.retrieve(self.target, [point.id for point in points], wanted)
        rows = []
        for point in points:
            checksum = _checksum(point)
            mark = (point.payload or {}).get(MARK)
            copy = copies.get(point.id)
            if copy is None:
                # After the switch, a client has deleted the copy of a point that was copied.
                is_pending = not (self.is_switched and mark is not None)
            else:
                copied = (copy.payload or {}).get(MARK)
                is_pending = mark != checksum or copied != checksum
                if self.is_switched:
                    # What clients have written to the copy is newer.
                    is_pending = copied == _checksum(copy) != checksum
            if is_pending:
                vectors = point.vector if isinstance(point.vector, dict) else {}
                rows.append(self._row(point, checksum, vectors))
        return rows

    def put(self, rows: Sequence[tuple[PendingPoint, np.ndarray | None]]) -> None:
        """Write copies with their new vectors, and then the checksums of the points."""
        points = []
        for row, vector in rows:
            vectors: Any = dict(row.vectors)
            if vector is not None:
                vectors[self.old] = vector.tolist()
            if list(vectors) == [""]:
                vectors = vectors[""]
            payload = {**row.payload, MARK: row.checksum}
            points.append(models.PointStruct(id=row.id, vector=vectors, payload=payload))
        condition = None
        if self.is_switched:
            # Points that meet the condition are replaced, those that do not exist are inserted,
            # and what clients have written since stays.
            copies = self.collection.retrieve(self.target, [row.id for row, _ in rows], [MARK])
            marks = {id: (copy.payload or {}).get(MARK, "") for id, copy in copies.items()}
            known = [(row.id, MARK, marks.get(row.id, "")) for row, _ in rows]
            condition = self.collection.unchanged(known)
        self.client.upsert(self.target, points, wait=True, update_filter=condition)
        marks_of = set_marks([(row.id, row.checksum) for row, _ in rows])
        self.client.batch_update_points(self.source, marks_of, wait=True)

    def remove_deleted(self) -> int:
        """Remove copies of points that clients have deleted."""
        removed = 0
        for page in self.collection.points(self.target, self.is_switched):
            kept = self.collection.retrieve(self.source, [point.id for point in page])
            gone = [point for point in page if point.id not in kept]
            condition = None
            if self.is_switched:
                # A point that clients have written there is theirs.
                gone = [p for p in gone if (p.payload or {}).get(MARK) == _checksum(p)]
                marks = [(point.id, MARK, point.payload[MARK]) for point in gone]
                condition = self.collection.unchanged(marks)
            if gone:
                self.owner.check()
                has_id = models.HasIdCondition(has_id=[point.id for point in gone])
                selector = models.FilterSelector(filter=condition or models.Filter(must=[has_id]))
                self.client.delete(self.target, selector, wait=True)
                removed += len(gone)
        return removed

    def switch(self, record: Migration) -> None:
        """Record the second collection as the one to search, and move the aliases to it."""
        self.owner.check()
        aliases = sorted({*record.notes["aliases"], *self.collection.aliases(self.source)})
        notes = {**record.notes, "aliases": aliases}
        switched = record._replace(state=SWITCHED, model=record.new_model, notes=notes)
        for name in (self.target, self.source):
            self.collection.write(name, switched)
        self._point_aliases(aliases, self.target)
        self.is_switched = True

    def _point_aliases(self, aliases: Sequence[str], name: str) -> None:
        """Let aliases point to a collection, in one request; leave those of other collections."""
        pairs = self.client.get_aliases().aliases
        places = {each.alias_name: each.collection_name for each in pairs}
        changes: list[Any] = []
        for alias in aliases:
            if alias in places:
                delete = models.DeleteAlias(alias_name=alias)
                changes.append(models.DeleteAliasOperation(delete_alias=delete))
            create = models.CreateAlias(collection_name=name, alias_name=alias)
            changes.append(models.CreateAliasOperation(create_alias=create))
        own = {None, self.source, self.target} - {name}
        changes = [change for change in changes if places.get(_alias_of(change)) in own]
        if changes:
            self.client.update_collection_aliases(changes)

    def switch_back(self, record: Migration) -> None:
        """Bring what clients have written back to the first collection, and search that again."""
        self.repeat(lambda: self._bring_back(is_back=False))
        filling = record._replace(state=FILLING, model=str(record.notes["old_model"]))
        self.collection.write(self.source, filling)
        self._point_aliases(record.notes["aliases"], self.source)
        self.settle(lambda: self._bring_back(is_back=True))

    def _bring_back(self, *, is_back: bool) -> int:
        """Bring what clients have written to the second collection to the first one.

        Args:
            is_back: whether clients write to the first collection again, so that its points are
                newer unless they have the checksum of their payload.

        Returns:
            The number of points.
        """
        changed = 0
        others = self._others()
        for page in self.collection.points(self.target, True, others or False):
            written = [p for p in page if (p.payload or {}).get(MARK) != _checksum(p)]
            originals = self.collection.retrieve(self.source, [p.id for p in written], True)
            for point in written:
                original = originals.get(point.id)
                if original is not None:
                    mark = (original.payload or {}).get(MARK)
                    is_same = _payload(original) == _payload(point)
                    if is_same or (is_back and mark != _checksum(original)):
                        continue
                self._restore(point, original)
                changed += 1
        for page in self.collection.points(self.source, [MARK]):
            copied = [point.id for point in page if (point.payload or {}).get(MARK)]
            kept = self.collection.retrieve(self.target, copied)
            if gone := [id for id in copied if id not in kept]:
                self.client.delete(self.source, models.PointIdsList(points=gone), wait=True)
                changed += len(gone)
        return changed

    def _restore(self, point: Any, original: Any) -> None:
        """Write a point of the second collection to the first one; its vector only stays there."""
        self.owner.check()
        payload = {**_payload(point), MARK: _checksum(point)}
        text = _payload(point).get(self.text)
        if original is not None and _payload(original).get(self.text) == text:
            self.client.overwrite_payload(self.source, payload, [point.id], wait=True)
            return
        # An old vector would be of another text.
        vectors = point.vector if isinstance(point.vector, dict) else {}
        new = models.PointStruct(id=point.id, vector=vectors, payload=payload)
        self.client.upsert(self.source, [new], wait=True)

    def _delete(self, name: str) -> None:
        """Delete a collection of this migration; leave others, which may have taken its name."""
        if self.client.collection_exists(name):
            metadata = self.client.get_collection(name).config.metadata or {}
            if (metadata.get(KEY) or {}).get("notes", {}).get("target") == self.target:
                self.client.delete_collection(name)

    def discard(self) -> None:
        """Delete the second collection, and remove the checksums and the record."""
        self._delete(self.target)
        self.unmark(self.source)
        self.collection.write(self.source, None)

    def finish(self, record: Migration) -> None:
        """Delete the first collection, whose name becomes an alias of the second one."""
        self.collection.write(self.target, record._replace(state=FINISHED))
        self._delete(self.source)
        if self.collection.given_name != self.target:
            self._point_aliases([self.collection.given_name], self.target)
        self.unmark(self.target)


def _payload(point: Any) -> dict[str, Any]:
    """Return the payload of a point without the checksum."""
    return {name: value for name, value in (point.payload or {}).items() if name != MARK}


def _checksum(point: Any) -> str:
    """Return the checksum of a point's id and payload."""
    return md5(json.dumps([str(point.id), _payload(point)], sort_keys=True))


def _alias_of(change: Any) -> str:
    """Return the alias that an operation changes."""
    is_new = isinstance(change, models.CreateAliasOperation)
    return str((change.create_alias if is_new else change.delete_alias).alias_name)


def _as(kind: Any, settings: Any) -> Any:
    """Return settings that were read as those of a request."""
    if settings is None:
        return None
    given = settings.model_dump(exclude_none=True)
    return kind(**{name: value for name, value in given.items() if name in kind.model_fields})
