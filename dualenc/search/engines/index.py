"""Engine index: push embeddings to a collection, remember it in a folder, and search it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm.auto import tqdm

from dualenc.data.embeddings import Embeddings, read_head
from dualenc.data.identity import digest_of
from dualenc.data.items import check_ids
from dualenc.data.metadata import check_column_names
from dualenc.errors import DualencError, UnknownId
from dualenc.files import check_folder_target, is_folder_of, write_json
from dualenc.reading import read_json_object
from dualenc.search.build import Database, as_queries, exact_probe, share_found
from dualenc.search.engines.connection import CollectionInfo, Quantization, is_server
from dualenc.search.engines.lance import Lance
from dualenc.search.engines.qdrant import Qdrant
from dualenc.search.hits import Hit, as_hit
from dualenc.search.index import KEPT, check_kept
from dualenc.search.where import column_kinds
from dualenc.types import Metric

Engine = Lance | Qdrant
ENGINES: dict[str, type[Lance] | type[Qdrant]] = {"qdrant": Qdrant, "lancedb": Lance}
FORMAT = "dualenc engine"
FORMAT_VERSION = 2  # version 1 kept texts in a column "snippet"
AGAIN = "run `dualenc push` again"
MAX_FILTER_CHARACTERS = 2000  # of a filter that arrives over HTTP


def open_engine(kind: str, target: str, collection: str) -> Engine:
    """Connect to "qdrant" or "lancedb" at a URL or path; the collection need not exist.

    Raises:
        DualencError: a name that not every engine takes, the engine's package is missing, or the target is unusable.
    """
    return ENGINES[kind](target, collection)


def is_engine(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder remembers a collection, by its meta.json."""
    return is_folder_of(folder, FORMAT)


