"""The result of an adaptation: its quality, and the files that report it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dualenc.evaluation.metrics import paired_bootstrap
from dualenc.evaluation.plots import can_draw, lines
from dualenc.evaluation.report_page import Figure, Table
from dualenc.types import Modality
from dualenc.workflows.adapting import Interpolated, harmless_share
from dualenc.workflows.result_folder import write_results

TASK = "adapt"
SECOND = "second task"


@dataclass(frozen=True)
class AdaptResult:
    """Queries that were adapted to an index.

        result = adapt("index", "clicks.csv", out="adapted")
        for row in result.quality:
            print(row["queries of"], row["original"], row["adapted"])

    Attributes:
        folder: folder with model, training, metrics.json and report.html.
        model_folder: the query model, a sentence-transformers folder.
        keep: share of the original weights in the model, from 0 to 1.
        quality: a row per set of queries: nDCG@10 of the original and the adapted model, their
            difference, and its 95% interval.
        forgetting: a line on what each second task loses.
        facts: settings and checksums as in the report.
        unmeasured: why held-out queries cannot show the effect on new documents; None if they can.
        query_modality: "text" or "vector".
    """

    folder: Path
    model_folder: Path
    keep: float
    quality: Sequence[Mapping[str, object]]
    forgetting: Sequence[str]
    facts: Mapping[str, object]
    unmeasured: str | None
    query_modality: Modality

    def table(self) -> Table:
        """Return the quality as a table with a caption."""
        kept = f"kept of the original weights: {self.keep:g}"
        return Table(f"nDCG@10 over all documents ({kept}), 95 % intervals", self.quality)

    def notices(self) -> list[str]:
        """Return what each second task loses, or that nothing was measured."""
        if self.quality:
            return list(self.forgetting)
        return ["nothing was measured: no query was held out, and no --test was named"]


def quality_rows(points: Sequence[Interpolated], keep: float) -> list[dict[str, object]]:
    """Return a row per task that compares the original model with the one at a share.

    Args:
        points: scores at each share of the original weights; 1 and `keep` are among them.
        keep: share of the original weights in the result.
    """
    original = next(point for point in points if point.keep == 1)
    result = next(point for point in points if point.keep == keep)
    rows: list[dict[str, object]] = []
    for task, before in original.scores.items():
        after = result.scores[task]
        # Paired by query: the same queries are measured before and after.
        difference, low, high = paired_bootstrap(before, after)
        rows.append(
            {
                "queries of": task,
                "queries": len(before),
                "original": float(before.mean()),
                "adapted": float(after.mean()),
                "difference": difference,
                "from": low,
                "to": high,
            }
        )
    return rows


def forgetting(points: Sequence[Interpolated], keep: float) -> list[str]:
    """Return for each second task whether it loses, and how much of the original prevents it."""
    notices = []
    for task in points[0].scores:
        if task.startswith(SECOND):
            share = harmless_share(points, task)
            loss = f"loses; from --keep {share:g} on nothing is lost within the interval"
            if share <= keep:
                loss = f"nothing is lost within the interval (from --keep {share:g} on)"
            notices.append(f"{task}: {loss}")
    return notices


def write_adaptation(result: AdaptResult, points: Sequence[Interpolated]) -> None:
    """Write metrics.json and report.html.

    The page draws each task over the share of the adapted weights, if matplotlib is installed.

    Args:
        result: what was adapted.
        points: scores at each share of the original weights.
    """
    # matplotlib is optional.
    figures = [_curves(points)] if can_draw() else []
    facts = dict(result.facts)
    if notices := result.notices():
        facts["forgetting"] = " ".join(notices)
    write_results(
        result.folder,
        "Queries adapted to an index",
        TASK,
        facts,
        {"quality": result.quality},
        [result.table()],
        figures,
    )


def _curves(points: Sequence[Interpolated]) -> Figure:
    """Draw the mean score of each task over the share of the adapted weights."""
    shares = [1 - point.keep for point in points]
    curves = {
        task: (shares, [float(point.scores[task].mean()) for point in points])
        for task in points[0].scores
    }
    plot = lines(curves, xlabel="share of the adapted weights", ylabel="nDCG@10")
    return Figure("Between the original model (0) and the adapted one (1)", plot)
