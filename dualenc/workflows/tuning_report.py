"""What a tuning found: the trials beside the first, which to take, and the files about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dualenc.evaluation.metrics import Difference, paired_bootstrap
from dualenc.evaluation.plots import can_draw, points
from dualenc.evaluation.report_page import Figure, Table
from dualenc.workflows.result_folder import write_results
from dualenc.workflows.tuning_space import BATCH, OBJECTIVE, RATE, TEMPERATURE, Values
from dualenc.workflows.tuning_trial import MIN_QUERIES, chosen_by, halves

TASK = "tune"
SHORT = {RATE: "rate", TEMPERATURE: "τ", OBJECTIVE: "objective", BATCH: "batch"}
"""Headings that keep the table within 80 columns."""


class Tried(NamedTuple):
    """A finished trial.

    Attributes:
        number: its number, from 0, the recipe as it was.
        values: settings by name.
        state: "" if it was trained to its end, "stopped" if Hyperband or the clock stopped it,
            "failed" if its settings could not be trained.
        steps: steps of a full trial with these settings.
        seconds: wall-clock seconds.
        scores: (Q,) scores of queries; None if it failed.
    """

    number: int
    values: Values
    state: str
    steps: int | None
    seconds: float
    scores: np.ndarray | None

    @property
    def score(self) -> float | None:
        """Mean of the queries to choose by; None if it failed."""
        return None if self.scores is None else chosen_by(self.scores)


class Verdict(NamedTuple):
    """Which trial to take.

    Attributes:
        take: number of the trial: 0, or one that is better than it beyond the noise.
        best: number of the trial with the best score on the queries to choose by.
        gain: difference of the best from the first on the other queries; None without any that
            could tell.
        text: one line for people.
    """

    take: int
    best: int
    gain: Difference | None
    text: str


def difference(first: Tried, other: Tried) -> Difference | None:
    """Return the difference of a trial from the first on the queries that did not choose.

    Args:
        first: the first trial.
        other: another trial.
    """
    if first.scores is None or other.scores is None or len(first.scores) < MIN_QUERIES:
        return None
    rows = halves(len(first.scores))[1]
    return paired_bootstrap(first.scores[rows], other.scores[rows])


def judge(tried: Sequence[Tried], metric: str) -> Verdict:
    """Return which trial to take: the best by one half of the queries, if the other half agrees.

    Args:
        tried: finished trials.
        metric: name of the metric.
    """
    first = tried[0]
    full = [each for each in tried if not each.state and each.score is not None]
    best = max(full, key=lambda each: (each.score, -each.number))
    if best.number == 0:
        return Verdict(0, 0, None, f"the recipe as it is was the best of {len(tried)} trials")
    gain = difference(first, best)
    if gain is None:
        text = "cannot tell: the evaluator gives no scores of 20 queries or more; take the first"
        return Verdict(0, best.number, None, text)
    count = len(halves(len(first.scores))[1])  # type: ignore[arg-type]
    shown = f"{metric} {_signed(gain)} on {count} queries that did not choose"
    if gain.low <= 0:
        text = f"cannot tell: differences are within the noise ({shown}); take the first"
        return Verdict(0, best.number, gain, text)
    settings = ", ".join(f"{name}={value}" for name, value in best.values.items())
    return Verdict(
        best.number, best.number, gain, f"take trial {best.number}: {settings} ({shown})"
    )


def _signed(found: Difference) -> str:
    return f"{found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def tuning_table(tried: Sequence[Tried], metric: str) -> Table:
    """Return the table of trials, with differences from the first.

    Args:
        tried: finished trials.
        metric: name of the metric.
    """
    rows = []
    for each in tried:
        row: dict[str, object] = {"trial": str(each.number)}
        for name, value in each.values.items():
            shown = f"{value:.3g}" if isinstance(value, float) else str(value)
            row[SHORT.get(name, name.rpartition(".")[2])] = shown
        row[metric] = each.score
        found = difference(tried[0], each) if each.number and not each.state else None
        row["from the first"] = each.state or ("" if found is None else _signed(found))
        rows.append(row)
    caption = f"{metric} on the half that chooses; differences on the other half"
    return Table(caption, rows)


def write_tuning(
    folder: Path,
    tried: Sequence[Tried],
    verdict: Verdict,
    table: Table,
    facts: Mapping[str, object],
) -> None:
    """Write metrics.json and report.html, with a plot by learning rate if there is matplotlib.

    Args:
        folder: output folder.
        tried: finished trials.
        verdict: which to take.
        table: table of the trials.
        facts: settings of the tuning.
    """
    figures = []
    rated = [each for each in tried if RATE in each.values and not each.state]
    if can_draw() and rated:
        series: dict[str, tuple[list[float], list[float]]] = {}
        for each in rated:
            x, y = series.setdefault(str(each.values.get(OBJECTIVE, "trials")), ([], []))
            x.append(each.values[RATE])
            y.append(chosen_by(each.scores))  # type: ignore[arg-type]
        plot = points(series, xlabel="learning rate", ylabel=table.columns[-2])
        figures.append(Figure("Trials to the end, by learning rate", plot))
    metrics = {
        "verdict": verdict.text,
        "take": verdict.take,
        "best": verdict.best,
        "gain": verdict.gain,
        "trials": [
            {**each.values, "state": each.state, "steps": each.steps, "seconds": each.seconds}
            | {"score": each.score}
            for each in tried
        ],
    }
    shown = {**facts, "result": verdict.text}
    write_results(folder, "Tuning", TASK, shown, metrics, [table], figures)
