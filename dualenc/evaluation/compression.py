"""Vector compression: retrieval with the first components only, in 8 bits or in one bit per number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import faiss
import numpy as np
import numpy.typing as npt
import torch

from dualenc.evaluation.probe import unit_rows
from dualenc.evaluation.retrieval import as_run, first_documents
from dualenc.search.exact import DOCUMENT_BLOCK, exact_search
from dualenc.types import Vectors

Code = Literal["float32", "int8", "binary"]
Found = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]
"""(Q, k) scores and rows of documents."""

RESCORED = 4
"""Candidates per result that a search with codes finds; they are scored again with the vectors."""


class Size(NamedTuple):
    """Storage of vectors: their first components as float32, a byte each (int8), or their signs (binary).

    With `rescored`, vectors in float32 on disk order the best candidates again.
    """

    dim: int
    code: Code
    rescored: bool = False

    @property
    def memory(self) -> int:
        """Bytes per vector that a search reads."""
        return {"float32": 4 * self.dim, "int8": self.dim, "binary": -(-self.dim // 8)}[self.code]

    @property
    def disk(self) -> int:
        """Further bytes per vector, read for the best candidates only."""
        return 4 * self.dim if self.rescored else 0

    @property
    def name(self) -> str:
        """Such as `64 int8, rescored`."""
        return f"{self.dim} {self.code}" + (", rescored" if self.rescored else "")


def sizes(dims: Sequence[int]) -> list[Size]:
    """Every way to store vectors of the given lengths, largest first; float32 needs no second scoring."""
    ways = [(code, rescored) for code in get_args(Code) for rescored in (False, True)]
    found = [Size(dim, *way) for dim in dims for way in ways if way != ("float32", True)]
    return sorted(found, key=lambda size: (-size.memory, -size.disk, -size.dim))


def halvings(dim: int, smallest: int = 32) -> list[int]:
    """D, D/2, D/4, … down to `smallest`; at least D."""
    found = [dim]
    while found[-1] // 2 >= smallest:
        found.append(found[-1] // 2)
    return found


def first_components(vectors: Vectors, dim: int) -> npt.NDArray[np.float32]:
    """The first d components of vectors (N, D), scaled to length one; zero stays zero."""
    return unit_rows(vectors[:, :dim])


def compressed_run(
    query_ids: Sequence[str],
    queries: Vectors,
    document_ids: Sequence[str],
    documents: Vectors,
    size: Size,
    *,
    depth: int = 100,
    keep_self_matches: bool = False,
    device: str | torch.device = "cpu",
) -> dict[str, dict[str, float]]:
    """The best documents of each query, found among compressed documents.

    int8 is FAISS's `ScalarQuantizer` (QT_8bit, ranges per component over all documents) against queries in float32;
    binary is the Hamming distance of signs (`IndexBinaryFlat`), scored as minus the share of differing bits. Rescoring
    takes the best 4·depth by the codes and orders them by the inner product of queries and documents in float32.

    Args:
        query_ids: (Q,) ids.
        queries: (Q, D) unit embeddings.
        document_ids: (N,) ids.
        documents: (N, D) unit embeddings; may be memory-mapped.
        size: storage of the documents; queries lose the same components.
        depth: how many documents to keep for each query.
        keep_self_matches: keep a document whose id is the query's; otherwise one more takes its place.
        device: where to search in float32, as in `exact_search`.

    Returns:
        Score of each retrieved document by query id.
    """
    short = first_components(np.asarray(queries), size.dim)
    prefixes = _Prefixes(documents, size.dim)
    # One more than the depth takes the place of a self-match.
    candidates = depth + 1
    if size.rescored:
        candidates *= RESCORED
    candidates = min(candidates, len(prefixes))
    if size.code == "float32":
        scores, columns = exact_search(short, prefixes.all(), candidates, document_ids=document_ids, device=device)
    else:
        search = _search_bytes if size.code == "int8" else _search_bits
        scores, columns = search(short, prefixes, candidates)
    if size.rescored:
        for row, found in enumerate(columns):
            scores[row] = prefixes.rows(found) @ short[row]
    return first_documents(as_run(query_ids, document_ids, scores, columns), depth, keep_self_matches=keep_self_matches)


class _Prefixes:
    """The first components of documents (N, D), a block at a time."""

    def __init__(self, documents: Vectors, dim: int) -> None:
        self.documents = documents
        self.dim = dim

    def __len__(self) -> int:
        return len(self.documents)

    def rows(self, rows: npt.NDArray[np.int64] | slice) -> npt.NDArray[np.float32]:
        return first_components(np.asarray(self.documents[rows]), self.dim)

    def blocks(self) -> list[slice]:
        return [slice(start, start + DOCUMENT_BLOCK) for start in range(0, len(self), DOCUMENT_BLOCK)]

    def all(self) -> npt.NDArray[np.float32]:
        return np.concatenate([self.rows(block) for block in self.blocks()])


def _search_bytes(queries: npt.NDArray[np.float32], documents: _Prefixes, k: int) -> Found:
    index = faiss.IndexScalarQuantizer(documents.dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
    # The ranges of QT_8bit are minima and maxima over all documents.
    index.train(documents.all())
    for block in documents.blocks():
        index.add(documents.rows(block))
    found: Found = index.search(queries, k)
    return found


def _search_bits(queries: npt.NDArray[np.float32], documents: _Prefixes, k: int) -> Found:
    # Packed bits fill whole bytes; the padding is equal in all vectors.
    index = faiss.IndexBinaryFlat(8 * -(-documents.dim // 8))
    for block in documents.blocks():
        index.add(np.packbits(documents.rows(block) > 0, axis=1))
    distances, columns = index.search(np.packbits(queries > 0, axis=1), k)
    return np.asarray(-distances / documents.dim, np.float32), columns


def size_rows(results: dict[Size, dict[str, float]], metrics: Sequence[str]) -> list[dict[str, object]]:
    """A table row for each size: bytes and metrics, relative to the first row.

    Args:
        results: means by metric of each size.
        metrics: columns of the table; the first also as a share of the first row's.
    """
    whole = next(iter(results.values()))[metrics[0]]
    return [
        {
            "vectors": size.name,
            "bytes": size.memory,
            "on disk": size.disk,
            **{name: means[name] for name in metrics},
            f"{metrics[0]} kept": None if whole == 0 else means[metrics[0]] / whole,
        }
        for size, means in results.items()
    ]
