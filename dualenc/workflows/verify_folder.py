"""Verify every file of an index or of embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dualenc.data.store.vector_shards import Embeddings, is_embeddings
from dualenc.search.index.open import Index
from dualenc.search.lexical import Lexical, has_lexical
from dualenc.search.texts import TextStore, has_texts
from dualenc.types import StrPath


@dataclass(frozen=True)
class Verification:
    """A folder whose files all match their checksums.

        checked = verify("index")
        print(checked.num_vectors, checked.num_bytes)

    Attributes:
        folder: the index or the embeddings.
        num_vectors: number of vectors.
        num_bytes: size of all files in bytes.
    """

    folder: Path
    num_vectors: int
    num_bytes: int


def verify(folder: StrPath) -> Verification:
    """Read every file of an index or of embeddings, and compare it with its checksum.

        from dualenc import verify

        print(verify("index").num_vectors)

    Args:
        folder: an index, with its BM25 and texts, or embeddings.

    Returns:
        The number of vectors and bytes that were verified.

    Raises:
        DualencError: a file is missing, truncated or corrupt; the message names it.
    """
    kind: type[Index] | type[Embeddings] = Embeddings if is_embeddings(folder) else Index
    opened = kind.open(folder, verify=True)
    # Texts and words have checksums of their own, and must belong to these vectors.
    if isinstance(opened, Index) and has_texts(folder):
        TextStore(folder, opened.items_checksum, verify=True)
    if isinstance(opened, Index) and has_lexical(folder):
        Lexical.open(folder, opened.items_checksum, verify=True)
    num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return Verification(Path(folder), len(opened), num_bytes)
