"""Does `dualenc adapt` choose well, from logs of any size, for seen and for new documents?

    python eval/adapting_choice.py run DATA VECTORS "[scifact,medquad,cranfield,topics,types]"
    python eval/adapting_choice.py report

DATA/NAME is a BEIR folder, and VECTORS/NAME/{corpus,queries} is what `dualenc embed` made of its
sides. Two sets of classes are made of medquad: "topics" are 77 clusters of its questions, and
"types" the 20 commonest beginnings of questions. A class is a document, the mean of three answers;
a quarter of the classes is never clicked.

`adapt` is the command as it is; "former" chose the share of the original weights by a tenth of the
pairs, and weighed all documents alike; "in-batch" trains InfoNCE on batches of 32 for twice as many
passes, and keeps half of the original weights. Test nDCG@10 is over all documents, of queries with
a document in the log ("seen") and without ("new").
"""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from frame import Outcome, Settings, Store

from dualenc import adapt
from dualenc.data import Corpus, PairDataset, split_by_documents
from dualenc.data.bad_rows import BadRows
from dualenc.data.item_lists import VectorItems
from dualenc.data.readers.beir import read_judged_queries
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import DualEncoder, VectorEncoder, interpolate, load_model
from dualenc.evaluation.metrics import score_queries
from dualenc.evaluation.report_page import Table, print_table
from dualenc.evaluation.retrieval import retrieve
from dualenc.objectives import FrozenCorpus, InfoNCE
from dualenc.search.embed.encode import embed
from dualenc.training import Evaluator
from dualenc.workflows.adaptation_choice import MIN_DOCUMENTS
from dualenc.workflows.adapting import SHARES

STORE = frame.RESULTS / "adapting_choice.jsonl"
SIZES, SEEDS, EPOCHS = (30, 100, 300, 0), 3, 12
"""Numbers of pairs (0: all), of seeds, and of passes over the pairs."""
METHODS = ("adapt", "former", "in-batch")
CLASSES = {"topics": 77, "types": 20}
TESTED = 400
"""Maximum number of test queries of either kind."""


class Log(NamedTuple):
    """Unit vectors of documents (N, D) and queries (Q, D), and pairs (n, 2) of both."""

    documents: np.ndarray
    queries: np.ndarray
    train: np.ndarray
    test: np.ndarray


