"""`dualenc quickstart`: train, embed, index, search and evaluate on text that is on every machine."""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualenc.errors import DualencError

if TYPE_CHECKING:
    from dualenc.data import BeirPairs, RetrievalSet
    from dualenc.encoders import DualEncoder, TextEncoder
    from dualenc.objectives import SogCLR
    from dualenc.training.trainer import Trainer, TrainingResult

SECONDS = 240
MOST_STEPS, FEWEST_STEPS = 600, 20
MARGIN = 1.25
"""How much longer than measured the rest may take, as other work comes and goes on a machine."""
BATCH_SIZE = 128
MAX_TOKENS = 64
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": MAX_TOKENS,
    # Minutes of training are no danger of overfitting.
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SEARCHES = (
    "sort a list of numbers",
    "solve a system of linear equations",
    "read a file line by line",
)


def quickstart(
    out: str = "quickstart-run",
    max_docs: int = 16000,
    test_docs: int = 1000,
    steps: int | None = None,
    vocab_size: int = 8000,
    seed: int = 0,
) -> None:
    """Train a small text encoder from scratch on the documentation already on this machine; needs no network.

    A query is the summary line of a docstring, its document the qualified name and the rest. The docstrings of the
    standard library and of installed packages are read with `ast`, never imported.

    Args:
        out: folder for the data, the model, the embeddings and the index; replaced by the next quickstart.
        max_docs: documents in the corpus at most.
        test_docs: functions that are held out from training and measured on.
        steps: training steps of 128 pairs. By default some are timed, and as many taken, up to 600, as let everything
            end within four minutes; only this number depends on the machine's speed.
        vocab_size: tokens of the tokenizer that is trained on the corpus.
        seed: of everything random.
    """
    from dualenc.commands.evaluation import HIGHEST_SEED, check_range

    check_range(1, math.inf, test_docs=test_docs, steps=steps)
    check_range(test_docs + BATCH_SIZE, math.inf, max_docs=max_docs)
    check_range(0, HIGHEST_SEED, seed=seed)
    start = time.perf_counter()
    folder = Path(out)
    collection = _read(folder, max_docs, test_docs, seed)
    pairs, untrained = _start(folder, vocab_size, seed)
    bm25 = _bm25(collection)
    if steps is None:
        step_seconds, rest = measure(untrained, pairs, collection, seed)
        steps = affordable_steps(step_seconds, time.perf_counter() - start, rest)
        print(f"A step takes {step_seconds:.2f} s on this machine now: {_chosen(steps)}")
    model, trained = _train(folder, untrained, pairs, steps, seed)
    _index(model, collection, folder)
    _table(collection, trained, bm25)
    _search(model, folder)
    print(f"Done in {time.perf_counter() - start:.0f} s.\n\n{_next_steps(folder)}")


def _read(folder: Path, max_docs: int, test_docs: int, seed: int) -> RetrievalSet:
    from dualenc.data import read_beir
    from dualenc.quickstart.collection import write_collection
    from dualenc.quickstart.docstrings import read_docstrings

    if folder.exists() and any(folder.iterdir()) and not (folder / "data" / "corpus.jsonl").exists():
        raise DualencError(f"{folder} holds something that is no quickstart; choose another folder with --out")
    docstrings = read_docstrings(max_docs)
    write_collection(folder / "data", docstrings, test_docs, seed)
    print(f"{len(docstrings):,} documented functions and classes, {test_docs:,} of them held out → {folder / 'data'}")
    return read_beir(folder / "data", "test")


