"""Which objective should fine-tune a published encoder? Each for the same seconds of one core, on
beginnings of texts.

    python eval/finetuning.py run FOLDER --pairs 1536 --seconds 100
    python eval/finetuning.py run FOLDER --pairs 1536 --seconds 100 --lora_rank 16 --rows
    "[InfoNCE,SogCLR+]" python eval/finetuning.py report

FOLDER is in BEIR's form. A row is an objective, a batch size, and what comes with it: "InfoNCE 512"
caches gradients in chunks of 32; "mined" gives each query the first negative that the published
encoder ranks behind its positive, with at most 0.95 of its score. Embedding for it counts as
training time.

Every row is tuned alike: with the first seed and a third of the seconds τ at the first learning
rate, then the learning rate, by nDCG@10 on held-out queries, the rate on past an edge. Steps are as
many as fit into the seconds at the speed of the run before. Documents are those that a held-out or
a test query is about. One line per run is added to --results, and a run that is there already is
not made again.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from comparison_tasks import Retrieval, beginnings, some_of
from hard_negatives import with_negatives
from small_batch import OBJECTIVES

from dualenc.data import PairDataset
from dualenc.data.corpus import Corpus, RetrievalSet, corpora
from dualenc.encoders import DualEncoder, TextEncoder
from dualenc.evaluation.report_page import Table, print_table
from dualenc.search.embed.encode import embed
from dualenc.search.hard_negatives import Rule
from dualenc.search.mining import mine_negatives
from dualenc.training import Trainer

RESULTS = Path("eval/results/finetuning.jsonl")
TOKENS = 32
CHUNK = 32
TEMPERATURES = (0.03, 0.05)
RATES = (2e-5, 4e-5)
"""At a batch of 32; they grow with the square root of the batch."""
BEYOND_EDGE = 2
TUNING = 1 / 3
"""Of the seconds, while tuning."""


class Row(NamedTuple):
    """A line of the table."""

    objective: str
    batch_size: int = 32
    mined: bool = False


ROWS = {
    "InfoNCE": Row("InfoNCE"),
    "InfoNCE 128": Row("InfoNCE", 128),
    "InfoNCE 512": Row("InfoNCE", 512),
    "InfoNCE, mined": Row("InfoNCE", mined=True),
    "SogCLR+": Row("SogCLR+"),
    "SogCLR+ 128": Row("SogCLR+", 128),
    "GlobalCache+": Row("GlobalCache+"),
}


class Task(NamedTuple):
    """Training pairs, queries to tune by and queries to report, and a new model."""

    pairs: PairDataset
    validation: Retrieval
    test: Retrieval
    new_model: Callable[[], DualEncoder]


def open_task(path: Path, num_pairs: int | None, model: str, lora_rank: int) -> Task:
    """The beginnings of a BEIR folder's texts, and a random part of its pairs."""
    pairs, validation, test = beginnings(path, words=TOKENS)
    judged = {
        document
        for part in (validation, test)
        for of_query in part.qrels.values()
        for document in of_query
    }
    kept = [row for row, own in enumerate(test.corpus.ids) if own in judged]
    documents = Corpus(
        [test.corpus.ids[row] for row in kept], [test.corpus.items[row] for row in kept]
    )

    def retrieval(part: RetrievalSet) -> Retrieval:
        return Retrieval(part._replace(corpus=documents))

    def new_model() -> DualEncoder:
        return TextEncoder(model, max_length=TOKENS, lora_rank=lora_rank)

    if num_pairs is not None and num_pairs < len(pairs):
        pairs = some_of(pairs, num_pairs)
    return Task(pairs, retrieval(validation), retrieval(test), new_model)


def train(task: Task, row: Row, settings: dict[str, Any], steps: int) -> tuple[DualEncoder, float]:
    """Train for so many steps; the model, and the seconds of one core that it took."""
    torch.manual_seed(settings["seed"])
    model = task.new_model()
    pairs = task.pairs
    criterion = OBJECTIVES[row.objective](
        temperature=settings["temperature"],
        seed=settings["seed"],
        num_left=pairs.num_left,
        num_right=pairs.num_right,
    )
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        if row.mined:
            embedded = [
                embed(tower, corpus, work / side, autocast="bfloat16", progress=False)
                for side, tower, corpus in zip(
                    ("left", "right"), (model.left, model.right), corpora(pairs)
                )
            ]
            rule = Rule(num_negatives=1, relative=0.95)
            mine_negatives(*embedded, pairs, work / "mined.jsonl", rule=rule, progress=False)
            pairs = with_negatives(pairs, work / "mined.jsonl")
        trainer = Trainer(
            output=work / "run",
            batch_size=row.batch_size,
            chunk_size=CHUNK if row.batch_size > CHUNK else None,
            max_steps=steps,
            learning_rate=settings["rate"] * (row.batch_size / 32) ** 0.5,
            mixed_precision="auto",
            save_every=None,
            seed=settings["seed"],
            progress=False,
        )
        trainer.fit(model, pairs, criterion)
    return model, time.process_time() - begun


