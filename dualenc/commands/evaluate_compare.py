"""Comparison of two runs of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dualenc.errors import DualencError
from dualenc.evaluation.metrics import Scores, paired_bootstrap
from dualenc.evaluation.report import Table, print_table
from dualenc.evaluation.retrieval import HEADLINES
from dualenc.evaluation.runs import read_per_query

LOG = "per_query.ndjson"
COLUMNS = {"mean_a": "A", "mean_b": "B", "difference": "B − A", "p_value": "p"}
"""The names of a comparison's fields in the table, where these are others."""

Logs = dict[str, dict[str, Scores]]
"""Per-query scores by collection ("" if there is one) and query id."""


def evaluate_compare(run_a: str, run_b: str, metrics: Sequence[str] | None) -> None:
    """Compare two runs, and print a table."""
    a = _read_logs(Path(run_a))
    b = _read_logs(Path(run_b))
    if a.keys() != b.keys():
        raise DualencError(
            f"{run_a} has the collections {sorted(a)}, {run_b} has {sorted(b)}; compare the same ones"
        )
    chosen_metrics = {name: _chosen_metrics(a[name], b[name], metrics) for name in a}
    rows: list[dict[str, object]] = []
    for name, chosen in chosen_metrics.items():
        for metric in chosen:
            scores_a = [a[name][query][metric] for query in a[name]]
            scores_b = [b[name][query][metric] for query in a[name]]
            row: dict[str, object] = {"data": name} if name else {}
            row["metric"] = metric
            for field, value in paired_bootstrap(scores_a, scores_b)._asdict().items():
                row[COLUMNS.get(field, field)] = value
            rows.append(row)
    print_table(Table("B against A, 95% intervals of the paired bootstrap", rows))


def _read_logs(path: Path) -> Logs:
    """The logs of an evaluation's folder, or the one of a file."""
    if not path.is_dir():
        return {"": read_per_query(path)}
    if (path / LOG).is_file():
        return {"": read_per_query(path / LOG)}
    logs = sorted(path.glob(f"*/{LOG}"))
    if not logs:
        raise DualencError(f"{path}: holds no {LOG}; give the output folder of `dualenc evaluate`")
    return {log.parent.name: read_per_query(log) for log in logs}


def _chosen_metrics(
    a: Mapping[str, Scores], b: Mapping[str, Scores], metrics: Sequence[str] | None
) -> Sequence[str]:
    """The metrics of `metrics`, which must be in every line of both runs; by default the usual ones, or all."""
    if a.keys() != b.keys():
        only = len(a.keys() ^ b.keys())
        raise DualencError(f"{only} queries are in one run only; compare runs on the same data and split")
    shared = list(next(iter(a.values()), {}))
    for scores in (*a.values(), *b.values()):
        shared = [name for name in shared if name in scores]
    if not shared:
        raise DualencError("the runs have no metric in common; evaluate both with the same command")
    for name in metrics or ():
        if name not in shared:
            raise DualencError(f"--metrics: {name!r} is not in both runs; they share {', '.join(shared)}")
    return metrics or [name for name in HEADLINES if name in shared] or shared
