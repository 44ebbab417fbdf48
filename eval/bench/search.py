"""Search: how fast are builds and searches, how much do filters lose, what does exactness cost?

    python eval/bench/search.py index       # builds and searches over those of raw faiss
    python eval/bench/search.py filtered    # also with --exact_rows 0
    python eval/bench/search.py frozen      # a step of FrozenCorpus over its matrix products

Vectors are synthetic. Calls that are compared take turns; the clock of one thread is CPU time. What
is in the store is shown and not measured again: give another with --out.
"""

from __future__ import annotations

import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from in_turn import in_turn, ratios, shown
from torch.nn.functional import normalize

sys.path.insert(0, str(Path(__file__).parents[1]))
from frame import RESULTS, Outcome, Settings, command_line

from dualenc.objectives import FrozenCorpus, frozen_corpus
from dualenc.search import Index
from dualenc.search.index.build import training_rows

STORE = RESULTS / "search.jsonl"
QUERIES = 1000
REPEATS = 7
FACTORIES = ["Flat", "IVF256,Flat", "HNSW16", "IVF256,PQ16x4"]
SHARES = (1.0, 0.5, 0.2, 0.05, 0.01)
"""Rows that filters keep, of all."""
nearest = partial(faiss.knn, metric=faiss.METRIC_INNER_PRODUCT)


def near(points: np.ndarray, noise: float, draw: np.random.Generator) -> np.ndarray:
    """Return a float32 unit vector near each point, (N, D); components have Gaussian noise."""
    vectors = points + noise * draw.standard_normal(points.shape, dtype=points.dtype)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32, copy=False)


def around(centers: np.ndarray, count: int, noise: float, draw: np.random.Generator) -> np.ndarray:
    """Return unit vectors (count, D), each near one of the centers (C, D)."""
    return near(centers[draw.integers(len(centers), size=count)], noise, draw)


def map_random(file: Path, count: int, dim: int) -> np.ndarray:
    """Write random unit vectors (count, D) in half precision, and map the file into memory."""
    draw = np.random.default_rng(0)
    vectors = np.lib.format.open_memmap(file, "w+", np.float16, (count, dim))
    for start in range(0, count, 2**16):
        block = vectors[start : start + 2**16]
        block[:] = near(np.zeros(block.shape, np.float32), 1, draw)
    return vectors


def use_threads(count: int) -> None:
    """Set the number of threads of faiss and torch."""
    faiss.omp_set_num_threads(count)
    torch.set_num_threads(count)


