"""Measure a migration: two models and maps between them, on one sample of documents and queries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from dualenc.errors import DualencError
from dualenc.evaluation.metrics import Qrels, Run, paired_bootstrap, score_queries
from dualenc.evaluation.report_page import Table, as_interval
from dualenc.evaluation.retrieval import first_documents, retrieve
from dualenc.search.exact_search import exact_search
from dualenc.search.migration.maps import MapKind, neighbours, overlap
from dualenc.search.migration.stages import SHARES, embedded_at
from dualenc.types import StrPath

OLD = "old model, old vectors"
NEW = "new model, new vectors"
MAPPED_QUERIES = "new model, mapped queries, old vectors"
CANDIDATES = "new model, candidates of the old one"
OF_MAPPED = "new model, candidates of its mapped queries"
COMPARED_WITH = {OLD: "the old model", MAPPED_QUERIES: "its queries mapped into the old vectors"}
"""Systems that others are compared with: the old model, or what stands in for one that is gone."""
METRICS = ("recall@10", "ndcg@10")
Meanwhile = Literal["candidates", "index"]
"""What answers until all documents are embedded: the new model by candidates, or the index."""

System = tuple[np.ndarray, np.ndarray]
"""Queries (Q, D) and documents (n, D) in the same space."""
Scores = dict[str, np.ndarray]
"""(Q,) scores of the queries by metric."""


class Sample(NamedTuple):
    """A sample of n documents of an index of N, in the spaces of both models.

        sample = Sample(old, new, mapped, places, num_documents=len(index))
        half_migrated = sample.mixed(0.5)

    Attributes:
        old: (n, E) vectors of the old model.
        new: (n, D) vectors of the new model.
        mapped: (n, D) vectors of the old model mapped into the new space, each by a map that was
            fit without it.
        places: (n,) positions in the order of embedding, from 0 to N − 1.
        num_documents: N.
    """

    old: np.ndarray
    new: np.ndarray
    mapped: np.ndarray
    places: np.ndarray
    num_documents: int

    def mixed(self, share: float) -> np.ndarray:
        """Return vectors (n, D) at the time when a share of the index has new ones.

        Args:
            share: share of the documents, first in the order, that have new vectors.
        """
        num_embedded = embedded_at(share, self.num_documents)
        is_new = self.places < num_embedded
        return np.where(is_new[:, None], self.new, self.mapped)


def mixed_name(share: float) -> str:
    """Return the name of the system that serves while a share of the documents has new vectors.

    Args:
        share: share of the documents, from 0 to 1.
    """
    if share == 0:
        return "new model, mapped vectors"
    if share == 1:
        return NEW
    return f"new model, {share:.0%} new vectors, the rest mapped"


def compared(
    sample: Sample,
    old: np.ndarray,
    mapped: np.ndarray,
    new: np.ndarray,
) -> dict[str, System]:
    """Return the systems of the report by name.

    Args:
        sample: documents in both spaces.
        old: (Q, E) queries of the old model.
        mapped: (Q, E) queries of the new model, mapped into the old space.
        new: (Q, D) queries of the new model.
    """
    systems = {
        OLD: (old, sample.old),
        MAPPED_QUERIES: (mapped, sample.old),
    }
    for share in SHARES:
        systems[mixed_name(share)] = (new, sample.mixed(share))
    return systems


def judged_scores(
    systems: Mapping[str, System],
    query_ids: Sequence[str],
    document_ids: Sequence[str],
    qrels: Qrels,
) -> dict[str, Scores]:
    """Return recall@10 and nDCG@10 of each system by judgements, as `score_queries` defines them.

    Args:
        systems: queries and documents by name.
        query_ids: (Q,) ids of the queries.
        document_ids: (n,) ids of the documents.
        qrels: grades by query id.
    """
    scores: dict[str, Scores] = {}
    for name, (queries, documents) in systems.items():
        run = retrieve(query_ids, queries, document_ids, documents, depth=10, qrels=qrels)
        scores[name] = _scores_of(run, qrels)
    return scores


def judged_candidates(
    system: System,
    columns: np.ndarray,
    query_ids: Sequence[str],
    document_ids: Sequence[str],
    qrels: Qrels,
) -> Scores:
    """Return recall@10 and nDCG@10 if the new model ranks candidates only.

    Args:
        system: queries (Q, D) and documents (n, D) of the new model.
        columns: (Q, K) documents that are candidates; -1 for candidates outside the sample.
        query_ids: (Q,) ids of the queries.
        document_ids: (n,) ids of the documents.
        qrels: grades by query id.
    """
    queries, documents = system
    run = {}
    for name, query, own in zip(query_ids, queries, columns, strict=True):
        in_sample = own[own >= 0]
        scores = (documents[in_sample] @ query).tolist()
        run[name] = {document_ids[column]: score for column, score in zip(in_sample, scores)}
    return _scores_of(first_documents(run, 10, qrels), qrels)


def _scores_of(run: Run, qrels: Qrels) -> Scores:
    """Return the scores (Q,) of the queries of a run by metric."""
    per_query = score_queries(qrels, run, (10,)).values()
    return {metric: np.array([own[metric] for own in per_query]) for metric in METRICS}


def neighbour_scores(systems: Mapping[str, System], rows: np.ndarray) -> dict[str, Scores]:
    """Return recall@10 of documents as queries, with the new model's neighbors as the truth.

    Args:
        systems: queries and documents by name.
        rows: (Q,) rows of the documents that are the queries.
    """
    truth = neighbours(*systems[NEW], rows)
    scores: dict[str, Scores] = {}
    for name, system in systems.items():
        nearest = neighbours(*system, rows)
        scores[name] = {"recall@10": overlap(nearest, truth)}
    return scores


def neighbour_candidates(
    sample: Sample, finding: np.ndarray, rows: np.ndarray, depth: int
) -> Scores:
    """Return recall@10 of documents as queries if the new model ranks candidates only.

    Args:
        sample: documents in both spaces.
        finding: (Q, E) vectors of the queries that find candidates in the old space.
        rows: (Q,) rows of the documents that are the queries.
        depth: number of candidates in the sample.
    """
    truth = neighbours(sample.new[rows], sample.new, rows)
    candidates = exact_search(finding, sample.old, depth + 1)[1]
    nearest = np.full_like(truth, -1)
    for place, (row, columns) in enumerate(zip(rows, candidates, strict=True)):
        others = columns[columns != row][:depth]
        order = np.argsort(-(sample.new[others] @ sample.new[row]), kind="stable")
        best = others[order[: truth.shape[1]]]
        nearest[place, : len(best)] = best
    return {"recall@10": overlap(nearest, truth)}


def best_map(scores: Mapping[MapKind, Scores]) -> MapKind:
    """Return the map to use: ridge regression, unless a rotation is significantly better.

    Args:
        scores: (Q,) scores over mapped documents by metric by kind of map.
    """
    ridge, rotation = scores["ridge"], scores["rotation"]
    return "rotation" if _is_above(rotation, ridge) else "ridge"


def best_meanwhile(scores: Mapping[str, Scores]) -> Meanwhile:
    """Return what is best to answer with until all documents are embedded.

    Candidates cost time in each query, so they must be significantly better than the old model, if
    it can answer, and than mapped vectors.

    Args:
        scores: (Q,) scores by metric by system.
    """
    candidates = scores[_candidates_in(scores)]
    others = [scores[name] for name in (OLD, mixed_name(0)) if name in scores]
    return "candidates" if all(_is_above(candidates, other) for other in others) else "index"


def reference(systems: Iterable[str]) -> str:
    """Return the system that others are compared with, one of `COMPARED_WITH`.

    Args:
        systems: names of the systems that are measured.
    """
    return OLD if OLD in set(systems) else MAPPED_QUERIES


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the systems of rows."""
    return [row["system"] for row in rows]


