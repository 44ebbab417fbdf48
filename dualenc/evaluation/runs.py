"""Files of runs and per-query scores."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from dualenc.errors import DualencError
from dualenc.evaluation.metrics import Run, Scores
from dualenc.io.files import atomic_path
from dualenc.types import StrPath


def write_trec(path: StrPath, run: Run, tag: str = "dualenc") -> None:
    """Write a run as `query Q0 document rank score tag` lines, ranked as trec_eval ranks them.

    Scores are written so that reading them gives the same float32; an id with white space is an
    error.
    """
    check_trec_names((tag,), "the tag")
    check_trec_names(run, "query id")
    with atomic_path(path) as part, open(part, "w", encoding="utf-8") as stream:
        for query, documents in run.items():
            check_trec_names(documents, "document id")
            for rank, document in enumerate(ranked(documents), start=1):
                stream.write(f"{query} Q0 {document} {rank} {documents[document]:.9g} {tag}\n")


def write_per_query(path: StrPath, per_query: Mapping[str, Scores], dataset: str = "") -> None:
    """Write one JSON object per query and line: `{"dataset": …, "query": …, "ndcg@10": …, …}`."""
    # An id may be a file name that is not UTF-8: its invalid bytes are escaped as in JSON.
    with (
        atomic_path(path) as part,
        open(part, "w", encoding="utf-8", errors="backslashreplace") as stream,
    ):
        for query, scores in per_query.items():
            row = {"dataset": dataset, "query": query, **scores}
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def ranked(documents: Mapping[str, float]) -> list[str]:
    """Document ids by descending score, equal scores by descending id, as trec_eval orders them."""
    return sorted(documents, key=lambda document: (documents[document], document), reverse=True)


def check_trec_names(names: Iterable[str], what: str) -> None:
    """Refuse names that TREC files cannot hold, empty or with white space, or that crash trec_eval,
    not UTF-8."""
    for name in names:
        if (
            len(name.split()) != 1
            or name.strip() != name
            or name.encode(errors="ignore").decode() != name
        ):
            remedy = "which TREC files cannot; rename it"
            raise DualencError(
                f"{what} {name!r} is empty, holds white space or is not UTF-8, {remedy}"
            )
