"""Filtered searches of an index against exact search among the rows that meet the filter: recall,
and time of a query.

    python eval/bench/filtered.py --vectors 200000 --dim 64
    python eval/bench/filtered.py --vectors 20000 --shares "[1.0, 0.2, 0.05, 0.01]" --target
    postgresql://me@localhost/db

Vectors are synthetic, around 200 centres; a filter keeps rows at random, or the rows around a share
of the centres. Times are those of the processor on one thread, of queries asked one by one.
"""

from __future__ import annotations

import time

import faiss
import numpy as np
import pyarrow as pa
from jsonargparse import auto_cli

from dualenc.search import Embeddings, Index
from dualenc.search.engines.factory import push_embeddings
from dualenc.search.engines.filter_recall import QUERIES, tune
from dualenc.search.engines.postgres_settings import default_settings

TABLE = "dualenc_bench_filtered"


def main(
    vectors: int = 200_000,
    dim: int = 64,
    queries: int = 200,
    factories: tuple[str, ...] = ("Flat", "IVF2048,Flat", "HNSW32"),
    shares: tuple[float, ...] = (1.0, 0.5, 0.2, 0.05, 0.01),
    exact_rows: int | None = None,
    target: str | None = None,
) -> None:
    """Print recall@10 and milliseconds for each factory and share of rows that the filter keeps.

    Args:
        vectors: N.
        dim: D.
        queries: how many.
        factories: FAISS factory strings; nprobe and efSearch are those that the build chooses for
            recall@10 of 0.95.
        shares: of rows that are kept.
        exact_rows: kept rows up to which all are compared; by default what the index takes.
        target: URL of a PostgreSQL database, whose HNSW index of halfvec is then measured in place
            of FAISS's.
    """
    faiss.omp_set_num_threads(1)
    random = np.random.default_rng(0)
    centres = random.normal(size=(200, dim))

    def around(numbers: np.ndarray) -> np.ndarray:
        drawn = centres[numbers] + 1.5 * random.normal(size=(len(numbers), dim))
        return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)

    numbers = random.integers(0, len(centres), vectors)
    database = around(numbers)
    query_vectors = around(random.integers(0, len(centres), queries))
    uniform = random.random(vectors)
    if target is not None:
        return measure_postgres(target, database, query_vectors, uniform, shares)
    masks = {("at random", share): uniform < share for share in shares}
    masks |= {
        ("around centres", share): numbers < share * len(centres) for share in shares if share < 1
    }
    exact = {}
    for name, kept in masks.items():
        rows = np.flatnonzero(kept)
        exact[name] = rows[
            faiss.knn(query_vectors, database[rows], 10, faiss.METRIC_INNER_PRODUCT)[1]
        ]
    for factory in factories:
        faiss.omp_set_num_threads(1)
        index = Index.build(database, factory=factory)
        print(f"{factory} {index.provenance.search_parameters}")
        if exact_rows is not None:
            index.record(settings={"exact_rows": exact_rows})
        for name, kept in masks.items():
            begin, found = time.process_time(), []
            for query in query_vectors:
                found.append(
                    index.search_rows(query, 10, allowed_rows=None if kept.all() else kept)[1][0]
                )
            milliseconds = 1000 * (time.process_time() - begin) / queries
            recall = np.mean(
                [
                    len(set(a) & set(b)) / 10
                    for a, b in zip(np.array(found).tolist(), exact[name].tolist())
                ]
            )
            print(
                f"  {name[1]:7.1%} {name[0]}: recall@10 {recall:.3f}, {milliseconds:7.3f} ms",
                flush=True,
            )
    return None


def measure_postgres(
    target: str,
    database: np.ndarray,
    queries: np.ndarray,
    uniform: np.ndarray,
    shares: tuple[float, ...],
) -> None:
    """The same of a table of N rows with a column `share` (N,) of uniform numbers, in a transaction
    for each query."""
    ids = [str(row) for row in range(len(database))]
    columns = pa.table({"share": uniform})
    embeddings = Embeddings(ids, database.astype(np.float16), None, None, columns)
    index = push_embeddings(embeddings, target, TABLE, metric="cosine", replace=True)[0]
    ours = default_settings("hnsw", len(database))
    relaxed = {**ours, "ef_search": 40}
    drawn = np.random.default_rng(0).permutation(len(database))[:QUERIES]
    tune(index, database[drawn], [f"share < {share}" for share in shares], 0.95)
    settings = {
        "pgvector's defaults (ef_search 40)": {**relaxed, "iterative_scan": "off"},
        "iterative_scan relaxed_order (ef_search 40)": relaxed,
        "push (relaxed_order, ef_search 100)": ours,
        f"push --recall 0.95 ({index.provenance.settings})": index.provenance.settings,
    }
    for name, chosen in settings.items():
        index.record(settings=chosen)
        print(name)
        for share in shares:
            results, milliseconds = {}, {}
            for exact in (True, False):
                begin = time.perf_counter()
                results[exact] = [
                    index.search(query, 10, filter=f"share < {share}", exact=exact)[0]
                    for query in queries
                ]
                milliseconds[exact] = 1000 * (time.perf_counter() - begin) / len(queries)
            pairs = zip(results[False], results[True])
            recall = np.mean(
                [len({hit.id for hit in a} & {hit.id for hit in b}) / len(b) for a, b in pairs]
            )
            rows = np.mean([len(hits) for hits in results[False]])
            times = f"{milliseconds[False]:.1f} ms, exact {milliseconds[True]:.1f} ms"
            print(
                f"  {share:7.1%} kept: {rows:5.2f} rows, recall@10 {recall:.3f}, {times}",
                flush=True,
            )


if __name__ == "__main__":
    auto_cli(main)
