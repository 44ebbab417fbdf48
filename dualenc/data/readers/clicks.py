"""Clicks: queries with ids of relevant documents in an index."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualenc.data.item_lists import Picked, VectorItems
from dualenc.data.logs.click_log import LogColumns
from dualenc.data.logs.log_table import by_appearance
from dualenc.data.logs.open_log import open_log
from dualenc.data.pairs import PairDataset
from dualenc.data.readers.column_names import NO_COLUMN
from dualenc.data.store.vector_shards import Embeddings
from dualenc.errors import DualencError
from dualenc.types import OnError


class IndexPairs(PairDataset):
    """Queries paired with relevant documents of an existing index.

    The pairs come from click logs, relevance judgements or questions with answers. Left items are
    the distinct queries. Right items are the vectors of all N documents, in index order: each is a
    candidate of the loss. Ids that are not among the documents are left out, counted and reported.

        IndexPairs("clicks.csv", open_documents("index"))

    Args:
        source: table with a query (a text, or a vector) and a document id, or a list of ids, in
            each row; several rows of a query give several positives. Or a BEIR folder:
            queries.jsonl (or vectors) and qrels/SPLIT.tsv.
        documents: N vectors with ids, see `dualenc.search.documents.open_documents`.
        query_column: column of queries, if a table does not use a common name.
        document_column: column of document ids, likewise.
        label_column: column that is 0 in rows without a click; by default a column with a common
            name (clicked, label, score, …) that holds labels. `none` reads no labels.
        split: which split of a BEIR folder, folder of tables, saved data set or hub name.
        on_error: "skip" leaves out, counts and reports bad rows; "raise" stops at the first.
    """

    def __init__(
        self,
        source: str | Path,
        documents: Embeddings,
        *,
        query_column: str | None = None,
        document_column: str | None = None,
        label_column: str | None = None,
        split: str = "train",
        on_error: OnError = "skip",
    ) -> None:
        if not hasattr(documents, "ids"):
            raise DualencError(
                f"documents is {type(documents).__name__}",
                fix="give open_documents(INDEX)",
                where="IndexPairs",
            )
        columns = LogColumns(
            query=query_column,
            document=document_column,
            clicked=label_column,
            position=NO_COLUMN,
            time=NO_COLUMN,
        )
        log = open_log(source, documents, columns=columns, split=split, on_error=on_error)
        clicks = np.flatnonzero(log.reward > 0)
        first, left_id = by_appearance(log.query[clicks])
        # Several clicks on one document are one pair, in the place of the first.
        pairs, _ = by_appearance(left_id * len(documents) + log.document[clicks])
        super().__init__(
            Picked(log.queries.items, log.query[clicks[first]]),
            VectorItems(documents.vectors),
            left_id[pairs],
            log.document[clicks[pairs]],
            left_modality=log.queries.modality,
            right_modality="vector",
        )
        self.documents = documents
        self.skipped = log.skipped
