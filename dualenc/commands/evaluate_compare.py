"""Comparison of two runs of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dualenc.data.beir import read_qrels
from dualenc.errors import DualencError
from dualenc.evaluation.metrics import CUTOFFS, Qrels, Scores, paired_bootstrap, score_queries
from dualenc.evaluation.report import Table, print_table, write_report
from dualenc.evaluation.retrieval import HEADLINES
from dualenc.evaluation.runs import read_per_query, read_trec
from dualenc.files import check_folder_target, check_writable, write_json
from dualenc.reading import read_json_object
from dualenc.terminal import printable

LOG = "per_query.ndjson"
RESULT = "comparison.json"
COLUMNS = {"mean_a": "A", "mean_b": "B", "difference": "B − A", "p_value": "p"}
"""The names of a comparison's fields in the table, where these are others."""

Logs = dict[str, dict[str, Scores]]
"""Per-query scores by collection ("" if there is one) and query id."""


def evaluate_compare(
    run_a: str, run_b: str, qrels: str | None, metrics: Sequence[str] | None, out: str | None
) -> None:
    """Compare two runs; print a table, and write it to `out`."""
    if out is not None:
        check_writable(Path(out))
        check_folder_target(Path(out), _is_comparison, "comparison")
    judgements = None if qrels is None else read_qrels(qrels)
    a = _read_logs(Path(run_a), judgements)
    b = _read_logs(Path(run_b), judgements)
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
    facts = {"A": run_a, "B": run_b}
    table = Table("B against A, 95% intervals of the paired bootstrap", rows)
    if out is not None:
        write_json(Path(out) / RESULT, {"task": "compare", **facts, "comparisons": rows})
        write_report(Path(out) / "report.html", "Comparison of two runs", facts=facts, tables=[table])
        print(printable(f"{RESULT} and report.html are in {out}"))
    print_table(table)


def _is_comparison(folder: Path) -> bool:
    return (folder / RESULT).is_file() and read_json_object(folder / RESULT).get("task") == "compare"


def _read_logs(path: Path, qrels: Qrels | None) -> Logs:
    if path.is_dir():
        if (path / LOG).is_file():
            return {"": read_per_query(path / LOG)}
        logs = sorted(path.glob(f"*/{LOG}"))
        if not logs:
            raise DualencError(f"{path}: holds no {LOG}; give the output folder of `dualenc evaluate`")
        return {log.parent.name: read_per_query(log) for log in logs}
    if path.suffix == ".ndjson":
        return {"": read_per_query(path)}
    if qrels is None:
        raise DualencError(
            f"{path}: a TREC run needs judgements to be scored; give them with --qrels FILE"
        )
    run = read_trec(path)
    if not run.keys() & qrels.keys():
        raise DualencError(
            f"{path}: none of its {len(run)} queries is judged; give run and qrels of one data set"
        )
    return {"": score_queries(qrels, run, CUTOFFS)}


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
