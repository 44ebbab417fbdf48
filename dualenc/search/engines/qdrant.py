"""Qdrant: a server by its URL, or the client's embedded mode by a folder. Filters are its JSON."""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dualenc.errors import DualencError
from dualenc.search.engines.collection import (
    CollectionInfo,
    Connection,
    Hit,
    as_hit,
    import_extra,
    in_order,
    one_line,
    vectors_of,
)
from dualenc.search.engines.strangers import check_length
from dualenc.search.engines.targets import QDRANT_KEY, qdrant_folder, qdrant_key

IDS = uuid.uuid5(uuid.NAMESPACE_OID, "dualenc")
"""Qdrant names points by numbers or UUIDs: an item's point is UUID 5 of its id in this namespace."""
REQUEST_ROWS = 256
"""A server takes requests of 32 MiB, and a number is up to 24 bytes of JSON: enough for 5,000 dimensions."""
SERVER = {"timeout": 60, "check_compatibility": False}
MAX_BUILD_S = 600
OVERSAMPLING = {"scalar": 2.0, "binary": 4.0}
"""Candidates per result that are scored again with the original vectors."""
QUANTIZATION: dict[str, Any] = {
    "scalar": {"scalar": {"type": "int8", "quantile": 0.99, "always_ram": True}},
    "binary": {"binary": {"always_ram": True}},
}
INDEXES = {"text": "keyword", "integer": "integer", "number": "float", "truth": "bool"}
EXAMPLE = '{"must": [{"key": "year", "range": {"gte": 2020}}]}'


