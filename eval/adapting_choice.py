"""Does `dualenc adapt` choose well, from logs of any size, for seen and for new documents?

    python eval/adapting_choice.py run DATA VECTORS "[scifact,medquad,cranfield,topics,types]"
    python eval/adapting_choice.py report

DATA/NAME is a BEIR folder, and VECTORS/NAME/{corpus,queries} is what `dualenc embed` made of its
sides. Two sets of classes are made of medquad: "topics" are 77 clusters of its questions, and
"types" the 20 commonest beginnings of questions. A class is a document, the mean of three answers;
a quarter of the classes is never clicked.

`adapt` is the command as it is; "in-batch" trains InfoNCE on batches of 32 for twice as many
passes, and keeps half of the original weights; "long" is for ten times as many, about the seconds
of `adapt`. "softmax, whole" is the softmax over all documents, all alike, without a share of the
original. The store also has runs of "former", a removed rule.
Test nDCG@10 is over all documents, of queries with a document in the log ("seen") and without
("new").
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from adapting_task import ids_of, new_map, open_judged, scores_of, train_map, unit, write_judged
from frame import Outcome, Settings, Store
from rows import sizes_of
from tasks import vector_pairs

from dualenc import adapt
from dualenc.data import Corpus, PairDataset
from dualenc.data.item_lists import VectorItems
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import DualEncoder, VectorEncoder, interpolate, load_model
from dualenc.evaluation.report_page import Table, print_table
from dualenc.evaluation.retrieval import divide_by_training
from dualenc.objectives import FrozenCorpus, InfoNCE, Objective
from dualenc.search.embed.encode import embed
from dualenc.training.index_evaluator import IndexEvaluator

STORE = frame.RESULTS / "adapting_choice.jsonl"
SIZES, SEEDS, EPOCHS = (30, 100, 300, 0), 3, 12
"""Numbers of pairs (0: all), of seeds, and of passes over the pairs."""
CLASSES = {"topics": 77, "types": 20}
TESTED = 400
"""Maximum number of test queries of either kind."""


class Log(NamedTuple):
    """Unit vectors of documents, and pairs of queries and rows of documents."""

    documents: Embeddings
    train: PairDataset
    test: PairDataset


def open_log(data: Path, vectors: Path, name: str, seed: int) -> Log:
    """Open a collection or make classes; a collection without training pairs is cut in halves."""
    if name in CLASSES:
        return classes(data, vectors, name, seed)
    judged = open_judged(data, vectors, name, in_memory=True)
    test = judged.pairs("test")
    if "train" in judged.qrels:
        return Log(judged.documents, judged.pairs("train"), test)
    queries = np.random.default_rng(seed).permutation(np.unique(test.left_id))
    is_first = np.isin(test.left_id, queries[: len(queries) // 2])
    return Log(judged.documents, *(test.take(np.flatnonzero(own)) for own in (is_first, ~is_first)))


def classes(data: Path, vectors: Path, name: str, seed: int) -> Log:
    """Make documents of classes of medquad's questions; a quarter of them is only tested."""
    judged = open_judged(data, vectors, "medquad", in_memory=True)
    queries, answers = judged.queries.items.matrix, judged.documents.vectors
    if name == "topics":
        import faiss

        kmeans = faiss.Kmeans(queries.shape[1], CLASSES[name], niter=15, seed=5)
        kmeans.train(queries)
        label = kmeans.index.search(queries, 1)[1][:, 0]
    else:
        lines = (data / "medquad" / "queries.jsonl").read_text(encoding="utf-8").splitlines()
        texts = {own["_id"]: own["text"] for own in map(json.loads, lines)}
        begins = [" ".join(texts[own].lower().split()[:4]) for own in judged.queries.ids]
        common = [begin for begin, _ in Counter(begins).most_common(CLASSES[name])]
        label = np.array([common.index(own) if own in common else -1 for own in begins])
    answer: dict[int, int] = {}
    for part in map(judged.pairs, judged.qrels):
        for query, document in zip(part.left_id.tolist(), part.right_id.tolist(), strict=True):
            answer.setdefault(query, document)
    fixed, draw = np.random.default_rng(7), np.random.default_rng(seed)
    documents, pairs = [], []
    for number in range(CLASSES[name]):
        own = fixed.permutation([row for row in np.flatnonzero(label == number) if row in answer])
        documents.append(answers[[answer[row] for row in own[:3]]].mean(axis=0))
        pairs += [(row, number) for row in own[3:63]]
    made = Embeddings([f"d{row}" for row in range(len(documents))], unit(np.array(documents)))
    every = vector_pairs(judged.queries.items, VectorItems(made.vectors), *np.array(pairs).T)
    never = draw.permutation(CLASSES[name])[: CLASSES[name] // 4]
    is_train = (draw.random(len(every)) < 0.5) & ~np.isin(every.right_id, never)
    return Log(made, *(every.take(np.flatnonzero(own)) for own in (is_train, ~is_train)))


def by_adapt(log: Log, seed: int) -> tuple[DualEncoder, Outcome]:
    """Run the command on an index of the documents and a table of the pairs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        identity = VectorEncoder(log.documents.dim, tower="identity").left
        corpus = Corpus(log.documents.ids, log.documents.vectors, "vector")
        embed(identity, corpus, folder / "index", progress=False)
        table = {
            "query": [log.train.left_items[row] for row in log.train.left_id],
            "document": [log.documents.ids[row] for row in log.train.right_id],
        }
        pq.write_table(pa.table(table), folder / "clicks.parquet")
        result = adapt(
            str(folder / "index"),
            str(folder / "clicks.parquet"),
            out=folder / "out",
            seed=seed,
            device="cpu",
            progress=False,
        )
        found = {"keep": result.keep, "alpha": result.alpha, "finding": result.finding}
        found["measured"] = [
            [row["queries of"], row["documents"], round(row["difference"], 4)]
            for row in result.quality
        ]
        return load_model(result.model_folder), found


def in_batch(log: Log) -> Objective:
    """Return the softmax over a batch."""
    return InfoNCE(temperature=0.03, **sizes_of(log.train))


def softmax(log: Log) -> Objective:
    """Return the softmax over all documents, which weigh alike."""
    size = {"num_left": log.train.num_left}
    return FrozenCorpus(log.documents.vectors, positive_in_softmax=True, temperature=0.03, **size)


def by_training(
    log: Log, seed: int, loss: Callable[[Log], Objective], epochs: int, keep: float
) -> tuple[DualEncoder, Outcome]:
    """Train on all pairs for so many passes, and keep a share of the original weights."""
    how = {"batch_size": min(32, len(log.train)), "learning_rate": 1e-3, "epochs": epochs}
    original, (model, *_) = train_map(log.documents, log.train, loss(log), seed, **how)
    model.load_state_dict(interpolate(original, model, keep))
    return model, {"keep": keep}


METHODS = {
    "adapt": by_adapt,
    "in-batch": partial(by_training, loss=in_batch, epochs=2 * EPOCHS, keep=0.5),
    "in-batch, long": partial(by_training, loss=in_batch, epochs=20 * EPOCHS, keep=0.5),
    "softmax, whole": partial(by_training, loss=softmax, epochs=EPOCHS, keep=0.0),
}


def measure(data: Path, vectors: Path, settings: Settings) -> Outcome:
    """Adapt by one method, and return gains of test queries over the vectors as they are."""
    seed = settings["seed"]
    log = open_log(data, vectors, settings["task"], seed)
    if settings["pairs"]:
        order = np.random.default_rng(seed).permutation(len(log.train))
        log = log._replace(train=log.train.take(order[: settings["pairs"]]))
    begun = time.process_time()
    model, outcome = METHODS[settings["method"]](log, seed)
    outcome["spent"] = round(time.process_time() - begun, 1)
    test, original = IndexEvaluator.of_pairs(log.test, log.documents), new_map(log.documents)
    # In the order of the pairs, from which finished runs drew their queries.
    qrels = {own: test.qrels[own] for own in (f"left-{row}" for row in log.test.left_id)}
    seen, new = divide_by_training(qrels, ids_of(log.train, log.documents))
    draw = np.random.default_rng(0)
    for kind, queries in {"seen": seen, "new": new}.items():
        used = draw.permutation(list(queries))[:TESTED].tolist()
        outcome[f"{kind} queries"] = len(used)
        if used:
            before, after = (np.mean(scores_of(own, test.among(used))) for own in (original, model))
            outcome[kind] = round(float(after - before), 4)
            outcome[f"{kind} before"] = round(float(before), 4)
    return outcome


def run(
    data: Path,
    vectors: Path,
    tasks: list[str],
    sizes: Sequence[int] = SIZES,
    methods: Sequence[str] = tuple(METHODS),
    seeds: int = SEEDS,
    processes: int = 1,
) -> None:
    """Run every method on logs of every size."""
    wanted = [
        {"task": task, "pairs": size, "method": method, "seed": seed}
        for seed in range(seeds)
        for task in tasks
        for size in sizes
        for method in methods
    ]
    Store(STORE).get(wanted, partial(measure, data, vectors), processes)


def report() -> None:
    """Print gains of all runs: new and seen documents, mean ± standard deviation over seeds."""
    rows: dict[tuple[str, int], dict[str, object]] = {}
    for own in frame.by_seed(Store(STORE).runs):
        settings, outcomes = own[0].settings, [each.outcome for each in own]
        row = rows.setdefault((settings["task"], settings["pairs"]), {})
        row |= {"set": settings["task"], "pairs": settings["pairs"] or "all"}
        for kind in ("new", "seen"):
            gains = [outcome[kind] for outcome in outcomes if kind in outcome]
            row[f"{settings['method']}, {kind}"] = frame.spread(gains) if gains else "none"
        if settings["method"] == "adapt":
            row["kept"] = ", ".join(f"{outcome['keep']:g}" for outcome in outcomes)
        row[f"{settings['method']}, s"] = round(np.mean([each["spent"] for each in outcomes]), 1)
    print_table(Table("gain in nDCG@10", list(rows.values())))


def check(folder: Path) -> None:
    """Shift queries: `adapt` shifts them back, for documents without a pair, too."""
    globals().update(STORE=folder / "runs.jsonl")
    draw = np.random.default_rng(0)
    documents = unit(draw.standard_normal((160, 32)))
    shift = unit(draw.standard_normal((1, 32)))
    places = np.array([*range(160), *range(80)])
    pairs = np.stack([np.arange(240), places], axis=1)
    queries = documents[places] + shift + 0.1 * draw.standard_normal((240, 32))
    splits = {"train": np.concatenate([pairs[:120], pairs[160:220]]), "test": pairs[120:160]}
    *where, name = write_judged(folder, documents, queries, splits)
    run(*where, [name], [0], seeds=1)
    adapted = Store(STORE).runs[0].outcome
    assert adapted["new"] > 0.02, adapted
    report()


if __name__ == "__main__":
    frame.command_line(run, report, check=check)
