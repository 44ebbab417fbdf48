"""Vectors of texts of which some cannot be embedded: NULL, blank, or without known words."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Sequence

import numpy as np

from dualenc.data import Corpus
from dualenc.encoders import Tower
from dualenc.errors import BadSample
from dualenc.search.embed.encode import embed

logger = logging.getLogger("dualenc.workflows")


class RowVectors:
    """Vectors of rows, and which rows have none.

        vectors = RowVectors(encoder.right)
        vectors.embed(["1", "2"], ["a text", None])
        vectors.report()

    Args:
        tower: tower of texts.
        batch_size: texts per forward pass.
    """

    def __init__(self, tower: Tower, batch_size: int = 32) -> None:
        self.tower = tower
        self.batch_size = batch_size
        self.left_out: dict[str, str] = {}

    def embed(self, ids: Sequence[str], texts: Sequence[str | None]) -> list[np.ndarray | None]:
        """Return the vector (D,) of each row, None for a text without one."""
        vectors: list[np.ndarray | None] = []
        for id, found in zip(ids, text_vectors(self.tower, texts, self.batch_size)):
            vectors.append(None if isinstance(found, str) else found)
            if isinstance(found, str):
                self.left_out[id] = found
        return vectors

    def report(self) -> None:
        """Log how many texts have no vector."""
        if self.left_out:
            message = "%s texts have no vector, which is NULL; the first, %s: %s"
            count = f"{len(self.left_out):,}"
            logger.warning(message, count, *next(iter(self.left_out.items())))


def text_vectors(
    tower: Tower,
    texts: Sequence[str | None],
    batch_size: int = 32,
    progress: bool | str = False,
) -> list[np.ndarray | str]:
    """Return the vector (D,) of each text, or the reason why it has none.

    Args:
        tower: tower of texts.
        texts: n texts; None for NULL.
        batch_size: texts per forward pass.
        progress: description of a progress bar; False shows none.
    """
    found: list[np.ndarray | str] = ["its text is NULL or blank"] * len(texts)
    usable = [(row, text) for row, text in enumerate(texts) if text and not _is_blank(text)]
    vectors = _embedded(tower, [text for _, text in usable], batch_size, progress)
    for (row, _), vector in zip(usable, vectors):
        found[row] = vector
    return found


def _embedded(
    tower: Tower, texts: Sequence[str], batch_size: int, progress: bool | str
) -> list[np.ndarray | str]:
    """Embed texts that are not blank; a text without a vector is found by halves."""
    if not texts:
        return []
    corpus = Corpus([str(row) for row in range(len(texts))], texts)
    try:
        found = embed(tower, corpus, batch_size=batch_size, on_error="raise", progress=progress)
        return list(np.asarray(found.vectors))
    except BadSample as error:
        if len(texts) == 1:
            return [str(error)]
    half = len(texts) // 2
    parts = (texts[:half], texts[half:])
    return [vector for part in parts for vector in _embedded(tower, part, batch_size, False)]


def _is_blank(text: str) -> bool:
    """Return True for a text of nothing but spaces, controls and invisible characters."""
    kinds = (unicodedata.category(character) for character in text)
    return all(kind[0] == "Z" or kind in ("Cc", "Cf") for kind in kinds)
