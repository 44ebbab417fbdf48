"""Whole texts of rows in an engine, which stores the beginnings of those that were pushed."""

from __future__ import annotations

import logging
from pathlib import Path

from dualenc.data import Corpus
from dualenc.data.readers.sources import open_corpus
from dualenc.data.store.items import in_utf8
from dualenc.errors import DualencError
from dualenc.io.provenance import Provenance
from dualenc.search.recorded_data import from_record
from dualenc.types import StrPath

logger = logging.getLogger("dualenc.workflows")

CUT = "…"
"""Last character of a text that was cut for display."""


class RowTexts:
    """Whole texts of pushed rows: from the data, unless a client has changed or added the row.

        texts = RowTexts(open_corpus("papers.jsonl"))
        texts.whole("d1", "The beginning of a long…")

    Args:
        corpus: the texts that the pushed vectors were made of, in any order, possibly with more.

    Raises:
        DualencError: the items are not texts.
    """

    def __init__(self, corpus: Corpus) -> None:
        if corpus.modality != "text":
            raise DualencError(
                f"its data consists of {corpus.modality}s, not texts",
                fix="embed the data again with the new model, and push with --replace",
            )
        self.corpus = corpus
        self.row_of = {name: row for row, name in enumerate(corpus.ids)}
        # Kept for each row, which is asked for again when it is measured or has changed.
        self._is_of_data = bytearray(len(corpus))
        self._others: dict[str, bool] = {}

    @classmethod
    def open(cls, folder: StrPath, provenance: Provenance, data: str | None = None) -> RowTexts:
        """Open the data that pushed vectors were made of.

        Args:
            folder: folder that `dualenc push` wrote, for errors.
            provenance: its record.
            data: the data; None takes the recorded one.

        Raises:
            DualencError: the data is gone, or does not consist of texts.
        """
        source = data or provenance.data or ""
        if data is None and not Path(source).exists():
            raise DualencError(
                f"its database stores the beginnings of texts, and the data {source} is gone",
                fix="name it by --data",
                where=folder,
            )
        return cls(open_corpus(source, modality="text", **from_record(provenance, str(folder))))

    def whole(self, id: str, stored: str | None) -> str | None:
        """Return the data's text if `stored` is how dualenc shows that, or else `stored`.

        Args:
            id: id of the row.
            stored: its text in the engine; None for NULL.
        """
        row = self.row_of.get(id)
        if row is not None and stored is not None and stored in self._shown(row):
            self._is_of_data[row] = True
            self._others.pop(id, None)
            return str(self.corpus[row])
        if row is not None:
            self._is_of_data[row] = False
        self._others[id] = stored is not None and stored.endswith(CUT)
        return stored

    def _shown(self, row: int) -> tuple[str, str]:
        """Return how a text is stored when it is pushed: by Qdrant, and by PostgreSQL."""
        shown = in_utf8(self.corpus.text(row))
        return shown, shown.replace("\0", "\ufffd")

    def check(self, location: str) -> None:
        """Raise if no text that was asked for so far is of the data; call it after a sample.

        Args:
            location: the engine, for messages.

        Raises:
            DualencError: texts were cut, and the data has none of them.
        """
        cut = sum(self._others.values())
        if cut and not any(self._is_of_data):
            raise DualencError(
                f"{cut:,} texts are beginnings, and none is of a text in the data",
                fix="name the data that was embedded by --data",
                where=location,
            )

    def report(self, location: str) -> None:
        """Log how many of the texts that were asked for come from where.

        Args:
            location: the engine, for messages.
        """
        from_data, cut = sum(self._is_of_data), sum(self._others.values())
        logger.info(
            "%s: %s texts come from the data, and %s, which clients have written, from the rows",
            location,
            f"{from_data:,}",
            f"{len(self._others):,}",
        )
        if cut:
            message = "%s: %s of them end with %s, as if they were cut"
            logger.warning(message, location, f"{cut:,}", CUT)
