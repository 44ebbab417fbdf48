"""Expose the vectors of an index, embeddings folder or collection as one memory-mapped matrix.

    documents.npy     the vectors (N, D) in half precision, in the order of the source
    documents.json    the fingerprint of that source

Only sources that cannot be memory-mapped directly need these files.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.data.bad_rows import BadRows
from dualenc.data.readers.beir import read_corpus
from dualenc.data.readers.detect import detect
from dualenc.data.readers.vectors import load_npy, refuse_vector_file
from dualenc.data.store.identity import digest_of
from dualenc.data.store.vector_shards import Embeddings, ShardedVectors, is_embeddings
from dualenc.errors import DualencError
from dualenc.io.checksums import checksums
from dualenc.io.files import atomic_path, write_json
from dualenc.io.provenance import SOURCE_ENTRIES, Provenance
from dualenc.io.reading import read_json_object
from dualenc.search.engines.engine import Engine
from dualenc.search.engines.factory import open_engine
from dualenc.search.engines.pushed_folder import is_pushed, refuse_url
from dualenc.search.index.build import subtracts_mean
from dualenc.search.index.database import STORED_TOLERANCE, Database, as_queries
from dualenc.search.index.open import Index, is_index

VECTORS = "documents.npy"
NOTE = "documents.json"
DESCRIPTION = (*SOURCE_ENTRIES, "metric", "dim")
"""Entries of an index or a collection that describe its documents."""
LENGTH_TOLERANCE = 0.01
"""Relative difference of lengths from which the inner product ranks differently than the cosine."""
SAMPLED_ROWS = 256
"""Rows in each of the 16 places whose lengths are sampled."""
CHECKED_ROWS = 64
CHECKED_RESULTS = 256
"""Number of rows whose vectors are used as queries to check an index, and of results to compare."""
MAX_RESIDUAL = 0.1
"""Largest residual of scores relative to their spread. The lookup tables of fast-scan codes cause
0.02, RaBitQ's estimates 0.2."""
SAME_SCORE = 1e-3
"""Relative difference of scores that is due to rounding."""


class ReadRows:
    """A lazy matrix (N, D) float32: rows are read or computed when they are indexed.

    It supports slices and arrays of row numbers.

        vectors = ReadRows(len(index), index.dim, index.reconstruct)
        vectors[:100]

    Args:
        count: N.
        dim: D.
        read: returns the vectors (n, D) of row numbers (n,).
    """

    dtype = np.dtype(np.float32)

    def __init__(self, count: int, dim: int, read: Callable[[np.ndarray], np.ndarray]) -> None:
        self.shape = (count, dim)
        self.read = read

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        return self.read(rows)


def open_documents(source: str | Path, work: str | Path | None = None) -> Embeddings:
    """Open the vectors (N, D) that a search compares queries with, without changing the source.

        documents = open_documents("index", "runs/adapted")
        documents.vectors[:100], documents.ids[:100], documents.provenance.model

    Vectors have length one, except for the decoded vectors of a compressed cosine index.

    Args:
        source: an index, an embeddings folder, a BEIR folder whose corpus is vectors, or a folder
            that `dualenc push` wrote.
        work: folder for a copy in half precision, if the vectors cannot be memory-mapped directly;
            a second call with the same source reuses it.

    Raises:
        DualencError: the source is corrupt or of another kind, its vectors cannot be decoded, or it
            compares vectors of different lengths by inner product.
    """
    refuse_url(source)
    if not isinstance(source, str | Path) or not str(source):
        raise DualencError(
            f"open_documents: source is {source!r}", fix="name an index or embeddings"
        )
    source = Path(source)
    refuse_vector_file(source)
    with ExitStack() as stack:
        # An engine stays open until its vectors are copied, hence the stack.
        documents, is_ready, engine = _open(source, stack)
        documents.record(dim=documents.dim)
        if documents.provenance.metric == "ip" and not is_ready:
            _check_lengths(documents, source)
        if isinstance(documents.vectors, ShardedVectors) and (is_ready or _are_unit(documents)):
            return documents
        if work is None:
            raise DualencError(
                "its vectors must be copied to be mapped",
                fix="name a folder for them",
                where=source,
            )
        path = Path(work) / VECTORS
        # One process copies; the others wait for it and map the copy.
        if distributed.is_main():
            if engine is None:
                checksum = _checksum_of_files(source, may_remember=True)
            else:
                # With the ids, which may change without a push.
                checksum = digest_of(engine.checksum(), documents.ids)
            _write_once(documents, path, checksum, scale=not is_ready)
    distributed.barrier()
    provenance = documents.provenance.updated(dtype="float16")
    if not is_ready:
        provenance = provenance.updated(normalized=True)
    stored = (provenance, documents.snippets, documents.columns)
    return Embeddings(documents.ids, load_npy(path), *stored)


