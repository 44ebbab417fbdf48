"""Static encoders: what is a global objective worth where a forward pass costs nothing?

    OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false python eval/static.py run FOLDER
    python eval/static.py steps FOLDER "[InfoNCE 128,GlobalCache 128]"
    python eval/static.py report

FOLDER is in BEIR's form. Every row trains a table of tokens, which begins as the word embeddings of
a published model, for the same CPU seconds of one thread (`time.process_time`: other processes of
the machine do not count). Tokens are made before and are the same for all. τ, then the learning
rate, are chosen for each row by nDCG@10 on held-out queries, with the first seed and a third of the
seconds, the rate on past an edge; then all seeds train. nDCG@10 is of test queries over all
documents. One line per run is added to --results, and a run that is there already is not made
again.

References: the table before training; BM25; a distilled table (each token alone through the model,
PCA, and less weight for frequent ones, as in model2vec); sentence-transformers' own recipe, whole
and from the same words.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from comparison_tasks import Retrieval, beginnings
from finetuning import Results, Trainings
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from sklearn.decomposition import PCA
from small_batch import OBJECTIVES
from transformers import AutoModel, AutoTokenizer, get_scheduler

from dualenc.data import PairDataset
from dualenc.encoders import StaticEncoder, TextEncoder
from dualenc.encoders.hub import model_folder
from dualenc.evaluation.report_page import Table, print_table
from dualenc.evaluation.retrieval import Result, bm25_run
from dualenc.training import Trainer

RESULTS = Path("eval/results/static.jsonl")
WORDS = 256
"""Texts are cut behind so many."""
TEMPERATURES = (0.03, 0.05)
FIRST_RATE = 0.01
RATES = (0.005, 0.01, 0.02)
BEYOND_EDGE = 2
TUNING = 1 / 3
"""Of the seconds, while tuning."""
PCA_DIM = 256
SIF = 1e-4
"""model2vec's weight of a token of probability p is SIF / (SIF + p)."""
PUBLISHED = "MultipleNegativesRankingLoss"
PUBLISHED_TEMPERATURE = 0.05
"""Of that loss: its scale is 20."""


class Row(NamedTuple):
    """A line of the table."""

    objective: str
    batch_size: int
    dim: int | None = None  # of a table that begins at random, not with words
    rate: float | None = None  # where it is not chosen


ROWS = {
    f"{name} {batch_size}": Row(name, batch_size)
    for name, batch_size in (
        *(("InfoNCE", 128), ("InfoNCE", 512), ("InfoNCE", 2048)),
        *(("SogCLR+", 128), ("SogCLR+", 512)),
        *(("GlobalCache", 128), ("GlobalCache", 512)),
        ("ExactGlobal", 128),
    )
}
ROWS["sentence-transformers, words"] = Row(PUBLISHED, 2048)
ROWS["sentence-transformers, whole recipe"] = Row(PUBLISHED, 2048, dim=1024, rate=0.2)
"""The recipe: https://huggingface.co/blog/static-embeddings, without its Matryoshka loss."""


class Task(NamedTuple):
    """Training pairs, queries to tune by and queries to report, the first model, and the token ids
    of all texts."""

    name: str
    tokenizer: Any
    pairs: PairDataset
    validation: Retrieval
    test: Retrieval
    words: TextEncoder

    def new_model(self, dim: int | None = None) -> TextEncoder:
        """A model that begins as the words, or as a random table; it takes over the tokens that are
        known."""
        known = [tower.prepare.token_cache for tower in (self.words.left, self.words.right)]
        if dim is None:
            # All but the tokens.
            return copy.deepcopy(self.words, {id(cache): cache for cache in known})
        model = StaticEncoder(tokenizer=self.tokenizer, dim=dim)
        model.left.prepare.token_cache, model.right.prepare.token_cache = known
        return model


def open_task(path: Path, words: str) -> Task:
    """The beginnings of a BEIR folder's texts."""
    pairs, validation, test = beginnings(path, WORDS)
    model = StaticEncoder(words=words)
    for tower, texts in (
        (model.left, [*pairs.left_items, *validation.queries.items, *test.queries.items]),
        (model.right, [*pairs.right_items, *test.corpus.items]),
    ):
        tower.prepare.cache_tokens()
        for first in range(0, len(texts), 1024):
            tower.prepare(texts[first : first + 1024])
    tokenizer = AutoTokenizer.from_pretrained(model_folder(words))
    return Task(path.name, tokenizer, pairs, Retrieval(validation), Retrieval(test), model)


