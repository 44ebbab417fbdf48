"""Vector compression: retrieval with the first components only, in 8 bits or in one bit per number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import faiss
import numpy as np
import numpy.typing as npt
import torch

from dualenc.evaluation.metrics import Qrels
from dualenc.evaluation.probe import unit_rows
from dualenc.evaluation.retrieval import as_run, first_documents
from dualenc.search.exact import DOCUMENT_BLOCK, exact_search
from dualenc.types import Vectors

Code = Literal["float32", "int8", "binary"]

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
    qrels: Qrels | None = None,
    device: str | torch.device = "cpu",
) -> dict[str, dict[str, float]]:
    """The best documents of each query, found among compressed documents.

    int8 is FAISS's `ScalarQuantizer` (QT_8bit, ranges per component over all documents) against queries in float32;
    binary is the Hamming distance of signs (`IndexBinaryFlat`), scored as minus the share of differing bits. Rescoring
    takes the best 4·depth by the codes and orders them by the inner product of queries and documents in float32.

    Args:
        query_ids, queries: (Q,) ids and (Q, D) unit embeddings.
        document_ids, documents: (N,) ids and (N, D) unit embeddings; may be memory-mapped.
        size: storage of the documents; queries lose the same components.
        depth: how many documents to keep for each query.
        qrels: judgements; with them one more takes the place of an unjudged document whose id is the query's.
        device: where to search in float32, as in `exact_search`.

    Returns:
        Score of each retrieved document by query id.
    """
    short = first_components(np.asarray(queries), size.dim)
    # Of memory-mapped documents only the first components are in memory.
    blocks = [slice(start, start + DOCUMENT_BLOCK) for start in range(0, len(documents), DOCUMENT_BLOCK)]
    stored = np.concatenate([first_components(np.asarray(documents[block]), size.dim) for block in blocks])
    # One more than the depth takes the place of a self-match.
    candidates = (depth + 1) * (RESCORED if size.rescored else 1)
    candidates = min(candidates, len(stored))
    if size.code == "float32":
        scores, columns = exact_search(short, stored, candidates, document_ids=document_ids, device=device)
    elif size.code == "int8":
        index = faiss.IndexScalarQuantizer(size.dim, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT)
        index.train(stored)
        index.add(stored)
        scores, columns = index.search(short, candidates)
    else:
        # Packed bits fill whole bytes; the padding is equal in all vectors.
        signs: Any = faiss.IndexBinaryFlat(8 * -(-size.dim // 8))
        signs.add(np.packbits(stored > 0, axis=1))
        distances, columns = signs.search(np.packbits(short > 0, axis=1), candidates)
        scores = np.asarray(-distances / size.dim, np.float32)
    if size.rescored:
        for row, found in enumerate(columns):
            scores[row] = stored[found] @ short[row]
    run = as_run(query_ids, document_ids, scores, columns)
    return first_documents(run, depth, qrels)


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
