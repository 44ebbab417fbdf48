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
from dualenc.search.engines.connection import KEY, CollectionInfo, Connection, Found, one_line, qdrant_place

IDS = uuid.uuid5(uuid.NAMESPACE_OID, "dualenc")
"""Qdrant names points by numbers or UUIDs: an item's point is UUID 5 of its id in this namespace."""
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
        qdrant = self.import_client("qdrant_client")
        self.models = qdrant.models
        place = qdrant_place(target)
        with self.one_line_errors():
            self.client = qdrant.QdrantClient(**place, timeout=60, check_compatibility=False)
        # Before Python exits, when the client's own destructor fails with a traceback.
        self.close = weakref.finalize(self, self.client.close)  # type: ignore[method-assign]

    def info(self) -> CollectionInfo | None:
        """The stored description; None without a collection."""
        if not self.client.collection_exists(self.collection):
            return None
        metadata = self.client.get_collection(self.collection).config.metadata or {}
        return CollectionInfo.from_dict(metadata.get("dualenc"), self.place)

    def create(self, info: CollectionInfo, schema: pa.Schema) -> None:
        """Create the empty collection, in place of an earlier one."""
        distance = "Cosine" if info.metric == "cosine" else "Dot"
        compressed = info.quantization != "none"
        self.client.delete_collection(self.collection)
        self.client.create_collection(
            self.collection,
            self.models.VectorParams(size=info.dim, distance=distance, datatype=info.dtype, on_disk=compressed),
            quantization_config=QUANTIZATION.get(info.quantization),
            metadata={"dualenc": vars(info)},
        )
        # Before the vectors arrive: the graph then gets links for filtered searches, too.
        for name, kind in info.columns.items() if self.is_remote else ():
            self.client.create_payload_index(self.collection, name, INDEXES[kind])
        if not self.client.get_collection(self.collection).config.metadata:
            self.client.delete_collection(self.collection)
            raise DualencError(f"{self.target}: keeps no metadata of collections; update Qdrant to 1.16 or later")

    def num_stored(self, ids: Sequence[str]) -> int:
        """How many of the first of `ids` are stored: batches arrive in order, and sending a point again is harmless."""
        return int(self.client.count(self.collection, exact=True).count)

    def add(self, batch: pa.RecordBatch) -> None:
        """Store a batch; returns once it is durable."""
        # A missing value is absent: filters of Qdrant tell null from empty.
        rows = [
            {name: value for name, value in row.items() if value is not None}
            for row in batch.drop_columns(["vector"]).to_pylist()
        ]
        vectors = batch.column("vector").flatten().to_numpy().reshape(len(batch), -1).astype(np.float32)
        points = [str(uuid.uuid5(IDS, row["id"])) for row in rows]
        # A server takes 32 MiB at once, and a number is up to 24 bytes of JSON: enough for 5,000 dimensions.
        how: dict[str, Any] = {"batch_size": 256, "max_retries": 4, "wait": True}
        self.client.upload_collection(self.collection, vectors, rows, points, **how)

    def finish(self, info: CollectionInfo) -> None:
        """Wait until the server has built its graph; the embedded mode has none."""
        for _ in range(MAX_BUILD_S if self.is_remote else 0):
            if self.client.get_collection(self.collection).status == self.models.CollectionStatus.GREEN:
                return
            time.sleep(1)
        if self.is_remote:
            raise DualencError(f"{self.place}: still builds its index; run the same command again later")

    def ids(self, filter: str) -> list[str]:
        """The ids of all points that match a filter."""
        count = self.client.count(self.collection).count
        records, _ = self.client.scroll(self.collection, self.check_filter(filter), count, with_payload=["id"])
        return [record.payload["id"] for record in records]

    def check_filter(self, filter: str) -> Any:
        """A filter as the client's own class, which refuses what it does not define."""
        try:
            return self.models.Filter.model_validate_json(filter)
        except ValueError as error:
            raise DualencError(f"the filter is no Qdrant filter ({one_line(error)}), such as {EXAMPLE}") from None

    def vectors(self, ids: Sequence[str]) -> dict[str, Any]:
        """The stored vectors by id, of those of `ids` that are stored."""
        points = [str(uuid.uuid5(IDS, name)) for name in ids]
        records = self.client.retrieve(self.collection, points, ["id"], with_vectors=True)
        return {record.payload["id"]: record.vector for record in records}

    def query(
        self, info: CollectionInfo, vector: np.ndarray, k: int, filter: str, names: list[str], settings: dict[str, int]
    ) -> Found:
        """The k nearest points that match the filter: the named values and the score of each."""
        if "nprobe" in settings:
            raise DualencError(f"--nprobe is {settings['nprobe']}, but Qdrant searches a graph; give --ef-search")
        how: dict[str, Any] = {"limit": k, "with_payload": names}
        # The embedded mode is exact, and warns of any parameter.
        if self.is_remote:
            factor = OVERSAMPLING.get(info.quantization)
            rescore = {"rescore": True, "oversampling": factor} if factor else None
            how["search_params"] = self.models.SearchParams(hnsw_ef=settings.get("ef_search"), quantization=rescore)
        if filter:
            how["query_filter"] = self.check_filter(filter)
        points = self.client.query_points(self.collection, vector.tolist(), **how).points
        return [(point.payload, point.score) for point in points]

    def explain(self, error: Exception) -> str:
        """What to do about an error, without the request."""
        status = getattr(error, "status_code", None)
        if status in (401, 403):
            return f"Qdrant answers HTTP {status}; set {KEY} to a key that may do it"
        if status is not None:
            content = " ".join(getattr(error, "content", b"").decode(errors="replace").split())
            return f"Qdrant answers HTTP {status} ({content[:200]})"
        if type(error).__name__ == "ResponseHandlingException":
            return f"no answer from Qdrant ({one_line(error)}); see that it runs there, then run the same command again"
        if "already accessed" in str(error):
            return "another process uses this folder; wait, or run a server"
        return one_line(error)
