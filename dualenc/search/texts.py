"""Text store: the whole texts of an index, from which BM25 is rebuilt and documents re-embedded.

    texts/    items.arrow (id, text), order.npy and meta.json, inside the folder of the index

meta.json has the checksum of the index's items, so that texts of other items are rejected.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dualenc.data.store.items import ITEMS, ORDER, ItemTable, write_items
from dualenc.errors import DualencError
from dualenc.io.checksums import recorded, verify_files
from dualenc.io.files import atomic_folder, consistent_read, is_folder_of, locked
from dualenc.io.provenance import Provenance
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
    """N texts on disk with their ids, memory-mapped.

    They are in the order of the index's rows.

        store = TextStore("index", Index.open("index").items_checksum)
        print(store.ids[0], store.texts[0])

    Args:
        folder: folder of the index.
        checksum: `items_checksum` of the index.
        verify: read every file and compare it with its SHA-256.

    Raises:
        DualencError: the index stores no texts, or those of other items, or they are corrupt.
    """

    def __init__(self, folder: StrPath, checksum: str, verify: bool = False) -> None:
        self.folder = Path(folder) / FOLDER
        table = consistent_read(self.folder, lambda: self._open(checksum, verify))
        if table.texts is None:
            raise DualencError("contains no texts", fix=AGAIN, where=self.folder)
        self.ids = table.ids
        self.texts = table.texts

    def _open(self, checksum: str, verify: bool) -> ItemTable:
        if not has_texts(self.folder.parent):
            raise DualencError("stores no texts", fix=AGAIN, where=self.folder.parent)
        other = f"stores no texts; {AGAIN}"
        own = Provenance.from_folder(
            self.folder, FORMAT, FORMAT_VERSION, ["count", "of"], other, AGAIN
        )
        # Rows are matched by number, so texts of other items would answer for these.
        if own.of != checksum:
            raise DualencError("is of other texts than the index", fix=AGAIN, where=self.folder)
        verify_files(self.folder, [ITEMS, ORDER], own.sizes, own.files, AGAIN, whole=verify)
        return ItemTable([self.folder / ITEMS], own.count, AGAIN)


def has_texts(folder: StrPath) -> bool:
    """Return True if the folder of an index stores whole texts."""
    return is_folder_of(Path(folder) / FOLDER, FORMAT)


def add_texts(folder: StrPath, corpus: Corpus, *, bm25: bool = False, whole: bool = False) -> int:
    """Add a BM25 index, the whole texts or both to the folder of an index.

        add_texts("index", corpus, bm25=True)

    Args:
        folder: the index.
        corpus: the indexed texts, in any order, and possibly others.
        bm25: add a BM25 index.
        whole: add the whole texts.

    Returns:
        The number of indexed texts.

    Raises:
        DualencError: the corpus is not of texts, or not of those that were embedded.
    """
    if corpus.modality != "text":
        raise DualencError(
            f"its data consists of {corpus.modality}s, not texts",
            fix="leave --bm25 and --texts out",
            where=folder,
        )
    # An append between reading the ids and writing the texts would leave some without a text.
    with locked(folder):
        index = Index.open(folder)
        rows = rows_in(corpus, index, folder)
        if bm25:
            Lexical.build(corpus[row] for row in rows).save(folder, index.items_checksum)
        if whole:
            write_texts(folder, index.ids, (corpus[row] for row in rows), index.items_checksum)
    return len(index)


def write_texts(folder: StrPath, ids: Sequence[str], texts: Iterable[str], checksum: str) -> None:
    """Write a text store into the folder of an index.

    Args:
        folder: the index.
        ids: (N,) ids, in the order of the index.
        texts: (N,) texts.
        checksum: `items_checksum` of the index.
    """
    is_own = functools.partial(is_folder_of, expected=FORMAT)
    with atomic_folder(Path(folder) / FOLDER, is_own, "texts") as part:
        part.mkdir()
        write_items(part, ids, texts)
        # Written last, because it has the checksums of the other files.
        head = {"format": FORMAT, "version": FORMAT_VERSION, "count": len(ids), "of": checksum}
        Provenance.from_entries({**head, **recorded(part, [ITEMS, ORDER])}).write(part)
