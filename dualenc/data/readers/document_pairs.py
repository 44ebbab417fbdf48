"""Pairs from documents without queries: a part of each text is the query for the rest."""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from tqdm import tqdm

from dualenc.data.bad_rows import report_once
from dualenc.data.corpus import Corpus
from dualenc.data.item_lists import distinct_items
from dualenc.data.pairs import PairDataset
from dualenc.data.readers.sources import open_corpus
from dualenc.data.sentences import MAX_CHARACTERS, Span, sections, sentences
from dualenc.data.store.identity import item_identity
from dualenc.errors import DualencError
from dualenc.types import Integers, OnError, StrPath

logger = logging.getLogger("dualenc.data")

DocumentPart: TypeAlias = Literal["title", "first-sentence", "sentence", "heading"]
"""Part of a document that is the query for the rest of it."""
SHARE_KEPT = 0.1
"""Share of the random sentences that stay in their documents (Lee, Chang and Toutanova 2019)."""
MIN_CHARACTERS = 10
"""Length from which a random sentence is a query."""
_LEFT_OUT: dict[DocumentPart, str] = {
    "title": "have no title, or no text beside it",
    "first-sentence": "have a single sentence",
    "sentence": f"have a single sentence, or none of {MIN_CHARACTERS} characters",
    "heading": "have no heading (# Heading) with text below it",
}
_OTHER_TITLES = ", or name the column of titles (title_column)"
# What separates a title from the text when a text repeats it: a line end, or "Gout: ", "Gout. ".
_BEHIND_TITLE = re.compile(r"[ \t]*(?:[.:;|–—-](?=\s|$)|(?=[\r\n])|$)\s*")


class Cut(NamedTuple):
    """A query in a text, and the one or two parts of the text that are its document.

        Cut(Span(0, 9), Span(9, 80))

    Attributes:
        query: the query; empty if it is the title.
        first: first part of the document.
        second: second part, such as what follows a sentence.
    """

    query: Span
    first: Span
    second: Span = Span(0, 0)


class DocumentPairs(PairDataset):
    """Pairs from documents without queries: a part of each text is the query, the rest its answer.

    Titles, first sentences and headings are often like a short query. A random sentence is that of
    the Inverse Cloze Task (Lee, Chang and Toutanova 2019, arXiv:1906.00300); one in ten stays in
    its document. Documents without such a part are left out, and a line counts them.

        DocumentPairs("docs.jsonl", query="first-sentence")[0].left

    A document is what `open_corpus` reads. Its title is prepended to the text on the right, except
    where it is the query. Equal texts of one side share an id: the parts of a document that is
    stored in rows with the same title are all positives of it. The sections of a document are
    negatives of one another's headings.

    Args:
        path: file, folder, glob, or hub name of texts, see `open_corpus`.
        query: "title": the column of titles. "first-sentence": the first sentence or line.
            "sentence": a random sentence. "heading": each markdown heading of a text, for its
            section.
        text_column: column of texts; by default `text` or another common name.
        title_column: column of titles; by default `title`, unless `text_column` is named.
        split: which split of a folder of tables, saved data set or hub name.
        quotes: whether `"` encloses fields, see `open_corpus`.
        seed: random seed of the sentences; each also depends on its text, not on other texts.
        on_error: "skip" leaves out, counts and reports bad samples; "raise" stops at the first.

    Raises:
        DualencError: the source holds no texts, or none has such a part.
    """

    def __init__(
        self,
        path: str | Path,
        query: DocumentPart = "title",
        *,
        text_column: str | None = None,
        title_column: str | None = None,
        split: str = "train",
        quotes: bool | None = None,
        seed: int = 0,
        on_error: OnError = "skip",
    ) -> None:
        if query not in get_args(DocumentPart):
            raise DualencError(
                f"{query!r} is not a part of a document",
                fix=f"choose {', '.join(get_args(DocumentPart))}",
                where="query",
            )
        corpus = open_corpus(
            path,
            modality="text",
            text_column=text_column,
            title_column=title_column,
            split=split,
            quotes=quotes,
            on_error=on_error,
        )
        if corpus.modality != "text":
            raise DualencError(
                f"holds items of modality {corpus.modality}, and queries are cut out of texts",
                fix="name the column of texts (text_column)",
                where=path,
            )
        documents = Documents(corpus)
        rows, spans = _cut_all(path, documents, query, seed)
        everything = np.arange(len(rows))
        left = Excerpts(documents, rows, spans[:, :2], titles=query == "title")
        right = Excerpts(documents, rows, spans[:, 2:], titles=query != "title")
        left_items, left_id = distinct_items(left, everything)
        right_items, right_id = distinct_items(right, everything)
        super().__init__(left_items, right_items, left_id, right_id)
        self.has_distinct_items = True
        self.skipped = corpus.skipped