def train(task: Task, row: Row, settings: dict[str, Any], steps: int) -> tuple[TextEncoder, float]:
    """Train for so many steps; the model, and the CPU seconds of one thread that it took."""
    torch.manual_seed(settings["seed"])
    model = task.new_model(row.dim)
    pairs = task.pairs
    begun = time.process_time()
    if row.objective == PUBLISHED:
        train_published(task, model, row.batch_size, settings["rate"], settings["seed"], steps)
        return model, time.process_time() - begun
    criterion = OBJECTIVES[row.objective](
        temperature=settings["temperature"],
        seed=settings["seed"],
        num_left=pairs.num_left,
        num_right=pairs.num_right,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            output=folder,
            batch_size=min(row.batch_size, len(pairs)),
            max_steps=steps,
            learning_rate=settings["rate"],
            save_every=None,
            seed=settings["seed"],
            overwrite=True,
            progress=False,
        )
        trainer.fit(model, pairs, criterion)
    return model, time.process_time() - begun


def train_published(
    task: Task, model: TextEncoder, batch_size: int, rate: float, seed: int, steps: int
) -> None:
    """Train the table with sentence-transformers' module and loss, AdamW, a tenth of warm-up and
    linear decay.

    Batches hold no query or document twice, as in its recipe for static models.
    """
    # Over the same memory.
    static = StaticEmbedding(
        task.tokenizer, embedding_weights=model.left.backbone.embedding.weight.detach()
    )
    loss = MultipleNegativesRankingLoss(SentenceTransformer(modules=[static], device="cpu"))
    optimizer = torch.optim.AdamW(static.parameters(), lr=rate, fused=True)
    schedule = get_scheduler("linear", optimizer, round(0.1 * steps), steps)
    draw = np.random.default_rng(seed)
    order = np.empty(0, dtype=np.int64)
    for _ in range(steps):
        if len(order) < batch_size:
            order = draw.permutation(len(task.pairs))
        batch = order[:batch_size]
        order = order[batch_size:]
        for ids in (task.pairs.left_id, task.pairs.right_id):
            batch = batch[np.unique(ids[batch], return_index=True)[1]]
        features = []
        for prepare, items, ids in (
            (model.left.prepare, task.pairs.left_items, task.pairs.left_id),
            (model.right.prepare, task.pairs.right_items, task.pairs.right_id),
        ):
            inputs = prepare([items[row] for row in ids[batch].tolist()])
            lengths = inputs["attention_mask"].sum(dim=1)
            tokens = inputs["input_ids"][inputs["attention_mask"].bool()]
            features.append({"input_ids": tokens, "offsets": lengths.cumsum(0) - lengths})
        loss(features, torch.empty(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def distilled(words: str) -> torch.Tensor:
    """(V, PCA_DIM) each token alone through a transformer, in the directions of most variance, less
    of frequent tokens.

    As model2vec does (https://github.com/MinishLab/model2vec), by the rank of a token for its
    frequency.
    """
    transformer = AutoModel.from_pretrained(model_folder(words)).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder(words))
    vectors = []
    with torch.no_grad():
        for tokens in torch.arange(len(tokenizer)).split(512):
            ids = torch.tensor(
                [
                    [tokenizer.cls_token_id, token, tokenizer.sep_token_id]
                    for token in tokens.tolist()
                ]
            )
            vectors.append(transformer(ids).last_hidden_state.mean(dim=1))
    reduced = PCA(PCA_DIM, random_state=0).fit_transform(torch.cat(vectors).numpy())
    share = 1 / np.arange(2, len(reduced) + 2)
    weight = SIF / (SIF + share / share.sum())
    return torch.from_numpy(reduced * weight[:, None]).float()


def run(
    paths: Sequence[Path],
    rows: Sequence[str] = tuple(ROWS),
    seconds: float = 12.0,
    seeds: int = 3,
    words: str = "sentence-transformers/all-MiniLM-L6-v2",
    results: Path = RESULTS,
) -> None:
    """Tune and train rows on folders.

    Args:
        paths: BEIR folders.
        rows: names of rows; none: the references alone.
        seconds: CPU seconds of one thread that every run may take; a third of them while tuning.
        seeds: of each row.
        words: model whose word embeddings the table begins with.
        results: where finished runs are kept.
    """
    torch.set_num_threads(1)
    kept = Results(results)
    for path in paths:
        task = open_task(path, words)
        common = {"task": task.name, "pairs": len(task.pairs)}
        measure_references(task, common, words, kept)
        for name in rows:
            trainings = TableTrainings(task, ROWS[name], {**common, "row": name}, kept)
            temperature, rate = trainings.tune(seconds * TUNING, RATES)
            scores = [
                trainings.measure(seconds, temperature, rate, seed, tuning=False)["test"]
                for seed in range(seeds)
            ]
            print(
                f"{task.name} {name}: {[round(one, 4) for one in scores]} "
                f"τ {temperature} rate {rate}",
                flush=True,
            )


def measure_references(task: Task, common: dict[str, Any], words: str, kept: Results) -> None:
    """The table before training, BM25, and a distilled table."""

    def add(row: str, measure: Callable[[], float]) -> None:
        if kept.find({**common, "row": row}) is None:
            kept.add({**common, "row": row, "test": measure()})

    def bm25() -> float:
        collection = task.test.collection
        run = bm25_run(collection, k=11)
        return Result("BM25", task.name, run, collection.qrels, len(collection.corpus.ids)).means[
            "ndcg@10"
        ]

    def by_table() -> float:
        model = task.new_model(PCA_DIM)
        model.left.backbone.embedding.weight.data.copy_(distilled(words))
        return task.test(model)["ndcg@10"]

    add("BM25", bm25)
    add("words, untrained", lambda: task.test(task.new_model())["ndcg@10"])
    add("distilled table", by_table)


class TableTrainings(Trainings):
    """The trainings of one row of a task, with rates on past both edges; a published recipe has its
    own."""

    first_steps = 3

    def train(self, settings: dict[str, Any], steps: int) -> tuple[TextEncoder, float]:
        return train(self.task, self.row, settings, steps)

    def tune(self, seconds: float, rates: Sequence[float]) -> tuple[float, float]:
        """The best τ at the first rate, and the best rate at that τ."""
        if self.row.rate is not None:
            return PUBLISHED_TEMPERATURE, self.row.rate

        def quality(temperature: float, rate: float) -> float:
            return self.measure(seconds, temperature, rate, 0, tuning=True)["validation"]

        temperatures = (PUBLISHED_TEMPERATURE,) if self.row.objective == PUBLISHED else TEMPERATURES
        temperature = max(temperatures, key=lambda value: quality(value, FIRST_RATE))
        tried = list(rates)
        for _ in range(1 + BEYOND_EDGE):
            best = max(tried, key=lambda rate: quality(temperature, rate))
            if best == tried[0]:
                tried.insert(0, best / 2)
            elif best == tried[-1]:
                tried.append(2 * best)
        return temperature, best


def steps(
    path: Path,
    rows: Sequence[str],
    steps: int = 80,
    temperature: float = 0.05,
    rate: float = 0.01,
    words: str = "sentence-transformers/all-MiniLM-L6-v2",
) -> None:
    """Print nDCG@10 on held-out queries, and seconds, after equally many steps of each row.

    Args:
        path: BEIR folder.
        rows: names of rows.
        steps: of each.
        temperature, rate: the same for all.
        words: see `run`.
    """
    torch.set_num_threads(1)
    task = open_task(path, words)
    settings = {"temperature": temperature, "rate": rate, "seed": 0}
    for name in rows:
        model, spent = train(task, ROWS[name], settings, steps)
        score = task.validation(model.eval())["ndcg@10"]
        print(f"{task.name} {name}: {score:.4f} after {steps} steps, {spent:.1f} s", flush=True)


def report(results: Path = RESULTS) -> None:
    """Print a table for each task."""
    kept = Results(results)
    for task, pairs in dict.fromkeys((run["task"], run["pairs"]) for run in kept.runs):
        tested = [run for run in kept.runs if run["task"] == task and "test" in run]
        table = []
        for name in dict.fromkeys(run["row"] for run in tested):
            own = [run for run in tested if run["row"] == name]
            cells: dict[str, Any] = {
                "row": name,
                "ndcg@10": statistics.mean(run["test"] for run in own),
            }
            if len(own) > 1:
                cells["deviation"] = statistics.stdev(run["test"] for run in own)
                cells |= {
                    "seconds": statistics.mean(run["seconds"] for run in own),
                    "steps": own[0]["steps"],
                }
                cells |= {"τ": own[0]["temperature"], "rate": f"{own[0]['rate']:g}"}
            table.append(cells)
        print_table(Table(f"{task}, {pairs:,} pairs", table))


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli([run, steps, report])
