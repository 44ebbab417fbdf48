"""Documents and queries of a migration: what an index was made of, judged queries, past queries."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dualenc.data import Corpus
from dualenc.data.bad_rows import BadRows
from dualenc.data.readers.beir import has_test_judgements, read_judged_queries
from dualenc.data.readers.sources import open_corpus
from dualenc.encoders import load_model
from dualenc.errors import DualencError
from dualenc.evaluation.metrics import Qrels
from dualenc.search.checks.canaries import check_canaries
from dualenc.search.checks.stored import Stored
from dualenc.search.index.open import Index, rows_in
from dualenc.search.recorded_data import check_readable, open_recorded
from dualenc.search.searcher import check_encoder, recorded_model
from dualenc.search.texts import TextStore, has_texts
from dualenc.types import Modality

logger = logging.getLogger("dualenc.workflows")

MAX_JUDGED = 500
"""Maximum number of queries that the report measures with."""
MAX_QUERIES = 10_000
"""Maximum number of queries that decide the order of embedding."""
MIN_OTHER_QUERIES = 100
"""With at least this many other queries, those of the report do not decide the order."""


class Documents(NamedTuple):
    """The documents and queries of a migration.

    Attributes:
        corpus: N documents in the order of the index.
        judged: queries with relevance judgements, which the report measures with; None without any.
        past: queries that decide the order of embedding; None without any.
    """

    corpus: Corpus
    judged: tuple[Corpus, Qrels] | None
    past: Corpus | None


def open_migration_documents(
    folder: str,
    index: Index,
    data: str | None,
    queries: str | None,
    takes: Collection[Modality],
    *,
    allow_outside: bool = False,
) -> Documents:
    """Open the documents that an index was made of, checked against it, and queries.

    Texts are compared with what was embedded, images by their ids.

    Args:
        folder: folder of the index.
        index: the index.
        data: source of the documents; None takes the one that the index records.
        queries: table of past queries; None takes those of `data`, if it is a BEIR folder.
        takes: modalities of queries that the models take.
        allow_outside: whether image paths may lead out of the folder of a table.
    """
    source = data or index.provenance.data or ""
    corpus = _open_documents(folder, index, data, source, allow_outside)
    judged = open_judged(Path(source), corpus.ids, takes)
    if data is not None and judged is None:
        logger.info(
            "%s: lacks test judgements of these documents (qrels/test.tsv); measuring without them",
            data,
        )
    past = None
    # A user's log shows what is searched; the queries of a test collection are a substitute.
    if queries is not None:
        # A model with a side for images and one for texts leaves it to the data.
        only = next(iter(takes)) if len(takes) == 1 else None
        past = open_corpus(queries, part="queries", modality=only, allow_outside=allow_outside)
        _check_takes(queries, past.modality, takes)
    elif judged is not None:
        past = open_corpus(source, part="queries", modality=judged[0].modality)
        # An order by the measured queries would make the measurements too good.
        measured = set(judged[0].ids)
        others = [row for row, name in enumerate(past.ids) if name not in measured]
        if len(others) >= MIN_OTHER_QUERIES:
            past = past.take(others)
    if past is not None:
        past = past.take(_sample(len(past), MAX_QUERIES))
    return Documents(corpus, judged, past)


def _check_takes(queries: str, modality: Modality, takes: Collection[Modality]) -> None:
    """Raise unless the models take queries of a modality."""
    if modality not in takes:
        accepted = " or ".join(f"{name}s" for name in sorted(takes))
        raise DualencError(
            f"holds {modality}s, and the models take {accepted}",
            fix="name other queries",
            where=queries,
        )


def _open_documents(
    folder: str, index: Index, data: str | None, source: str, allow_outside: bool
) -> Corpus:
    """Open the documents of an index: the texts that it keeps, or else those of its data."""
    is_text = index.provenance.modality == "text"
    # Texts beside the index are exactly what was embedded, so they come first.
    if is_text and has_texts(folder):
        if data is not None and not Path(data).exists():
            raise DualencError(
                "no such file or folder",
                fix="name a BEIR folder, or leave --data out",
                where=f"--data {data}",
            )
        store = TextStore(folder, index.items_checksum)
        return Corpus(store.ids, store.texts)
    if is_text and data is None and not (source and Path(source).exists()):
        raise DualencError(
            f"keeps no texts, and its data {source} is gone", fix="name it by --data", where=folder
        )
    corpus = open_recorded(index.provenance, folder, data, allow_outside=allow_outside)
    return corpus.take(rows_in(corpus, index, folder))


def open_judged(
    folder: Path, indexed_ids: Sequence[str], takes: Collection[Modality]
) -> tuple[Corpus, Qrels] | None:
    """Return test queries of a BEIR folder and their judgements of indexed documents.

    Args:
        folder: the folder.
        indexed_ids: ids of the indexed documents, or of the rows of a table.
        takes: modalities of queries that the model takes.

    Returns:
        At most `MAX_JUDGED` queries that have a relevant document in the index; None without any.
    """
    if not has_test_judgements(folder):
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
    if not judged or queries.modality not in takes:
        return None
    rows = np.flatnonzero([name in judged for name in queries.ids])
    chosen = queries.take(rows[_sample(len(rows), MAX_JUDGED)])
    return chosen, {name: judged[name] for name in chosen.ids}


def _sample(count: int, maximum: int) -> np.ndarray:
    """Return all rows, or a seeded sample of `maximum` of them, in ascending order."""
    return np.sort(np.random.default_rng(0).choice(count, min(count, maximum), replace=False))


def check_same_images(folder: str, index: Index, images: Corpus, device: torch.device) -> None:
    """Raise if images are not those that an index was made of, as far as a sample tells.

    Up to 256 of them are embedded again by the model of the index. Without it they are matched by
    id alone, and a line says so.

    Args:
        folder: folder of the index.
        index: the index.
        images: its N images, in its order.
        device: device of the model.

    Raises:
        DualencError: too many of them have other vectors.
        BadSample: they cannot be read.
    """
    check_readable(images)
    encoder, problem = None, ""
    try:
        encoder = load_model(recorded_model(index.provenance, Path(folder)), device)
        check_encoder(encoder, index.provenance, index.dim, folder)
    except DualencError as error:
        encoder, problem = None, str(error)
    stored = replace(Stored.open(folder), images=images)
    finding, canaries = check_canaries(stored, encoder, problem)
    if canaries is None:
        logger.warning(
            "%s: images are matched by id, not compared with what was embedded: %s",
            folder,
            finding.line,
        )
    elif finding.state == "alarm":
        raise DualencError(
            f"the images are not what was embedded: {finding.line}",
            fix="name those that were by --data, or build the index again",
            where=folder,
        )
    else:
        logger.info("%s: compared with what was embedded: %s", folder, finding.line)
