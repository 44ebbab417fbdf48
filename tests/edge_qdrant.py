"""Qdrant's engine in this process (qdrant-edge-py) behind the methods of the client that `QdrantIndex` calls."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import qdrant_edge as edge
from qdrant_client import models

SCHEMAS = {name.lower(): getattr(edge.PayloadSchemaType, name) for name in ("Keyword", "Integer", "Float", "Bool")}
GRAPH = edge.HnswIndexConfig(m=16, ef_construct=100, full_scan_threshold=10)
"""Search of the graph unless a few hundred bytes of vectors are left."""
SMALL = edge.EdgeOptimizersConfig(indexing_threshold=100, default_segment_number=1)
"""A graph already for 100 KB of vectors."""


def as_edge(condition: Any) -> Any:
    """A condition of the client as the engine's."""
    if isinstance(condition, models.Filter):
        parts = {name: getattr(condition, name) for name in ("must", "should", "must_not")}
        return edge.Filter(**{name: [as_edge(part) for part in each] for name, each in parts.items() if each})
    if isinstance(condition, models.IsEmptyCondition):
        return edge.IsEmptyCondition(key=condition.is_empty.key)
    assert isinstance(condition, models.FieldCondition)
    if condition.range is not None:
        return edge.FieldCondition(key=condition.key, range=edge.RangeFloat(**condition.range.model_dump()))
    return edge.FieldCondition(key=condition.key, match=edge.MatchValue(value=condition.match.value))  # type: ignore[union-attr]


class EdgeClient:
    """One collection in a folder; the graph is built when its state is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shard: Any = None
        self.metadata: dict[str, str] = {}

    def close(self) -> None:
        """A server goes on."""

    def collection_exists(self, name: str) -> bool:
        return self.shard is not None

    def build(self) -> None:
        self.shard.optimize()

    def get_collection(self, name: str) -> Any:
        self.build()
        return SimpleNamespace(config=SimpleNamespace(metadata=self.metadata), status="green")

    def count(self, name: str, exact: bool) -> Any:
        return SimpleNamespace(count=self.shard.count(edge.CountRequest(exact=exact)))

    def delete_collection(self, name: str) -> None:
        assert self.shard is None

    def create_collection(self, name: str, vectors: models.VectorParams, metadata: dict[str, str]) -> None:
        self.metadata = json.loads(json.dumps(metadata))
        dtype = {"float16": edge.VectorStorageDatatype.Float16, "float32": edge.VectorStorageDatatype.Float32}
        distance = {"Cosine": edge.Distance.Cosine, "Dot": edge.Distance.Dot}
        stored = edge.EdgeVectorParams(
            size=vectors.size,
            distance=distance[vectors.distance.value],
            datatype=dtype[vectors.datatype.value],  # type: ignore[union-attr]
        )
        config = edge.EdgeConfig(vectors=stored, hnsw_config=GRAPH, optimizers=SMALL)
        self.shard = edge.EdgeShard.create(str(self.folder), config)

    def create_payload_index(self, name: str, field: str, schema: str) -> None:
        self.shard.update(edge.UpdateOperation.create_field_index(field, SCHEMAS[schema]))

    def upload_collection(
        self, name: str, vectors: np.ndarray, payload: Sequence[dict[str, Any]], ids: Iterable[str], **_: Any
    ) -> None:
        points = [edge.Point(*point) for point in zip(ids, vectors.tolist(), payload)]
        self.shard.update(edge.UpdateOperation.upsert_points(points))

    def query_points(
        self,
        name: str,
        query: list[float],
        limit: int,
        with_payload: list[str],
        search_params: models.SearchParams,
        query_filter: models.Filter | None,
    ) -> Any:
        parameters = edge.SearchParams(hnsw_ef=search_params.hnsw_ef, exact=bool(search_params.exact))
        request = edge.QueryRequest(
            limit=limit,
            query=edge.Query.Nearest(query),
            with_payload=with_payload,
            filter=None if query_filter is None else as_edge(query_filter),
            params=parameters,
        )
        return SimpleNamespace(points=self.shard.query(request))