def fingerprint(source: str | Path) -> str:
    """Return a checksum of a source: the SHA-256 of its files, or the fingerprint of a collection.

    All files are read, so that two calls show whether something has changed them in between.

    Args:
        source: as for `open_documents`.

    Raises:
        DualencError: the source is empty, or its engine holds other embeddings.
    """
    refuse_url(source)
    source = Path(source)
    refuse_vector_file(source)
    if is_pushed(source):
        # Opening compares the fingerprint in meta.json with the one in the collection.
        with closing(open_engine(source)) as engine:
            return engine.checksum()
    return _checksum_of_files(source, may_remember=False)


def _checksum_of_files(source: Path, may_remember: bool) -> str:
    # New queries or judgements beside a corpus do not change its vectors.
    pattern = "corpus*" if detect(source) == "beir" else "*"
    paths = [inner for path in source.glob(pattern) for inner in (path, *path.rglob("*"))]
    names = sorted({str(path.relative_to(source)) for path in paths if path.is_file()})
    if not names:
        raise DualencError(
            "no such folder, or an empty one", fix="name an index or embeddings", where=source
        )
    digest = hashlib.sha256()
    for name, checksum in checksums(source, names, may_remember=may_remember).items():
        # The length marks where a name ends: no two lists of files give the same text.
        digest.update(f"{len(name)} {name} {checksum}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _open(source: Path, stack: ExitStack) -> tuple[Embeddings, bool, Engine | None]:
    """Open the documents of a source; return whether their vectors are compared unscaled, too."""
    if is_pushed(source):
        engine = open_engine(source)
        stack.callback(engine.close)
        engine.hold_snapshot()
        # For the cosine an engine may store vectors of any length, but those of a model are unit.
        is_ready = engine.provenance.output == "embedding" and not engine.provenance.live
        return _engine_documents(engine), is_ready, engine
    if not source.is_dir() or is_index(source):
        opened = Index.open(source)
        about = opened.provenance
        is_ready = about.metric == "cosine" or about.output == "embedding"
        documents = _index_documents(opened, source)
        check_agreement(opened, documents.vectors, source)
        return documents, is_ready, None
    if is_embeddings(source):
        embeddings = Embeddings.open(source)
        embeddings.record(metric="cosine")
        return embeddings, embeddings.provenance.normalized, None
    if detect(source) != "beir":
        raise DualencError(
            "not an index, embeddings, a BEIR folder of vectors or a pushed collection",
            fix="make an index with `dualenc index MODEL DATA`",
            where=source,
        )
    if (source / "corpus").is_dir():
        return _open(source / "corpus", stack)
    return _table_documents(source), False, None


def _index_documents(index: Index, source: Path) -> Embeddings:
    """Return the items of an index with decoded vectors."""

    def read(rows: np.ndarray) -> np.ndarray:
        try:
            return index.reconstruct(rows)
        except DualencError as error:
            raise DualencError(str(error), where=source) from None

    vectors = ReadRows(len(index), index.dim, read)
    about = index.provenance.only(DESCRIPTION)
    return Embeddings(index.ids, vectors, about, index.snippets, index.columns)


def inner_products(vectors: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Return the inner products (n,) of vectors (n, D) with a query (D,)."""
    products: np.ndarray = vectors @ query
    return products


def check_agreement(
    index: Index,
    decoded: ReadRows,
    source: Path,
    similarity: Callable[[np.ndarray, np.ndarray], np.ndarray] = inner_products,
) -> None:
    """Raise if the decoded vectors do not reproduce the ranking of the index's own searches.

    For a sample of vectors as queries, scores of a search are compared with similarities of
    decoded vectors, up to a factor and a constant per query, which change no ranking.

    Args:
        index: the index.
        decoded: (N, D) its vectors.
        source: path of the index, for the error.
        similarity: similarity (n,) of vectors (n, D) and a query (D,) that searches compute.

    Raises:
        DualencError: the index searches other vectors than it gives back.
    """
    rows = np.unique(np.linspace(0, len(index) - 1, CHECKED_ROWS).astype(int))
    vectors = decoded[rows]
    is_finite = np.isfinite(vectors).all(axis=1)
    rows, vectors = rows[is_finite], vectors[is_finite]
    squares, residuals = 0.0, 0.0
    for row, query in zip(rows, as_queries(vectors, index.dim, index.provenance.metric)):
        scores, results = index.search_rows(query, min(CHECKED_RESULTS, len(index)))
        # Leave out the query's own row, whose score would dominate the spread.
        is_other = (results[0] >= 0) & (results[0] != row) & np.isfinite(scores[0])
        searched = scores[0][is_other].astype(np.float64)
        found = decoded[results[0][is_other]]
        products = similarity(found, query).astype(np.float64)
        rounding = SAME_SCORE * np.linalg.norm(query) * np.linalg.norm(found, axis=1)
        if not len(searched) or (np.abs(searched - products) <= rounding).all():
            continue
        searched -= searched.mean()
        products -= products.mean()
        # Least squares: searched ≈ factor · products. A negative factor would reverse the ranking.
        factor = float(searched @ products) / max(float(products @ products), 1e-30)
        squares += float(searched @ searched)
        residuals += float(np.square(searched - max(factor, 0.0) * products).sum())
    if residuals > MAX_RESIDUAL**2 * squares:
        kind = index.provenance.factory
        percent = 100 * math.sqrt(residuals / squares)
        rebuild = "build the index again, or " if subtracts_mean(index.faiss) else ""
        raise DualencError(
            f"an index of kind {kind} gives back other vectors than it searches "
            f"(scores differ by {percent:.0f}% of their spread)",
            fix=f"{rebuild}embed the documents, and name that folder",
            where=source,
        )


def _engine_documents(engine: Engine) -> Embeddings:
    """Return the items of an engine in the order of their ids."""
    # Sorted, because engines return rows in no particular order, and rows must stay the same.
    texts = dict(sorted(engine.texts_by_id().items()))
    ids = list(texts)
    # Clients change a live table, also between its opening and the snapshot.
    count = len(ids) if engine.provenance.live else len(engine)
    if len(ids) < count:
        raise DualencError(
            f"holds {len(ids)} of {count} vectors",
            fix="run the same `dualenc push` again",
            where=engine.location,
        )
    if len(ids) > count:
        raise DualencError(
            f"holds {len(ids)} vectors, and {count} were pushed",
            fix="run the same `dualenc push` with --replace to remove the others",
            where=engine.location,
        )
    snippets = list(texts.values()) if engine.has_snippets else None

    def read(rows: np.ndarray) -> np.ndarray:
        return engine.vectors_in_batches([ids[row] for row in rows])

    vectors = ReadRows(len(ids), engine.dim, read)
    return Embeddings(ids, vectors, engine.provenance.only(DESCRIPTION), snippets)


def _table_documents(source: Path) -> Embeddings:
    """Return the vectors of corpus.parquet in a BEIR folder."""
    bad_rows = BadRows(source)
    corpus = read_corpus(source, bad_rows=bad_rows)
    if corpus.modality != "vector":
        raise DualencError(
            "its corpus consists of texts",
            fix=f"index them with `dualenc index MODEL {source}`",
            where=source,
        )
    bad_rows.report()

    def read(rows: np.ndarray) -> np.ndarray:
        return np.stack([corpus.items[row] for row in rows])

    vectors = ReadRows(len(corpus), len(corpus.items[0]), read)
    about = Provenance.from_entries({"metric": "cosine", "modality": "vector"})
    return Embeddings(corpus.ids, vectors, about, None, corpus.columns)


def _check_lengths(documents: Embeddings, source: Path) -> None:
    """Raise unless a sample of the vectors has equal lengths, so that ip ranks like the cosine."""
    # Contiguous blocks from all over the file, since single rows would read a page each.
    starts = np.linspace(0, max(len(documents) - SAMPLED_ROWS, 0), 16).astype(int).tolist()
    blocks = [documents.vectors[start : start + SAMPLED_ROWS] for start in starts]
    lengths = np.linalg.norm(np.concatenate(blocks), axis=1)
    if lengths.max() > (1 + LENGTH_TOLERANCE) * lengths.min():
        raise DualencError(
            f"compares by inner product, and lengths are {lengths.min():.3g} to "
            f"{lengths.max():.3g}",
            fix="index the vectors with --metric cosine",
            where=source,
        )


def _are_unit(documents: Embeddings) -> bool:
    """Return True if all vectors have length one."""
    squares = (np.einsum("nd,nd->n", block, block) for block in documents.blocks())
    return all((np.abs(block - 1) <= STORED_TOLERANCE).all() for block in squares)


def _write_once(documents: Embeddings, path: Path, source: str, *, scale: bool) -> None:
    """Write the vectors as float16, scaled to length one if asked, unless this copy exists."""
    note = path.with_name(NOTE)
    noted = read_json_object(note) if note.is_file() else {}
    if path.is_file() and noted.get("source") == source:
        return
    if noted.keys() != {"source"} and any(os.path.lexists(each) for each in (note, path)):
        raise DualencError(
            f"holds a {path.name} that dualenc did not write",
            fix="name another folder",
            where=path.parent,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"descr": "<f2", "fortran_order": False, "shape": (len(documents), documents.dim)}
    blocks = Database(documents, "cosine" if scale else "ip").blocks()
    with (
        tqdm(
            total=len(documents), desc="documents", unit=" vectors", unit_scale=True, delay=2
        ) as bar,
        atomic_path(path) as part,
        open(part, "wb") as stream,
    ):
        np.lib.format.write_array_header_1_0(stream, header)
        for block in blocks:
            stream.write(block.astype(np.float16).tobytes())
            bar.update(len(block))
        # Write the note before the vectors are swapped in: after a kill it must mark them as ours,
        # but not as a copy of any source.
        write_json(note, {"source": None})
    write_json(note, {"source": source})
