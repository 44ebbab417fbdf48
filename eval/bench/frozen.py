"""FrozenCorpus beside the plain matrix products of its size: seconds of a step, forward and
backward.

    python eval/bench/frozen.py                          # 1,000,000 × 384 in half precision, B =
    32, two threads

Documents are random unit vectors in a memory-mapped file. A step is the loss and its gradient in
the queries. The plain products are the two that no exact method can do without, scores Q·Zᵀ and
weighted mean P·Z with P (B, N) given: of a float32 matrix, each in one call, and of the same halves
in memory, converted block by block. Calls alternate, and the least of each is compared: other
processes only add to it. On one thread the clock is CPU time.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from in_turn import in_turn, quietest_clock
from jsonargparse import auto_cli
from torch.nn.functional import normalize

from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import FrozenCorpus
from dualenc.objectives import frozen_corpus as frozen


def write_documents(path: Path, rows: int, dimension: int) -> np.ndarray:
    """A map of random unit vectors (N, D) in half precision."""
    documents = np.lib.format.open_memmap(
        path, mode="w+", dtype=np.float16, shape=(rows, dimension)
    )
    draw = torch.Generator().manual_seed(0)
    for start in range(0, rows, 65536):
        block = torch.randn(min(65536, rows - start), dimension, generator=draw)
        documents[start : start + len(block)] = normalize(block, dim=1).half().numpy()
    documents.flush()
    return np.load(path, mmap_mode="r")


def main(
    rows: int = 1_000_000,
    dimension: int = 384,
    batch_size: int = 32,
    threads: int = 2,
    repeats: int = 7,
    block_mib: float | None = None,
) -> None:
    """Print seconds per call and each over the plain products in float32.

    Args:
        rows, dimension, batch_size: N, D and B.
        threads: of torch.
        repeats: calls of each.
        block_mib: documents in float32 at a time; by default what FrozenCorpus takes.
    """
    torch.set_num_threads(threads)
    if block_mib is not None:
        frozen.BLOCK_BYTES = int(block_mib * 2**20)
    with tempfile.TemporaryDirectory() as folder:
        documents = write_documents(Path(folder) / "documents.npy", rows, dimension)
        block_rows = frozen.BLOCK_BYTES // (4 * dimension)
        halves = [
            torch.from_numpy(documents[i : i + block_rows].copy())
            for i in range(0, rows, block_rows)
        ]
        single = torch.cat(halves).float()
        weights = torch.rand(batch_size, rows)
        parts = weights.split(block_rows, dim=1)
        queries = normalize(torch.randn(batch_size, dimension), dim=1)
        trained = queries.clone().requires_grad_()
        ids = torch.arange(batch_size)
        criterion = FrozenCorpus(documents, temperature=0.05)

        def step() -> None:
            trained.grad = None
            criterion(trained, single[ids], ids).loss.backward()

        def plain() -> None:
            torch.mm(queries, single.T)
            torch.mm(weights, single)

        def plain_of_halves() -> None:
            mean = torch.zeros_like(queries)
            for part, half in zip(parts, halves, strict=True):
                block = half.float()
                torch.mm(queries, block.T)
                mean.addmm_(part, block)

        calls = {"FrozenCorpus": step, "plain, float32": plain, "plain, of halves": plain_of_halves}
        times, _ = in_turn(calls, repeats, warm_up=1, clock=quietest_clock(threads))
    least = {name: min(seconds) for name, seconds in times.items()}
    lines = [
        {"call": name, "seconds": seconds, "ratio": seconds / least["plain, float32"]}
        for name, seconds in least.items()
    ]
    print_table(Table(f"{rows:,} × {dimension}, B = {batch_size}, {threads} threads", lines))


if __name__ == "__main__":
    auto_cli(main)
