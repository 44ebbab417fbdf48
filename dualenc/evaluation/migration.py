"""Measurements of a migration: two models and maps between them, on the same sample of documents and queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dualenc.evaluation.metrics import Qrels, paired_bootstrap, score_queries
from dualenc.evaluation.retrieval import retrieve
from dualenc.search.maps import neighbours, overlap
from dualenc.search.migrate import SHARES, embedded_at

OLD = "old model, old vectors"
NEW = "new model, new vectors"
METRICS = {"recall@10": "recall", "ndcg@10": "nDCG"}

System = tuple[np.ndarray, np.ndarray]
"""Queries (Q, D) and documents (n, D) of one space."""
Scores = dict[str, np.ndarray]
"""(Q,) scores of the queries by metric."""


class Sample(NamedTuple):
    """n documents of an index of N in both spaces.

    Attributes:
        old: (n, E) vectors of the old model.
        new: (n, D) vectors of the new model.
        mapped: (n, D) vectors of the old model in the new space, each by a map that was learned without it.
        places: (n,) place in the order of embedding, from 0 to N − 1.
        num_documents: N.
    """

    old: np.ndarray
    new: np.ndarray
    mapped: np.ndarray
    places: np.ndarray
    num_documents: int

    def mixed(self, share: float) -> np.ndarray:
        """Vectors (n, D) when a share of the index has new ones: those that are first in the order."""
        is_new = self.places < embedded_at(share, self.num_documents)
        return np.where(is_new[:, None], self.new, self.mapped)


def mixed_name(share: float) -> str:
    """The name of the system that serves while a share of the documents has new vectors."""
    if share == 1:
        return NEW
    return f"new model, {share:.0%} new vectors, the rest mapped" if share else "new model, mapped vectors"


def compared_systems(
    sample: Sample, old_queries: np.ndarray, mapped_queries: np.ndarray, new_queries: np.ndarray
) -> dict[str, System]:
    """The systems of the report by name; queries (Q, E) of the old model, (Q, E) mapped ones, (Q, D) of the new one."""
    systems = {
        OLD: (old_queries, sample.old),
        "new model, mapped queries, old vectors": (mapped_queries, sample.old),
    }
    for share in SHARES:
        systems[mixed_name(share)] = (new_queries, sample.mixed(share))
    return systems


def judged_scores(
    systems: Mapping[str, System], query_ids: Sequence[str], document_ids: Sequence[str], qrels: Qrels
) -> dict[str, Scores]:
    """Recall@10 and nDCG@10 of each system by judgements, in the definitions of `score_queries`."""
    scores = {}
    for name, (queries, documents) in systems.items():
        run = retrieve(query_ids, queries, document_ids, documents, depth=10, qrels=qrels)
        per_query = score_queries(qrels, run, (10,)).values()
        scores[name] = {metric: np.array([own[metric] for own in per_query]) for metric in METRICS}
    return scores


def neighbour_scores(systems: Mapping[str, System], rows: np.ndarray) -> dict[str, Scores]:
    """Recall@10 of neighbours of documents as queries, by their rows (Q,): what the new model finds is the truth."""
    truth = neighbours(*systems[NEW], rows)
    return {
        name: {"recall@10": overlap(neighbours(*system, rows), truth)} for name, system in systems.items()
    }


def summarize(scores: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """For each system and metric the mean, and the difference from the old model, with 95 % intervals over queries."""
    rows: list[dict[str, Any]] = []
    for name, own in scores.items():
        row: dict[str, Any] = {"system": name}
        for metric, values in own.items():
            alone = paired_bootstrap(np.zeros_like(values), values)
            paired = paired_bootstrap(scores[OLD][metric], values)
            row[metric] = [alone.difference, alone.low, alone.high]
            row[f"{metric} - old"] = [paired.difference, paired.low, paired.high]
        rows.append(row)
    return rows


def served_shares(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Shares of new vectors at which the mixed index is not significantly below the old model, and 1 in any case.

    By nDCG@10 where there are judgements, otherwise by recall@10: the interval of the difference reaches 0.
    """
    by_name = {row["system"]: row for row in rows}
    metric = "ndcg@10 - old" if "ndcg@10 - old" in rows[0] else "recall@10 - old"
    served = [share for share in SHARES[:-1] if by_name[mixed_name(share)][metric][2] >= 0]
    return [*served, 1.0]


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """The rows of `summarize` as text, a mean with its interval in a cell."""
    cells = []
    for row in rows:
        cell: dict[str, object] = {"": row["system"]}
        for name in row:
            if name != "system":
                mean, low, high = row[name]
                sign = "+" if name.endswith("old") else ""
                cell[name] = f"{mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"
        cells.append(cell)
    return cells
