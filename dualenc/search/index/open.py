"""FAISS index with item ids: build, save, open, search."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import faiss
import numpy as np
import pyarrow as pa

from dualenc.data.store.items import (
    ITEMS,
    ORDER,
    Ids,
    ItemTable,
    check_ids,
    in_utf8,
    rows_of,
    text_hash,
    write_items,
)
from dualenc.data.store.metadata import plain_columns
from dualenc.data.store.vector_shards import Embeddings, read_head
from dualenc.errors import DualencError, explain
from dualenc.io.checksums import recorded, verify_files
from dualenc.io.files import (
    atomic_folder,
    check_folder_target,
    consistent_read,
    explain_full_disk,
    is_folder_of,
    locked,
    recover,
    remove,
    write_json,
)
from dualenc.io.targets import check_outside
from dualenc.search.index.build import (
    METRICS,
    Database,
    as_queries,
    build_faiss,
    exact_probe,
    latency,
    new_index,
    parameter_values,
    recall,
    set_parameter,
    tune,
)
from dualenc.search.index.decoded import decode, restore_quantizer
from dualenc.search.index.filtered import default_exact_rows, search_among
from dualenc.search.index.kinds import choose_factory, machine_memory
from dualenc.search.index.refined import (
    REFINE,
    bytes_per_vector,
    can_be_file,
    check_refinement,
    link,
    open_index,
    split,
)
from dualenc.search.migration.migration_folder import check_unmigrated
from dualenc.search.where import column_kinds
from dualenc.types import Metric

if TYPE_CHECKING:
    from dualenc.data import Corpus

FORMAT = "dualenc index"
FORMAT_VERSION = 4
MODEL_META = ("model", "model_checksum", "side", "modality", "output", "kind")
EMBEDDINGS_META = (*MODEL_META, "data", "read", "skipped")
"""Entries of the embeddings' meta.json that the index keeps: model, side, data and how it was
read."""
REBUILD = "build the index again"
DISTANCE_FACTOR = 4
"""Candidates for each result of an index that FAISS searches by distance: the inner product sorts
them again."""
MIN_QUERIES_TO_SPLIT = 100
"""From this many queries on half of them are for tuning, and the other half for measuring."""


class Hit(NamedTuple):
    """A search result: `snippet` is the text to show, or ""; missing values of columns are left
    out."""

    id: str
    score: float
    snippet: str
    columns: dict[str, Any]


def as_hit(id: str, score: float, text: str | None, columns: dict[str, Any]) -> Hit:
    """A hit of a stored item, whose columns may have missing values."""
    return Hit(
        id, score, text or "", {name: value for name, value in columns.items() if value is not None}
    )


class Index:
    """FAISS index with the ids of its N rows; create one with `Index.build` or `Index.open`.

    Args:
        faiss_index: its row `i` is `ids[i]`.
        ids: (N,) strings.
        meta: entries of meta.json: `metric`, `factory`, `recall_at_10`, `model`, …
        snippets: (N,) texts to show with the ids, if any.
        columns: (N,) rows of the columns that searches can be filtered by, if any.
        refine_file: the file of the codes that refine it, if they are in one of their own.
        hashes: (N,) uint64 of the whole texts (`dualenc.data.store.items.text_hash`), if any; 0 if
            unknown.
    """

    def __init__(
        self,
        faiss_index: Any,
        ids: Sequence[str],
        meta: dict[str, Any],
        snippets: Sequence[str] | None = None,
        columns: pa.Table | None = None,
        refine_file: Path | None = None,
        hashes: np.ndarray | None = None,
    ) -> None:
        self.faiss = faiss_index
        self.ids: Sequence[str] = ids if isinstance(ids, Ids) else list(ids)
        self.meta = dict(meta)
        self.snippets = snippets
        self.has_snippets = snippets is not None
        self.columns = columns
        self.column_kinds = column_kinds(columns)
        self.refine_file = refine_file
        self.hashes = hashes

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dim(self) -> int:
        """D, the size of the vectors."""
        return int(self.faiss.d)

    @classmethod
    def build(
        cls,
        vectors: Embeddings | np.ndarray,
        ids: Sequence[str] | None = None,
        factory: str = "auto",
        *,
        metric: Metric = "cosine",
        queries: np.ndarray | None = None,
        recall_queries: int = 500,
        target_recall: float = 0.95,
        memory: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        progress: bool = False,
    ) -> Index:
        """Train, fill, tune and measure an index; the database is streamed, and never copied as a
        whole.

        With a `folder`, the codes that refine an index that exceeds half of the memory are a file
        of their own (`dualenc.search.index.refined`).

        Args:
            vectors: (N, D) array, or embeddings, whose ids, snippets, columns and meta the index
                keeps.
            ids: (N,) strings for an array; by default the row numbers.
            factory: "auto" (see `choose_factory`) or any FAISS factory string.
            metric: "cosine" (vectors are normalized) or "ip", the inner product.
            queries: (Q, D) to measure recall@10 with; by default a sample of the database.
            recall_queries: maximum number of queries to measure with; 0 skips tuning and measuring.
            target_recall: recall@10 to reach, by the choice of "auto" and by `tune`.
            memory: bytes for building and searching the index; by default the machine's memory.
            folder: where to save the index, too.
            progress: show a bar.
        """
        embeddings = _checked_embeddings(vectors, ids)
        database = Database(embeddings, metric)
        chosen, is_apart = _fitting(
            database, factory, memory, target_recall, is_saved=folder is not None
        )
        with ExitStack() as stack:
            refine_file = None
            if folder is not None:
                check_target(folder)
                stack.enter_context(locked(folder, wait=False))
            if folder is not None and is_apart:
                refine_file = stack.enter_context(_building(Path(os.path.abspath(folder)))) / REFINE
            filled, built = build_faiss(
                database, chosen, memory=memory, refine_file=refine_file, progress=progress
            )
            meta = {key: embeddings.meta[key] for key in EMBEDDINGS_META if key in embeddings.meta}
            meta |= {"dim": embeddings.dim, "count": len(embeddings), "metric": metric}
            meta |= {"factory": chosen, "requested_factory": factory, **built}
            meta["bytes_per_vector"] = bytes_per_vector(filled)
            meta |= _tune_and_measure(filled, database, queries, recall_queries, target_recall)
            columns = None if embeddings.columns is None else plain_columns(embeddings.columns)
            about = (embeddings.snippets, columns, refine_file, embeddings.hashes)
            index = cls(filled, embeddings.ids, meta, *about)
            if folder is not None:
                index.save(folder)
        return cls.open(folder) if folder is not None and is_apart else index

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save to a folder: `index.faiss`, `items.arrow` with ids, snippets and columns,
        `order.npy`, `meta.json`."""
        check_outside(folder)
        with atomic_folder(folder, is_index, "index") as part:
            check_unmigrated(folder)
            part.mkdir(parents=True)
            contents = (self.ids, self.snippets, self.columns, self.meta)
            write_contents(part, Path(folder), self.faiss, *contents, self.refine_file, self.hashes)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], verify: bool = False) -> Index:
        """Open an index folder, memory-mapped; with `verify` every file is read and compared with
        its SHA-256."""
        folder = Path(folder)
        return consistent_read(folder, lambda: cls._open(folder, verify))

    @classmethod
    def _open(cls, folder: Path, verify: bool) -> Index:
        recover(folder)
        if not folder.is_dir():
            raise DualencError(
                "no such folder",
                fix=f"make an index with `dualenc index MODEL DATA --out {folder}`",
                where=folder,
            )
        path = folder / "meta.json"
        other = "not an index; make one with `dualenc index MODEL DATA --out FOLDER`"
        kinds = {"dim": int, "count": int, "metric": str, "files": dict, "search_parameters": dict}
        meta = read_head(folder, FORMAT, FORMAT_VERSION, other, kinds)
        check_recorded(path, meta, REBUILD)
        refine_file = folder / REFINE if (folder / REFINE).exists() else None
        names = ["index.faiss", ITEMS, ORDER, *([] if refine_file is None else [REFINE])]
        verify_files(folder, names, meta, REBUILD, verify)
        with explain(f"{folder / 'index.faiss'}: corrupt", REBUILD):
            index = _open_faiss(folder, refine_file)
        for name, found in (("dim", index.d), ("count", index.ntotal)):
            if meta[name] != found:
                raise DualencError(
                    f"{name} is {meta[name]}, but index.faiss has {found}", fix=REBUILD, where=path
                )
        if refine_file is not None and "k_factor_rf" in meta["search_parameters"]:
            set_parameter(index, "k_factor_rf", meta["search_parameters"]["k_factor_rf"])
        items = ItemTable([folder / ITEMS], index.ntotal, REBUILD)
        return cls(index, items.ids, meta, items.texts, items.columns, refine_file, items.hashes)

    @property
    def items_checksum(self) -> str:
        """Checksum of the file of ids, which identifies the items of an opened index."""
        return str(self.meta["files"].get(ITEMS))

    def search(self, queries: np.ndarray, k: int = 10, **options: Any) -> list[list[Hit]]:
        """The nearest items (Q, ≤ k) of queries (Q, D), best first; the options are those of
        `search_rows`."""
        scores, rows = self.search_rows(queries, k, **options)
        results = []
        for own_scores, own_rows in zip(scores.tolist(), rows.tolist()):
            results.append(
                [self.hit(row, score) for row, score in zip(own_rows, own_scores) if row >= 0]
            )
        return results

    def hit(self, row: int, score: float) -> Hit:
        """The hit of a row, with its text and columns."""
        columns = {} if self.columns is None else self.columns.slice(row, 1).to_pylist()[0]
        return as_hit(
            self.ids[row], score, None if self.snippets is None else self.snippets[row], columns
        )

    def search_rows(
        self,
        queries: np.ndarray,
        k: int = 10,
        *,
        allowed_rows: np.ndarray | None = None,
        nprobe: int | None = None,
        ef_search: int | None = None,
        exact_rows: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores and row numbers (Q, k) of the nearest items of queries (Q, D); -1 where fewer than
        k are found.

        `allowed_rows` (N,) bool restricts the search, and up to `exact_rows` of them are all
        compared; by default as many as the meta says. `nprobe` (IVF) and `ef_search` (HNSW) hold
        from now on.
        """
        ready = as_queries(queries, self.dim, self.meta["metric"], k)
        if nprobe is not None:
            set_parameter(self.faiss, "nprobe", nprobe)
        if ef_search is not None:
            set_parameter(self.faiss, "efSearch", ef_search)
        if self.faiss.metric_type != faiss.METRIC_INNER_PRODUCT:
            found = min(DISTANCE_FACTOR * k, len(self))
            rows = self._search(ready, found, allowed_rows, exact_rows)[1]
            scores, rows = self._by_inner_product(ready, rows)
            padding = ((0, 0), (0, max(k - found, 0)))
            scores = np.pad(scores[:, :k], padding, constant_values=-np.inf)
            return scores, np.pad(rows[:, :k], padding, constant_values=-1)
        return self._search(ready, k, allowed_rows, exact_rows)

    def _search(
        self, queries: np.ndarray, k: int, allowed_rows: np.ndarray | None, exact_rows: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        if allowed_rows is None:
            return self.faiss.search(queries, k)
        if exact_rows is None:
            exact_rows = self.meta.get("settings", {}).get(
                "exact_rows", default_exact_rows(self.dim)
            )
        return search_among(self.faiss, queries, k, allowed_rows, exact_rows)

    def _by_inner_product(
        self, queries: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Score and sort rows (Q, k), found by distance, by the inner product with their decoded
        vectors."""
        vectors = self.reconstruct(np.maximum(rows, 0).ravel()).reshape(*rows.shape, -1)
        scores = np.where(rows < 0, -np.inf, np.einsum("qd,qkd->qk", queries, vectors)).astype(
            np.float32
        )
        order = np.argsort(-scores, axis=1, kind="stable")
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

    def reconstruct(self, rows: np.ndarray) -> np.ndarray:
        """The vectors (n, D) float32 of rows (n,), of a refined index as its second stage has
        them."""
        base, refine = split(self.faiss)
        kind = self.meta.get("factory", "?")
        with explain(
            f"an index of kind {kind} gives no vectors back",
            "embed the documents, and name that folder",
        ):
            return decode(base if refine is None else refine, rows)


def _fitting(
    database: Database, factory: str, memory: int | None, target_recall: float, *, is_saved: bool
) -> tuple[str, bool]:
    """The factory string, chosen for "auto", and whether the codes that refine are a file, to fit
    into memory."""
    num_vectors = len(database)
    dim = database.embeddings.dim
    budget = machine_memory() if memory is None else memory
    choices = [factory]
    if factory == "auto":
        # The first may exceed the machine's memory, where the user names none.
        choices = [
            choose_factory(num_vectors, dim, limit, target_recall) for limit in (memory, budget)
        ]
    for chosen in choices:
        empty = new_index(dim, chosen, database.metric, num_vectors)  # owns both parts
        base, refine = split(empty)
        needed = num_vectors * bytes_per_vector(empty)
        is_apart = is_saved and needed > budget // 2 and can_be_file(refine)
        if is_apart:
            needed = num_vectors * bytes_per_vector(base)
        if needed <= budget:
            break
    if memory is not None and needed > memory:
        raise DualencError(
            f"factory {chosen!r} takes {needed / 2**20:,.1f} MiB for {num_vectors:,} "
            f"vectors, and memory is {memory / 2**20:,.1f} MiB",
            fix="give more, or auto with a folder to save to",
        )
    return chosen, is_apart


def _checked_embeddings(vectors: Embeddings | np.ndarray, ids: Sequence[str] | None) -> Embeddings:
    if not isinstance(vectors, Embeddings):
        vectors = np.asarray(vectors)
        if vectors.ndim != 2 or not vectors.shape[1] or vectors.dtype.kind not in "fiu":
            raise DualencError(
                f"vectors are {vectors.dtype} of shape {vectors.shape}",
                fix="give numbers as a matrix (N, D)",
            )
        vectors = Embeddings(
            [str(row) for row in range(len(vectors))] if ids is None else ids, vectors
        )
    check_ids(vectors.ids)
    return vectors


@contextmanager
def _building(target: Path) -> Iterator[Path]:
    """A new folder `.NAME.building` beside an index, in this context; it replaces that of a killed
    build."""
    work = target.with_name(f".{target.name}.building")
    if os.path.lexists(work) and not (work.is_dir() and set(os.listdir(work)) <= {REFINE}):
        raise DualencError(
            "exists and was not left by the build of an index", fix="move it away", where=work
        )
    remove(work)
    work.mkdir()
    try:
        yield work
    finally:
        remove(work)


def _tune_and_measure(
    index: Any,
    database: Database,
    queries: np.ndarray | None,
    max_queries: int,
    target_recall: float,
) -> dict[str, Any]:
    """Tune the search parameters of a filled index, and measure it; entries for meta.json."""
    if queries is None:
        rows = database.sample(max_queries, seed=1)  # another seed than that of the training sample
        queries = database.rows(rows)
    else:
        queries = as_queries(queries, database.embeddings.dim, database.metric)[:max_queries]
        rows = np.full(len(queries), -1)
    probe = exact_probe(database, queries, rows)
    if probe is None:
        return {"search_parameters": {}}
    tuning_probe = probe
    # Recall on the queries that chose the parameters would be too high.
    if len(queries) >= MIN_QUERIES_TO_SPLIT and parameter_values(index):
        tuning_probe = probe.part(slice(0, None, 2))
        probe = probe.part(slice(1, None, 2))
    return {
        "target_recall": target_recall,
        "search_parameters": tune(index, database, tuning_probe, target_recall),
        "recall_at_10": round(recall(index, database, probe), 4),
        "recall_queries": len(probe.queries),
        "recall_queries_from": "database" if (rows >= 0).any() else "given",
        "latency_ms": latency(index, probe.queries),
    }


def is_index(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an index, according to its meta.json."""
    return is_folder_of(folder, FORMAT)


def check_target(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that is not new, empty or an index, and an index whose model is being
    changed."""
    check_outside(folder)
    check_folder_target(folder, is_index, "index", is_replaced=True)
    check_unmigrated(folder)


def check_recorded(path: Path, meta: Mapping[str, Any], remedy: str) -> None:
    """Refuse values that entries of a meta.json on model and embeddings cannot have."""
    allowed = {"metric": METRICS, "side": ("left", "right"), "output": ("embedding", "features")}
    for name, values in allowed.items():
        if name in meta and meta[name] not in values:
            raise DualencError(
                f"{name} is {str(meta[name])[:40]!r}, not {' or '.join(values)}",
                fix=remedy,
                where=path,
            )
    for name in ("model", "model_checksum"):
        if not isinstance(meta.get(name, ""), str):
            raise DualencError(
                f"{name} is {str(meta[name])[:40]}, not a text", fix=remedy, where=path
            )


def write_contents(
    part: Path,
    folder: Path,
    index: Any,
    ids: Iterable[str],
    snippets: Iterable[str] | None,
    columns: pa.Table | None,
    meta: dict[str, Any],
    refine_file: Path | None = None,
    hashes: np.ndarray | None = None,
) -> str:
    """Write the files of an index to `part`, whose final name will be `folder`; returns its
    `items_checksum`."""
    if refine_file is not None:
        link(refine_file, part / REFINE)
        index = split(index)[0]
    faiss.write_index(index, str(part / "index.faiss"))
    write_items(part, ids, snippets, columns, hashes)
    # FAISS only prints that the disk was full at the end of the file.
    with (
        explain_full_disk(folder),
        explain(f"{folder}: FAISS did not write it whole", "is the disk full?"),
    ):
        _open_faiss(part)
    entries = recorded(part, sorted(path.name for path in part.iterdir()))
    head = {**meta, "format": FORMAT, "version": FORMAT_VERSION, "faiss": faiss.__version__}
    write_json(part / "meta.json", {**head, **entries})
    return str(entries["files"][ITEMS])


def _open_faiss(folder: Path, refine_file: Path | None = None) -> Any:
    index = open_index(folder / "index.faiss", refine_file)
    check_refinement(index)
    restore_quantizer(index)
    base = split(index)[0]
    if isinstance(base, faiss.IndexPreTransform):
        chain: Any = base.chain
        for number in range(chain.size()):
            transform = faiss.downcast_VectorTransform(chain.at(number))
            # FAISS reads a whitening as orthonormal, and would reconstruct wrong vectors.
            if isinstance(transform, faiss.LinearTransform):
                transform.set_is_orthonormal()
    return index


def rows_in(corpus: Corpus, index: Index | Embeddings, folder: str | os.PathLike[str]) -> list[int]:
    """The corpus row of each item of an index or of embeddings, whose texts must be those embedded.

    Whole texts are compared by their hashes; in folders of earlier versions only their beginnings.
    """
    rows = rows_of(corpus.ids, index.ids).tolist()
    if -1 in rows:
        name = index.ids[rows.index(-1)]
        raise DualencError(
            f"the data has no text {name[:80]!r}", fix="name its data and columns", where=folder
        )
    snippets = index.snippets or itertools.repeat(None)
    hashes = itertools.repeat(0) if index.hashes is None else index.hashes.tolist()
    for row, snippet, expected in zip(rows, snippets, hashes):
        is_other_text = bool(expected) and text_hash(corpus.items[row]) != expected
        if is_other_text or (snippet is not None and snippet != in_utf8(corpus.text(row))):
            raise DualencError(
                f"the text of {corpus.ids[row][:80]!r} in the data is not what was embedded",
                fix="embed and index the data again",
                where=folder,
            )
    return rows
