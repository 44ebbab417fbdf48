"""Append documents to an index, or remove them by id."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from dualenc import distributed
from dualenc.data import Corpus
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.search.index import change
from dualenc.search.index.open import Index, check_target, is_index
from dualenc.types import Side, StrPath
from dualenc.workflows.build_index import check_source
from dualenc.workflows.embed_beside import ModelAndData, first_components, vectors_for
from dualenc.workflows.index_texts import check_has_texts, open_texts
from dualenc.workflows.recorded_options import ReadOptions


@dataclass(frozen=True)
class IndexChange:
    """A change of an index.

    With several processes only the main one changes the index; on the others the numbers are 0.

        done = remove("index", ["d17", "d42"])
        print(f"{done.num_changed} removed, {done.num_vectors} left")

    Attributes:
        folder: folder of the index.
        num_changed: number of vectors that were appended or removed.
        num_vectors: number of vectors after the change.
        was_done: True if a process that was killed had already appended these vectors.
    """

    folder: Path
    num_changed: int = 0
    num_vectors: int = 0
    was_done: bool = False


def append(
    index: StrPath,
    source: str,
    data: str | None = None,
    *,
    dim: int | None = None,
    bm25: bool = False,
    texts: bool = False,
    side: Side | None = None,
    batch_size: int = 32,
    device: str | None = None,
    progress: bool = True,
    **reading: Unpack[ReadOptions],
) -> IndexChange:
    """Append vectors with new ids to an index, and their texts to its BM25 and whole texts.

    With a model and data, the vectors are cut to the dimension of the index, and the columns that
    it filters by are read with the data.

        from dualenc import append

        append("index", "runs/mine/model", "more.jsonl")

    Args:
        index: folder of the index.
        source: folder of embeddings, or model folder or name.
        data: what to embed with a model.
        dim: number of components of the vectors to take; None takes all, or as many as the index.
        bm25: raise unless the index has BM25; if it has, BM25 follows in any case.
        texts: raise unless the index has whole texts; if it has, they follow in any case.
        side: "left" or "right" side of a model; None takes documents, or what the data holds.
        batch_size: number of items per forward pass.
        device: name of the device, such as "cpu" or "cuda:0"; None takes a GPU if there is one.
        progress: show a progress bar.
        reading: how the data is read, see `dualenc.workflows.recorded_options.ReadOptions`.

    Returns:
        How many vectors were appended, and how many there are now.

    Raises:
        DualencError: an id exists already, a column or a text is missing, the vectors are of
            another model, or a migration is under way.
    """
    # Everything that can be refused is refused before a model is loaded.
    check_target(index)
    if not is_index(index):
        raise DualencError("is not an index", fix="build one with `dualenc index`", where=index)
    check_source(source, data)
    has_texts = check_has_texts(index, bm25=bm25, texts=texts)
    # Open the texts before the work: if they are missing, nothing should have been embedded.
    corpus = open_texts(source, data, reading) if has_texts else None
    # `change.append` opens it again under its lock; this one is for early checks.
    grown = Index.open(index)
    # Without the columns that the index filters by, the new rows would be refused.
    columns = dict.fromkeys([*_columns(grown), *(reading.get("columns") or ())])
    as_grown: ReadOptions = {**reading, "columns": list(columns)}
    job = ModelAndData(source, data, side, as_grown, batch_size, dim or _dim_of(grown), device)
    with vectors_for(index, job, grown, progress=progress) as found:
        if not distributed.is_main():
            return IndexChange(Path(index))
        # A killed process had replaced the index, but not removed the embeddings.
        if found.is_appended:
            return IndexChange(Path(index), num_vectors=len(grown), was_done=True)
        return _append_embeddings(found.folder, grown, index, dim, corpus)


def remove(index: StrPath, ids: StrPath | Iterable[str]) -> IndexChange:
    """Remove vectors from an index by id, with their columns and texts.

        from dualenc import remove

        remove("index", ["d17", "d42"])
        remove("index", "gone.txt")

    Args:
        index: folder of the index.
        ids: ids to remove, or the path of a text file with one id per line.

    Returns:
        How many vectors were removed, and how many are left.

    Raises:
        DualencError: an id is not in the index, nothing would be left, the file cannot be read, or
            a migration is under way.
    """
    # Read before the index is locked: a wrong file should not stop other writers.
    names = _read_ids(Path(ids)) if isinstance(ids, str | os.PathLike) else list(ids)
    changed = change.remove(index, names)
    return IndexChange(Path(index), len(set(names)), len(changed))


def _dim_of(grown: Index) -> int | None:
    """Return the dimension to cut new vectors to; None if the index does not record its model.

    Without that record, longer vectors may come from another model and must not be cut to fit.
    """
    return grown.dim if grown.provenance.model_checksum else None


def _columns(source: Embeddings | Index) -> list[str]:
    """Return the names of the columns kept with vectors."""
    return [] if source.columns is None else source.columns.column_names


def _append_embeddings(
    folder: Path, grown: Index, out: StrPath, dim: int | None, corpus: Corpus | None
) -> IndexChange:
    """Append a folder of embeddings, and the texts of a corpus, to an index."""
    added = first_components(Embeddings.open(folder, verify=True), dim)
    # Without a value, new rows would never pass a filter.
    missing = ",".join(sorted(set(_columns(grown)) - set(_columns(added))))
    if missing:
        raise DualencError(
            f"lacks column {missing}, which the index filters by",
            fix=f"embed with --columns {missing}",
            where=folder,
        )
    appended = change.append(out, added, corpus)
    return IndexChange(Path(out), len(added), len(appended))


def _read_ids(path: Path) -> list[str]:
    """Read a text file with one id per line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DualencError(
            f"cannot be read ({error})", fix="give a text file with one id a line", where=path
        ) from None
    # Not `splitlines`: an id may hold other separators than a line break.
    return [line for line in text.split("\n") if line]
