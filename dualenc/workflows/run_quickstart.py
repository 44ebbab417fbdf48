"""Train, embed, index and evaluate on docstrings: text that every machine has, without network."""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import itertools
import json
import logging
import statistics
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from dualenc.data import BeirPairs, read_beir
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import TextEncoder
from dualenc.encoders.tokenizer import train_tokenizer
from dualenc.errors import DualencError
from dualenc.evaluation.retrieval import Result, bm25_run
from dualenc.io.files import (
    atomic_folder,
    check_folder_target,
    is_folder_of,
    locked,
    remove,
    write_json,
)
from dualenc.io.targets import check_outside
from dualenc.objectives import GlobalCache
from dualenc.training.checkpoint import mark_run
from dualenc.training.evaluators import RetrievalEvaluator
from dualenc.training.trainer import Trainer
from dualenc.types import StrPath
from dualenc.workflows.build_index import IndexResult, index
from dualenc.workflows.embed_corpus import embed

logger = logging.getLogger("dualenc.workflows")

# Read after the standard library, if they are installed.
PACKAGES = (
    "numpy",
    "scipy",
    "sklearn",
    "pandas",
    "matplotlib",
    "networkx",
    "sympy",
    "PIL",
    "torch",
    "datasets",
)
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "testing",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "_vendor",
}
MIN_LENGTH = 80  # characters that must follow the summary line
FORMAT = "dualenc quickstart"
MAX_STEPS = 600
MIN_STEPS = 20
TRAINING_SECONDS = 130  # with everything else about four minutes
BATCH_SIZE = 128
MAX_TOKENS = 64
VOCABULARY = 8000
CONFIG = {
    "model_type": "bert",
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": MAX_TOKENS,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


@dataclass(frozen=True)
class QuickstartResult:
    """Metrics of the quickstart, and its folder.

        result = quickstart(out="quickstart-run")
        result.metrics["trained"]["ndcg@10"] - result.metrics["BM25"]["ndcg@10"]

    Attributes:
        folder: folder with data, model, embeddings and index.
        num_documents: number of documents in the corpus.
        num_test: number of functions that were held out from training.
        steps: number of training steps.
        embeddings: embeddings of the documents.
        index: kind, recall and speed of the index.
        metrics: retrieval metrics on the held-out functions by system: "untrained", "BM25" and
            "trained".
    """

    folder: Path
    num_documents: int
    num_test: int
    steps: int
    embeddings: Embeddings
    index: IndexResult
    metrics: Mapping[str, Mapping[str, float]]


def quickstart(
    *,
    out: StrPath = "quickstart-run",
    max_docs: int = 16000,
    test_docs: int = 1000,
    steps: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> QuickstartResult:
    """Train a small text encoder from scratch on the documentation that is on this machine.

    A query is the summary line of a docstring, its document the qualified name and the rest.
    Sources are parsed only. Needs no network. Same as `dualenc quickstart`, which also searches.

        result = dualenc.quickstart(steps=300)
        result.metrics["trained"]["ndcg@10"]

    Args:
        out: folder for the data, the model, the embeddings and the index; replaced by the next
            quickstart.
        max_docs: maximum number of documents in the corpus.
        test_docs: number of functions that are held out from training, to measure on.
        steps: training steps of 128 pairs; by default up to 600, as many as take about two minutes.
        seed: random seed of the model, the split and the batches.
        progress: show progress bars.

    Returns:
        The metrics of the trained model, the untrained one and BM25, and the folder.

    Raises:
        DualencError: if there are too few documents, or the folder holds something else.
    """
    if max_docs < test_docs + BATCH_SIZE:
        raise DualencError(
            f"--max-docs is {max_docs}; it must be at least {test_docs + BATCH_SIZE:,}"
        )
    folder = Path(out)
    check_outside(folder)
    check_folder_target(folder, lambda path: is_folder_of(path / "data", FORMAT), "quickstart")
    with locked(folder, wait=False):
        docstrings = read_docstrings(max_docs, progress=progress)
        write_collection(folder / "data", docstrings, test_docs, seed)
        # Other commands must not write into the folder of a run.
        mark_run(folder)
        logger.info(
            "%s documented functions and classes, %s of them held out → %s/data",
            f"{len(docstrings):,}",
            f"{test_docs:,}",
            folder,
        )
        pairs = BeirPairs(folder / "data", "train")
        # The initial weights, which the table compares with the trained ones.
        torch.manual_seed(seed)
        untrained = new_model(pairs.corpus.items)
        collection = read_beir(folder / "data", "test")
        bm25 = Result(
            "BM25",
            "docstrings",
            bm25_run(collection, 100),
            collection.qrels,
            len(collection.corpus),
        )
        # Timed on this machine, so that the quickstart takes minutes everywhere.
        steps = steps or affordable_steps(untrained, pairs, seed)
        logger.info(
            "batch_estimate is the loss log(Z/e⁺) over all documents, estimated from a batch: "
            "below 0 where a positive outweighs all negatives"
        )
        evaluator = RetrievalEvaluator(folder / "data")
        trainer = _trainer(folder, steps, seed, progress)
        trained = trainer.fit(untrained, pairs, _objective(pairs), evaluator=evaluator)
        # An earlier quickstart's embeddings are of another model.
        remove(folder / "embeddings")
        embeddings = embed(
            str(trained.model_folder),
            str(folder / "data"),
            out=folder / "embeddings",
            progress=progress,
        )
        indexed = index(str(folder / "embeddings"), out=folder / "index", progress=progress)
    metrics = {"untrained": trained.before, "BM25": bm25.means, "trained": trained.metrics}
    return QuickstartResult(folder, len(docstrings), test_docs, steps, embeddings, indexed, metrics)


class Docstring(NamedTuple):
    """One documented object: its qualified name, the summary line and the rest of its docstring."""

    name: str
    summary: str
    rest: str


def read_docstrings(
    limit: int, packages: Sequence[str] = PACKAGES, *, progress: bool = True
) -> list[Docstring]:
    """Read docstrings that have more than a summary line, in the same order each time.

    Args:
        limit: maximum number of docstrings.
        packages: packages to read after the standard library, if they are installed.
        progress: show a progress bar.
    """
    docstrings = itertools.islice(_docstrings(packages), limit)
    bar = tqdm(
        docstrings,
        "reading docstrings",
        limit,
        unit="doc",
        leave=False,
        disable=not progress,
    )
    return list(bar)


def _docstrings(packages: Sequence[str]) -> Iterator[Docstring]:
    """Yield the usable docstrings of all modules."""
    seen: set[str] = set()
    for module, tree in _modules(packages):
        for name, node in _documented_nodes(tree, module):
            text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
            summary, _, rest = text.partition("\n")
            rest = " ".join(rest.split())
            summary = summary.strip()
            # Overloads that share a summary would be one question with many answers: keep the
            # first.
            is_new = seen.isdisjoint((summary, name))
            if is_new and len(summary.split()) >= 3 and len(rest) >= MIN_LENGTH:
                seen.update((summary, name))
                yield Docstring(name, summary, rest)


def _modules(packages: Sequence[str]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the names and parsed sources of all modules that are not tests."""
    roots = [("", Path(sysconfig.get_paths()["stdlib"]))]
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            roots.append((f"{package}.", Path(next(iter(spec.submodule_search_locations)))))
    for prefix, root in roots:
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            if SKIPPED_FOLDERS.intersection(parts) or parts[-1].startswith("test_"):
                continue
            try:
                # Parsed and never imported: other people's code does not run.
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tree = ast.parse(file.read_text(encoding="utf-8"))
            except (SyntaxError, RecursionError, ValueError, OSError):
                continue
            module = prefix + ".".join(part for part in parts if part != "__init__")
            yield module.rstrip("."), tree


def _documented_nodes(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Yield the functions and classes below a node with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}.{child.name}"
            yield name, child
            if isinstance(child, ast.ClassDef):
                yield from _documented_nodes(child, name)


def write_collection(
    folder: Path, docstrings: Sequence[Docstring], num_test: int, seed: int = 0
) -> None:
    """Write docstrings as a BEIR folder, in place of an older collection.

    The corpus has all documents; `num_test` random ones are held out from the training pairs.

    Args:
        folder: folder to write: corpus.jsonl, queries.jsonl, qrels/train.tsv and qrels/test.tsv.
        docstrings: the documents with their queries.
        num_test: number of held-out queries.
        seed: random seed of the split.

    Raises:
        DualencError: if less than half of the documents would be left to train on.
    """
    if len(docstrings) < 2 * num_test:
        raise DualencError(
            f"found only {len(docstrings)} docstrings", fix="give at most half as --test-docs"
        )
    # All documents are in the corpus; the split is one of queries.
    order = np.random.default_rng(seed).permutation(len(docstrings))
    documents = [{"_id": each.name, "title": each.name, "text": each.rest} for each in docstrings]
    queries = [{"_id": f"query-{each.name}", "text": each.summary} for each in docstrings]
    contents = {}
    for file, records in (("corpus.jsonl", documents), ("queries.jsonl", queries)):
        contents[file] = [json.dumps(record, ensure_ascii=False) for record in records]
    for split, rows in (("test", order[:num_test]), ("train", order[num_test:])):
        names = [docstrings[row].name for row in sorted(rows)]
        judgements = [f"query-{name}\t{name}\t1" for name in names]
        contents[f"qrels/{split}.tsv"] = ["query-id\tcorpus-id\tscore", *judgements]
    with atomic_folder(folder, lambda path: is_folder_of(path, FORMAT), "quickstart") as part:
        (part / "qrels").mkdir(parents=True)
        write_json(part / "meta.json", {"format": FORMAT})
        for file, lines in contents.items():
            (part / file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def new_model(texts: Any) -> TextEncoder:
    """Return an untrained one-layer transformer with a tokenizer trained on the texts."""
    tokenizer = train_tokenizer(texts, VOCABULARY, max_length=MAX_TOKENS)
    config = {**CONFIG, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    return TextEncoder(config=config, tokenizer=tokenizer, max_length=MAX_TOKENS)


def affordable_steps(model: TextEncoder, pairs: BeirPairs, seed: int) -> int:
    """Return the number of training steps that take about two minutes.

    Measured with ten steps of a copy of the model.
    """
    ticks: list[float] = []
    objective = _objective(pairs)
    # A step begins when the objective is called.
    objective.register_forward_pre_hook(lambda *_: ticks.append(time.perf_counter()))
    with tempfile.TemporaryDirectory(prefix="dualenc-") as folder:
        _trainer(Path(folder), 10, seed, progress=False).fit(copy.deepcopy(model), pairs, objective)
    seconds = statistics.median(after - before for before, after in itertools.pairwise(ticks))
    steps = min(max(int(TRAINING_SECONDS / seconds), MIN_STEPS), MAX_STEPS)
    logger.info(
        "A step takes %.2f s on this machine now: %d steps of at most %d",
        seconds,
        steps,
        MAX_STEPS,
    )
    return steps


def _trainer(output: Path, steps: int, seed: int, progress: bool = True) -> Trainer:
    """Return a trainer of small batches without checkpoints."""
    return Trainer(
        output=output,
        max_steps=steps,
        batch_size=BATCH_SIZE,
        learning_rate=4e-3,
        seed=seed,
        save_every=None,
        overwrite=True,
        progress=progress,
    )


def _objective(pairs: BeirPairs) -> GlobalCache:
    """Return the objective over all documents."""
    return GlobalCache(num_left=pairs.num_left, num_right=pairs.num_right, temperature=0.05)
