"""Which objective should fine-tune a published encoder? Each for the same seconds of one core.

    python eval/fine_tuning.py run PAPERS --pairs 1536 --seconds 100
    python eval/fine_tuning.py run SCIFACT --seconds 40 --lora_rank 16 --rows "[InfoNCE,SogCLR+]"
    python eval/fine_tuning.py report

Texts of a BEIR folder are cut after 32 tokens; documents are those that a held-out or test query is
about. A row is an objective at a batch size; above 32 gradients are cached in chunks of 32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import frame
import torch
import toys
from frame import Outcome, Run, Settings, Store, Trained, spread
from rows import objective_of, sizes_of
from tasks import Task, minilm, some_of

from dualenc.evaluation.report_page import Table, print_table

STORE = frame.RESULTS / "fine_tuning.jsonl"
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
ROWS = ("InfoNCE", "InfoNCE 128", "InfoNCE 512", "SogCLR+", "SogCLR+ 128", "GlobalCache+")
SHOWN = ("before", *ROWS[:3], "InfoNCE, mined", *ROWS[3:])
TEMPERATURES = (0.03, 0.05)
COLUMNS = {name: {"task": name, "lora_rank": 0} for name in ("papers", "medquad", "scifact")}
COLUMNS |= {f"{name}, 8e-5": {**COLUMNS[name], "rate": 8e-5} for name in ("medquad", "scifact")}


def equal_seconds(
    store: Store,
    task: Task,
    train: Callable[[Settings, int], Trained],
    wanted: dict[str, Settings],
    seconds: float,
    rates: Sequence[float],
    seeds: int,
) -> None:
    """Tune τ at the first rate, then the rate, in a third of the seconds; test with all seeds.

    Steps are as many as fit into the seconds at the speed of the run before of the same row.
    """
    speeds: dict[str, float] = {}

    def measure(settings: Settings) -> Outcome:
        row = settings["row"]
        if row not in speeds:
            one, four = (train(settings, steps).seconds for steps in (1, 4))
            speeds[row] = max(four - one, four / 40) / 3  # noise may exceed a step
        steps = max(1, round(settings["budget"] / speeds[row]))
        model, _, spent = train(settings, steps)
        speeds[row] = spent / steps
        part = "test" if settings["budget"] == seconds else "validation"
        value = getattr(task, part)(model)["ndcg@10"]
        return {"steps": steps, "seconds": round(spent, 1), part: value}

    short = {"budget": seconds * (1 / 3), "rate": rates[0]}
    trials = {row: settings | short for row, settings in wanted.items()}
    tuned = frame.choose(store, measure, trials, {"temperature": TEMPERATURES}, beyond_edge=0)
    trials = {row: settings | tuned[row] for row, settings in trials.items()}
    tuned = frame.choose(store, measure, trials, {"rate": rates})
    final = {row: trials[row] | tuned[row] | {"budget": seconds} for row in wanted}
    frame.repeat(store, measure, final, seeds)


def tested(store: Store, **settings: Any) -> list[Run]:
    """Return the runs with some settings that were tested."""
    return [each for each in store.where(**settings) if "test" in each.outcome]


def side_by_side(
    store: Store, rows: Sequence[str], columns: dict[str, Settings]
) -> list[dict[str, str]]:
    """Return rows of docs/results.md: of each column, quality and steps as first tuned."""
    table = []
    for row in rows:
        table.append({"row": row})
        for title, settings in columns.items():
            own = next(iter(frame.by_seed(tested(store, row=row, **settings))), [])
            steps = [str(each.outcome.get("steps", "–")) for each in own]
            table[-1][title] = spread([each.outcome["test"] for each in own])
            table[-1][f"steps, {title}"] = ", ".join(steps)
    return table


def train(task: Task, settings: Settings, steps: int, static: bool = False) -> Trained:
    """Train a row, such as "InfoNCE 128", for a number of steps; transformers in bfloat16."""
    name, _, batch = settings["row"].partition(" ")
    batch_size = min(int(batch or frame.ORDINARY_BATCH), len(task.pairs))
    torch.manual_seed(settings["seed"])
    model, pairs = task.new_model(), task.pairs
    given = {"temperature": settings["temperature"], "seed": settings["seed"]}
    trainer = {"batch_size": batch_size, "max_steps": steps, "seed": settings["seed"]}
    trainer["learning_rate"] = settings["rate"]
    if not static:
        trainer["learning_rate"] = frame.scaled_rate(settings["rate"], batch_size)
        trainer |= {"chunk_size": 32 if batch_size > 32 else None, "mixed_precision": "auto"}
    return frame.train(model, pairs, objective_of(name)(**sizes_of(pairs), **given), **trainer)


def run(
    path: Path,
    pairs: int | None = None,
    seconds: float = 100.0,
    rows: Sequence[str] = ROWS,
    rates: Sequence[float] = (2e-5, 4e-5),
    seeds: int = 3,
    lora_rank: int = 0,
    model: str = MINILM,
    results: Path = STORE,
) -> None:
    """Tune and train rows, named by objective and batch size, on random pairs of a folder."""
    task, store = minilm(path, model, lora_rank, max_tokens=32, max_documents=0), Store(results)
    if pairs is not None and pairs < len(task.pairs):
        task.pairs = some_of(task.pairs, pairs)

    def published(settings: Settings) -> Outcome:
        encoder, parts = task.new_model().eval(), ("validation", "test")
        return {part: getattr(task, part)(encoder)["ndcg@10"] for part in parts}

    common = {"task": path.name, "pairs": len(task.pairs), "lora_rank": lora_rank}
    store.get([{**common, "row": "before"}], published)
    wanted = {row: {**common, "row": row} for row in rows}
    equal_seconds(store, task, partial(train, task), wanted, seconds, rates, seeds)


def print_stored(path: Path, rows: Sequence[str], columns: dict[str, Settings]) -> None:
    """Print all tested runs of a store, and its table of docs/results.md."""
    store = Store(path)
    frame.print_runs("Tested runs", tested(store), digits=4)
    print_table(Table("Side by side", side_by_side(store, rows, columns)))


def report() -> None:
    """Print all tested runs, and the table of docs/results.md."""
    print_stored(STORE, SHOWN, COLUMNS)


def check(folder: Path) -> None:
    """Tune what takes half a second per step and is best at a rate of 0.4; run on toy data."""
    store, quality = Store(folder / "law.jsonl"), lambda rate: {"ndcg@10": -abs(rate - 0.4)}
    law: Any = SimpleNamespace(validation=quality, test=quality)

    def trained(settings: Settings, steps: int) -> Trained:
        return Trained(settings["rate"], steps, 0.5 * steps)

    wanted = {"row": {"task": "law", "row": "row"}}
    equal_seconds(store, law, trained, wanted, 30.0, rates=(0.1, 0.2), seeds=2)
    found = [(each.settings["rate"], each.outcome["steps"]) for each in store.where(budget=30.0)]
    assert found == [(0.4, 60), (0.4, 60)]
    path, model = toys.beir(folder / "toy"), str(toys.text_model(folder / "model"))
    rows, file = ("SogCLR+", "InfoNCE 34"), folder / "toy.jsonl"
    run(path, 35, 0.05, rows, rates=(1e-3,), seeds=1, model=model, results=file)
    assert len(Store(file).runs) == 1 + 2 * (2 + 1)
    print_stored(file, rows, {"toy": {"task": "toy"}})


if __name__ == "__main__":
    frame.command_line(run, report, check=check)
