"""BM25 index over an index's texts, for hybrid searches.

    bm25/    files of bm25s, and meta.json with their checksums and that of the index's ids

The folder is inside that of the index. A changed index gets a new one with its texts.

Terms are words of any length, as Unicode's NFKC_Casefold writes them: without case, soft hyphens,
zero-width spaces and joiners; i with the dot of the Turkish capital is i. English stop words are
left out, nothing is stemmed. Scripts without spaces, and Hangul for its particles, are split into
pairs of neighbouring characters, as by Lucene's CJK analyzer; a document's single characters are
terms as well, for queries of one character.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import regex

from dualenc.errors import DualencError, explain
from dualenc.io.checksums import recorded, verify_files
from dualenc.io.files import atomic_folder, is_folder_of, write_json
from dualenc.io.reading import read_json_object
from dualenc.types import check_several

FOLDER = "bm25"
FORMAT = "dualenc bm25"
VERSION = 3
"""Version of the terms: an index and its queries must be split alike."""
VERSIONS = (2, VERSION)
"""Versions that are searched. The second kept characters of no width, which split words, and the
dot of an i."""
K1 = 1.5
B = 0.75
"""Saturation of the term frequency, strength of the length normalisation."""
AGAIN = "run dualenc index INDEX --bm25"


def _import_bm25s() -> ModuleType:
    """Import bm25s without JAX, where it is installed: its import tries JAX, which takes most of a
    GPU's memory."""
    modules: dict[str, Any] = sys.modules
    jax = modules.get("jax")
    modules["jax"] = None  # whoever imports it is told that it is not there
    try:
        return importlib.import_module("bm25s")
    finally:
        del modules["jax"]
        if jax is not None:
            modules["jax"] = jax


bm25s = _import_bm25s()
_WORDS = regex.compile(r"\w+")
_IGNORABLE = regex.compile(r"\p{Default_Ignorable_Code_Point}+")
# Line breaking class SA: Thai, Lao, Khmer, Myanmar and others of South East Asia.
_WITHOUT_SPACES = regex.compile(
    r"(?V1)([\w&&[\p{lb=SA}\p{scx=Han}\p{scx=Hiragana}\p{scx=Katakana}\p{scx=Bopomofo}\p{scx=Hangul}]]+)"
)
_CHARACTERS = regex.compile(r"\X")
_STOP_WORDS = frozenset(bm25s.stopwords.STOPWORDS_EN)


def split_terms(text: str, *, is_query: bool = False, version: int = VERSION) -> list[str]:
    """Split a document or a query into terms, in order, by the rules of a version."""
    terms: list[str] = []
    for word in _WORDS.findall(_folded(text, version)):
        if word.isascii():
            terms.append(word)
            continue
        # Every second part is without spaces; its characters include vowel signs and tone marks.
        for number, part in enumerate(_WITHOUT_SPACES.split(word)):
            characters = _CHARACTERS.findall(part) if number % 2 else [part]
            bigrams = [first + second for first, second in itertools.pairwise(characters)]
            terms += bigrams if is_query and bigrams else characters + bigrams
    return [term for term in terms if term and term not in _STOP_WORDS]


def _folded(text: str, version: int) -> str:
    """Return the form in which texts are compared."""
    if text.isascii():
        return text.lower()
    folded = unicodedata.normalize("NFKC", text)
    if version == 2:
        return folded.casefold()
    folded = _IGNORABLE.sub("", folded).casefold().replace("i\N{COMBINING DOT ABOVE}", "i")
    # Case folding takes some characters apart.
    return unicodedata.normalize("NFKC", folded)


