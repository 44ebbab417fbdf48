"""The result of an adaptation: its quality, and the files that report it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dualenc.evaluation.metrics import paired_bootstrap
from dualenc.evaluation.plots import can_draw, lines
from dualenc.evaluation.report_page import Figure, Table, as_interval
from dualenc.types import Modality
from dualenc.workflows.adaptation_choice import Choice, Compared, pool
from dualenc.workflows.adapting import BASE, ORIGINAL, Interpolated, harmless_share
from dualenc.workflows.gate import Gate
from dualenc.workflows.result_folder import write_results

TASK = "adapt"
SECOND = "second task"
ROCCHIO = "Rocchio"
"""Column with the scores of queries that are moved towards clicked documents, without training."""


@dataclass(frozen=True)
class AdaptResult:
    """Queries that were adapted to an index.

        result = adapt("index", "clicks.csv", out="adapted")
        for row in result.quality:
            print(row["queries of"], row["original"], row["adapted"])

    Attributes:
        folder: folder with model, training, metrics.json and report.html.
        model_folder: the query model, a sentence-transformers folder.
        keep: share of the original weights in the model, from 0 to 1; or of the base weights, see
            `of`.
        alpha: clicks that were added to those of every document for its weight; inf weighs all
            alike.
        quality: a row per set of queries: nDCG@10 of the original and the adapted model, their
            difference, and its 95% interval over documents. Held-out queries of each fold are
            scored at the choice that the other folds make. After `start_from`, the original is the
            model of that run, and `base` has the scores of the model of the index.
        forgetting: a line on what each second task loses.
        facts: settings and checksums as in the report.
        finding: whether adapting helps, in one line.
        unmeasured: why held-out queries cannot show the effect on new documents; None if they can.
        query_modality: "text", "image" or "vector".
        gate: whether held-out queries show the required gain; None if none is required.
        of: model whose share is kept: "original", or "base", the model of the index, which
            `start_from` allows.
        start_from: run that this one continues from; None if it began at the model of the index.
    """

    folder: Path
    model_folder: Path
    keep: float
    alpha: float
    quality: Sequence[Mapping[str, object]]
    forgetting: Sequence[str]
    facts: Mapping[str, object]
    finding: str
    unmeasured: str | None
    query_modality: Modality
    gate: Gate | None = None
    of: str = ORIGINAL
    start_from: Path | None = None

    def table(self) -> Table:
        """Return the quality as a table with a caption."""
        kept = f"kept of the {self.of} weights: {self.keep:g}"
        if self.start_from is not None:
            kept += f"; original: the model of {self.start_from}, base: that of the index"
        rows = []
        for row in self.quality:
            cells = {name: value for name, value in row.items() if name not in _DIFFERENCE}
            rows.append({**cells, "difference [95 % interval]": _difference(row)})
        return Table(f"nDCG@10 over all documents ({kept})", rows)

    def short_table(self) -> Table:
        """Return the main numbers as a table of 80 columns."""
        # The base model is there if the run continues from another one.
        names = [name for name in ("base", "original", "adapted") if name in self.quality[0]]
        rows = []
        for row in self.quality:
            scores = " → ".join(f"{row[name]:.3f}" for name in names if name in row)
            cells: dict[str, object] = {"queries of": row["queries of"], "count": row["queries"]}
            cells |= {"nDCG@10": scores, "difference [95 %]": _difference(row)}
            if ROCCHIO in row:
                cells[ROCCHIO] = f"{row[ROCCHIO]:.3f}"
            rows.append(cells)
        kept = f"{self.keep:g} of the {self.of} weights kept"
        return Table(f"nDCG@10, {' → '.join(names)} ({kept})", rows)

    def notices(self) -> list[str]:
        """Return what each second task loses, or that nothing was measured."""
        if self.quality:
            return list(self.forgetting)
        return ["nothing was measured: no query was held out, and no --test was named"]


_DIFFERENCE = ("difference", "from", "to")
"""Entries of a row of `quality` with the difference of the models and its interval."""


def _difference(row: Mapping[str, object]) -> str:
    """Return the difference of a row of `quality` with its interval."""
    mean, low, high = (float(str(row[name])) for name in _DIFFERENCE)
    return as_interval(mean, low, high, signed=True)


def quality_rows(compared: Mapping[str, Compared]) -> list[dict[str, object]]:
    """Return a row per task that compares the original model with the adapted one.

    Intervals are over documents: queries of one document are resampled together.

    Args:
        compared: scores of the queries of each task before and after.
    """
    rows: list[dict[str, object]] = []
    for task, (before, after, groups, base) in compared.items():
        # Paired by query: the same queries are measured before and after.
        difference, low, high = paired_bootstrap(before, after, groups=groups)
        rows.append(
            {
                "queries of": task,
                "queries": len(before),
                "documents": len(np.unique(groups)),
                **({} if base is None else {"base": float(base.mean())}),
                "original": float(before.mean()),
                "adapted": float(after.mean()),
                "difference": difference,
                "from": low,
                "to": high,
            }
        )
    return rows


def finding_of(choice: Choice) -> str:
    """Return in one line whether adapting helps, by the held-out queries of both kinds."""
    if choice.unmeasured is not None:
        return f"cannot tell whether adapting helps: {choice.unmeasured}"
    before, after, groups, _ = pool(choice.compared)
    difference, low, high = paired_bootstrap(before, after, groups=groups)
    if choice.is_original:
        if choice.reason == "--keep":
            return "the model is the original: --keep 1"
        return (
            "adapting does not help: no share of the adapted weights raises the mean nDCG@10 of "
            "held-out queries without lowering that of new documents"
        )
    gain = f"nDCG@10 of held-out queries {difference:+.3f} [{low:+.3f}, {high:+.3f}]"
    what = "adapting"
    if choice.keep == 1:
        what = "going back to the model of the index"
    if low > 0:
        return f"{what} helps: {gain}"
    if difference > 0:
        return f"{what} may not help: {gain}, an interval that includes 0"
    return f"{what} does not help: {gain}"


def forgetting(points: Sequence[Interpolated], keep: float, of: str = ORIGINAL) -> list[str]:
    """Return for each second task whether it loses, and how much of the original prevents it.

    Args:
        points: scores of the final model at each share of the original weights, and of the base
            weights if there are any.
        keep: share of the weights of a model in the result.
        of: which model, `ORIGINAL` or `BASE`.
    """
    notices = []
    line = [point for point in points if point.of == ORIGINAL]
    for task in points[0].scores if points else ():
        if task.startswith(SECOND):
            share = harmless_share(line, task)
            loss = f"loses; from --keep {share:g} on nothing is lost within the interval"
            if of == BASE:
                # --keep is a share of the original weights, so none says what was taken.
                taken = next(each for each in points if (each.keep, each.of) == (keep, of))
                is_lost = paired_bootstrap(line[-1].scores[task], taken.scores[task]).high < 0
                loss = "loses" if is_lost else "nothing is lost within the interval"
            elif share <= keep:
                loss = f"nothing is lost within the interval (from --keep {share:g} on)"
            notices.append(f"{task}: {loss}")
    return notices


def write_adaptation(
    result: AdaptResult, examples: Table | None, *curves: Sequence[Interpolated]
) -> None:
    """Write metrics.json and report.html.

    The page draws each task over the share of the adapted weights, if matplotlib is installed.

    Args:
        result: what was adapted.
        examples: held-out queries whose results changed most.
        curves: scores at each share of the original or base weights: of held-out queries, and of
            others.
    """
    # matplotlib is optional.
    figures = [_curves(curves)] if can_draw() and any(curves) else []
    # First: what a reader wants to know.
    facts = {"finding": result.finding, **result.facts}
    if notices := result.notices():
        facts["forgetting"] = " ".join(notices)
    metrics: dict[str, object] = {"quality": result.quality, "keep": result.keep}
    if result.start_from is not None:
        metrics["of"] = result.of
    if result.gate is not None:
        metrics["gate"] = result.gate._asdict()
    write_results(
        result.folder,
        "Queries adapted to an index",
        TASK,
        facts,
        metrics,
        [result.table(), *([] if examples is None else [examples])],
        figures,
    )


def _curves(measured: Sequence[Sequence[Interpolated]]) -> Figure:
    """Draw the mean score of each task over the share of the adapted weights."""
    curves = {}
    for points in measured:
        for task, of in itertools.product(points[0].scores if points else (), (ORIGINAL, BASE)):
            if line := [point for point in points if point.of == of]:
                name = task if of == ORIGINAL else f"{task}, from the base model"
                curves[name] = (
                    [1 - point.keep for point in line],
                    [float(point.scores[task].mean()) for point in line],
                )
    plot = lines(curves, xlabel="share of the adapted weights", ylabel="nDCG@10")
    return Figure("Between the original model (0) and the adapted one (1)", plot)