def _candidates_in(systems: Iterable[str]) -> str:
    """Return the system of candidates."""
    return next(name for name in systems if name in (CANDIDATES, OF_MAPPED))


def _is_above(scores: Scores, others: Scores) -> bool:
    """Return True if scores are significantly higher, by nDCG@10 or else by recall@10."""
    metric = "ndcg@10" if "ndcg@10" in scores else "recall@10"
    return bool(paired_bootstrap(others[metric], scores[metric]).low > 0)


def summarize(scores: Mapping[str, Scores]) -> list[dict[str, Any]]:
    """Return a row for each system with means and differences from the old model.

    If that is gone, they are from mapped queries over old vectors. Each value is a list of mean,
    lower and upper end of the 95% interval over queries.

    Args:
        scores: (Q,) scores by metric by system.
    """
    rows: list[dict[str, Any]] = []
    compared_with = scores[reference(scores)]
    for name, own in scores.items():
        row: dict[str, Any] = {"system": name}
        for metric, values in own.items():
            # The difference from 0 is the mean itself.
            zero = np.zeros_like(values)
            row[metric] = list(paired_bootstrap(zero, values))
            row[f"{metric} - old"] = list(paired_bootstrap(compared_with[metric], values))
        rows.append(row)
    return rows


def is_below(rows: Sequence[Mapping[str, Any]], system: str) -> bool:
    """Return True if judgements show a system significantly below the old model.

    Args:
        rows: rows of `summarize`.
        system: name of the system.
    """
    if not is_judged(rows):
        return False
    high = _row_of(rows, system)["ndcg@10 - old"][2]
    return bool(high < 0)


def check_not_worse(rows: Sequence[Mapping[str, Any]], model: str) -> None:
    """Raise if judgements show the new model significantly below the old one.

    Args:
        rows: rows of `summarize`; none if nothing was measured.
        model: name of the new model, for the error.

    Raises:
        DualencError: the new model finds significantly less.
    """
    if rows and is_below(rows, NEW):
        raise DualencError(
            f"finds significantly less than {COMPARED_WITH[reference(_names(rows))]}",
            fix="choose another model, or go on with --anyway",
            where=model,
        )


def _row_of(rows: Sequence[Mapping[str, Any]], system: str) -> Mapping[str, Any]:
    """Return the row of a system."""
    return next(row for row in rows if row["system"] == system)