def recall(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the mean share of expected rows (Q, n) that are found (Q, k)."""
    return float(np.mean([np.isin(*rows).mean() for rows in zip(expected, found, strict=True)]))


def raw_build(vectors: np.ndarray, factory: str) -> Any:
    """Build as a user of faiss does: train on a sample as large as ours, add."""
    built = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    built.train(vectors[: training_rows(built, len(vectors))])
    built.add(vectors)
    return built


def index(
    vectors: int = 50_000,
    dim: int = 128,
    repeats: int = 3,
    factories: list[str] = FACTORIES,
    out: Path = STORE,
) -> list[Outcome]:
    """Compare with raw faiss on the same vectors, near 200 centers, on one thread.

    A build is without the measurement of recall@10, which faiss does not have. Searches are in our
    index, as it was built and opened, and in faiss's from the same file.
    """
    draw = np.random.default_rng(0)
    centers = draw.standard_normal((200, dim), dtype=np.float32)
    database, asked = (around(centers, count, 0.8, draw) for count in (vectors, QUERIES))

    def run(settings: Settings) -> Outcome:
        use_threads(1)
        how = {"factory": settings["factory"], "recall_queries": 0}
        builds = {"faiss build": lambda: raw_build(database, settings["factory"])}
        builds["build"] = partial(Index.build, database, **how)
        outcome = ratios(in_turn(builds, repeats)[0]) if repeats else {}
        with tempfile.TemporaryDirectory() as folder:
            ours = Index.build(database, factory=settings["factory"])
            ours.save(folder)
            searches = {
                "faiss": partial(faiss.read_index(f"{folder}/index.faiss").search, asked, 10),
                "opened": partial(Index.open(folder).search_rows, asked),
                "as built": partial(ours.search_rows, asked),
            }
            times, found = in_turn(searches, REPEATS)
        expected = nearest(asked, database, k=10)[1]
        recalls = {recall(rows, expected) for _, rows in found.values()}
        assert len(recalls) == 1, recalls
        return {**outcome, **ratios(times), "recall@10": recalls.pop()}

    shared = {"bench": "index", "vectors": vectors, "dim": dim}
    return shown("Index", [{**shared, "factory": each} for each in factories], run, out)


def filtered(
    vectors: int = 200_000,
    factories: list[str] = ["IVF2048,Flat", "HNSW32"],  # noqa: B006 - a default, never changed
    exact_rows: int | None = None,
    out: Path = STORE,
) -> list[Outcome]:
    """Show recall@10 and processor time of single searches on one thread, by share of kept rows.

    A filter keeps rows at random, or those near a share of 200 centers. Indexes compare all kept
    rows up to `exact_rows`.
    """
    draw = np.random.default_rng(0)
    centers = draw.normal(size=(200, 64))
    numbers = draw.integers(len(centers), size=vectors)
    database = near(centers[numbers], 1.5, draw)
    asked = around(centers, 200, 1.5, draw)
    uniform = draw.random(vectors)
    kept = {f"{share:.0%} at random": uniform < share for share in SHARES}
    kept |= {f"{share:.0%} of the centers": numbers < 200 * share for share in SHARES[1:]}
    index_of = cache(partial(Index.build, database))

    def run(settings: Settings) -> Outcome:
        use_threads(1)
        searched = index_of(factory=settings["factory"])
        if exact_rows is not None:
            searched.record(settings={"exact_rows": exact_rows})
        mask = kept[settings["kept"]]
        allowed = None if mask.all() else mask
        begun = time.process_time()
        found = [searched.search_rows(one, 10, allowed_rows=allowed)[1][0] for one in asked]
        spent = 1000 * (time.process_time() - begun) / len(asked)
        rows = np.flatnonzero(mask)
        expected = rows[nearest(asked, database[rows], k=10)[1]]
        return {"recall@10": recall(np.array(found), expected), "ms": spent}

    shared = {"bench": "filtered", "vectors": vectors, "exact_rows": exact_rows}
    wanted = [{**shared, "factory": own, "kept": name} for own in factories for name in kept]
    return shown("Filters", wanted, run, out)


def frozen(documents: int = 1_000_000, threads: int = 2, out: Path = STORE) -> list[Outcome]:
    """Compare a step of FrozenCorpus, with its gradient, with the products that it consists of.

    No exact method can do without two: scores Q·Zᵀ and weighted mean P·Z, with P (B, N) given. They
    are taken of a float32 matrix, each in one call, and of the same halves, converted in blocks.
    """
    batch_size, dim = 32, 384

    def run(settings: Settings) -> Outcome:
        use_threads(threads)
        with tempfile.TemporaryDirectory() as folder:
            stored = map_random(Path(folder, "documents.npy"), documents, dim)
            block_rows = frozen_corpus.BLOCK_BYTES // (4 * dim)
            halves = torch.from_numpy(np.array(stored)).split(block_rows)
            single = torch.cat(halves).float()
            weights = torch.rand(batch_size, documents)
            parts = weights.split(block_rows, dim=1)
            queries = normalize(torch.randn(batch_size, dim), dim=1)
            trained = queries.clone().requires_grad_()
            ids = torch.arange(batch_size)
            criterion = FrozenCorpus(stored, temperature=0.05)

            def step() -> None:
                trained.grad = None
                criterion(trained, single[ids], ids).loss.backward()

            def products() -> None:
                torch.mm(queries, single.T)
                torch.mm(weights, single)

            def products_of_halves() -> None:
                mean = torch.zeros_like(queries)
                for part, half in zip(parts, halves, strict=True):
                    block = half.float()
                    torch.mm(queries, block.T)
                    mean.addmm_(part, block)

            calls = {"float32": products, "halves": products_of_halves, "FrozenCorpus": step}
            return ratios(in_turn(calls, REPEATS)[0])

    settings = {"bench": "frozen", "documents": documents, "threads": threads}
    return shown("A step of FrozenCorpus", [settings], run, out)


def check(folder: Path) -> None:
    """Search small databases: what compares all vectors finds all."""
    out = folder / "runs.jsonl"
    found = index(1000, 16, repeats=1, factories=["Flat", "HNSW8"], out=out)
    assert found[0]["recall@10"] == 1, found
    lines = filtered(4000, ["Flat", "HNSW8"], out=out)
    assert [line["recall@10"] for line in lines[1:9] + lines[10:]] == [1] * 16, lines
    frozen(documents=2000, out=out)


if __name__ == "__main__":
    command_line(index, filtered, frozen, check=check)
