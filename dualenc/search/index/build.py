"""FAISS index construction: create, train, fill, tune and measure an index."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
from faiss.contrib.exhaustive_search import knn_ground_truth
from tqdm.auto import tqdm

from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError, explain
from dualenc.search.index.kinds import machine_memory, training_rows_in
from dualenc.search.index.refined import check_refinement, refined_by, split, write_codes
from dualenc.types import Metric

METRICS = ("cosine", "ip")
UNIT_TOLERANCE = 1e-6
"""Vectors whose squared length differs from one by less count as normalized."""
STORED_TOLERANCE = 0.02
"""Allowed difference of the squared length of stored unit vectors from one: float16 rounds each
number by 5e-4."""
SCORE_TOLERANCE = 1e-6
"""Two scores tie if they differ by less than this times both norms, as sums in another order do."""
POINTS_PER_LIST = 64
MIN_TRAINING_SAMPLE = 65536
PATIENCE = 3
"""Steps of a search parameter without gain that end its search: the next lists may hold the
neighbours."""
MIN_GAIN = 0.002
"""Recall below which a step of a search parameter has gained nothing."""
NEIGHBOURS = 10
"""k of the measured recall and latency."""
MAX_FACTORY_NUMBER = 2**24
MAX_FACTORY_LENGTH = 256
"""FAISS parses a factory string by recursion: thousands of parts overflow the stack."""
OTHER_FACTORIES = "try auto, Flat, HNSW32 or IVF256,Flat"
FACTORY_LIMITS = {
    "links of a vector": (r"(?:HNSW|NSG)(\d+)", 2, 1024),
    "bits of a code": (r"(?:PQ|RQ|LSQ|IMI|Residual)\w*?\d+x(\d+)", 1, 16),
    "dimensions": (r"(?:PCA[WR]*|RR|ITQ|OPQ\d+_|Pad)(\d+)", 1, 2**16),
}
"""Limits of a factory string: anything beyond is a typing error, or exhausts the machine."""
MAX_PARAMETER = 2**24
"""An HNSW search thread keeps 8 bytes for each of `efSearch` candidates."""


class Database:
    """Database vectors, ready for a metric; those that are `normalized` by their meta are checked
    and not scaled."""

    def __init__(self, embeddings: Embeddings, metric: Metric) -> None:
        if not len(embeddings):
            raise DualencError("there are no vectors", fix="give at least one")
        self.embeddings = embeddings
        self.metric = metric
        self.are_unit = bool(embeddings.meta.get("normalized"))

    def __len__(self) -> int:
        return len(self.embeddings)

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """The vectors (n, D) of some rows, in their order; raises what `ready` raises."""
        return self._ready(self.embeddings.vectors[rows], rows)

    def blocks(self) -> Iterator[np.ndarray]:
        """All vectors in order, one block at a time."""
        start = 0
        for block in self.embeddings.blocks():
            yield self._ready(block, range(start, start + len(block)))
            start += len(block)

    def sample(self, count: int, seed: int) -> np.ndarray:
        """A random sample of `count` rows without replacement, ascending."""
        return np.sort(
            np.random.default_rng(seed).choice(len(self), min(count, len(self)), replace=False)
        )

    def _ready(self, block: np.ndarray, rows: range | np.ndarray) -> np.ndarray:
        block = np.ascontiguousarray(block, dtype=np.float32)
        return ready(
            block, self.metric, lambda i: repr(self.embeddings.ids[rows[i]]), self.are_unit
        )


def ready(
    vectors: np.ndarray,
    metric: Metric,
    name: Callable[[int], str] = "row {}".format,
    are_unit: bool = False,
) -> np.ndarray:
    """Check that vectors (n, D) are finite, and normalize them for "cosine"; zero stays zero.

    With `are_unit` they should be of length one, or zero, already. `name` describes a row in error
    messages.
    """
    # One pass: a square is finite exactly if no number of the row is NaN or infinite (or beyond
    # 1e19).
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("nd,nd->n", vectors, vectors)
    if not np.isfinite(squares).all():
        row = int(np.flatnonzero(~np.isfinite(squares))[0])
        raise DualencError(
            f"the vector of {name(row)} is not finite", fix="embed it again or leave it out"
        )
    deviation = np.abs(squares - 1)
    if are_unit:
        wrong = (deviation > STORED_TOLERANCE) & (squares > 0)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise DualencError(
                f"the vector of {name(row)} has length {np.sqrt(squares[row]):.3g} instead of 1",
                fix="embed the data again",
            )
        return vectors
    if metric == "ip" or (deviation < UNIT_TOLERANCE).all():
        return vectors
    return vectors / np.sqrt(np.where(squares == 0, 1, squares))[:, None]


def as_queries(queries: np.ndarray, dim: int, metric: Metric, k: int = 1) -> np.ndarray:
    """Check queries for k results, and convert them to (Q, D) contiguous float32, normalized for
    "cosine"."""
    if k < 1:
        raise DualencError(f"k is {k}", fix="ask for at least 1 result")
    queries = np.ascontiguousarray(np.atleast_2d(np.asarray(queries)), dtype=np.float32)
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise DualencError(
            f"queries of shape {queries.shape} for an index of dimension {dim}",
            fix="embed them with the model of the index",
        )
    return ready(queries, metric)


def new_index(dim: int, factory: str, metric: Metric, num_vectors: int | None = None) -> Any:
    """Create an empty FAISS index for N vectors of size D; cosine is the inner product of
    normalized vectors."""
    if metric not in METRICS:
        raise DualencError(f"metric is {metric!r}: choose one of {', '.join(METRICS)}")
    check_factory(factory, num_vectors)
    with explain(f"factory {factory[:80]!r} does not work for dimension {dim}", OTHER_FACTORIES):
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
        check_refinement(index)
    if metric == "ip" and index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise _unfit(factory, "is searched by distance, not by inner product; use --metric cosine")
    _disable_polysemous_training(index)
    return index


def _disable_polysemous_training(index: Any) -> None:
    """Disable the reordering of product-quantizer codes, which takes 4 s per byte of a code and
    changes no distance."""
    index = faiss.downcast_index(index)
    if hasattr(index, "do_polysemous_training"):
        index.do_polysemous_training = False
    for part in ("index", "base_index", "refine_index", "storage", "quantizer"):
        if getattr(index, part, None) is not None:
            _disable_polysemous_training(getattr(index, part))


def check_factory(factory: str, num_vectors: int | None = None) -> None:
    """Refuse factory strings that FAISS accepts but that crash or hang the process, or can never be
    filled.

    `HNSW0`, `PQ4x0` and `IVF10_HNSW1,Flat` end in an assertion in C++, a division by zero or a wild
    pointer at the first vector, which no exception handler catches; `IVF999999999,Flat` exhausts
    the memory of the machine.
    """
    if len(factory) > MAX_FACTORY_LENGTH:
        length = f"is {len(factory):,} characters long, more than {MAX_FACTORY_LENGTH}"
        raise _unfit(factory, length)
    # By their length first: Python refuses to convert thousands of digits.
    numbers = re.findall(r"\d+", factory)
    if any(len(number) > 9 or not 1 <= int(number) <= MAX_FACTORY_NUMBER for number in numbers):
        raise _unfit(factory, f"has a number that is not between 1 and {MAX_FACTORY_NUMBER:,}")
    for what, (pattern, lowest, highest) in FACTORY_LIMITS.items():
        for number in re.findall(pattern, factory):
            if not lowest <= int(number) <= highest:
                raise _unfit(factory, f"has {number} {what}, which may be {lowest} to {highest:,}")
    for lists in re.findall(r"IVF(\d+)", factory):
        if num_vectors is not None and int(lists) > num_vectors:
            raise _unfit(factory, f"has {lists} lists for {num_vectors} vectors")
    if "ZnLattice" in factory:
        raise _unfit(factory, "has lattice codes, which FAISS does not write to a file")
    if "IDMap" in factory:
        raise _unfit(
            factory,
            "numbers the vectors itself, and items.arrow does that already; leave IDMap out",
        )


def _unfit(factory: str, why: str) -> DualencError:
    return DualencError(f"factory {factory[:80]!r} {why}", fix=OTHER_FACTORIES)


def training_rows(index: Any, num_vectors: int) -> int:
    """Number of training vectors: 64 per inverted list, at least 65536, at most all; 0 if the index
    needs none."""
    if index.is_trained:
        return 0
    ivf = faiss.try_extract_index_ivf(index)
    return min(num_vectors, max(MIN_TRAINING_SAMPLE, POINTS_PER_LIST * ivf.nlist if ivf else 0))


class Probe(NamedTuple):
    """Recall probe: queries with the exact score (Q,) of their k-th neighbour, the query itself not
    counted.

    `rows` (Q,) are those of the queries in the database, -1 for other queries.
    """

    queries: np.ndarray
    rows: np.ndarray
    threshold: np.ndarray
    k: int

    def part(self, queries: slice) -> Probe:
        """The probe of some of the queries."""
        return Probe(self.queries[queries], self.rows[queries], self.threshold[queries], self.k)


def exact_probe(database: Database, queries: np.ndarray, rows: np.ndarray) -> Probe | None:
    """Exact search of a streamed database for every query; None without queries or neighbours."""
    k = min(NEIGHBOURS, len(database) - int((rows >= 0).any()))
    if k < 1 or not len(queries):
        return None
    # One more than k, in case the query itself is found.
    depth = min(k + 1, len(database))
    scores, columns = knn_ground_truth(
        queries, database.blocks(), depth, faiss.METRIC_INNER_PRODUCT, ngpu=0
    )
    scores = np.where(columns == rows[:, None], -np.inf, scores)
    return Probe(queries, rows, -np.sort(-scores, axis=1)[:, k - 1], k)


def recall(index: Any, database: Database, probe: Probe) -> float:
    """Recall@k: the share of exact neighbours that an index finds; a tie with the k-th neighbour
    counts as a hit."""
    columns = index.search(probe.queries, probe.k + 1)[1]
    columns = np.where(columns == probe.rows[:, None], -1, columns)
    # The query itself moves behind its neighbours, and is cut off.
    missing_last = np.argsort(columns < 0, axis=1, kind="stable")[:, : probe.k]
    columns = np.take_along_axis(columns, missing_last, axis=1)
    vectors = database.rows(np.maximum(columns, 0).ravel()).reshape(*columns.shape, -1)
    scores = np.einsum("qd,qkd->qk", probe.queries, vectors, dtype=np.float64)
    slack = (
        SCORE_TOLERANCE
        * np.linalg.norm(probe.queries, axis=1)[:, None]
        * np.linalg.norm(vectors, axis=2)
    )
    hits = (columns >= 0) & (scores >= probe.threshold[:, None] - slack)
    return float(hits.mean())


def set_parameter(index: Any, name: str, value: int) -> None:
    """Set `nprobe`, `efSearch` or `k_factor_rf`, also inside pre-transformed and refined indexes
    that have it."""
    ivf = faiss.try_extract_index_ivf(index)
    maximum = int(ivf.nlist) if name == "nprobe" and ivf is not None else MAX_PARAMETER
    if not 1 <= value <= maximum:
        raise DualencError(f"{name} is {value}", fix=f"give a number from 1 to {maximum}")
    with explain(f"{name}={value} does not apply to this index", "leave it out"):
        faiss.ParameterSpace().set_index_parameter(index, name, value)


def parameter_values(index: Any) -> dict[str, list[int]]:
    """`nprobe` or `efSearch`, and `k_factor_rf` of a refined index, each with the values of
    `faiss.ParameterSpace`."""
    space = faiss.ParameterSpace()
    space.initialize(index)
    values = {}
    for number in range(space.parameter_ranges.size()):
        parameter = space.parameter_ranges.at(number)
        if parameter.name in ("nprobe", "efSearch", "k_factor_rf"):
            values[parameter.name] = [
                int(value) for value in faiss.vector_to_array(parameter.values) if value >= 1
            ]
    ivf = faiss.try_extract_index_ivf(index)
    # FAISS stops below the number of lists.
    if "nprobe" in values and ivf is not None:
        values["nprobe"] = sorted({*values["nprobe"], int(ivf.nlist)})
    return values


def tune(index: Any, database: Database, probe: Probe, target: float) -> dict[str, int]:
    """Set the smallest search parameters that reach a target recall, or else come within `MIN_GAIN`
    of the best.

    Each parameter grows until the target is reached or three steps have gained nothing, for each
    factor of refined candidates in turn. Nothing is timed, so that the same vectors give the same
    index.
    """
    values = parameter_values(index)
    if not values:
        return {}
    factors = values.pop("k_factor_rf", [0])  # 0: not refined
    name, steps = next(iter(values.items()), ("", [0]))
    best: dict[str, int] = {}
    best_recall = -1.0
    for factor in factors:
        recalls: list[float] = []
        for step in steps:
            setting = {
                key: value for key, value in (("k_factor_rf", factor), (name, step)) if value
            }
            for key, value in setting.items():
                set_parameter(index, key, value)
            recalls.append(recall(index, database, probe))
            if recalls[-1] >= target or recalls[-1] > best_recall + MIN_GAIN:
                best = setting
                best_recall = recalls[-1]
            is_flat = (
                len(recalls) > PATIENCE and 0 < recalls[-1 - PATIENCE] > recalls[-1] - MIN_GAIN
            )
            if recalls[-1] >= target or is_flat:
                break
        if best_recall >= target:
            break
    for key, value in best.items():
        set_parameter(index, key, value)
    return best


def latency(index: Any, queries: np.ndarray) -> dict[str, float]:
    """Latency of single queries in milliseconds: percentiles 50, 95 and 99."""
    index.search(queries[:1], NEIGHBOURS)  # warm-up
    times = []
    for query in queries:
        started = time.perf_counter()
        index.search(query[None], NEIGHBOURS)
        times.append(1000 * (time.perf_counter() - started))
    return {
        f"p{percent}": round(float(np.percentile(times, percent)), 3) for percent in (50, 95, 99)
    }


def _transforms(index: Any) -> list[Any]:
    """Return the transforms that vectors pass before an index, in order."""
    base = split(index)[0]
    if not isinstance(base, faiss.IndexPreTransform):
        return []
    chain: Any = base.chain
    return [faiss.downcast_VectorTransform(chain.at(number)) for number in range(chain.size())]


def subtracts_mean(index: Any) -> bool:
    """True if an index projects vectors less their mean, as FAISS's PCA does."""
    return any(
        isinstance(each, faiss.LinearTransform) and each.have_bias for each in _transforms(index)
    )