def has_old(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if the old model was measured, False if it is gone.

    Args:
        rows: rows of `summarize`.
    """
    return reference(_names(rows)) == OLD


def is_judged(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if systems were measured by judgements.

    Args:
        rows: rows of `summarize`.
    """
    return "ndcg@10" in rows[0]


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the comparison of the new model with the old one, as a clause of the report.

    Args:
        rows: rows of `summarize`.
    """
    if not is_judged(rows):
        return "without judgements it is unknown whether it finds more than the old one"
    name = reference(_names(rows))
    old, new = _row_of(rows, name), _row_of(rows, NEW)
    gain, low, high = new["ndcg@10 - old"]
    # Significant if the 95% interval excludes 0.
    found = "neither significantly more nor less"
    if low > 0:
        found = "significantly more"
    elif high < 0:
        found = "significantly less"
    old_score = old["ndcg@10"][0]
    new_score = new["ndcg@10"][0]
    scores = f"nDCG@10 {old_score:.3f} → {new_score:.3f}"
    interval = f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]"
    other = "the old one" if name == OLD else COMPARED_WITH[name]
    return f"on the sample it finds {found} than {other} ({scores}, {interval})"


def candidates_verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how candidates compare with the old model and the new one, in brackets of a sentence.

    Args:
        rows: rows of `summarize`, one of which is that of candidates.
    """
    metric = "ndcg@10" if is_judged(rows) else "recall@10"
    label = "nDCG@10" if is_judged(rows) else "recall@10 of what the new model finds"
    other, names = reference(_names(rows)), _names(rows)
    shown = (other, _candidates_in(names), NEW)
    old, own, new = (_row_of(rows, name)[metric][0] for name in shown)
    return f"{label} {own:.3f}, {COMPARED_WITH[other]} {old:.3f}, all vectors new {new:.3f}"


def served_shares(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the shares of new vectors at which the index may be served.

    These are the shares at which judgements do not show the mixed index below the old model, and 1.

    Args:
        rows: rows of `summarize`.
    """
    served = []
    for share in SHARES:
        # Without judgements only a complete index is safe.
        is_good = is_judged(rows) and not is_below(rows, mixed_name(share))
        if share == 1 or is_good:
            served.append(share)
    return served


def sample_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the rows of `summarize` as a table for a page: each mean with its interval.

    Args:
        rows: rows of `summarize`.
    """
    cells = []
    for row in rows:
        cell: dict[str, object] = {"": row["system"]}
        for name, values in row.items():
            if name != "system":
                # Differences have a sign.
                cell[name] = as_interval(*values, signed=name.endswith("old"))
        cells.append(cell)
    return Table("On the sample [95 % interval]", cells)


def short_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the rows of `summarize` as a table of 80 columns.

    Args:
        rows: rows of `summarize`.
    """
    main = "ndcg@10" if is_judged(rows) else "recall@10"
    names = _names(rows)
    compared_with = reference(names)
    cells = []
    for row in rows:
        name = row["system"]
        # All others are of the new model, as the caption says.
        short = name if name == OLD else name.removeprefix("new model, ")
        cell: dict[str, object] = {"": short, main: f"{row[main][0]:.3f}"}
        is_reference = name == compared_with
        own = row[f"{main} - old"]
        cell["difference [95 %]"] = "" if is_reference else as_interval(*own, signed=True)
        cell["recall@10"] = f"{row['recall@10'][0]:.3f}"
        cells.append(cell)
    other = "the old model" if compared_with == OLD else "mapped queries, old vectors"
    return Table(f"The new model on the sample; differences are from {other}", cells)


def check_report(report: Mapping[str, Any], path: StrPath) -> None:
    """Raise unless a report has the facts, systems and served shares of a migration.

    Args:
        report: contents of a JSON file.
        path: the file, for the error.

    Raises:
        DualencError: if an entry is missing or of another type.
    """
    try:
        is_valid = _is_complete(report["facts"], report["systems"], report["served"])
        # Reports of earlier versions lack the entry.
        is_valid = is_valid and report.get("meanwhile", "index") in get_args(Meanwhile)
    except (LookupError, TypeError, AttributeError):
        # An entry is missing, or of another type.
        is_valid = False
    if not is_valid:
        raise DualencError(
            "not the measurements of a migration",
            fix="remove the file, and the same command measures again",
            where=path,
        )


def _is_complete(facts: Any, systems: Any, served: Any) -> bool:
    """Return True for settings by name, rows of `summarize`, and shares that are measured."""
    # The last system is the new model; the others have the same columns.
    columns = systems[-1].keys()
    values = [row[name] for row in systems for name in columns - {"system"}]
    return (
        all(value is None or isinstance(value, str | int | float) for value in facts.values())
        and {"system", "recall@10"} <= columns
        and all(row.keys() == columns for row in systems)
        and all(map(_is_interval, values))
        and {reference(_names(systems)), NEW} <= {*_names(systems)}
        and bool(served)
        and all(share in SHARES for share in served)
    )


def _is_interval(value: Any) -> bool:
    """Return True for a mean with its lower and upper bound."""
    return len(value) == 3 and all(type(number) in (int, float) for number in value)
