"""What is a click worth? Logs are simulated over judged collections, and queries adapted to them.

    python eval/click_logs.py run DATA VECTORS scifact
    python eval/click_logs.py run DATA VECTORS scifact --eta 2 --noise 0.2 --sessions 1000
    python eval/click_logs.py alone DATA VECTORS scifact
    python eval/click_logs.py report

DATA/NAME is a BEIR folder, and VECTORS/NAME/{corpus,queries} is what `dualenc embed` made of its
sides. A session draws a training query and shows its ten nearest documents, in random order in a
share of sessions. Position k is examined with probability k^−η; examined documents are clicked
with 0.9 if they are relevant, and else by noise. Each method makes training pairs of the same log;
`FrozenCorpus` with weights n_d + 0.1 trains a map of queries, of which half is taken.

nDCG@10 is of test queries with a relevant document in a judged training pair ("seen"), without one
("new"), and of training queries, which occur in the log ("in log").
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import frame
import numpy as np
import torch
from adapting_task import ids_of, new_map, open_judged, scores_of, write_judged
from frame import Outcome, Settings, Store
from rows import sizes_of
from tasks import vector_pairs

from dualenc.data import PairDataset
from dualenc.data.corpus import Corpus, used_items
from dualenc.data.item_lists import VectorItems
from dualenc.data.logs.click_counts import distinct_pairs
from dualenc.data.logs.click_log import ClickLog
from dualenc.data.logs.click_model import ClickModel, KnownPropensities, fit_click_model
from dualenc.data.store.items import rows_of
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import VectorEncoder, interpolate
from dualenc.evaluation.feedback_queries import feedback_queries
from dualenc.evaluation.metrics import score_queries
from dualenc.evaluation.report_page import Table, print_table
from dualenc.evaluation.retrieval import divide_by_training, retrieve
from dualenc.objectives import FrozenCorpus, InfoNCE, Objective
from dualenc.training.index_evaluator import IndexEvaluator

STORE = frame.RESULTS / "click_logs.jsonl"
DEPTH, RELEVANT = 10, 0.9
TEMPERATURE, ALPHA, KEEP = 0.03, 0.1, 0.5
BATCH_SIZE, EPOCHS, MAX_STEPS = 64, 8, 100
RATE = 1e-3
"""At a batch of 32."""
IN_LOG = 300
"""Number of training queries to measure."""
SEEDS = 3
GROUPS = ("seen", "new", "in log")
IN_BATCH, ROCCHIO, ORIGINAL = "in-batch adapter", "Rocchio, posterior", "original"


@dataclass
class Collection:
    """A judged collection and the results lists of its training queries.

    Attributes:
        documents: N documents.
        queries: Q training queries.
        shown: rows of the ten documents nearest to each query, (Q, 10), best first.
        relevant: whether they are relevant, (Q, 10).
        tested: test queries by group, and "in log".
    """

    documents: Embeddings
    queries: Corpus
    shown: np.ndarray
    relevant: np.ndarray
    tested: dict[str, IndexEvaluator]

    def scores(self, model: VectorEncoder) -> dict[str, float]:
        """Return mean nDCG@10 by group."""
        return {name: statistics.mean(scores_of(model, own)) for name, own in self.tested.items()}

    @cached_property
    def original(self) -> dict[str, float]:
        """Mean nDCG@10 by group before."""
        return self.scores(new_map(self.documents))


def open_collection(data: Path, vectors: Path, name: str) -> Collection:
    """Open vectors and judgments, and search with all training queries."""
    judged = open_judged(data, vectors, name, in_memory=True)
    documents, pairs = judged.documents, judged.pairs("train")
    queries, left = used_items(pairs, "left")
    run = retrieve(queries.ids, vectors_of(queries), documents.ids, documents.vectors, depth=DEPTH)
    shown = np.array([rows_of(documents.ids, list(run[query])) for query in queries.ids])
    relevant = np.zeros(shown.shape, bool)
    for query, document in zip(left, pairs.right_id, strict=True):
        relevant[query] |= shown[query] == document
    test = judged.test()
    divided = divide_by_training(test.qrels, ids_of(pairs, documents))
    tested = {
        group: test.among(list(own)) for group, own in zip(GROUPS, divided, strict=False) if own
    }
    some = np.random.default_rng(0).permutation(len(queries))[:IN_LOG]
    in_log = pairs.take(np.flatnonzero(np.isin(left, some)))
    tested["in log"] = IndexEvaluator.of_pairs(in_log, documents)
    return Collection(documents, queries, shown, relevant, tested)


def theta_of(settings: Settings) -> np.ndarray:
    """Return the probability that each position is examined, (10,)."""
    return np.arange(1, DEPTH + 1) ** -float(settings["eta"])


def simulate(collection: Collection, settings: Settings, relevant: float = RELEVANT) -> ClickLog:
    """Return the log of so many sessions."""
    draw = np.random.default_rng(settings["seed"])
    sessions = settings["sessions"]
    query = draw.integers(0, len(collection.queries), sessions)
    order = np.tile(np.arange(DEPTH), (sessions, 1))
    is_shuffled = draw.random(sessions) < settings["shuffled"]
    order[is_shuffled] = draw.permuted(order[is_shuffled], axis=1)
    is_relevant = collection.relevant[query[:, None], order]
    rate = theta_of(settings) * np.where(is_relevant, relevant, settings["noise"])
    clicked = draw.random(order.shape) < rate
    return ClickLog(
        collection.queries,
        np.repeat(query, DEPTH),
        collection.shown[query[:, None], order].ravel(),
        clicked.ravel().astype(np.float32),
        np.tile(np.arange(1, DEPTH + 1), sessions),
        np.repeat(np.arange(sessions), DEPTH),
        np.full(order.size, np.nan),
        False,
        "",
        0,
    )


def judged_weights(log: ClickLog, collection: Collection, settings: Settings) -> np.ndarray:
    """Return 1 for the relevant pairs among those shown."""
    pairs, _ = distinct_pairs(log.query, log.document)
    is_own = collection.shown[pairs[:, 0]] == pairs[:, 1:]
    return (is_own & collection.relevant[pairs[:, 0]]).any(axis=1).astype(float)


def clicked_weights(log: ClickLog, collection: Collection, settings: Settings) -> np.ndarray:
    """Return 1 for every clicked pair."""
    return (counted_weights(log, collection, settings) > 0).astype(float)


def counted_weights(
    log: ClickLog, collection: Collection, settings: Settings, by_propensity: bool = False
) -> np.ndarray:
    """Return clicks, mean 1, as `adapt` counts them without a click model.

    `by_propensity` divides each click by the true probability that its position is examined.
    """
    _, row = distinct_pairs(log.query, log.document)
    examined = theta_of(settings)[log.position - 1] if by_propensity else 1.0
    weights = np.bincount(row, log.reward / examined)
    return weights / weights.mean(where=weights > 0) if weights.any() else weights


def posterior_weights(
    log: ClickLog,
    collection: Collection,
    settings: Settings,
    threshold: float | None = None,
    is_known: bool = False,
) -> np.ndarray:
    """Return the probability of relevance of clicked pairs; clicks where it is unidentified."""
    known = None
    if is_known:
        known = KnownPropensities(tuple(theta_of(settings)), RELEVANT, settings["noise"])
    model = fitted(log, known)
    if model.unidentified is not None:
        return counted_weights(log, collection, settings)
    weights = model.relevance * clicked_weights(log, collection, settings)
    return weights if threshold is None else (weights > threshold).astype(float)


def fitted(log: ClickLog, known: KnownPropensities | None = None) -> ClickModel:
    """Fit the click model to a log."""
    clicked = log.reward > 0
    return fit_click_model(log.query, log.document, log.position, clicked, known=known)


METHODS: dict[str, Callable[[ClickLog, Collection, Settings], np.ndarray]] = {
    "true judgments": judged_weights,
    "every clicked pair": clicked_weights,
    "clicks counted": counted_weights,
    "inverse propensity": partial(counted_weights, by_propensity=True),
    "posterior as weight": posterior_weights,
    "posterior > 1/2": partial(posterior_weights, threshold=0.5),
    "posterior > 1/2, known": partial(posterior_weights, threshold=0.5, is_known=True),
    ROCCHIO: posterior_weights,
    IN_BATCH: clicked_weights,
}
"""Weights (P,) of the distinct pairs of a log, which are training pairs if above 0."""


def measure(collection: Collection, settings: Settings) -> Outcome:
    """Simulate a log, make pairs of it, adapt, and measure halfway to the original."""
    if settings["method"] == ORIGINAL:
        return {name: round(value, 4) for name, value in collection.original.items()}
    log = simulate(collection, settings)
    weights = METHODS[settings["method"]](log, collection, settings)
    used = np.flatnonzero(weights > 0)
    facts: Outcome = {"pairs": len(used)}
    scores = collection.original
    if len(used):
        ids = distinct_pairs(log.query, log.document)[0][used].T
        items = log.queries.items, VectorItems(collection.documents.vectors)
        pairs = vector_pairs(*items, *ids, weights=weights[used])
        if settings["method"] == ROCCHIO:
            scores = scores | {"in log": rocchio(collection, pairs)}
        else:
            adapted, facts["done"], seconds = train(collection, pairs, settings)
            facts["spent"] = round(seconds, 1)
            scores = collection.scores(adapted)
    return {name: round(value, 4) for name, value in scores.items()} | facts


def train(
    collection: Collection, pairs: PairDataset, settings: Settings
) -> tuple[VectorEncoder, int, float]:
    """Return a map halfway to the original, its steps and its seconds."""
    size = min(BATCH_SIZE, len(pairs))
    steps = min(MAX_STEPS, max(1, round(EPOCHS * len(pairs) / size)))
    common = {"temperature": TEMPERATURE, **sizes_of(pairs)}
    clicks = np.bincount(pairs.right_id, pairs.weights, pairs.num_right)
    exact = FrozenCorpus(
        collection.documents.vectors,
        weights=clicks + ALPHA,
        positive_in_softmax=True,
        **common,
    )
    if settings["method"] != IN_BATCH:
        return trained(collection, pairs, exact, steps, size, settings["seed"])
    # As many steps as fit in the seconds of the exact loss, by the time of a few.
    in_batch = InfoNCE(**common)
    spent = [trained(collection, pairs, each, 8, size, 0)[2] for each in (exact, in_batch)]
    steps = round(steps * max(1.0, spent[0] / max(spent[1], 1e-3)))
    return trained(collection, pairs, in_batch, steps, size, settings["seed"])


def trained(
    collection: Collection,
    pairs: PairDataset,
    objective: Objective,
    steps: int,
    size: int,
    seed: int,
) -> tuple[VectorEncoder, int, float]:
    """Return a map halfway to the original, its steps and its seconds.

    A plain loop: the trainer's checksums and files would take longer than so short a training.
    """
    torch.manual_seed(seed)
    original = new_map(collection.documents)
    model = copy.deepcopy(original)
    rate = frame.scaled_rate(RATE, size)
    optimizer = torch.optim.AdamW(model.left.parameters(), rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=steps)
    documents = torch.from_numpy(collection.documents.vectors)
    queries = torch.from_numpy(vectors_of(collection.queries))
    draw = np.random.default_rng(seed)
    rows = np.concatenate(
        [draw.permutation(len(pairs)) for _ in range(-(-steps * size // len(pairs)))]
    )
    begun = time.process_time()
    for step in range(steps):
        batch = rows[step * size : (step + 1) * size]
        left, right = pairs.left_id[batch], pairs.right_id[batch]
        loss = objective(
            model.left({"vector": queries[left]}),
            documents[right],
            torch.from_numpy(left),
            torch.from_numpy(right),
            left_positives=torch.from_numpy(pairs.positives("left", left)),
            right_positives=torch.from_numpy(pairs.positives("right", right)),
            weights=torch.from_numpy(pairs.weights[batch]),
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    spent = time.process_time() - begun
    model.load_state_dict(interpolate(original, model.eval(), KEEP))
    return model, steps, spent


def vectors_of(queries: Corpus) -> np.ndarray:
    """Return the vectors of queries, (Q, D)."""
    return np.stack([queries.items[row] for row in range(len(queries))])


def rocchio(collection: Collection, pairs: PairDataset) -> float:
    """Return nDCG@10 of the queries in the log, moved to their clicked documents."""
    queries, documents = collection.queries, collection.documents.vectors
    own = pairs.left_id, pairs.right_id, pairs.weights
    moved = feedback_queries(vectors_of(queries), documents, *own)
    evaluator = collection.tested["in log"]
    ids = evaluator.queries.ids
    run = evaluator.search(ids, moved[rows_of(queries.ids, ids)])
    scores = score_queries(evaluator.qrels, run, [10])
    return statistics.mean(each[evaluator.primary] for each in scores.values())


def run(
    data: Path,
    vectors: Path,
    name: str,
    eta: float = 1,
    noise: float = 0.1,
    sessions: int = 10_000,
    shuffled: float = 0.1,
    methods: Sequence[str] = tuple(METHODS),
    seeds: int = SEEDS,
) -> None:
    """Adapt to the logs of one cell by every method."""
    collection = open_collection(data, vectors, name)
    cell = {"eta": float(eta), "noise": noise, "sessions": sessions, "shuffled": float(shuffled)}
    measure_one = partial(measure, collection)
    store = Store(STORE)
    store.get([{"task": name, "method": ORIGINAL}], measure_one)
    wanted = {method: {"task": name, "method": method, **cell} for method in methods}
    frame.repeat(store, measure_one, wanted, seeds)


def alone(
    data: Path, vectors: Path, name: str, sessions: int = 10_000, logs: int = 100, eta: float = 1
) -> None:
    """Count the logs whose clicks depend on the position alone that seem to have relevance."""
    collection = open_collection(data, vectors, name)

    def find(settings: Settings) -> Outcome:
        counts = {"found": 0, "pairs": 0}
        for seed in range(settings["logs"]):
            log = simulate(collection, {**settings, "seed": seed}, relevant=settings["noise"])
            model = fitted(log)
            counts["found"] += model.position_alone is None
            counts["pairs"] += int((model.relevance > 0.5).sum())
        return counts

    cell = {"eta": float(eta), "noise": 0.3, "sessions": sessions, "shuffled": 0.1}
    wanted = {"task": name, "method": "alone", "logs": logs, **cell}
    Store(STORE).get([wanted], find)


def report() -> None:
    """Print a table for each collection and cell."""
    runs = Store(STORE).runs
    for task in dict.fromkeys(each.settings["task"] for each in runs):
        own = [each for each in runs if each.settings["task"] == task]
        [original] = [each.outcome for each in own if each.settings["method"] == ORIGINAL]
        rows = []
        for same in frame.by_seed(each for each in own if "eta" in each.settings):
            cells = {k: v for k, v in same[0].settings.items() if k not in ("task", "seed")}
            outcomes = [each.outcome for each in same]
            if cells["method"] == "alone":
                rows.append(cells | outcomes[0])
                continue
            for group in GROUPS:
                if group in original:
                    cells[group] = frame.spread([each[group] for each in outcomes])
            gains = [each["new"] - original["new"] for each in outcomes if "new" in each]
            cells["new, gain"] = f"{statistics.mean(gains):+.3f}" if gains else ""
            cells["pairs"] = round(statistics.mean(each["pairs"] for each in outcomes))
            rows.append(cells)
        print_table(Table(f"{task}: original {original}", rows))


def check(folder: Path) -> None:
    """Turn queries: judged pairs and the posterior turn them back, and noise does less."""
    globals().update(STORE=folder / "runs.jsonl", SEEDS=1, RATE=3e-2)
    draw = np.random.default_rng(0)
    documents = draw.standard_normal((80, 6))
    turn = np.linalg.qr(np.eye(6) + 0.4 * draw.standard_normal((6, 6)))[0]
    turn *= np.sign(np.diag(turn))
    places = np.array([*range(80), *range(20)])
    pairs = np.stack([np.arange(100), places], axis=1)
    splits = {"train": np.concatenate([pairs[:60], pairs[80:98]]), "test": pairs[55:80]}
    where = write_judged(folder, documents, documents[places] @ turn, splits)
    run(*where, sessions=2000, seeds=1)
    alone(*where, sessions=500, logs=10)
    store = Store(STORE)
    [original] = store.where(method=ORIGINAL)
    for method in ("true judgments", "posterior > 1/2", "posterior > 1/2, known"):
        [each] = store.where(method=method)
        assert each.outcome["in log"] > original.outcome["in log"] + 0.05, each
    [each] = store.where(method=ROCCHIO)
    assert each.outcome["in log"] > original.outcome["in log"] + 0.05
    [each] = store.where(method="alone")
    assert each.outcome["found"] <= 1
    report()


if __name__ == "__main__":
    frame.command_line(run, alone, report, check=check)
