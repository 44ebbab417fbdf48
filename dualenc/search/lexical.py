"""BM25 index over the texts of an index, for hybrid search.

    bm25/    files of bm25s, and meta.json with their checksums and that of the index's ids

The folder is inside that of the index. If the index changes, it is rebuilt from the texts.

Terms are words of any length in Unicode's NFKC_Casefold form: without case, soft hyphens,
zero-width spaces and joiners; i with the dot of the Turkish capital becomes i. English stop words
are dropped, and nothing is stemmed. Scripts without spaces, and Hangul because of its particles,
are split into overlapping pairs of characters, as in Lucene's CJK analyzer; single characters of
documents are terms as well, for queries of one character.
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
from dualenc.io.files import atomic_folder, is_folder_of
from dualenc.io.provenance import META, Provenance
from dualenc.types import check_several

FOLDER = "bm25"
FORMAT = "dualenc bm25"
VERSION = 3
"""Version of the tokenization: an index and its queries must be tokenized alike."""
VERSIONS = (2, VERSION)
"""Versions that can be searched. Version 2 kept zero-width characters, which split words, and the
dot of the Turkish i."""
K1 = 1.5
B = 0.75
"""Term-frequency saturation and strength of the length normalization: the common defaults."""
AGAIN = "run dualenc index INDEX --bm25"


def _import_bm25s() -> ModuleType:
    """Import bm25s without JAX, which it would import if installed, and which fills the GPU."""
    modules: dict[str, Any] = sys.modules
    jax = modules.get("jax")
    modules["jax"] = None  # makes `import jax` raise ImportError
    try:
        return importlib.import_module("bm25s")
    finally:
        del modules["jax"]
        if jax is not None:
            modules["jax"] = jax


bm25s = _import_bm25s()
_WORDS = regex.compile(r"\w+")
_IGNORABLE = regex.compile(r"\p{Default_Ignorable_Code_Point}+")
# Line breaking class SA has the scripts without spaces of South East Asia: Thai, Lao, Khmer,
# Myanmar and others. V1 enables set operations.
_WITHOUT_SPACES = regex.compile(
    r"(?V1)([\w&&[\p{lb=SA}\p{scx=Han}\p{scx=Hiragana}\p{scx=Katakana}\p{scx=Bopomofo}\p{scx=Hangul}]]+)"
)
_CHARACTERS = regex.compile(r"\X")
_STOP_WORDS = frozenset(bm25s.stopwords.STOPWORDS_EN)


def split_terms(text: str, *, is_query: bool = False, version: int = VERSION) -> list[str]:
    """Tokenize a document or a query into terms, in order.

        split_terms("The foxes of 東京")  # ["foxes", "東", "京", "東京"]

    Args:
        text: document or query.
        is_query: whether it is a query, whose single characters are dropped beside pairs.
        version: version of the tokenization.
    """
    terms: list[str] = []
    for word in _WORDS.findall(_folded(text, version)):
        if word.isascii():
            terms.append(word)
            continue
        # The capturing group of the split puts runs of scripts without spaces at odd positions.
        # Their characters are grapheme clusters, so vowel signs and tone marks stay attached.
        for number, part in enumerate(_WITHOUT_SPACES.split(word)):
            characters = _CHARACTERS.findall(part) if number % 2 else [part]
            bigrams = [first + second for first, second in itertools.pairwise(characters)]
            terms += bigrams if is_query and bigrams else characters + bigrams
    return [term for term in terms if term and term not in _STOP_WORDS]


def _folded(text: str, version: int) -> str:
    """Return a text in the form in which terms are compared."""
    if text.isascii():
        return text.lower()
    folded = unicodedata.normalize("NFKC", text)
    if version == 2:
        return folded.casefold()
    folded = _IGNORABLE.sub("", folded).casefold().replace("i\N{COMBINING DOT ABOVE}", "i")
    # Case folding decomposes some characters, so normalize once more.
    return unicodedata.normalize("NFKC", folded)


class Lexical:
    """BM25 index over the rows of an index, in Lucene's variant.

    Create one with `Lexical.build` or `Lexical.open`.

        Lexical.build(["a red fox", "a hen"]).search("fox", k=1)  # [(0, score)]

    Args:
        scorer: `bm25s.BM25` that has indexed the texts.
        count: N, the number of texts.
        version: version of the tokenization.
    """

    def __init__(self, scorer: Any, count: int, version: int = VERSION) -> None:
        self.scorer = scorer
        self.count = count
        self.version = version

    @classmethod
    def build(cls, texts: Iterable[str]) -> Lexical:
        """Tokenize and index N texts.

        Raises:
            DualencError: no text has a term.
        """
        check_several("texts", texts)
        vocabulary: dict[str, int] = {}
        ids = [
            [vocabulary.setdefault(term, len(vocabulary)) for term in split_terms(text)]
            for text in texts
        ]
        if not vocabulary:
            raise DualencError("BM25: no text contains a word", fix="is the corpus empty?")
        scorer = bm25s.BM25(k1=K1, b=B)
        scorer.index(bm25s.tokenization.Tokenized(ids, vocabulary), show_progress=False)
        return cls(scorer, len(ids))

    def save(self, index: str | os.PathLike[str], checksum: str) -> None:
        """Write the folder inside that of an index.

        Args:
            index: folder of the index.
            checksum: its `items_checksum`.
        """
        is_own = functools.partial(is_folder_of, expected=FORMAT)
        with atomic_folder(Path(index) / FOLDER, is_own, "BM25") as part:
            part.mkdir()
            self.scorer.save(str(part), show_progress=False)
            files = recorded(part, sorted(path.name for path in part.iterdir()))
            head = {"format": FORMAT, "version": self.version, "count": self.count, "ids": checksum}
            Provenance.from_entries({**head, **files}).write(part)

    @classmethod
    def open(cls, index: str | os.PathLike[str], checksum: str, verify: bool = False) -> Lexical:
        """Open the folder inside that of an index, memory-mapped.

        Args:
            index: folder of the index.
            checksum: its `items_checksum`.
            verify: read every file and compare it with its SHA-256.

        Raises:
            DualencError: the folder is missing, corrupt or of another version, or belongs to other
                items.
        """
        folder = Path(index) / FOLDER
        if not folder.is_dir():
            raise DualencError(
                "lacks a BM25 index", fix=f"run dualenc index {index} --bm25", where=index
            )
        own = Provenance.unchecked(folder)
        own.check(folder / META, ["version", "count", "ids", "files"], AGAIN)
        if own.ids != checksum:
            raise DualencError("is of other texts than the index", fix=AGAIN, where=folder)
        if own.version not in VERSIONS:
            raise DualencError(
                "is tokenized differently than by this version", fix=AGAIN, where=folder
            )
        verify_files(folder, own.files, own.sizes, own.files, AGAIN, whole=verify)
        try:
            scorer = bm25s.BM25.load(str(folder), mmap=True, show_progress=False)
            _check_scorer(scorer, own.count)
        # Corrupt files raise many types of errors in numpy, json and bm25s.
        except Exception as error:
            why = " ".join(str(error).split())[:100]
            raise DualencError(
                f"corrupt ({type(error).__name__}: {why})", fix=AGAIN, where=folder
            ) from None
        return cls(scorer, own.count, own.version)

    def search(
        self, query: str, k: int, allowed_rows: np.ndarray | None = None
    ) -> list[tuple[int, float]]:
        """Return the k rows with the highest scores above 0, best first; ties by ascending row.

        Args:
            query: text.
            k: number of results.
            allowed_rows: (N,) bool, the rows that may be returned; document frequencies still count
                all rows.

        Returns:
            Rows with scores.

        Raises:
            DualencError: the files are corrupt.
        """
        terms = split_terms(query, is_query=True, version=self.version)
        in_vocabulary = [term for term in terms if term in self.scorer.vocab_dict]
        if not in_vocabulary:
            return []
        # Opening does not read the arrays, so corrupt row numbers only fail here.
        with explain("BM25 of the index: corrupt", AGAIN):
            scores = self.scorer.get_scores(in_vocabulary)
        matches = scores > 0
        if allowed_rows is not None:
            matches &= allowed_rows
        rows = np.flatnonzero(matches)
        # bm25s.retrieve breaks ties arbitrarily. Keep all rows that tie with the k-th, so that the
        # stable sort decides among them.
        if len(rows) > k:
            rows = rows[scores[rows] >= np.partition(scores[rows], -k)[-k]]
        rows = rows[np.argsort(-scores[rows], kind="stable")[:k]]
        return [(row, float(score)) for row, score in zip(rows.tolist(), scores[rows].tolist())]


def _check_scorer(scorer: Any, count: int) -> None:
    """Raise a `ValueError` if parameters, vocabulary and arrays are not those of N texts."""
    arrays = scorer.scores
    if (type(arrays["num_docs"]), arrays["num_docs"]) != (int, count):
        raise ValueError(f"params has {arrays['num_docs']!r} texts instead of {count}")
    if (
        np.dtype(scorer.dtype).kind != "f"
        or np.dtype(scorer.int_dtype).kind not in "iu"
        or scorer.backend != "numpy"
    ):
        raise ValueError("params has invalid number types")
    # Compressed sparse columns: scores and rows of each term, from its start.
    data, rows, starts = (arrays[name] for name in ("data", "indices", "indptr"))
    if data.dtype.kind != "f" or not {rows.dtype.kind, starts.dtype.kind} <= {"i", "u"}:
        raise ValueError("an array has the wrong number type")
    if not data.ndim == rows.ndim == starts.ndim == 1 or not len(data) == len(rows) == starts[-1]:
        raise ValueError("its arrays have inconsistent lengths")
    terms = scorer.vocab_dict.values()
    if not all(type(term) is int and 0 <= term < len(starts) for term in terms):
        raise ValueError("a term of the vocabulary has an invalid number")


def has_lexical(index: str | os.PathLike[str]) -> bool:
    """Return True if the folder of an index has a BM25 index."""
    return is_folder_of(Path(index) / FOLDER, FORMAT)
