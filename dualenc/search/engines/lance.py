"""LanceDB: tables in a folder or an object store, without a server. Filters are SQL."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualenc.errors import DualencError
from dualenc.files import check_folder_target
from dualenc.search.engines.connection import CollectionInfo, Connection, Found, one_line, with_short_strings
from dualenc.search.kinds import EXACT_VALUES

DISTANCES = {"cosine": "cosine", "ip": "dot"}
REFINE_FACTOR = {"none": 1, "scalar": 4, "binary": 20}
"""Candidates per result that are scored again with the original vectors."""
_SQL_TOKEN = re.compile(r"\s+|'(?:[^']|'')*'|`\w+`|\w+(?:\.\d+)?|[<>!]=|<>|[=<>(),-]")
_SQL_CALL = re.compile(r"(?!(?:and|or|not|in)\b)\b\w+\s*\(|`\s*\(", re.IGNORECASE)


class Lance(Connection):
    """A table in LanceDB; credentials of an object store come from that store's own environment variables."""

    kind = "lancedb"
    filter_language = "SQL"
    batch_rows = 16_384  # each batch becomes one file of the table

    def __init__(self, target: str, collection: str) -> None:
        super().__init__(target, collection)
        if not self.is_remote:
            check_folder_target(self.target, lambda folder: any(folder.glob("*.lance")), "LanceDB tables")
        # Otherwise every new table prints notes for LanceDB's developers.
        os.environ.setdefault("LANCE_LOG", "error")
        self.lancedb = self.import_client("lancedb")
        self.table: Any = None

    def info(self) -> CollectionInfo | None:
        """Open the table; returns its stored description, None without a table."""
        if not self.is_remote and not Path(self.target).is_dir():
            return None
        try:
            self.table = self.lancedb.connect(self.target).open_table(self.collection)
        except ValueError as error:
            if "not found" in str(error):
                return None
            raise
        stored = (self.table.schema.metadata or {}).get(b"dualenc", b"null")
        return CollectionInfo.from_dict(json.loads(stored), self.place)

    def create(self, info: CollectionInfo, schema: pa.Schema) -> None:
        """Create the empty table with the schema of the batches, in place of an earlier one."""
        described = with_short_strings(schema).with_metadata({"dualenc": json.dumps(vars(info))})
        database = self.lancedb.connect(self.target)
        database.drop_table(self.collection, ignore_missing=True)
        self.table = database.create_table(self.collection, schema=described)

    def num_stored(self, ids: Sequence[str]) -> int:
        """How many of the first of `ids` are stored; -1 if other rows or duplicates are."""
        stored = self._ids("")
        expected = pa.array(ids[: len(stored)], pa.string())
        # Two processes that pushed at the same time have appended some rows twice.
        is_distinct = pc.count_distinct(stored).as_py() == len(stored)
        return len(stored) if is_distinct and pc.all(pc.is_in(stored, expected), min_count=0).as_py() else -1

    def add(self, batch: pa.RecordBatch) -> None:
        """Append a batch; once this returns it is durable, and a kill before leaves none of it."""
        self.table.add(pa.table(batch).cast(self.table.schema))

    def finish(self, info: CollectionInfo) -> None:
        """Compact the files; index vectors that are many or compressed, and then the columns, unless that is done."""
        self.table.optimize(cleanup_older_than=timedelta(days=1))
        if info.quantization == "none" and info.count * info.dim <= EXACT_VALUES:
            return
        index = self.lancedb.index
        kinds = {"none": index.IvfFlat, "scalar": index.IvfHnswSq, "binary": index.IvfRq}
        configs = dict.fromkeys(info.columns, index.BTree())
        configs["vector"] = kinds[info.quantization](distance_type=DISTANCES[info.metric])
        indexed = [name for existing in self.table.list_indices() for name in existing.columns]
        for name in configs.keys() - indexed:
            self.table.create_index(name, config=configs[name])

    def ids(self, filter: str) -> list[str]:
        """The ids of all rows that match a filter."""
        return list(self._ids(filter).to_pylist())

    def _ids(self, filter: str) -> pa.ChunkedArray:
        query = self.table.search().select(["id"]).limit(max(1, self.table.count_rows()))
        return (query.where(filter) if filter else query).to_arrow().column("id")

    def check_filter(self, filter: str) -> None:
        """Refuse a stranger's filter that is harmful or cannot be evaluated."""
        check_sql(filter)
        try:
            self.table.search().where(filter).limit(1).explain_plan()
        except Exception as error:
            # Of any type; nothing after a slash is repeated, because strangers must not see this machine's paths.
            raise DualencError(f"the filter cannot be evaluated: {one_line(error).partition('/')[0]}") from None

    def vectors(self, ids: Sequence[str]) -> dict[str, Any]:
        """The stored vectors by id, of those of `ids` that are stored."""
        quoted = ", ".join("'" + name.replace("'", "''") + "'" for name in ids)
        query = self.table.search().where(f"id IN ({quoted})").select(["id", "vector"])
        return {row["id"]: row["vector"] for row in query.limit(len(ids)).to_list()}

    def query(
        self, info: CollectionInfo, vector: np.ndarray, k: int, filter: str, names: list[str], settings: dict[str, int]
    ) -> Found:
        """The k nearest rows that match the filter: the named values and the score of each."""
        query = self.table.search(vector).distance_type(DISTANCES[info.metric]).limit(k)
        query = query.select([*names, "_distance"]).refine_factor(REFINE_FACTOR[info.quantization])
        if "nprobe" in settings:
            query = query.nprobes(settings["nprobe"])
        if "ef_search" in settings:
            query = query.ef(settings["ef_search"])
        if filter:
            query = query.where(filter, prefilter=True)
        # Both distances are one minus the similarity.
        return [(row, 1 - row.pop("_distance")) for row in query.to_list()]

    def explain(self, error: Exception) -> str:
        """LanceDB appends the place in its own source code."""
        return f"LanceDB says {one_line(error).partition(', /')[0]}; check the filter and the folder"


def check_sql(filter: str) -> None:
    """Refuse SQL that does more than compare columns with literals.

    LanceDB evaluates SQL functions, too: `length(repeat(id, 100000000)) > 3` over a thousand rows makes it allocate
    389 GB and abort the process, which no `except` catches.

    Raises:
        DualencError: a function call, arithmetic, or a character that comparisons do not need.
    """
    if _SQL_TOKEN.sub("", filter) or _SQL_CALL.search(re.sub(r"'(?:[^']|'')*'", "''", filter)):
        raise DualencError("the filter may compare columns with literals, by =, <, IN, LIKE, IS NULL, AND, OR and NOT")
