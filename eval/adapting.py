"""What is training against the whole index worth, where the documents' vectors stay fixed?

    python eval/adapting.py run DATA VECTORS "[scifact,medquad]"          # for equal seconds
    python eval/adapting.py keep DATA VECTORS medquad "[scifact,papers]"  # a part of the weights
    python eval/adapting.py few DATA VECTORS medquad                      # with few pairs
    python eval/adapting.py text DATA VECTORS scifact MODEL               # the text model itself
    python eval/adapting.py report --figures docs/figures

DATA/NAME is a BEIR folder, and VECTORS/NAME/{corpus,queries} is what `dualenc embed` made of its
sides. Queries pass through a map that begins as the identity. A tenth of the training pairs, at
most 500 queries, is held out by documents, as `dualenc adapt` does. Test nDCG@10 is over all
documents: of all queries, of those with a relevant document in training ("seen"), and of those with
none in any pair of train.tsv ("new"). Each method is tuned on held-out queries with the first seed,
τ and then the rate. A run keeps its best evaluation. Seconds are of one core, without evaluations.

"text" trains the model that made the vectors, with settings that are not tuned. Its way "whole" is
`SogCLR` with the positive in the softmax, and all documents are embedded again, in bfloat16.
"queries" and "lora" are `FrozenCorpus`: the query tower whole, or adapters of rank 16, over the
documents' vectors as they are.
"""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

import frame
import numpy as np
import torch
import toys
from adapting_task import GROUPS, Task, scores_of, write_task
from frame import Outcome, Run, Settings, Store
from matplotlib.figure import Figure
from torch import Tensor

from dualenc.data import PairDataset, open_corpus
from dualenc.data.readers.beir import read_beir
from dualenc.encoders import IndexEncoder, TextEncoder, interpolate
from dualenc.evaluation.metrics import paired_bootstrap
from dualenc.evaluation.plots import COLORS, as_svg
from dualenc.evaluation.report_page import Table, print_table
from dualenc.io.provenance import Provenance
from dualenc.objectives import FrozenCorpus, InfoNCE, Objective, SogCLR
from dualenc.search.embed.encode import embed
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.workflows.adapting import SHARES, best_share, score_interpolations

STORE = frame.RESULTS / "adapting.jsonl"
TEMPERATURES = (0.02, 0.03, 0.05, 0.1)
RATES = (1e-3, 3e-4, 3e-3)
"""At a batch of 32; the first while τ is chosen."""
EVALUATIONS, SEEDS = 10, 3
MIN_STEPS = 300
"""Of trainings with few pairs, whose epochs are short."""
EXACT = "FrozenCorpus+"
"""With the positive in the softmax."""
METHODS = {
    EXACT: (32, 0, 0),
    "FrozenCorpus": (32, 0, 0),
    "InfoNCE, B = 32": (32, 0, 0),
    "InfoNCE, B = 512": (512, 0, 0),
    "InfoNCE, 512 drawn": (32, 512, 0),
    "InfoNCE, mined": (32, 0, 8),
}
"""Batch size, documents drawn as negatives of a step, and negatives mined for each query."""
NUMBERS = ("spent", "embedding", "done", "best", "share", "kept", "milliseconds")
LEARNED = {"temperature": "τ", "rate": "rate", "block": "block", "least": "least"}


