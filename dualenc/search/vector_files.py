"""Vectors that dualenc did not write: FAISS files and .npy matrices, with what they say of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from dualenc.data.readers.vectors import load_npy
from dualenc.errors import DualencError, explain
from dualenc.io.provenance import Provenance
from dualenc.io.reading import with_home
from dualenc.search.documents import LENGTH_TOLERANCE, ReadRows, check_agreement, inner_products
from dualenc.search.index.database import STORED_TOLERANCE
from dualenc.search.index.decoded import decode
from dualenc.search.index.open import Index, open_faiss
from dualenc.types import Metric, StrPath

BLOCK = 1 << 14
"""Number of vectors that are in memory at once."""
EMBED = "export the vectors to a .npy matrix, or embed the documents"


@dataclass(frozen=True, eq=False)
class VectorFile:
    """N vectors of a file.

        opened = open_vector_file("plain.faiss")
        print(opened.finding)

    Attributes:
        path: the file.
        kind: what it is, such as "IndexHNSWFlat by inner product".
        vectors: (N, D), read or decoded when they are indexed.
        ids: (N,) ids in the file; None if it has none but row numbers.
        compares: similarity that the file is searched by: "ip", "l2" or another; None for a matrix.
        lengths: (N,) lengths of the vectors; 0 or not finite for those that cannot be used.
    """

    path: Path
    kind: str
    vectors: Any
    ids: list[str] | None
    compares: str | None
    lengths: np.ndarray

    @property
    def dim(self) -> int:
        """D, the size of the vectors."""
        return int(self.vectors.shape[1])

    @property
    def dtype(self) -> str:
        """Precision to store the vectors in: float16 stays, all else is float32."""
        return "float16" if self.vectors.dtype == np.float16 else "float32"

    @property
    def usable(self) -> np.ndarray:
        """(N,) True for vectors that are finite and not zero."""
        mask: np.ndarray = np.isfinite(self.lengths) & (self.lengths > 0)
        return mask

    @property
    def is_unit(self) -> bool:
        """True if all usable vectors have length one."""
        squares = np.square(self.lengths[self.usable])
        return bool((np.abs(squares - 1) <= STORED_TOLERANCE).all())

    @property
    def span(self) -> str:
        """The smallest and largest length, for people."""
        used = self.lengths[self.usable]
        if self.is_unit:
            return "length 1 (normalized)"
        return f"lengths {used.min():.3g} to {used.max():.3g} (not normalized)"

    def metric(self) -> Metric:
        """Return the metric that ranks as the file's own searches do; the cosine for a matrix.

        Raises:
            DualencError: neither cosine nor inner product does.
        """
        used = self.lengths[self.usable]
        are_equal = self.is_unit or used.max() <= (1 + LENGTH_TOLERANCE) * used.min()
        # Of equally long vectors, L2 distance, inner product and cosine rank alike.
        if self.compares is None or (are_equal and self.compares in ("ip", "l2")):
            return "cosine"
        if self.compares == "ip":
            return "ip"
        raise DualencError(
            f"compares by {self.compares} distance, which ranks vectors of {self.span} as neither "
            "cosine nor inner product does",
            fix="choose --metric cosine, if the model's vectors are compared by it, or --metric ip",
            where=self.path,
        )

    def finding(self, metric: Metric) -> str:
        """Return what was found, in one line."""
        size = f"{len(self.lengths):,} vectors of dimension {self.dim}"
        named = {"cosine": "cosine", "ip": "inner product"}[metric]
        return f"{self.path}: {self.kind}, {size}, {self.span}; compared by {named}"


def is_vector_file(source: StrPath) -> bool:
    """Return True if a source is a file, as FAISS and NumPy write, and not a folder or a name."""
    return with_home(Path(source)).is_file()


def open_vector_file(path: StrPath) -> VectorFile:
    """Open the vectors of a FAISS file or a .npy matrix; nothing in it is run or unpickled.

    Args:
        path: FAISS file, or .npy file of shape (N, D).

    Raises:
        DualencError: the file is corrupt or of another kind, no vector can be used, or the vectors
            that FAISS gives back are not those that it searches.
    """
    file = with_home(Path(path))
    if file.suffix == ".npy":
        vectors: Any = load_npy(file)
        kind, ids, compares = f"matrix of {vectors.dtype}", None, None
    else:
        kind, vectors, ids, compares = _open_faiss(file)
    lengths = np.concatenate([_lengths(block) for block in _blocks(vectors)])
    opened = VectorFile(file, kind, vectors, ids, compares, lengths)
    if not opened.usable.any():
        raise DualencError(
            f"none of {len(lengths):,} vectors can be used: they are zero or not finite",
            fix="embed the documents again",
            where=file,
        )
    return opened


def _blocks(vectors: Any) -> Iterator[np.ndarray]:
    """Yield the vectors in order as float32."""
    for start in range(0, len(vectors), BLOCK):
        # Too large a float64 becomes infinite, and is then left out as not finite.
        with np.errstate(over="ignore"):
            yield np.asarray(vectors[start : start + BLOCK], dtype=np.float32)


def _lengths(block: np.ndarray) -> np.ndarray:
    """Return (n,) lengths, in float64: float32 numbers may overflow when squared."""
    wide = block.astype(np.float64)
    lengths: np.ndarray = np.sqrt(np.einsum("nd,nd->n", wide, wide))
    return lengths


def _open_faiss(file: Path) -> tuple[str, ReadRows, list[str] | None, str]:
    """Return what a FAISS file is, its vectors, its own ids, and how it compares."""
    with explain(
        f"{file}: neither a .npy matrix nor a FAISS index", "give one of these, or MODEL DATA"
    ):
        whole = open_faiss(file)
    index, ids = whole, None
    if isinstance(whole, faiss.IndexIDMap):
        ids = faiss.vector_to_array(whole.id_map)
        index = faiss.downcast_index(whole.index)
    if index.ntotal == 0 or (ids is not None and len(ids) != index.ntotal):
        raise DualencError(
            f"holds {index.ntotal} vectors" + ("" if ids is None else f" and {len(ids)} ids"),
            fix="give a filled index",
            where=file,
        )
    labels = _labels(index, file)
    opened = _Opened(index, labels, whole)
    compares = {faiss.METRIC_INNER_PRODUCT: "ip", faiss.METRIC_L2: "l2"}
    name = compares.get(index.metric_type, f"FAISS's metric {index.metric_type}")
    vectors = ReadRows(index.ntotal, index.d, opened.reconstruct)
    if name in ("ip", "l2"):
        similarity = inner_products if name == "ip" else _negative_distances
        try:
            check_agreement(opened, vectors, file, similarity)
        except DualencError as error:
            # FAISS's own refusal to decode does not name the file.
            raise error if str(file) in str(error) else DualencError(f"{file}: {error}") from None
    own = labels if ids is None else ids
    kind = f"{type(index).__name__} by {'inner product' if name == 'ip' else name.upper()}"
    return kind, vectors, None if own is None else [str(each) for each in own.tolist()], name


def _negative_distances(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return the negative squared distances (n,) of vectors (n, D) from a query (D,)."""
    distances: np.ndarray = np.square(vectors - query).sum(axis=1)
    return -distances


