"""Items to embed, and what a retrieval evaluation reads: queries, a corpus and who is relevant to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dualenc.data.identity import digest_of, items_identity
from dualenc.data.pairs import Items, Modality
from dualenc.errors import DualencError

SNIPPET_LENGTH = 240


class Corpus:
    """N items with ids of their own: documents, queries or images.

    Args:
        ids: (N,) distinct strings.
        items: (N,) raw items, `str` or RGB `PIL.Image`.
        modality: "text" or "image".
        labels: (N,) class numbers, where the source has them.
        class_names: name of each class number.

    Attributes:
        skipped: how many bad samples the reader left out.

    Raises:
        DualencError: unequal lengths, a repeated id, or a label without a name.
    """

    skipped: int = 0

    def __init__(
        self,
        ids: Sequence[str],
        items: Items,
        modality: Modality = "text",
        *,
        labels: Sequence[int] | np.ndarray | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        self.ids = list(ids)
        self.items = items
        self.modality = modality
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int64)
        self.class_names = None if class_names is None else list(class_names)
        self._check()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]

    def identity(self, *, labels: bool = False) -> str:
        """Checksum of ids and items, in hexadecimal: equal for equal data, whatever files and folders it came from.

        Changed texts and images under the same ids give another one. Ids count in full; of more than 2,097,152 texts
        or 65,536 images only a sample is read (`dualenc.data.identity.items_identity` says what counts of the others).

        Args:
            labels: whether class numbers and names count too, for results that depend on them.
        """
        parts = [digest_of(self.ids), items_identity(self.items, self.modality)]
        if labels and self.labels is not None:
            parts += [digest_of(self.labels), digest_of(self.class_names or [])]
        return digest_of(parts)

    def text(self, index: int) -> str:
        """The beginning of a text in one line, to show beside a search result; "" for an image."""
        if self.modality != "text":
            return ""
        line = " ".join(self.items[index][: 2 * SNIPPET_LENGTH].split())
        return line if len(line) <= SNIPPET_LENGTH else line[: SNIPPET_LENGTH - 1].rstrip() + "…"

    def _check(self) -> None:
        if len(self.ids) != len(self.items):
            raise DualencError(f"ids has {len(self.ids)} rows but there are {len(self.items)} items; give one id each")
        if len(set(self.ids)) != len(self.ids):
            first: dict[str, int] = {}
            again = next(i for i, name in enumerate(self.ids) if first.setdefault(name, i) != i)
            raise DualencError(f"ids: {self.ids[again]!r} stands twice (again at row {again}); ids must differ")
        if self.labels is not None and len(self.labels) != len(self.ids):
            raise DualencError(f"labels has {len(self.labels)} rows for {len(self.ids)} items; give one each")
        if self.class_names is not None and self.labels is not None:
            highest = self.labels.max(initial=-1)
            if highest >= len(self.class_names):
                raise DualencError(f"labels: class {highest} has no name among {len(self.class_names)} class_names")


class RetrievalSet(NamedTuple):
    """A retrieval test collection.

    Attributes:
        queries: the queries to run.
        corpus: the documents to search.
        qrels: judgements, `qrels[query id][document id] = grade`; 0 means judged not relevant.
    """

    queries: Corpus
    corpus: Corpus
    qrels: dict[str, dict[str, int]]
