"""Stored vectors with and without faults, for `dualenc check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dualenc.data import Corpus
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import load_model
from dualenc.encoders.dual import Tower
from dualenc.io.provenance import Provenance
from dualenc.search import Index
from dualenc.search.checks.findings import Finding
from dualenc.search.embed.encode import embed, tower_checksum
from dualenc.search.embed.writer import EmbeddingWriter
from dualenc.search.texts import write_texts
from dualenc.workflows.check_vectors import CheckResult
from tests.helpers import toy


def documents(count: int = 300, seed: int = 0) -> list[str]:
    """Texts of 3 to 50 words of `toy`."""
    random = np.random.default_rng(seed)
    words = [*toy.WORDS, *toy.ANIMALS]
    return [" ".join(random.choice(words, size=random.integers(3, 51))) for _ in range(count)]


def names(count: int) -> list[str]:
    return [f"d{row}" for row in range(count)]


def encoded(tower: Tower, texts: list[str]) -> np.ndarray:
    """(N, D) vectors of texts."""
    return np.array(embed(tower, Corpus(names(len(texts)), texts), progress=False).vectors)


def recorded(model: Path | str, **entries: Any) -> dict[str, Any]:
    """What is recorded about the documents of a model."""
    return {
        "model": str(model),
        "model_checksum": tower_checksum(load_model(model).right),
        "side": "right",
        "modality": "text",
        "output": "embedding",
        "kind": "query-document",
        "normalized": True,
    } | entries


def save_index(
    folder: Path,
    vectors: np.ndarray,
    texts: list[str],
    about: dict[str, Any],
    factory: str = "Flat",
    **options: Any,
) -> Path:
    """An index with whole texts."""
    provenance = Provenance.from_entries(about)
    corpus = Corpus(names(len(texts)), texts)
    snippets = [corpus.text(row) for row in range(len(texts))]
    source = Embeddings(corpus.ids, vectors, provenance, snippets)
    Index.build(source, None, factory, **options).save(folder)
    write_texts(folder, source.ids, texts, Index.open(folder).items_checksum)
    return folder


def save_embeddings(
    folder: Path, vectors: np.ndarray, texts: list[str], about: dict[str, Any]
) -> Path:
    """A folder of embeddings with whatever vectors."""
    writer = EmbeddingWriter(
        folder,
        names(len(texts)),
        vectors.shape[1],
        "float32",
        {},
        about,
        snippet=texts.__getitem__,
        whole_text=texts.__getitem__,
    )
    for number in writer.unwritten():
        rows = writer.ranges[number]
        writer.write(number, vectors[rows.start : rows.stop])
    writer.finish()
    return folder


def finding(result: CheckResult, name: str) -> Finding:
    """The finding of a check."""
    return next(each for each in result.findings if each.name == name)
