"""From a folder of embeddings to a collection in an engine; and the folder that remembers where it is."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dualenc.data.identity import digest_of
from dualenc.data.metadata import check_column_names
from dualenc.errors import DualencError
from dualenc.files import check_folder_target, is_folder_of, read_json_object, write_json
from dualenc.search.build import METRICS, Database, as_queries, exact_probe, recall
from dualenc.search.embeddings import Embeddings, check_ids, read_head
from dualenc.search.engines.contract import QUANTIZATIONS, About, Engine, Hit, Quantization
from dualenc.search.engines.lance import Lance
from dualenc.search.engines.qdrant import Qdrant, is_server
from dualenc.search.engines.where import Condition, column_kinds, meets
from dualenc.search.index import KEPT, check_kept
from dualenc.types import Metric

ENGINES: dict[str, type[Engine]] = {"qdrant": Qdrant, "lancedb": Lance}
FORMAT = "dualenc engine"
FORMAT_VERSION = 1
_COLLECTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


AGAIN = "run `dualenc push` again"


def read_engine_meta(folder: str | os.PathLike[str]) -> tuple[About, dict[str, Any]]:
    """What a folder that `push` wrote says of its collection, and all entries of its meta.json; nothing is opened.

    Raises:
        DualencError: no such folder, or its meta.json cannot be read.
    """
    folder = Path(folder)
    versions = (FORMAT_VERSION, FORMAT_VERSION)
    read_head(folder, FORMAT, versions, "was not written by `dualenc push`; push embeddings first", AGAIN)
    meta = read_json_object(folder / "meta.json", {"engine": str, "target": str, "collection": str})
    if meta["engine"] not in ENGINES:
        raise DualencError(f"{folder}: names the unknown engine {meta['engine'][:40]!r}; {AGAIN}")
    check_kept(folder / "meta.json", meta, AGAIN)
    return About.from_dict(meta, str(folder / "meta.json")), meta


class EngineIndex:
    """A collection in an engine, searched by vectors: what `push` returns, and `EngineIndex.open` finds again.

    Attributes:
        engine: where the vectors are.
        about: what the collection holds.
        meta: entries of meta.json: `engine`, `target`, `collection`, `model`, `side`, `recall_at_10`, …
    """

    def __init__(self, engine: Engine, about: About, meta: Mapping[str, Any]) -> None:
        self.engine, self.about, self.meta = engine, about, dict(meta)

    def __len__(self) -> int:
        return self.about.count

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write down, in a folder's meta.json, where the collection is and what it holds; no keys.

        Raises:
            DualencError: the folder holds something else.
        """
        check_engine_target(folder)
        write_json(Path(folder) / "meta.json", {"format": FORMAT, "version": FORMAT_VERSION, **self.meta})

    @classmethod
    def open(cls, folder: str | os.PathLike[str], qdrant_path: str | None = None) -> EngineIndex:
        """Find the collection that a folder remembers.

        Args:
            folder: that `dualenc push` wrote.
            qdrant_path: the store of Qdrant's embedded mode, if that is the engine. The client unpickles its points,
                which can run code, so the path is the caller's to name and never taken from the folder.

        Raises:
            DualencError: no such folder, the engine does not answer or its package is missing, the collection has
                become another one, or an embedded Qdrant that the caller does not name.
        """
        about, meta = read_engine_meta(folder)
        target = meta["target"]
        if meta["engine"] == "qdrant" and not is_server(target):
            if qdrant_path is None:
                raise DualencError(
                    f"{folder}: names an embedded Qdrant, whose files can run code; if you trust them, say where they "
                    "are with --qdrant-path, or push to LanceDB"
                )
            target = qdrant_path
        elif qdrant_path is not None:
            raise DualencError(f"{folder}: names no embedded Qdrant; leave --qdrant-path out")
        engine = open_engine(meta["engine"], target, meta["collection"])
        if engine.known != about:
            raise DualencError(f"{engine.place}: holds other embeddings than {folder} was written for; {AGAIN}")
        return cls(engine, about, meta)

    def search(self, queries: np.ndarray, k: int = 10, where: Sequence[Condition] = (), **how: Any) -> list[list[Hit]]:
        """The best items for each query, best first; fewer than k where fewer meet the conditions.

        Args:
            queries: (Q, D), or one query (D,).
            k: how many items.
            where: conditions (`parse_conditions`), all of which must hold.
            how: `payload`, `nprobe` and `ef_search`, as `Engine.query` takes them.

        Raises:
            DualencError: another dimension than the collection's, queries that are not finite, k below 1, or an
                engine that does not answer.
        """
        if k < 1:
            raise DualencError(f"k is {k}; ask for at least 1 result")
        return self.engine.query(as_queries(queries, self.about.dim, self.about.metric), k, where, **how)

    def recall(
        self,
        embeddings: Embeddings,
        queries: np.ndarray,
        k: int = 10,
        *,
        rows: np.ndarray | None = None,
        where: Sequence[Condition] = (),
        found: Sequence[Sequence[Hit]] | None = None,
    ) -> float | None:
        """The share of the k nearest items by exact search that the engine finds, too.

        Args:
            embeddings: what was pushed.
            queries: (Q, D).
            k: neighbours to look for.
            rows: (Q,) row of each query among the embeddings, which is not to find itself; None: they are others.
            where: conditions, for both searches.
            found: (Q,) the k + 1 best or more that the engine has been asked for already.

        Returns:
            None if there is nobody to find.
        """
        rows = np.full(len(queries), -1) if rows is None else rows
        if where:
            embeddings = embeddings_that_meet(embeddings, where)
        if not len(embeddings):
            return None
        # Half precision leaves unit vectors a little off, which engines mend: so does this exact search.
        mended = Embeddings(embeddings.ids, embeddings.vectors, {**embeddings.meta, "normalized": False})
        database = Database(mended, self.about.metric)
        probe = exact_probe(database, as_queries(queries, self.about.dim, self.about.metric), rows, k)
        return None if probe is None else recall(_ByRow(self, embeddings.ids, where, found), database, probe)