class Qdrant(Connection):
    """A collection in Qdrant.

    Its client unpickles every point of an embedded store, which can run code: take that path from the user alone.
    """

    kind = "qdrant"
    filter_language = "JSON"
    batch_rows = 1024

    def __init__(self, target: str, collection: str) -> None:
        super().__init__(target, collection)
        qdrant = import_extra("qdrant_client", "qdrant-client", "qdrant")
        self.models = qdrant.models
        with self.one_line_errors():
            if self.is_remote:
                self.client = qdrant.QdrantClient(target, api_key=qdrant_key(target), **SERVER)
            else:
                self.client = qdrant.QdrantClient(path=qdrant_folder(target))
        # Before Python exits, when the client's own destructor fails with a traceback.
        self.close = weakref.finalize(self, self.client.close)

    def info(self) -> CollectionInfo | None:
        """The stored description; None without a collection."""
        with self.one_line_errors():
            if not self.client.collection_exists(self.collection):
                return None
            metadata = self.client.get_collection(self.collection).config.metadata or {}
        return CollectionInfo.from_dict(metadata.get("dualenc"), self.place)

    def create(self, info: CollectionInfo, schema: pa.Schema) -> None:
        """Create the empty collection."""
        distance = "Cosine" if info.metric == "cosine" else "Dot"
        compressed = info.quantization != "none"
        with self.one_line_errors():
            self.client.create_collection(
                self.collection,
                self.models.VectorParams(size=info.dim, distance=distance, datatype=info.dtype, on_disk=compressed),
                quantization_config=QUANTIZATION.get(info.quantization),
                metadata={"dualenc": info.as_dict()},
            )
            # Before the vectors arrive: the graph then gets links for filtered searches, too.
            for name, kind in info.columns.items() if self.is_remote else ():
                self.client.create_payload_index(self.collection, name, INDEXES[kind])
            if not self.client.get_collection(self.collection).config.metadata:
                self.client.delete_collection(self.collection)
                raise DualencError(f"{self.target}: keeps no metadata of collections; update Qdrant to 1.16 or later")

    def drop(self) -> None:
        """Remove the collection."""
        with self.one_line_errors():
            self.client.delete_collection(self.collection)

    def num_stored(self, ids: Sequence[str]) -> int:
        """How many of the first of `ids` are stored: batches arrive in order, and sending a point again is harmless."""
        with self.one_line_errors():
            return int(self.client.count(self.collection, exact=True).count)

    def add(self, batch: pa.RecordBatch) -> None:
        """Store a batch; returns once it is durable."""
        rows = [
            {name: value for name, value in row.items() if value is not None}
            for row in batch.drop_columns(["vector"]).to_pylist()
        ]
        vectors = vectors_of(batch).astype(np.float32)
        points = [_point(row["id"]) for row in rows]
        with self.one_line_errors():
            self.client.upload_collection(
                self.collection, vectors, rows, points, batch_size=REQUEST_ROWS, max_retries=4, wait=True
            )

    def finish(self, info: CollectionInfo) -> None:
        """Wait until the server has built its graph; the embedded mode has none."""
        deadline = time.monotonic() + MAX_BUILD_S
        while self.is_remote:
            with self.one_line_errors():
                status = self.client.get_collection(self.collection).status
            if status == self.models.CollectionStatus.GREEN:
                return
            if time.monotonic() > deadline:
                raise DualencError(f"{self.place}: still builds its index ({status}); run the same command again later")
            time.sleep(1)

    def ids(self, filter: str) -> list[str]:
        """The ids of all points that match a filter."""
        with self.one_line_errors():
            count = self.client.count(self.collection).count
            records, _ = self.client.scroll(self.collection, self._parsed(filter), count, with_payload=["id"])
        return [record.payload["id"] for record in records]

    def check_filter(self, filter: str) -> None:
        """Refuse a stranger's filter that is too long or cannot be parsed."""
        check_length(filter)
        self._parsed(filter)

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """The stored vectors (n, D) float32; `UnknownId` for an id that is not stored."""
        with self.one_line_errors():
            records = self.client.retrieve(self.collection, [_point(name) for name in ids], ["id"], True)
        return in_order(ids, {record.payload["id"]: record.vector for record in records})

    def query(
        self,
        info: CollectionInfo,
        vector: np.ndarray,
        k: int,
        filter: str = "",
        with_columns: bool = True,
        nprobe: int | None = None,
        ef_search: int | None = None,
    ) -> list[Hit]:
        """The k nearest points that match the filter."""
        if nprobe is not None:
            raise DualencError(f"--nprobe is {nprobe}, but Qdrant searches a graph; give --ef-search")
        params = None
        # The embedded mode is exact, and warns of any parameter.
        if self.is_remote:
            factor = OVERSAMPLING.get(info.quantization)
            rescore = {"rescore": True, "oversampling": factor} if factor else None
            params = self.models.SearchParams(hnsw_ef=ef_search, quantization=rescore)
        condition = self._parsed(filter) if filter else None
        payload = with_columns or ["id"]
        with self.one_line_errors():
            points = self.client.query_points(
                self.collection,
                vector.tolist(),
                query_filter=condition,
                limit=k,
                with_payload=payload,
                search_params=params,
            ).points
        return [as_hit(point.payload, point.score) for point in points]

    def _parsed(self, filter: str) -> Any:
        """A filter as the client's own class, which refuses what it does not define."""
        try:
            return self.models.Filter.model_validate_json(filter)
        except ValueError as error:
            raise DualencError(
                f"the filter is no Qdrant filter ({one_line(error)}); write for example {EXAMPLE}"
            ) from None

    def explain(self, error: Exception) -> str:
        """What to do about an error, without the request."""
        status = getattr(error, "status_code", None)
        if status in (401, 403):
            return f"Qdrant answers HTTP {status}; set {QDRANT_KEY} to a key that may do it"
        if status is not None:
            content = getattr(error, "content", b"").decode(errors="replace")
            return f"Qdrant answers HTTP {status} ({' '.join(content.split())[:200]})"
        if type(error).__name__ == "ResponseHandlingException":
            return f"no answer from Qdrant ({one_line(error)}); see that it runs there, then run the same command again"
        if "already accessed" in str(error):
            return "another process uses this folder; wait, or run a server"
        return one_line(error)


def _point(name: str) -> str:
    return str(uuid.uuid5(IDS, name))
