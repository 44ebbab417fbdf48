"""Filtered searches of a FAISS index against exact search among the rows that are kept: recall, and time of a query.

    python eval/bench/filtered.py --vectors 200000 --dim 64

Vectors are synthetic, around 200 centres; which rows a filter keeps is drawn at random, which says nothing on filters
that keep a part of the space. Times are those of the processor on one thread, of queries asked one by one.
"""

from __future__ import annotations

import time

import faiss
import numpy as np
from jsonargparse import auto_cli

from dualenc.search import Index


def main(
    vectors: int = 200_000,
    dim: int = 64,
    queries: int = 200,
    factories: tuple[str, ...] = ("Flat", "IVF2048,Flat", "HNSW32"),
    shares: tuple[float, ...] = (1.0, 0.5, 0.2, 0.05, 0.01, 0.001),
) -> None:
    """Print recall@10 and milliseconds for each factory and share of rows that the filter keeps.

    Args:
        vectors: N.
        dim: D.
        queries: how many.
        factories: FAISS factory strings; nprobe and efSearch are those that the build chooses for recall@10 of 0.95.
        shares: of rows that are kept.
    """
    faiss.omp_set_num_threads(1)
    random = np.random.default_rng(0)
    centres = random.normal(size=(200, dim))

    def around(count: int) -> np.ndarray:
        drawn = centres[random.integers(0, len(centres), count)] + 1.5 * random.normal(size=(count, dim))
        return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)

    database, query_vectors = around(vectors), around(queries)
    masks = {share: random.random(vectors) < share for share in shares}
    exact = {}
    for share, kept in masks.items():
        rows = np.flatnonzero(kept)
        exact[share] = rows[faiss.knn(query_vectors, database[rows], 10, faiss.METRIC_INNER_PRODUCT)[1]]
    for factory in factories:
        faiss.omp_set_num_threads(1)
        index = Index.build(database, factory=factory)
        print(f"{factory} {index.meta['search_parameters']}")
        for share, kept in masks.items():
            begin, found = time.process_time(), []
            for query in query_vectors:
                found.append(index.search_rows(query, 10, allowed_rows=None if share == 1 else kept)[1][0])
            milliseconds = 1000 * (time.process_time() - begin) / queries
            recall = np.mean(
                [len(set(a) & set(b)) / 10 for a, b in zip(np.array(found).tolist(), exact[share].tolist())]
            )
            print(f"  {share:7.1%} kept: recall@10 {recall:.3f}, {milliseconds:7.3f} ms", flush=True)


if __name__ == "__main__":
    auto_cli(main)
