"""Finished runs of `small_batch.py` as tables: all of them, and those of docs/results.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from frame import RESULTS, Run, Store, by_seed, difference, most_seeds, spread, unpacked

from dualenc.evaluation.report_page import Table, print_table

VECTORS = RESULTS / "small_batch.jsonl"
ENCODERS = RESULTS / "small_batch_encoders.jsonl"
FINE_TUNING = RESULTS / "small_fine_tuning.jsonl"


def values(runs: Sequence[Run], what: str) -> list[float]:
    """Return a measure of runs, of those that have it."""
    return [each.outcome[what] for each in runs if what in each.outcome]


class Seeds:
    """All seeds of an objective at one batch size and length, with the settings chosen for it."""

    def __init__(
        self, store: Store, task: str, objective: str, batch_size: int, pairs_seen: int
    ) -> None:
        self.objective, self.batch_size, self.pairs_seen = objective, batch_size, pairs_seen
        cell = {"task": task, "objective": objective, "batch_size": batch_size}
        self.runs = most_seeds(store.where(**cell, pairs_seen=pairs_seen, equal="pairs"))
        # Each seed saw pairs of its own number.
        passes = (run_of_equal_passes(store, each) for each in self.runs)
        self.passes = [each for each in passes if each is not None]
        # Other lengths were only tried, and where none was better, there are no longer runs.
        longer = max(by_seed(store.where(**cell, equal="seconds")), key=len, default=[])
        self.seconds = self.runs if len(longer) == 1 else longer

    def mean(self, what: str) -> float:
        """Return the mean of a measure over seeds."""
        return statistics.mean(values(self.runs, what))

    @property
    def on_gpu(self) -> bool:
        """Whether seconds are those of a core that mostly waits."""
        return any("NVIDIA" in (each.origin["device"] or "") for each in self.runs)

    @property
    def per_query(self) -> np.ndarray | None:
        """(Q,) quality of each query, mean over seeds, if it is kept."""
        scores = [unpacked(each) for each in values(self.runs, "scores")]
        return np.mean(scores, axis=0) if len(scores) == len(self.runs) else None


def run_of_equal_passes(store: Store, one: Run) -> Run | None:
    """Return the run with the passes of InfoNCE: itself, where nothing more is encoded."""
    share = share_of_passes(one.outcome["extra_encodes"])
    if share == 1:
        return one
    settings = {**one.settings, "equal": "passes"}
    wanted = share * settings.pop("pairs_seen")
    alike = store.where(**settings)
    return next((o for o in alike if abs(o.settings["pairs_seen"] / wanted - 1) < 0.01), None)


def share_of_passes(extra_encodes: float) -> float:
    """Return the share of the pairs with which a run encodes what InfoNCE does with all."""
    return 1 / (1 + extra_encodes / 2) if extra_encodes > 0.01 else 1.0


def groups_of(store: Store) -> dict[tuple[str, int], list[Seeds]]:
    """Return what has several seeds, by task and length; by batch size, then the best first."""
    keys = ("task", "objective", "batch_size", "pairs_seen")
    cells = dict.fromkeys(
        tuple(each.settings[key] for key in keys) for each in store.where(equal="pairs")
    )
    groups: dict[tuple[str, int], list[Seeds]] = {}
    for cell in cells:
        seeds = Seeds(store, *cell)
        if len(seeds.runs) > 1:
            groups.setdefault((cell[0], seeds.pairs_seen), []).append(seeds)
    for group in groups.values():
        group.sort(key=lambda seeds: (seeds.batch_size, -seeds.mean("test")))
    return groups


def main_groups(store: Store) -> dict[str, list[Seeds]]:
    """Return, by task, what has several seeds at the length that most has."""
    groups = sorted(groups_of(store).items(), key=lambda entry: len(entry[1]))
    return {task: group for (task, _), group in groups}


def report(results: Path = VECTORS) -> None:
    """Print what has several seeds in a store, and the tables of docs/results.md from it."""
    store = Store(results)
    for (task, pairs_seen), group in groups_of(store).items():
        print_table(Table(f"{task}: {pairs_seen:,} pairs seen", list(lines_of(group))))
    for table in page_tables(store):
        print_table(table)


def lines_of(group: Sequence[Seeds]) -> Iterator[dict[str, object]]:
    """Yield a line for each of a group, with its difference from the best batch size of InfoNCE."""
    of_batch = [seeds for seeds in group if seeds.objective == "InfoNCE"]
    best = max(of_batch, key=lambda seeds: seeds.mean("test"), default=None)
    for seeds in group:
        line: dict[str, object] = {"objective": seeds.objective, "B": seeds.batch_size}
        line["equal pairs"] = spread(values(seeds.runs, "test"))
        line["equal passes"] = spread(values(seeds.passes, "test"))
        line["equal seconds"] = spread(values(seeds.seconds, "test"))
        for name in ("linear_probe", "mean_log_rank"):
            if values(seeds.runs, name):
                line[name.replace("_", " ")] = spread(values(seeds.runs, name))
        if best is not None:
            both = best.per_query, seeds.per_query
            is_kept = all(scores is not None for scores in both) and seeds is not best
            over = difference(*both) if is_kept else "–"
            line[f"over InfoNCE, B = {best.batch_size}"] = over
        line["extra encodes"] = f"{seeds.mean('extra_encodes'):.2f}"
        line["seconds"] = "on a GPU" if seeds.on_gpu else f"{seeds.mean('seconds'):.0f}"
        line["rate, τ"] = "{rate:g}, {temperature:g}".format(**seeds.runs[0].settings)
        yield line | {"seeds": len(seeds.runs)}


POOL = "GlobalCache: pool vs. control variate"
RIVALS = "Compared with momentum queues, hard negatives and larger batches"
PERCEPTRONS = ("vectors papers", "vectors medquad")
TEXTS = ("text papers", "text medquad", "text docstrings")
FLICKR = "image_text flickr8k_112"
IMAGES = ("images cifar10", "images tiny_imagenet100", FLICKR)
PUBLISHED = ("minilm scifact", "minilm medquad", *IMAGES)
SPENT = ("test", "seconds", "extra_encodes")
ORDER = "NegativeCache GlobalCache ISIR SogCLR+ HCL EMC2 SogCLR ISogCLR InfoNCE DCL SigLIP SACLR"
AT_32 = [f"{name} @ 32" for name in ORDER.split()]
QUEUES = "InfoNCE @ 32|InfoNCE @ 128|InfoNCE @ 64 256 512|MomentumQueue @ 32|MomentumQueue @ 128"
LARGER = "InfoNCE @ 32|InfoNCE @ 128 256|InfoNCE @ 512|DCL @ 32|SogCLR @ 32|SogCLR+ @ 32|ISIR @ 32"
MINED = "GlobalCache @ 128 512|InfoNCE, mined each epoch @ 32 512|ISIR @ 32|MomentumQueue @ 32 512"
PAGE: list[tuple[str, Sequence[str], Sequence[str], Sequence[str]]] = [
    ("Small batches at equal pairs seen", PERCEPTRONS, ("test", "passes", "extra_encodes"), AT_32),
    *((POOL, [task], ["test"], ["before: GlobalCache @ 32"]) for task in PERCEPTRONS),
    *((POOL, [task], ["test"], ["before: GlobalCache @ 128"]) for task in TEXTS[:2]),
    (POOL, [FLICKR], ["test"], ["before: GlobalCache @ 32"]),
    (
        "A transformer from scratch",
        TEXTS,
        SPENT,
        [*QUEUES.split("|"), "GlobalCache @ 32", "GlobalCache @ 128"],
    ),
    (
        "Published encoders and images",
        PUBLISHED,
        ("test", "linear_probe"),
        [*LARGER.split("|"), "GlobalCache @ 32", "MomentumQueue @ 32"],
    ),
    (
        RIVALS,
        PERCEPTRONS,
        SPENT,
        [*AT_32[:2], *MINED.split("|"), "SogCLR+ @ 32", "InfoNCE @ 512 2048", "InfoNCE @ 32"],
    ),
]
"""Tables of docs/results.md: section, tasks, measures, and rows as "objective @ batch sizes"."""
POINTS = "Fine-tuning"
POINTS_DATA = ("medquad, 1,536 pairs", "papers, 1,536 pairs", "scifact", "functions, 1,536 pairs")
SMALL = (4, 8, 16, 32)
FIXED = {"rate": 4.0, "temperature": 0.03}
"""Settings of all on SciFact, where few held-out queries choose badly; ISIR has another rate."""


def page_tables(store: Store) -> list[Table]:
    """Return the tables of docs/results.md as far as a store has their tasks, by their headings."""
    groups = main_groups(store)
    tables: dict[str, list[dict[str, object]]] = {}
    for section, tasks, measures, rows in PAGE:
        for row in rows if groups.keys() >= set(tasks) else ():
            objective, _, sizes = row.partition(" @ ")
            line: dict[str, object] = {"objective": objective, "B": sizes.replace(" ", "; ")}
            for task, measure in product(tasks, measures):
                cells = (
                    shown(seeds, measure)
                    for seeds in groups[task]
                    if seeds.objective == objective and str(seeds.batch_size) in sizes.split()
                )
                line[f"{task}, {measure}"] = "; ".join(filter(None, cells))
            tables.setdefault(section, []).append(line)
    if points := list(points_over_infonce(store, groups)):
        tables[POINTS] = points
    return [Table(section, lines) for section, lines in tables.items()]


def shown(seeds: Seeds, measure: str) -> str:
    """Return a cell of a table; "" where it was not measured."""
    if measure in ("seconds", "extra_encodes"):
        return f"{seeds.mean(measure):.{0 if measure == 'seconds' else 2}f}"
    runs, name = (seeds.passes, "test") if measure == "passes" else (seeds.runs, measure)
    return spread(values(runs, name)) if values(runs, name) else ""


def points_over_infonce(
    store: Store, groups: dict[str, list[Seeds]]
) -> Iterator[dict[str, object]]:
    """Yield points over InfoNCE at the same batch, and of 128 cached by 8 over a batch of 8."""
    tasks = {data: f"minilm_beginnings {data}" for data in POINTS_DATA}
    if not groups.keys() >= set(tasks.values()):
        return
    quality: dict[tuple[str, str, int], float] = {}
    for task in tasks.values():
        fixed = FIXED if "scifact" in task else {}
        for seeds in groups[task]:
            cell = {"objective": seeds.objective, "batch_size": seeds.batch_size}
            runs = store.where(task=task, equal="pairs", **cell, **fixed)
            is_fixed = fixed and len(runs) > 1
            tests = values(runs if is_fixed else seeds.runs, "test")
            quality[task, *cell.values()] = statistics.mean(tests)
    queues = [(name, SMALL, SMALL) for name in ("MomentumQueue", "ISIR", "GlobalCache+", "SogCLR+")]
    for name, sizes, of_infonce in [*queues, ("InfoNCE, cached by 8", (128,), (8,))]:
        line: dict[str, object] = {"objective": name, "B": ", ".join(map(str, sizes))}
        for data, task in tasks.items():
            points = (
                100 * (quality[task, name, size] - quality[task, "InfoNCE", other])
                for size, other in zip(sizes, of_infonce, strict=True)
            )
            line[data] = ", ".join(f"{each:.1f}".replace("-", "−") for each in points)
        yield line
