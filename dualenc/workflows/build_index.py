"""Build a FAISS index, or add the words and texts of its documents to one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

from dualenc import distributed
from dualenc.data import Corpus
from dualenc.data.store.vector_shards import Embeddings, is_embeddings
from dualenc.errors import DualencError
from dualenc.io.provenance import Provenance
from dualenc.search.index.build import check_factory
from dualenc.search.index.kinds import parse_bytes
from dualenc.search.index.open import Index, check_target, is_index, rows_in
from dualenc.search.texts import add_texts
from dualenc.search.vector_files import is_vector_file
from dualenc.types import Metric, Side, StrPath
from dualenc.workflows.embed_beside import ModelAndData, first_components, vectors_for
from dualenc.workflows.file_vectors import FileAndData, check_file, vectors_of
from dualenc.workflows.index_texts import open_texts
from dualenc.workflows.recorded_options import ReadOptions, to_record


@dataclass(frozen=True)
class IndexResult:
    """An index that was built, or that got texts.

    With several processes only the main one builds; on the others the numbers are 0.

        result = index("embeddings", out="index")
        print(result.provenance.recall_at_10)
        hits = result.open().search(queries, k=10)

    Attributes:
        folder: folder of the index.
        num_vectors: number of vectors N; 0 if only texts were added.
        dim: number of components D of a vector.
        provenance: record of the index: factory, recall_at_10, latency_ms (milliseconds), …
        num_bm25: number of texts that BM25 indexes now, if it was asked for.
        num_texts: number of whole texts that are kept now, if it was asked for.
    """

    folder: Path
    num_vectors: int = 0
    dim: int = 0
    provenance: Provenance = field(default_factory=Provenance)
    num_bm25: int = 0
    num_texts: int = 0

    def open(self) -> Index:
        """Open the index."""
        return Index.open(self.folder)


def index(
    source: str,
    data: str | None = None,
    *,
    out: StrPath | None = None,
    factory: str = "auto",
    metric: Metric | None = None,
    dim: int | None = None,
    memory: str | None = None,
    target_recall: float = 0.95,
    recall_queries: int = 500,
    queries: str | None = None,
    bm25: bool = False,
    texts: bool = False,
    ids: StrPath | None = None,
    model: str | None = None,
    side: Side | None = None,
    batch_size: int = 32,
    device: str | None = None,
    progress: bool = True,
    **reading: Unpack[ReadOptions],
) -> IndexResult:
    """Build a FAISS index from embeddings, a file of vectors, or a model and data; measure it.

        from dualenc import index

        result = index("runs/mine/model", "papers.csv", out="index", texts=True, bm25=True)
        print(result.num_vectors, result.provenance.recall_at_10)
        index("vectors.npy", "papers.csv", out="index", texts=True)

    Args:
        source: folder of embeddings, FAISS file, .npy matrix (N, D), or model folder or name;
            without `out` an index to which BM25 or texts are added.
        data: what to embed with a model, or the texts of a file's vectors, with their ids and
            columns; without `out` the source of the texts, by default the one that the index
            records.
        out: folder to write.
        factory: "auto" or a FAISS factory string such as "Flat", "HNSW32" or "OPQ32,IVF4096,PQ32".
        metric: "cosine", or "ip" for the inner product; None takes the one that a FAISS file is
            searched by, or the cosine.
        dim: number of components of the vectors to index; None takes all.
        memory: memory for building and searching, such as "2GiB"; None takes the machine's.
        target_recall: recall@10, from 0 to 1, that "auto" and the search parameters aim at.
        recall_queries: number of queries that recall@10 is measured with; 0 measures nothing.
        queries: folder of embeddings of real queries to measure with; None samples the database.
        bm25: index the words of the texts too.
        texts: keep the whole texts too.
        ids: ids of a file's vectors: a .txt file with an id per line, a .npy array, or a table;
            None takes those in a FAISS file, or those of `data`, or the row numbers.
        model: name of the model that made a file's vectors, to be recorded.
        side: "left" or "right" side of a model; None takes documents, or what the data holds.
        batch_size: number of items per forward pass.
        device: name of the device, such as "cpu" or "cuda:0"; None takes a GPU if there is one.
        progress: show progress bars.
        reading: how the data is read, see `dualenc.workflows.recorded_options.ReadOptions`.

    Returns:
        What was built, with its measurements.

    Raises:
        DualencError: an argument is not usable, the sources do not fit together, or another writer
            holds `out`.
    """
    if out is None:
        return _add_to_index(source, data, reading, bm25=bm25, texts=texts)
    is_file = is_vector_file(source)
    if not is_file and (ids is not None or model is not None):
        raise DualencError(
            f"{'--ids' if ids is not None else '--model'} is for the vectors of a file",
            fix="leave it out, or name a FAISS file or a .npy matrix",
            where=source,
        )
    if not is_file and data is None and (side is not None or (reading and not (bm25 or texts))):
        _check_not_ignored(side, reading)
    # Embedding may take hours: refuse first what the build would refuse.
    num_bytes = None if memory is None else parse_bytes(memory)
    check_factory(factory)
    check_target(out)
    if is_file:
        file = FileAndData(source, data, ids, model, metric, reading)
        check_file(file, side, has_texts=bm25 or texts)
    else:
        check_source(source, data)
    # Open the texts before the work: if they are missing, nothing should have been embedded.
    corpus = open_texts(source, data, reading) if bm25 or texts else None
    job = ModelAndData(source, data, side, reading, batch_size, dim, device)
    with vectors_of(out, file) if is_file else vectors_for(out, job, progress=progress) as found:
        # FAISS uses all cores of one process; the others are done.
        if not distributed.is_main():
            return IndexResult(Path(out))
        vectors = _open_vectors(found.folder, dim, corpus)
        measured_with = None
        if queries is not None:
            measured_with = first_components(Embeddings.open(queries), dim).vectors[:recall_queries]
        built = Index.build(
            vectors,
            None,
            factory,
            metric=metric or vectors.provenance.metric,
            memory=num_bytes,
            target_recall=target_recall,
            recall_queries=recall_queries,
            queries=measured_with,
            folder=out,
            progress=progress,
        )
        result = IndexResult(Path(out), len(built), built.dim, built.provenance)
        # Still under the lock of a build from data: no other process may change the index before
        # its texts are added.
        return result if corpus is None else _with_texts(result, corpus, bm25=bm25, texts=texts)


def check_source(source: str, data: str | None) -> None:
    """Raise before the work unless the source is a folder of embeddings, or comes with data."""
    if data is None and not is_embeddings(source):
        raise DualencError(
            "is not a folder of embeddings, a FAISS file or a .npy matrix",
            fix="if it is a model, name the data too: index MODEL DATA",
            where=source,
        )


def _add_to_index(
    folder: str, data: str | None, reading: ReadOptions, *, bm25: bool, texts: bool
) -> IndexResult:
    """Add BM25 or texts to an index that exists."""
    if not (bm25 or texts) or not is_index(folder):
        raise DualencError("dualenc index needs --out", fix="name the folder of the index")
    corpus = open_texts(folder, data, reading)
    return _with_texts(IndexResult(Path(folder)), corpus, bm25=bm25, texts=texts)


def _check_not_ignored(side: Side | None, reading: ReadOptions) -> None:
    """Raise if arguments are given that only matter when a model embeds data."""
    names = [*to_record(reading), *(["side"] if side is not None else [])]
    if names:
        raise DualencError(
            f"embeddings without data leave {', '.join(names)} unused", fix="leave them out"
        )


def _open_vectors(folder: Path, dim: int | None, corpus: Corpus | None) -> Embeddings:
    """Open the vectors to index; raise if a text of them is missing or has changed."""
    # Verify every file: a damaged vector would stay in the index unnoticed.
    vectors = first_components(Embeddings.open(folder, verify=True), dim)
    if corpus is not None:
        # The build takes longer than this check, and would have to be repeated.
        rows_in(corpus, vectors, folder)
    return vectors


def _with_texts(result: IndexResult, corpus: Corpus, *, bm25: bool, texts: bool) -> IndexResult:
    """Add BM25 or texts to an index, and return the result with their number."""
    count = add_texts(result.folder, corpus, bm25=bm25, whole=texts)
    return replace(result, num_bm25=count if bm25 else 0, num_texts=count if texts else 0)