class Lexical:
    """BM25 index over the rows of an index (Lucene's variant); create one with `Lexical.build` or
    `Lexical.open`."""

    def __init__(self, scorer: Any, count: int, version: int = VERSION) -> None:
        self.scorer = scorer
        self.count = count
        self.version = version

    @classmethod
    def build(cls, texts: Iterable[str]) -> Lexical:
        """Split and index N texts."""
        check_several("texts", texts)
        vocabulary: dict[str, int] = {}
        ids = [
            [vocabulary.setdefault(term, len(vocabulary)) for term in split_terms(text)]
            for text in texts
        ]
        if not vocabulary:
            raise DualencError("BM25: no text holds a word", fix="is the corpus empty?")
        scorer = bm25s.BM25(k1=K1, b=B)
        scorer.index(bm25s.tokenization.Tokenized(ids, vocabulary), show_progress=False)
        return cls(scorer, len(ids))

    def save(self, index: str | os.PathLike[str], checksum: str) -> None:
        """Write the folder inside that of an index with the `items_checksum`."""
        is_own = functools.partial(is_folder_of, expected=FORMAT)
        with atomic_folder(Path(index) / FOLDER, is_own, "BM25") as part:
            part.mkdir()
            self.scorer.save(str(part), show_progress=False)
            files = recorded(part, sorted(path.name for path in part.iterdir()))
            head = {"format": FORMAT, "version": self.version, "count": self.count, "ids": checksum}
            write_json(part / "meta.json", {**head, **files})

    @classmethod
    def open(cls, index: str | os.PathLike[str], checksum: str, verify: bool = False) -> Lexical:
        """Open the folder inside that of an index with the `items_checksum`; arrays are
        memory-mapped.

        With `verify` every file is read and compared with its SHA-256.
        """
        folder = Path(index) / FOLDER
        if not folder.is_dir():
            raise DualencError("has no BM25 beside its vectors", fix=AGAIN, where=index)
        meta = read_json_object(
            folder / "meta.json", {"version": int, "count": int, "ids": str, "files": dict}
        )
        if meta["ids"] != checksum:
            raise DualencError("is of other texts than the index", fix=AGAIN, where=folder)
        if meta["version"] not in VERSIONS:
            raise DualencError(
                "splits texts into other words than this version", fix=AGAIN, where=folder
            )
        verify_files(folder, meta["files"], meta, AGAIN, whole=verify)
        try:
            scorer = bm25s.BM25.load(str(folder), mmap=True, show_progress=False)
            _check_scorer(scorer, meta["count"])
        except Exception as error:  # from numpy, json and bm25s
            why = " ".join(str(error).split())[:100]
            raise DualencError(
                f"corrupt ({type(error).__name__}: {why})", fix=AGAIN, where=folder
            ) from None
        return cls(scorer, meta["count"], meta["version"])

    def search(
        self, query: str, k: int, allowed_rows: np.ndarray | None = None
    ) -> list[tuple[int, float]]:
        """The k rows of the highest scores above 0, best first; ties by ascending row.

        With `allowed_rows` (N,) bool only those are returned; document frequencies still count all
        rows.
        """
        terms = split_terms(query, is_query=True, version=self.version)
        in_vocabulary = [term for term in terms if term in self.scorer.vocab_dict]
        if not in_vocabulary:
            return []
        # A row number beyond the last is found now: opening does not read the arrays.
        with explain("BM25 of the index: corrupt", AGAIN):
            scores = self.scorer.get_scores(in_vocabulary)
        matches = scores > 0
        if allowed_rows is not None:
            matches &= allowed_rows
        rows = np.flatnonzero(matches)
        # bm25s.retrieve breaks ties arbitrarily; all that tie with the k-th are kept for the stable
        # sort.
        if len(rows) > k:
            rows = rows[scores[rows] >= np.partition(scores[rows], -k)[-k]]
        rows = rows[np.argsort(-scores[rows], kind="stable")[:k]]
        return [(row, float(score)) for row, score in zip(rows.tolist(), scores[rows].tolist())]


def _check_scorer(scorer: Any, count: int) -> None:
    """Raise a `ValueError` for parameters, a vocabulary or arrays that no BM25 index of so many
    texts has."""
    arrays = scorer.scores
    if (type(arrays["num_docs"]), arrays["num_docs"]) != (int, count):
        raise ValueError(f"params has {arrays['num_docs']!r} texts instead of {count}")
    if (
        np.dtype(scorer.dtype).kind != "f"
        or np.dtype(scorer.int_dtype).kind not in "iu"
        or scorer.backend != "numpy"
    ):
        raise ValueError("params has types of numbers that are not those of an index")
    data, rows, starts = (arrays[name] for name in ("data", "indices", "indptr"))
    if data.dtype.kind != "f" or not {rows.dtype.kind, starts.dtype.kind} <= {"i", "u"}:
        raise ValueError("an array has numbers of another type")
    if not data.ndim == rows.ndim == starts.ndim == 1 or not len(data) == len(rows) == starts[-1]:
        raise ValueError("its arrays do not fit together")
    terms = scorer.vocab_dict.values()
    if not all(type(term) is int and 0 <= term < len(starts) for term in terms):
        raise ValueError("a term of the vocabulary has no number")


def has_lexical(index: str | os.PathLike[str]) -> bool:
    """Whether the folder of an index has a BM25 index."""
    return is_folder_of(Path(index) / FOLDER, FORMAT)
