"""Database vectors and queries, checked and prepared for a metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dualenc.data.store.items import check_ids
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.types import Metric

METRICS = ("cosine", "ip")
UNIT_TOLERANCE = 1e-6
"""Vectors whose squared length differs from one by less than this count as normalized."""
STORED_TOLERANCE = 0.02
"""Allowed deviation of the squared length of stored unit vectors from one: float16 rounds each
number by up to 5e-4."""


class Database:
    """Stream the vectors of N items, prepared for a metric, without loading them all.

    Vectors that the metadata calls `normalized` are verified instead of being scaled again.

        database = Database(Embeddings.open("embeddings"), "cosine")
        for block in database.blocks():
            faiss_index.add(block)

    Args:
        embeddings: N vectors, possibly memory-mapped.
        metric: "cosine" scales vectors to length one; "ip" leaves them unchanged.

    Raises:
        DualencError: the embeddings are empty, or a vector is not finite.
    """

    def __init__(self, embeddings: Embeddings, metric: Metric) -> None:
        if not len(embeddings):
            raise DualencError("vectors are missing", fix="give at least one")
        self.embeddings = embeddings
        self.metric = metric
        self.are_unit = embeddings.provenance.normalized

    def __len__(self) -> int:
        return len(self.embeddings)

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the vectors (n, D) of the given rows, in that order.

        Raises:
            DualencError: see `ready`.
        """
        return self._ready(self.embeddings.vectors[rows], rows)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all vectors in order, in blocks (n, D)."""
        start = 0
        for block in self.embeddings.blocks():
            yield self._ready(block, range(start, start + len(block)))
            start += len(block)

    def sample(self, count: int, seed: int) -> np.ndarray:
        """Return a random sample of `count` rows without replacement, ascending."""
        size = min(count, len(self))
        # Ascending rows read a memory-mapped file in one direction.
        return np.sort(np.random.default_rng(seed).choice(len(self), size, replace=False))

    def _ready(self, block: np.ndarray, rows: range | np.ndarray) -> np.ndarray:
        # FAISS takes contiguous float32 only; stored vectors may be float16.
        block = np.ascontiguousarray(block, dtype=np.float32)

        def name(position: int) -> str:
            return repr(self.embeddings.ids[rows[position]])

        return ready(block, self.metric, name, self.are_unit)


def ready(
    vectors: np.ndarray,
    metric: Metric,
    name: Callable[[int], str] = "row {}".format,
    are_unit: bool = False,
) -> np.ndarray:
    """Check that vectors (n, D) are finite, and normalize them for "cosine"; zero stays zero.

    Args:
        vectors: (n, D) float32.
        metric: "cosine" or "ip".
        name: describes a row in error messages.
        are_unit: verify that the vectors already have length one, or are zero, instead of scaling.

    Raises:
        DualencError: a vector is not finite, or not of length one despite `are_unit`.
    """
    # One pass over the data: the squared length is finite exactly if no component is NaN or
    # infinite (or beyond 1e19, which no embedding reaches).
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
    # A zero vector has no direction and stays zero.
    lengths = np.sqrt(np.where(squares == 0, 1, squares))
    return vectors / lengths[:, None]


def as_queries(queries: np.ndarray, dim: int, metric: Metric, k: int = 1) -> np.ndarray:
    """Check queries and convert them to contiguous float32 (Q, D), normalized for "cosine".

    Args:
        queries: (Q, D), or (D,) for a single query.
        dim: D of the index.
        metric: "cosine" or "ip".
        k: number of requested results, checked too.

    Raises:
        DualencError: k is below 1, the shape does not fit, or a query is not finite.
    """
    if k < 1:
        raise DualencError(f"k is {k}", fix="ask for at least 1 result")
    queries = np.ascontiguousarray(np.atleast_2d(np.asarray(queries)), dtype=np.float32)
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise DualencError(
            f"queries of shape {queries.shape} for an index of dimension {dim}",
            fix="embed them with the model of the index",
        )
    return ready(queries, metric)


def as_embeddings(vectors: Embeddings | np.ndarray, ids: Sequence[str] | None) -> Embeddings:
    """Return embeddings with valid ids; the rows of an array (N, D) are numbered by default.

    Raises:
        DualencError: `vectors` is not a numeric matrix, or an id is missing or repeated.
    """
    if not isinstance(vectors, Embeddings):
        vectors = np.asarray(vectors)
        if vectors.ndim != 2 or not vectors.shape[1] or vectors.dtype.kind not in "fiu":
            raise DualencError(
                f"vectors are {vectors.dtype} of shape {vectors.shape}",
                fix="give numbers as a matrix (N, D)",
            )
        if ids is None:
            ids = [str(row) for row in range(len(vectors))]
        vectors = Embeddings(ids, vectors)
    check_ids(vectors.ids)
    return vectors
