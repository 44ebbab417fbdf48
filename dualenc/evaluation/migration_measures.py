"""Measurements of a migration: two models and maps between them, on the same sample of documents
and queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dualenc.errors import DualencError
from dualenc.evaluation.metrics import Qrels, paired_bootstrap, score_queries
from dualenc.evaluation.retrieval import retrieve
from dualenc.search.migration.maps import neighbours, overlap
from dualenc.search.migration.stages import SHARES, embedded_at
from dualenc.types import StrPath

OLD = "old model, old vectors"
NEW = "new model, new vectors"
METRICS = ("recall@10", "ndcg@10")

System = tuple[np.ndarray, np.ndarray]
"""Queries (Q, D) and documents (n, D) of one space."""
Scores = dict[str, np.ndarray]
"""(Q,) scores of the queries by metric."""


class Sample(NamedTuple):
    """n documents of an index of N in both spaces.

    Attributes:
        old: (n, E) vectors of the old model.
        new: (n, D) vectors of the new model.
        mapped: (n, D) vectors of the old model in the new space, each by a map that was learned
            without it.
        places: (n,) place in the order of embedding, from 0 to N − 1.
        num_documents: N.
    """

    old: np.ndarray
    new: np.ndarray
    mapped: np.ndarray
    places: np.ndarray
    num_documents: int

    def mixed(self, share: float) -> np.ndarray:
        """Vectors (n, D) when a share of the index has new ones: those that are first in the
        order."""
        is_new = self.places < embedded_at(share, self.num_documents)
        return np.where(is_new[:, None], self.new, self.mapped)


def mixed_name(share: float) -> str:
    """The name of the system that serves while a share of the documents has new vectors."""
    if share == 1:
        return NEW
    return (
        f"new model, {share:.0%} new vectors, the rest mapped"
        if share
        else "new model, mapped vectors"
    )


def compared(
    sample: Sample, old: np.ndarray, mapped: np.ndarray, new: np.ndarray
) -> dict[str, System]:
    """The systems of the report by name, with queries (Q, E) old, (Q, E) new and mapped, and (Q, D)
    new."""
    systems = {
        OLD: (old, sample.old),
        "new model, mapped queries, old vectors": (mapped, sample.old),
    }
    return systems | {mixed_name(share): (new, sample.mixed(share)) for share in SHARES}


def judged_scores(
    systems: Mapping[str, System],
    query_ids: Sequence[str],
    document_ids: Sequence[str],
    qrels: Qrels,
) -> dict[str, Scores]:
    """Recall@10 and nDCG@10 of each system by judgements, in the definitions of `score_queries`."""
    scores = {}
    for name, (queries, documents) in systems.items():
        run = retrieve(query_ids, queries, document_ids, documents, depth=10, qrels=qrels)
        per_query = score_queries(qrels, run, (10,)).values()
        scores[name] = {metric: np.array([own[metric] for own in per_query]) for metric in METRICS}
    return scores


def neighbour_scores(systems: Mapping[str, System], rows: np.ndarray) -> dict[str, Scores]:
    """Recall@10 of neighbours of documents as queries, by their rows (Q,): what the new model finds
    is the truth."""
    truth = neighbours(*systems[NEW], rows)
    return {
        name: {"recall@10": overlap(neighbours(*system, rows), truth)}
        for name, system in systems.items()
    }


def summarize(scores: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """For each system and metric the mean, and the difference from the old model, with 95 %
    intervals over queries."""
    rows: list[dict[str, Any]] = []
    for name, own in scores.items():
        row: dict[str, Any] = {"system": name}
        for metric, values in own.items():
            for column, base in (
                (metric, np.zeros_like(values)),
                (f"{metric} - old", scores[OLD][metric]),
            ):
                row[column] = list(paired_bootstrap(base, values))
        rows.append(row)
    return rows


def is_below(rows: Sequence[Mapping[str, Any]], system: str) -> bool:
    """Whether a system is significantly below the old model by judgements; without them nothing
    says so."""
    row = next(row for row in rows if row["system"] == system)
    return is_judged(rows) and bool(row["ndcg@10 - old"][2] < 0)


def is_judged(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether systems were measured by judgements."""
    return "ndcg@10" in rows[0]


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what the report says of the new model beside the old one, as a clause."""
    if not is_judged(rows):
        return "without judgements nothing tells whether it finds more than the old one"
    old, new = (next(row for row in rows if row["system"] == name) for name in (OLD, NEW))
    gain, low, high = new["ndcg@10 - old"]
    found = "neither significantly more nor less"
    if low > 0 or high < 0:
        found = f"significantly {'more' if low > 0 else 'less'}"
    scores = f"nDCG@10 {old['ndcg@10'][0]:.3f} → {new['ndcg@10'][0]:.3f}"
    interval = f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"on the sample it finds {found} than the old one ({scores}, {interval})"


def served_shares(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Shares of new vectors at which judgements do not show the mixed index below the old model,
    and 1 in any case."""
    return [s for s in SHARES if s == 1 or (is_judged(rows) and not is_below(rows, mixed_name(s)))]


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """The rows of `summarize` as text, a mean with its interval in a cell."""
    cells = []
    for row in rows:
        cell: dict[str, object] = {"": row["system"]}
        for name, values in row.items():
            if name != "system":
                sign = "+" if name.endswith("old") else ""
                mean, low, high = (f"{value:{sign}.3f}" for value in values)
                cell[name] = f"{mean} [{low}, {high}]"
        cells.append(cell)
    return cells


def check_report(report: Mapping[str, Any], path: StrPath) -> None:
    """Raise unless a report that was read has facts, systems and served shares of a migration."""
    facts: Any = report.get("facts")
    systems: Any = report.get("systems")
    served: Any = report.get("served")
    is_whole = isinstance(facts, dict) and isinstance(systems, list) and isinstance(served, list)
    # The last system is the new model; the others have its columns.
    columns: set[str] = set()
    if is_whole and systems and isinstance(systems[-1], dict):
        columns = {*systems[-1]}
    is_whole = is_whole and columns >= {"system", "recall@10"} and bool(served)
    if not (
        is_whole
        and all(isinstance(row, dict) and row.keys() == columns for row in systems)
        and {OLD, NEW} <= {str(row["system"]) for row in systems}
        and all(_is_interval(row[name]) for row in systems for name in columns - {"system"})
        and all(share in SHARES for share in served)
        and all(value is None or isinstance(value, str | int | float) for value in facts.values())
    ):
        problem = "not the measurements of a migration"
        remedy = "remove the file, and the same command measures again"
        raise DualencError(f"{path}: {problem}; {remedy}")


def _is_interval(value: Any) -> bool:
    """True for a mean with its lower and upper bound."""
    is_triple = isinstance(value, list) and len(value) == 3
    return is_triple and all(type(number) in (int, float) for number in value)
