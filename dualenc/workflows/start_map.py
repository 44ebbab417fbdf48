"""The linear map from a text model into the space of an index of another model: a regression from
its vectors of texts, and of their first sentences, to the stored vectors of these documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dualenc.data.corpus import Corpus
from dualenc.data.sentences import first_sentence
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders.text import TextEncoder
from dualenc.encoders.vector import VectorTower
from dualenc.search.embed.encode import embed
from dualenc.search.migration.maps import fit

MAX_SENTENCES = 20_000
"""Maximum number of documents whose first sentences are queries."""
MAX_FITTED = 5_000
"""Maximum number of documents that the map is fitted on."""


def first_sentences(texts: Sequence[str], seed: int = 0) -> tuple[list[str], np.ndarray]:
    """Return the first sentences of texts, often titles, and the rows (n,) of these texts.

        first_sentences(["How to resume. Add --resume."])  # ["How to resume."], [0]

    Args:
        texts: (N,) texts; of more than 20,000, a sample is taken.
        seed: random seed of the sample.
    """
    drawn = np.random.default_rng(seed).permutation(len(texts))[:MAX_SENTENCES]
    sentences, rows = [], []
    for row in np.sort(drawn).tolist():
        sentence = first_sentence(texts[row])
        if sentence:
            sentences.append(sentence)
            rows.append(row)
    return sentences, np.array(rows, dtype=np.int64)


def start_map(
    model: TextEncoder,
    texts: Sequence[str],
    documents: Embeddings,
    work: Path,
    *,
    progress: bool = True,
) -> VectorTower:
    """Fit the map from a model's query vectors to those of documents, as a trainable tower.

    Args:
        model: text model; its query side embeds a sample of the texts.
        texts: (N,) texts of the documents.
        documents: N documents of the index.
        work: folder for the vectors of the sample.
        progress: show a progress bar.
    """
    rows = np.sort(np.random.default_rng(0).permutation(len(texts))[:MAX_FITTED])
    sample = [texts[row] for row in rows.tolist()]
    sentences, own = first_sentences(sample)
    ids = [str(number) for number in range(len(sample) + len(own))]
    bar = "embed documents" if progress else False
    embedded = embed(model.left, Corpus(ids, [*sample, *sentences]), work / "start", progress=bar)
    # Texts that could not be embedded are left out.
    used = np.concatenate([rows, rows[own]])[np.array(list(embedded.ids), dtype=np.int64)]
    targets = np.asarray(documents.vectors[used], np.float32)
    return fit(np.asarray(embedded.vectors[:], np.float32), targets, "rescaled").tower()
