"""Qdrant's engine in this process (qdrant-edge-py) behind the methods of the client that
`QdrantIndex` calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import qdrant_edge as edge
from qdrant_client import models

SCHEMAS = {
    name.lower(): getattr(edge.PayloadSchemaType, name)
    for name in ("Keyword", "Integer", "Float", "Bool")
}
GRAPH = edge.HnswIndexConfig(m=16, ef_construct=100, full_scan_threshold=10)
"""Search of the graph unless a few hundred bytes of vectors are left."""
SMALL = edge.EdgeOptimizersConfig(indexing_threshold=100, default_segment_number=1)
"""A graph already for 100 KB of vectors."""


def as_edge(condition: Any) -> Any:
    """A condition of the client as the engine's."""
    if isinstance(condition, models.Filter):
        parts = {name: getattr(condition, name) for name in ("must", "should", "must_not")}
        return edge.Filter(
            **{name: [as_edge(part) for part in each] for name, each in parts.items() if each}
        )
    if isinstance(condition, models.IsEmptyCondition):
        return edge.IsEmptyCondition(key=condition.is_empty.key)
    assert isinstance(condition, models.FieldCondition)
    if condition.range is not None:
        return edge.FieldCondition(
            key=condition.key, range=edge.RangeFloat(**condition.range.model_dump())
        )
    if isinstance(condition.match, models.MatchAny):
        return edge.FieldCondition(key=condition.key, match=edge.MatchAny(condition.match.any))  # type: ignore[arg-type]
    return edge.FieldCondition(
        key=condition.key, match=edge.MatchValue(value=condition.match.value)
    )  # type: ignore[union-attr]


class EdgeInfo:
    """What is known of a collection; its graph is built when its status is asked for."""

    def __init__(self, metadata: dict[str, str], build: Callable[[], None]) -> None:
        self.config = SimpleNamespace(metadata=metadata)
        self.build = build

    @property
    def status(self) -> str:
        self.build()
        return "green"


class EdgeClient:
    """Collections in a folder, and their aliases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards: dict[str, Any] = {}
        self.metadata: dict[str, dict[str, str]] = {}
        self.aliases: dict[str, str] = {}

    def close(self) -> None:
        """A server goes on."""

    def real_name(self, name: str) -> str:
        return self.aliases.get(name, name)

    def shard(self, name: str) -> Any:
        return self.shards[self.real_name(name)]

    def collection_exists(self, name: str) -> bool:
        return self.real_name(name) in self.shards

    def build(self, name: str) -> None:
        self.shard(name).optimize()

    def get_collection(self, name: str) -> EdgeInfo:
        return EdgeInfo(self.metadata[self.real_name(name)], lambda: self.build(name))

    def get_collections(self) -> Any:
        return SimpleNamespace(collections=[SimpleNamespace(name=name) for name in self.shards])

    def get_aliases(self) -> Any:
        pairs = [SimpleNamespace(alias_name=a, collection_name=c) for a, c in self.aliases.items()]
        return SimpleNamespace(aliases=pairs)

    def update_collection_aliases(self, changes: Sequence[Any]) -> None:
        for change in changes:
            if isinstance(change, models.DeleteAliasOperation):
                del self.aliases[change.delete_alias.alias_name]
            else:
                assert change.create_alias.alias_name not in self.shards
                self.aliases[change.create_alias.alias_name] = change.create_alias.collection_name

    def count(self, name: str, exact: bool) -> Any:
        return SimpleNamespace(count=self.shard(name).count(edge.CountRequest(exact=exact)))

    def delete_collection(self, name: str) -> None:
        if self.shards.pop(name, None) is not None:
            del self.metadata[name]
            self.aliases = {alias: real for alias, real in self.aliases.items() if real != name}

    def create_collection(
        self, name: str, vectors: models.VectorParams, metadata: dict[str, str]
    ) -> None:
        assert name not in self.aliases
        self.metadata[name] = json.loads(json.dumps(metadata))
        dtype = {
            "float16": edge.VectorStorageDatatype.Float16,
            "float32": edge.VectorStorageDatatype.Float32,
        }
        distance = {"Cosine": edge.Distance.Cosine, "Dot": edge.Distance.Dot}
        stored = edge.EdgeVectorParams(
            size=vectors.size,
            distance=distance[vectors.distance.value],
            datatype=dtype[vectors.datatype.value],  # type: ignore[union-attr]
        )
        config = edge.EdgeConfig(vectors=stored, hnsw_config=GRAPH, optimizers=SMALL)
        folder = self.folder / f"{len(list(self.folder.iterdir()))}-{name}"
        folder.mkdir()
        self.shards[name] = edge.EdgeShard.create(str(folder), config)

    def create_payload_index(self, name: str, field: str, schema: str) -> None:
        self.shard(name).update(edge.UpdateOperation.create_field_index(field, SCHEMAS[schema]))

    def upload_collection(
        self,
        name: str,
        vectors: np.ndarray,
        payload: Sequence[dict[str, Any]],
        ids: Iterable[str],
        **_: Any,
    ) -> None:
        points = [edge.Point(*point) for point in zip(ids, vectors.tolist(), payload)]
        self.shard(name).update(edge.UpdateOperation.upsert_points(points))

    def retrieve(
        self, name: str, ids: Sequence[str], with_payload: bool, with_vectors: bool
    ) -> Any:
        return self.shard(name).retrieve(ids, with_payload, with_vectors)

    def query_points(
        self,
        name: str,
        query: list[float],
        limit: int,
        with_payload: list[str],
        search_params: models.SearchParams,
        query_filter: models.Filter | None,
    ) -> Any:
        parameters = edge.SearchParams(
            hnsw_ef=search_params.hnsw_ef, exact=bool(search_params.exact)
        )
        request = edge.QueryRequest(
            limit=limit,
            query=edge.Query.Nearest(query),
            with_payload=with_payload,
            filter=None if query_filter is None else as_edge(query_filter),
            params=parameters,
        )
        return SimpleNamespace(points=self.shard(name).query(request))
