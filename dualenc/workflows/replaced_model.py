"""Queries for an index whose model is gone: another text model takes its place.

The vectors of the documents stay. A linear map leads from the other model's vectors of their texts
to the stored ones (`dualenc.workflows.start_map`), and training starts there: with the first
sentences of the texts, usually titles, as queries for their own documents, and with logs if there
are any.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dualenc.data.corpus import Corpus
from dualenc.data.item_lists import Joined
from dualenc.data.logs.click_log import ClickLog
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.index_encoder import IndexEncoder
from dualenc.encoders.load import load_model
from dualenc.errors import DualencError
from dualenc.search.embed.encode import tower_checksum
from dualenc.search.index.open import Index, is_index
from dualenc.search.texts import TextStore, has_texts
from dualenc.types import Side
from dualenc.workflows.adaptation_log import LearnedLog, log_rows
from dualenc.workflows.start_map import first_sentences

NUM_COMPARED = 16
"""Number of texts that are embedded to see whether a model made the vectors of an index."""
SAME_MODEL = 0.9
"""Median cosine similarity from which it did. Vectors of another model are far below."""


def texts_without_model(
    source: str, documents: Embeddings, model: str | None, *, has_log: bool
) -> Sequence[str] | None:
    """Return the texts (N,) of an index if its model is replaced by another one; else None.

    Without a log it always is. With a log, it is if the index keeps its texts, and `model` has
    other weights than those that the index records; or if none are recorded, gives other vectors.

    Args:
        source: folder of the index.
        documents: N documents of the index.
        model: model folder or name; None for that of the index.
        has_log: whether a log is named.

    Raises:
        DualencError: without a log, no model is named, or the index keeps no texts.
    """
    if not has_log and model is None:
        raise DualencError(
            "no log is named",
            fix="give a table of clicks, or if the model of the index is gone another with --model",
        )
    keeps_texts = is_index(source) and has_texts(source)
    if not has_log and not keeps_texts:
        raise DualencError(
            "keeps no texts, from which another model could learn",
            fix=f"add them with `dualenc index {source} DATA --texts`, or name a log",
            where=source,
        )
    if has_log and (model is None or not keeps_texts):
        return None
    texts = TextStore(source, Index.open(source).items_checksum).texts
    if has_log and model is not None and _made(load_model(model), documents, texts):
        return None
    return texts


def _made(encoder: DualEncoder, documents: Embeddings, texts: Sequence[str]) -> bool:
    """Return True if a model made the vectors of an index, by their record or a few texts."""
    if isinstance(encoder, IndexEncoder):
        return True
    side: Side = documents.provenance.side or "right"
    recorded = documents.provenance.model_checksum
    if recorded is not None:
        return tower_checksum(encoder.tower(side)) == recorded
    if encoder.tower(side).modality != "text" or encoder.dim < documents.dim:
        return False
    sample = [texts[row] for row in range(min(len(texts), NUM_COMPARED))]
    vectors = _unit(encoder.encode(sample, side)[:, : documents.dim])
    stored = _unit(np.asarray(documents.vectors[: len(sample)], np.float32))
    # Another prompt or longer texts change some of the vectors, another model all of them.
    return bool(np.median((vectors * stored).sum(axis=1)) >= SAME_MODEL)


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors (n, D) scaled to length one; zero stays zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: np.ndarray = vectors / np.where(lengths == 0, 1, lengths)
    return scaled


def log_of_sentences(texts: Sequence[str], seed: int = 0) -> ClickLog:
    """Return a log in which each document is relevant for its own first sentence.

    Args:
        texts: (N,) texts of the documents.
        seed: random seed of the sample.
    """
    sentences, rows = first_sentences(texts, seed)
    queries = Corpus([str(number) for number in range(len(rows))], sentences)
    finding = f"first sentences of {len(rows):,} documents as queries for them"
    return _graded(queries, np.arange(len(rows)), rows, np.ones(len(rows)), finding)


def with_sentences(learned: LearnedLog, queries: Corpus, sentences: ClickLog) -> ClickLog:
    """Return a log of the relevant pairs of another one and of first sentences.

    Args:
        learned: log with the relevance of its pairs.
        queries: queries of that log.
        sentences: log of `log_of_sentences`.
    """
    pairs = learned.pairs
    weights = np.ones(len(pairs)) if pairs.weights is None else pairs.weights
    own = log_rows(pairs)[pairs.left_id]
    count = len(queries) + len(sentences.queries)
    joined = Corpus(
        [str(number) for number in range(count)],
        Joined([queries.items, sentences.queries.items]),
    )
    return _graded(
        joined,
        np.concatenate([own, len(queries) + sentences.query]),
        np.concatenate([pairs.right_id, sentences.document]),
        np.concatenate([weights, sentences.reward]),
        f"{learned.log.finding}; {sentences.finding}",
    )


def _graded(
    queries: Corpus, query: np.ndarray, document: np.ndarray, reward: np.ndarray, finding: str
) -> ClickLog:
    """Return a log of relevant pairs, without positions, sessions or times."""
    count = len(query)
    return ClickLog(
        queries,
        query,
        document,
        reward.astype(np.float32),
        np.zeros(count, dtype=np.int64),
        np.arange(count),
        np.full(count, np.nan),
        grades_are_relevance=True,
        finding=finding,
        skipped=0,
    )
