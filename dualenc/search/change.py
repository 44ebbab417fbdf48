"""Append vectors to an index folder, and remove them by id; the folder is written anew, beside the old one.

What is trained stays as it is: an index that has grown a lot, or whose data have changed, is better built again. Lists
on disk are copied by a merge; of what is added the codes are in memory. Changes by several processes take turns.
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

from dualenc.data.embeddings import Embeddings
from dualenc.data.identity import sum_checksums
from dualenc.data.items import Ids, check_ids
from dualenc.errors import DualencError
from dualenc.files import atomic_folder, locked
from dualenc.search.build import Database, reason
from dualenc.search.index import Index, is_index, write_contents
from dualenc.search.parts import LISTS, ROWS_AT_ONCE, lists_of, merge_lists, split, with_codes
from dualenc.search.where import column_kinds

MEASURED = ("target_recall", "recall_at_10", "recall_queries", "recall_queries_from", "latency_ms")


def append(folder: str | os.PathLike[str], embeddings: Embeddings) -> Index:
    """Add vectors with new ids to an index.

    Args:
        folder: of the index.
        embeddings: n vectors of the same dimension, made by the same model as those of the index.

    Returns:
        The index as it is now.

    Raises:
        DualencError: another dimension or model, an id that the index has already, or a column of other values.
    """
    with locked(folder):
        return _append(folder, embeddings)


def _append(folder: str | os.PathLike[str], embeddings: Embeddings) -> Index:
    index = Index.open(folder)
    for name, ours, theirs in (
        ("dimension", index.dim, embeddings.dim),
        *((key, index.meta.get(key), embeddings.meta.get(key)) for key in ("model_checksum", "side", "output")),
    ):
        if ours is not None and theirs is not None and ours != theirs:
            was, now = str(theirs)[:12], str(ours)[:12]
            raise DualencError(f"{folder}: has vectors of {name} {now}, not {was}; embed the data with its model")
    if not len(embeddings):
        raise DualencError("no vectors to append; give at least one")
    check_ids(embeddings.ids)
    present = np.flatnonzero(_mapped(index).rows(embeddings.ids) >= 0)
    if len(present):
        name = embeddings.ids[int(present[0])]
        raise DualencError(f"{folder}: has an item {name!r} already; remove it first, or leave it out")
    database, before = Database(embeddings, index.meta["metric"]), len(index)
    snippets: Iterator[str] | None = None
    if index.snippets is not None or embeddings.snippets is not None:
        old = itertools.repeat("", before) if index.snippets is None else index.snippets
        new = itertools.repeat("", len(embeddings)) if embeddings.snippets is None else embeddings.snippets
        snippets = itertools.chain(old, new)
    columns = _joined(index, embeddings, folder)
    with atomic_folder(folder, is_index, "index") as part:
        part.mkdir()
        if lists_of(index.faiss) is None:
            changed = faiss.read_index(str(Path(folder) / "index.faiss"))  # in memory: what is mapped cannot grow
            for block in _told(database.blocks(), folder):
                changed.add(block)
        else:
            base, refine = split(index.faiss)
            added = _empty(base)
            rows = np.arange(before, before + len(embeddings))
            codes = [] if refine is None else [_codes(refine)]
            start = 0
            for block in _told(database.blocks(), folder):
                added.add_with_ids(block, rows[start : start + len(block)])
                start += len(block)
                if refine is not None:
                    codes.append(refine.sa_encode(block))
            changed = merge_lists(_empty(base), [base, added], part / LISTS)
            changed = changed if refine is None else with_codes(changed, index.faiss, codes, part / "refine.faiss")
        meta = _changed(index, "appended", len(embeddings))
        both = sum_checksums(made_of.meta.get("texts_checksum") for made_of in (index, embeddings))
        meta |= {} if both is None else {"texts_checksum": both}
        write_contents(part, Path(folder), changed, itertools.chain(index.ids, embeddings.ids), snippets, columns, meta)
    return Index.open(folder)


def remove(folder: str | os.PathLike[str], ids: Sequence[str]) -> Index:
    """Take vectors out of an index, and their ids and snippets out of its folder.

    Args:
        folder: of the index.
        ids: of what is to go; an id may stand there more than once.

    Returns:
        The index as it is now.

    Raises:
        DualencError: an id that the index does not have, nothing would be left, or FAISS cannot remove from an index
            of this kind (HNSW).
    """
    with locked(folder):
        return _remove(folder, ids)


def _remove(folder: str | os.PathLike[str], ids: Sequence[str]) -> Index:
    index = Index.open(folder)
    rows = _mapped(index).rows(ids)
    if not len(rows) or (rows < 0).any():
        missing = f"has no item {ids[int(np.argmin(rows))]!r}" if len(rows) else "no ids were given"
        raise DualencError(f"{folder}: {missing}; give ids that it has")
    gone = np.unique(rows)
    if len(gone) == len(index):
        raise DualencError(f"{folder}: nothing would be left; remove the folder instead")
    with atomic_folder(folder, is_index, "index") as part:
        part.mkdir()
        if lists_of(index.faiss) is None:
            changed = faiss.read_index(str(Path(folder) / "index.faiss"))
            _remove_rows(changed, gone, str(folder))
        else:
            base, refine = split(index.faiss)
            lists = lists_of(index.faiss)
            shutil.copyfile(lists.filename, part / LISTS)
            before, lists.filename = lists.filename, str(part / LISTS)
            faiss.write_index(base, str(part / "base.faiss"))
            lists.filename = before
            changed = faiss.read_index(str(part / "base.faiss"))  # may write to its lists, the copy
            (part / "base.faiss").unlink()
            _remove_rows(changed, gone, str(folder))
            if refine is not None:
                codes = _codes(refine)
                kept = np.delete(np.arange(len(codes)), gone)
                blocks = (codes[kept[start : start + ROWS_AT_ONCE]] for start in range(0, len(kept), ROWS_AT_ONCE))
                changed = with_codes(changed, index.faiss, blocks, part / "refine.faiss")
        kept_rows = _kept(len(index), gone)
        names = (index.ids[row] for row in _kept(len(index), gone))
        snippets = None if index.snippets is None else (index.snippet(row) for row in kept_rows)
        meta = _changed(index, "removed", len(gone))
        columns = None if index.columns is None else index.columns.take(np.delete(np.arange(len(index)), gone))
        write_contents(part, Path(folder), changed, names, snippets, columns, meta)
    return Index.open(folder)


def _joined(index: Index, embeddings: Embeddings, folder: Any) -> pa.Table | None:
    """The columns of an index and of what is appended; what only one of them has is missing in the other."""
    if index.columns is None and embeddings.columns is None:
        return None
    there = {} if index.columns is None else dict(column_kinds(index.columns))
    for name, kind in column_kinds(embeddings.columns).items():
        if there.get(name, kind) != kind:
            told = f"column {name!r} holds {there[name]} values in the index and {kind} values in what is appended"
            raise DualencError(f"{folder}: {told}; embed the data with values alike")
    parts = []
    for columns, count in ((index.columns, len(index)), (embeddings.columns, len(embeddings))):
        parts.append(pa.table({"_": pa.nulls(count)}) if columns is None else columns)
    joined = pa.concat_tables(parts, promote_options="permissive")
    return joined.drop_columns(["_"]) if "_" in joined.column_names else joined


def _mapped(index: Index) -> Ids:
    assert isinstance(index.ids, Ids), "an opened index has its ids on disk"
    return index.ids


def _changed(index: Index, what: str, count: int) -> dict[str, Any]:
    """The meta.json of a changed index: what was measured when it was built is no longer said of it."""
    outdated = (*MEASURED, "files", "sizes", "texts_checksum")
    meta = {key: value for key, value in index.meta.items() if key not in outdated}
    measured = {key: index.meta[key] for key in MEASURED if key in index.meta}
    meta |= {"count": len(index) + (count if what == "appended" else -count), what: meta.get(what, 0) + count}
    return meta | ({"when_built": measured} if measured else {})


def _told(blocks: Iterable[np.ndarray], folder: Any) -> Iterator[np.ndarray]:
    try:
        yield from blocks
    except (RuntimeError, MemoryError) as error:
        raise DualencError(f"{folder}: FAISS cannot take the vectors: {reason(error)}; build the index again") from None


def _empty(base: Any) -> Any:
    """An index that is trained as this one, without vectors, and with lists in memory."""
    lists = lists_of(base)
    before = lists.filename
    empty = faiss.deserialize_index(faiss.serialize_index(base))
    lists.filename = before
    ivf: Any = faiss.extract_index_ivf(empty)
    fresh = faiss.ArrayInvertedLists(ivf.nlist, ivf.code_size)
    ivf.replace_invlists(fresh, True)
    fresh.this.disown()  # type: ignore[attr-defined]
    empty.ntotal = ivf.ntotal = 0
    return empty


def _codes(refine: Any) -> np.ndarray:
    """(N, bytes) codes of an index of plain codes, where they are mapped."""
    return faiss.rev_swig_ptr(refine.codes.data(), refine.codes.size()).reshape(refine.ntotal, -1)


def _kept(count: int, gone: np.ndarray) -> Iterator[int]:
    """Row numbers below `count` that are not gone; `gone` is ascending."""
    places = [-1, *gone.tolist(), count]
    return itertools.chain.from_iterable(range(a + 1, b) for a, b in itertools.pairwise(places))


def _remove_rows(index: Any, gone: np.ndarray, name: str) -> None:
    """Remove rows from an index, and close the gaps in the row numbers of its lists."""
    for part in split(index):
        if part is None:
            continue
        try:
            part.remove_ids(gone)
        except (RuntimeError, AttributeError) as error:
            kind = type(part).__name__
            why = f"FAISS cannot remove vectors from an {kind} ({reason(error)})"
            raise DualencError(f"{name}: {why}; build the index again without them") from None
        ivf: Any = faiss.try_extract_index_ivf(part)
        if ivf is None:
            continue
        lists = faiss.downcast_InvertedLists(ivf.invlists)
        for number in range(ivf.nlist):
            if size := lists.list_size(number):
                rows = faiss.rev_swig_ptr(lists.get_ids(number), size)
                rows -= np.searchsorted(gone, rows)
    index.ntotal = split(index)[0].ntotal
