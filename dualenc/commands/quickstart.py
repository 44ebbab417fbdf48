"""`dualenc quickstart`: train, embed, index, search and evaluate on text that is on every machine."""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import json
import math
import statistics
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from dualenc.errors import DualencError
from dualenc.files import atomic_path

if TYPE_CHECKING:
    from dualenc.data import BeirPairs, RetrievalSet
    from dualenc.encoders import DualEncoder, TextEncoder
    from dualenc.objectives import SogCLR
    from dualenc.training.trainer import Trainer, TrainingResult

PACKAGES = ("numpy", "scipy", "sklearn", "pandas", "matplotlib", "networkx", "sympy", "PIL", "torch", "datasets")
"""Installed packages that are read after the standard library, if they are there."""

SKIPPED_FOLDERS = {"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "dist-packages", "_vendor"}
Documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Docstring(NamedTuple):
    """One documented object: its qualified name, the summary line, and the rest of its docstring."""

    name: str
    summary: str
    rest: str


def read_docstrings(
    limit: int, packages: Sequence[str] = PACKAGES, minimum_length: int = 80, progress: bool = True
) -> list[Docstring]:
    """Docstrings of the standard library and of installed packages with a summary line and something after it.

    Args:
        limit: how many at most; the order is the same in every run on the same machine.
        packages: top-level packages to read after the standard library.
        minimum_length: characters that must follow the summary line.
        progress: show a progress bar.
    """
    found: list[Docstring] = []
    seen: set[str] = set()
    bar = tqdm(total=limit, desc="reading docstrings", unit="doc", disable=not progress, leave=False)
    for root in _roots(packages):
        for docstring in _docstrings_below(root, minimum_length):
            # The same summary over many overloads is one question with many answers: keep the first.
            if not seen.isdisjoint((docstring.summary, docstring.name)):
                continue
            seen.update((docstring.summary, docstring.name))
            found.append(docstring)
            bar.update()
            if len(found) == limit:
                bar.close()
                return found
    bar.close()
    return found


def _roots(packages: Sequence[str]) -> Iterator[Path]:
    yield Path(sysconfig.get_paths()["stdlib"])
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            yield Path(next(iter(spec.submodule_search_locations)))


def _docstrings_below(root: Path, minimum_length: int) -> Iterator[Docstring]:
    prefix = "" if root == Path(sysconfig.get_paths()["stdlib"]) else f"{root.name}."
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts) or parts[-1].startswith("test_"):
            continue
        module = prefix + ".".join(part for part in parts if part != "__init__")
        yield from _docstrings_in(file, module.rstrip("."), minimum_length)


def _docstrings_in(file: Path, module: str, minimum_length: int) -> Iterator[Docstring]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, RecursionError, ValueError, OSError):
        return  # a file that Python itself would not read has no documentation to offer
    for name, node in _documented_nodes(tree, module):
        docstring = ast.get_docstring(node, clean=False)
        if docstring:
            summary, _, rest = inspect.cleandoc(docstring).partition("\n")
            rest = " ".join(rest.split())
            if len(summary.split()) >= 3 and len(rest) >= minimum_length:
                yield Docstring(name, summary.strip(), rest)


def _documented_nodes(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Documented):
            name = f"{prefix}.{child.name}"
            yield name, child
            if isinstance(child, ast.ClassDef):
                yield from _documented_nodes(child, name)


def write_collection(folder: Path, docstrings: Sequence[Docstring], num_test: int, seed: int = 0) -> None:
    """Write corpus.jsonl, queries.jsonl, qrels/train.tsv and qrels/test.tsv.

    Args:
        folder: where to; replaced if it is there.
        docstrings: M documented functions and classes; all their documents form the corpus.
        num_test: how many, drawn at random, are held out: no training pair holds their query or their document.
        seed: of the draw.

    Raises:
        DualencError: fewer docstrings than it takes to train on some and test on others.
    """
    if len(docstrings) < 2 * num_test:
        raise DualencError(
            f"only {len(docstrings)} docstrings were found on this machine, {2 * num_test} are needed; "
            "install a documented package such as scipy, or ask for fewer test functions"
        )
    order = np.random.default_rng(seed).permutation(len(docstrings))
    with atomic_path(folder) as beside:
        (beside / "qrels").mkdir(parents=True)
        documents = ({"_id": d.name, "title": d.name, "text": d.rest} for d in docstrings)
        _write_lines(beside / "corpus.jsonl", documents)
        _write_lines(beside / "queries.jsonl", ({"_id": f"query-{d.name}", "text": d.summary} for d in docstrings))
        for split, rows in (("test", order[:num_test]), ("train", order[num_test:])):
            _write_qrels(beside / "qrels" / f"{split}.tsv", [docstrings[row].name for row in sorted(rows)])


def _write_lines(path: Path, records: Iterable[dict[str, str]]) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        for record in records:
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")


def _write_qrels(path: Path, names: Iterable[str]) -> None:
    lines = "".join(f"query-{name}\t{name}\t1\n" for name in names)
    path.write_text("query-id\tcorpus-id\tscore\n" + lines, encoding="utf-8")


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
    from dualenc.search.embed import embed

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
    from dualenc.files import remove
    from dualenc.search import Index
    from dualenc.search.embed import embed

    remove(folder / "embeddings")
    notes = {"model": str(folder / "model"), "side": "right"}
    documents = embed(model.right, collection.corpus, folder / "embeddings", notes=notes)
    index = Index.build(documents)
    index.save(folder / "index")
    print(f"Index of {len(index):,} documents ({index.meta['factory']}) → {folder / 'index'}")


def _bm25(collection: RetrievalSet) -> dict[str, float]:
    """Before the training, so that its time is known when the steps are chosen."""
    from dualenc.evaluation.retrieval import Result, bm25_run

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
    from dualenc.evaluation.report import Table, print_table

    queries, corpus = collection.queries, collection.corpus
    systems = {"untrained": trained.before, "BM25": bm25, "trained": trained.metrics}
    rows = [
        {"system": name, "nDCG@10": metrics["ndcg@10"], "recall@10": metrics["recall@10"]}
        for name, metrics in systems.items()
    ]
    print_table(Table(f"{len(queries):,} held-out functions, searched among {len(corpus):,} documents", rows))


def _search(model: DualEncoder, folder: Path) -> None:
    from dualenc.evaluation.report import Table, print_table
    from dualenc.search import Index

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
