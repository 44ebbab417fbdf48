"""Qdrant's engine in this process behind the methods of the client that a migration calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import qdrant_edge as edge
from qdrant_client import models

from tests.helpers.edge_qdrant import GRAPH, SMALL, EdgeClient

DISTANCES = {"Cosine": edge.Distance.Cosine, "Dot": edge.Distance.Dot}


def as_edge(condition: Any) -> Any:
    """A condition of the client as the engine's."""
    if condition is None:
        return None
    if isinstance(condition, models.Filter):
        parts = {name: getattr(condition, name) for name in ("must", "should", "must_not")}
        given = {name: [as_edge(part) for part in each] for name, each in parts.items() if each}
        return edge.Filter(**given)
    if isinstance(condition, models.HasIdCondition):
        return edge.HasIdCondition(set(condition.has_id))
    if isinstance(condition, models.HasVectorCondition):
        return edge.HasVectorCondition(condition.has_vector)
    return edge.FieldCondition(key=condition.key, match=edge.MatchValue(condition.match.value))


class EdgeServer(EdgeClient):
    """Collections of the engine, which migrate."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.vectors: dict[str, Any] = {}

    def info(self) -> Any:
        return models.VersionInfo(title="edge", version="1.20.0", commit=None)

    def create_collection(
        self,
        name: str,
        vectors: Any,
        metadata: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        def of(each: models.VectorParams) -> Any:
            return edge.EdgeVectorParams(size=each.size, distance=DISTANCES[each.distance.value])

        is_named = isinstance(vectors, dict)
        stored = {key: of(each) for key, each in vectors.items()} if is_named else of(vectors)
        folder = self.folder / f"{len(list(self.folder.iterdir()))}-{name}"
        folder.mkdir()
        config = edge.EdgeConfig(vectors=stored, hnsw_config=GRAPH, optimizers=SMALL)
        self.shards[name] = edge.EdgeShard.create(str(folder), config)
        self.vectors[name] = dict(vectors) if is_named else vectors
        self.metadata[name] = dict(metadata or {})

    def get_collection(self, name: str) -> Any:
        name = self.real_name(name)
        self.shard(name).optimize()
        params = SimpleNamespace(
            vectors=self.vectors[name],
            sparse_vectors=None,
            sharding_method=None,
            shard_number=1,
            replication_factor=1,
            write_consistency_factor=1,
            on_disk_payload=True,
            payload=None,
            id_tracker=None,
        )
        config = SimpleNamespace(
            params=params,
            metadata=dict(self.metadata[name]),
            strict_mode_config=None,
            hnsw_config=None,
            optimizer_config=None,
            wal_config=None,
            quantization_config=None,
        )
        return SimpleNamespace(config=config, payload_schema={}, status="green")

    def update_collection(
        self, name: str, metadata: Any = None, vectors_config: Any = None
    ) -> None:
        stored = self.metadata[self.real_name(name)]
        for key, value in (metadata or {}).items():
            stored[key] = value
            if value is None:
                del stored[key]

    def update(self, name: str, operation: Any) -> None:
        self.shard(name).update(operation)

    def create_vector_name(self, name: str, vector: str, config: Any, **_: Any) -> None:
        dense, of = config.dense, edge.UpdateOperation.create_dense_vector
        self.update(name, of(vector, dense.size, DISTANCES[dense.distance.value]))
        self.vectors[self.real_name(name)][vector] = models.VectorParams(
            size=dense.size, distance=dense.distance
        )

    def delete_vector_name(self, name: str, vector: str, **_: Any) -> None:
        self.update(name, edge.UpdateOperation.delete_vector_name(vector))
        del self.vectors[self.real_name(name)][vector]

    def scroll(
        self,
        name: str,
        condition: Any = None,
        limit: int = 10,
        offset: Any = None,
        with_payload: Any = True,
        with_vectors: Any = False,
    ) -> Any:
        request = edge.ScrollRequest(
            offset=offset,
            limit=limit,
            filter=as_edge(condition),
            with_payload=with_payload,
            with_vector=with_vectors,
        )
        return self.shard(name).scroll(request)

    def retrieve(
        self, name: str, ids: Sequence[Any], with_payload: Any = True, with_vectors: Any = False
    ) -> Any:
        return self.shard(name).retrieve(list(ids), with_payload, with_vectors)

    def count(self, name: str, count_filter: Any = None, exact: bool = True) -> Any:
        request = edge.CountRequest(filter=as_edge(count_filter), exact=exact)
        return SimpleNamespace(count=self.shard(name).count(request))

    def upsert(self, name: str, points: Sequence[Any], update_filter: Any = None, **_: Any) -> None:
        made = [edge.Point(point.id, point.vector, point.payload) for point in points]
        operation = edge.UpdateOperation.upsert_points(made, as_edge(update_filter))
        self.update(name, operation)

    def set_payload(self, name: str, payload: dict[str, Any], points: list[Any]) -> None:
        self.update(name, edge.UpdateOperation.set_payload(points, payload))

    def overwrite_payload(self, name: str, payload: Any, points: list[Any], **_: Any) -> None:
        self.update(name, edge.UpdateOperation.overwrite_payload(points, payload))

    def delete(self, name: str, selector: Any, **_: Any) -> None:
        if isinstance(selector, models.PointIdsList):
            operation = edge.UpdateOperation.delete_points(selector.points)
        else:
            operation = edge.UpdateOperation.delete_points_by_filter(as_edge(selector.filter))
        self.update(name, operation)

    def delete_payload(self, name: str, keys: list[str], selector: Any, **_: Any) -> None:
        condition = as_edge(selector.filter)
        self.update(name, edge.UpdateOperation.delete_payload_by_filter(condition, keys))

    def delete_vectors(self, name: str, vectors: list[str], condition: Any, **_: Any) -> None:
        operation = edge.UpdateOperation.delete_vectors_by_filter(as_edge(condition), vectors)
        self.update(name, operation)

    def update_vectors(self, name: str, points: Sequence[Any], condition: Any = None) -> None:
        made = [edge.PointVectors(point.id, point.vector) for point in points]
        self.update(name, edge.UpdateOperation.update_vectors(made, as_edge(condition)))

    def batch_update_points(self, name: str, operations: Sequence[Any], **_: Any) -> None:
        for each in operations:
            if isinstance(each, models.UpdateVectorsOperation):
                change = each.update_vectors
                self.update_vectors(name, change.points, change.update_filter)
            elif isinstance(each, models.SetPayloadOperation):
                set_by = edge.UpdateOperation.set_payload_by_filter
                change = each.set_payload
                self.update(name, set_by(as_edge(change.filter), change.payload))
            elif isinstance(each, models.DeletePayloadOperation):
                self.delete_payload(name, each.delete_payload.keys, each.delete_payload)
            else:
                change = each.delete_vectors
                self.delete_vectors(name, change.vector, change.filter)

    def query_points(  # type: ignore[override]
        self, name: str, query: list[float], using: str | None = None, limit: int = 10, **_: Any
    ) -> Any:
        request = edge.QueryRequest(
            limit=limit, query=edge.Query.Nearest(query, using=using), with_payload=True
        )
        return SimpleNamespace(points=self.shard(name).query(request))
