"""LanceDB: tables in a folder or an object store, without a server. Filters are SQL."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualenc.errors import DualencError
from dualenc.files import check_folder_target
from dualenc.search.engines.collection import (
    CollectionInfo,
    Connection,
    Hit,
    as_hit,
    import_extra,
    in_order,
    one_line,
    with_short_strings,
)
from dualenc.search.engines.strangers import check_sql
from dualenc.search.kinds import EXACT_VALUES

DISTANCES = {"cosine": "cosine", "ip": "dot"}
REFINE_FACTOR = {"none": 1, "scalar": 4, "binary": 20}
"""Candidates per result that are scored again with the original vectors."""


class Lance(Connection):
    """A table in LanceDB; credentials of an object store come from that store's own environment variables."""

    kind = "lancedb"
    filter_language = "SQL"
    batch_rows = 16_384  # each batch becomes one file of the table

    def __init__(self, target: str, collection: str) -> None:
        super().__init__(target, collection)
        if not self.is_remote:
            check_folder_target(target, lambda folder: any(folder.glob("*.lance")), "LanceDB tables")
        # Otherwise every new table prints notes for LanceDB's developers.
        os.environ.setdefault("LANCE_LOG", "error")
        self.lancedb = import_extra("lancedb", "lancedb", "lancedb")
        self.index = import_extra("lancedb.index", "lancedb", "lancedb")
        self._table: Any = None

    @property
    def table(self) -> Any:
        """The table, which must exist."""
        if self._table is None and self.info() is None:
            raise DualencError(f"{self.place}: the table is gone; push the embeddings again")
        return self._table

    def info(self) -> CollectionInfo | None:
        """The stored description; None without a table."""
        if not self.is_remote and not Path(self.target).is_dir():
            return None
        with self.one_line_errors():
            try:
                self._table = self.lancedb.connect(self.target).open_table(self.collection)
            except ValueError as error:
                if "not found" in str(error):
                    return None
                raise
            stored = (self._table.schema.metadata or {}).get(b"dualenc", b"null")
        return CollectionInfo.from_dict(json.loads(stored), self.place)

    def create(self, info: CollectionInfo, schema: pa.Schema) -> None:
        """Create the empty table with the schema of the batches."""
        described = with_short_strings(schema).with_metadata({"dualenc": json.dumps(info.as_dict())})
        with self.one_line_errors():
            self._table = self.lancedb.connect(self.target).create_table(self.collection, schema=described)

    def drop(self) -> None:
        """Remove the table."""
        with self.one_line_errors():
            self.lancedb.connect(self.target).drop_table(self.collection)
        self._table = None

    def num_stored(self, ids: Sequence[str]) -> int:
        """How many of the first of `ids` are stored; -1 if other rows or duplicates are."""
        with self.one_line_errors():
            count = int(self.table.count_rows())
            if not count:
                return 0
            stored = self.table.search().select(["id"]).limit(count).to_arrow().column("id")
        expected = pa.array(ids[:count], pa.string())
        # Two processes that pushed at the same time have appended some rows twice.
        is_distinct = pc.count_distinct(stored).as_py() == count
        return count if is_distinct and pc.all(pc.is_in(stored, expected)).as_py() else -1

    def add(self, batch: pa.RecordBatch) -> None:
        """Append a batch; once this returns it is durable, and a kill before leaves none of it."""
        with self.one_line_errors():
            self.table.add(pa.table(batch).cast(self.table.schema))

    def finish(self, info: CollectionInfo) -> None:
        """Compact the files; index vectors that are many or compressed, and then the columns, unless that is done."""
        kinds = {"none": self.index.IvfFlat, "scalar": self.index.IvfHnswSq, "binary": self.index.IvfRq}
        with self.one_line_errors():
            self.table.optimize(cleanup_older_than=timedelta(days=1))
            if info.quantization == "none" and info.count * info.dim <= EXACT_VALUES:
                return
            configs = dict.fromkeys(info.columns, self.index.BTree())
            configs["vector"] = kinds[info.quantization](distance_type=DISTANCES[info.metric])
            indexed = [name for index in self.table.list_indices() for name in index.columns]
            for name in configs.keys() - indexed:
                self.table.create_index(name, config=configs[name])

    def ids(self, filter: str) -> list[str]:
        """The ids of all rows that match a filter."""
        with self.one_line_errors():
            rows = self.table.search().where(filter).select(["id"]).limit(self.table.count_rows()).to_arrow()
        names: list[str] = rows.column("id").to_pylist()
        return names

    def check_filter(self, filter: str) -> None:
        """Refuse a stranger's filter that is harmful or cannot be evaluated."""
        check_sql(filter)
        try:
            self.table.search().where(filter).limit(1).explain_plan()
        except Exception as error:
            # Of any type; nothing after a slash is repeated, because strangers must not see this machine's paths.
            raise DualencError(f"the filter cannot be evaluated: {one_line(error).partition('/')[0]}") from None

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """The stored vectors (n, D) float32; `UnknownId` for an id that is not stored."""
        quoted = ", ".join("'" + name.replace("'", "''") + "'" for name in ids)
        with self.one_line_errors():
            query = self.table.search().where(f"id IN ({quoted})").select(["id", "vector"])
            rows = query.limit(len(ids)).to_list()
        return in_order(ids, {row["id"]: row["vector"] for row in rows})

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
        """The k nearest rows that match the filter."""
        # Vectors are large and never shown.
        names = [*(self.table.schema.names if with_columns else ["id"]), "_distance"]
        with self.one_line_errors():
            query = self.table.search(vector).distance_type(DISTANCES[info.metric]).limit(k)
            query = query.select([name for name in names if name != "vector"])
            query = query.refine_factor(REFINE_FACTOR[info.quantization])
            if nprobe is not None:
                query = query.nprobes(nprobe)
            if ef_search is not None:
                query = query.ef(ef_search)
            if filter:
                query = query.where(filter, prefilter=True)
            rows = query.to_list()
        # Both distances are one minus the similarity.
        return [as_hit(row, 1 - row.pop("_distance")) for row in rows]

    def close(self) -> None:
        """Nothing to release."""

    def explain(self, error: Exception) -> str:
        """LanceDB appends the place in its own source code."""
        return f"LanceDB says {one_line(error).partition(', /')[0]}; check the filter and the folder"
