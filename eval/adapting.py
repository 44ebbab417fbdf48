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
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from frame import RESULTS, Outcome, Settings, Store, command_line, key_of, scaled_rate, spread, tune
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.data import PairDataset
from dualenc.data.bad_rows import BadRows
from dualenc.data.corpus import Corpus
from dualenc.data.ragged import Ragged
from dualenc.data.readers.beir import read_judged_queries, relevant_pairs
from dualenc.data.readers.clicks import split_by_documents
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import DualEncoder, VectorEncoder, interpolate
from dualenc.evaluation.metrics import paired_bootstrap
from dualenc.evaluation.plots import COLORS, as_svg
from dualenc.evaluation.report_page import Table, print_table
from dualenc.evaluation.retrieval import divide_by_training
from dualenc.objectives import FrozenCorpus, InfoNCE, Objective
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.workflows.adapting import SHARES, best_share, score_interpolations

STORE = RESULTS / "adapting.jsonl"
GROUPS = ("all", "seen", "new")
TEMPERATURES = (0.02, 0.03, 0.05, 0.1)
RATES = (1e-3, 3e-4, 3e-3)
"""At a batch of 32; the first while τ is chosen."""
HELD_OUT, MAX_HELD_OUT = 0.1, 500
"""Share of the training pairs to hold out, and maximum number of queries of a kind."""
EVALUATIONS = 10
MIN_STEPS = 300
"""Of trainings with few pairs, whose epochs are short."""
Tower = Literal["dense", "mlp", "linear"]


class Method(NamedTuple):
    """A row of the tables: batch size, and negatives of a step drawn, or mined for each query."""

    batch_size: int = 32
    drawn: int = 0
    mined: int = 0


EXACT = "FrozenCorpus+"
"""With the positive in the softmax."""
METHODS = {
    EXACT: Method(),
    "FrozenCorpus": Method(),
    "InfoNCE, B = 32": Method(),
    "InfoNCE, B = 512": Method(batch_size=512),
    "InfoNCE, 512 drawn": Method(drawn=512),
    "InfoNCE, mined": Method(mined=8),
}


class Task:
    """What is trained on and measured.

    Args:
        pairs: number of training pairs to draw, by `seed`; by default all.
        hold_known: hold out queries of documents in training, too.

    Attributes:
        queries, documents: (Q, D) and (N, D) unit vectors; Q queries have training pairs.
        pairs: (P, 2) rows of a query and of a document, to train on.
        positives: (Q, K) rows of each query's documents in these pairs, padded with -1.
        held_out: held-out queries, "new" without and "known" with their documents in training.
        test: the test queries.
    """

    def __init__(
        self,
        data: Path,
        vectors: Path,
        name: str,
        pairs: int | None = None,
        seed: int = 0,
        hold_known: bool = False,
    ) -> None:
        self.name = name
        self.index = Embeddings.open(vectors / name / "corpus")
        embedded = Embeddings.open(vectors / name / "queries")
        queries = Corpus(embedded.ids, unit(embedded), "vector")
        train, test = read_judgments(data / name, self.index.ids)
        self.test = IndexEvaluator(queries, test, self.index).among(list(test))
        used, *columns, _ = relevant_pairs(queries, train, self.index.ids)
        listed = np.stack(columns, axis=1)
        if pairs is not None:
            listed = listed[np.random.default_rng(seed).permutation(len(listed))[:pairs]]
        self.query_ids = used.ids
        self.queries = torch.from_numpy(np.stack([used.items[row] for row in range(len(used))]))
        self.documents = torch.from_numpy(unit(self.index))
        modalities = {"left_modality": "vector", "right_modality": "vector"}
        items = PairDataset(self.queries.numpy(), self.documents.numpy(), *listed.T, **modalities)
        parts = split_by_documents(items, HELD_OUT, MAX_HELD_OUT)
        measured = {"new": parts.new, "known": parts.known if hold_known else None}
        self.held_out = {
            part: IndexEvaluator.of_pairs(own, self.index)
            for part, own in measured.items()
            if own is not None
        }
        trained = [parts.train] + ([parts.known] if parts.known and not hold_known else [])
        own_pairs = [np.stack([part.left_id, part.right_id], axis=1) for part in trained]
        self.pairs = np.concatenate(own_pairs)
        by_query = Ragged.from_pairs(*self.pairs.T, len(self.queries))
        self.positives = torch.from_numpy(by_query.padded(np.arange(len(self.queries))))
        self.trained = {self.index.ids[row] for row in self.pairs[:, 1].tolist()}
        self.listed = {self.index.ids[row] for row in listed[:, 1].tolist()}

    def new_map(self, tower: Tower = "dense") -> VectorEncoder:
        """Return a map of queries that changes nothing yet."""
        return VectorEncoder(self.queries.shape[1], tower=tower, right_tower="identity")

    def grouped(self, scores: Sequence[float]) -> Outcome:
        """Return means over all, seen and new test queries, from (Q,) scores; and the numbers."""
        per_query = dict(zip(self.test.qrels, scores, strict=True))
        seen, _ = divide_by_training(self.test.qrels, self.trained)
        _, new = divide_by_training(self.test.qrels, self.listed)
        groups = dict(zip(GROUPS, (per_query, seen, new), strict=True))
        means = {
            name: round(statistics.mean(per_query[query] for query in group), 4)
            for name, group in groups.items()
            if group
        }
        return means | {f"{name} queries": len(group) for name, group in groups.items()}


