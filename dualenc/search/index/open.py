"""Open, search and save an index: FAISS vectors with item ids, snippets and columns."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import faiss
import numpy as np
import pyarrow as pa

from dualenc.data.readers.vectors import refuse_vector_file
from dualenc.data.store.items import (
    ITEMS,
    ORDER,
    Ids,
    ItemTable,
    in_utf8,
    rows_of,
    text_hash,
    write_items,
)
from dualenc.data.store.metadata import plain_columns
from dualenc.data.store.vector_shards import Embeddings, is_embeddings
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
)
from dualenc.io.provenance import META, SOURCE_ENTRIES, Provenance, Recorded
from dualenc.io.targets import check_outside
from dualenc.search.index.build import build_faiss, building_folder, fit_factory
from dualenc.search.index.database import Database, as_embeddings, as_queries
from dualenc.search.index.decoded import decode, restore_quantizer
from dualenc.search.index.filtered import default_exact_rows, search_among
from dualenc.search.index.refined import (
    REFINE,
    bytes_per_vector,
    check_refinement,
    link,
    open_index,
    split,
)
from dualenc.search.index.tune import set_parameter, tune_and_measure
from dualenc.search.migration.migration_folder import check_unmigrated
from dualenc.search.where import Condition, column_kinds, meets, parse_conditions
from dualenc.types import Metric

if TYPE_CHECKING:
    from dualenc.data import Corpus

FORMAT = "dualenc index"
FORMAT_VERSION = 4
REBUILD = "build the index again"
DISTANCE_FACTOR = 4
"""Candidates per result for indexes that FAISS searches by L2 distance, to be sorted by inner
product afterwards."""


class Hit(NamedTuple):
    """A search result: the id of an item, its score and what was stored with it.

    Results are sorted by descending score.

        for hit in Index.open("index").search(vectors)[0]:
            print(hit.id, hit.score, hit.snippet, hit.columns.get("year"))

    Attributes:
        id: the item.
        score: cosine similarity or inner product.
        snippet: text to show, or "".
        columns: values by column name; missing values are dropped.
    """

    id: str
    score: float
    snippet: str
    columns: dict[str, Any]


def as_hit(id: str, score: float, text: str | None, columns: dict[str, Any]) -> Hit:
    """Return the hit of a stored item, whose columns may have missing values."""
    present = {name: value for name, value in columns.items() if value is not None}
    return Hit(id, score, text or "", present)


class Index(Recorded):
    """FAISS index with the ids of its N rows; create one with `Index.build` or `Index.open`.

    Saved indexes are memory-mapped, so opening one takes little memory and time.

        index = Index.build(Embeddings.open("embeddings"), folder="index")
        hits = Index.open("index").search(vectors, k=5, where=["year>=2020"])

    Args:
        faiss_index: its row `i` is `ids[i]`.
        ids: (N,) strings.
        provenance: the model and data of the vectors, and how the index was built and measured.
        snippets: (N,) texts to show with the ids, or None.
        columns: N rows of the columns that searches can be filtered by, or None.
        refine_file: file of the refinement codes, if they are separate.
        hashes: (N,) uint64 hashes of the whole texts (`dualenc.data.store.items.text_hash`), or
            None; 0 where unknown.
    """

    def __init__(
        self,
        faiss_index: Any,
        ids: Sequence[str],
        provenance: Provenance,
        snippets: Sequence[str] | None = None,
        columns: pa.Table | None = None,
        refine_file: Path | None = None,
        hashes: np.ndarray | None = None,
    ) -> None:
        self.faiss = faiss_index
        self.ids: Sequence[str] = ids if isinstance(ids, Ids) else list(ids)
        self.provenance = provenance
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
        """Train, fill, tune and measure an index. The database is streamed, never copied whole.

        With a `folder`, the refinement codes of an index that exceeds half of the memory become a
        separate file (`dualenc.search.index.refined`).

        Args:
            vectors: (N, D) array, or embeddings, whose ids, snippets, columns and metadata the
                index keeps.
            ids: (N,) strings for an array; by default the row numbers.
            factory: "auto" (see `choose_factory`) or any FAISS factory string.
            metric: "cosine" (vectors are normalized) or "ip", the inner product.
            queries: (Q, D) queries to measure recall@10 with; by default a sample of the database.
            recall_queries: maximum number of queries to measure with; 0 skips tuning and measuring.
            target_recall: recall@10 that "auto" and tuning aim for.
            memory: bytes for building and searching the index; by default the machine's memory.
            folder: folder to save the index to.
            progress: show a bar.

        Raises:
            DualencError: the vectors, ids, factory string or folder are invalid, or the index does
                not fit into `memory`.
        """
        embeddings = as_embeddings(vectors, ids)
        database = Database(embeddings, metric)
        is_saved = folder is not None
        chosen, is_apart = fit_factory(database, factory, memory, target_recall, is_saved=is_saved)
        with ExitStack() as stack:
            refine_file = None
            if folder is not None:
                check_target(folder)
                stack.enter_context(locked(folder, wait=False))
            if folder is not None and is_apart:
                work = stack.enter_context(building_folder(Path(os.path.abspath(folder))))
                refine_file = work / REFINE
            filled, built = build_faiss(
                database, chosen, memory=memory, refine_file=refine_file, progress=progress
            )
            provenance = embeddings.provenance.only(SOURCE_ENTRIES).updated(
                dim=embeddings.dim,
                count=len(embeddings),
                metric=metric,
                factory=chosen,
                requested_factory=factory,
                **built,
                bytes_per_vector=bytes_per_vector(filled),
                **tune_and_measure(filled, database, queries, recall_queries, target_recall),
            )
            columns = None if embeddings.columns is None else plain_columns(embeddings.columns)
            index = cls(
                filled,
                embeddings.ids,
                provenance,
                embeddings.snippets,
                columns,
                refine_file,
                embeddings.hashes,
            )
            if folder is not None:
                index.save(folder)
        # The temporary file of codes is gone now, so return the index that maps the saved one.
        return cls.open(folder) if folder is not None and is_apart else index

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save to a folder: `index.faiss`, `items.arrow`, `order.npy` and `meta.json`.

        `items.arrow` has the ids, snippets and columns; `order.npy` sorts the ids for lookups.

        Raises:
            DualencError: the folder holds anything but an index, or its model is being migrated.
        """
        check_outside(folder)
        with atomic_folder(folder, is_index, "index") as part:
            # Checked under the lock: a migration may begin while an index is being built.
            check_unmigrated(folder)
            part.mkdir(parents=True)
            contents = (self.ids, self.snippets, self.columns, self.provenance)
            write_contents(part, Path(folder), self.faiss, *contents, self.refine_file, self.hashes)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], verify: bool = False) -> Index:
        """Open an index folder, memory-mapped.

        Args:
            folder: the index.
            verify: read every file and compare it with its SHA-256.

        Raises:
            DualencError: the folder is not an index, or is corrupt.
        """
        folder = Path(folder)
        # Another process may replace the folder between two files: then read it again.
        return consistent_read(folder, lambda: cls._open(folder, verify))

    @classmethod
    def _open(cls, folder: Path, verify: bool) -> Index:
        recover(folder)
        refuse_vector_file(folder)
        if not folder.is_dir():
            raise DualencError(
                "no such folder",
                fix=f"make an index with `dualenc index MODEL DATA --out {folder}`",
                where=folder,
            )
        source = folder if is_embeddings(folder) else "MODEL DATA"
        other = f"not an index; make one with `dualenc index {source} --out INDEX`"
        required = ["dim", "count", "metric", "files", "search_parameters"]
        provenance = Provenance.from_folder(
            folder, FORMAT, FORMAT_VERSION, required, other, REBUILD
        )
        # `verify_files` compares these names with those that meta.json lists.
        refine_file = folder / REFINE if (folder / REFINE).exists() else None
        names = ["index.faiss", ITEMS, ORDER]
        if refine_file is not None:
            names.append(REFINE)
        verify_files(folder, names, provenance.sizes, provenance.files, REBUILD, verify)
        # FAISS's errors name lines of C++, and no way to repair the index.
        with explain(f"{folder / 'index.faiss'}: corrupt", REBUILD):
            index = open_faiss(folder / "index.faiss", refine_file)
        if difference := provenance.difference({"dim": index.d, "count": index.ntotal}):
            name, recorded_value, actual = difference
            raise DualencError(
                f"{name} is {recorded_value}, but index.faiss has {actual}",
                fix=REBUILD,
                where=folder / META,
            )
        # FAISS stores the other tuned parameters in index.faiss itself.
        factor = provenance.search_parameters.get("k_factor_rf")
        if refine_file is not None and factor is not None:
            set_parameter(index, "k_factor_rf", factor)
        items = ItemTable([folder / ITEMS], index.ntotal, REBUILD)
        stored = (items.texts, items.columns, refine_file, items.hashes)
        return cls(index, items.ids, provenance, *stored)

    def close(self) -> None:
        """Do nothing: the files are unmapped with the object. Engines close their connection."""

    @property
    def items_checksum(self) -> str:
        """Checksum of the items file, which identifies the items of an opened index."""
        return self.provenance.files[ITEMS]

    def search(
        self,
        queries: np.ndarray,
        k: int = 10,
        *,
        where: str | Sequence[str | Condition] = (),
        filter: str = "",
        exact: bool = False,
        allowed_rows: np.ndarray | None = None,
        **options: Any,
    ) -> list[list[Hit]]:
        """Return the nearest items (Q, ≤ k) of queries, best first, like `Engine.search`.

        Args:
            queries: (Q, D) vectors, or (D,) for a single query.
            k: number of results per query.
            where: conditions on columns such as "year>=2020", all of which must hold
                (`dualenc.search.where.parse_conditions`).
            filter: "": only engines have a filter language.
            exact: compare all rows that may be returned, instead of searching approximately.
            allowed_rows: (N,) bool, the rows that may be returned.
            options: `nprobe`, `ef_search` and `exact_rows` of `search_rows`.

        Raises:
            DualencError: an argument is invalid or does not apply to this kind of index.
        """
        if filter:
            self.check_filter(filter)
        conditions = parse_conditions(where, self.column_kinds)
        if conditions:
            are_met = self.rows_meeting(conditions)
            allowed_rows = are_met if allowed_rows is None else are_met & allowed_rows
        # FAISS compares all rows only when it is given a set of rows to compare.
        if exact:
            if allowed_rows is None:
                allowed_rows = np.ones(len(self), bool)
            options["exact_rows"] = len(self)
        scores, rows = self.search_rows(queries, k, allowed_rows=allowed_rows, **options)
        results = []
        for query_scores, query_rows in zip(scores.tolist(), rows.tolist()):
            pairs = zip(query_rows, query_scores)
            # -1 pads queries with fewer than k results.
            results.append([self.hit(row, score) for row, score in pairs if row >= 0])
        return results

    def check_filter(self, filter: str) -> None:
        """Raise a `DualencError`: only engines have a filter language."""
        raise DualencError("only an engine takes a filter", fix="give conditions (where)")

    def rows_meeting(self, conditions: Sequence[Condition]) -> np.ndarray | None:
        """Return the rows (N,) bool that meet all conditions; None without conditions."""
        if not conditions:
            return None
        return meets(conditions, self.columns)

    def workload_filter(self, text: str) -> dict[str, Any]:
        """Return the arguments of `search` for a filter of a workload, here conditions."""
        return {"where": [text] if text else []}

    def ladder(self) -> Iterator[dict[str, Any]]:
        """Yield search settings that compare more and more rows: values of `exact_rows`."""
        rows = default_exact_rows(self.dim)
        while rows < len(self):
            yield {"exact_rows": rows}
            rows *= 4
        yield {"exact_rows": rows}

    def sample_vectors(self, count: int) -> np.ndarray:
        """Return a random sample of the vectors (count, D); they repeat if there are fewer."""
        # A fixed seed, so that a repeated measurement uses the same queries.
        rows = np.random.default_rng(0).permutation(len(self))
        return self.reconstruct(np.resize(rows, count))

    def hit(self, row: int, score: float) -> Hit:
        """Return the hit of a row, with its text and columns."""
        columns = {} if self.columns is None else self.columns.slice(row, 1).to_pylist()[0]
        text = None if self.snippets is None else self.snippets[row]
        return as_hit(self.ids[row], score, text, columns)

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
        """Return scores and row numbers (Q, k) of the nearest items; -1 pads missing results.

        Args:
            queries: (Q, D) vectors, or (D,) for a single query.
            k: number of results per query.
            allowed_rows: (N,) bool, the rows that may be returned.
            nprobe: inverted lists to visit, from now on (IVF).
            ef_search: candidates of the graph search, from now on (HNSW).
            exact_rows: up to this many allowed rows are all compared; by default the setting in the
                metadata.

        Raises:
            DualencError: an argument is invalid or does not apply to this kind of index.
        """
        prepared = as_queries(queries, self.dim, self.provenance.metric, k)
        if nprobe is not None:
            set_parameter(self.faiss, "nprobe", nprobe)
        if ef_search is not None:
            set_parameter(self.faiss, "efSearch", ef_search)
        if self.faiss.metric_type == faiss.METRIC_INNER_PRODUCT:
            return self._search(prepared, k, allowed_rows, exact_rows)
        # An index by L2 distance: rescore more candidates than needed by inner product.
        depth = min(DISTANCE_FACTOR * k, len(self))
        candidates = self._search(prepared, depth, allowed_rows, exact_rows)[1]
        scores, rows = self._by_inner_product(prepared, candidates)
        padding = ((0, 0), (0, max(k - depth, 0)))
        scores = np.pad(scores[:, :k], padding, constant_values=-np.inf)
        return scores, np.pad(rows[:, :k], padding, constant_values=-1)

    def _search(
        self, queries: np.ndarray, k: int, allowed_rows: np.ndarray | None, exact_rows: int | None
    ) -> tuple[np.ndarray, np.ndarray]:
        if allowed_rows is None:
            return self.faiss.search(queries, k)
        if exact_rows is None:
            default = default_exact_rows(self.dim)
            exact_rows = self.provenance.settings.get("exact_rows", default)
        return search_among(self.faiss, queries, k, allowed_rows, exact_rows)

    def _by_inner_product(
        self, queries: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rescore and sort candidate rows (Q, k) by the inner product with decoded vectors."""
        # Row -1 decodes as row 0 and is masked out below.
        vectors = self.reconstruct(np.maximum(rows, 0).ravel()).reshape(*rows.shape, -1)
        products = np.einsum("qd,qkd->qk", queries, vectors)
        scores = np.where(rows < 0, -np.inf, products).astype(np.float32)
        order = np.argsort(-scores, axis=1, kind="stable")
        return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)

    def reconstruct(self, rows: np.ndarray) -> np.ndarray:
        """Decode the vectors (n, D) float32 of rows (n,), from the finer codes if refined.

        Raises:
            DualencError: FAISS cannot decode this kind of index.
        """
        # The finer codes give back vectors closest to the original ones.
        base, refine = split(self.faiss)
        with explain(
            f"an index of kind {self.provenance.factory} gives no vectors back",
            "embed the documents, and name that folder",
        ):
            return decode(base if refine is None else refine, rows)


def is_index(folder: str | os.PathLike[str]) -> bool:
    """Return True if a folder holds an index, according to its meta.json."""
    return is_folder_of(folder, FORMAT)


def check_target(folder: str | os.PathLike[str]) -> None:
    """Raise unless an index may be written to the folder: new, empty, or an unmigrated index.

    Raises:
        DualencError: the folder holds something else, or its model is being migrated.
    """
    check_outside(folder)
    check_folder_target(folder, is_index, "index", is_replaced=True)
    check_unmigrated(folder)


def write_contents(
    part: Path,
    folder: Path,
    index: Any,
    ids: Iterable[str],
    snippets: Iterable[str] | None,
    columns: pa.Table | None,
    provenance: Provenance,
    refine_file: Path | None = None,
    hashes: np.ndarray | None = None,
) -> str:
    """Write the files of an index, and return its `items_checksum`.

    Args:
        part: existing folder to write to.
        folder: final name of that folder, for errors.
        index: filled FAISS index.
        ids: (N,) strings.
        snippets: (N,) texts to show, or None.
        columns: N rows of columns, or None.
        provenance: record of the index.
        refine_file: file of the refinement codes, if they are separate.
        hashes: (N,) uint64 hashes of the whole texts, or None.

    Raises:
        DualencError: the disk is full.
    """
    if refine_file is not None:
        # The codes are never loaded into memory: link their file, and write the base index alone.
        link(refine_file, part / REFINE)
        index = split(index)[0]
    faiss.write_index(index, str(part / "index.faiss"))
    write_items(part, ids, snippets, columns, hashes)
    # FAISS only prints a message if the disk is full at the end of the file, so read it back.
    with (
        explain_full_disk(folder),
        explain(f"{folder}: FAISS did not write it whole", "is the disk full?"),
    ):
        open_faiss(part / "index.faiss")
    # meta.json comes last, so that it has the checksums of all other files.
    sums = recorded(part, sorted(path.name for path in part.iterdir()))
    head = {"format": FORMAT, "version": FORMAT_VERSION, "faiss": faiss.__version__}
    provenance.updated(**head, **sums).write(part)
    return str(sums["files"][ITEMS])


def open_faiss(path: Path, refine_file: Path | None = None) -> Any:
    """Memory-map a FAISS file so that its vectors can be decoded.

    Args:
        path: the file.
        refine_file: file of the refinement codes, if they are separate.

    Raises:
        ValueError: the file contains no index.
        RuntimeError: FAISS cannot read it.
    """
    index = open_index(path, refine_file)
    check_refinement(index)
    restore_quantizer(index)
    base = split(index)[0]
    if isinstance(base, faiss.IndexPreTransform):
        chain: Any = base.chain
        for number in range(chain.size()):
            transform = faiss.downcast_VectorTransform(chain.at(number))
            # FAISS reads a whitening as orthonormal, and would then reconstruct wrong vectors.
            if isinstance(transform, faiss.LinearTransform):
                transform.set_is_orthonormal()
    return index


def rows_in(corpus: Corpus, index: Index | Embeddings, folder: str | os.PathLike[str]) -> list[int]:
    """Return the corpus row of each item, after checking that its text is the one embedded.

    Whole texts are compared by their hashes; folders of earlier versions record only how texts
    begin.

    Args:
        corpus: the data, in any order, possibly with more items.
        index: index or embeddings of N items.
        folder: where they are, for errors.

    Raises:
        DualencError: the corpus lacks an item, or has another text for it.
    """
    # The data may have grown or been sorted since, so match by id.
    rows = rows_of(corpus.ids, index.ids).tolist()
    if -1 in rows:
        name = index.ids[rows.index(-1)]
        raise DualencError(
            f"the data lacks the item {name[:80]!r}", fix="name its data and columns", where=folder
        )
    snippets = index.snippets or itertools.repeat(None)
    hashes = itertools.repeat(0) if index.hashes is None else index.hashes.tolist()
    for row, snippet, expected in zip(rows, snippets, hashes):
        is_other_text = bool(expected) and text_hash(corpus.items[row]) != expected
        is_other_snippet = snippet is not None and snippet != in_utf8(corpus.text(row))
        if is_other_text or is_other_snippet:
            raise DualencError(
                f"the text of {corpus.ids[row][:80]!r} in the data is not what was embedded",
                fix="embed and index the data again",
                where=folder,
            )
    return rows
