"""The record of the pairs that an adapted model was trained on, as trained_pairs.parquet."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dualenc.data.corpus import Corpus
from dualenc.data.pairs import PairDataset
from dualenc.data.store.identity import item_identity
from dualenc.data.store.items import rows_of
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError, explain
from dualenc.io.files import atomic_path
from dualenc.workflows.adaptation_log import log_rows

RECORD = "trained_pairs.parquet"
SCHEMA = pa.schema(
    [("query", pa.binary(16)), ("document", pa.string()), ("vector", pa.binary(16))],
)
"""A row for each pair: digests of the query's contents and of the document's vector, and the id."""
BLOCK = 1 << 12
"""Number of vectors that are in memory at once."""


class PairKey(NamedTuple):
    """A pair as it is known in every log: digest of the query's contents, id of the document."""

    query: bytes
    document: str


@dataclass(frozen=True, eq=False)
class TrainedPairs:
    """Pairs that a model was trained on, and the vectors that their documents had.

        record = TrainedPairs.of(learned.pairs, log.queries, documents)
        record.write(Path("runs/adapted/trained_pairs.parquet"))

    Attributes:
        vectors: digest of the document's vector, by pair.
    """

    vectors: Mapping[PairKey, bytes]

    @classmethod
    def of(cls, pairs: PairDataset, queries: Corpus, documents: Embeddings) -> TrainedPairs:
        """Return the record of pairs.

        Args:
            pairs: M pairs of `learn_log`.
            queries: queries of their log, as they are.
            documents: N documents of the index.
        """
        keys = _keys(pairs, _digests_of_queries(queries), documents)
        digests = _digests_of_vectors(documents, pairs.right_id)
        return cls(dict(zip(keys, digests, strict=True)))

    @classmethod
    def read(cls, path: Path) -> TrainedPairs:
        """Read a record.

        Raises:
            DualencError: the file is damaged.
        """
        with explain(f"{path}: is damaged", "adapt without --from"):
            table = pq.read_table(path, schema=SCHEMA).to_pydict()
        keys = map(PairKey, table["query"], table["document"])
        return cls(dict(zip(keys, table["vector"], strict=True)))

    def write(self, path: Path) -> None:
        """Write the record."""
        columns = zip(*((*key, vector) for key, vector in self.vectors.items()), strict=True)
        arrays = [list(column) for column in columns] or [[], [], []]
        table = pa.table(dict(zip(SCHEMA.names, arrays, strict=True)), schema=SCHEMA)
        with atomic_path(path) as part:
            pq.write_table(table, part)

    def __len__(self) -> int:
        return len(self.vectors)

    def document_ids(self) -> list[str]:
        """Return the distinct ids of documents."""
        return list(dict.fromkeys(key.document for key in self.vectors))

    def with_pairs_of(self, other: TrainedPairs) -> TrainedPairs:
        """Return the pairs of both."""
        return TrainedPairs({**self.vectors, **other.vectors})

    def check_documents(self, documents: Embeddings, source: str) -> None:
        """Raise unless the documents have the vectors that the model was trained on.

        Documents may have been added and removed since.

        Args:
            documents: N documents of the index.
            source: path of the index, for the error.

        Raises:
            DualencError: a document has another vector, or none of them is in the index.
        """
        recorded = {key.document: vector for key, vector in self.vectors.items()}
        rows = rows_of(documents.ids, list(recorded))
        found = rows >= 0
        digests = _digests_of_vectors(documents, rows[found])
        before = [vector for vector, is_here in zip(recorded.values(), found) if is_here]
        if before != digests or (recorded and not found.any()):
            raise DualencError(
                "holds other vectors than those that --from was trained on",
                fix="name a run of this index, or adapt without --from",
                where=source,
            )


@dataclass(frozen=True, eq=False)
class Seen:
    """What a model was trained on before, among the pairs of a log.

        seen = Seen(previous.record, log.queries, documents)
        folds = fold_clicks(learned.pairs, 0.2, 5, seed=0, seen=seen)

    Args:
        record: pairs that the model was trained on.
        queries: queries of the log, as they are.
        documents: N documents of the index.
    """

    record: TrainedPairs
    queries: Corpus
    documents: Embeddings

    @cached_property
    def _digests(self) -> Callable[[int], bytes]:
        return _digests_of_queries(self.queries)

    @cached_property
    def is_trained(self) -> np.ndarray:
        """(N,) True for documents that the model was trained on."""
        rows = rows_of(self.documents.ids, self.record.document_ids())
        mask = np.zeros(len(self.documents), dtype=bool)
        mask[rows[rows >= 0]] = True
        return mask

    def holds(self, pairs: PairDataset) -> np.ndarray:
        """Return (M,) True for pairs of `pairs_of` that the model was trained on."""
        keys = _keys(pairs, self._digests, self.documents)
        known = self.record.vectors
        return np.fromiter((key in known for key in keys), dtype=bool, count=len(keys))

    def may_be_new(self, pairs: PairDataset) -> np.ndarray:
        """Return (num_left,) True for queries none of whose documents the model was trained on."""
        return _without(pairs, self.is_trained[pairs.right_id])

    def may_be_known(self, pairs: PairDataset) -> np.ndarray:
        """Return (num_left,) True for queries none of whose pairs the model was trained on."""
        return _without(pairs, self.holds(pairs))


def _without(pairs: PairDataset, mask: np.ndarray) -> np.ndarray:
    """Return (num_left,) True for queries with pairs, none of which is in a mask (M,)."""
    count, marked = (np.bincount(pairs.left_id, each, pairs.num_left) for each in (None, mask))
    return (count > 0) & (marked == 0)


def _keys(
    pairs: PairDataset, digest_of: Callable[[int], bytes], documents: Embeddings
) -> list[PairKey]:
    """Return (M,) keys of pairs, given the digest of each row of the log's queries."""
    rows = log_rows(pairs)[pairs.left_id].tolist()
    return [
        PairKey(digest_of(row), documents.ids[document])
        for row, document in zip(rows, pairs.right_id.tolist(), strict=True)
    ]


def _digests_of_queries(queries: Corpus) -> Callable[[int], bytes]:
    """Return a function of the row of a query, which reads each once."""
    return cache(lambda row: _digest(item_identity(queries.items, row, read=True)))


def _digests_of_vectors(documents: Embeddings, rows: np.ndarray) -> list[bytes]:
    """Return (n,) digests of the vectors of some rows (n,), each read once."""
    used, place = np.unique(rows, return_inverse=True)
    digests: list[bytes] = []
    for start in range(0, len(used), BLOCK):
        vectors = np.asarray(documents.vectors[used[start : start + BLOCK]])
        digests += [_digest(vector.tobytes()) for vector in vectors]
    return [digests[number] for number in place.tolist()]


def _digest(contents: bytes) -> bytes:
    return hashlib.blake2b(contents, digest_size=16).digest()
