"""What is training against the whole index worth, where the documents' vectors stay fixed?

    python eval/adapting.py run DATA VECTORS "[scifact,medquad]"          # for equal seconds
    python eval/adapting.py keep DATA VECTORS medquad "[scifact,papers]"  # a part of the weights
    python eval/adapting.py few DATA VECTORS medquad                      # with few pairs
    python eval/adapting.py report --figures docs/figures

DATA/NAME is a BEIR folder, and VECTORS/NAME/{corpus,queries} is what `dualenc embed` made of its
sides. Queries pass through a map that begins as the identity. A tenth of the training pairs, at
most 500 queries, is held out by documents, as `dualenc adapt` does. Test nDCG@10 is over all
documents: of all queries, of those with a relevant document in training ("seen"), and of those with
none in any pair of train.tsv ("new"). Each method is tuned on held-out queries with the first seed,
τ and then the rate. A run keeps its best evaluation. Seconds are of one core, without evaluations.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import torch
from adapting_report import GROUPS, STORE, report
from adapting_task import Task, scores_of, write_task
from frame import Outcome, Settings, Store, command_line, scaled_rate, tune
from torch import Tensor

from dualenc.encoders import interpolate
from dualenc.evaluation.metrics import paired_bootstrap
from dualenc.objectives import FrozenCorpus, InfoNCE, Objective
from dualenc.workflows.adapting import SHARES, best_share, score_interpolations

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


class Training:
    """A training of a map of queries, and its clock.

    Args:
        settings: method, map, temperature, rate, seed, and either steps or seconds.
        objective: the objective; by default that of the method.
    """

    def __init__(self, task: Task, settings: Settings, objective: Objective | None = None) -> None:
        self.task, self.settings = task, settings
        self.batch_size, self.drawn, self.num_mined = METHODS[settings["method"]]
        torch.manual_seed(settings["seed"])
        self.random = torch.Generator().manual_seed(settings["seed"])
        self.original = task.new_map(settings["map"])
        self.model = copy.deepcopy(self.original)
        self.objective = objective or new_objective(task, settings)
        self.rate = scaled_rate(settings["rate"], self.batch_size)
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

    def best(name: str, values: Sequence[float], **fixed: float) -> float:
        def held_out(tried: list[tuple[str, float]]) -> list[float]:
            own = [{**fixed, name: value, "seed": 0} for _, value in tried]
            return [each["validation"] for each in trained(store, task, common | short, own)]

        return tune([name], values, held_out)[name]

    tuned = {"temperature": best("temperature", TEMPERATURES, rate=RATES[0])}
    tuned["rate"] = best("rate", RATES, **tuned)
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
    results: Path = STORE,
) -> None:
    """Tune and train every method on every task, those but the exact loss for its seconds.

    `tuning` is the share of a training's length while τ and rate are chosen. With `hold_known`,
    queries of documents in training are held out, too, and choose a share of the original weights.
    """
    store = Store(results)
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
    results: Path = STORE,
) -> None:
    """Train with few pairs, by the exact loss and by InfoNCE for the same seconds."""
    store = Store(results)
    for size, seed in product(sizes, range(SEEDS)):
        common = {"map": "dense", "temperature": temperature, "rate": rate}
        subset = {"pairs": size, "seed": seed}
        drawn = Task(data, vectors, task, **subset)
        common |= subset
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
    results: Path = STORE,
) -> None:
    """Interpolate the map of `run` with the original one; measure the task and others."""
    store, own = Store(results), Task(data, vectors, task)
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
        by_seed = np.stack([curve[settings["keep"]][settings["on"]] for curve in curves()])
        original = curves()[0][1.0][settings["on"]]
        found = paired_bootstrap(original, by_seed.mean(axis=0))
        interval = {"difference": found.difference, "low": found.low, "high": found.high}
        rounded = {name: round(float(value), 4) for name, value in interval.items()}
        return measured[settings["on"]].grouped(by_seed.mean(axis=0).tolist()) | rounded

    base = {"task": task, **common, "method": "keep", **length, **tuned}
    places = [{"on": name, "keep": share} for name in (task, *others) for share in SHARES]
    store.get([base | place for place in places], measure)


def check(folder: Path) -> None:
    """Turn queries: every method turns them back, and a share of 1 is the original map."""
    globals().update(TEMPERATURES=(0.1,), RATES=(3e-2,), EVALUATIONS=2, SEEDS=2, MIN_STEPS=5)
    draw = np.random.default_rng(0)
    documents = draw.standard_normal((80, 6))
    turn = np.linalg.qr(draw.standard_normal((6, 6)))[0]
    places = np.array([*range(80), *range(20)])
    pairs = np.stack([np.arange(100), places], axis=1)
    splits = {"train": np.concatenate([pairs[:60], pairs[80:98]]), "test": pairs[60:80]}
    write_task(folder, documents, documents[places] @ turn, splits)
    paths, store = (folder / "data", folder / "vectors"), folder / "runs.jsonl"
    run(*paths, ["toy"], epochs=20, tuning=1, results=store)
    run(*paths, ["toy"], epochs=20, tuning=1, hold_known=True, methods=[EXACT], results=store)
    keep(*paths, "toy", [], epochs=20, tuning=1, results=store)
    few(*paths, "toy", epochs=1, rate=1e-2, sizes=[20], results=store)
    runs = Store(store)
    [unadapted] = runs.where(method="unadapted")
    [original] = runs.where(method="keep", keep=1.0)
    assert original.outcome["new"] == unadapted.outcome["new"]
    assert original.outcome["low"] == original.outcome["high"] == 0
    [adapted] = runs.where(method="keep", keep=0.0)
    assert adapted.outcome["new"] > unadapted.outcome["new"] + 0.2
    assert {each.settings["method"] for each in runs.runs} == {"unadapted", "keep", *METHODS}
    report(store, folder)
    assert (folder / "adapt_keep.svg").read_text().count("<path") > 10


if __name__ == "__main__":
    command_line(run, keep, few, report, check=check)
