"""`dualenc evaluate compare`: is run B better than run A, beyond the luck of the queries?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dualenc.commands.evaluation import HIGHEST_SEED, check_range, check_writable
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.compare import Comparison, compare_runs
from dualenc.evaluation.metrics import CUTOFFS, Scores, score_queries
from dualenc.evaluation.report import Figure, write_report
from dualenc.evaluation.retrieval import HEADLINES
from dualenc.evaluation.runs import read_per_query, read_qrels, read_trec
from dualenc.evaluation.tables import Table, print_table
from dualenc.files import write_json
from dualenc.terminal import printable

LOG = "per_query.ndjson"
MOST_SAMPLES = 10_000_000

Logs = dict[str, dict[str, Scores]]
"""Per-query scores by collection ("" if there is one) and query id."""


def compare(
    run_a: str,
    run_b: str,
    *,
    qrels: str | None = None,
    metrics: str | None = None,
    samples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
    out: str | None = None,
) -> None:
    """Compare two runs by the paired bootstrap over queries: difference, confidence interval, p-value.

    Args:
        run_a: output folder of `dualenc evaluate …`, a per-query log (.ndjson), or a TREC run file (needs qrels).
        run_b: the same for the run to compare with it.
        qrels: judgements of TREC run files, in BEIR's or TREC's format.
        metrics: names separated by commas; by default the usual ones among those that both runs have.
        samples: number of bootstrap resamples.
        confidence: share of the resamples inside the interval.
        seed: of the resampling.
        out: folder for comparison.json and report.html; by default the table is only printed.

    Raises:
        DualencError: a run cannot be read, the runs have different queries, or no such metric.
    """
    check_range(1, MOST_SAMPLES, samples=samples)
    check_range(0, HIGHEST_SEED, seed=seed)
    if not 0 < confidence < 1:
        raise DualencError(f"--confidence is {confidence}; it must lie between 0 and 1")
    if out is not None:
        check_writable(Path(out))
    judgements = None if qrels is None else read_qrels(qrels)
    a, b = (_read_run(Path(path), judgements) for path in (run_a, run_b))
    if a.keys() != b.keys():
        raise DualencError(f"{run_a} has the collections {sorted(a)}, {run_b} has {sorted(b)}; compare the same ones")
    chosen_metrics = {name: _metrics(a[name], b[name], metrics) for name in a}
    rows, differences = [], {}
    for name, chosen in chosen_metrics.items():
        found = compare_runs(a[name], b[name], chosen, samples=samples, confidence=confidence, seed=seed)
        rows += [_row(name, metric, comparison) for metric, comparison in found.items()]
        differences[name or chosen[0]] = [b[name][query][chosen[0]] - a[name][query][chosen[0]] for query in a[name]]
    facts = {"A": run_a, "B": run_b, "samples": samples, "confidence": confidence, "seed": seed}
    table = Table(f"B against A, {confidence:.0%} intervals of the paired bootstrap", rows)
    if out is not None:
        _write(Path(out), facts, table, differences)
    print_table(table)


def _read_run(path: Path, qrels: Mapping[str, Mapping[str, int]] | None) -> Logs:
    if path.is_dir():
        logs = [path / LOG] if (path / LOG).is_file() else sorted(path.glob(f"*/{LOG}"))
        if not logs:
            raise DualencError(f"{path}: holds no {LOG}; give the output folder of `dualenc evaluate`")
        return {"" if log.parent == path else log.parent.name: read_per_query(log) for log in logs}
    if path.suffix == ".ndjson":
        return {"": read_per_query(path)}
    if qrels is None:
        raise DualencError(f"{path}: a TREC run needs judgements to be scored; give them with --qrels FILE")
    run = read_trec(path)
    if not run.keys() & qrels.keys():
        raise DualencError(f"{path}: none of its {len(run)} queries is judged; give run and qrels of one data set")
    return {"": score_queries(qrels, run, CUTOFFS)}


def _metrics(a: Mapping[str, Scores], b: Mapping[str, Scores], metrics: str | None) -> list[str]:
    """The metrics asked for, or the usual ones that both runs have, or all of those.

    Raises:
        DualencError: one that is asked for is not in every line of both runs.
    """
    shared = [name for name in next(iter(a.values()), {}) if all(name in row for row in (*a.values(), *b.values()))]
    if not shared:
        raise DualencError("the runs have no metric in common; evaluate both with the same command")
    if metrics is not None:
        wanted = [name.strip() for name in metrics.split(",")]
        for name in wanted:
            if name not in shared:
                raise DualencError(f"--metrics: {name!r} is not in both runs; they share {', '.join(shared)}")
        return wanted
    return [name for name in HEADLINES if name in shared] or shared


def _row(collection: str, metric: str, comparison: Comparison) -> dict[str, object]:
    return {
        **({"data": collection} if collection else {}),
        "metric": metric,
        "queries": comparison.queries,
        "A": comparison.mean_a,
        "B": comparison.mean_b,
        "B − A": comparison.difference,
        "low": comparison.low,
        "high": comparison.high,
        "p": comparison.p_value,
        "better": comparison.better,
        "worse": comparison.worse,
    }


def _write(out: Path, facts: dict[str, object], table: Table, differences: dict[str, list[float]]) -> None:
    write_json(out / "comparison.json", {"task": "compare", **facts, "comparisons": list(table.rows)})
    caption = "Difference B − A over queries, first metric"
    figure = Figure(caption, plots.histograms(differences, xlabel="B − A", ylabel="share of queries"))
    write_report(out / "report.html", "Comparison of two runs", facts=facts, tables=[table], figures=[figure])
    print(printable(f"comparison.json and report.html are in {out}"))
