"""Index updates: append vectors to an index folder, or remove them by id; the folder is rewritten beside the old one.

Trained parts stay as they are: an index that has grown a lot, or whose data have changed, is better built again. Lists
on disk are copied by a merge; the codes of appended vectors are in memory. Whole texts follow the change, and BM25 is
built anew from them. Changes by several processes take turns.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa

from dualenc.data import Corpus
from dualenc.data.identity import sum_checksums
from dualenc.data.items import check_ids, rows_of
from dualenc.data.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.files import atomic_folder, locked
from dualenc.search.build import Database, reason
from dualenc.search.index import Index, is_index, rows_in, write_contents
from dualenc.search.kept import KeptTexts, has_texts, write_texts
from dualenc.search.lexical import Lexical, has_lexical
from dualenc.search.parts import LISTS, ROWS_AT_ONCE, lists_of, merge_lists, split, with_codes
from dualenc.search.where import column_kinds

MEASURED = ("target_recall", "recall_at_10", "recall_queries", "recall_queries_from", "latency_ms")


def append(folder: str | os.PathLike[str], embeddings: Embeddings, corpus: Corpus | None = None) -> Index:
    """Append vectors with new ids to an index.

    Args:
        folder: of the index, which is opened again and returned.
        embeddings: n vectors of the same dimension, made by the same model as those of the index.
        corpus: the texts that were embedded, for an index with BM25 or whole texts.

    Raises:
        DualencError: another dimension or model, an id that the index already has, a column of another type, no texts
            where they are needed, or texts that have changed since they were embedded.
    """
    with locked(folder):
        index = Index.open(folder)
        _check_addition(index, embeddings, folder)
        texts = _whole_texts(index, folder)
        if texts is not None:
            if corpus is None:
                raise DualencError(f"{folder}: keeps whole texts; name those that are appended, too")
            rows = rows_in(corpus, embeddings, folder)
            texts = itertools.chain(texts, (corpus[row] for row in rows))
        snippets: Iterator[str] | None = None
        if index.snippets is not None or embeddings.snippets is not None:
            snippets = itertools.chain(
                index.snippets or itertools.repeat("", len(index)),
                embeddings.snippets or itertools.repeat("", len(embeddings)),
            )
        columns = _joined(index, embeddings, folder)
        meta = _changed_meta(index, "appended", len(embeddings))
        texts_checksum = sum_checksums(source.meta.get("texts_checksum") for source in (index, embeddings))
        if texts_checksum is not None:
            meta["texts_checksum"] = texts_checksum
        with atomic_folder(folder, is_index, "index") as part:
            part.mkdir()
            try:
                changed = _appended(index, Database(embeddings, index.meta["metric"]), Path(folder), part)
            except (RuntimeError, MemoryError) as error:
                remedy = f"{reason(error)}; build the index again"
                raise DualencError(f"{folder}: FAISS cannot take the vectors: {remedy}") from None
            ids = [*index.ids, *embeddings.ids]
            checksum = write_contents(part, Path(folder), changed, ids, snippets, columns, meta)
            if texts is not None:
                _write_texts(part, folder, ids, texts, checksum)
        return Index.open(folder)


def remove(folder: str | os.PathLike[str], ids: Sequence[str]) -> Index:
    """Remove vectors from an index, with their ids, snippets and columns.

    Args:
        folder: of the index, which is opened again and returned.
        ids: to remove; duplicates are ignored.

    Raises:
        DualencError: an id that the index does not have, no vector would be left, FAISS cannot remove vectors from
            this type of index (HNSW), or BM25 without whole texts.
    """
    with locked(folder):
        index = Index.open(folder)
        rows = rows_of(index.ids, ids)
        if not len(rows) or (rows < 0).any():
            missing = f"has no item {ids[int(np.argmin(rows))]!r}" if len(rows) else "no ids were given"
            raise DualencError(f"{folder}: {missing}; give ids that it has")
        removed = np.unique(rows)
        if len(removed) == len(index):
            raise DualencError(f"{folder}: nothing would be left; remove the folder instead")
        kept = np.ones(len(index), bool)
        kept[removed] = False
        texts = _whole_texts(index, folder)
        with atomic_folder(folder, is_index, "index") as part:
            part.mkdir()
            changed = _without_rows(index, removed, Path(folder), part)
            names = list(itertools.compress(index.ids, kept))
            snippets = None if index.snippets is None else itertools.compress(index.snippets, kept)
            columns = None if index.columns is None else index.columns.filter(pa.array(kept))
            meta = _changed_meta(index, "removed", len(removed))
            checksum = write_contents(part, Path(folder), changed, names, snippets, columns, meta)
            if texts is not None:
                _write_texts(part, folder, names, itertools.compress(texts, kept), checksum)
        return Index.open(folder)


def _whole_texts(index: Index, folder: str | os.PathLike[str]) -> Iterable[str] | None:
    """The texts by which BM25 and the text store of an index follow a change; None if it has neither."""
    if has_texts(folder):
        return KeptTexts(folder, index.items_checksum).texts
    if has_lexical(folder):
        remedy = f"run dualenc index {folder} --texts first, or remove the folder bm25 in it"
        raise DualencError(f"{folder}: has BM25, but not the whole texts by which it follows a change; {remedy}")
    return None


def _write_texts(
    part: Path, folder: str | os.PathLike[str], ids: Sequence[str], texts: Iterable[str], checksum: str
) -> None:
    """Write the text store of a changed index to `part`, and BM25 if `folder` has it."""
    write_texts(part, ids, texts, checksum)
    if has_lexical(folder):
        Lexical.build(KeptTexts(part, checksum).texts).save(part, checksum)


def _check_addition(index: Index, embeddings: Embeddings, folder: str | os.PathLike[str]) -> None:
    """Check that embeddings are of the index's dimension and model, and have new ids."""
    pairs: list[tuple[str, Any, Any]] = [("dimension", index.dim, embeddings.dim)]
    pairs += [(key, index.meta.get(key), embeddings.meta.get(key)) for key in ("model_checksum", "side", "output")]
    for name, ours, theirs in pairs:
        if ours is not None and theirs is not None and ours != theirs:
            expected = str(ours)[:12]
            raise DualencError(
                f"{folder}: has vectors of {name} {expected}, not {str(theirs)[:12]}; embed the data with its model"
            )
    check_ids(embeddings.ids)
    present = np.flatnonzero(rows_of(index.ids, embeddings.ids) >= 0)
    if len(present):
        name = embeddings.ids[int(present[0])]
        raise DualencError(f"{folder}: has an item {name!r} already; remove it first, or leave it out")