def _train_projections(index: Any, sample: np.ndarray) -> None:
    """Train the PCA of an index, and drop the mean that it subtracts, before its codes are trained.

    The inner product of centered vectors ranks otherwise than that of the vectors, and no vector
    that is read back would give it. A whitening keeps its mean.
    """
    for transform in _transforms(index):
        if not transform.is_trained:
            transform.train(sample)
        if isinstance(transform, faiss.PCAMatrix) and transform.eigen_power == 0:
            transform.have_bias = False
        sample = transform.apply(sample)


def build_faiss(
    database: Database,
    factory: str,
    *,
    memory: int | None = None,
    refine_file: Path | None = None,
    progress: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """Train a new index on a sample and add the database in blocks; returns it with entries for its
    meta.json.

    With `refine_file` the codes that refine an index are written there. The sample takes a quarter
    of memory at most.
    """
    num_vectors = len(database)
    dim = database.embeddings.dim
    filled = new_index(dim, factory, database.metric, num_vectors)
    limit = machine_memory() if memory is None else memory
    rows = min(training_rows(filled, num_vectors), training_rows_in(limit, dim))
    started = time.perf_counter()
    if rows:
        sample = database.rows(database.sample(rows, seed=0))
        with explain(
            f"factory {factory!r} cannot be trained on {rows} vectors",
            "use fewer lists, Flat or auto",
        ):
            _train_projections(filled, sample)
            filled.train(sample)
    index = filled if refine_file is None else split(filled)[0]
    with explain(f"factory {factory[:80]!r} cannot take {num_vectors} vectors", OTHER_FACTORIES):
        # Flat storage is reserved at once: growing it would copy it, and need twice the memory.
        storage = faiss.downcast_index(
            index.storage if isinstance(index, faiss.IndexHNSW) else index
        )
        if isinstance(storage, faiss.IndexFlatCodes):
            storage.codes.resize(num_vectors * storage.code_size)
            storage.codes.resize(0)
        with tqdm(total=num_vectors, desc="index", unit=" vectors", disable=not progress) as bar:
            for block in database.blocks():
                index.add(block)
                bar.update(len(block))
    if refine_file is not None:
        write_codes(split(filled)[1], database, refine_file)
        refined = refined_by(index, refine_file)
        refined.referenced_objects.append(filled)  # owns the base index
        filled = refined
    seconds = round(time.perf_counter() - started, 3)
    return filled, {"trained_on": rows, "build_seconds": seconds}
