"""Static encoders: what is a global objective worth where a forward pass costs nothing?

    OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false python eval/static.py run "[PAPERS]" --seconds 24
    python eval/static.py steps PAPERS "[InfoNCE 128,GlobalCache 128]"
    python eval/static.py report

Each row trains a table of tokens for BEIR folders, which begins as the word embeddings of a
published model, for the same CPU seconds of one thread, see `fine_tuning.py`. Tokens are made
before. nDCG@10 is of test queries over all documents.

References: the table before training; BM25; a distilled table, as model2vec's; the recipe of
https://huggingface.co/blog/static-embeddings without Matryoshka loss, whole and from words.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import frame
import numpy as np
import torch
import toys
from fine_tuning import MINILM, equal_seconds, new_objective, side_by_side, tested
from frame import Outcome, Settings, Store, Trained
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from sklearn.decomposition import PCA
from tasks import Retrieval, Task, beginnings
from transformers import AutoModel, AutoTokenizer, get_scheduler

from dualenc.data import PairDataset
from dualenc.encoders import StaticEncoder, TextEncoder
from dualenc.encoders.hub import model_folder
from dualenc.encoders.text import TokenCache
from dualenc.evaluation.report_page import Table, print_table
from dualenc.evaluation.retrieval import Result, bm25_run

STORE = frame.RESULTS / "static.jsonl"
WORDS = 256  # after which texts are cut
BATCHES = {"InfoNCE": (128, 512, 2048), "SogCLR+": (128, 512), "GlobalCache": (128, 512)}
ROWS = [f"{name} {batch}" for name, batches in BATCHES.items() for batch in batches]
ON_WORDS, WHOLE = "sentence-transformers, words", "sentence-transformers, whole recipe"
ROWS += ["ExactGlobal 128", ON_WORDS, WHOLE]
REFERENCES = ["BM25", "words, untrained", "distilled table"]
SHOWN = [*REFERENCES, *ROWS[:-1], "SogCLR+ 512, fixed settings"]
COLUMNS = {name: {"task": name} for name in ("papers", "medquad", "scifact")}
PUBLISHED_BATCH = 2048
PCA_DIM = 256
SIF = 1e-4  # model2vec's weight of a token of probability p is SIF / (SIF + p)


def open_task(path: Path, words: str) -> Task:
    """Return the beginnings of a BEIR folder's texts, tokenized, and a new model from words."""
    pairs, validation, test = beginnings(path, WORDS)
    first, tokens = StaticEncoder(words), TokenCache()

    def new_model(dim: int | None = None) -> TextEncoder:
        random = dim is not None
        model = StaticEncoder(tokenizer=words, dim=dim) if random else copy.deepcopy(first)
        model.left.prepare.token_cache = model.right.prepare.token_cache = tokens
        return model

    prepare = new_model().left.prepare
    texts = [*pairs.left_items, *pairs.right_items, *test.corpus.items]
    texts += [*validation.queries.items, *test.queries.items]
    for start in range(0, len(texts), 1024):
        prepare(texts[start : start + 1024])
    return Task(new_model, pairs, Retrieval(validation), Retrieval(test), learning_rate=0.01)


def train(task: Task, settings: Settings, steps: int) -> Trained:
    """Train a row, such as "InfoNCE 128", for a number of steps."""
    row, seed = settings["row"], settings["seed"]
    torch.manual_seed(seed)
    model = task.new_model(1024 if row == WHOLE else None)
    if row.startswith("sentence-transformers"):
        return train_published(model, task.pairs, settings, steps)
    name, batch_size = row.split(" ")
    size = {"batch_size": min(int(batch_size), len(task.pairs)), "max_steps": steps}
    objective, rate = new_objective(task.pairs, name, settings), settings["rate"]
    return frame.train(model, task.pairs, objective, learning_rate=rate, seed=seed, **size)


