"""Exact search of embeddings on disk: FAISS on the CPU against torch, there and on a GPU if there
is one.

    python eval/bench/exact_search.py --documents 100000 --queries 1000

All find the same: scores agree to 1e-6, and documents wherever two scores differ by more. Each line
is one call of `dualenc.search.exact_search.exact_search`, reading memory-mapped half precision
included; ids, which only settle ties, are not given.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from in_turn import in_turn, quietest_clock
from jsonargparse import auto_cli

from dualenc.search import exact_search as exact
from dualenc.search.exact_search import exact_search

TOLERANCE = 1e-6
CPU, GPU = torch.device("cpu"), "cuda"


def by_torch_on_cpu(queries: Any, documents: Any, k: int) -> tuple[np.ndarray, np.ndarray]:
    """What a GPU does, on the CPU."""
    before = exact._search_by_faiss
    exact._search_by_faiss = exact.search_by_torch
    try:
        return exact_search(queries, documents, k)
    finally:
        exact._search_by_faiss = before


def check_alike(
    found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]
) -> tuple[float, float]:
    """The greatest difference of scores and the share of places with another document, which must
    be ties."""
    difference = np.abs(found[0] - expected[0])
    others = found[1] != expected[1]
    scores = expected[0].astype(np.float64)
    gaps = np.diff(scores, axis=1, prepend=np.inf, append=-np.inf)
    near = np.minimum(-gaps[:, :-1], -gaps[:, 1:]) <= 2 * TOLERANCE
    near[:, -1] = True  # what ties with the last one found is not known here
    assert difference.max() <= TOLERANCE, f"scores differ by {difference.max():.1e}"
    assert not (others & ~near).any(), "another document where nothing ties"
    return float(difference.max()), float(others.mean())


def main(
    documents: int = 100_000,
    dim: int = 384,
    queries: int = 1000,
    k: int = 101,
    repeats: int = 5,
    threads: int | None = None,
    torch_on_cpu: bool = True,
) -> None:
    """Print the seconds of each, their ratios to FAISS, and how far results agree.

    Args:
        documents: N, kept in half precision.
        dim: D.
        queries: Q.
        k: documents to find; `dualenc evaluate retrieval` asks for 101.
        repeats: calls of each, after one to warm up.
        threads: of FAISS and torch; by default as many as they find.
        torch_on_cpu: time torch on the CPU as well.
    """
    if threads is not None:
        faiss.omp_set_num_threads(threads)
        torch.set_num_threads(threads)
    random = np.random.default_rng(0)
    query_vectors = random.standard_normal((queries, dim), dtype=np.float32)
    query_vectors /= np.linalg.norm(query_vectors, axis=1, keepdims=True)
    with tempfile.TemporaryDirectory() as folder:
        kept = np.lib.format.open_memmap(
            Path(folder) / "documents.npy", "w+", np.float16, (documents, dim)
        )
        for start in range(0, documents, 2**16):
            block = random.standard_normal((min(2**16, documents - start), dim), dtype=np.float32)
            kept[start : start + 2**16] = block / np.linalg.norm(block, axis=1, keepdims=True)
        runs = {"FAISS, CPU": functools.partial(exact_search, query_vectors, kept, k)}
        if torch_on_cpu:
            runs["torch, CPU"] = functools.partial(by_torch_on_cpu, query_vectors, kept, k)
        if torch.cuda.is_available():
            runs[f"torch, {torch.cuda.get_device_name()}"] = functools.partial(
                exact_search, query_vectors, kept, k, device=GPU
            )
        # On one thread and without a GPU processor time counts.
        clock = (
            time.perf_counter
            if torch.cuda.is_available()
            else quietest_clock(faiss.omp_get_max_threads())
        )
        times, found = in_turn(runs, repeats, warm_up=1, clock=clock)
    print(f"{queries:,} queries, {documents:,} documents of {dim} numbers in float16, k = {k}")
    print(f"{faiss.omp_get_max_threads()} threads of FAISS, {torch.get_num_threads()} of torch")
    print(
        "| | seconds, least (median) | over FAISS | scores differ by | "
        "other documents, of equal score |"
    )
    print("|---|---|---|---|---|")
    least = min(times["FAISS, CPU"])
    for name, taken in times.items():
        difference, others = check_alike(found[name], found["FAISS, CPU"])
        seconds = f"{min(taken):.3f} ({statistics.median(taken):.3f})"
        print(
            f"| {name} | {seconds} | {min(taken) / least:.3f} | {difference:.1e} | {others:.1e} |"
        )
    if torch.cuda.is_available():
        print(f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB of the GPU at most")


if __name__ == "__main__":
    auto_cli(main)
