"""Common column names, one list for all readers.

Matching ignores case, spaces, hyphens and camel case (`docId`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

QUERIES = (
    "query",
    "question",
    "anchor",
    "sentence1",
    "q",
    "search",
    "query_text",
    "search_query",
    "search_term",
)
DOCUMENTS = ("document", "positive", "passage", "answer", "sentence2", "text", "abstract")
TEXTS = (
    *("text", "contents", "content", "passage", "document", "body"),
    *("abstract", "query", "question", "sentence"),
)
TITLE = "title"
CAPTIONS = ("captions", "caption", "text", "texts", "description")
IMAGES = ("image", "img", "image_path")
IMAGE_FILES = ("file_name", "image", "filename", "image_path", "path", "file")
VECTORS = ("vector", "embedding", "embeddings", "vectors", "emb")

DOCUMENT_IDS = (
    *("docid", "doc_id", "document_id", "passage_id", "corpus_id", "pid"),
    *("item_id", "product_id", "article_id", "paper_id", "sku", "asin"),
)
"""Ids of documents, both in tables of documents and in tables that refer to them."""
IDS = ("_id", "id", *DOCUMENT_IDS)
"""Ids of a table's own items."""
QUERY_IDS = ("query_id", "qid", "question_id")
CLICKED = (
    "document",
    "doc",
    "item",
    "product",
    "article",
    "positive",
    "positives",
    "clicked",
    "clicked_id",
)
"""Further columns that may hold document ids in a table of queries; also names of texts."""

CLASS_LABELS = ("label", "labels", "class", "target")
"""Labels of pairs, or classes of images."""
LABELS = (
    *CLASS_LABELS,
    *(
        "relevance",
        "relevant",
        "is_relevant",
        "relevance_label",
        "relevance_score",
        "relevancy",
        "rel",
        "qrel",
    ),
    *(
        "grade",
        "graded_relevance",
        "gain",
        "judgement",
        "judgment",
        "rating",
        "stars",
        "vote",
        "feedback",
        "choice",
    ),
    *("gold", "gold_label", "human_label", "esci_label", "annotation", "verdict"),
    *("score", "scores", "similarity", "similarity_score", "sim", "cosine", "cosine_similarity"),
    *(
        "is_duplicate",
        "duplicate",
        "is_paraphrase",
        "paraphrase",
        "is_match",
        "match",
        "matched",
        "matching",
    ),
    *(
        "is_positive",
        "is_correct",
        "correct",
        "is_answer",
        "is_selected",
        "selected",
        "accepted",
        "is_accepted",
    ),
    *(
        "clicked",
        "click",
        "clicks",
        "is_click",
        "is_clicked",
        "click_count",
        "num_clicks",
        "n_clicks",
    ),
    *("was_clicked", "has_click", "has_clicked", "click_bool", "click_flag", "clicked_flag"),
    *("purchased", "is_purchased", "purchases", "converted", "conversions", "bought"),
)
"""Whether, or how well, the sides of a row match."""
COUNTS = ("clicks", "click_count", "num_clicks", "n_clicks", "purchases", "conversions")
"""The labels that count events, so that any number above 0 matches."""
KINDS = (
    *CLASS_LABELS,
    "gold",
    "gold_label",
    "human_label",
    "choice",
    "annotation",
    "verdict",
    "esci_label",
)
"""The labels whose numbers may be classes, such as entailment and contradiction, not grades."""


NO_COLUMN = "none"
"""Value of a column option to read no such column, even if one has a common name; also ""."""


def is_none(name: str | None) -> bool:
    """Return True if an argument says to read no such column."""
    return name in ("", NO_COLUMN)


def normalized(name: str) -> str:
    """Return a column name in snake_case."""
    words = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name.strip())
    return re.sub(r"[\s.-]+", "_", words).lower()


def columns_named(columns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the columns that have one of these `names`, in the order of the names.

    For each name, an exact match comes before other spellings.
    """
    known = list(columns)
    # The order of the names is one of preference, and independent of the order of the columns.
    found: list[str] = []
    for name in names:
        own = [column for column in known if normalized(column) == name or column == name]
        found += sorted(own, key=lambda column: column != name)
    return list(dict.fromkeys(found))


def first_of(columns: Iterable[str], names: Iterable[str], but: str | None = None) -> str | None:
    """Return the first column that has one of these `names`, other than `but`; None without one."""
    return next((name for name in columns_named(columns, names) if name != but), None)
