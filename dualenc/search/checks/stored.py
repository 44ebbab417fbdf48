"""Stored vectors to check: an index, embeddings, or a collection, with their ids and texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np

from dualenc.data import Corpus
from dualenc.data.store.items import text_hash
from dualenc.data.store.vector_shards import Embeddings, is_embeddings
from dualenc.errors import DualencError
from dualenc.io.provenance import Provenance
from dualenc.search.engines.engine import Engine
from dualenc.search.engines.factory import open_engine
from dualenc.search.engines.pushed_folder import is_pushed, refuse_url
from dualenc.search.index.open import Index, is_index
from dualenc.search.index.refined import split
from dualenc.search.texts import TextStore, has_texts
from dualenc.types import StrPath

MAX_NUMBERS = 2**26
"""Numbers of the vectors that are read at most: 174,762 vectors of dimension 384."""
MAX_ENGINE_NUMBERS = 2**24
"""The same for an engine, which sends its vectors over a network."""
MAX_LISTED = 2_000_000
"""Rows of an engine whose ids and texts are listed at most."""
BLOCKS = 64
"""Places that the vectors are read from, if not all are."""
CUT = "…"
"""Last character of a text that was cut for display."""


class Sample(NamedTuple):
    """Vectors that were read for the checks.

    Attributes:
        rows: (n,) row numbers, ascending.
        vectors: (n, D) float32.
    """

    rows: np.ndarray
    vectors: np.ndarray


@dataclass(eq=False)
class Stored:
    """N stored vectors with their ids and texts.

        stored = Stored.open("index")
        stored.vectors(np.arange(10))

    Attributes:
        folder: index, embeddings, or what `dualenc push` wrote.
        opened: what was opened.
        ids: N ids; of an engine in ascending order.
        texts: N whole texts, or their beginnings; None without any.
        hashes: (N,) hashes of whole texts; None if unknown.
        are_whole: True if `texts` are known to be whole.
        text_problem: why the stored whole texts cannot be used; "" if they can, or there are none.
        images: the N images that the vectors are of, which are elsewhere; None without any.
        image_problem: why there are none.
    """

    folder: Path
    opened: Index | Engine | Embeddings
    ids: Sequence[str]
    texts: Sequence[str] | None
    hashes: np.ndarray | None = None
    are_whole: bool = False
    text_problem: str = ""
    images: Corpus | None = None
    image_problem: str = "the images are not at hand"

    @classmethod
    def open(cls, folder: StrPath) -> Stored:
        """Open stored vectors.

        Args:
            folder: index, embeddings, or what `dualenc push` wrote.

        Raises:
            DualencError: the folder is corrupt, or the engine holds other vectors.
        """
        folder = Path(folder)
        if is_pushed(folder):
            return cls._open_engine(folder)
        if is_embeddings(folder):
            embeddings = Embeddings.open(folder)
            return cls(folder, embeddings, embeddings.ids, embeddings.snippets, embeddings.hashes)
        index = Index.open(folder)
        stored = cls(folder, index, index.ids, index.snippets, index.hashes)
        if has_texts(folder):
            try:
                texts = TextStore(folder, index.items_checksum).texts
                stored.texts, stored.are_whole = texts, True
            except DualencError as error:
                stored.text_problem = str(error)
        return stored

    @classmethod
    def _open_engine(cls, folder: Path) -> Stored:
        engine = open_engine(folder)
        # Clients may change rows while they are checked.
        engine.hold_snapshot()
        if len(engine) > MAX_LISTED:
            return cls(folder, engine, (), None)
        # Sorted, because engines return rows in no particular order.
        texts = dict(sorted(engine.texts_by_id().items()))
        return cls(
            folder, engine, list(texts), list(texts.values()) if engine.has_snippets else None
        )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def unlisted(self) -> str:
        """Why no row can be checked; "" if rows can."""
        if len(self):
            return ""
        count = len(self.opened)
        return f"{count:,} rows are too many to list" if count > MAX_LISTED else "no row is stored"

    @property
    def provenance(self) -> Provenance:
        """Record of the vectors."""
        return self.opened.provenance

    @property
    def dim(self) -> int:
        """D, the size of the vectors."""
        return int(self.opened.dim)

    @property
    def is_exact(self) -> bool:
        """True if the vectors are stored as numbers, not as codes that lose more than rounding."""
        return not isinstance(self.opened, Index) or _is_exact(self.opened.faiss)

    @property
    def should_be_unit(self) -> bool:
        """True if the record says that all vectors have length one."""
        about = self.provenance
        if about.names:
            # What other software stored may have any length.
            return False
        if isinstance(self.opened, Embeddings):
            return about.normalized
        return about.metric == "cosine" or about.output == "embedding"

    def vectors(self, rows: np.ndarray) -> np.ndarray:
        """Return the stored or decoded vectors (n, D) float32 of rows (n,).

        Raises:
            DualencError: the codes cannot be decoded, or the engine has lost a row.
        """
        if isinstance(self.opened, Embeddings):
            return np.asarray(self.opened.vectors[rows], np.float32)
        if isinstance(self.opened, Index):
            return self.opened.reconstruct(rows)
        return self.opened.vectors_in_batches([self.ids[row] for row in rows])

    def sample(self) -> Sample:
        """Read all vectors, or those at 64 places if they are more than `MAX_NUMBERS`."""
        limit = MAX_ENGINE_NUMBERS if isinstance(self.opened, Engine) else MAX_NUMBERS
        count = max(limit // self.dim, BLOCKS)
        rows = np.arange(len(self))
        if count < len(self):
            # Contiguous blocks, since single rows would read a page each.
            starts = np.linspace(0, len(self) - count // BLOCKS, BLOCKS).astype(int)
            rows = np.unique(starts[:, None] + np.arange(count // BLOCKS))
        return Sample(rows, self.vectors(rows))

    def whole_text(self, row: int) -> str | None:
        """Return the text of a row if it is known to be whole."""
        if self.texts is None:
            return None
        text = self.texts[row]
        if self.are_whole:
            return text
        if self.hashes is not None and self.hashes[row]:
            return text if text_hash(text) == self.hashes[row] else None
        return None if text.endswith(CUT) else text

    def items(self, rows: np.ndarray) -> Corpus:
        """Return the images or whole texts of rows (n,), with row numbers as ids."""
        ids = [str(row) for row in rows]
        if self.images is not None:
            return Corpus(ids, self.images.take(rows).items, "image")
        return Corpus(ids, [self.whole_text(int(row)) or "" for row in rows])

    def close(self) -> None:
        """Close the connection of an engine."""
        if not isinstance(self.opened, Embeddings):
            self.opened.close()


def is_stored(folder: StrPath) -> bool:
    """Return True for an index, embeddings, or what `dualenc push` wrote, by the meta.json."""
    refuse_url(folder)
    return is_pushed(folder) or is_embeddings(folder) or is_index(folder)


def _is_exact(index: Any) -> bool:
    base, refined = split(index)
    part = base if refined is None else refined
    if isinstance(part, faiss.IndexPreTransform):
        return False
    if isinstance(part, faiss.IndexHNSW):
        part = faiss.downcast_index(part.storage)
    # Half precision takes two bytes per number; shorter codes lose more than rounding.
    return int(getattr(part, "code_size", 4 * index.d)) >= 2 * index.d