def _appended(index: Index, database: Database, folder: Path, part: Path) -> Any:
    """The FAISS index with the vectors of a database added; lists on disk are merged in `part`."""
    if lists_of(index.faiss) is None:
        # In memory: a mapped index cannot grow.
        changed = faiss.read_index(str(folder / "index.faiss"))
        for block in database.blocks():
            changed.add(block)
        return changed
    base, refine = split(index.faiss)
    added = _empty(base)
    codes = [] if refine is None else [_codes(refine)]
    start = len(index)
    for block in database.blocks():
        added.add_with_ids(block, np.arange(start, start + len(block)))
        start += len(block)
        if refine is not None:
            codes.append(refine.sa_encode(block))
    merged = merge_lists(_empty(base), [base, added], part / LISTS)
    return merged if refine is None else with_codes(merged, index.faiss, codes, part / "refine.faiss")


def _without_rows(index: Index, removed: np.ndarray, folder: Path, part: Path) -> Any:
    """The FAISS index without some rows; lists on disk are copied to `part` first."""
    lists = lists_of(index.faiss)
    if lists is None:
        changed = faiss.read_index(str(folder / "index.faiss"))
        _remove_rows(changed, removed, folder)
        return changed
    base, refine = split(index.faiss)
    original = lists.filename
    shutil.copyfile(original, part / LISTS)
    lists.filename = str(part / LISTS)
    faiss.write_index(base, str(part / "base.faiss"))
    lists.filename = original
    # Opened for writing: rows are removed from the copy of the lists in place.
    changed = faiss.read_index(str(part / "base.faiss"))
    (part / "base.faiss").unlink()
    _remove_rows(changed, removed, folder)
    if refine is None:
        return changed
    codes = _codes(refine)
    kept = np.delete(np.arange(len(codes)), removed)
    blocks = (codes[kept[start : start + ROWS_AT_ONCE]] for start in range(0, len(kept), ROWS_AT_ONCE))
    return with_codes(changed, index.faiss, blocks, part / "refine.faiss")