class Training:
    """A training of a map of queries, for a number of steps or seconds, and its clock."""

    def __init__(self, task: Task, settings: Settings, objective: Objective | None = None) -> None:
        self.task, self.settings = task, settings
        self.batch_size, self.drawn, self.num_mined = METHODS[settings["method"]]
        torch.manual_seed(settings["seed"])
        self.random = torch.Generator().manual_seed(settings["seed"])
        self.original = task.new_map(settings["map"])
        self.model = copy.deepcopy(self.original)
        self.objective = objective or new_objective(task, settings)
        self.rate = frame.scaled_rate(settings["rate"], self.batch_size)
        weights = self.model.left.parameters()
        self.optimizer = torch.optim.AdamW(weights, self.rate, weight_decay=0.01)
        self.steps, self.seconds = 0, 0.0
        self.mined = torch.full((len(task.queries), self.num_mined), -1)
        self.batches = self.random_batches()

    @property
    def progress(self) -> float:
        """Share of the training that is done."""
        if "seconds" in self.settings:
            return self.seconds / self.settings["seconds"]
        return self.steps / self.settings["steps"]

    def run(self) -> Outcome:
        """Train, and measure the last weights and those of the best evaluation."""
        tried = []
        for due in range(EVALUATIONS + 1):
            self.train(until=due / EVALUATIONS)
            scores = [scores_of(self.model, part) for part in self.task.held_out.values()]
            quality = statistics.mean(score for part in scores for score in part)
            tried.append((quality, self.progress, copy.deepcopy(self.model)))
        quality, progress, best = max(tried, key=lambda each: each[0])
        last = self.task.grouped(self.task.scores(self.model))
        outcome: Outcome = {"validation": round(quality, 4)}
        if "known" in self.task.held_out:
            # As `dualenc adapt` does: what is best for both kinds, and costs new documents nothing.
            points = score_interpolations(self.original, best, self.task.held_out)
            outcome["share"] = best_share(points, "new", ["new", "known"])
            best.load_state_dict(interpolate(self.original, best, outcome["share"]))
        outcome |= self.task.grouped(self.task.scores(best))
        outcome |= {"last": {name: last[name] for name in GROUPS if name in last}}
        outcome |= {"spent": round(self.seconds, 2), "done": self.steps}
        return outcome | {"best": round(progress, 2)}

    def train(self, until: float = 1.0) -> None:
        """Train up to a share of the training."""
        while self.progress < until:
            begun = time.process_time()
            self.step(next(self.batches))
            self.seconds += time.process_time() - begun

    def random_batches(self) -> Iterator[Tensor]:
        """Yield batches (B, 2) of random pairs without end, and mine at the start of an epoch."""
        pairs = torch.from_numpy(self.task.pairs)
        batch_size = min(self.batch_size, len(pairs))
        while True:
            if self.num_mined:
                self.mine()
            order = torch.randperm(len(pairs), generator=self.random)
            for start in range(0, len(pairs) - batch_size + 1, batch_size):
                yield pairs[order[start : start + batch_size]]

    @torch.no_grad()
    def mine(self) -> None:
        """Find (Q, mined) near documents, below 0.95 of the best positive's score."""
        task = self.task
        for rows in torch.from_numpy(task.pairs[:, 0]).unique().split(1024):
            embeddings = self.model.left({"vector": task.queries[rows]})
            scores = embeddings @ task.documents.T  # (n, N)
            positives = task.positives[rows]  # (n, K)
            # The first of a query is never padding.
            positives = torch.where(positives < 0, positives[:, :1], positives)
            highest = 0.95 * scores.gather(1, positives).amax(dim=1, keepdim=True)
            scores.scatter_(1, positives, -torch.inf)
            scores.masked_fill_(scores > highest, -torch.inf)
            values, nearest = scores.topk(self.num_mined)
            self.mined[rows] = nearest.masked_fill(values.isinf(), -1)

    def step(self, pairs: Tensor) -> None:
        """Train on a batch (B, 2): a tenth of warm-up, then along a cosine, as `Trainer` does."""
        decay = (1 + math.cos(math.pi * self.progress)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, 0.01 + 10 * self.progress) * decay
        queries, documents = pairs.unbind(dim=1)
        lists = {"left_positives": self.task.positives[queries]}
        if self.drawn or self.num_mined:
            num_documents = len(self.task.documents)
            drawn = torch.randint(num_documents, (self.drawn,), generator=self.random)
            mined = self.mined[queries].unique()
            rows = mined[mined >= 0] if self.num_mined else drawn
            lists |= {"negatives": self.task.documents[rows], "negative_id": rows}
        embeddings = self.model.left({"vector": self.task.queries[queries]})
        partners = self.task.documents[documents]
        loss = self.objective(embeddings, partners, queries, documents, **lists).loss
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.left.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1


