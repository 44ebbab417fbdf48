"""Relevance judgements of a BEIR folder as a log in which grades are relevance."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualenc.data.bad_rows import BadRows
from dualenc.data.item_lists import distinct_items
from dualenc.data.logs.log_part import LogPart
from dualenc.data.readers.beir import read_judged_queries
from dualenc.data.store.items import rows_of
from dualenc.data.store.vector_shards import Embeddings


def read_judgements(folder: Path, split: str, documents: Embeddings, bad_rows: BadRows) -> LogPart:
    """Read the judgements of a split; a grade is a reward, and 0 is judged not relevant.

    Args:
        folder: BEIR folder, or collection of the hub.
        split: the qrels file, without `.tsv`.
        documents: the index.
        bad_rows: counts bad lines, and judged documents that are not in the index.
    """
    queries, qrels = read_judged_queries(folder, split, documents.ids, bad_rows)
    judged = [
        (query, document, grade)
        for query, grades in qrels.items()
        for document, grade in grades.items()
    ]
    document_rows = rows_of(documents.ids, [document for _, document, _ in judged])
    query_rows = rows_of(queries.ids, [query for query, _, _ in judged])
    grades = np.array([grade for _, _, grade in judged], np.float32)
    known = document_rows >= 0
    bad_rows.require(int((grades[known] > 0).sum()), "judgement of a document of the index")
    used, number = np.unique(query_rows[known], return_inverse=True)
    # Equal texts are one query, even if the folder gives them two ids.
    items, merged = distinct_items(queries.items, used)
    count = int(known.sum())
    return LogPart(
        items=items,
        modality=queries.modality,
        shape="judgements",
        rows=len(judged),
        query=merged[number],
        document=document_rows[known],
        # A grade below 0 says, like 0, that the document is not relevant.
        reward=np.maximum(grades[known], 0),
        position=np.zeros(count, np.int64),
        session=np.arange(count),
        time=np.full(count, np.nan),
        missing={document for (_, document, _), row in zip(judged, document_rows) if row < 0},
        grades_are_relevance=True,
    )
