"""Finished runs of `adapting.py` as tables and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison_table import Runs
from matplotlib.figure import Figure

from dualenc.evaluation.plots import COLORS, as_svg
from dualenc.evaluation.report_page import Table, print_table

RESULTS = Path("eval/results/adapting.jsonl")
GROUPS = ("all", "seen", "new")

Group = dict[str, Any]
"""Settings without the seed."""


def report(results: Path = RESULTS, figures: Path | None = None) -> None:
    """Print tables of all runs that are there, and draw.

    Args:
        results: where finished runs are.
        figures: a folder to draw to.
    """
    found = list(Runs(results).found.values())
    for task in dict.fromkeys(one["settings"]["task"] for one in found):
        own = [
            one
            for one in found
            if one["settings"]["task"] == task and one["settings"]["method"] != "keep"
        ]
        few = [one for one in own if "pairs" in one["settings"]]
        whole = [one for one in own if "pairs" not in one["settings"]]
        print_rows(f"{task}: methods", whole)
        print_rows(f"{task}: few pairs", few)
    shares = [one for one in found if one["settings"]["method"] == "keep"]
    for task, other in dict.fromkeys(
        (one["settings"]["task"], one["settings"]["on"]) for one in shares
    ):
        points = along(shares, task, other)
        groups = GROUPS if task == other else GROUPS[:1]
        rows = [
            {
                "keep": keep,
                **{group: one[group] for group in groups},
                "over unadapted": interval(one),
            }
            for keep, one in points
        ]
        print_table(Table(f"adapted to {task}, measured on {other}", rows))
    if figures is not None and shares:
        draw(shares, figures / "adapt_keep.svg")


def print_rows(title: str, found: Sequence[dict[str, Any]]) -> None:
    """A row for all seeds of the same settings; single seeds were only tried, unless they are text
    models."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        # Subsets of few pairs have lengths of their own.
        left_out = {"seed", "seconds", "steps"} if "pairs" in one["settings"] else {"seed"}
        settings = {name: value for name, value in one["settings"].items() if name not in left_out}
        groups.setdefault(Runs.key(settings), []).append(one)
    rows = []
    for own in groups.values():
        settings = own[0]["settings"]
        is_single = settings["method"] == "unadapted" or settings["method"].startswith("text")
        if len(own) == 1 and not is_single:
            continue
        row: dict[str, object] = {
            "method": settings["method"],
            "map": settings.get("map"),
            "pairs": settings.get("pairs"),
        }
        for group in GROUPS:
            row[group] = mean_spread([one[group] for one in own if group in one])
        for group in GROUPS:
            row[f"last, {group}"] = mean_spread(
                [one["last"][group] for one in own if group in one.get("last", {})]
            )
        for name in ("spent", "embedding", "done", "best", "share"):
            row[name] = mean_spread([one[name] for one in own if name in one], digits=2)
        row["queries"] = " / ".join(str(own[0][f"{group} queries"]) for group in GROUPS)
        row |= {"τ": settings.get("temperature"), "rate": settings.get("rate")}
        rows.append({name: value for name, value in row.items() if value is not None})
    if rows:
        columns = dict.fromkeys(name for row in rows for name in row)
        print_table(Table(title, [{name: row.get(name) for name in columns} for row in rows]))


def mean_spread(values: Sequence[float], digits: int = 3) -> str | None:
    """Mean and standard deviation."""
    if not values:
        return None
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def along(
    shares: Sequence[dict[str, Any]], task: str, other: str
) -> list[tuple[float, dict[str, Any]]]:
    """The points of one curve: the share that is kept of the original weights, and its measures."""
    own = [
        one for one in shares if (one["settings"]["task"], one["settings"]["on"]) == (task, other)
    ]
    return sorted(((one["settings"]["keep"], one) for one in own), key=lambda point: point[0])


def interval(point: dict[str, Any]) -> str:
    return f"{point['difference']:+.3f} [{point['low']:+.3f}, {point['high']:+.3f}]"


def draw(shares: Sequence[dict[str, Any]], path: Path) -> None:
    """Gain over the unadapted queries by share, a panel for each task that was adapted to; bands:
    95 % intervals."""
    tasks = list(dict.fromkeys(one["settings"]["task"] for one in shares))
    measured = list(dict.fromkeys(one["settings"]["on"] for one in shares))
    colour_of = dict(zip(measured, COLORS))
    figure = Figure(figsize=(3.6 * len(tasks), 3.4), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for other in measured:
            points = along(shares, task, other)
            if not points:
                continue
            x = [1 - keep for keep, _ in points]
            low, middle, high = (
                [one[name] for _, one in points] for name in ("low", "difference", "high")
            )
            axes.plot(x, middle, marker="o", markersize=3, color=colour_of[other], label=other)
            axes.fill_between(x, low, high, color=colour_of[other], alpha=0.15, linewidth=0)
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set_title(f"adapted to {task}", fontsize=10)
        axes.set_xlabel("share of the adapted weights (1 − keep)")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel("nDCG@10 over unadapted")
    path.write_text(as_svg(figure))
