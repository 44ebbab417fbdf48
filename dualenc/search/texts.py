"""Text store: the whole texts of an index, from which BM25 is built anew and documents are embedded
anew.

    texts/    items.arrow (id, text), order.npy and meta.json, inside the folder of the index

meta.json has the checksum of the index's items, so that texts of other items are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dualenc.data.store.items import ITEMS, ORDER, ItemTable, write_items
from dualenc.data.store.vector_shards import read_head
from dualenc.errors import DualencError
from dualenc.io.checksums import recorded, verify_files
from dualenc.io.files import atomic_folder, consistent_read, is_folder_of, locked, write_json
from dualenc.search.index.open import Index, rows_in
from dualenc.search.lexical import Lexical
from dualenc.types import StrPath

if TYPE_CHECKING:
    from dualenc.data import Corpus

FOLDER = "texts"
FORMAT = "dualenc texts"
FORMAT_VERSION = 2
AGAIN = "run dualenc index INDEX --texts"


class TextStore:
    """N texts on disk by their ids; with `verify` every file is read and compared with its
    SHA-256."""

    def __init__(self, folder: StrPath, checksum: str, verify: bool = False) -> None:
        self.folder = Path(folder) / FOLDER
        table = consistent_read(self.folder, lambda: self._open(checksum, verify))
        if table.texts is None:
            raise DualencError("holds no texts", fix=AGAIN, where=self.folder)
        self.ids = table.ids
        self.texts = table.texts

    def _open(self, checksum: str, verify: bool) -> ItemTable:
        if not has_texts(self.folder.parent):
            raise DualencError("keeps no texts", fix=AGAIN, where=self.folder.parent)
        other = f"keeps no texts; {AGAIN}"
        meta = read_head(self.folder, FORMAT, FORMAT_VERSION, other, {"count": int, "of": str})
        if meta["of"] != checksum:
            raise DualencError("is of other texts than the index", fix=AGAIN, where=self.folder)
        verify_files(self.folder, [ITEMS, ORDER], meta, AGAIN, whole=verify)
        return ItemTable([self.folder / ITEMS], meta["count"], AGAIN)


def has_texts(folder: StrPath) -> bool:
    """Whether the folder of an index keeps whole texts."""
    return is_folder_of(Path(folder) / FOLDER, FORMAT)


def add_texts(folder: StrPath, corpus: Corpus, *, bm25: bool = False, whole: bool = False) -> int:
    """Add a BM25 index, the whole texts or both to the folder of an index; returns the number of
    texts.

    The corpus holds the texts that were indexed, in any order, and perhaps more.
    """
    if corpus.modality != "text":
        raise DualencError(
            f"its data holds {corpus.modality}s, not texts",
            fix="leave --bm25 and --texts out",
            where=folder,
        )
    with locked(folder):
        index = Index.open(folder)
        rows = rows_in(corpus, index, folder)
        if bm25:
            Lexical.build(corpus[row] for row in rows).save(folder, index.items_checksum)
        if whole:
            write_texts(folder, index.ids, (corpus[row] for row in rows), index.items_checksum)
    return len(index)


def write_texts(folder: StrPath, ids: Sequence[str], texts: Iterable[str], checksum: str) -> None:
    """Write a text store of N texts into the folder of an index with the `items_checksum`."""
    is_own = functools.partial(is_folder_of, expected=FORMAT)
    with atomic_folder(Path(folder) / FOLDER, is_own, "texts") as part:
        part.mkdir()
        write_items(part, ids, texts)
        head = {"format": FORMAT, "version": FORMAT_VERSION, "count": len(ids), "of": checksum}
        write_json(part / "meta.json", {**head, **recorded(part, [ITEMS, ORDER])})
