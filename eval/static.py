"""Static encoders: what is a global objective worth where a forward pass costs nothing?

    OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false python eval/static.py run "[PAPERS]" --seconds 24
    python eval/static.py report

Each row trains a table of tokens for BEIR folders, which begins as the word embeddings of a
published model, for the same CPU seconds of one thread, see `fine_tuning.py`. Tokens are made
before. nDCG@10 is of test queries over all documents. References: BM25, and the table before
training.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import frame
import toys
from fine_tuning import MINILM, equal_seconds, print_stored, tested, train
from frame import Outcome, Settings, Store
from tasks import Retrieval, Task, beginnings, read_tokens

from dualenc.encoders import StaticEncoder, TextEncoder
from dualenc.encoders.text import TokenCache
from dualenc.evaluation.retrieval import Result, bm25_run

STORE = frame.RESULTS / "static.jsonl"
WORDS = 256  # after which texts are cut
BATCHES = {"InfoNCE": (128, 512, 2048), "SogCLR+": (128, 512), "GlobalCache": (128, 512)}
ROWS = [f"{name} {batch}" for name, batches in BATCHES.items() for batch in batches]
ROWS += ["ExactGlobal 128"]
REFERENCES = ["BM25", "words, untrained"]
SHOWN = [*REFERENCES, "distilled table", *ROWS, "sentence-transformers, words"]
SHOWN += ["SogCLR+ 512, fixed settings"]
COLUMNS = {name: {"task": name} for name in ("papers", "medquad", "scifact")}


def open_task(path: Path, words: str) -> Task:
    """Return the beginnings of a BEIR folder's texts, tokenized, and a new model from words."""
    pairs, *parts = beginnings(path, WORDS)
    first, tokens = StaticEncoder(words), TokenCache()

    def new_model() -> TextEncoder:
        model = copy.deepcopy(first)
        model.left.prepare.token_cache = model.right.prepare.token_cache = tokens
        return model

    read_tokens(new_model().left.prepare, pairs, parts)
    return Task(new_model, pairs, *map(Retrieval, parts), learning_rate=0.01)


def reference(task: Task, settings: Settings) -> Outcome:
    """Return nDCG@10 of a reference on test queries."""
    if settings["row"] != "BM25":
        return {"test": task.test(task.new_model())["ndcg@10"]}
    collection = task.test.collection
    found = bm25_run(collection, k=11)
    bm25 = Result("BM25", "test", found, collection.qrels, len(collection.corpus))
    return {"test": bm25.means["ndcg@10"]}


def run(
    paths: Sequence[Path],
    rows: Sequence[str] = ROWS,
    seconds: float = 12.0,
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
        store.get([{**common, "row": row} for row in REFERENCES], partial(reference, task))
        wanted = {row: {**common, "row": row} for row in rows}
        equal_seconds(store, task, partial(train, task, static=True), wanted, seconds, rates, seeds)


def report() -> None:
    """Print all tested runs, and the table of docs/results.md."""
    print_stored(STORE, SHOWN, COLUMNS)


def check(folder: Path) -> None:
    """Run a row and all references on toy data."""
    path, words = toys.beir(folder / "toy"), str(toys.text_model(folder / "words"))
    store = folder / "static.jsonl"
    run([path], ["InfoNCE 12"], 0.05, rates=(0.01,), seeds=1, words=words, results=store)
    found = {each.settings["row"]: each.outcome["test"] for each in tested(Store(store))}
    assert list(found) == [*REFERENCES, "InfoNCE 12"]
    print_stored(store, list(found), {"toy": {"task": "toy"}})


if __name__ == "__main__":
    frame.command_line(run, report, check=check)
