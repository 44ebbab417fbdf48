"""From vectors to a trained, filled and measured FAISS index."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import faiss
import numpy as np
from faiss.contrib.exhaustive_search import knn_ground_truth
from tqdm.auto import tqdm

from dualenc.errors import DualencError
from dualenc.search.embeddings import Embeddings
from dualenc.types import Metric

METRICS = ("cosine", "ip")
UNIT_TOLERANCE = 1e-6
"""Vectors whose squared length differs from one by less are taken as normalised."""
STORED_TOLERANCE = 0.02
"""How far the squared length of stored unit vectors may be from one: half precision rounds each number by 5e-4."""
SCORE_TOLERANCE = 1e-6
"""Two scores are a tie if they differ by less than this times both norms: sums in another order differ so much."""

POINTS_PER_LIST = 64
OTHER_TRAINING_ROWS = 65536

FLAT_STEPS = 3
"""So many values of a search parameter in a row that gain nothing end its search."""

LARGEST_NUMBER = 2**24
MOST_LINKS = 1024
MOST_BITS = 16
MOST_DIMENSIONS = 2**16
"""Limits of a factory string: what is beyond them is a slip of the hand, or takes a machine down."""
LARGEST_PARAMETER = 2**24
"""A thread of HNSW keeps 8 bytes for each of `efSearch` candidates."""


class Database:
    """N vectors as the metric wants them: float32, finite, of unit norm for "cosine".

    Vectors that say `normalized` in their meta are checked and taken as they are.
    """

    def __init__(self, embeddings: Embeddings, metric: Metric) -> None:
        self.embeddings, self.metric = embeddings, metric
        self.are_unit = bool(embeddings.meta.get("normalized"))

    def __len__(self) -> int:
        return len(self.embeddings)

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """Some vectors, (n, D), in the order of `rows`; a `DualencError` tells which is not fit, as `ready` does."""
        return self._ready(self.embeddings.vectors[rows], rows)

    def blocks(self) -> Iterator[np.ndarray]:
        """All vectors in order, a block at a time."""
        start = 0
        for block in self.embeddings.blocks():
            yield self._ready(block, range(start, start + len(block)))
            start += len(block)

    def sample(self, count: int, seed: int) -> np.ndarray:
        """Numbers of `count` rows drawn without replacement, ascending."""
        return np.sort(np.random.default_rng(seed).choice(len(self), min(count, len(self)), replace=False))

    def _ready(self, block: np.ndarray, rows: range | np.ndarray) -> np.ndarray:
        block = np.ascontiguousarray(block, dtype=np.float32)
        return ready(block, self.metric, lambda i: repr(self.embeddings.ids[rows[i]]), self.are_unit)


def ready(
    vectors: np.ndarray,
    metric: Metric,
    name: Callable[[int], str] = "row {}".format,
    are_unit: bool = False,
) -> np.ndarray:
    """Float32 vectors (n, D), checked to be finite, and scaled to length one for "cosine"; zero stays zero.

    Args:
        vectors: (n, D) float32; returned as they are where nothing is to do.
        metric: "cosine" or "ip".
        name: what to call a row in an error.
        are_unit: they are said to be of length one, or zero: check that instead of scaling.

    Raises:
        DualencError: a vector is not finite, or not of length one though it is said to be.
    """
    # One pass: a square is finite exactly if no number of the row is NaN or infinite (or beyond 1e19).
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("nd,nd->n", vectors, vectors)
    if not np.isfinite(squares).all():
        row = int(np.flatnonzero(~np.isfinite(squares))[0])
        raise DualencError(f"the vector of {name(row)} is not finite; embed it again or leave it out")
    off = np.abs(squares - 1)
    if are_unit:
        wrong = (off > STORED_TOLERANCE) & (squares > 0)
        if wrong.any():
            row = int(np.argmax(wrong))
            length = f"{np.sqrt(squares[row]):.3g}"
            raise DualencError(f"the vector of {name(row)} has length {length} instead of 1; embed the data again")
        return vectors
    if metric == "ip" or (off < UNIT_TOLERANCE).all():
        return vectors
    return vectors / np.sqrt(np.where(squares == 0, 1, squares))[:, None]


def as_queries(queries: np.ndarray, dim: int, metric: Metric) -> np.ndarray:
    """Queries as (Q, D) contiguous float32, normalised for "cosine"; refused if not finite or of another dimension."""
    queries = np.ascontiguousarray(np.atleast_2d(np.asarray(queries)), dtype=np.float32)
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise DualencError(
            f"queries of shape {queries.shape} for an index of dimension {dim}; embed them with the model of the index"
        )
    return ready(queries, metric)


def new_index(dim: int, factory: str, metric: Metric, num_vectors: int | None = None) -> Any:
    """An empty FAISS index; cosine is the inner product of normalised vectors.

    Args:
        dim: D.
        factory: a FAISS factory string.
        metric: "cosine" or "ip".
        num_vectors: N, if it is known; an index with more lists than vectors is refused.

    Raises:
        DualencError: FAISS does not know the string, or it does not fit the dimension or the number of vectors
            (with FAISS's reason).
    """
    if metric not in METRICS:
        raise DualencError(f"metric is {metric!r}: choose one of {', '.join(METRICS)}")
    check_factory(factory, num_vectors)
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except (RuntimeError, MemoryError) as error:
        raise _unfit(factory, f"does not work for dimension {dim}: {reason(error)}") from None
    _keep_order_of_codes(index)
    return index


def _keep_order_of_codes(index: Any) -> None:
    """Leave out FAISS's reordering of product-quantized codes, for a search by Hamming distances that is not used here.

    It takes 4 seconds for each byte of a code, however few the vectors, and changes no distance.
    """
    index = faiss.downcast_index(index)
    if hasattr(index, "do_polysemous_training"):
        index.do_polysemous_training = False
    for part in ("index", "base_index", "refine_index", "storage", "quantizer"):
        if getattr(index, part, None) is not None:
            _keep_order_of_codes(getattr(index, part))


def check_factory(factory: str, num_vectors: int | None = None) -> None:
    """Refuse what FAISS accepts and then ends the whole process with, hangs on, or can never fill.

    `HNSW0`, `PQ4x0` and `IVF10_HNSW1,Flat` stop at an assertion in C++, a division by zero or a wild pointer when the
    first vector arrives, out of reach of any exception; `IVF999999999,Flat` takes the memory of the whole machine.

    Args:
        factory: a FAISS factory string, or "auto".
        num_vectors: N, if it is known.

    Raises:
        DualencError: with what is wrong.
    """
    numbers = [int(number) for number in re.findall(r"\d+", factory) if len(number) < 10]
    if len(numbers) < len(re.findall(r"\d+", factory)) or any(not 1 <= n <= LARGEST_NUMBER for n in numbers):
        raise _unfit(factory, f"has a number that is not between 1 and {LARGEST_NUMBER:,}")
    for name, links in re.findall(r"(HNSW|NSG)(\d+)", factory):
        if not 2 <= int(links) <= MOST_LINKS:
            raise _unfit(factory, f"gives each vector {links} links; {name} takes 2 to {MOST_LINKS}")
    for bits in re.findall(r"(?:PQ|RQ|LSQ|IMI|Residual)\w*?\d+x(\d+)", factory):
        if int(bits) > MOST_BITS:
            raise _unfit(factory, f"has codes of {bits} bits; at most {MOST_BITS} can be trained")
    for size in re.findall(r"(?:PCA[WR]*|RR|ITQ|OPQ\d+_|Pad)(\d+)", factory):
        if int(size) > MOST_DIMENSIONS:
            raise _unfit(factory, f"makes vectors of dimension {size}; at most {MOST_DIMENSIONS} are allowed")
    for lists in re.findall(r"IVF(\d+)", factory):
        if num_vectors is not None and int(lists) > num_vectors:
            raise _unfit(factory, f"has {lists} lists for {num_vectors} vectors")
    if "IDMap" in factory:
        raise _unfit(factory, "numbers the vectors itself, and items.arrow does that already; leave IDMap out")


def _unfit(factory: str, why: str) -> DualencError:
    return DualencError(f"factory {factory[:80]!r} {why}; try auto, Flat, HNSW32 or IVF256,Flat")


def training_rows(index: Any, num_vectors: int) -> int:
    """How many vectors to train on: 64 per inverted list, at least 65536, at most all; 0 if none are needed."""
    if index.is_trained:
        return 0
    ivf = faiss.try_extract_index_ivf(index)
    return min(num_vectors, max(OTHER_TRAINING_ROWS, POINTS_PER_LIST * ivf.nlist if ivf else 0))


def reason(error: BaseException) -> str:
    """The last part of a FAISS error: what is wrong, without the C++ function and file."""
    text = " ".join(str(error).split())
    text = re.sub(r"^Error in .* at \S+:\d+: ", "", text)
    text = re.sub(r"^Error: '.*' failed: ", "", text)
    return text if len(text) <= 200 else f"{text[:199]}…"


class Probe(NamedTuple):
    """Queries with the outcome of an exact search for k neighbours, the query itself not counted."""

    queries: np.ndarray  # (Q, D) float32
    rows: np.ndarray  # (Q,) of each query in the database, -1 for those from elsewhere
    threshold: np.ndarray  # (Q,) exact score of the k-th neighbour
    k: int


def exact_probe(database: Database, queries: np.ndarray, rows: np.ndarray, k: int = 10) -> Probe | None:
    """Search a database exactly for every query, streaming it; None if there is nobody to find.

    Args:
        database: N vectors.
        queries: (Q, D).
        rows: (Q,) row of a query in the database, which is not to find itself; -1 if it is not in there.
        k: neighbours to look for; fewer if the database is smaller.
    """
    k = min(k, len(database) - int((rows >= 0).any()))
    if k < 1 or not len(queries):
        return None
    # One more than k, in case the query itself is among them.
    scores, found = knn_ground_truth(
        queries, database.blocks(), min(k + 1, len(database)), faiss.METRIC_INNER_PRODUCT, ngpu=0
    )
    scores = np.where(found == rows[:, None], -np.inf, scores)
    return Probe(queries, rows, -np.sort(-scores, axis=1)[:, k - 1], k)


def halves(probe: Probe) -> tuple[Probe, Probe]:
    """Every other query, and the rest."""
    return tuple(Probe(probe.queries[i::2], probe.rows[i::2], probe.threshold[i::2], probe.k) for i in (0, 1))  # type: ignore[return-value]


def recall(index: Any, database: Database, probe: Probe) -> float:
    """The share of exact neighbours that the index finds; a tie with the k-th neighbour is as good as it."""
    return share_found(index.search(probe.queries, probe.k + 1)[1], database, probe)


def share_found(found: np.ndarray, database: Database, probe: Probe) -> float:
    """The share of exact neighbours among the rows (Q, k + 1) that a search gave."""
    found = np.where(found == probe.rows[:, None], -1, found)
    own_last = np.argsort(found < 0, axis=1, kind="stable")[:, : probe.k]
    found = np.take_along_axis(found, own_last, axis=1)
    vectors = database.rows(np.maximum(found, 0).ravel()).reshape(*found.shape, -1)
    scores = np.einsum("qd,qkd->qk", probe.queries, vectors, dtype=np.float64)
    slack = SCORE_TOLERANCE * np.linalg.norm(probe.queries, axis=1)[:, None] * np.linalg.norm(vectors, axis=2)
    hits = (found >= 0) & (scores >= probe.threshold[:, None] - slack)
    return float(hits.mean())


def set_parameter(index: Any, name: str, value: int) -> None:
    """Set a search parameter such as "nprobe" or "efSearch", also inside pre-transformed and refined indexes.

    Raises:
        DualencError: the index has no such parameter, or the value is beyond what it can use.
    """
    ivf = faiss.try_extract_index_ivf(index)
    largest = int(ivf.nlist) if name == "nprobe" and ivf is not None else LARGEST_PARAMETER
    if not 1 <= value <= largest:
        raise DualencError(f"{name} is {value}; give a number from 1 to {largest}")
    try:
        faiss.ParameterSpace().set_index_parameter(index, name, value)
    except RuntimeError as error:
        raise DualencError(f"{name}={value} does not apply to this index ({reason(error)}); leave it out") from None


def parameter_values(index: Any) -> dict[str, list[int]]:
    """The parameters that trade time for recall, each with the values of `faiss.ParameterSpace`, ascending.

    They are `nprobe` or `efSearch`, and `k_factor_rf` for what is refined; {} where there is nothing to choose.
    """
    space = faiss.ParameterSpace()
    space.initialize(index)
    values = {}
    for number in range(space.parameter_ranges.size()):
        found = space.parameter_ranges.at(number)
        if found.name in ("nprobe", "efSearch", "k_factor_rf"):
            values[found.name] = [int(value) for value in faiss.vector_to_array(found.values) if value >= 1]
    ivf = faiss.try_extract_index_ivf(index)
    if "nprobe" in values and ivf is not None:  # FAISS stops below the number of lists
        values["nprobe"] = sorted({*values["nprobe"], int(ivf.nlist)})
    return values


def tune(index: Any, database: Database, probe: Probe, target: float, least_gain: float = 0.002) -> dict[str, int]:
    """Set the fastest of FAISS's operating points whose recall reaches a target, or the fastest of the best.

    The values are those of `faiss.ParameterSpace`, and its `OperatingPoints` keep what is worth having. Its `explore`
    would time every value up to the largest, compares row numbers where scores may tie, and knows of no query that is
    itself in the database: here each parameter grows until the target is reached or three steps, an eightfold value,
    have gained nothing. A single step tells little: the next lists may hold the neighbours.

    Returns:
        What is now set in the index, by name.
    """
    values = parameter_values(index)
    if not values:
        return {}
    refining = values.pop("k_factor_rf", [])
    name, steps = next(iter(values.items()), ("", [0]))
    points = faiss.OperatingPoints()
    tried: list[tuple[float, float, dict[str, int]]] = []
    for factor in refining or [0]:
        history: list[float] = []
        for step in steps:
            setting = {key: value for key, value in (("k_factor_rf", factor), (name, step)) if value}
            for key, value in setting.items():
                set_parameter(index, key, value)
            started = time.perf_counter()
            rows = index.search(probe.queries, probe.k + 1)[1]
            seconds, found = time.perf_counter() - started, share_found(rows, database, probe)
            points.add(found, seconds, str(setting), len(tried))
            tried.append((found, seconds, setting))
            slower = any(best >= target and seconds > least for best, least, _ in tried[:-1])
            history.append(found)
            flat = len(history) > FLAT_STEPS and 0 < history[-1 - FLAT_STEPS] > found - least_gain
            if found >= target or slower or flat:
                break
    optimal = [points.optimal_pts.at(number) for number in range(points.optimal_pts.size())]
    best = max(point.perf for point in optimal)
    enough = target if best >= target else best - least_gain
    chosen = tried[min((point for point in optimal if point.perf >= enough), key=lambda point: point.t).cno][2]
    for key, value in chosen.items():
        set_parameter(index, key, value)
    return chosen


def latency(index: Any, queries: np.ndarray, k: int = 10) -> dict[str, float]:
    """Milliseconds that a query takes when asked alone: the median, and what 95 and 99 of a hundred stay below."""
    index.search(queries[:1], k)
    taken = []
    for query in queries:
        started = time.perf_counter()
        index.search(query[None], k)
        taken.append(1000 * (time.perf_counter() - started))
    return {f"p{share}": round(float(np.percentile(taken, share)), 3) for share in (50, 95, 99)}


def build_faiss(
    database: Database, factory: str, *, train_rows: int | None, seed: int, progress: bool
) -> tuple[Any, dict[str, Any]]:
    """Train a new index on a sample and add the database block by block; with entries for its meta.json.

    The arguments are those of `Index.build`; without `train_rows` a sample of `training_rows` is taken.

    Raises:
        DualencError: a factory string that FAISS refuses, cannot train on these vectors or cannot fill with them.
    """
    num_vectors, dim = len(database), database.embeddings.dim
    index = new_index(dim, factory, database.metric, num_vectors)
    rows = training_rows(index, num_vectors) if train_rows is None or index.is_trained else min(train_rows, num_vectors)
    started = time.perf_counter()
    if rows:
        train(index, database.rows(database.sample(rows, seed)), factory)
    try:
        # Flat storage is allocated once: grown block by block it would be copied, old and new side by side.
        storage = faiss.downcast_index(index.storage if isinstance(index, faiss.IndexHNSW) else index)
        if isinstance(storage, faiss.IndexFlatCodes):
            storage.codes.resize(num_vectors * storage.code_size)
            storage.codes.resize(0)
        with tqdm(total=num_vectors, desc="index", unit=" vectors", disable=not progress) as bar:
            for block in database.blocks():
                index.add(block)
                bar.update(len(block))
    except (RuntimeError, MemoryError) as error:
        raise _unfit(factory, f"cannot take {num_vectors} vectors: {reason(error)}") from None
    seconds = round(time.perf_counter() - started, 3)
    return index, {"trained_on": rows, "build_seconds": seconds}


def train(index: Any, vectors: np.ndarray, factory: str) -> None:
    """Train an index so that Ctrl-C ends it at once.

    FAISS asks between the iterations of a k-means whether to stop, which for product quantizers is a minute apart, and
    OPQ trains one after the other; hence a thread trains, and this one waits where it can be interrupted.
    """
    outcome: list[BaseException | None] = []
    threads = faiss.omp_get_max_threads()

    def work() -> None:
        faiss.omp_set_num_threads(threads)  # OpenMP keeps this number for each thread
        try:
            index.train(vectors)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="faiss training", daemon=True)
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
