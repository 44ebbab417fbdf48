"""Files of runs and per-query scores; errors name the line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from dualenc.errors import DualencError
from dualenc.evaluation.metrics import Run, Scores
from dualenc.files import atomic_path
from dualenc.reading import open_regular
from dualenc.types import Integers, StrPath


def write_trec(path: StrPath, run: Run, tag: str = "dualenc") -> None:
    """Write a run as `query Q0 document rank score tag` lines, ranked as trec_eval ranks them.

    Scores are written so that reading them gives the same float32; an id with white space is an error.
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
    with atomic_path(path) as part, open(part, "w", encoding="utf-8", errors="backslashreplace") as stream:
        for query, scores in per_query.items():
            row = {"dataset": dataset, "query": query, **scores}
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_ranks(
    path: StrPath,
    queries: Iterable[str],
    ranks: Integers,
    metric: str,
    cutoffs: Sequence[int],
    dataset: str,
) -> None:
    """Write the log of queries by the ranks (A,) of their right answers: hits among the first k, and 1/rank."""
    per_query = {}
    for query, rank in zip(queries, ranks.tolist(), strict=True):
        hits = {f"{metric}@{k}": float(rank <= k) for k in cutoffs}
        per_query[query] = hits | {"mrr": 1 / rank}
    write_per_query(path, per_query, dataset)


def read_per_query(path: StrPath) -> dict[str, Scores]:
    """Read a log of `write_per_query`: the metrics by query id."""
    per_query: dict[str, Scores] = {}
    for place, line in read_lines(path):
        try:
            row = json.loads(line)
            query = row.pop("query")
            row.pop("dataset", None)
            scores = {name: float(value) for name, value in row.items()}
            if not isinstance(query, str) or not all(map(math.isfinite, scores.values())):
                raise ValueError
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
            raise DualencError(
                f"{place}: not a line of a per-query log; evaluate again to write it anew"
            ) from None
        if query in per_query:
            raise DualencError(f"{place}: duplicate query {query}; evaluate again to write the log anew")
        per_query[query] = scores
    if not per_query:
        raise DualencError(f"{path}: the per-query log is empty; evaluate again to write it anew")
    return per_query


def ranked(documents: Mapping[str, float]) -> list[str]:
    """Document ids by descending score, equal scores by descending id, as trec_eval orders them."""
    return sorted(documents, key=lambda document: (documents[document], document), reverse=True)


def check_trec_names(names: Iterable[str], what: str) -> None:
    """Refuse names that TREC files cannot hold, empty or with white space, or that crash trec_eval, not UTF-8."""
    for name in names:
        if len(name.split()) != 1 or name.strip() != name or name.encode(errors="ignore").decode() != name:
            remedy = "which TREC files cannot; rename it"
            raise DualencError(f"{what} {name!r} is empty, holds white space or is not UTF-8, {remedy}")


def read_lines(path: StrPath) -> Iterator[tuple[str, str]]:
    """Lines of a text file that are not blank, each with its place; one line at a time is in memory."""
    try:
        stream = open_regular(path)
    except FileNotFoundError:
        raise DualencError(f"{path}: no such file") from None
    with stream:
        for number, line in enumerate(stream, start=1):
            place = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                reason = f"byte 0x{line[error.start]:02x}"
                raise DualencError(f"{place}: not UTF-8 text ({reason}); save the file as UTF-8") from None
            if text.strip():
                yield place, text
