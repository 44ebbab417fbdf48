"""Index build and search against raw faiss with the same factory string, vectors and search
parameters.

    python eval/bench/index.py --vectors 100000 --dim 128
    python eval/bench/index.py --vectors 1000000 --dim 64 --repeats 0 --threads 1 \\
        --factories '["Flat", "HNSW16", "IVF1024,Flat", "IVF1024,PQ16x4"]'

Both work in turn on the same embeddings on disk; ratios are those of the shortest and of the median
times. Build is training and adding; the measurement of recall@10, which raw faiss does not have, is
switched off here and timed on its own. A search of ours returns ids as texts, one of raw faiss row
numbers.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from in_turn import in_turn, quietest_clock
from jsonargparse import auto_cli

from dualenc.data.store.vector_shards import Embeddings
from dualenc.search import Index
from dualenc.search.embed.writer import EmbeddingWriter
from dualenc.search.index.build import new_index, training_rows
from dualenc.search.index.tune import set_parameter

FACTORIES = ["Flat", "IVF256,Flat", "HNSW16", "IVF256,PQ16x4"]
MIN_ROUNDS, MAX_ROUNDS = 5, 50


def clustered(num_vectors: int, dim: int, seed: int) -> np.ndarray:
    """(N, D) unit vectors around 200 centres."""
    centres = np.random.default_rng(0).normal(size=(200, dim)).astype(np.float32)
    random = np.random.default_rng(seed)
    noise = random.normal(size=(num_vectors, dim)).astype(np.float32)
    vectors = centres[random.integers(0, 200, num_vectors)] + 0.8 * noise
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def write(folder: Path, vectors: np.ndarray) -> Embeddings:
    """The vectors as `dualenc embed` writes them."""
    ids = [f"d{i}" for i in range(len(vectors))]
    writer = EmbeddingWriter(folder, ids, vectors.shape[1], "float32", {"normalized": True})
    for number in writer.unwritten():
        rows = writer.ranges[number]
        writer.write(number, vectors[rows.start : rows.stop])
    return writer.finish()


def raw_build(embeddings: Embeddings, factory: str) -> Any:
    """What a faiss user writes: read the vectors, train on a sample of the same size, add."""
    vectors = np.ascontiguousarray(embeddings.vectors[:])
    index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    rows = training_rows(new_index(vectors.shape[1], factory, "ip"), len(vectors))
    if rows:
        sample = np.random.default_rng(0).choice(len(vectors), rows, replace=False)
        index.train(vectors[np.sort(sample)])
    index.add(vectors)
    return index


def report(what: str, runs: dict[str, Callable[[], Any]], repeats: int) -> None:
    """One line: the least and the median seconds of both, and their ratios."""
    clock = quietest_clock(faiss.omp_get_max_threads())
    times = in_turn(runs, repeats, warm_up=min(1, repeats - 1), clock=clock)[0]
    both = {name: (min(taken), statistics.median(taken)) for name, taken in times.items()}
    seconds = ", ".join(
        f"{name} {least:8.4f} s (median {middle:.4f})" for name, (least, middle) in both.items()
    )
    ratios = [ours / theirs for ours, theirs in zip(both["dualenc"], both["faiss"])]
    print(
        f"  {what:<7} {seconds}, ratio {ratios[0]:.3f} (median {ratios[1]:.3f}; want ≤ 1.02)",
        flush=True,
    )


def measure(
    folder: Path,
    embeddings: Embeddings,
    queries: np.ndarray,
    factory: str,
    k: int,
    repeats: int,
    seconds: float,
) -> None:
    """Build, unless that is repeated 0 times, and search with both."""
    print(factory)
    start = time.perf_counter()
    ours = Index.build(embeddings, factory=factory)
    extra = time.perf_counter() - start - ours.provenance.build_seconds
    ours.save(folder / "index")
    if repeats:
        builds = {
            "dualenc": lambda: Index.build(embeddings, factory=factory, recall_queries=0),
            "faiss": lambda: raw_build(embeddings, factory),
        }
        report("build", builds, repeats)
        raw = raw_build(embeddings, factory)
        for name, value in ours.provenance.search_parameters.items():
            set_parameter(raw, name, value)
    else:
        raw = faiss.read_index(str(folder / "index" / "index.faiss"))
    # Not the same rows: HNSW's graph depends on which vectors are added in one call.
    exact = faiss.knn(queries, np.asarray(embeddings.vectors), k, faiss.METRIC_INNER_PRODUCT)[1]
    start = time.perf_counter()
    found = {"dualenc": ours.search_rows(queries, k)[1], "faiss": raw.search(queries, k)[1]}
    rounds = round(seconds / (time.perf_counter() - start))
    recalls = {
        name: np.mean([np.isin(e, r).mean() for e, r in zip(exact, rows)])
        for name, rows in found.items()
    }
    assert abs(recalls["dualenc"] - recalls["faiss"]) < 0.02, recalls
    # As it was built, in memory, and as it is opened, mapped.
    for what, index in (("search", ours), ("opened", Index.open(folder / "index"))):
        searches = {
            "dualenc": functools.partial(index.search_rows, queries, k),
            "faiss": lambda: raw.search(queries, k),
        }
        report(what, searches, max(MIN_ROUNDS, min(rounds, MAX_ROUNDS)))
    settings = (
        ", ".join(f"{k}={v}" for k, v in ours.provenance.search_parameters.items())
        or "nothing to tune"
    )
    shown = ", ".join(f"{name} {value:.4f}" for name, value in recalls.items())
    print(
        f"  recall  {shown} with the same parameters; the build's own estimate took {extra:.2f} s:"
    )
    print(f"  recall@10 {ours.provenance.recall_at_10:.4f} ({settings})", flush=True)


def main(
    vectors: int = 50_000,
    dim: int = 128,
    queries: int = 1000,
    k: int = 10,
    repeats: int = 3,
    seconds: float = 10,
    threads: int | None = None,
    factories: list[str] | None = None,
) -> None:
    """Print build and search times of both, and their ratios.

    Args:
        vectors: size of the database.
        dim: size of a vector.
        queries: how many queries, searched in one call.
        k: results per query.
        repeats: times that each index is built; with 0, raw faiss reads the one that was built
            here.
        seconds: how long searches are repeated, each time of both; at least five times and at most
            fifty.
        threads: of faiss; by default as many as it finds.
        factories: FAISS factory strings.
    """
    if threads is not None:
        faiss.omp_set_num_threads(threads)
    print(
        f"{vectors:,} vectors of dimension {dim}, {queries:,} queries, "
        f"{faiss.omp_get_max_threads()} threads"
    )
    with tempfile.TemporaryDirectory() as folder:
        embeddings = write(Path(folder) / "embeddings", clustered(vectors, dim, seed=1))
        query_vectors = clustered(queries, dim, seed=2)
        for factory in factories or FACTORIES:
            measure(Path(folder), embeddings, query_vectors, factory, k, repeats, seconds)


if __name__ == "__main__":
    auto_cli(main)
