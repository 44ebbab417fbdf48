"""Finished runs of `adapting.py` as tables, and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from frame import RESULTS, Run, Store, key_of, spread
from matplotlib.figure import Figure

from dualenc.evaluation.plots import COLORS, as_svg
from dualenc.evaluation.report_page import Table, print_table

STORE = RESULTS / "adapting.jsonl"
GROUPS = ("all", "seen", "new")
NUMBERS = ("spent", "embedding", "done", "best", "share", "kept", "milliseconds")
LEARNED = {"temperature": "τ", "rate": "rate", "block": "block", "least": "least"}


def report(results: Path = STORE, figures: Path | None = None) -> None:
    """Print tables of all runs, and draw the gain by share of the weights to a folder."""
    runs = Store(results).runs
    shares = [each for each in runs if each.settings["method"] == "keep"]
    for task in dict.fromkeys(each.settings["task"] for each in runs):
        own = [each for each in runs if each.settings["task"] == task and each not in shares]
        for title, is_few in (("methods", False), ("few pairs", True)):
            rows = rows_of([each for each in own if ("pairs" in each.settings) == is_few])
            if rows:
                # A column that no row of the first kind has comes last.
                columns = dict.fromkeys(name for row in rows for name in row)
                filled = [{name: row.get(name) for name in columns} for row in rows]
                print_table(Table(f"{task}: {title}", filled))
    for task, other in dict.fromkeys(map(direction, shares)):
        groups = GROUPS if task == other else GROUPS[:1]
        rows = [
            {"keep": settings["keep"]}
            | {group: outcome[group] for group in groups if group in outcome}
            | {"over unadapted": "{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format(**outcome)}
            for settings, outcome, _ in along(shares, task, other)
        ]
        print_table(Table(f"adapted to {task}, measured on {other}", rows))
    if figures is not None and shares:
        (figures / "adapt_keep.svg").write_text(as_svg(drawn(shares)))


def rows_of(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Return a row for all seeds of the same settings.

    A single seed was only tried, unless nothing is tuned.
    """
    found: dict[str, list[Run]] = {}
    for each in runs:
        # Subsets of few pairs have lengths of their own.
        left_out = {"seed", "seconds", "steps"} if "pairs" in each.settings else {"seed"}
        kept = {name: own for name, own in each.settings.items() if name not in left_out}
        found.setdefault(key_of(kept), []).append(each)
    rows = []
    for own in found.values():
        settings, first, _ = own[0]
        if len(own) == 1 and not settings["method"].startswith(("unadapted", "text")):
            continue
        values = {name: [each.outcome.get(name) for each in own] for name in (*GROUPS, *NUMBERS)}
        last = [each.outcome.get("last", {}) for each in own]
        cells = {name: settings.get(name) for name in ("method", "map", "pairs")}
        cells |= {group: mean_spread(values[group]) for group in GROUPS}
        for group in GROUPS:
            cells[f"last, {group}"] = mean_spread([each.get(group) for each in last])
        cells |= {name: mean_spread(values[name], 2) for name in NUMBERS}
        cells["queries"] = " / ".join(str(first[f"{group} queries"]) for group in GROUPS)
        cells |= {label: settings.get(name) for name, label in LEARNED.items()}
        rows.append({name: cell for name, cell in cells.items() if cell is not None})
    return rows


def mean_spread(values: Sequence[float | None], digits: int = 3) -> str | None:
    """Return mean and standard deviation of the values that are there."""
    present = [value for value in values if value is not None]
    return spread(present, digits).removesuffix(" (one seed)") if present else None


def direction(run: Run) -> tuple[str, str]:
    """Return what queries were adapted to, and what they were measured on."""
    return run.settings["task"], run.settings["on"]


def along(shares: Sequence[Run], task: str, other: str) -> list[Run]:
    """Return the points of a curve, by the share of the original weights."""
    own = [each for each in shares if direction(each) == (task, other)]
    return sorted(own, key=lambda each: each.settings["keep"])


def drawn(shares: Sequence[Run]) -> Figure:
    """Draw the gain over unadapted queries by share with its interval, a panel for each task."""
    tasks, measured = (list(dict.fromkeys(names)) for names in zip(*map(direction, shares)))
    figure = Figure(figsize=(3.6 * len(tasks), 3.4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for other, color in zip(measured, COLORS):
            points = along(shares, task, other)
            x = [1 - each.settings["keep"] for each in points]
            names = ("low", "difference", "high")
            low, middle, high = ([each.outcome[name] for each in points] for name in names)
            if points:
                axes.plot(x, middle, marker="o", markersize=3, color=color, label=other)
                axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set_title(f"adapted to {task}", fontsize=10)
        axes.set_xlabel("share of the adapted weights (1 − keep)")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel("nDCG@10 over unadapted")
    return figure