def train_published(
    model: TextEncoder, pairs: PairDataset, settings: Settings, steps: int
) -> Trained:
    """Train by sentence-transformers' recipe; batches hold no query or document twice."""
    begun = time.process_time()
    ours = model.left.backbone
    # Over the same memory, but with dense gradients.
    static = StaticEmbedding(ours.tokenizer, embedding_weights=ours.embedding.weight.detach())
    loss = MultipleNegativesRankingLoss(SentenceTransformer(modules=[static], device="cpu"))
    optimizer = torch.optim.AdamW(static.parameters(), lr=settings["rate"], fused=True)
    schedule = get_scheduler("linear", optimizer, round(0.1 * steps), steps)
    draw = np.random.default_rng(settings["seed"])
    order = np.empty(0, dtype=np.int64)
    left = (model.left.prepare, pairs.left_items, pairs.left_id)
    right = (model.right.prepare, pairs.right_items, pairs.right_id)
    for _ in range(steps):
        if len(order) < PUBLISHED_BATCH:
            order = draw.permutation(len(pairs))
        batch, order = np.split(order, [PUBLISHED_BATCH])
        for ids in (pairs.left_id, pairs.right_id):
            batch = batch[np.unique(ids[batch], return_index=True)[1]]
        features = []
        for prepare, items, ids in (left, right):
            inputs = prepare([items[row] for row in ids[batch].tolist()])
            lengths = inputs["attention_mask"].sum(dim=1)
            tokens = inputs["input_ids"][inputs["attention_mask"].bool()]
            features.append({"input_ids": tokens, "offsets": lengths.cumsum(0) - lengths})
        loss(features, torch.empty(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return Trained(model.eval(), steps, time.process_time() - begun)


def distilled(model: TextEncoder, words: str) -> TextEncoder:
    """Fill a table with each token alone through a transformer, less for frequent tokens.

    As model2vec does (https://github.com/MinishLab/model2vec), in the directions of most variance,
    and by the rank of a token for its frequency.
    """
    transformer = AutoModel.from_pretrained(model_folder(words)).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder(words))
    ends = torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id])
    vectors = []
    with torch.no_grad():
        for tokens in torch.arange(len(tokenizer)).split(512):
            left, right = ends.expand(len(tokens), 2).T
            ids = torch.stack([left, tokens, right], dim=1)  # (512, 3)
            vectors.append(transformer(ids).last_hidden_state.mean(dim=1))
    table = model.left.backbone.embedding.weight.data  # (V, D)
    reduced = PCA(table.shape[1], random_state=0).fit_transform(torch.cat(vectors).numpy())
    share = 1 / np.arange(2, len(reduced) + 2)
    weight = SIF / (SIF + share / share.sum())
    table.copy_(torch.from_numpy(reduced * weight[:, None]))
    return model


def reference(task: Task, words: str, settings: Settings) -> Outcome:
    """Return nDCG@10 of a reference on test queries."""
    if settings["row"] == "BM25":
        collection = task.test.collection
        found = bm25_run(collection, k=11)
        bm25 = Result("BM25", "test", found, collection.qrels, len(collection.corpus))
        return {"test": bm25.means["ndcg@10"]}
    model = task.new_model()
    if settings["row"] == "distilled table":
        model = distilled(task.new_model(min(PCA_DIM, model.left.dim)), words)
    return {"test": task.test(model)["ndcg@10"]}


def run(
    paths: Sequence[Path],
    rows: Sequence[str] = ROWS,
    seconds: float = 12.0,
    temperatures: Sequence[float] = (0.03, 0.05),
    rates: Sequence[float] = (0.01, 0.005, 0.02),
    seeds: int = 3,
    words: str = MINILM,
    results: Path = STORE,
) -> None:
    """Tune and train rows on folders; without rows, measure the references alone."""
    store = Store(results)
    for path in paths:
        task = open_task(path, words)
        common = {"task": path.name, "pairs": len(task.pairs)}
        store.get([{**common, "row": row} for row in REFERENCES], partial(reference, task, words))
        for row in rows:
            own, trained = {**common, "row": row}, partial(train, task)
            # The published loss has a scale of 20, and the whole recipe a rate.
            grid = [(0.05,) if row in (ON_WORDS, WHOLE) else temperatures]
            grid.append((0.2,) if row == WHOLE else rates)
            equal_seconds(store, task, own, trained, seconds, *grid, seeds)


def steps(path: Path, rows: Sequence[str], steps: int = 80, words: str = MINILM) -> None:
    """Print nDCG@10 on held-out queries, and seconds, after equally many steps of each row."""
    task = open_task(path, words)
    for row in rows:
        settings = {"row": row, "temperature": 0.05, "rate": 0.01, "seed": 0}
        model, _, spent = train(task, settings, steps)
        score = task.validation(model)["ndcg@10"]
        print(f"{path.name} {row}: {score:.4f} after {steps} steps, {spent:.1f} s", flush=True)


def report(results: Path = STORE) -> None:
    """Print all tested runs, and the table of docs/results.md."""
    store = Store(results)
    frame.print_runs("Tested runs", tested(store), digits=4)
    print_table(Table("Side by side", side_by_side(store, SHOWN, COLUMNS)))


def check(folder: Path) -> None:
    """Run rows of both kinds and all references on toy data."""
    path, words = toys.beir(folder / "toy"), str(toys.text_model(folder / "words"))
    rows, store = ["InfoNCE 12", ON_WORDS, WHOLE], folder / "static.jsonl"
    run([path], rows, 0.05, rates=(0.01,), seeds=1, words=words, results=store)
    tested_rows = [each.settings["row"] for each in tested(Store(store))]
    assert tested_rows == [*REFERENCES, *rows]
    report(store)


if __name__ == "__main__":
    frame.command_line(run, steps, report, check=check)