def open_vectors(data: Path, vectors: Path, name: str) -> tuple[Log, list[str]]:
    """Open a BEIR folder's vectors and pairs, and return them with the ids of the queries."""
    sides = [Embeddings.open(vectors / name / side) for side in ("corpus", "queries")]
    rows = [{own: row for row, own in enumerate(side.ids)} for side in sides]
    parts = []
    for split in ("train", "test"):
        pairs: list[tuple[int, int]] = []
        if (data / name / "qrels" / f"{split}.tsv").exists():
            folder = data / name
            judged = read_judged_queries(folder, split, sides[0].ids, BadRows(folder))[1]
            pairs = [
                (rows[1][query], rows[0][document])
                for query, grades in judged.items()
                for document, grade in grades.items()
                if grade > 0 and document in rows[0]
            ]
        parts.append(np.array(pairs, dtype=np.int64).reshape(-1, 2))
    values = [unit(np.asarray(side.vectors[:], dtype=np.float32)) for side in sides]
    return Log(*values, *parts), sides[1].ids


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def open_log(data: Path, vectors: Path, name: str, seed: int) -> Log:
    """Open a collection or make classes; a collection without training pairs is cut in halves."""
    if name in CLASSES:
        return classes(data, vectors, name, seed)
    log, _ = open_vectors(data, vectors, name)
    if len(log.train):
        return log
    queries = np.random.default_rng(seed).permutation(np.unique(log.test[:, 0]))
    is_first = np.isin(log.test[:, 0], queries[: len(queries) // 2])
    return log._replace(train=log.test[is_first], test=log.test[~is_first])


def classes(data: Path, vectors: Path, name: str, seed: int) -> Log:
    """Make documents of classes of medquad's questions; a quarter of them is only tested."""
    log, ids = open_vectors(data, vectors, "medquad")
    if name == "topics":
        import faiss

        kmeans = faiss.Kmeans(log.queries.shape[1], CLASSES[name], niter=15, seed=5)
        kmeans.train(log.queries)
        label = kmeans.index.search(log.queries, 1)[1][:, 0]
    else:
        lines = (data / "medquad" / "queries.jsonl").read_text(encoding="utf-8").splitlines()
        texts = {own["_id"]: own["text"] for own in map(json.loads, lines)}
        begins = [" ".join(texts[own].lower().split()[:4]) for own in ids]
        common = [begin for begin, _ in Counter(begins).most_common(CLASSES[name])]
        label = np.array([common.index(own) if own in common else -1 for own in begins])
    answer = dict(np.concatenate([log.train, log.test])[::-1].tolist())
    fixed, draw = np.random.default_rng(7), np.random.default_rng(seed)
    documents, pairs = [], []
    for number in range(CLASSES[name]):
        own = fixed.permutation([row for row in np.flatnonzero(label == number) if row in answer])
        documents.append(log.documents[[answer[row] for row in own[:3]]].mean(axis=0))
        pairs += [(row, number) for row in own[3:63]]
    rows = np.array(pairs)
    never = draw.permutation(CLASSES[name])[: CLASSES[name] // 4]
    is_train = (draw.random(len(rows)) < 0.5) & ~np.isin(rows[:, 1], never)
    return Log(unit(np.array(documents)), log.queries, rows[is_train], rows[~is_train])


class Nearest(Evaluator):
    """Mean nDCG@10 of pairs over all documents, and that of each query."""

    primary = "ndcg@10"

    def __init__(self, log: Log, pairs: np.ndarray) -> None:
        self.log, self.qrels = log, qrels_of(pairs)
        self.rows = np.array([int(query[1:]) for query in self.qrels])
        self.ids = [f"d{row}" for row in range(len(log.documents))]

    def scores(self, model: DualEncoder | None = None) -> np.ndarray:
        """Return (Q,) nDCG@10, by default of the vectors as they are."""
        queries = self.log.queries[self.rows]
        if model is not None:
            queries = model.encode_query(list(queries))
        run = retrieve(list(self.qrels), queries, self.ids, self.log.documents, qrels=self.qrels)
        scored = score_queries(self.qrels, run)
        return np.array([scored[query][self.primary] for query in self.qrels])

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        return {self.primary: float(self.scores(model).mean())}


def qrels_of(pairs: np.ndarray) -> dict[str, dict[str, int]]:
    qrels: dict[str, dict[str, int]] = {}
    for query, document in pairs.tolist():
        qrels.setdefault(f"q{query}", {})[f"d{document}"] = 1
    return qrels


def as_pairs(log: Log) -> PairDataset:
    """Return the training pairs over the queries that are in one."""
    used, left = np.unique(log.train[:, 0], return_inverse=True)
    items = VectorItems(log.queries[used]), VectorItems(log.documents)
    modalities = {"left_modality": "vector", "right_modality": "vector"}
    return PairDataset(*items, left, log.train[:, 1], **modalities)


def by_adapt(log: Log, seed: int) -> tuple[DualEncoder, Outcome]:
    """Run the command on an index of the documents and a table of the pairs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        identity = VectorEncoder(log.documents.shape[1], tower="identity").left
        ids = [f"d{row}" for row in range(len(log.documents))]
        embed(identity, Corpus(ids, log.documents, "vector"), folder / "index", progress=False)
        table = {
            "query": list(log.queries[log.train[:, 0]]),
            "document": [f"d{row}" for row in log.train[:, 1]],
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


def by_former(log: Log, seed: int) -> tuple[DualEncoder, Outcome]:
    """Hold a tenth out once, stop by it, and take the best share that does not lower new ones."""
    pairs = as_pairs(log)
    parts = split_by_documents(pairs, 0.1, 1000, seed)
    used = np.unique(log.train[:, 0])
    rows = {
        kind: np.stack([used[part.left_id], part.right_id], axis=1)
        for kind, part in (("new", parts.new), ("known", parts.known))
        if part is not None
    }
    evaluator = Nearest(log, np.concatenate(list(rows.values()))) if rows else None
    objective = FrozenCorpus(
        log.documents, temperature=0.03, positive_in_softmax=True, num_left=pairs.num_left
    )
    original, trained = train_map(log, parts.train, objective, seed, evaluator)
    keep = 1.0
    if "new" in rows and len(np.unique(rows["new"][:, 1])) >= MIN_DOCUMENTS:
        is_new = np.isin(evaluator.rows, rows["new"][:, 0])
        model, quality = copy.deepcopy(trained), {}
        least = None
        for share in reversed(SHARES):
            model.load_state_dict(interpolate(original, trained, share))
            scores = evaluator.scores(model)
            least = scores[is_new].mean() if least is None else least
            if scores[is_new].mean() >= least:
                quality[share] = round(float(scores.mean()), 6)
        keep = max(quality, key=lambda share: (quality[share], share))
    trained.load_state_dict(interpolate(original, trained, keep))
    return trained, {"keep": keep}


def by_in_batch(log: Log, seed: int) -> tuple[DualEncoder, Outcome]:
    """Train InfoNCE on all pairs, and keep half of the original weights."""
    pairs = as_pairs(log)
    sizes = {"num_left": pairs.num_left, "num_right": pairs.num_right}
    objective = InfoNCE(temperature=0.03, **sizes)
    original, trained = train_map(log, pairs, objective, seed, epochs=2 * EPOCHS)
    trained.load_state_dict(interpolate(original, trained, 0.5))
    return trained, {"keep": 0.5}


def train_map(
    log: Log,
    pairs: PairDataset,
    objective: FrozenCorpus | InfoNCE,
    seed: int,
    evaluator: Nearest | None = None,
    epochs: int = EPOCHS,
) -> tuple[DualEncoder, DualEncoder]:
    """Train a perceptron as the command does; return it before and after."""
    torch.manual_seed(seed)
    dim = log.documents.shape[1]
    original = VectorEncoder(dim, tower="dense", right_tower="identity")
    batch_size = min(32, len(pairs))
    stopping = {}
    if evaluator is not None:
        every = max(1, len(pairs) // batch_size)
        stopping = {"evaluate_every": every, "patience": 3, "keep_best": True}
    trained = frame.train(
        copy.deepcopy(original),
        pairs,
        objective,
        evaluator=evaluator,
        batch_size=batch_size,
        learning_rate=1e-3,
        epochs=epochs,
        seed=seed,
        **stopping,
    )
    return original, trained.model


RUN = {"adapt": by_adapt, "former": by_former, "in-batch": by_in_batch}


def measure(data: Path, vectors: Path, settings: Settings) -> Outcome:
    """Adapt by one method, and return gains of test queries over the vectors as they are."""
    seed = settings["seed"]
    log = open_log(data, vectors, settings["task"], seed)
    if settings["pairs"]:
        order = np.random.default_rng(seed).permutation(len(log.train))
        log = log._replace(train=log.train[order[: settings["pairs"]]])
    listed = {f"d{row}" for row in log.train[:, 1].tolist()}
    qrels = qrels_of(log.test)
    is_seen = np.array([not listed.isdisjoint(grades) for grades in qrels.values()])
    draw = np.random.default_rng(0)
    kinds = {"seen": np.flatnonzero(is_seen), "new": np.flatnonzero(~is_seen)}
    names = np.array(list(qrels))
    begun = time.process_time()
    model, outcome = RUN[settings["method"]](log, seed)
    outcome["spent"] = round(time.process_time() - begun, 1)
    for kind, rows in kinds.items():
        used = names[draw.permutation(rows)[:TESTED]]
        outcome[f"{kind} queries"] = len(used)
        if len(used):
            test = Nearest(log, log.test[np.isin(log.test[:, 0], [int(own[1:]) for own in used])])
            before, after = test.scores(), test.scores(model)
            outcome[kind] = round(float((after - before).mean()), 4)
            outcome[f"{kind} before"] = round(float(before.mean()), 4)
    return outcome


def run(
    data: Path,
    vectors: Path,
    tasks: list[str],
    sizes: Sequence[int] = SIZES,
    methods: Sequence[str] = METHODS,
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
    from adapting_task import write_task

    globals().update(STORE=folder / "runs.jsonl")
    draw = np.random.default_rng(0)
    documents = unit(draw.standard_normal((160, 32)))
    shift = unit(draw.standard_normal((1, 32)))
    places = np.array([*range(160), *range(80)])
    pairs = np.stack([np.arange(240), places], axis=1)
    queries = documents[places] + shift + 0.1 * draw.standard_normal((240, 32))
    splits = {"train": np.concatenate([pairs[:120], pairs[160:220]]), "test": pairs[120:160]}
    write_task(folder, documents, queries, splits)
    run(folder / "data", folder / "vectors", ["toy"], [0], seeds=1)
    adapted = Store(STORE).runs[0].outcome
    assert adapted["new"] > 0.02, adapted
    report()


if __name__ == "__main__":
    frame.command_line(run, report, check=check)