def check_engine_target(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that is not new, not empty, and remembers no collection."""
    check_folder_target(folder, is_engine, "collection that dualenc pushed")


def read_engine_meta(folder: str | os.PathLike[str]) -> tuple[CollectionInfo, dict[str, Any]]:
    """The description of a remembered collection and all entries of meta.json; nothing is opened.

    Raises:
        DualencError: no such folder, or its meta.json cannot be read.
    """
    path = Path(folder) / "meta.json"
    versions = (FORMAT_VERSION, FORMAT_VERSION)
    read_head(path.parent, FORMAT, versions, "was not written by `dualenc push`; push embeddings first", AGAIN)
    meta = read_json_object(path, {"engine": str, "target": str, "collection": str})
    if meta["engine"] not in ENGINES:
        raise DualencError(f"{folder}: names the unknown engine {meta['engine'][:40]!r}; {AGAIN}")
    check_kept(path, meta, AGAIN)
    return CollectionInfo.from_dict(meta, str(path)), meta


class EngineIndex:
    """A collection searched by vectors: what `push` returns, and `EngineIndex.open` finds again.

    Attributes:
        engine: the connection to the collection.
        about: its description.
        meta: entries of meta.json: `engine`, `target`, `collection`, `model`, `side`, `recall_at_10`, …
        dim: D, the size of the vectors.
        column_kinds: types of the columns by name.
        has_snippets: whether each id has a text to show.
        items_checksum: identifies the items.
        filter_language: of `filter`: "SQL" or "JSON".
    """

    def __init__(self, engine: Engine, about: CollectionInfo, meta: Mapping[str, Any]) -> None:
        self.engine = engine
        self.about = about
        self.meta = dict(meta)
        self.dim = about.dim
        self.column_kinds = about.columns
        self.has_snippets = about.has_snippets
        self.items_checksum = about.fingerprint
        self.filter_language = engine.filter_language

    def __len__(self) -> int:
        return self.about.count

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a meta.json with the place and the description of the collection; no keys."""
        check_engine_target(folder)
        write_json(Path(folder) / "meta.json", {"format": FORMAT, "version": FORMAT_VERSION, **self.meta})

    @classmethod
    def open(cls, folder: str | os.PathLike[str], qdrant_path: str | None = None) -> EngineIndex:
        """Open the collection that a folder remembers.

        Args:
            folder: that `dualenc push` wrote.
            qdrant_path: the store of Qdrant's embedded mode, if that is the engine. The client unpickles its points,
                which can run code, so the path is the caller's to name and never taken from the folder.

        Raises:
            DualencError: no such folder, the engine does not answer or its package is missing, the collection has
                changed, or an embedded Qdrant that the caller does not name.
        """
        about, meta = read_engine_meta(folder)
        is_embedded = meta["engine"] == "qdrant" and not is_server(meta["target"])
        if is_embedded and qdrant_path is None:
            raise DualencError(
                f"{folder}: names an embedded Qdrant, whose files can run code; if you trust them, say where they "
                "are with --qdrant-path, or push to LanceDB"
            )
        if not is_embedded and qdrant_path is not None:
            raise DualencError(f"{folder}: names no embedded Qdrant; leave --qdrant-path out")
        engine = open_engine(meta["engine"], qdrant_path or meta["target"], meta["collection"])
        with engine.one_line_errors():
            found = engine.info()
        if found != about:
            problem = "does not exist" if found is None else f"holds other embeddings than {folder} was written for"
            raise DualencError(f"{engine.place}: {problem}; {AGAIN}")
        return cls(engine, about, meta)

    def search(
        self, queries: np.ndarray, k: int = 10, filter: str = "", with_columns: bool = True, **settings: int | None
    ) -> list[list[Hit]]:
        """The nearest items of each query, best first; fewer than k where fewer match the filter.

        Args:
            queries: (Q, D), or one query (D,).
            k: how many items.
            filter: in the engine's own language: SQL for LanceDB, JSON for Qdrant.
            with_columns: return texts and columns, too.
            settings: `nprobe`, lists that an IVF index visits, and `ef_search`, candidates that an HNSW index keeps;
                None for the engine's own.

        Raises:
            DualencError: another dimension than the collection's, queries that are not finite, k below 1, or an
                engine that does not answer.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        names = ["id"]
        if with_columns:
            names += [*(["text"] if self.has_snippets else []), *self.column_kinds]
        results = []
        for vector in as_queries(queries, self.dim, self.about.metric, k):
            with self.engine.one_line_errors():
                found = self.engine.query(self.about, vector, k, filter, names, given)
            results.append([as_hit(row.pop("id"), score, row.pop("text", None), row) for row, score in found])
        return results

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """The stored vectors of some ids: (n, D) float32; `UnknownId` for one that the collection does not have."""
        with self.engine.one_line_errors():
            vector_of = self.engine.vectors(ids)
        for name in ids:
            if name not in vector_of:
                raise UnknownId(f"the collection has no item {name[:200]!r}; give an id that it has returned")
        return np.array([vector_of[name] for name in ids], dtype=np.float32)

    def check_filter(self, filter: str) -> None:
        """Refuse a stranger's filter that is too long, harmful, or cannot be evaluated."""
        if len(filter) > MAX_FILTER_CHARACTERS:
            raise DualencError(f"the filter has {len(filter):,} characters; give at most {MAX_FILTER_CHARACTERS:,}")
        self.engine.check_filter(filter)

    def matching(self, embeddings: Embeddings, filter: str) -> Embeddings:
        """Those of the pushed embeddings whose ids the engine finds by a filter, in memory."""
        if not filter:
            return embeddings
        with self.engine.one_line_errors():
            names = self.engine.ids(filter)
        rows = np.sort(embeddings.rows_of(names))
        return Embeddings([embeddings.ids[row] for row in rows.tolist()], embeddings.vectors[rows], embeddings.meta)

    def recall(
        self,
        embeddings: Embeddings,
        queries: np.ndarray,
        k: int = 10,
        *,
        rows: np.ndarray | None = None,
        found: Sequence[Sequence[Hit]] | None = None,
    ) -> float | None:
        """The share of the k nearest items by exact search that the engine finds, too; None without any.

        Args:
            embeddings: what was pushed; with a filter, only those that match it.
            queries: (Q, D).
            k: neighbours to look for.
            rows: (Q,) row of each query among the embeddings, which is not to find itself; None: they are others.
            found: (Q,) at least k + 1 results per query, if the engine was already asked.
        """
        if not len(embeddings):
            return None
        # Half precision leaves unit vectors a little off, and engines scale them again: so does this exact search.
        rescaled = Embeddings(embeddings.ids, embeddings.vectors, {**embeddings.meta, "normalized": False})
        database = Database(rescaled, self.about.metric)
        rows = np.full(len(queries), -1) if rows is None else rows
        probe = exact_probe(database, as_queries(queries, self.dim, self.about.metric), rows, k)
        if probe is None:
            return None
        row_of = {name: row for row, name in enumerate(embeddings.ids)}
        found_rows = np.full((len(queries), probe.k + 1), -1)
        for number, hits in enumerate(found or self.search(probe.queries, probe.k + 1, with_columns=False)):
            kept = [row_of.get(hit.id, -1) for hit in hits[: probe.k + 1]]
            found_rows[number, : len(kept)] = kept
        return share_found(found_rows, database, probe)


def push(
    embeddings: Embeddings,
    engine: Engine,
    *,
    metric: Metric | None = None,
    quantization: Quantization = "none",
    replace: bool = False,
    batch_size: int | None = None,
    recall_queries: int = 200,
    progress: bool = False,
) -> tuple[EngineIndex, int]:
    """Send the vectors, ids, texts and columns that the collection does not hold yet.

    The collection stores a description of the embeddings, and rows arrive in order: an interrupted run resumes where it
    stopped, from any machine, and a second run changes nothing.

    Args:
        embeddings: N vectors.
        engine: where to.
        metric: "cosine" or "ip"; by default cosine for embeddings that say they are normalised, and ip for others.
        quantization: how the engine compresses the vectors that it searches.
        replace: first remove a collection that holds other embeddings, has other settings, or is incomplete.
        batch_size: vectors sent at once; by default what suits the engine and the dimension.
        recall_queries: how many of the vectors to measure recall@10 with; 0 measures nothing.
        progress: show a bar.

    Returns:
        The index, and how many vectors were sent.

    Raises:
        DualencError: a collection that holds something else, vectors that are not finite, duplicate ids, or an
            engine that does not answer.
    """
    check_ids(embeddings.ids)
    if embeddings.columns is not None:
        check_column_names(embeddings.columns.column_names)
    database = Database(embeddings, metric or ("cosine" if embeddings.meta.get("normalized") else "ip"))
    info = CollectionInfo(
        fingerprint=fingerprint_of(embeddings),
        count=len(embeddings),
        dim=embeddings.dim,
        metric=database.metric,
        dtype=str(embeddings.vectors.dtype),
        quantization=quantization,
        columns=column_kinds(embeddings.columns),
        has_snippets=embeddings.snippets is not None,
    )
    with engine.one_line_errors():
        stored = _prepare(embeddings, engine, info, replace)
        _send(database, engine, stored, batch_size or engine.batch_rows, progress)
        if engine.num_stored(embeddings.ids) != len(embeddings):
            raise DualencError(f"{engine.place}: holds other rows than were pushed; push again with --replace")
        engine.finish(info)

    meta = {key: embeddings.meta[key] for key in KEPT if key in embeddings.meta}
    meta |= {"engine": engine.kind, "target": engine.target, "collection": engine.collection, **vars(info)}
    index = EngineIndex(engine, info, meta)
    sample = database.sample(recall_queries, seed=0)
    recall = index.recall(embeddings, database.rows(sample), rows=sample)
    if recall is not None:
        index.meta |= {"recall_at_10": round(recall, 4), "recall_queries": len(sample)}
    return index, len(embeddings) - stored


def _prepare(embeddings: Embeddings, engine: Engine, info: CollectionInfo, replace: bool) -> int:
    """Create the collection, or check that the existing one is the same; what others made is never removed.

    Returns how many of the first rows are stored: an interrupted push of the same embeddings is resumed.
    """
    found = engine.info()
    problem = ""
    if found == info:
        stored = engine.num_stored(embeddings.ids)
        if stored == len(embeddings) or (stored >= 0 and not replace):
            return stored
        problem = "duplicates or other rows"
    elif found is not None:
        name = next(name for name, value in vars(info).items() if getattr(found, name) != value)
        is_other = name in ("fingerprint", "count")
        problem = "other embeddings" if is_other else f"{name} {getattr(found, name)}"
    if problem and not replace:
        remedy = "push with --replace to remove it first, or name another --collection"
        raise DualencError(f"{engine.place}: holds {problem}; {remedy}")
    engine.create(info, next(embeddings.record_batches(1)).schema)
    return 0


def _send(database: Database, engine: Engine, stored: int, rows: int, progress: bool) -> None:
    """Send all rows behind those that are stored."""
    embeddings = database.embeddings
    start = 0
    with tqdm(total=len(embeddings), desc="push", unit=" vectors", disable=not progress) as bar:
        for batch in embeddings.record_batches(rows):
            stop = start + len(batch)
            # Whatever the batch size was before, the stored rows are the first ones.
            first = max(start, stored)
            if first < stop:
                # Checked and scaled here, as engines take what they get: NaN would silently never be found.
                vectors = database.rows(np.arange(first, stop)).astype(embeddings.vectors.dtype)
                column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), embeddings.dim)
                place = batch.schema.get_field_index("vector")
                engine.add(batch.slice(first - start).set_column(place, "vector", column))
            start = stop
            bar.update(len(batch))


def fingerprint_of(embeddings: Embeddings) -> str:
    """Checksum of ids, vectors, texts and columns: by their files, where they have been written."""
    files = embeddings.meta.get("files")
    if isinstance(files, dict):
        return digest_of(sorted(f"{name} {value}" for name, value in files.items() if not name.endswith(".json")))
    return digest_of(*(bytes(batch.serialize()) for batch in embeddings.record_batches()))
