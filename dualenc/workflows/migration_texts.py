"""Texts and queries for a migration: the documents of an index, judged queries, past queries."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dualenc.data import Corpus
from dualenc.data.bad_rows import BadRows
from dualenc.data.readers.beir import read_judged_queries
from dualenc.data.readers.sources import open_corpus
from dualenc.errors import DualencError
from dualenc.evaluation.metrics import Qrels
from dualenc.search.index.open import Index, rows_in
from dualenc.search.texts import TextStore, has_texts
from dualenc.workflows.recorded_options import from_record

logger = logging.getLogger("dualenc.workflows")

MAX_JUDGED = 500
"""Maximum number of queries that the report measures with."""
MAX_QUERIES = 10_000
"""Maximum number of queries that decide the order of embedding."""
MIN_OTHER_QUERIES = 100
"""With at least this many other queries, those of the report do not decide the order."""


class Texts(NamedTuple):
    """The documents and queries of a migration.

    Attributes:
        corpus: N documents in the order of the index.
        judged: queries with relevance judgements, which the report measures with; None without any.
        past: queries that decide the order of embedding; None without any.
    """

    corpus: Corpus
    judged: tuple[Corpus, Qrels] | None
    past: Corpus | None


def open_migration_texts(folder: str, index: Index, data: str | None, queries: str | None) -> Texts:
    """Open the documents that an index was made of, checked against it, and queries.

    Args:
        folder: folder of the index.
        index: the index.
        data: source of the documents; None takes the one that the index records.
        queries: table of past queries; None takes those of `data`, if it is a BEIR folder.
    """
    source = data or index.provenance.data or ""
    corpus = _open_documents(folder, index, data, source)
    judged = _open_judged(Path(source), corpus.ids)
    if data is not None and judged is None:
        logger.info(
            "%s: lacks test judgements of these documents (qrels/test.tsv); measuring without them",
            data,
        )
    past = None
    # A user's log shows what is searched; the queries of a test collection are a substitute.
    if queries is not None:
        past = open_corpus(queries, part="queries", modality="text")
    elif judged is not None:
        past = open_corpus(source, part="queries", modality="text")
        # An order by the measured queries would make the measurements too good.
        measured = set(judged[0].ids)
        others = [row for row, name in enumerate(past.ids) if name not in measured]
        if len(others) >= MIN_OTHER_QUERIES:
            past = past.take(others)
    if past is not None:
        past = past.take(_sample(len(past), MAX_QUERIES))
    return Texts(corpus, judged, past)


def _open_documents(folder: str, index: Index, data: str | None, source: str) -> Corpus:
    """Open the texts of an index: those that it keeps, or else those of its data."""
    # Texts beside the index are exactly what was embedded, so they come first.
    if has_texts(folder):
        if data is not None and not Path(data).exists():
            raise DualencError(
                "no such file or folder",
                fix="name a BEIR folder, or leave --data out",
                where=f"--data {data}",
            )
        store = TextStore(folder, index.items_checksum)
        return Corpus(store.ids, store.texts)
    if data or (source and Path(source).exists()):
        corpus = open_corpus(source, modality="text", **from_record(index.provenance, folder))
        return corpus.take(rows_in(corpus, index, folder))
    raise DualencError(
        f"keeps no texts, and its data {source} is gone", fix="name it by --data", where=folder
    )


def _open_judged(folder: Path, indexed_ids: Sequence[str]) -> tuple[Corpus, Qrels] | None:
    """Return test queries of a BEIR folder and their judgements of indexed documents.

    At most `MAX_JUDGED` queries that have a relevant document in the index; None without any.
    """
    if not (folder / "qrels" / "test.tsv").is_file():
        return None
    bad_rows = BadRows(folder)
    queries, qrels = read_judged_queries(folder, "test", indexed_ids, bad_rows)
    bad_rows.report()
    indexed = set(indexed_ids)
    judged: dict[str, dict[str, int]] = {}
    for query, grades in qrels.items():
        own = {name: grade for name, grade in grades.items() if name in indexed}
        # A query whose relevant documents are not indexed would score 0 for every system.
        if max(own.values(), default=0) > 0:
            judged[query] = own
    if not judged or queries.modality != "text":
        return None
    rows = np.flatnonzero([name in judged for name in queries.ids])
    chosen = queries.take(rows[_sample(len(rows), MAX_JUDGED)])
    return chosen, {name: judged[name] for name in chosen.ids}


def _sample(count: int, maximum: int) -> np.ndarray:
    """Return all rows, or a seeded sample of `maximum` of them, in ascending order."""
    return np.sort(np.random.default_rng(0).choice(count, min(count, maximum), replace=False))
