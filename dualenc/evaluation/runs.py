"""Write run files (TREC) and per-query scores (ndjson)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from dualenc.errors import DualencError
from dualenc.evaluation.metrics import Run, Scores
from dualenc.io.files import atomic_path
from dualenc.io.reading import is_utf8
from dualenc.types import StrPath


def write_trec(path: StrPath, run: Run, tag: str = "dualenc") -> None:
    """Write a run as `query Q0 document rank score tag` lines, ranked as trec_eval ranks them.

    Args:
        path: file to write.
        run: score of each retrieved document by query id.
        tag: name of the system.

    Raises:
        DualencError: if an id is empty, has white space or is not UTF-8.
    """
    check_trec_names((tag,), "the tag")
    check_trec_names(run, "query id")
    with atomic_path(path) as part, open(part, "w", encoding="utf-8") as stream:
        for query, documents in run.items():
            check_trec_names(documents, "document id")
            for rank, document in enumerate(ranked(documents), start=1):
                # Nine digits restore a float32 exactly.
                score = f"{documents[document]:.9g}"
                stream.write(f"{query} Q0 {document} {rank} {score} {tag}\n")


def write_per_query(path: StrPath, per_query: Mapping[str, Scores], dataset: str = "") -> None:
    """Write one JSON object per query and line: `{"dataset": …, "query": …, "ndcg@10": …, …}`.

    Args:
        path: file to write.
        per_query: scores by metric by query id.
        dataset: name of the collection.
    """
    # An id may be a file name that is not UTF-8; its invalid bytes are escaped.
    with (
        atomic_path(path) as part,
        open(part, "w", encoding="utf-8", errors="backslashreplace") as stream,
    ):
        for query, scores in per_query.items():
            row = {"dataset": dataset, "query": query, **scores}
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def ranked(documents: Mapping[str, float]) -> list[str]:
    """Return document ids by descending score; ties by descending id, as in trec_eval."""
    return sorted(documents, key=lambda document: (documents[document], document), reverse=True)


def check_trec_names(names: Iterable[str], what: str) -> None:
    """Raise if a name cannot stand in a TREC file.

    Args:
        names: ids or tags.
        what: kind of the names, for the error.

    Raises:
        DualencError: if a name is empty, has white space or is not UTF-8.
    """
    for name in names:
        # Lone surrogates, from file names that are not UTF-8, crash trec_eval.
        if name.split() != [name] or not is_utf8(name):
            raise DualencError(
                f"{what} {name!r} is empty, holds white space or is not UTF-8, "
                "which TREC files cannot store",
                fix="rename it",
            )
