"""Canaries: embed a sample of texts or images again, and compare with their stored vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import faiss
import numpy as np

from dualenc.encoders.dual import DualEncoder, Tower
from dualenc.errors import DualencError
from dualenc.search.checks.causes import Cause, causes
from dualenc.search.checks.findings import Finding, alarm, ok, skipped
from dualenc.search.checks.stored import Stored
from dualenc.search.embed.encode import embed, tower_checksum
from dualenc.search.engines.engine import Engine
from dualenc.search.index.database import STORED_TOLERANCE
from dualenc.search.index.open import Index
from dualenc.search.index.refined import split

NAME = "canaries"
COUNT = 256
"""Texts or images that are embedded again."""
LONGEST = 32
"""How many of them are the longest of the drawn ones, which show a truncation."""
DRAWN = 2048
"""Texts or images that the canaries are chosen from."""
TRIED = 48
"""Deviating canaries that causes are tried on."""
TOLERANCE = 2e-3
"""Difference of cosines that is due to precision: float16, or bfloat16 in the forward pass. For a
compressed index it is beyond the error of the codes."""
MAX_SHARE = 0.01
"""Share of canaries that may deviate."""
EXPLAINED = 0.95
"""Share of the deviating canaries that a cause must explain."""
NEAREST = 10
"""Results among which a canary must find itself, where the error of codes is unknown."""
NO_ROWS = np.empty(0, int)


@dataclass(frozen=True, eq=False)
class Canaries:
    """Texts or images that were embedded again.

    Attributes:
        rows: (n,) their rows, ascending.
        deviate: (n,) bool, True for a vector that the model does not give.
        cosines: (n,) cosine of the stored and the new vector.
        cause: what explains the deviating ones; None if nothing does, or none deviates.
        is_cause_of_all: True if the others fit the cause as well, such as short texts a truncation.
        unreadable: number of images that cannot be read any more, and are not among these rows.
    """

    rows: np.ndarray
    deviate: np.ndarray
    cosines: np.ndarray
    cause: Cause | None = None
    is_cause_of_all: bool = False
    unreadable: int = 0

    @property
    def is_alarm(self) -> bool:
        """True if more canaries deviate than may."""
        return int(self.deviate.sum()) > MAX_SHARE * len(self.rows)


def check_canaries(
    stored: Stored, encoder: DualEncoder | None, problem: str
) -> tuple[Finding, Canaries | None]:
    """Embed texts or images again and compare; name what explains a difference.

    Args:
        stored: the vectors; those of images with `images`.
        encoder: the model; None if it could not be opened.
        problem: why it could not.

    Returns:
        The finding, and the canaries, None if there were none.
    """
    about = stored.provenance
    if encoder is None or about.mapped:
        mapped = f"{about.mapped or 0:,} vectors are mapped from another model"
        return skipped(NAME, problem or mapped), None
    tower = encoder.tower(about.side or "right")
    is_other = about.model_checksum not in (None, tower_checksum(tower))
    other = "the model's weights or settings are others than those recorded, behind the same name"
    kind = about.modality or tower.modality
    rows, reason = _rows(stored, kind, tower)
    if not len(rows):
        return _by_checksum(reason, is_other)
    is_features = about.output == "features"
    dim = tower.feature_dim if is_features else tower.dim
    # Embeddings may have been shortened, features not.
    if dim < stored.dim or (is_features and dim != stored.dim):
        line = f"the model gives {dim} numbers and the vectors have {stored.dim}"
        return alarm(NAME, f"{line}: they are of another model"), None
    again = _Again(stored, rows, is_features)
    if not len(again.rows):
        return _by_checksum(f"all vectors of the {kind}s are zero or not finite", is_other)
    canaries = again.compare(encoder, tower)
    if not len(canaries.rows):
        return _by_checksum(again.problem, is_other)
    numbers = _numbers(canaries, kind)
    if canaries.is_alarm:
        other = other if is_other else ""
        return alarm(NAME, _line(stored, canaries, kind, other), **numbers), canaries
    count = len(canaries.rows)
    if is_other:
        return alarm(NAME, f"{other}; {count} {kind}s have their vectors yet", **numbers), canaries
    if unit := again.not_normalized(canaries):
        return alarm(NAME, unit, **numbers), canaries
    line = f"{count} {kind}s embedded again, least cosine {numbers['least_cosine']:.4f}"
    return ok(NAME, line + _unreadable(canaries), **numbers), canaries


def _by_checksum(reason: str, is_other: bool) -> tuple[Finding, None]:
    """Return the finding without canaries: the checksum of the model alone."""
    if is_other:
        return alarm(NAME, f"the model has another checksum than is recorded; {reason}"), None
    return skipped(NAME, reason), None


def _rows(stored: Stored, kind: str, tower: Tower) -> tuple[np.ndarray, str]:
    """Return rows (n,) to embed again from all over the collection; why, if there are none."""
    if kind == tower.modality == "text":
        return canary_rows(stored), "no whole texts are stored (dualenc index INDEX --texts)"
    if kind == tower.modality == "image":
        is_there = stored.images is not None
        return _drawn(len(stored), COUNT) if is_there else NO_ROWS, stored.image_problem
    return NO_ROWS, f"only texts and images are embedded again, and these are of kind {kind}"


def canary_rows(stored: Stored) -> np.ndarray:
    """Return rows (n,) of whole texts from all over the collection, and some of the longest."""
    if stored.texts is None or not len(stored):
        return np.empty(0, int)
    drawn = _drawn(len(stored), DRAWN)
    lengths = {int(row): len((stored.whole_text(int(row)) or "").strip()) for row in drawn}
    usable = [row for row, length in lengths.items() if length]
    longest = sorted(usable, key=lengths.__getitem__)[-LONGEST:]
    even = np.linspace(0, len(usable) - 1, min(COUNT - LONGEST, len(usable))).astype(int)
    return np.unique([*longest, *(usable[place] for place in even)]).astype(int)


def _drawn(size: int, count: int) -> np.ndarray:
    """Return rows (n,), one from each stretch, so that every part of an appended index has some."""
    edges = np.linspace(0, size, min(count, size) + 1).astype(int)
    return np.random.default_rng(0).integers(edges[:-1], np.maximum(edges[1:], edges[:-1] + 1))


class _Again:
    """Canaries with their stored vectors, to compare with what a tower gives."""

    def __init__(self, stored: Stored, rows: np.ndarray, is_features: bool) -> None:
        self.stored = stored
        self.is_features = is_features
        vectors = stored.vectors(rows)
        # Vectors that are zero or not finite have no cosine; another check names them.
        is_usable = np.isfinite(vectors).all(axis=1) & vectors.any(axis=1)
        self.rows, self.vectors = rows[is_usable], vectors[is_usable]
        self.corpus = stored.items(self.rows)
        self.problem = ""

    def compare(self, encoder: DualEncoder, tower: Tower) -> Canaries:
        """Compare with the model, and find what explains the canaries that deviate."""
        new, unreadable = self._embed_readable(tower)
        cosines, deviate = self._compared(new, np.arange(len(self.rows)))
        canaries = Canaries(self.rows, deviate, cosines, unreadable=unreadable)
        if not canaries.is_alarm:
            return canaries
        tried, others = _some(np.flatnonzero(deviate)), _some(np.flatnonzero(~deviate))
        for cause in causes(encoder, self.stored.provenance.side or "right"):
            with cause.tower() as changed:
                if not self._fit(changed, tried):
                    continue
                is_of_all = not len(others) or self._fit(changed, others)
            return replace(canaries, cause=cause, is_cause_of_all=is_of_all)
        return canaries

    def _embed_readable(self, tower: Tower) -> tuple[np.ndarray, int]:
        """Return the vectors that a tower gives; drop images that it cannot read, and count them.

        Texts are stored, so one without a vector counts as deviating.
        """
        everything = np.arange(len(self.rows))
        if self.corpus.modality != "image":
            return self._embed(tower, everything), 0
        try:
            new = self._embed(tower, everything)
        except DualencError as error:  # none can be read
            self.problem = str(error)
            new = np.zeros_like(self.vectors)
        kept = np.flatnonzero(new.any(axis=1))
        unreadable = len(new) - len(kept)
        self.rows, self.vectors = self.rows[kept], self.vectors[kept]
        self.corpus = self.corpus.take(kept)
        return new[kept], unreadable

    def _fit(self, tower: Tower, places: np.ndarray) -> bool:
        """Return True if a tower gives nearly all of these vectors."""
        return bool(self._deviating(tower, places)[1].mean() <= 1 - EXPLAINED)

    def not_normalized(self, canaries: Canaries) -> str:
        """Return the line of the alarm if the vectors have the right direction, but no length."""
        if self.is_features or not self.stored.is_exact or self.stored.should_be_unit:
            return ""
        lengths = np.linalg.norm(self.vectors, axis=1)
        count = int((np.abs(lengths**2 - 1) > STORED_TOLERANCE).sum())
        if count <= MAX_SHARE * len(lengths):
            return ""
        return (
            f"{count} of {len(lengths)} texts have the model's vectors, not normalized: "
            f"lengths {lengths.min():.3g} to {lengths.max():.3g}"
        )

    def _deviating(self, tower: Tower, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines (n,) of stored and new vectors, and which of them deviate (n,)."""
        return self._compared(self._embed(tower, places), places)

    def _compared(self, new: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines (n,) of stored vectors and new ones (n, D), and which deviate (n,)."""
        if not len(new):
            return np.empty(0), np.empty(0, bool)
        stored = self.vectors[places]
        cosines = cosines_of(new, stored)
        if self.stored.is_exact:
            return cosines, cosines < 1 - TOLERANCE
        index = self.stored.opened
        assert isinstance(index, Index)
        if not self.stored.should_be_unit:
            new = new * np.linalg.norm(stored, axis=1, keepdims=True)
        recoded = decode_codes(index.faiss, new)
        if recoded is None:
            return cosines, ~_finds_itself(index, new, self.rows[places])
        # The same vector gets the same code: it is as far from it as its own code is.
        return cosines, cosines < cosines_of(new, recoded) - TOLERANCE

    def _embed(self, tower: Tower, places: np.ndarray) -> np.ndarray:
        """Return the vectors (n, D) that a tower gives; zero where it gives none."""
        corpus = self.corpus.take(places)
        dim = self.stored.dim
        options: dict[str, Any] = {"output": "features"} if self.is_features else {"dim": dim}
        made = embed(tower, corpus, progress=False, **options)
        vectors = np.zeros((len(places), made.dim), np.float32)
        vectors[made.rows_of(corpus.ids) >= 0] = np.asarray(made.vectors)
        return vectors


def _some(places: np.ndarray) -> np.ndarray:
    """Return at most `TRIED` of the places, evenly."""
    return places[np.linspace(0, len(places) - 1, min(TRIED, len(places))).astype(int)]


def cosines_of(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the cosine (n,) of each pair of vectors (n, D); 0 for a zero vector."""
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return np.einsum("nd,nd->n", left, right) / np.where(lengths == 0, 1, lengths)


def decode_codes(index: Any, vectors: np.ndarray) -> np.ndarray | None:
    """Return what an index would give back for vectors (n, D); None if FAISS cannot tell.

    Args:
        index: filled FAISS index.
        vectors: (n, D) float32.
    """
    base, refined = split(index)
    part = base if refined is None else refined
    if isinstance(part, faiss.IndexHNSW):
        part = faiss.downcast_index(part.storage)
    try:
        return part.sa_decode(part.sa_encode(np.ascontiguousarray(vectors, np.float32)))
    except RuntimeError:
        return None


def _finds_itself(index: Index, vectors: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return whether each vector (n, D) finds its own row (n,) among the nearest."""
    found = index.search_rows(vectors, min(NEAREST, len(index)))[1]
    return (found == rows[:, None]).any(axis=1)


def _numbers(canaries: Canaries, kind: str) -> dict[str, Any]:
    cause = canaries.cause
    return {
        f"{kind}s": len(canaries.rows),
        "deviating": int(canaries.deviate.sum()),
        "least_cosine": round(float(canaries.cosines.min(initial=1)), 6),
        "mean_cosine": round(float(canaries.cosines.mean()), 6) if len(canaries.rows) else 1.0,
        "cause": None if cause is None else cause.kind,
    }


def _unreadable(canaries: Canaries) -> str:
    """Return how many images could not be compared; "" if all were."""
    return f"; {canaries.unreadable} cannot be read" if canaries.unreadable else ""


def _line(stored: Stored, canaries: Canaries, kind: str, other: str) -> str:
    """Return what deviates, and why; `other` says that the model is another one, if it is."""
    deviating = int(canaries.deviate.sum())
    what = f"{deviating} of {len(canaries.rows)} {kind}s have other vectors than the model "
    what += f"gives (mean cosine {canaries.cosines[canaries.deviate].mean():.3f})"
    if place := where_deviating(stored, canaries):
        what += f", {place}"
    what += _unreadable(canaries)
    if canaries.cause is not None:
        return f"{what}: {canaries.cause.line}"
    if other:
        return f"{what}: {other}"
    if kind == "text":
        why = "another model or other weights; prompts, pooling and lengths do not explain it"
        return f"{what}: {why}"
    first = stored.ids[int(canaries.rows[canaries.deviate][0])]
    why = f"the images have changed, such as {first[:40]!r}, or it is another model"
    if stored.provenance.model_checksum is not None:
        why = f"the model is the recorded one, so the images have changed, such as {first[:40]!r}"
    return f"{what}: {why}; other preprocessing does not explain it"


def where_deviating(stored: Stored, canaries: Canaries) -> str:
    """Return the range of rows in which canaries deviate; "" if they are everywhere."""
    if canaries.deviate.all() or isinstance(stored.opened, Engine):
        return ""
    rows: Sequence[int] = canaries.rows[canaries.deviate].tolist()
    inside = (canaries.rows >= rows[0]) & (canaries.rows <= rows[-1])
    is_range = inside.sum() < 0.95 * len(inside) and canaries.deviate[inside].mean() > 0.8
    return f"in rows {rows[0]:,} to {rows[-1]:,}" if is_range else ""