def unit(embedded: Embeddings) -> np.ndarray:
    """Return embeddings as float32 of length one."""
    vectors = torch.from_numpy(np.array(embedded.vectors[:], dtype=np.float32))
    return normalize(vectors, dim=-1).numpy()


def read_judgments(folder: Path, documents: Sequence[str]) -> list[dict[str, dict[str, int]]]:
    """Return those of training and test; without train.tsv, of two random halves of the test."""
    splits = [part for part in ("train", "test") if (folder / "qrels" / f"{part}.tsv").exists()]
    found = [read_judged_queries(folder, part, documents, BadRows(folder))[1] for part in splits]
    if len(found) == 2:
        return found
    order = np.random.default_rng(0).permutation(sorted(found[0])).tolist()
    halves = order[: len(order) // 2], order[len(order) // 2 :]
    return [{query: found[0][query] for query in half} for half in halves]


def scores_of(model: DualEncoder, evaluator: IndexEvaluator) -> list[float]:
    """Return nDCG@10 of each query."""
    return [scores[evaluator.primary] for scores in evaluator.per_query(model).values()]


class Training:
    """A training of a map of queries, and its clock.

    Args:
        settings: method, map, temperature, rate, seed, and either steps or seconds.
        objective: the objective; by default that of the method.
    """

    def __init__(self, task: Task, settings: Settings, objective: Objective | None = None) -> None:
        self.task, self.settings = task, settings
        self.method = METHODS[settings["method"]]
        torch.manual_seed(settings["seed"])
        self.random = torch.Generator().manual_seed(settings["seed"])
        self.original = task.new_map(settings["map"])
        self.model = copy.deepcopy(self.original)
        self.objective = objective or new_objective(task, settings)
        self.rate = scaled_rate(settings["rate"], self.method.batch_size)
        weights = self.model.left.parameters()
        self.optimizer = torch.optim.AdamW(weights, self.rate, weight_decay=0.01)
        self.steps, self.seconds = 0, 0.0
        self.mined = torch.empty(0, 0)
        self.batches = self.random_batches()

    @property
    def progress(self) -> float:
        """Share of the training that is done."""
        if "seconds" in self.settings:
            return self.seconds / self.settings["seconds"]
        return self.steps / self.settings["steps"]

    def run(self) -> Outcome:
        """Train, and measure the last weights and those of the best evaluation."""
        best, best_quality, best_progress = self.model, -1.0, 0.0
        for due in range(EVALUATIONS + 1):
            self.train(until=due / EVALUATIONS)
            scores = [scores_of(self.model, part) for part in self.task.held_out.values()]
            quality = statistics.mean(score for part in scores for score in part)
            if quality > best_quality:
                best, best_quality, best_progress = copy.deepcopy(self.model), quality, self.progress
        last = self.task.grouped(scores_of(self.model, self.task.test))
        outcome: Outcome = {"validation": round(best_quality, 4)}
        if "known" in self.task.held_out:
            # As `dualenc adapt` does: what is best for both kinds, and costs new documents nothing.
            points = score_interpolations(self.original, best, self.task.held_out)
            outcome["share"] = best_share(points, "new", ["new", "known"])
            best.load_state_dict(interpolate(self.original, best, outcome["share"]))
        outcome |= self.task.grouped(scores_of(best, self.task.test))
        outcome |= {"last": {name: last[name] for name in GROUPS if name in last}}
        progress = {"done": self.steps, "best": round(best_progress, 2)}
        return outcome | {"spent": round(self.seconds, 2)} | progress

    def train(self, until: float = 1.0) -> None:
        """Train up to a share of the training."""
        while self.progress < until:
            begun = time.process_time()
            self.step(next(self.batches))
            self.seconds += time.process_time() - begun

    def random_batches(self) -> Iterator[Tensor]:
        """Yield batches (B, 2) of random pairs without end, and mine at the start of an epoch."""
        pairs = torch.from_numpy(self.task.pairs)
        batch_size = min(self.method.batch_size, len(pairs))
        while True:
            if self.method.mined:
                self.mine()
            order = torch.randperm(len(pairs), generator=self.random)
            for start in range(0, len(pairs) - batch_size + 1, batch_size):
                yield pairs[order[start : start + batch_size]]

    @torch.no_grad()
    def mine(self) -> None:
        """Find (Q, mined) near documents, below 0.95 of the best positive's score."""
        task = self.task
        self.mined = torch.full((len(task.queries), self.method.mined), -1)
        for rows in torch.from_numpy(task.pairs[:, 0]).unique().split(1024):
            scores = self.encode(task.queries[rows]) @ task.documents.T  # (n, N)
            positives = task.positives[rows]  # (n, K)
            # The first of a query is never padding.
            positives = torch.where(positives < 0, positives[:, :1], positives)
            highest = 0.95 * scores.gather(1, positives).amax(dim=1, keepdim=True)
            scores.scatter_(1, positives, -torch.inf)
            scores.masked_fill_(scores > highest, -torch.inf)
            values, nearest = scores.topk(self.method.mined)
            self.mined[rows] = nearest.masked_fill(values.isinf(), -1)

    def encode(self, queries: Tensor) -> Tensor:
        """Map query vectors (n, D)."""
        embeddings: Tensor = self.model.left({"vector": queries})
        return embeddings

    def step(self, pairs: Tensor) -> None:
        """Train on a batch (B, 2): a tenth of warm-up, then along a cosine, as `Trainer` does."""
        decay = (1 + math.cos(math.pi * self.progress)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, 0.01 + 10 * self.progress) * decay
        queries, documents = pairs.unbind(dim=1)
        lists = {"left_positives": self.task.positives[queries]}
        if self.method.drawn or self.method.mined:
            shape = (self.method.drawn,)
            rows = torch.randint(len(self.task.documents), shape, generator=self.random)
            if self.method.mined:
                rows = self.mined[queries].unique()
                rows = rows[rows >= 0]
            lists |= {"negatives": self.task.documents[rows], "negative_id": rows}
        embeddings = self.encode(self.task.queries[queries])
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
    store: Store, task: Task, common: Settings, length: Settings, tuning: float, seeds: int
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
    own = [{**tuned, "seed": seed} for seed in range(seeds)]
    return tuned, trained(store, task, common | length, own)


def steps_of(task: Task, epochs: float) -> int:
    """Return the number of steps of the exact loss."""
    return round(epochs * len(task.pairs) / METHODS[EXACT].batch_size)


def run(
    data: Path,
    vectors: Path,
    tasks: list[str],
    epochs: float = 8,
    methods: Sequence[str] = tuple(METHODS),
    tower: Tower = "dense",
    tuning: float = 0.34,
    seeds: int = 3,
    hold_known: bool = False,
    results: Path = STORE,
) -> None:
    """Tune and train every method on every task, those but the exact loss for its seconds.

    Args:
        epochs: passes of the exact loss over the training pairs.
        tower: kind of the map of queries.
        tuning: share of a training's length while τ and rate are chosen.
        hold_known: tune, stop and choose a share of the original weights by held-out queries of
            both kinds.
    """
    store = Store(results)
    for name in tasks:
        task = Task(data, vectors, name, hold_known=hold_known)
        unadapted = {"task": name, "method": "unadapted"}
        store.get([unadapted], lambda _: task.grouped(scores_of(task.new_map(), task.test)))
        steps = steps_of(task, epochs)
        common = {"method": EXACT, "map": tower}
        _, found = tune_and_train(store, task, common, {"steps": steps}, tuning, seeds)
        seconds = {"seconds": round(statistics.mean(each["spent"] for each in found), 1)}
        for method in [each for each in methods if each != EXACT]:
            common = {"method": method, "map": tower}
            tuned, _ = tune_and_train(store, task, common, seconds, tuning, seeds)
            if method.startswith("InfoNCE, B"):
                equal = {"steps": math.ceil(steps * 32 / METHODS[method].batch_size)}
                own = [{**tuned, "seed": seed} for seed in range(seeds)]
                trained(store, task, common | equal, own)


def few(
    data: Path,
    vectors: Path,
    task: str,
    epochs: float = 8,
    sizes: Sequence[int] = (100, 300, 1000, 3000, 10000),
    temperature: float = 0.05,
    rate: float = 1e-3,
    tower: Tower = "dense",
    seeds: int = 3,
    results: Path = STORE,
) -> None:
    """Train with few pairs, by the exact loss and by InfoNCE for the same seconds."""
    store = Store(results)
    for size in sizes:
        for seed in range(seeds):
            drawn = Task(data, vectors, task, size, seed)
            common = {"map": tower, "pairs": size, "temperature": temperature, "rate": rate}
            common["seed"] = seed
            steps = max(MIN_STEPS, steps_of(drawn, epochs))
            [exact] = trained(store, drawn, common, [{"method": EXACT, "steps": steps}])
            seconds = max(0.1, round(exact["spent"], 1))
            trained(store, drawn, common, [{"method": "InfoNCE, B = 32", "seconds": seconds}])


def keep(
    data: Path,
    vectors: Path,
    task: str,
    others: list[str],
    epochs: float = 8,
    tower: Tower = "dense",
    tuning: float = 0.34,
    seeds: int = 3,
    results: Path = STORE,
) -> None:
    """Interpolate the map of `run` with the original one; measure the task and others."""
    store, own = Store(results), Task(data, vectors, task)
    length = {"steps": steps_of(own, epochs)}
    common = {"method": EXACT, "map": tower}
    tuned, _ = tune_and_train(store, own, common, length, tuning, seeds)
    measured = {name: Task(data, vectors, name) for name in others} | {task: own}
    tests = {name: each.test for name, each in measured.items()}

    @cache
    def curves() -> list[dict[float, dict[str, np.ndarray]]]:
        """Return of each seed the scores by share and task."""
        found = []
        for seed in range(seeds):
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