def _labels(index: Any, file: Path) -> np.ndarray | None:
    """Return the ids (N,) in inverted lists, ascending; None if they are the row numbers."""
    try:
        ivf = faiss.try_extract_index_ivf(index)
    except RuntimeError:
        return None
    if ivf is None:
        return None
    lists: Any = ivf.invlists
    parts = [np.empty(0, np.int64)]
    for number in range(lists.nlist):
        if size := lists.list_size(number):
            parts.append(faiss.rev_swig_ptr(lists.get_ids(number), size).copy())
    labels = np.sort(np.concatenate(parts))
    if len(labels) != index.ntotal:
        raise DualencError(
            f"its lists hold {len(labels)} of {index.ntotal} vectors", fix=EMBED, where=file
        )
    if np.array_equal(labels, np.arange(len(labels))):
        return None
    # FAISS finds vectors by their ids with a table of them only.
    direct_map: Any = faiss.DirectMap  # type: ignore[attr-defined]
    ivf.set_direct_map_type(direct_map.Hashtable)
    return labels


class _Opened(Index):
    """A FAISS index whose inverted lists may hold other ids than row numbers.

    Args:
        index: the index.
        labels: (N,) ids that FAISS knows the rows by, ascending; None for row numbers.
        whole: the object that owns the index.
    """

    def __init__(self, index: Any, labels: np.ndarray | None, whole: Any) -> None:
        rows = [""] * index.ntotal
        provenance = Provenance(metric="ip", factory=type(index).__name__, dim=index.d)
        super().__init__(index, rows, provenance)
        self.labels = labels
        self.whole = whole

    def search_rows(
        self, queries: np.ndarray, k: int = 10, **options: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return FAISS's own scores, negative for distances, and row numbers (Q, k)."""
        scores, found = self.faiss.search(np.atleast_2d(queries), k)
        if self.labels is not None:
            rows = np.searchsorted(self.labels, found)
            found = np.where(found < 0, -1, rows)
        is_distance = self.faiss.metric_type != faiss.METRIC_INNER_PRODUCT
        return -scores if is_distance else scores, found

    def reconstruct(self, rows: np.ndarray) -> np.ndarray:
        """Decode the vectors (n, D) of rows (n,)."""
        if self.labels is None:
            return super().reconstruct(rows)
        with explain(f"an {type(self.faiss).__name__} gives no vectors back", EMBED):
            return decode(self.faiss, self.labels[rows])