def new_objective(task: Task, settings: Settings) -> Objective:
    """Return the objective of a training."""
    common = {"temperature": settings["temperature"], "num_left": len(task.queries)}
    if settings["method"].startswith("InfoNCE"):
        return InfoNCE(num_right=len(task.documents), **common)
    common["positive_in_softmax"] = settings["method"] == EXACT
    return FrozenCorpus(task.documents, **common)


def trained(store: Store, task: Task, common: Settings, own: Sequence[Settings]) -> list[Outcome]:
    """Return the outcomes of trainings, from the settings that they share and their own ones."""
    common = {"task": task.name, **common}
    if "known" in task.held_out:
        common["held_out"] = "both"
    wanted = [{**common, **each} for each in own]
    return store.get(wanted, lambda settings: Training(task, settings).run())


def tune_and_train(
    store: Store, task: Task, common: Settings, length: Settings, tuning: float
) -> tuple[Settings, list[Outcome]]:
    """Choose τ and the rate by a `tuning` share of the length; return them, and all seeds' runs."""
    digits = {"seconds": 1, "steps": None}
    short = {name: round(tuning * value, digits[name]) for name, value in length.items()}
    tuned: Settings = {"rate": RATES[0]}

    def held_out(tried: list[tuple[str, float]]) -> list[float]:
        own = [{**tuned, name: value, "seed": 0} for name, value in tried]
        return [each["validation"] for each in trained(store, task, common | short, own)]

    tuned |= frame.tune(["temperature"], TEMPERATURES, held_out)
    tuned |= frame.tune(["rate"], RATES, held_out)
    own = [{**tuned, "seed": seed} for seed in range(SEEDS)]
    return tuned, trained(store, task, common | length, own)


def run(
    data: Path,
    vectors: Path,
    tasks: list[str],
    epochs: float = 8,
    methods: Sequence[str] = tuple(METHODS),
    tower: str = "dense",
    tuning: float = 0.34,
    hold_known: bool = False,
) -> None:
    """Tune and train every method on every task, those but the exact loss for its seconds.

    `tuning` is the share of a training's length while τ and rate are chosen. With `hold_known`,
    queries of documents in training are held out, too, and choose a share of the original weights.
    """
    store = Store(STORE)
    for name in tasks:
        task = Task(data, vectors, name, hold_known=hold_known)
        unadapted = {"task": name, "method": "unadapted"}
        store.get([unadapted], lambda _, task=task: task.grouped(task.scores()))
        steps = task.steps(epochs)
        common = {"method": EXACT, "map": tower}
        _, found = tune_and_train(store, task, common, {"steps": steps}, tuning)
        seconds = {"seconds": round(statistics.mean(each["spent"] for each in found), 1)}
        for method in [each for each in methods if each != EXACT]:
            common = {"method": method, "map": tower}
            tuned, _ = tune_and_train(store, task, common, seconds, tuning)
            if method.startswith("InfoNCE, B"):
                equal = {"steps": math.ceil(steps * 32 / METHODS[method][0])}
                own = [{**tuned, "seed": seed} for seed in range(SEEDS)]
                trained(store, task, common | equal, own)


def few(
    data: Path,
    vectors: Path,
    task: str,
    epochs: float = 8,
    temperature: float = 0.05,
    rate: float = 1e-3,
    sizes: Sequence[int] = (100, 300, 1000, 3000, 10000),
) -> None:
    """Train with few pairs, by the exact loss and by InfoNCE for the same seconds."""
    store = Store(STORE)
    for size, seed in product(sizes, range(SEEDS)):
        subset = {"pairs": size, "seed": seed}
        drawn = Task(data, vectors, task, **subset)
        common = {"map": "dense", "temperature": temperature, "rate": rate, **subset}
        steps = max(MIN_STEPS, drawn.steps(epochs))
        [exact] = trained(store, drawn, common, [{"method": EXACT, "steps": steps}])
        seconds = max(0.1, round(exact["spent"], 1))
        trained(store, drawn, common, [{"method": "InfoNCE, B = 32", "seconds": seconds}])


