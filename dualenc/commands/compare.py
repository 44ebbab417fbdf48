"""`dualenc evaluate compare`: two runs of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dualenc.commands.checks import MAX_SEED, check_range, check_writable
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.metrics import CUTOFFS, Comparison, Scores, compare_runs, score_queries
from dualenc.evaluation.report import Figure, Table, print_table, write_report
from dualenc.evaluation.retrieval import HEADLINES
from dualenc.evaluation.runs import read_per_query, read_trec
from dualenc.files import check_folder_target, write_json
from dualenc.terminal import printable

LOG = "per_query.ndjson"
RESULT = "comparison.json"
MAX_SAMPLES = 10_000_000

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
    """
    check_range(1, MAX_SAMPLES, samples=samples)
    check_range(0, MAX_SEED, seed=seed)
    if not 0 < confidence < 1:
        raise DualencError(f"--confidence is {confidence}; it must lie between 0 and 1")
    if out is not None:
        check_writable(Path(out))
        check_folder_target(Path(out), lambda path: (path / RESULT).is_file(), "comparison")
    judgements = None
    if qrels is not None:
        from dualenc.data.beir import read_qrels

        judgements = read_qrels(qrels)
    a = _read_run(Path(run_a), judgements)
    b = _read_run(Path(run_b), judgements)
    if a.keys() != b.keys():
        raise DualencError(f"{run_a} has the collections {sorted(a)}, {run_b} has {sorted(b)}; compare the same ones")
    chosen_metrics = {name: _metrics(a[name], b[name], metrics) for name in a}
    rows: list[dict[str, object]] = []
    differences = {}
    for name, chosen in chosen_metrics.items():
        found = compare_runs(a[name], b[name], chosen, samples=samples, confidence=confidence, seed=seed)
        for metric, comparison in found.items():
            data = {"data": name} if name else {}
            rows.append({**data, "metric": metric, **_row(comparison)})
        differences[name or chosen[0]] = [b[name][query][chosen[0]] - a[name][query][chosen[0]] for query in a[name]]
    facts = {"A": run_a, "B": run_b, "samples": samples, "confidence": confidence, "seed": seed}
    table = Table(f"B against A, {confidence:.0%} intervals of the paired bootstrap", rows)
    if out is not None:
        write_json(Path(out) / RESULT, {"task": "compare", **facts, "comparisons": rows})
        plot = plots.histograms(differences, xlabel="B − A", ylabel="share of queries")
        figures = [Figure("Difference B − A over queries, first metric", plot)]
        write_report(Path(out) / "report.html", "Comparison of two runs", facts=facts, tables=[table], figures=figures)
        print(printable(f"{RESULT} and report.html are in {out}"))
    print_table(table)


def _row(comparison: Comparison) -> dict[str, object]:
    return {
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
    """The metrics asked for, which must be in every line of both runs, or the usual ones of those that are, or all."""
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