def embeddings_that_meet(embeddings: Embeddings, where: Sequence[Condition]) -> Embeddings:
    """Those embeddings whose columns meet all conditions, in memory."""
    if not where:
        return embeddings
    met = np.zeros(len(embeddings), bool) if embeddings.columns is None else meets(where, embeddings.columns)
    rows = np.flatnonzero(met)
    return Embeddings([embeddings.ids[row] for row in rows.tolist()], embeddings.vectors[rows], embeddings.meta)


class _ByRow:
    """A collection asked as a FAISS index is: for row numbers."""

    def __init__(
        self,
        index: EngineIndex,
        ids: Sequence[str],
        where: Sequence[Condition],
        found: Sequence[Sequence[Hit]] | None,
    ) -> None:
        self.index, self.where, self.found = index, where, found
        self.row_of = {name: row for row, name in enumerate(ids)}

    def search(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        scores, rows = np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1)
        found = self.found
        if found is None:
            found = self.index.search(queries, k, self.where, payload=False)
        for number, hits in enumerate(hits[:k] for hits in found):
            scores[number, : len(hits)] = [hit.score for hit in hits]
            rows[number, : len(hits)] = [self.row_of.get(hit.id, -1) for hit in hits]
        return scores, rows


def push(
    embeddings: Embeddings,
    engine: Engine,
    *,
    metric: Metric | None = None,
    quantization: Quantization = "none",
    replace: bool = False,
    batch_size: int | None = None,
    recall_queries: int = 200,
    seed: int = 0,
    progress: bool = False,
) -> tuple[EngineIndex, int]:
    """Send vectors, ids, snippets and columns to an engine, as far as they are not there yet.

    The collection itself says what it was made of, and which ids have arrived: an interrupted run goes on where it
    stopped, from any machine, and a second run changes nothing.

    Args:
        embeddings: N vectors.
        engine: where to.
        metric: "cosine" or "ip"; by default cosine for embeddings that say they are normalised, and ip for others.
        quantization: how the engine compresses the vectors that it searches.
        replace: remove a collection that holds something else, or was made otherwise, first.
        batch_size: vectors sent at once; by default what suits the engine and the dimension.
        recall_queries: how many of the vectors to measure recall@10 with; 0 measures nothing.
        seed: of their choice.
        progress: show a bar.

    Returns:
        The index, and how many vectors were sent.

    Raises:
        DualencError: a collection that holds something else, vectors that are not finite, ids that stand twice, or an
            engine that does not answer.
    """
    if metric not in (*METRICS, None) or quantization not in QUANTIZATIONS:
        raise DualencError(
            f"metric {metric!r}, quantization {quantization!r}: see `dualenc push --help` for those known"
        )
    if not len(embeddings):
        raise DualencError("no vectors to push; give at least one")
    check_ids(embeddings.ids)
    columns = embeddings.columns
    if columns is not None:
        check_column_names(columns.column_names)
    unit = bool(embeddings.meta.get("normalized"))
    about = About(
        fingerprint=fingerprint_of(embeddings),
        count=len(embeddings),
        dim=embeddings.dim,
        metric=metric or ("cosine" if unit else "ip"),
        dtype=str(embeddings.vectors.dtype),
        quantization=quantization,
        columns=column_kinds(columns),
        has_snippets=embeddings.snippets is not None,
    )
    _prepare(engine, about, replace)
    there = engine.count()
    sent = 0
    rows_at_once = batch_size or engine.batch_rows(about)
    database = Database(embeddings, about.metric)
    with tqdm(total=len(embeddings), desc="push", unit=" vectors", disable=not progress) as bar:
        for start in range(0, len(embeddings) if there != len(embeddings) else 0, rows_at_once):
            rows = np.arange(start, min(start + rows_at_once, len(embeddings)))
            bar.update(len(rows))
            if there:
                rows = rows[~engine.present([embeddings.ids[row] for row in rows.tolist()])]
            if len(rows):
                snippets = None if embeddings.snippets is None else [embeddings.snippets[row] for row in rows.tolist()]
                further = _no_columns(len(rows)) if columns is None else columns.take(rows)
                engine.add([embeddings.ids[row] for row in rows.tolist()], database.rows(rows), snippets, further)
                sent += len(rows)
    if (found := engine.count()) != len(embeddings):
        raise DualencError(
            f"{engine.place}: holds {found:,} items instead of {len(embeddings):,}; push again with --replace"
        )
    engine.finish(about)

    meta = {key: embeddings.meta[key] for key in KEPT if key in embeddings.meta}
    meta |= {"engine": engine.kind, "target": engine.target, "collection": engine.collection, **about.as_dict()}
    index = EngineIndex(engine, about, meta)
    sample = database.sample(recall_queries, seed)
    measured = index.recall(embeddings, database.rows(sample), rows=sample) if recall_queries else None
    if measured is not None:
        index.meta |= {"recall_at_10": round(measured, 4), "recall_queries": len(sample)}
    return index, sent


