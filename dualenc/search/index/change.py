"""Append vectors to an index folder, or remove them by id.

The folder is rewritten beside the old one and swapped in. Trained parts do not change, so rebuild
an index that has grown a lot or whose data has shifted. Whole texts follow the change, and BM25 is
rebuilt from them.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import faiss
import numpy as np
import pyarrow as pa

from dualenc.data.store.items import check_ids, rows_of
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError, explain
from dualenc.io.files import atomic_folder, locked, was_replaced_by_killed
from dualenc.io.provenance import MEASURED, Provenance
from dualenc.search.engines.filter_recall import RESULT, VECTORS
from dualenc.search.index.database import Database
from dualenc.search.index.open import Index, is_index, rows_in, write_contents
from dualenc.search.index.refined import split
from dualenc.search.lexical import Lexical, has_lexical
from dualenc.search.migration.migration_folder import check_unmigrated
from dualenc.search.texts import TextStore, has_texts, write_texts
from dualenc.search.where import column_kinds
from dualenc.types import check_several

if TYPE_CHECKING:
    from dualenc.data import Corpus

PLACEHOLDER = "_"
"""Name of the placeholder column, which no column of a user can have."""


def append(
    folder: str | os.PathLike[str], embeddings: Embeddings, corpus: Corpus | None = None
) -> Index:
    """Append vectors with new ids to an index, and return the index opened again.

    Calling it again after a killed process is safe: if the new index is already in place, only the
    old one is removed.

    Args:
        folder: the index.
        embeddings: n new vectors with ids, and snippets and columns like those of the index.
        corpus: the embedded data, for an index that stores whole texts.

    Raises:
        DualencError: the vectors do not fit the index, an id is already in it, or its model is
            being migrated.
    """
    # Ask first: opening the index removes what a killed process left.
    was_killed = was_replaced_by_killed(folder)
    with locked(folder):
        check_unmigrated(folder)
        index = Index.open(folder)
        if was_killed and are_last(index, embeddings.ids):
            return index
        about = embeddings.provenance.updated(dim=embeddings.dim)
        check_addition(index, about, embeddings.ids, folder)
        texts = _whole_texts(index, folder)
        if texts is not None:
            if corpus is None:
                raise DualencError(
                    "stores whole texts", fix="give those of the new items, too", where=folder
                )
            rows = rows_in(corpus, embeddings, folder)
            texts = itertools.chain(texts, (corpus[row] for row in rows))
        # Rows without a snippet get an empty one: a column holds a value for each row or none.
        snippets: Iterator[str] | None = None
        if index.snippets is not None or embeddings.snippets is not None:
            own = index.snippets or itertools.repeat("", len(index))
            snippets = itertools.chain(
                own, embeddings.snippets or itertools.repeat("", len(embeddings))
            )
        columns = _joined(index, embeddings, folder)
        changed = _read(index, folder)
        with explain(f"{folder}: FAISS cannot take the vectors", "build the index again"):
            for block in Database(embeddings, index.provenance.metric).blocks():
                changed.add(block)
        hashes = None
        if index.hashes is not None or embeddings.hashes is not None:
            hashes = np.concatenate([_known_hashes(index), _known_hashes(embeddings)])
        ids = [*index.ids, *embeddings.ids]
        appended = index.provenance.appended + len(embeddings)
        provenance = _changed(index.provenance, count=len(ids), appended=appended)
        return _replace(folder, changed, ids, snippets, columns, provenance, texts, hashes)


def remove(folder: str | os.PathLike[str], ids: Sequence[str]) -> Index:
    """Remove items from an index by id, and return the index opened again.

    Their vectors, snippets, columns and texts are removed. Calling it again after a killed process
    is safe, as for `append`.

    Args:
        folder: the index.
        ids: ids to remove, all of which must be in the index.

    Raises:
        DualencError: an id is unknown, no item would be left, or the model is being migrated.
    """
    check_several("ids", ids)
    was_killed = was_replaced_by_killed(folder)
    with locked(folder):
        check_unmigrated(folder)
        index = Index.open(folder)
        rows = rows_of(index.ids, ids)
        if was_killed and len(rows) and (rows < 0).all():
            return index
        if not len(rows) or (rows < 0).any():
            raise DualencError(
                f"lacks the item {ids[int(np.argmin(rows))]!r}"
                if len(rows)
                else "no ids were given",
                fix="give ids that it has",
                where=folder,
            )
        # (N,) bool; repeated ids count once.
        stays = np.ones(len(index), bool)
        stays[rows] = False
        removed = np.flatnonzero(~stays)
        if len(removed) == len(index):
            raise DualencError(
                "nothing would be left", fix="remove the folder instead", where=folder
            )
        texts = _whole_texts(index, folder)
        if texts is not None:
            texts = itertools.compress(texts, stays)
        changed = _read(index, folder)
        _remove_rows(changed, removed, folder)
        snippets = None if index.snippets is None else itertools.compress(index.snippets, stays)
        columns = None if index.columns is None else index.columns.filter(pa.array(stays))
        hashes = None if index.hashes is None else index.hashes[stays]
        ids_left = list(itertools.compress(index.ids, stays))
        num_removed = index.provenance.removed + len(removed)
        provenance = _changed(index.provenance, count=len(ids_left), removed=num_removed)
        return _replace(folder, changed, ids_left, snippets, columns, provenance, texts, hashes)


def _known_hashes(source: Index | Embeddings) -> np.ndarray:
    """Return the hashes (n,) of whole texts; 0 where an earlier version recorded none."""
    return np.zeros(len(source), np.uint64) if source.hashes is None else source.hashes


def are_last(index: Index, ids: Sequence[str]) -> bool:
    """Return True if an index ends with exactly these items, in their order.

    Args:
        index: the index.
        ids: ids of the items.
    """
    return 0 < len(ids) < len(index) and index.ids[len(index) - len(ids) :] == list(ids)


def _read(index: Index, folder: str | os.PathLike[str]) -> Any:
    """Read the FAISS index into memory, because a memory-mapped one cannot change."""
    if index.provenance.mapped:
        raise DualencError(
            "its model is being changed", fix="finish `dualenc migrate` first", where=folder
        )
    # Its codes are mapped from the file, and FAISS can only append to codes in memory.
    if index.refine_file is not None:
        raise DualencError(
            "refine.faiss cannot be changed", fix="build the index again", where=folder
        )
    return faiss.read_index(str(Path(folder) / "index.faiss"), faiss.IO_FLAG_ONDISK_SAME_DIR)


def _replace(
    folder: str | os.PathLike[str],
    changed: Any,
    ids: Sequence[str],
    snippets: Iterable[str] | None,
    columns: pa.Table | None,
    provenance: Provenance,
    texts: Iterable[str] | None,
    hashes: np.ndarray | None,
) -> Index:
    """Swap in a changed index with its texts and BM25; return it opened again."""
    has_bm25 = has_lexical(folder)
    with atomic_folder(folder, is_index, "index") as part:
        part.mkdir()
        contents = (changed, ids, snippets, columns, provenance)
        checksum = write_contents(part, Path(folder), *contents, hashes=hashes)
        # The filter workload stays valid: `dualenc evaluate engine` measures it again.
        for name in (RESULT, VECTORS):
            if Path(folder, name).is_file():
                shutil.copyfile(Path(folder, name), part / name)
        # Inside the folder before it is swapped in, so that readers never see old texts.
        if texts is not None:
            write_texts(part, ids, texts, checksum)
            if has_bm25:
                Lexical.build(TextStore(part, checksum).texts).save(part, checksum)
    return Index.open(folder)


def _whole_texts(index: Index, folder: str | os.PathLike[str]) -> Iterable[str] | None:
    """Return the whole texts from which BM25 and the text store are rewritten, or None."""
    if has_texts(folder):
        return TextStore(folder, index.items_checksum).texts
    if has_lexical(folder):
        raise DualencError(
            "has BM25, but not the whole texts to rebuild it from",
            fix=f"run dualenc index {folder} --texts first, or remove the folder bm25 in it",
            where=folder,
        )
    return None


def check_addition(
    index: Index, about: Provenance, ids: Sequence[str], folder: str | os.PathLike[str]
) -> None:
    """Raise unless items may be appended to an index.

    Args:
        index: the index.
        about: `dim`, and `model_checksum`, `side` and `output` of the new vectors, if known.
        ids: ids of the new items.
        folder: the index, for errors.

    Raises:
        DualencError: the vectors are of another kind, or an id is already in the index.
    """
    own = index.provenance
    compared = {
        "dimension": (index.dim, about.dim),
        "model_checksum": (own.model_checksum, about.model_checksum),
        "side": (own.side, about.side),
        "output": (own.output, about.output),
    }
    for name, (ours, theirs) in compared.items():
        if ours is not None and theirs is not None and ours != theirs:
            raise DualencError(
                f"has vectors of {name} {str(ours)[:12]}, not {str(theirs)[:12]}",
                fix=f"embed the data with its model and --dim {index.dim}",
                where=folder,
            )
    check_ids(ids)
    present = np.flatnonzero(rows_of(index.ids, ids) >= 0)
    if len(present):
        name = ids[int(present[0])]
        raise DualencError(
            f"already has an item {name!r}", fix="remove it first, or leave it out", where=folder
        )


def _joined(
    index: Index, embeddings: Embeddings, folder: str | os.PathLike[str]
) -> pa.Table | None:
    """Concatenate the columns of an index and of appended embeddings.

    A column of only one of them is null in the other's rows. The type of a column was inferred from
    the values in one file, so the next file may have another one: fractions after integers,
    integers after texts, or anything after only missing values.
    """
    if index.columns is None and embeddings.columns is None:
        return None
    ours = _table(index)
    theirs = _table(embeddings)
    kinds = column_kinds(ours)
    for name, kind in column_kinds(theirs).items():
        own = kinds.get(name, kind)
        if own == kind:
            continue
        first, second = ours.column(name), theirs.column(name)
        # A column of only nulls has an arbitrary type, so the other side decides.
        if second.null_count == len(second) or (own, kind) == ("text", "integer"):
            place = theirs.column_names.index(name)
            theirs = theirs.set_column(place, name, second.cast(first.type))
        elif first.null_count == len(first):
            place = ours.column_names.index(name)
            ours = ours.set_column(place, name, first.cast(second.type))
        # Arrow promotes integers to numbers below.
        elif {own, kind} != {"integer", "number"}:
            raise DualencError(
                f"column {name!r} holds {own} values in the index and {kind} values in what "
                "is appended",
                fix="embed the data with values of one type",
                where=folder,
            )
    with explain(f"{folder}: the columns do not join", "embed the data with values of one type"):
        joined = pa.concat_tables([ours, theirs], promote_options="permissive")
    return joined.select([name for name in joined.column_names if name != PLACEHOLDER])


def _table(source: Index | Embeddings) -> pa.Table:
    """Return the columns of a source, or a placeholder: a table needs a column to have rows."""
    if source.columns is not None:
        return source.columns
    return pa.table({PLACEHOLDER: pa.nulls(len(source))})


def _changed(provenance: Provenance, **entries: int) -> Provenance:
    """Return the record of a changed index; outdated measurements move to `when_built`."""
    # Without "files" and "sizes" their new values are written last, as by a build.
    kept = provenance.without([*MEASURED, "files", "sizes"]).updated(**entries)
    measured = provenance.only(MEASURED).entries()
    return kept.updated(when_built=measured) if measured else kept


def _remove_rows(index: Any, removed: np.ndarray, folder: str | os.PathLike[str]) -> None:
    """Remove rows from an index, and renumber the rows in its inverted lists without gaps."""
    # A refined index cannot remove rows itself, only its two parts can.
    for part in split(index):
        if part is None:
            continue
        failure = f"{folder}: FAISS cannot remove vectors from an {type(part).__name__}"
        with explain(failure, "build the index again without them"):
            part.remove_ids(removed)
        ivf: Any = faiss.try_extract_index_ivf(part)
        if ivf is None:
            continue
        # Flat storage renumbers its rows by itself, but inverted lists keep the old numbers. Each
        # row moves down by the number of removed rows before it.
        lists = faiss.downcast_InvertedLists(ivf.invlists)
        for number in range(ivf.nlist):
            if size := lists.list_size(number):
                # A view of the C++ array, changed in place.
                rows = faiss.rev_swig_ptr(lists.get_ids(number), size)
                rows -= np.searchsorted(removed, rows)
    index.ntotal = split(index)[0].ntotal
