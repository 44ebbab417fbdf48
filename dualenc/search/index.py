"""An index with ids: what is saved, opened and searched."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import faiss
import numpy as np
import pyarrow as pa

from dualenc.checksums import checksums, sizes, verify_files
from dualenc.data.embeddings import Embeddings, read_head
from dualenc.data.identity import texts_checksum
from dualenc.data.items import ITEMS, ORDER, Ids, ItemTable, check_ids, in_utf8, write_items
from dualenc.errors import DualencError, UnknownId, Unsupported
from dualenc.files import atomic_folder, check_folder_target, is_folder_of, locked, recover, write_json
from dualenc.reading import read_json_object
from dualenc.search.build import (
    METRICS,
    Database,
    as_queries,
    build_faiss,
    exact_probe,
    halves,
    latency,
    new_index,
    parameter_values,
    reason,
    recall,
    set_parameter,
    tune,
)
from dualenc.search.filtered import search_among
from dualenc.search.kinds import choose_factory
from dualenc.search.parts import (
    LISTS,
    built_in_parts,
    bytes_per_vector,
    can_be_merged,
    lists_of,
    open_alone,
    open_merged,
)
from dualenc.types import Metric

if TYPE_CHECKING:
    from dualenc.data import Corpus

FORMAT = "dualenc index"
FORMAT_VERSION = 4
"""Versions before 4 had ids and columns in files of text, JSON lines and Parquet."""
KEPT = ("model", "model_checksum", "side", "modality", "output", "kind", "data", "skipped", "texts_checksum")
"""What an index remembers of its embeddings: which model and side made them, and from what."""
WRITE_BYTES = 1 << 22
REBUILD = "build the index again"
OLDER = "embed the data and build the index again"
TUNED_FROM = 100
"""From so many queries on half of them choose the search parameters, and the other half measure the choice."""


class Index:
    """A FAISS index, the ids of its N rows, and what is known about both.

    Make one with `Index.build` or `Index.open`.

    Args:
        faiss_index: row `i` of it is `ids[i]`.
        ids: (N,) strings.
        meta: entries of meta.json: `metric`, `factory`, `recall_at_10`, `model`, …
        snippets: what to show with each id, if anything.
        columns: (N,) rows of what searches can be filtered by, if anything.
    """

    def __init__(
        self,
        faiss_index: Any,
        ids: Sequence[str],
        meta: dict[str, Any],
        snippets: Sequence[str] | None = None,
        columns: pa.Table | None = None,
    ) -> None:
        self.faiss = faiss_index
        self.ids: Sequence[str] = ids if isinstance(ids, Ids) else list(ids)
        self.meta = dict(meta)
        self.snippets = snippets
        self.columns = columns
        if not isinstance(self.ids, Ids):
            # One more entry, so that FAISS's row -1 ("nothing found") reads as no id.
            self._id_of_row = np.array([*self.ids, ""], dtype=object)

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
        nprobe: int | None = None,
        ef_search: int | None = None,
        train_rows: int | None = None,
        threads: int | None = None,
        seed: int = 0,
        memory: int | None = None,
        folder: str | os.PathLike[str] | None = None,
        progress: bool = False,
    ) -> Index:
        """Train, fill and measure an index; the database is streamed, never held twice.

        With a `folder`, an IVF index that half of the memory does not hold is filled in parts beside it and merged on
        disk (`dualenc.search.parts`). Several processes that make the same call share the parts.

        Args:
            vectors: (N, D) array, or embeddings, whose ids, snippets, columns and meta the index takes over.
            ids: (N,) strings for an array; by default the row numbers.
            factory: "auto" (see `choose_factory`) or any FAISS factory string.
            metric: "cosine" (vectors are normalised) or "ip", the inner product.
            queries: (Q, D) to measure recall@10 with; by default a sample of the database.
            recall_queries: how many queries to measure with at most; 0 measures nothing and tunes nothing. Where there
                is something to tune, half of a hundred queries or more are for that, and the others measure.
            target_recall: recall@10 that "auto" and, unless `nprobe` or `ef_search` is given, `tune` aim at.
            nprobe: lists that an IVF index visits.
            ef_search: candidates that an HNSW index keeps.
            train_rows: vectors to train on; by default 64 per inverted list, at least 65,536.
            threads: FAISS's threads from now on; by default as many as it finds.
            seed: of the samples for training and for queries.
            memory: bytes that the index may take, in the making and in searches; by default what the machine has.
            folder: where to save the index, too.
            progress: show a bar.

        Raises:
            DualencError: an unknown or unfitting factory string (with FAISS's reason), vectors that are not
                finite, or not of length one where their meta says so, ids that stand twice, no vectors at all, a
                number out of range, or a search parameter that the index does not have.
        """
        if isinstance(vectors, Embeddings):
            embeddings = vectors
        else:
            vectors = np.asarray(vectors)
            if vectors.ndim != 2 or not vectors.shape[1] or vectors.dtype.kind not in "fiu":
                found = f"{vectors.dtype} of shape {vectors.shape}"
                raise DualencError(f"vectors are {found}; give numbers as a matrix (N, D)")
            embeddings = Embeddings([str(row) for row in range(len(vectors))] if ids is None else ids, vectors)
        if not len(embeddings):
            raise DualencError("no vectors to index; give at least one")
        check_ids(embeddings.ids)
        _check_at_least(1, nprobe=nprobe, ef_search=ef_search, train_rows=train_rows, threads=threads)
        _check_at_least(0, recall_queries=recall_queries, seed=seed)
        if not 0 <= target_recall <= 1:
            raise DualencError(f"target_recall is {target_recall}; give a number from 0 to 1")
        if threads is not None:
            faiss.omp_set_num_threads(threads)
        database = Database(embeddings, metric)
        chosen = factory
        if factory == "auto":
            chosen = choose_factory(len(embeddings), embeddings.dim, memory, target_recall)
        built: dict[str, Any] = {"factory": chosen, "requested_factory": factory}
        measure = functools.partial(
            cls._measured,
            database,
            queries=queries,
            recall_queries=recall_queries,
            target_recall=target_recall,
            nprobe=nprobe,
            ef_search=ef_search,
            seed=seed,
        )
        empty = new_index(embeddings.dim, chosen, metric, len(embeddings))
        needed = len(embeddings) * bytes_per_vector(empty)
        budget = memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if folder is not None and needed > budget // 2 and can_be_merged(empty):
            target = Path(folder)
            check_target(target)
            work = target.with_name(f".{target.name}.building")
            how: dict[str, Any] = {"train_rows": train_rows, "seed": seed, "progress": progress}
            with built_in_parts(database, chosen, work, memory=budget, **how) as merged:
                if merged is not None:
                    measure(merged[0], built | merged[1]).save(target)
            return cls.open(target)
        if memory is not None and needed > memory:
            raise DualencError(
                f"factory {chosen!r} takes {needed / 2**20:,.1f} MiB for {len(embeddings):,} vectors, and memory is "
                f"{memory / 2**20:,.1f} MiB; give more, or auto or an IVF factory with a folder to save to"
            )
        index, filled = build_faiss(database, chosen, train_rows=train_rows, seed=seed, progress=progress)
        result = measure(index, built | filled)
        if folder is not None:
            result.save(folder)
        return result

    @classmethod
    def _measured(
        cls,
        database: Database,
        index: Any,
        built: dict[str, Any],
        *,
        queries: np.ndarray | None,
        recall_queries: int,
        target_recall: float,
        nprobe: int | None,
        ef_search: int | None,
        seed: int,
    ) -> Index:
        """A filled index with its search parameters, and what they give."""
        embeddings, metric = database.embeddings, database.metric
        parameters = {name: value for name, value in (("nprobe", nprobe), ("efSearch", ef_search)) if value}
        for name, value in parameters.items():
            set_parameter(index, name, value)
        meta = {key: embeddings.meta[key] for key in KEPT if key in embeddings.meta}
        meta |= {"dim": embeddings.dim, "count": len(embeddings), "metric": metric, **built}
        meta["bytes_per_vector"] = bytes_per_vector(index)

        if queries is None:  # vectors of the database, which are not to find themselves
            rows = database.sample(recall_queries, seed + 1)
            asked = database.rows(rows)
        else:
            asked = as_queries(queries, embeddings.dim, metric)[:recall_queries]
            rows = np.full(len(asked), -1)
        probe = exact_probe(database, asked, rows)
        if probe is not None:
            if not parameters and parameter_values(index):
                tuning, probe = halves(probe) if len(probe.queries) >= TUNED_FROM else (probe, probe)
                parameters = tune(index, database, tuning, target_recall)
            if nprobe is None and ef_search is None:
                meta["target_recall"] = target_recall
            meta["recall_at_10"] = round(recall(index, database, probe), 4)
            meta["recall_queries"] = len(probe.queries)
            meta["recall_queries_from"] = "database" if queries is None else "given"
            meta["latency_ms"] = latency(index, probe.queries)
        meta["search_parameters"] = parameters
        return cls(index, embeddings.ids, meta, embeddings.snippets, embeddings.columns)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the folder: `index.faiss`, `items.arrow` with ids, snippets and columns, `order.npy` and `meta.json`.

        Raises:
            DualencError: the folder holds something that is not an index.
        """
        with locked(folder), atomic_folder(folder, is_index, "index") as part:
            part.mkdir(parents=True)
            write_contents(part, Path(folder), self.faiss, self.ids, self.snippets, self.columns, self.meta)

    @classmethod
    def open(cls, folder: str | os.PathLike[str], verify: bool = False) -> Index:
        """Map an index folder into memory; pages of it are read as searches need them.

        Args:
            folder: as `save` or `dualenc index` wrote it.
            verify: read every file once and compare its SHA-256 with meta.json (about 1.5 GB a second on each core).
                Otherwise sizes are compared, and 64 MiB are read at most, the smallest files first.

        Raises:
            DualencError: no such folder, or a file in it that is missing, truncated or not the one that was written.
        """
        folder = Path(folder)
        recover(folder)
        if not folder.is_dir():
            raise DualencError(
                f"{folder}: no such folder; make an index with `dualenc index MODEL DATA --out {folder}`"
            )
        path = folder / "meta.json"
        other = "not an index; make one with `dualenc index MODEL DATA --out FOLDER`"
        read_head(folder, FORMAT, (FORMAT_VERSION, FORMAT_VERSION), other, OLDER)
        meta = read_json_object(path, {"dim": int, "count": int, "metric": str, "files": dict})
        check_kept(path, meta, REBUILD)

        path = folder / "index.faiss"
        on_disk = (folder / LISTS).exists()
        names = ["index.faiss", ITEMS, ORDER, *([LISTS] if on_disk else [])]
        verify_files(folder, names, meta, REBUILD, verify)
        try:
            index = open_merged(path) if on_disk else open_alone(path)
        except (RuntimeError, MemoryError) as error:
            raise DualencError(f"{path}: corrupt ({reason(error)}); {REBUILD}") from None
        for name, found in (("dim", index.d), ("count", index.ntotal)):
            if meta[name] != found:
                raise DualencError(f"{path}: has {name} {found}, but meta.json says {meta[name]}; {REBUILD}")
        items = ItemTable([folder / ITEMS], index.ntotal, REBUILD)
        return cls(index, items.ids, meta, items.texts, items.columns)

    @property
    def items_checksum(self) -> str:
        """Checksum of the file of ids, which identifies the items of an index that was opened."""
        return str(self.meta["files"].get(ITEMS))

    def search(
        self, queries: np.ndarray, k: int = 10, *, nprobe: int | None = None, ef_search: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The best ids for a batch of queries.

        Args:
            queries: (Q, D), or one query (D,).
            k: how many ids.
            nprobe: lists that an IVF index visits, from now on; by default what the build chose.
            ef_search: candidates that an HNSW index keeps, from now on; by default what the build chose.

        Returns:
            Scores (Q, k) float32, best first, and ids (Q, k) strings; where fewer than k are found, -inf and "".

        Raises:
            DualencError: another dimension than the index's, queries that are not finite, k below 1, or a search
                parameter that the index does not have.
        """
        scores, rows = self.search_rows(queries, k, nprobe=nprobe, ef_search=ef_search)
        scores[rows < 0] = -np.inf
        return scores, self.ids_at(rows)

    def ids_at(self, rows: np.ndarray) -> np.ndarray:
        """The ids of rows of any shape, as an array of texts; "" for -1: many at once take far less than one by one."""
        return self.ids.take(rows) if isinstance(self.ids, Ids) else self._id_of_row[rows]

    def search_rows(
        self,
        queries: np.ndarray,
        k: int = 10,
        *,
        kept: np.ndarray | None = None,
        nprobe: int | None = None,
        ef_search: int | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `search`, with row numbers (Q, k) int64 in place of ids; -1 where fewer than k are found.

        With `kept` (N,) bool, only those rows are searched (`dualenc.search.filtered`).
        """
        if k < 1:
            raise DualencError(f"k is {k}; ask for at least 1 result")
        _check_at_least(1, nprobe=nprobe, ef_search=ef_search)
        if nprobe is not None:
            set_parameter(self.faiss, "nprobe", nprobe)
        if ef_search is not None:
            set_parameter(self.faiss, "efSearch", ef_search)
        ready = as_queries(queries, self.dim, self.meta["metric"])
        return self.faiss.search(ready, k) if kept is None else search_among(self.faiss, ready, k, kept)

    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """The stored vectors of some ids, as exactly as the index keeps them: (n, D) float32.

        Raises:
            UnknownId: an id that is not there.
            Unsupported: FAISS cannot give the vectors of such an index back.
        """
        if isinstance(self.ids, Ids):
            rows = self.ids.rows(ids).tolist()
        else:
            row_of = {name: row for row, name in enumerate(self.ids)}
            rows = [row_of.get(name, -1) for name in ids]
        if -1 in rows:
            raise UnknownId(f"the index has no item {ids[rows.index(-1)][:200]!r}; give an id that it has returned")
        try:
            return np.stack([self.faiss.reconstruct(row) for row in rows])
        except RuntimeError:
            pass
        lists = faiss.try_extract_index_ivf(self.faiss)
        try:
            if lists is not None:  # told once where each row is, FAISS finds it in its list
                lists.make_direct_map(True)
            return np.stack([self.faiss.reconstruct(row) for row in rows])
        except RuntimeError as error:
            kind = self.meta.get("factory", "?")
            raise Unsupported(
                f"an index of kind {kind} gives no vectors back ({reason(error)}); search by text"
            ) from None

    def snippet(self, row: int) -> str:
        """What to show with the id of a row; "" if nothing was stored."""
        return "" if self.snippets is None else self.snippets[row]

    def columns_of(self, row: int) -> dict[str, Any]:
        """The values of a row's columns by their names, missing ones left out."""
        if self.columns is None:
            return {}
        return {name: value for name, value in self.columns.slice(row, 1).to_pylist()[0].items() if value is not None}


def is_index(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an index, told by its meta.json."""
    return is_folder_of(folder, FORMAT)


def check_target(folder: str | os.PathLike[str]) -> None:
    """Insist that a folder may be written: it is new, empty, or an index to replace.

    Raises:
        DualencError: it holds something else.
    """
    check_folder_target(folder, is_index, "index")


def check_kept(path: Path, meta: Mapping[str, Any], mend: str) -> None:
    """Insist that what a meta.json remembers of its embeddings is of the right kind.

    Args:
        path: of the file.
        meta: its entries.
        mend: what to do about it.

    Raises:
        DualencError: an entry that is none of its values, or no text.
    """
    allowed = {"metric": METRICS, "side": ("left", "right"), "output": ("embedding", "features")}
    for name, values in allowed.items():
        if name in meta and meta[name] not in values:
            raise DualencError(f"{path}: {name} is {str(meta[name])[:40]!r}, not {' or '.join(values)}; {mend}")
    for name in ("model", "model_checksum"):
        if not isinstance(meta.get(name, ""), str):
            raise DualencError(f"{path}: {name} is {str(meta[name])[:40]}, not a text; {mend}")


def write_contents(
    part: Path,
    folder: Path,
    index: Any,
    ids: Iterable[str],
    snippets: Iterable[str] | None,
    columns: pa.Table | None,
    meta: dict[str, Any],
) -> None:
    """Write the files of an index.

    Args:
        part: folder to write to; lists on disk may be there already.
        folder: what it will be renamed to, where plain FAISS will look for lists on disk.
        index: N vectors.
        ids: (N,) of them.
        snippets: (N,) what to show with each id, or None.
        columns: (N,) rows of what searches can be filtered by, or None.
        meta: entries of meta.json.
    """
    lists = lists_of(index)
    if lists is None:
        _write_faiss(index, part / "index.faiss")
    else:
        before = Path(lists.filename)
        if before != part.absolute() / LISTS:  # never changed in place, so one file will do for both folders
            _link_or_copy(before, part / LISTS)
        lists.filename = os.path.abspath(folder / LISTS)
        try:
            _write_faiss(index, part / "index.faiss")
        finally:
            lists.filename = str(before)
    write_items(part, ids, snippets, columns)
    files = checksums(part, sorted(path.name for path in part.iterdir()))
    head = {"format": FORMAT, "version": FORMAT_VERSION, **meta, "faiss": faiss.__version__}
    # A meta that was read from a folder says its version and files, too.
    head |= {"version": FORMAT_VERSION, "sizes": sizes(part, files), "files": files}
    write_json(part / "meta.json", head)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)


def _write_faiss(index: Any, path: Path) -> None:
    """`faiss.write_index`, except that a disk that is full at the end of the file is an error; FAISS only prints it."""
    failed: list[OSError] = []
    with open(path, "wb") as stream:

        def write(block: bytes) -> None:
            try:
                stream.write(block)
            except OSError as error:
                failed.append(error)
                raise

        try:
            faiss.write_index(index, faiss.PyCallbackIOWriter(write, WRITE_BYTES))  # type: ignore[attr-defined]
        except RuntimeError:
            if failed:
                raise failed[0] from None
            raise


def rows_in(corpus: Corpus, index: Index, folder: str | os.PathLike[str]) -> list[int]:
    """The row of a corpus that each item of an index was made of.

    Raises:
        DualencError: the corpus lacks one, or has another text under its id than was embedded.
    """
    row_of = {name: row for row, name in enumerate(corpus.ids)}
    rows = [row_of.get(name, -1) for name in index.ids]
    if -1 in rows:
        name = index.ids[rows.index(-1)]
        raise DualencError(f"{folder}: the data has no text {name[:80]!r}; name what the index was made of")
    # After `--remove` the beginnings of the texts are all that is recorded of them.
    for row, snippet in zip(rows, index.snippets or ()):
        if snippet != in_utf8(corpus.text(row)):
            _refuse_changed(folder, f"of {corpus.ids[row][:80]!r} ")
    check_unchanged(corpus, rows, index.meta, folder)
    return rows


def check_unchanged(
    corpus: Corpus, rows: Sequence[int], meta: Mapping[str, Any], folder: str | os.PathLike[str]
) -> None:
    """Insist that texts are those that a meta.json has the checksum of, if it has one."""
    recorded = meta.get("texts_checksum")
    if recorded is not None and recorded != texts_checksum((corpus.ids[row], corpus[row]) for row in rows):
        _refuse_changed(folder)


def _refuse_changed(folder: str | os.PathLike[str], which: str = "") -> NoReturn:
    raise DualencError(
        f"{folder}: the text {which}in the data is not what was embedded; embed and index the data again"
    )


def _check_at_least(least: int, **numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < least:
            raise DualencError(f"{name} is {number}; give at least {least}")
