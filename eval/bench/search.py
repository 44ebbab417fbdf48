"""Search: how fast are builds and searches, how much do filters lose, what does exactness cost?

    python eval/bench/search.py index       # builds and searches over those of raw faiss
    python eval/bench/search.py large --vectors 10000000 --limit 2GiB --folder /tmp/large
    python eval/bench/search.py filtered    # in PostgreSQL with --target postgresql://me@host/db
    python eval/bench/search.py exact       # torch over FAISS, also on a GPU if there is one
    python eval/bench/search.py frozen      # a step of FrozenCorpus over its matrix products

Vectors are synthetic. Calls that are compared take turns; the clock of one thread is CPU time.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import faiss
import numpy as np
import pyarrow as pa
import torch
from torch.nn.functional import normalize

sys.path.insert(0, str(Path(__file__).parents[1]))

from frame import command_line
from in_turn import in_turn, memory_of_process, quietest_clock, rows_of

from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import FrozenCorpus, frozen_corpus
from dualenc.search import Embeddings, Index, exact_search
from dualenc.search.embed.writer import EmbeddingWriter
from dualenc.search.engines.factory import push_embeddings
from dualenc.search.engines.filter_recall import QUERIES, Workload, tune
from dualenc.search.engines.postgres_settings import default_settings
from dualenc.search.index.build import training_rows
from dualenc.search.index.kinds import parse_bytes

FACTORIES = ("Flat", "IVF256,Flat", "HNSW16", "IVF256,PQ16x4")
nearest = partial(faiss.knn, k=10, metric=faiss.METRIC_INNER_PRODUCT)


def near(points: np.ndarray, noise: float, draw: np.random.Generator) -> np.ndarray:
    """Return a float32 unit vector near each point, (N, D); components have Gaussian noise."""
    vectors = points + noise * draw.standard_normal(points.shape, dtype=points.dtype)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32, copy=False)


def around(centers: np.ndarray, count: int, noise: float, draw: np.random.Generator) -> np.ndarray:
    """Return unit vectors (count, D), each near one of the centers (C, D)."""
    return near(centers[draw.integers(len(centers), size=count)], noise, draw)


class Numbered(Sequence[str]):
    """The ids d0, d1, …, which are never all in memory."""

    def __init__(self, count: int) -> None:
        self.rows = range(count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: Any) -> Any:
        return [f"d{i}" for i in self.rows[row]] if isinstance(row, slice) else f"d{self.rows[row]}"


def write_embeddings(
    folder: Path, count: int, dim: int, dtype: str, block: Callable[[range], np.ndarray]
) -> Embeddings:
    """Write the vectors that `block` returns for ranges of rows, like `dualenc embed`."""
    writer = EmbeddingWriter(folder, Numbered(count), dim, dtype, {"normalized": True})
    return writer.write_all(lambda number: (block(writer.ranges[number]), []))


def map_random(file: Path, count: int, dim: int, draw: np.random.Generator) -> np.ndarray:
    """Write random unit vectors (count, D) in half precision, and map the file into memory."""
    vectors = np.lib.format.open_memmap(file, "w+", np.float16, (count, dim))
    for start in range(0, count, 2**16):
        block = vectors[start : start + 2**16]
        block[:] = near(np.zeros(block.shape, np.float32), 1, draw)
    return vectors


def index(
    vectors: int = 50_000,
    dim: int = 128,
    queries: int = 1000,
    repeats: int = 3,
    seconds: float = 10,
    threads: int | None = None,
    factories: tuple[str, ...] = FACTORIES,
) -> dict[str, float]:
    """Compare with raw faiss on the same vectors, near 200 centers; return recall@10 by factory.

    A build is without the measurement of recall@10, which faiss does not have. Searches are
    repeated for some seconds, 5 to 50 times, in our index and in faiss's from the same file. Ours
    return ids as texts, those of faiss row numbers.
    """
    use_threads(threads)
    centers = np.random.default_rng(0).normal(size=(200, dim)).astype(np.float32)
    database = around(centers, vectors, 0.8, np.random.default_rng(1))
    asked = around(centers, queries, 0.8, np.random.default_rng(2))
    expected, recalls = nearest(asked, database)[1], {}
    with tempfile.TemporaryDirectory() as name:
        folder, stored = Path(name, "index"), Path(name, "embeddings")
        embeddings = write_embeddings(stored, vectors, dim, "float32", database.__getitem__)
        for factory in factories:
            ours = Index.build(embeddings, factory=factory)
            ours.save(folder)
            if repeats:
                build = partial(Index.build, embeddings, factory=factory, recall_queries=0)
                builds = {"faiss": partial(raw_build, embeddings, factory), "dualenc": build}
                compare(f"{factory}: build", builds, repeats)
            search = partial(faiss.read_index(str(folder / "index.faiss")).search, asked, 10)
            begun = time.perf_counter()
            recalls[factory] = recall(search()[1], expected)
            rounds = round(seconds / 2 / (time.perf_counter() - begun))
            for state, searched in {"as it was built": ours, "opened": Index.open(folder)}.items():
                searches = {"faiss": search, "dualenc": partial(searched.search_rows, asked)}
                found = compare(f"{factory}: {state}", searches, max(5, min(rounds, 50)))
                assert recall(found["dualenc"][1], expected) == recalls[factory]
            print(f"recall@10 {recalls[factory]:.4f}, {ours.provenance.search_parameters}")
    return recalls


def use_threads(count: int | None) -> None:
    """Set the number of threads of faiss and torch, unless it is None."""
    if count is not None:
        faiss.omp_set_num_threads(count)
        torch.set_num_threads(count)


def compare(caption: str, runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Any]:
    """Print the times of calls, and return what each returned."""
    times, results = in_turn(runs, repeats, 1, quietest_clock)
    print_table(Table(f"{caption}, {torch.get_num_threads()} threads", rows_of(times)))
    return results


def recall(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the mean share of expected rows (Q, n) that are found (Q, k)."""
    return float(np.mean([np.isin(*rows).mean() for rows in zip(expected, found, strict=True)]))


