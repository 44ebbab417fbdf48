"""Which objective should fine-tune a published encoder? Each for the same seconds of one core.

    python eval/fine_tuning.py run PAPERS --pairs 1536 --seconds 100
    python eval/fine_tuning.py run SCIFACT --seconds 40 --lora_rank 16 --rows "[InfoNCE,SogCLR+]"
    python eval/fine_tuning.py report

Texts of a BEIR folder are cut after 32 tokens; documents are those that a held-out or test query is
about. A row is an objective at a batch size; above 32 gradients are cached in chunks of 32. "mined"
gives each query the nearest document of the published encoder with at most 0.95 of its positive's
score; embedding for it counts as training time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import frame
import torch
import toys
from frame import Outcome, Run, Settings, Store, Trained, spread
from rows import objective_of
from tasks import Task, minilm, some_of
from variants import with_negatives

from dualenc.data import PairDataset
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import Objective
from dualenc.search.mining import Rule

STORE = frame.RESULTS / "fine_tuning.jsonl"
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
INFO_NCE = ("InfoNCE", "InfoNCE 128", "InfoNCE 512", "InfoNCE, mined")
ROWS = (*INFO_NCE, "SogCLR+", "SogCLR+ 128", "GlobalCache+")
SHOWN = ("before", *ROWS)
COLUMNS = {name: {"task": name, "lora_rank": 0} for name in ("papers", "medquad", "scifact")}
COLUMNS |= {f"{name}, 8e-5": {**COLUMNS[name], "rate": 8e-5} for name in ("medquad", "scifact")}


def equal_seconds(
    store: Store,
    task: Task,
    common: Settings,
    train: Callable[[Settings, int], Trained],
    seconds: float,
    temperatures: Sequence[float],
    rates: Sequence[float],
    seeds: int,
) -> None:
    """Tune τ at the first rate, then the rate, in a third of the seconds; test with all seeds.

    Steps are as many as fit into the seconds at the speed of the run before.
    """
    step_seconds = 0.0

    def speed(settings: Settings) -> float:
        one, four = (train(settings, steps).seconds for steps in (1, 4))
        return max(four - one, four / 40) / 3  # noise may exceed a step

    def measure(part: str, settings: Settings) -> Outcome:
        steps = max(1, round(settings["budget"] / (step_seconds or speed(settings))))
        model, _, spent = train(settings, steps)
        value = getattr(task, part)(model)["ndcg@10"]
        return {"steps": steps, "seconds": round(spent, 1), part: value}

    def quality(part: str, settings: Settings) -> float:
        nonlocal step_seconds
        [found] = store.get([common | settings], partial(measure, part))
        step_seconds = found["seconds"] / found["steps"]
        return found[part]

    def held_out(tried: list[tuple[str, float]]) -> list[float]:
        return [quality("validation", chosen | {name: value}) for name, value in tried]

    chosen: Settings = {"budget": seconds * (1 / 3), "rate": rates[0], "seed": 0}
    chosen |= frame.tune(["temperature"], temperatures, held_out, beyond_edge=0)
    chosen |= frame.tune(["rate"], rates, held_out)
    chosen["budget"] = seconds
    found = [quality("test", chosen | {"seed": seed}) for seed in range(seeds)]
    print(common["row"], spread(found, 4), chosen, flush=True)


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


def new_objective(pairs: PairDataset, name: str, settings: Settings) -> Objective:
    """Return the objective of a row, for pairs."""
    sizes = {"num_left": pairs.num_left, "num_right": pairs.num_right}
    given = {"temperature": settings["temperature"], "seed": settings["seed"]}
    return objective_of(name)(**sizes, **given)


def train(task: Task, settings: Settings, steps: int) -> Trained:
    """Train a row, such as "InfoNCE 128" or "InfoNCE, mined", for a number of steps."""
    name, _, batch = settings["row"].removesuffix(", mined").partition(" ")
    batch_size = int(batch or frame.ORDINARY_BATCH)
    torch.manual_seed(settings["seed"])
    model, pairs = task.new_model(), task.pairs
    objective = new_objective(pairs, name, settings)
    begun = time.process_time()
    if settings["row"].endswith(", mined"):
        pairs = with_negatives(
            model, pairs, Rule(num_negatives=1, relative=0.95), autocast="bfloat16"
        )
    size = {"batch_size": batch_size, "chunk_size": 32 if batch_size > 32 else None}
    rate = frame.scaled_rate(settings["rate"], batch_size)
    how = {"seed": settings["seed"], "max_steps": steps, "mixed_precision": "auto"}
    trained = frame.train(model, pairs, objective, learning_rate=rate, **size, **how)
    return trained._replace(seconds=time.process_time() - begun)


def run(
    path: Path,
    pairs: int | None = None,
    seconds: float = 100.0,
    rows: Sequence[str] = ROWS,
    temperatures: Sequence[float] = (0.03, 0.05),
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
    for row in rows:
        own, trained = {**common, "row": row}, partial(train, task)
        equal_seconds(store, task, own, trained, seconds, temperatures, rates, seeds)


def report(results: Path = STORE) -> None:
    """Print all tested runs, and the table of docs/results.md."""
    store = Store(results)
    frame.print_runs("Tested runs", tested(store), digits=4)
    print_table(Table("Side by side", side_by_side(store, SHOWN, COLUMNS)))


def check(folder: Path) -> None:
    """Tune what takes half a second per step and is best at a rate of 0.4; run on toy data."""
    store, quality = Store(folder / "law.jsonl"), lambda rate: {"ndcg@10": -abs(rate - 0.4)}
    law: Any = SimpleNamespace(validation=quality, test=quality)

    def trained(settings: Settings, steps: int) -> Trained:
        return Trained(settings["rate"], steps, 0.5 * steps)

    common = {"task": "law", "row": "row"}
    equal_seconds(store, law, common, trained, 30.0, (0.03, 0.05), (0.1, 0.2), seeds=2)
    found = [(each.settings["rate"], each.outcome["steps"]) for each in store.where(budget=30.0)]
    assert found == [(0.4, 60), (0.4, 60)]
    path, model = toys.beir(folder / "toy"), str(toys.text_model(folder / "model"))
    rows, file = ("InfoNCE, mined", "InfoNCE 34"), folder / "toy.jsonl"
    run(path, 35, 0.05, rows, rates=(1e-3,), seeds=1, model=model, results=file)
    assert len(Store(file).runs) == 1 + 2 * (2 + 1)
    report(file)


if __name__ == "__main__":
    frame.command_line(run, report, check=check)