def affordable_steps(step_seconds: float, elapsed: float, rest: float) -> int:
    """How many training steps let the quickstart end within four minutes, a multiple of 10; at least 20, at most 600.

    Args:
        step_seconds: of one step.
        elapsed: seconds since the start.
        rest: seconds of everything but the steps that is still to come.
    """
    affordable = ((SECONDS - elapsed) / MARGIN - rest) / step_seconds
    return min(max(int(affordable) // 10 * 10, FEWEST_STEPS), MOST_STEPS)


def measure(
    model: TextEncoder,
    pairs: BeirPairs,
    collection: RetrievalSet,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Seconds of a training step, and of everything but the steps that comes after; the model stays as it is.

    Args:
        model: what will be trained; a copy of it makes some steps.
        pairs: what it will be trained on.
        collection: embedded three times later: twice to evaluate, once for the index. Here a sample is.
        seed: of the steps.
        clock: tells seconds.
    """
    import numpy as np

    from dualenc.data import Corpus
    from dualenc.data.columns import Picked
    from dualenc.embed import embed

    ticks: list[float] = []
    objective = _objective(pairs)
    objective.register_forward_pre_hook(lambda *_: ticks.append(clock()))
    with tempfile.TemporaryDirectory(prefix="dualenc-") as folder:
        _trainer(Path(folder), 10, seed, progress=False).fit(copy.deepcopy(model), pairs, objective)
    step_seconds = statistics.median(after - before for before, after in pairwise(ticks))
    corpus = collection.corpus
    rows = np.linspace(0, len(corpus) - 1, min(len(corpus), 1000)).astype(int)
    sample = Corpus([corpus.ids[row] for row in rows], Picked(corpus.items, rows))
    began = clock()
    embed(model.right, sample, progress=False)
    return step_seconds, 3 * (clock() - began) * (len(corpus) + len(collection.queries)) / len(sample)


def _chosen(steps: int) -> str:
    if steps == MOST_STEPS:
        return f"{steps} steps end within four minutes in all"
    if steps == FEWEST_STEPS:
        return f"{steps} steps, the fewest, though all may take more than four minutes"
    return f"{steps} steps of {MOST_STEPS}, to end within four minutes in all (--steps {MOST_STEPS} makes all of them)"


def _start(folder: Path, vocab_size: int, seed: int) -> tuple[BeirPairs, TextEncoder]:
    import torch

    from dualenc.data import BeirPairs

    pairs = BeirPairs(folder / "data", "train")
    torch.manual_seed(seed)
    return pairs, _new_model(pairs.corpus.items, vocab_size)


def _trainer(output: Path, steps: int, seed: int, progress: bool = True) -> Trainer:
    from dualenc.training.trainer import Trainer

    return Trainer(
        output=output,
        batch_size=BATCH_SIZE,
        max_steps=steps,
        learning_rate=4e-3,
        save_every=None,
        seed=seed,
        overwrite=True,
        progress=progress,
    )


def _objective(pairs: BeirPairs) -> SogCLR:
    from dualenc.objectives import SogCLR

    return SogCLR(num_left=pairs.num_left, num_right=pairs.num_right, temperature=0.05, gamma=0.5)


def _train(
    folder: Path, model: TextEncoder, pairs: BeirPairs, steps: int, seed: int
) -> tuple[DualEncoder, TrainingResult]:
    from dualenc.encoders import load_model
    from dualenc.training.evaluators import RetrievalEvaluator

    evaluator = RetrievalEvaluator(folder / "data")
    result = _trainer(folder, steps, seed).fit(model, pairs, _objective(pairs), evaluator=evaluator)
    return load_model(str(result.model_folder)), result


def _new_model(texts: Any, vocab_size: int) -> TextEncoder:
    from dualenc.encoders import TextEncoder
    from dualenc.encoders.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(texts, vocab_size, max_length=MAX_TOKENS)
    config = {**CONFIG, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    model = TextEncoder(config=config, tokenizer=tokenizer, max_length=MAX_TOKENS)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"A one-layer transformer of {size:.1f} M parameters, from scratch")
    return model


def _index(model: DualEncoder, collection: RetrievalSet, folder: Path) -> None:
    from dualenc.embed import embed
    from dualenc.files import remove
    from dualenc.index import Index

    remove(folder / "embeddings")
    notes = {"model": str(folder / "model"), "side": "right"}
    documents = embed(model.right, collection.corpus, folder / "embeddings", notes=notes)
    index = Index.build(documents)
    index.save(folder / "index")
    print(f"Index of {len(index):,} documents ({index.meta['factory']}) → {folder / 'index'}")


def _bm25(collection: RetrievalSet) -> dict[str, float]:
    """Before the training, so that its time is known when the steps are chosen."""
    from dualenc.evaluation.bm25 import bm25_run
    from dualenc.evaluation.retrieval import Result

    queries, corpus = collection.queries, collection.corpus
    run = bm25_run(
        queries.ids,
        [queries.items[i] for i in range(len(queries))],
        corpus.ids,
        [corpus.items[i] for i in range(len(corpus))],
        100,
    )
    return dict(Result("BM25", "docstrings", run, collection.qrels, len(corpus)).means)


def _table(collection: RetrievalSet, trained: TrainingResult, bm25: dict[str, float]) -> None:
    from dualenc.evaluation.tables import Table, print_table

    queries, corpus = collection.queries, collection.corpus
    systems = {"untrained": trained.before, "BM25": bm25, "trained": trained.metrics}
    rows = [
        {"system": name, "nDCG@10": metrics["ndcg@10"], "recall@10": metrics["recall@10"]}
        for name, metrics in systems.items()
    ]
    print_table(Table(f"{len(queries):,} held-out functions, searched among {len(corpus):,} documents", rows))


def _search(model: DualEncoder, folder: Path) -> None:
    from dualenc.evaluation.tables import Table, print_table
    from dualenc.index import Index

    index = Index.open(folder / "index")
    queries = model.encode("left", model.left.prepare(list(SEARCHES))).detach().numpy()
    scores, rows = index.search_rows(queries, 3)
    for query, best, found in zip(SEARCHES, scores, rows, strict=True):
        hits = [
            {"score": float(score), "id": index.ids[row], "text": index.snippet(row).removeprefix(index.ids[row])[:80]}
            for score, row in zip(best, found, strict=True)
        ]
        print_table(Table(f"Search: {query}", hits))


def _next_steps(folder: Path) -> str:
    return "\n".join(
        (
            "What to type next:",
            f'  dualenc search {folder / "index"} "your own question"',
            f"  dualenc evaluate retrieval {folder / 'model'} {folder / 'data'} --split test --bm25",
            f"  dualenc embed {folder / 'model'} your_texts.jsonl --out your-embeddings",
            "  dualenc train your-recipe.yaml      (see recipes/ and the README for training on your own data)",
        )
    )