class Documents:
    """Titles and texts of a corpus of texts, (title, text) by position; "" without a title.

    A title that the text repeats at its beginning is removed from the text.
    """

    def __init__(self, corpus: Corpus) -> None:
        self.items = corpus.items
        self.titles = corpus.titles

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> tuple[str, str]:
        text = self.items[row]
        title = "" if self.titles is None else self.titles[row].strip()
        if title:
            # The corpus has the title prepended.
            text = text.removeprefix(title).lstrip()
            match = _BEHIND_TITLE.match(text, len(title)) if text.startswith(title) else None
            text = text if match is None else text[match.end() :]
        return title, text


class Excerpts:
    """Parts of documents as texts, cut out on access: only their positions are in memory.

    Args:
        documents: the documents.
        rows: document of each excerpt, (M,).
        spans: start and end of one or two parts of its text, (M, 2) or (M, 4).
        titles: whether to put the title of the document before them.
    """

    def __init__(
        self, documents: Documents, rows: Integers, spans: Integers, *, titles: bool
    ) -> None:
        self.documents = documents
        self.rows = rows
        self.spans = spans
        self.titles = titles

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> str:
        title, text = self.documents[int(self.rows[index])]
        parts = [title if self.titles else ""]
        parts += [text[start:end] for start, end in self.spans[index].reshape(-1, 2).tolist()]
        return " ".join(part.strip() for part in parts if part.strip())

    def item_identity(self, index: int, read: bool) -> bytes:
        """Return the text, or its positions with the metadata of the document."""
        if read:
            return self[index].encode(errors="surrogatepass")
        own = item_identity(self.documents.items, int(self.rows[index]), read)
        return self.spans[index].astype("<i8").tobytes() + own


def _cut_all(
    path: StrPath, documents: Documents, query: DocumentPart, seed: int
) -> tuple[Integers, Integers]:
    """Return the document (M,) and the spans (M, 6) of each pair; report documents without one."""
    cutters: dict[DocumentPart, Callable[[str, str], Iterator[Cut]]] = {
        "title": _title,
        "first-sentence": _first_sentence,
        "sentence": partial(_random_sentence, seed=seed),
        "heading": _headings,
    }
    # Compact, since there may be millions.
    rows, spans = array("q"), array("q")
    for row in tqdm(range(len(documents)), desc="cutting queries", delay=2, leave=False):
        for cut in cutters[query](*documents[row]):
            rows.append(row)
            spans.extend(itertools.chain.from_iterable(cut))
    if not rows:
        raise DualencError(
            f"no query {query!r}: all {len(documents):,} documents {_LEFT_OUT[query]}",
            fix=f"choose another part as query{_OTHER_TITLES if query == 'title' else ''}",
            where=path,
        )
    used = len(set(rows))
    found = f"{path}: {len(rows):,} pairs of a {query} and its text"
    if used < len(documents):
        missing = len(documents) - used
        report_once(
            f"{found}; left out {missing:,} of {len(documents):,} documents, "
            f"which {_LEFT_OUT[query]}"
        )
    else:
        logger.info("%s", found)
    return np.array(rows), np.array(spans).reshape(len(rows), 6)


def _title(title: str, text: str) -> Iterator[Cut]:
    """Yield the whole text for the title."""
    if title and text:
        yield Cut(Span(0, 0), Span(0, len(text)))


def _first_sentence(title: str, text: str) -> Iterator[Cut]:
    """Yield the first sentence and what follows it."""
    spans = list(itertools.islice(sentences(text), 2))
    if len(spans) == 2:
        yield Cut(_shortened(spans[0]), Span(spans[0].end, len(text)))


def _random_sentence(title: str, text: str, seed: int) -> Iterator[Cut]:
    """Yield a random sentence and what surrounds it, at times with the sentence."""
    spans = list(sentences(text))
    queries = [span for span in spans if span.end - span.start >= MIN_CHARACTERS]
    if len(spans) < 2 or not queries:
        return
    # By the text: copies of it are then cut alike, and no copy answers with another's query.
    data = f"{seed} {text}".encode(errors="surrogatepass")
    digest = hashlib.blake2b(data, digest_size=16).digest()
    drawn = queries[int.from_bytes(digest[:8], "little") % len(queries)]
    if int.from_bytes(digest[8:], "little") < SHARE_KEPT * 2**64:
        yield Cut(_shortened(drawn), Span(0, len(text)))
    else:
        yield Cut(_shortened(drawn), Span(0, drawn.start), Span(drawn.end, len(text)))


def _headings(title: str, text: str) -> Iterator[Cut]:
    """Yield each heading with its section."""
    for heading, section in sections(text):
        if heading.of(text) and section.of(text):
            yield Cut(_shortened(heading), section)


def _shortened(span: Span) -> Span:
    """Return a span of at most as many characters as a query may have."""
    return Span(span.start, min(span.end, span.start + MAX_CHARACTERS))
