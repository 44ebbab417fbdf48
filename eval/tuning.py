"""Is `dualenc tune` worth its minutes? Beside the recipe as it is, and ten random settings.

    python eval/tuning.py run MEDQUAD static --minutes 1
    python eval/tuning.py report

Data are random training pairs and test queries of a BEIR folder, texts cut after 32 words (16 for
MiniLM, whose steps are slow). What a row chose is trained once more for the seconds of a trial,
"whole" for all minutes, and measured on test queries, which nothing has seen. All seconds are by
the clock.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import frame
import numpy as np
import toys
from frame import Settings, Store, spread
from tasks import beir_parts, default_model

import dualenc
from dualenc.evaluation.report_page import Table, print_table
from dualenc.recipe.resolve import Recipe, make_recipe
from dualenc.recipe.yaml_files import dump_recipe
from dualenc.training import RetrievalEvaluator
from dualenc.workflows.tuning_space import (
    Range,
    Values,
    default_space,
    own_values,
    with_values,
    without_large_batches,
)
from dualenc.workflows.tuning_trial import Bench

STORE = frame.RESULTS / "tuning.jsonl"
TRIALS, RANDOM = 8, 10
ROWS = ("recipe", "recipe, whole", "random", "tune, best", "tune, taken", "tune, taken, whole")
SOGCLR = {"class_path": "SogCLR", "init_args": {"gamma": 0.5, "positive_in_softmax": True}}
CACHE = {"class_path": "GlobalCache"}
CONFIG = {"model_type": "bert", "hidden_size": 64, "num_hidden_layers": 1}
CONFIG |= {"num_attention_heads": 2, "intermediate_size": 256, "max_position_embeddings": 64}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "static": ("StaticEncoder", {"words": ""}, SOGCLR, {"batch_size": 128, "learning_rate": 0.01}),
    "vectors": ("VectorEncoder", {}, CACHE, {"batch_size": 128, "learning_rate": 3e-3}),
    "scratch": (
        "TextEncoder",
        {"config": CONFIG, "tokenizer": "", "max_length": 48},
        CACHE,
        {"batch_size": 128, "learning_rate": 1e-3},
    ),
    "minilm": (
        "TextEncoder",
        {"name": "", "max_length": 32},
        SOGCLR,
        {"batch_size": 32, "learning_rate": 2e-5},
    ),
}
"""Model, objective and trainer of the recipes static, vectors_adapter, papers_small_bert and
text_pairs."""


def small(path: Path, folder: Path, train: int, test: int, words: int) -> None:
    """Write random training pairs and test queries of a folder, and the documents of both."""
    pairs, _, tested = beir_parts(path)
    draw = np.random.default_rng(0)

    def cut(text: str) -> str:
        return " ".join(text.split()[:words])

    queries, corpus, judged = {}, {}, {"train": [], "test": []}
    for row in draw.permutation(len(pairs))[:train]:
        left, right = pairs.left_id[row], pairs.right_id[row]
        queries[f"q{left}"] = cut(pairs.left_items[left])
        corpus[f"d{right}"] = cut(pairs.right_items[right])
        judged["train"].append(f"q{left}\td{right}")
    texts = dict(zip(tested.corpus.ids, tested.corpus.items, strict=True))
    for row in draw.permutation(len(tested.queries))[:test]:
        query = tested.queries.ids[row]
        queries[f"t{row}"] = cut(tested.queries.items[row])
        for own in tested.qrels[query]:
            corpus[f"t{own}"] = cut(texts[own])
            judged["test"].append(f"t{row}\tt{own}")
    toys.write_beir(folder, queries, corpus, judged)


def recipe_of(kind: str, data: Path, model: str, seed: int, output: Path) -> Recipe:
    """Return the recipe of a kind; `model` brings words or a tokenizer."""
    name, given, objective, trainer = KINDS[kind]
    own = {key: value or model for key, value in given.items()}
    return make_recipe(
        {
            "model": {"class_path": name, "init_args": own},
            "data": {"class_path": "BeirPairs", "init_args": {"path": str(data)}},
            "objective": objective,
            "trainer": {**trainer, "held_out": 0.3, "output": str(output), "seed": seed},
        }
    )


def randomly(recipe: Recipe, bench: Bench, seed: int) -> Values:
    """Return the best of ten random settings by all held-out queries."""
    draw, tried = np.random.default_rng(seed), []
    space = without_large_batches(default_space(recipe), len(bench.pairs))
    for _ in range(RANDOM):
        values: Values = {}
        for name, own in space.items():
            if isinstance(own, Range):
                values[name] = float(np.exp(draw.uniform(np.log(own.low), np.log(own.high))))
            else:
                values[name] = own.values[draw.integers(len(own.values))]
        other = with_values(recipe, values)
        trial = bench.run(other, bench.steps(other), lambda *_: False)
        tried.append((trial.scores.mean(), len(tried), values))
    return max(tried)[2]


def measured(recipe: Recipe, bench: Bench, seconds: float, data: Path) -> float:
    """Train for some seconds on all training pairs; return nDCG@10 on test queries."""
    parts, evaluator = recipe.build(), RetrievalEvaluator(data, split="test")
    steps = max(int(seconds / bench.step_seconds(recipe)), 1)
    given = recipe.settings["trainer"]
    names = ("batch_size", "learning_rate", "chunk_size", "seed")
    settings = {name: given[name] for name in names} | {"max_steps": steps}
    model = frame.train(parts["model"], parts["data"], parts["objective"], **settings).model
    return evaluator(model)["ndcg@10"]


def once(data: Path, model: str, settings: Settings) -> dict[str, Any]:
    """Choose by each row with one seed, and measure."""
    minutes = settings["minutes"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recipe = recipe_of(settings["kind"], data, model, settings["seed"], folder / "run")
        file = folder / "recipe.yaml"
        file.write_text(dump_recipe(recipe.settings))
        tuned = dualenc.tune(file, minutes=minutes, trials=TRIALS, seed=settings["seed"])
        bench = Bench.of(recipe, 60 * minutes / RANDOM, folder / "trial")
        best = tuned.trials[tuned.verdict.best].values
        chosen = {"recipe": own_values(recipe, default_space(recipe))}
        chosen |= {"random": randomly(recipe, bench, settings["seed"])}
        chosen |= {"tune, best": best, "tune, taken": tuned.values}
        outcome: dict[str, Any] = {"trials": len(tuned.trials), "chosen": chosen}
        outcome["verdict"] = tuned.verdict.text
        done: dict[str, float] = {}
        for row in ROWS:
            whole = row.endswith(", whole")
            seconds = 60 * minutes / (1 if whole else TRIALS)
            own = with_values(recipe, chosen[row.removesuffix(", whole")])
            key = f"{own.settings} {seconds}"
            if key not in done:
                done[key] = round(measured(own, bench, seconds, data), 4)
            outcome[row] = done[key]
    return outcome


def run(
    path: Path,
    kind: str,
    model: str | None = None,
    minutes: float = 1.0,
    train: int = 2000,
    test: int = 500,
    words: int = 32,
    seeds: int = 3,
    results: Path = STORE,
) -> None:
    """Measure all rows on a part of a folder."""
    model = model or default_model()
    with tempfile.TemporaryDirectory() as name:
        data = Path(name, "texts")
        small(path, data, train, test, words)
        if kind == "vectors":
            vectors = Path(name, "vectors")
            dualenc.embed(model, str(data), out=vectors / "corpus")
            dualenc.embed(model, str(data), out=vectors / "queries", side="left")
            shutil.copytree(data / "qrels", vectors / "qrels")
            data = vectors
        wanted = {"task": path.name, "kind": kind, "minutes": minutes, "words": words}
        wanted |= {"train": train, "test": test, "model": Path(model).name}
        Store(results).get(
            [{**wanted, "seed": seed} for seed in range(seeds)],
            lambda settings: once(data, model, settings),
        )


def report(results: Path = STORE) -> None:
    """Print the table of docs/tuning.md."""
    table = []
    for runs in frame.by_seed(Store(results).runs):
        own = runs[0].settings
        table.append({"task": f"{own['task']}, {own['kind']}", "minutes": own["minutes"]})
        table[-1] |= {row: spread([each.outcome[row] for each in runs]) for row in ROWS}
    print_table(Table("nDCG@10 on test queries", table))


def check(folder: Path) -> None:
    """Run on toy data, where each query is a part of its document."""
    path, file = toys.beir(folder / "toy"), folder / "toy.jsonl"
    KINDS["static"][3].update(batch_size=8)
    run(path, "static", minutes=0.2, train=36, test=12, seeds=1, results=file)
    assert set(ROWS) <= Store(file).runs[0].outcome.keys()
    report(file)


if __name__ == "__main__":
    frame.command_line(run, report, check=check)