def keep(
    data: Path,
    vectors: Path,
    task: str,
    others: list[str],
    epochs: float = 8,
    tuning: float = 0.34,
) -> None:
    """Interpolate the map of `run` with the original one; measure the task and others."""
    store, own = Store(STORE), Task(data, vectors, task)
    length = {"steps": own.steps(epochs)}
    common = {"method": EXACT, "map": "dense"}
    tuned, _ = tune_and_train(store, own, common, length, tuning)
    measured = {name: Task(data, vectors, name) for name in others} | {task: own}
    tests = {name: each.test for name, each in measured.items()}

    @cache
    def curves() -> list[dict[float, dict[str, np.ndarray]]]:
        """Return of each seed the scores by share and task."""
        found = []
        for seed in range(SEEDS):
            training = Training(own, {**common, **length, **tuned, "seed": seed})
            training.train()
            points = score_interpolations(training.original, training.model, tests)
            found.append({point.keep: point.scores for point in points})
        return found

    def measure(settings: Settings) -> Outcome:
        of_seeds = [curve[settings["keep"]][settings["on"]] for curve in curves()]
        scores = np.stack(of_seeds).mean(axis=0)
        original = curves()[0][1.0][settings["on"]]
        interval = paired_bootstrap(original, scores)._asdict()
        rounded = {name: round(float(value), 4) for name, value in interval.items()}
        return measured[settings["on"]].grouped(scores.tolist()) | rounded

    base = {"task": task, **common, "method": "keep", **length, **tuned}
    places = [{"on": name, "keep": share} for name in (task, *others) for share in SHARES]
    store.get([base | place for place in places], measure)


def text(
    data: Path,
    vectors: Path,
    task: str,
    model: str,
    way: Literal["whole", "queries", "lora"] = "whole",
    epochs: int = 3,
    temperature: float = 0.05,
    rate: float = 8e-5,
    tokens: int = 256,
    seed: int = 0,
) -> None:
    """Train the text model `model`, which made the vectors, by batches of 32."""
    opened = Task(data, vectors, task)
    queries, test = open_corpus(data / task, part="queries"), read_beir(data / task)
    text_of = dict(zip(queries.ids, queries.items, strict=True))
    used, left_id = np.unique(opened.pairs[:, 0], return_inverse=True)
    texts = [text_of[opened.query_ids[row]] for row in used.tolist()]

    def measure(settings: Settings) -> Outcome:
        torch.manual_seed(seed)
        encoder = TextEncoder(model, max_length=tokens, lora_rank=16 if way == "lora" else 0)
        documents, right_id = opened.documents.numpy(), opened.pairs[:, 1]
        common = {"temperature": temperature, "positive_in_softmax": True, "num_left": len(texts)}
        objective, modality = FrozenCorpus(documents, **common), "vector"
        if way == "whole":
            rows, right_id = np.unique(right_id, return_inverse=True)
            items = dict(zip(test.corpus.ids, test.corpus.items, strict=True))
            documents = [items[opened.index.ids[row]] for row in rows.tolist()]
            objective, modality = SogCLR(gamma=0.5, num_right=len(rows), **common), "text"
        else:
            encoder = IndexEncoder(encoder, Provenance(dim=documents.shape[1]))
        pairs = PairDataset(texts, documents, left_id, right_id, right_modality=modality)
        options = {"epochs": epochs, "learning_rate": rate, "seed": seed}
        adapted = frame.train(encoder, pairs, objective, mixed_precision="auto", **options)
        index, begun, embedding = opened.index, time.process_time(), 0.0
        if way == "whole":
            with tempfile.TemporaryDirectory() as folder:
                adapted.model.save(folder)
                encoder = TextEncoder(folder, max_length=256).eval()
            index = embed(encoder.right, test.corpus, autocast="bfloat16", progress=False)
            embedding = time.process_time() - begun
        evaluator = IndexEvaluator(test.queries, opened.test.qrels, index)
        outcome = opened.grouped(scores_of(encoder, evaluator))
        outcome |= {"spent": round(adapted.seconds, 1), "embedding": round(embedding, 1)}
        return outcome | {"done": adapted.steps}

    own = {"temperature": temperature, "rate": rate, "tokens": tokens, "seed": seed}
    wanted = {"task": task, "method": f"text, {way}", "epochs": epochs} | own
    Store(STORE).get([wanted], measure)