def _joined(index: Index, embeddings: Embeddings, folder: str | os.PathLike[str]) -> pa.Table | None:
    """The columns of an index and of appended embeddings; those of only one of them are null in the other's rows."""
    if index.columns is None and embeddings.columns is None:
        return None
    ours = column_kinds(index.columns)
    for name, kind in column_kinds(embeddings.columns).items():
        if ours.get(name, kind) != kind:
            types = f"column {name!r} holds {ours[name]} values in the index and {kind} values in what is appended"
            raise DualencError(f"{folder}: {types}; embed the data with values alike")
    # A table without columns has no rows, so a side without any gets one of nulls.
    tables = [
        pa.table({"_": pa.nulls(len(source))}) if source.columns is None else source.columns
        for source in (index, embeddings)
    ]
    joined = pa.concat_tables(tables, promote_options="permissive")
    return joined.select([name for name in joined.column_names if name != "_"])


def _changed_meta(index: Index, change: str, count: int) -> dict[str, Any]:
    """The meta.json of a changed index: measurements of its build are no longer valid, and move to `when_built`."""
    outdated = (*MEASURED, "files", "sizes", "texts_checksum")
    meta = {key: value for key, value in index.meta.items() if key not in outdated}
    meta["count"] = len(index) + (count if change == "appended" else -count)
    meta[change] = meta.get(change, 0) + count
    measured = {key: index.meta[key] for key in MEASURED if key in index.meta}
    if measured:
        meta["when_built"] = measured
    return meta


def _empty(base: Any) -> Any:
    """A copy of a trained index without vectors, with lists in memory."""
    lists = lists_of(base)
    original = lists.filename
    empty = faiss.deserialize_index(faiss.serialize_index(base))
    lists.filename = original
    ivf: Any = faiss.extract_index_ivf(empty)
    empty_lists = faiss.ArrayInvertedLists(ivf.nlist, ivf.code_size)
    ivf.replace_invlists(empty_lists, True)
    empty_lists.this.disown()  # type: ignore[attr-defined]  # the index frees them
    empty.ntotal = ivf.ntotal = 0
    return empty


def _codes(refine: Any) -> np.ndarray:
    """(N, bytes) codes of an index of plain codes, as a view of the mapped file."""
    return faiss.rev_swig_ptr(refine.codes.data(), refine.codes.size()).reshape(refine.ntotal, -1)


def _remove_rows(index: Any, removed: np.ndarray, folder: Path) -> None:
    """Remove rows from an index, and close the gaps in the row numbers of its lists."""
    for part in split(index):
        if part is None:
            continue
        try:
            part.remove_ids(removed)
        except (RuntimeError, AttributeError) as error:
            why = f"FAISS cannot remove vectors from an {type(part).__name__} ({reason(error)})"
            raise DualencError(f"{folder}: {why}; build the index again without them") from None
        ivf: Any = faiss.try_extract_index_ivf(part)
        if ivf is None:
            continue
        # Flat storage renumbers its rows by itself; inverted lists keep the old numbers.
        lists = faiss.downcast_InvertedLists(ivf.invlists)
        for number in range(ivf.nlist):
            if size := lists.list_size(number):
                rows = faiss.rev_swig_ptr(lists.get_ids(number), size)
                rows -= np.searchsorted(removed, rows)
    index.ntotal = split(index)[0].ntotal