def raw_build(embeddings: Embeddings, factory: str) -> Any:
    """Build as a user of faiss does: read all, train on a sample as large as ours, add."""
    vectors = np.ascontiguousarray(embeddings.vectors[:])
    built = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    built.train(vectors[: training_rows(built, len(vectors))])
    built.add(vectors)
    return built


def large(
    vectors: int = 10_000_000,
    dim: int = 128,
    centers: int = 20_000,
    limit: str = "2GiB",
    memory: str = "1GiB",
    factory: str = "auto",
    folder: Path = Path("large"),
) -> float:
    """Write embeddings unless the folder has some; build, open and search an index; return recall.

    The build is told of a memory. The limit is RLIMIT_DATA: the kernel refuses more private memory.
    Pages of mapped files do not count, because the kernel takes them back when it wants to.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (parse_bytes(limit), parse_bytes(limit)))
    middles = np.random.default_rng(0).standard_normal((centers, dim), dtype=np.float32)

    def block(rows: range, seed: int = 1) -> np.ndarray:
        return around(middles, len(rows), 0.9, np.random.default_rng([seed, rows.start]))

    stored, built = folder / "emb", folder / "index"
    if not stored.exists():
        measured("write", lambda: write_embeddings(stored, vectors, dim, "float16", block))
    embeddings = measured("open embeddings", lambda: Embeddings.open(stored))
    queries = block(range(1000), seed=2)
    how: dict[str, Any] = {"queries": queries, "recall_queries": 400, "folder": built}
    how |= {"factory": factory, "memory": parse_bytes(memory)}
    measured("build, tune and measure", lambda: Index.build(embeddings, **how))
    opened: Any = measured("open index", lambda: Index.open(built))
    measured("1,000 searches in one call", lambda: opened.search_rows(queries))
    measured("row of an id", lambda: opened.ids.rows([f"d{vectors - 1}"]))
    measured("verify all files", lambda: Index.open(built, verify=True))
    sizes = {file.name: round(file.stat().st_size / vectors, 2) for file in built.iterdir()}
    print("bytes per vector on disk:", sizes)
    print(json.dumps(opened.provenance.without(["files", "sizes"]).entries()))
    return float(opened.provenance.recall_at_10)


def measured(what: str, work: Callable[[], Any]) -> Any:
    """Work, and print seconds of the processor, and the private memory of this process."""
    begun = time.process_time()
    result = work()
    spent = time.process_time() - begun
    print(f"{what:<26} {spent:8.2f} s, then {memory_of_process():5.0f} MiB private", flush=True)
    return result


def filtered(
    vectors: int = 200_000,
    dim: int = 64,
    queries: int = 200,
    factories: tuple[str, ...] = ("Flat", "IVF2048,Flat", "HNSW32"),
    shares: tuple[float, ...] = (1.0, 0.5, 0.2, 0.05, 0.01),
    exact_rows: int | None = None,
    target: str | None = None,
) -> list[dict[str, Any]]:
    """Return recall@10 and processor time of single searches on one thread, by share of kept rows.

    A filter keeps rows at random, or those near a share of 200 centers. Indexes compare all kept
    rows up to `exact_rows`. A target, the URL of a PostgreSQL database, is measured instead.
    """
    draw = np.random.default_rng(0)
    centers = draw.normal(size=(200, dim))
    numbers = draw.integers(len(centers), size=vectors)
    database = near(centers[numbers], 1.5, draw)
    asked = around(centers, queries, 1.5, draw)
    uniform = draw.random(vectors)
    if target is not None:
        return filtered_by_postgres(target, database, asked, uniform, shares)
    kept = {f"{share:.1%} at random": uniform < share for share in shares}
    kept |= {f"{share:.1%} of the centers": numbers < 200 * share for share in shares if share < 1}
    faiss.omp_set_num_threads(1)
    rows = {name: np.flatnonzero(mask) for name, mask in kept.items()}
    expected = {name: own[nearest(asked, database[own])[1]] for name, own in rows.items()}
    lines = []
    for factory in factories:
        searched = Index.build(database, factory=factory)
        if exact_rows is not None:
            searched.record(settings={"exact_rows": exact_rows})
        row = {"factory": factory, **searched.provenance.search_parameters}
        for name, mask in kept.items():
            allowed = None if mask.all() else mask
            begun = time.process_time()
            found = [searched.search_rows(one, 10, allowed_rows=allowed)[1][0] for one in asked]
            spent = 1000 * (time.process_time() - begun) / queries
            result = recall(np.array(found), expected[name])
            lines.append({**row, "kept": name, "recall@10": result, "ms": spent})
    print_table(Table(f"{vectors:,} × {dim}, {queries} queries", lines))
    return lines


def filtered_by_postgres(
    target: str, database: Any, queries: Any, uniform: Any, shares: tuple[float, ...]
) -> list[dict[str, Any]]:
    """Measure a table with an HNSW index of halfvec and a column of uniform numbers (N,)."""
    names, columns = [str(row) for row in range(len(database))], pa.table({"share": uniform})
    embeddings = Embeddings(names, database.astype(np.float16), None, None, columns)
    table = "dualenc_bench_filtered"
    engine = push_embeddings(embeddings, target, table, metric="cosine", replace=True)[0]
    filters = [f"share < {share}" for share in shares]
    drawn = np.random.default_rng(0).permutation(len(database))[:QUERIES]
    tune(engine, database[drawn], filters, 0.95)
    pushed, tuned = default_settings("hnsw", len(database)), engine.provenance.settings
    relaxed = {**pushed, "ef_search": 40}
    # A workload gives every query to one filter, in turn; here each filter gets all.
    workload = Workload(engine, np.repeat(queries, len(filters), axis=0), filters)
    lines = []
    for chosen in ({**relaxed, "iterative_scan": "off"}, relaxed, pushed, tuned):
        engine.record(settings=chosen)
        lines += [{**chosen, **line} for line in workload.measure().filters]
    print_table(Table("halfvec with HNSW", lines))
    return lines


def exact(
    documents: int = 100_000, queries: int = 1000, k: int = 101, threads: int | None = None
) -> None:
    """Compare exact searches of a mapped file in half precision, which must find the same.

    Ids, which only settle ties, are not given. `dualenc evaluate retrieval` asks for k = 101.
    """
    use_threads(threads)
    draw = np.random.default_rng(0)
    asked = near(np.zeros((queries, 384), np.float32), 1, draw)
    with tempfile.TemporaryDirectory() as folder:
        stored = map_random(Path(folder, "documents.npy"), documents, 384, draw)
        search = partial(exact_search.exact_search, asked, stored, k)

        def search_by_torch() -> tuple[np.ndarray, np.ndarray]:
            with mock.patch.object(exact_search, "_search_by_faiss", exact_search.search_by_torch):
                return search()

        runs = {"FAISS": search, "torch": search_by_torch}
        if torch.cuda.is_available():
            runs[torch.cuda.get_device_name()] = partial(search, device="cuda")
        found = compare(f"{queries:,} queries, {documents:,} documents", runs, repeats=5)
        expected, expected_columns = found["FAISS"]
        for name, (scores, columns) in found.items():
            # Scores are those of the documents, and the same, so that others have equal scores.
            documents_found = stored[columns[:100]].astype(np.float32)
            again = np.einsum("qd,qkd->qk", asked[:100], documents_found)
            assert max(abs(scores[:100] - again).max(), abs(scores - expected).max()) < 1e-6, name
            print(f"{name}: {(columns != expected_columns).mean():.1e} in another order")


def frozen(
    rows: int = 1_000_000, dim: int = 384, batch_size: int = 32, threads: int = 2, repeats: int = 7
) -> None:
    """Compare a step of FrozenCorpus, with its gradient, with the products that it consists of.

    No exact method can do without two: scores Q·Zᵀ and weighted mean P·Z, with P (B, N) given. They
    are taken of a float32 matrix, each in one call, and of the same halves, converted in blocks.
    """
    use_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "documents.npy")
        documents = map_random(file, rows, dim, np.random.default_rng(0))
        block_rows = frozen_corpus.BLOCK_BYTES // (4 * dim)
        halves = torch.from_numpy(np.array(documents)).split(block_rows)
        single = torch.cat(halves).float()
        weights = torch.rand(batch_size, rows)
        parts = weights.split(block_rows, dim=1)
        queries = normalize(torch.randn(batch_size, dim), dim=1)
        trained = queries.clone().requires_grad_()
        ids = torch.arange(batch_size)
        criterion = FrozenCorpus(documents, temperature=0.05)

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

        calls = {"float32": products, "halves, in blocks": products_of_halves, "FrozenCorpus": step}
        compare(f"{rows:,} × {dim}, B = {batch_size}", calls, repeats)


def check(folder: Path) -> None:
    """Search small databases: what compares all vectors finds all."""
    found = index(1000, 16, queries=20, repeats=1, seconds=0, factories=("Flat", "HNSW8"))
    assert found["Flat"] == 1, found
    lines = filtered(500, 8, queries=5, factories=("Flat", "HNSW8"), shares=(0.5, 0.05))
    assert [line["recall@10"] for line in lines] == [1] * 8, lines
    exact(documents=300, queries=20, k=7)
    frozen(rows=2000, dim=16, repeats=1)
    small = {"limit": "64GiB", "factory": "IVF8,RaBitQ,Refine(SQfp16)", "folder": folder / "large"}
    assert large(2000, 16, centers=20, **small) >= 0.95


if __name__ == "__main__":
    command_line(index, large, filtered, exact, frozen, check=check)