def _prepare(engine: Engine, about: About, replace: bool) -> None:
    """Make the collection, or insist that the one that is there is the same; what others made is never removed."""
    found = engine.about()
    if found is not None and found != about:
        different = [name for name, value in about.as_dict().items() if getattr(found, name) != value]
        if not replace:
            of_data = different[0] in ("fingerprint", "count")
            what = "other embeddings" if of_data else f"{different[0]} {getattr(found, different[0])}"
            raise DualencError(
                f"{engine.place}: holds {what}; push with --replace to remove it first, or name another --collection"
            )
        engine.drop()
        found = None
    if found is None:
        engine.create(about)
    vars(engine).pop("known", None)


def open_engine(kind: str, target: str, collection: str) -> Engine:
    """Connect to an engine.

    Args:
        kind: "qdrant" or "lancedb".
        target: URL or path.
        collection: a name in there, which need not exist.

    Raises:
        DualencError: a name that not every engine takes, the engine's package is missing, or the target is unusable.
    """
    if not _COLLECTION.fullmatch(collection):
        raise DualencError(f"--collection is {collection[:40]!r}; give a name of letters, digits, - and _")
    if kind == "qdrant" and re.fullmatch(r"[\w.-]+:[0-9]+(/.*)?", target):
        raise DualencError(f"{target}: is it a server? then write http://{target}, or ./{target} for a folder")
    if kind == "qdrant" and "://" in target and not is_server(target):
        raise DualencError(f"{target}: no URL of a Qdrant server; give one with http:// or https://, or a folder")
    return ENGINES[kind](target if "://" in target else os.path.abspath(os.path.expanduser(target)), collection)


def is_engine(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder remembers a collection in an engine, told by its meta.json."""
    return is_folder_of(folder, FORMAT)


def check_engine_target(folder: str | os.PathLike[str]) -> None:
    """Insist that a folder may be written: it is new, empty, or remembers a collection.

    Raises:
        DualencError: it holds something else.
    """
    check_folder_target(folder, is_engine, "collection that dualenc pushed")


def _no_columns(count: int) -> Any:
    import pyarrow as pa

    return pa.table({"row": np.arange(count)}).select([])


def fingerprint_of(embeddings: Embeddings) -> str:
    """Checksum of ids, vectors, snippets and columns: by their files, where they have been written."""
    files = embeddings.meta.get("files")
    if isinstance(files, dict):
        return digest_of(sorted(f"{name} {value}" for name, value in files.items() if not name.endswith(".json")))
    columns = [] if embeddings.columns is None else [str(embeddings.columns.to_pydict())]
    snippets = [] if embeddings.snippets is None else [embeddings.snippets[row] for row in range(len(embeddings))]
    return digest_of(embeddings.ids, *(block for block in embeddings.blocks()), snippets, columns)
