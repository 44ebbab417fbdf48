"""From vectors to a trained, filled and measured FAISS index."""

from __future__ import annotations

import threading
import time
from typing import Any

import faiss
import numpy as np
from tqdm.auto import tqdm

from dualenc.errors import DualencError
from dualenc.index.database import Database, ready
from dualenc.index.factory import Metric, choose_factory, new_index, reason, training_rows
from dualenc.index.recall import Probe, exact_probe, recall, set_parameter, tune


def build_faiss(
    database: Database,
    factory: str,
    *,
    train_rows: int | None,
    seed: int,
    progress: bool,
) -> tuple[Any, dict[str, Any]]:
    """Train a new index on a sample and add the database block by block.

    Args:
        database: N vectors.
        factory: "auto" or a FAISS factory string.
        train_rows: how many vectors to train on; None follows the index (`training_rows`).
        seed: of the sample.
        progress: show a bar.

    Returns:
        The FAISS index, and what was done for its meta.json.
    """
    num_vectors, dim = len(database), database.embeddings.dim
    chosen = choose_factory(num_vectors, dim) if factory == "auto" else factory
    index = new_index(dim, chosen, database.metric, num_vectors)
    rows = training_rows(index, num_vectors) if train_rows is None or index.is_trained else min(train_rows, num_vectors)
    started = time.perf_counter()
    if rows:
        _train(index, database.rows(database.sample(rows, seed)), chosen)
    try:
        reserve(index, num_vectors)
        with tqdm(total=num_vectors, desc="index", unit=" vectors", disable=not progress) as bar:
            for block in database.blocks():
                index.add(block)
                bar.update(len(block))
    except (RuntimeError, MemoryError) as error:
        raise _unfilled(chosen, num_vectors, error) from None
    seconds = round(time.perf_counter() - started, 3)
    return index, {"factory": chosen, "requested_factory": factory, "trained_on": rows, "build_seconds": seconds}


def reserve(index: Any, num_vectors: int) -> None:
    """Allocate flat storage once: grown block by block it would be copied, old and new side by side."""
    storage = index.storage if isinstance(index, faiss.IndexHNSW) else index
    storage = faiss.downcast_index(storage)
    if isinstance(storage, faiss.IndexFlatCodes):
        storage.codes.resize(num_vectors * storage.code_size)
        storage.codes.resize(0)


def measure(
    index: Any,
    database: Database,
    queries: np.ndarray | None,
    *,
    recall_queries: int,
    target_recall: float,
    parameters: dict[str, int],
    seed: int,
) -> dict[str, Any]:
    """Set the search parameters (tuned to a recall where none are given) and measure recall@10.

    Args:
        index: a filled FAISS index.
        database: the vectors in it.
        queries: (Q, D) to measure with; None takes vectors of the database, which are not to find themselves.
        recall_queries: at most so many queries; 0 measures nothing.
        target_recall: what tuning tries to reach.
        parameters: search parameters by FAISS's names; empty to tune.
        seed: of the sample of queries.

    Returns:
        Entries for meta.json.
    """
    for name, value in parameters.items():
        set_parameter(index, name, value)
    probe = _probe(database, queries, recall_queries, seed)
    if probe is None:
        return {"search_parameters": parameters}
    chosen = parameters or tune(index, database, probe, target_recall)
    found = recall(index, database, probe)
    source = "database" if queries is None else "given"
    return {
        "search_parameters": chosen,
        "recall_at_10": round(found, 4),
        "recall_queries": len(probe.queries),
        "recall_queries_from": source,
    }


def _probe(database: Database, queries: np.ndarray | None, count: int, seed: int) -> Probe | None:
    if queries is None:
        rows = database.sample(count, seed + 1)
        return exact_probe(database, database.rows(rows), rows)
    queries = as_queries(queries, database.embeddings.dim, database.metric)[:count]
    return exact_probe(database, queries, np.full(len(queries), -1))


def as_queries(queries: np.ndarray, dim: int, metric: Metric) -> np.ndarray:
    """Queries as (Q, D) contiguous float32, normalised for "cosine".

    Raises:
        DualencError: another dimension than the index's, or values that are not finite.
    """
    queries = np.ascontiguousarray(np.atleast_2d(np.asarray(queries)), dtype=np.float32)
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise DualencError(
            f"queries of shape {queries.shape} for an index of dimension {dim}; embed them with the model of the index"
        )
    return ready(queries, metric)


def _train(index: Any, vectors: np.ndarray, factory: str) -> None:
    """Train an index so that Ctrl-C ends it at once.

    FAISS asks between the iterations of a k-means whether to stop, which for product quantizers is a minute apart, and
    OPQ trains one after the other; hence a thread trains, and this one waits where it can be interrupted.
    """
    outcome: list[BaseException | None] = []
    threads = faiss.omp_get_max_threads()

    def train() -> None:
        faiss.omp_set_num_threads(threads)  # OpenMP keeps this number for each thread
        try:
            index.train(vectors)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=train, name="faiss training", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    error = outcome[0]
    if isinstance(error, (RuntimeError, MemoryError)):
        raise DualencError(
            f"factory {factory!r} cannot be trained on {len(vectors)} vectors: {reason(error)}; "
            "use fewer lists, Flat or auto"
        ) from None
    if error is not None:
        raise error


def _unfilled(factory: str, num_vectors: int, error: BaseException) -> DualencError:
    return DualencError(
        f"factory {factory!r} cannot take {num_vectors} vectors: {reason(error)}; try auto, Flat, HNSW32 or IVF256,Flat"
    )
