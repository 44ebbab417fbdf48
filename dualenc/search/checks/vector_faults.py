"""Vectors that are zero, not finite, not of length one, or the same under different texts."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np

from dualenc.search.checks.findings import Finding, alarm, judged, ok, skipped
from dualenc.search.checks.stored import Sample, Stored
from dualenc.search.index.database import STORED_TOLERANCE

SAME_TEXTS = 10
"""Different texts with one vector that are an alarm. A few are usual: a model that ignores case or
order, or texts that differ behind the model's limit."""


def check_vectors(stored: Stored, sample: Sample) -> list[Finding]:
    """Return the findings "finite", "zero", "length" and "duplicates".

    Args:
        stored: the vectors.
        sample: those that were read.
    """
    vectors = sample.vectors
    with np.errstate(over="ignore", invalid="ignore"):
        squares = np.einsum("nd,nd->n", vectors, vectors)
    is_finite = np.isfinite(squares)
    is_zero = squares == 0
    return [
        _counted(stored, sample, ~is_finite, "not finite"),
        _counted(stored, sample, is_zero, "zero"),
        _lengths(stored, sample, np.where(is_finite & ~is_zero, squares, 1)),
        _duplicates(stored, sample, is_finite & ~is_zero),
    ]


def _counted(stored: Stored, sample: Sample, faulty: np.ndarray, what: str) -> Finding:
    """Return an alarm if any vector is "zero" or "not finite"."""
    name = what.split()[-1]
    count = int(faulty.sum())
    of = f"{len(faulty):,} vectors"
    if not count:
        good = "finite" if name == "finite" else "not zero"
        return ok(name, f"{of} are {good}", vectors=len(faulty), count=0)
    first = stored.ids[sample.rows[int(faulty.argmax())]]
    line = f"{count:,} of {of} are {what}; the first is that of {first[:40]!r}"
    return alarm(name, line, vectors=len(faulty), count=count)


def _lengths(stored: Stored, sample: Sample, squares: np.ndarray) -> Finding:
    """Return an alarm if vectors are not of length one although the record says so."""
    if not stored.should_be_unit:
        return skipped("length", "the record does not say that the vectors are normalized")
    if not stored.is_exact:
        return skipped("length", "compressed codes do not keep lengths")
    wrong = np.abs(squares - 1) > STORED_TOLERANCE
    count = int(wrong.sum())
    line = f"{len(squares):,} vectors have length 1"
    if count:
        lengths = np.sqrt(squares[wrong])
        first = stored.ids[sample.rows[int(wrong.argmax())]]
        line = (
            f"{count:,} of {len(squares):,} vectors are not normalized: lengths "
            f"{lengths.min():.3g} to {lengths.max():.3g}; the first is that of {first[:40]!r}"
        )
    return judged("length", count > 0, line, vectors=len(squares), count=count)


def _duplicates(stored: Stored, sample: Sample, usable: np.ndarray) -> Finding:
    """Return an alarm if one vector belongs to many different texts."""
    if stored.texts is None:
        return skipped("duplicates", "no texts are stored to tell copies from faults")
    if not stored.is_exact:
        return skipped("duplicates", "compressed codes give similar vectors one code")
    places = np.flatnonzero(usable)
    # Half precision, so that vectors that differ by rounding count as one.
    rounded = np.ascontiguousarray(sample.vectors[places].astype(np.float16) + np.float16(0))
    keys = rounded.view(np.dtype((np.void, rounded.dtype.itemsize * rounded.shape[1]))).ravel()
    # Hashed rather than sorted: as fast, and without a copy of all vectors.
    groups = Counter(key.tobytes() for key in keys)
    repeated = {key for key, count in groups.items() if count >= SAME_TEXTS}
    words_of: dict[bytes, set[str]] = {}
    if repeated:
        for place, key in zip(places, keys):
            if (name := key.tobytes()) in repeated:
                text = stored.texts[int(sample.rows[place])]
                words_of.setdefault(name, set()).add(_words(text))
    most = max((len(words) for words in words_of.values()), default=1)
    line = f"no vector of {len(places):,} has {SAME_TEXTS} different texts"
    if most >= SAME_TEXTS:
        line = f"{most:,} different texts have the same vector"
    return judged("duplicates", most >= SAME_TEXTS, line, vectors=len(places), texts=most)


def _words(text: str) -> str:
    """Return the words of a text without case and order, which some models ignore."""
    return " ".join(sorted(re.findall(r"\w+", text.casefold())))
