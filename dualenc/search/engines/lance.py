"""LanceDB: tables in a folder, or below the URL of an object store; no server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dualenc.errors import DualencError
from dualenc.files import check_folder_target, explain_full_disk
from dualenc.search.engines.contract import About, Engine, Hit, import_extra, in_order
from dualenc.search.engines.where import Condition
from dualenc.search.kinds import EXACT_VALUES

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = 64 << 20
"""Every batch becomes a file of the table."""
REFINE = {"none": 1, "scalar": 4, "binary": 20}
"""How many times k candidates of the compressed vectors are scored again with the vectors themselves."""
READ_AT_ONCE = 1 << 20


class Lance(Engine):
    """A table in LanceDB.

    Args:
        target: folder, or URL of an object store (s3://, gs://, az://), whose credentials are in its own environment
            variables.
        collection: name of the table.

    Raises:
        DualencError: lancedb is not installed, or the target is its hosted service.
    """

    kind = "lancedb"

    def __init__(self, target: str, collection: str) -> None:
        super().__init__(target, collection)
        self.is_remote = "://" in target
        if target.startswith("db://"):
            raise DualencError(f"{target}: LanceDB's hosted service is not supported; give a folder or an object store")
        if not self.is_remote:
            check_folder_target(target, lambda folder: any(folder.glob("*.lance")), "LanceDB tables")
        os.environ.setdefault("LANCE_LOG", "error")  # its notes on every new table are for programmers
        self.lancedb = import_extra("lancedb", "lancedb", "lancedb")
        self.index = import_extra("lancedb.index", "lancedb", "lancedb")
        self._table: Any = None
        self._present: set[str] | None = None

    @property
    def table(self) -> Any:
        """The table, which must be there."""
        if self._table is None and self.about() is None:
            raise DualencError(f"{self.place}: there is no such table any more; push the embeddings again")
        return self._table

    def about(self) -> About | None:
        if not self.is_remote and not Path(self.target).is_dir():
            return None
        with self._told():
            database = self.lancedb.connect(self.target)
            try:
                self._table = database.open_table(self.collection)
            except ValueError as error:
                if "not found" in str(error):
                    return None
                raise
            written = (self._table.schema.metadata or {}).get(b"dualenc", b"null")
        return About.from_dict(json.loads(written), self.place)

    def create(self, about: About) -> None:
        import pyarrow as pa

        number = pa.float16() if about.dtype == "float16" else pa.float32()
        types = {"text": pa.string(), "integer": pa.int64(), "number": pa.float64(), "truth": pa.bool_()}
        fields = [pa.field("id", pa.string()), pa.field("vector", pa.list_(number, about.dim))]
        fields += [pa.field("snippet", pa.string())] if about.has_snippets else []
        fields += [pa.field(name, types[kind]) for name, kind in about.columns.items()]
        schema = pa.schema(fields, metadata={"dualenc": json.dumps(about.as_dict())})
        with self._told():
            self._table = self.lancedb.connect(self.target).create_table(self.collection, schema=schema)

    def drop(self) -> None:
        with self._told():
            self.lancedb.connect(self.target).drop_table(self.collection)
        self._table = self._present = None

    def batch_rows(self, about: About) -> int:
        return max(1, BATCH_BYTES // (4 * about.dim))

    def present(self, ids: Sequence[str]) -> np.ndarray:
        if self._present is None:
            self._present = set()
            for start in range(0, self.count(), READ_AT_ONCE):
                with self._told():
                    found = self.table.search().select(["id"]).offset(start).limit(READ_AT_ONCE).to_arrow()
                self._present.update(found.column("id").to_pylist())
        return np.array([name in self._present for name in ids], dtype=bool)

    def add(self, ids: Sequence[str], vectors: np.ndarray, snippets: Sequence[str] | None, columns: pa.Table) -> None:
        import pyarrow as pa

        schema = self.table.schema
        numbers = pa.array(
            vectors.astype(np.float16 if schema.field("vector").type.value_type == "halffloat" else "f4").ravel()
        )
        values: list[Any] = [pa.array(ids, pa.string()), pa.FixedSizeListArray.from_arrays(numbers, vectors.shape[1])]
        values += [] if snippets is None else [pa.array(snippets, pa.string())]
        values += [columns.column(name).cast(schema.field(name).type) for name in columns.column_names]
        with self._told():
            self.table.add(pa.table(values, schema=schema))
        if self._present is not None:
            self._present.update(ids)

    def finish(self, about: About) -> None:
        """Lay the files of the batches together; build an index where the vectors are many or shall be compressed."""
        with self._told():
            self.table.optimize(cleanup_older_than=timedelta(days=1))
            if about.quantization == "none" and about.count * about.dim <= EXACT_VALUES:
                return
            if "vector_idx" in [index.name for index in self.table.list_indices()]:
                stats = self.table.index_stats("vector_idx")
                if stats is not None and stats.num_unindexed_rows == 0:
                    return
            distance = "cosine" if about.metric == "cosine" else "dot"
            kinds = {"none": self.index.IvfFlat, "scalar": self.index.IvfHnswSq, "binary": self.index.IvfRq}
            self.table.create_index("vector", config=kinds[about.quantization](distance_type=distance), replace=True)
            for name in about.columns:
                self.table.create_index(name, config=self.index.BTree(), replace=True)

    def count(self, where: Sequence[Condition] = ()) -> int:
        with self._told():
            return int(self.table.count_rows(_sql(where)))

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        named = f"id IN ({', '.join(map(_literal, ids))})"
        with self._told():
            rows = self.table.search().where(named).select(["id", "vector"]).limit(len(ids)).to_list()
        return in_order(ids, {row["id"]: row["vector"] for row in rows})

    def query(
        self,
        vectors: np.ndarray,
        k: int,
        where: Sequence[Condition] = (),
        *,
        payload: bool = True,
        nprobe: int | None = None,
        ef_search: int | None = None,
    ) -> list[list[Hit]]:
        about, condition = self.known, _sql(where)
        names = ["id", "_distance"]
        names += [*(["snippet"] if about.has_snippets else []), *about.columns] if payload else []
        results = []
        for vector in vectors:
            with self._told():
                query = self.table.search(vector).distance_type("cosine" if about.metric == "cosine" else "dot")
                query = query.limit(k).select(names).refine_factor(REFINE[about.quantization])
                if nprobe is not None:
                    query = query.nprobes(nprobe)
                if ef_search is not None:
                    query = query.ef(ef_search)
                if condition is not None:
                    query = query.where(condition, prefilter=True)
                rows = query.to_list()
            # Both distances are one minus the similarity.
            results.append([_hit(row, about.columns) for row in rows])
        return results

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the library, of many kinds, as one line."""
        try:
            with nullcontext() if self.is_remote else explain_full_disk(self.target):
                yield
        except DualencError:
            raise
        except Exception as error:
            why = " ".join(str(error).split()).partition(", /")[0][:200]
            raise DualencError(f"{self.place}: LanceDB says {why}; see that it can be read and written") from error


def _hit(row: dict[str, Any], columns: Sequence[str] | dict[str, Any]) -> Hit:
    kept = {name: row[name] for name in columns if row.get(name) is not None}
    return Hit(row["id"], 1 - float(row["_distance"]), row.get("snippet") or "", kept)


def _sql(where: Sequence[Condition]) -> str | None:
    """Conditions as SQL, in which a comparison with a missing value is never true."""
    parts = []
    for name, sign, values in where:
        if sign in ("=", "!="):
            listed = ", ".join(map(_literal, values))
            parts.append(f"`{name}` {'IN' if sign == '=' else 'NOT IN'} ({listed})")
        else:
            parts.append(f"`{name}` {sign} {_literal(values[0])}")
    return " AND ".join(parts) or None


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value).lower() if isinstance(value, bool) else repr(value)
