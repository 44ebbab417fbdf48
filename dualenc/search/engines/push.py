"""Push: send embeddings to a collection, in batches that can be resumed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from tqdm.auto import tqdm

from dualenc.data.identity import digest_of
from dualenc.data.metadata import check_column_names
from dualenc.errors import DualencError
from dualenc.search.build import METRICS, Database, ready
from dualenc.search.embeddings import Embeddings, check_ids
from dualenc.search.engines.collection import QUANTIZATIONS, CollectionInfo, Quantization, vectors_of
from dualenc.search.engines.index import Engine, EngineIndex
from dualenc.search.index import KEPT
from dualenc.search.where import column_kinds
from dualenc.types import Metric


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
        seed: of their choice.
        progress: show a bar.

    Returns:
        The index, and how many vectors were sent.

    Raises:
        DualencError: a collection that holds something else, vectors that are not finite, duplicate ids, or an
            engine that does not answer.
    """
    if metric not in (*METRICS, None) or quantization not in QUANTIZATIONS:
        raise DualencError(f"metric {metric!r}, quantization {quantization!r}: see `dualenc push --help` for both")
    if not len(embeddings):
        raise DualencError("no vectors to push; give at least one")
    check_ids(embeddings.ids)
    info = _describe(embeddings, metric, quantization)
    rows = batch_size or engine.batch_rows
    _prepare(embeddings, engine, info, replace)
    sent = _send(embeddings, engine, info, rows, progress)
    if engine.num_stored(embeddings.ids) != len(embeddings):
        raise DualencError(
            f"{engine.place}: holds other rows than {len(embeddings):,} items; push again with --replace"
        )
    engine.finish(info)

    meta = {key: embeddings.meta[key] for key in KEPT if key in embeddings.meta}
    meta |= {"engine": engine.kind, "target": engine.target, "collection": engine.collection, **info.as_dict()}
    index = EngineIndex(engine, info, meta)
    if recall_queries:
        database = Database(embeddings, info.metric)
        sample = database.sample(recall_queries, seed)
        recall = index.recall(embeddings, database.rows(sample), rows=sample)
        if recall is not None:
            index.meta |= {"recall_at_10": round(recall, 4), "recall_queries": len(sample)}
    return index, sent


def _describe(embeddings: Embeddings, metric: Metric | None, quantization: Quantization) -> CollectionInfo:
    if embeddings.columns is not None:
        check_column_names(embeddings.columns.column_names)
    if metric is None:
        metric = "cosine" if embeddings.meta.get("normalized") else "ip"
    return CollectionInfo(
        fingerprint=fingerprint_of(embeddings),
        count=len(embeddings),
        dim=embeddings.dim,
        metric=metric,
        dtype=str(embeddings.vectors.dtype),
        quantization=quantization,
        columns=column_kinds(embeddings.columns),
        has_snippets=embeddings.snippets is not None,
    )


def _prepare(embeddings: Embeddings, engine: Engine, info: CollectionInfo, replace: bool) -> None:
    """Create the collection, or check that the existing one is the same; what others made is never removed."""
    found = engine.info()
    # An interrupted push of the same embeddings is resumed.
    if found == info:
        stored = engine.num_stored(embeddings.ids)
        if stored == len(embeddings) or (stored >= 0 and not replace):
            return
        if not replace:
            raise DualencError(f"{engine.place}: holds duplicates or other rows; push again with --replace")
        engine.drop()
    elif found is not None:
        different = [name for name, value in info.as_dict().items() if getattr(found, name) != value]
        if not replace:
            what = f"{different[0]} {getattr(found, different[0])}"
            if different[0] in ("fingerprint", "count"):
                what = "other embeddings"
            raise DualencError(
                f"{engine.place}: holds {what}; push with --replace to remove it first, or name another --collection"
            )
        engine.drop()
    engine.create(info, next(embeddings.record_batches(1)).schema)


def _send(embeddings: Embeddings, engine: Engine, info: CollectionInfo, rows: int, progress: bool) -> int:
    """Send the rows that are not stored yet; returns how many."""
    stored = engine.num_stored(embeddings.ids)
    start = 0
    with tqdm(total=len(embeddings), desc="push", unit=" vectors", disable=not progress) as bar:
        for batch in embeddings.record_batches(rows):
            # Whatever the batch size was before, the stored rows are the first ones.
            skipped = max(0, stored - start)
            if skipped < len(batch):
                engine.add(_ready_batch(batch.slice(skipped), info, bool(embeddings.meta.get("normalized"))))
            start += len(batch)
            bar.update(len(batch))
    return max(0, len(embeddings) - stored)


def _ready_batch(batch: pa.RecordBatch, info: CollectionInfo, are_unit: bool) -> pa.RecordBatch:
    """A batch with finite vectors, scaled to length one for "cosine"."""
    vectors = vectors_of(batch)
    ids = batch.column("id")
    # Engines take what they get: NaN would silently never be found.
    checked = ready(vectors.astype(np.float32), info.metric, lambda row: repr(ids[row].as_py()), are_unit)
    if are_unit or info.metric == "ip":
        return batch
    column = pa.FixedSizeListArray.from_arrays(pa.array(checked.astype(vectors.dtype).ravel()), info.dim)
    return batch.set_column(batch.schema.get_field_index("vector"), "vector", column)


def fingerprint_of(embeddings: Embeddings) -> str:
    """Checksum of ids, vectors, texts and columns: by their files, where they have been written."""
    files = embeddings.meta.get("files")
    if isinstance(files, dict):
        return digest_of(sorted(f"{name} {value}" for name, value in files.items() if not name.endswith(".json")))
    columns = [] if embeddings.columns is None else [str(embeddings.columns.to_pydict())]
    texts = [] if embeddings.snippets is None else [embeddings.snippets[row] for row in range(len(embeddings))]
    return digest_of(embeddings.ids, *(block for block in embeddings.blocks()), texts, columns)