class Results:
    """Finished runs, one JSON object per line, found by their settings."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.runs: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def find(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        return next((run for run in self.runs if settings.items() <= run.items()), None)

    def add(self, run: dict[str, Any]) -> None:
        self.runs.append(run)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")


def run(
    path: Path,
    pairs: int | None = None,
    seconds: float = 100.0,
    rows: Sequence[str] = tuple(ROWS),
    rates: Sequence[float] = RATES,
    seeds: int = 3,
    lora_rank: int = 0,
    model: str = "sentence-transformers/all-MiniLM-L6-v2",
    results: Path = RESULTS,
) -> None:
    """Tune and train rows on one folder.

    Args:
        path: BEIR folder.
        pairs: train on a random part of so many pairs.
        seconds: of one core that every run may take; a third of them while tuning.
        rows: names of rows.
        rates: learning rates to choose from, at a batch of 32, and on past an edge above; a single
            one is taken.
        seeds: of each row.
        lora_rank: rank of adapters; 0 trains all weights.
        model: folder or hub name of the published encoder.
        results: where finished runs are kept.
    """
    torch.set_num_threads(1)
    task, kept = open_task(path, pairs, model, lora_rank), Results(results)
    common = {"task": path.name, "pairs": len(task.pairs), "lora_rank": lora_rank}
    if kept.find({**common, "row": "before"}) is None:
        published = task.new_model().eval()
        measured = {
            "validation": task.validation(published)["ndcg@10"],
            "test": task.test(published)["ndcg@10"],
        }
        kept.add({**common, "row": "before", **measured})
    for name in rows:
        trainings = Trainings(task, ROWS[name], {**common, "row": name}, kept)
        temperature, rate = trainings.tune(seconds * TUNING, rates)
        found = [
            trainings.measure(seconds, temperature, rate, seed, tuning=False)["test"]
            for seed in range(seeds)
        ]
        print(
            f"{path.name} {name}: {[round(one, 4) for one in found]} τ {temperature} rate {rate}",
            flush=True,
        )


class Trainings:
    """The trainings of one row of a task.

    Args:
        task: data and model.
        row: the row.
        common: what the settings of all of them have in common.
        kept: earlier runs, to which new ones are added.
    """

    first_steps = 2
    """Of the run that measures how long a step takes."""

    def __init__(self, task: Any, row: Any, common: dict[str, Any], kept: Results) -> None:
        self.task = task
        self.row = row
        self.common = common
        self.kept = kept
        self.step_seconds = 0.0

    def train(self, settings: dict[str, Any], steps: int) -> tuple[DualEncoder, float]:
        """Train for so many steps; the model, and the seconds of one core that it took."""
        return train(self.task, self.row, settings, steps)

    def tune(self, seconds: float, rates: Sequence[float]) -> tuple[float, float]:
        """The best τ at the first rate, and the best rate at that τ."""

        def quality(temperature: float, rate: float) -> float:
            return self.measure(seconds, temperature, rate, 0, tuning=True)["validation"]

        temperature = max(TEMPERATURES, key=lambda value: quality(value, rates[0]))
        if len(rates) == 1:
            return temperature, rates[0]
        tried = list(rates)
        best = max(tried, key=lambda rate: quality(temperature, rate))
        while best == tried[-1] and len(tried) < len(rates) + BEYOND_EDGE:
            tried.append(2 * best)
            best = max(tried, key=lambda rate: quality(temperature, rate))
        return temperature, best

    def measure(
        self, seconds: float, temperature: float, rate: float, seed: int, tuning: bool
    ) -> dict[str, Any]:
        """One run with these settings: an earlier one, or a new one."""
        settings = {
            **self.common,
            "budget": seconds,
            "temperature": temperature,
            "rate": rate,
            "seed": seed,
        }
        found = self.kept.find(settings)
        if found is None:
            if self.step_seconds == 0:
                spent = [self.train(settings, steps)[1] for steps in (1, 1 + self.first_steps)]
                self.step_seconds = (spent[1] - spent[0]) / self.first_steps
            steps = max(1, round(seconds / self.step_seconds))
            model, spent_seconds = self.train(settings, steps)
            measured = (self.task.validation if tuning else self.task.test)(model.eval())["ndcg@10"]
            found = {**settings, "steps": steps, "seconds": round(spent_seconds, 1)}
            found["validation" if tuning else "test"] = measured
            self.kept.add(found)
        self.step_seconds = found["seconds"] / found["steps"]
        return found


def report(results: Path = RESULTS) -> None:
    """Print a table for each task."""
    kept = Results(results)
    tasks = dict.fromkeys((run["task"], run["pairs"], run["lora_rank"]) for run in kept.runs)
    for task, pairs, lora_rank in tasks:
        common = {"task": task, "pairs": pairs, "lora_rank": lora_rank}
        table = []
        tested = [run for run in kept.runs if common.items() <= run.items() and "test" in run]
        for name, rate, temperature in dict.fromkeys(
            (r["row"], r.get("rate"), r.get("temperature")) for r in tested
        ):
            own = [
                r
                for r in tested
                if (r["row"], r.get("rate"), r.get("temperature")) == (name, rate, temperature)
            ]
            values = [run["test"] for run in own]
            cells: dict[str, Any] = {"row": name, "ndcg@10": statistics.mean(values)}
            if len(own) > 1:
                cells |= {
                    "deviation": statistics.stdev(values),
                    "seconds": statistics.mean(r["seconds"] for r in own),
                }
                cells |= {"steps": own[0]["steps"], "τ": temperature, "rate": f"{rate:.0e}"}
            table.append(cells)
        title = f"{task}, {pairs:,} pairs, " + (
            f"LoRA of rank {lora_rank}" if lora_rank else "all weights"
        )
        print_table(Table(title, table))


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli([run, report])