def report(results: Path = STORE, figures: Path | None = None) -> None:
    """Print tables of all runs, and draw the gain by share of the weights to a folder."""
    runs = Store(results).runs
    for task in dict.fromkeys(each.settings["task"] for each in runs):
        own = [each for each in runs if each.settings["task"] == task]
        own = [each for each in own if each.settings["method"] != "keep"]
        for title, is_few in (("methods", False), ("few pairs", True)):
            rows = rows_of([each for each in own if ("pairs" in each.settings) == is_few])
            if rows:
                print_table(Table(f"{task}: {title}", rows))
    curves = curves_of(runs)
    for (task, other), points in curves.items():
        groups = GROUPS if task == other else GROUPS[:1]
        rows = [
            {"keep": settings["keep"]}
            | {group: outcome[group] for group in groups if group in outcome}
            | {"over unadapted": "{difference:+.3f} [{low:+.3f}, {high:+.3f}]".format(**outcome)}
            for settings, outcome, _ in points
        ]
        print_table(Table(f"adapted to {task}, measured on {other}", rows))
    if figures is not None and curves:
        (figures / "adapt_keep.svg").write_text(as_svg(drawn(curves)))


def rows_of(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Return a row for all seeds of the same settings; a single seed was only tried."""
    # Subsets of few pairs have lengths of their own.
    any_length = {"seconds": None, "steps": None}
    runs = [
        each._replace(settings=each.settings | any_length) if "pairs" in each.settings else each
        for each in runs
    ]
    rows = []
    for own in frame.by_seed(runs):
        settings, first, _ = own[0]
        if len(own) == 1 and not settings["method"].startswith(("unadapted", "text")):
            continue
        outcomes = [each.outcome for each in own]
        last = [outcome.get("last", {}) for outcome in outcomes]
        cells = {name: settings.get(name) for name in ("method", "map", "pairs")}
        cells |= {group: mean_spread(outcomes, group) for group in GROUPS}
        cells |= {f"last, {group}": mean_spread(last, group) for group in GROUPS}
        cells |= {name: mean_spread(outcomes, name, 2) for name in NUMBERS}
        cells["queries"] = " / ".join(str(first[f"{group} queries"]) for group in GROUPS)
        cells |= {label: settings.get(name) for name, label in LEARNED.items()}
        rows.append({name: cell for name, cell in cells.items() if cell is not None})
    return rows


def mean_spread(outcomes: Sequence[Outcome], name: str, digits: int = 3) -> str | None:
    """Return mean and standard deviation of a number, where outcomes have it."""
    present = [outcome[name] for outcome in outcomes if name in outcome]
    return frame.spread(present, digits).removesuffix(" (one seed)") if present else None


def curves_of(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """Return runs by what queries were adapted to and measured on, in the order of `keep`."""
    shares = [each for each in runs if each.settings["method"] == "keep"]
    curves: dict[tuple[str, str], list[Run]] = {}
    for each in sorted(shares, key=lambda each: each.settings["keep"]):
        curves.setdefault((each.settings["task"], each.settings["on"]), []).append(each)
    return curves


def drawn(curves: dict[tuple[str, str], list[Run]]) -> Figure:
    """Draw the gain over unadapted queries by share with its interval, a panel for each task."""
    tasks, measured = (list(dict.fromkeys(names)) for names in zip(*curves, strict=True))
    figure = Figure(figsize=(3.6 * len(tasks), 3.4), layout="constrained")
    panels = dict(zip(tasks, figure.subplots(1, len(tasks), squeeze=False)[0], strict=True))
    for (other, color), task in product(zip(measured, COLORS), tasks):
        if points := curves.get((task, other)):
            x = [1 - each.settings["keep"] for each in points]
            names = ("low", "difference", "high")
            low, middle, high = ([each.outcome[name] for each in points] for name in names)
            panels[task].plot(x, middle, marker="o", markersize=3, color=color, label=other)
            panels[task].fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
    for task, axes in panels.items():
        axes.axhline(0, color="grey", linewidth=0.8)
        axes.set_title(f"adapted to {task}", fontsize=10)
        axes.set_xlabel("share of the adapted weights (1 − keep)")
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel("nDCG@10 over unadapted")
    return figure


def check(folder: Path) -> None:
    """Turn queries: every method turns them back, and a share of 1 is the original map."""
    globals().update(TEMPERATURES=(0.1,), RATES=(3e-2,), EVALUATIONS=2, SEEDS=2, MIN_STEPS=5)
    globals().update(STORE=folder / "runs.jsonl")
    draw = np.random.default_rng(0)
    documents = draw.standard_normal((80, 6))
    turn = np.linalg.qr(draw.standard_normal((6, 6)))[0]
    places = np.array([*range(80), *range(20)])
    pairs = np.stack([np.arange(100), places], axis=1)
    splits = {"train": np.concatenate([pairs[:60], pairs[80:98]]), "test": pairs[60:80]}
    write_task(folder, documents, documents[places] @ turn, splits)
    paths = folder / "data", folder / "vectors"
    run(*paths, ["toy"], epochs=20, tuning=1)
    run(*paths, ["toy"], epochs=20, tuning=1, hold_known=True, methods=[EXACT])
    keep(*paths, "toy", [], epochs=20, tuning=1)
    few(*paths, "toy", epochs=1, rate=1e-2, sizes=[20])
    runs = Store(STORE)
    [unadapted] = runs.where(method="unadapted")
    [original] = runs.where(method="keep", keep=1.0)
    assert original.outcome["new"] == unadapted.outcome["new"]
    assert original.outcome["low"] == original.outcome["high"] == 0
    [adapted] = runs.where(method="keep", keep=0.0)
    assert adapted.outcome["new"] > unadapted.outcome["new"] + 0.2
    assert {each.settings["method"] for each in runs.runs} == {"unadapted", "keep", *METHODS}
    report(STORE, folder)
    assert (folder / "adapt_keep.svg").read_text().count("<path") > 10
    check_text(folder / "text")


def check_text(folder: Path) -> None:
    """Train a text model at a rate of nearly zero, which leaves the queries where they are."""
    model, corpus = toys.text_model(folder / "model"), toys.beir(folder / "data" / "toy")
    loaded = TextEncoder(str(model)).eval()
    paths = folder / "data", folder / "vectors", "toy"
    for side in ("corpus", "queries"):
        items = open_corpus(corpus, part=side)
        embed(loaded.left, items, folder / "vectors" / "toy" / side, progress=False)
    unadapted = Task(*paths)
    expected = unadapted.grouped(unadapted.scores())["all"]
    for way in ("whole", "queries", "lora"):
        text(*paths, str(model), way, epochs=1, rate=1e-12)
    found = [each.outcome["all"] for each in Store(STORE).runs[-3:]]
    assert np.allclose(found, [expected] * 3, atol=0.02)


if __name__ == "__main__":
    frame.command_line(run, keep, few, text, report, check=check)
