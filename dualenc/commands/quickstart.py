"""`dualenc quickstart`: train, embed, index, search and evaluate on text that is on every machine."""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import itertools
import json
import math
import shlex
import statistics
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm import tqdm

from dualenc.commands.checks import MAX_SEED, check_range
from dualenc.errors import DualencError
from dualenc.files import atomic_folder, check_folder_target, is_folder_of, locked, remove, write_json

if TYPE_CHECKING:
    from dualenc.data import BeirPairs, RetrievalSet
    from dualenc.encoders import DualEncoder, TextEncoder
    from dualenc.objectives import GlobalCache
    from dualenc.training.trainer import Trainer

PACKAGES = ("numpy", "scipy", "sklearn", "pandas", "matplotlib", "networkx", "sympy", "PIL", "torch", "datasets")
"""Packages that are read after the standard library, if they are installed."""

MIN_LENGTH = 80
"""Characters that must follow the summary line."""
SKIPPED_FOLDERS = {"test", "tests", "testing", "idlelib", "lib2to3", "site-packages", "dist-packages", "_vendor"}


class Docstring(NamedTuple):
    """One documented object: its qualified name, the summary line, and the rest of its docstring."""

    name: str
    summary: str
    rest: str


def read_docstrings(limit: int, packages: Sequence[str] = PACKAGES) -> list[Docstring]:
    """Docstrings of the standard library and of packages with a summary line and something after it.

    Their order is the same in every run on the same machine.
    """
    found = itertools.islice(_docstrings(packages), limit)
    return list(tqdm(found, "reading docstrings", limit, unit="doc", leave=False))


def _docstrings(packages: Sequence[str]) -> Iterator[Docstring]:
    seen: set[str] = set()
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
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tree = ast.parse(file.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError, RecursionError, ValueError, OSError):
                continue
            module = prefix + ".".join(part for part in parts if part != "__init__")
            for name, node in _documented_nodes(tree, module.rstrip(".")):
                summary, _, rest = inspect.cleandoc(ast.get_docstring(node, clean=False) or "").partition("\n")
                rest = " ".join(rest.split())
                summary = summary.strip()
                # The same summary over many overloads is one question with many answers: keep the first.
                is_new = seen.isdisjoint((summary, name))
                if is_new and len(summary.split()) >= 3 and len(rest) >= MIN_LENGTH:
                    seen.update((summary, name))
                    yield Docstring(name, summary, rest)


def _documented_nodes(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}.{child.name}"
            yield name, child
            if isinstance(child, ast.ClassDef):
                yield from _documented_nodes(child, name)


def is_collection(folder: Path) -> bool:
    """Whether a folder holds a collection of `write_collection`; other folders have a corpus.jsonl, too."""
    return is_folder_of(folder, FORMAT)


def write_collection(folder: Path, docstrings: Sequence[Docstring], num_test: int, seed: int = 0) -> None:
    """Write corpus.jsonl, queries.jsonl, qrels/train.tsv and qrels/test.tsv in place of an older collection.

    Of the documents, which are all in the corpus, `num_test` random ones are held out from the training pairs.

    Raises:
        DualencError: fewer docstrings than twice `num_test`.
    """
    if len(docstrings) < 2 * num_test:
        found = f"only {len(docstrings)} docstrings were found on this machine, {2 * num_test} are needed"
        raise DualencError(f"{found}; install a documented package such as scipy, or ask for fewer test functions")
    order = np.random.default_rng(seed).permutation(len(docstrings))
    with atomic_folder(folder, is_collection, "quickstart") as part:
        (part / "qrels").mkdir(parents=True)
        write_json(part / "meta.json", {"format": FORMAT})
        documents = [{"_id": d.name, "title": d.name, "text": d.rest} for d in docstrings]
        queries = [{"_id": f"query-{d.name}", "text": d.summary} for d in docstrings]
        for file, records in (("corpus.jsonl", documents), ("queries.jsonl", queries)):
            lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
            (part / file).write_text(lines, encoding="utf-8")
        for split, rows in (("test", order[:num_test]), ("train", order[num_test:])):
            names = [docstrings[row].name for row in sorted(rows)]
            lines = "query-id\tcorpus-id\tscore\n" + "".join(f"query-{name}\t{name}\t1\n" for name in names)
            (part / "qrels" / f"{split}.tsv").write_text(lines, encoding="utf-8")


FORMAT = "dualenc quickstart"
SECONDS = 240
MAX_STEPS = 600
MIN_STEPS = 20
FEW_STEPS = 100
"""Below, the model hardly learns: the results say little."""
ENOUGH_STEPS = 300
MARGIN = 1.25
"""Allowance for slowdowns: the rest may take this many times what was measured."""
BATCH_SIZE = 128
MAX_TOKENS = 64
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": MAX_TOKENS,
    # A training of minutes does not overfit.
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SEARCHES = (
    "sort a list of numbers",
    "solve a system of linear equations",
    "read a file line by line",
)
NEXT = """\
What to type next:
  dualenc search {out}/index "your own question"
  dualenc evaluate retrieval {out}/model {out}/data --split test --bm25
  dualenc embed {out}/model your_texts.jsonl --out your-embeddings
  dualenc recipe text-pairs > mine.yaml && dualenc train mine.yaml data.path=your.csv"""


def quickstart(
    *,
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
        steps: training steps of 128 pairs; by default as many, up to 600, as let everything end within four minutes,
            by the measured time of a step. Nothing else depends on the machine's speed.
        vocab_size: tokens of the tokenizer that is trained on the corpus.
        seed: of everything random.
    """
    from dualenc.encoders.tokenizer import MIN_VOCABULARY

    check_range(1, math.inf, test_docs=test_docs, steps=steps)
    check_range(test_docs + BATCH_SIZE, math.inf, max_docs=max_docs)
    check_range(0, MAX_SEED, seed=seed)
    check_range(MIN_VOCABULARY, math.inf, vocab_size=vocab_size)
    start = time.perf_counter()
    folder = Path(out)
    data = folder / "data"
    check_folder_target(folder, lambda path: is_collection(path / "data"), "quickstart")

    import torch

    from dualenc.data import BeirPairs, read_beir
    from dualenc.encoders import load_model
    from dualenc.evaluation.report import Table, print_table
    from dualenc.search import Index
    from dualenc.search.embed import embed
    from dualenc.training.checkpoint import mark_run
    from dualenc.training.evaluators import RetrievalEvaluator

    with locked(folder, wait=False):
        docstrings = read_docstrings(max_docs)
        write_collection(data, docstrings, test_docs, seed)
        mark_run(folder)
        print(f"{len(docstrings):,} documented functions and classes, {test_docs:,} of them held out → {data}")
        pairs = BeirPairs(data, "train")
        collection = read_beir(data, "test")
        torch.manual_seed(seed)
        untrained = new_model(pairs.corpus.items, vocab_size)
        # Before the training, so that its time is known when the number of steps is chosen.
        bm25 = _bm25(collection)
        hint = ""
        if steps is None:
            step_seconds, rest = measure(untrained, pairs, collection, seed)
            steps = choose_steps(step_seconds, time.perf_counter() - start, rest)
            hint = few_steps_hint(steps, out)
            if hint:
                print(hint)

        print("The loss is log(Z/e⁺) over all documents: below 0 where a positive outweighs all negatives together")
        evaluator = RetrievalEvaluator(data)
        trained = _trainer(folder, steps, seed).fit(untrained, pairs, _objective(pairs), evaluator=evaluator)
        model = load_model(str(trained.model_folder))
        remove(folder / "embeddings")
        notes = {"model": str(folder / "model"), "side": "right"}
        documents = embed(model.right, collection.corpus, folder / "embeddings", notes=notes)
        index = Index.build(documents)
        index.save(folder / "index")
        print(f"Index of {len(index):,} documents ({index.meta['factory']}) → {folder / 'index'}")
        systems = {"untrained": trained.before, "BM25": bm25, "trained": trained.metrics}
        names = {"nDCG@10": "ndcg@10", "recall@10": "recall@10"}
        rows = [
            {"system": system} | {name: found[key] for name, key in names.items()} for system, found in systems.items()
        ]
        title = f"{len(collection.queries):,} held-out functions, searched among {len(collection.corpus):,} documents"
        print_table(Table(title, rows))
        _search(model, folder)
        # Again beside the results, which it explains.
        if hint:
            print(hint)
        print(f"Done in {time.perf_counter() - start:.0f} s.\n\n{NEXT.format(out=folder)}")


def new_model(texts: Any, vocab_size: int) -> TextEncoder:
    """An untrained one-layer transformer, and a tokenizer trained on the texts."""
    from dualenc.encoders import TextEncoder
    from dualenc.encoders.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(texts, vocab_size, max_length=MAX_TOKENS)
    config = {**CONFIG, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    model = TextEncoder(config=config, tokenizer=tokenizer, max_length=MAX_TOKENS)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"A one-layer transformer of {size:.1f} M parameters, from scratch")
    return model


def _bm25(collection: RetrievalSet) -> dict[str, float]:
    from dualenc.evaluation.retrieval import Result, bm25_run

    queries = collection.queries
    corpus = collection.corpus
    texts = [[side[row] for row in range(len(side))] for side in (queries, corpus)]
    run = bm25_run(queries.ids, texts[0], corpus.ids, texts[1], 100)
    return dict(Result("BM25", "docstrings", run, collection.qrels, len(corpus)).means)


def choose_steps(step_seconds: float, elapsed: float, rest: float) -> int:
    """The number of training steps that lets the quickstart end within four minutes: a multiple of 10, from 20 to 600.

    All times are in seconds: of a step, since the start, and what the rest takes without the steps.
    """
    affordable = ((SECONDS - elapsed) / MARGIN - rest) / step_seconds
    steps = min(max(int(affordable) // 10 * 10, MIN_STEPS), MAX_STEPS)
    summary = f"{steps} steps of {MAX_STEPS}, to end within four minutes in all (--steps {MAX_STEPS} makes all of them)"
    if steps == MAX_STEPS:
        summary = f"{steps} steps end within four minutes in all"
    elif steps == MIN_STEPS:
        summary = f"{steps} steps, the fewest, though all may take more than four minutes"
    print(f"A step takes {step_seconds:.2f} s on this machine now: {summary}")
    return steps


def few_steps_hint(steps: int, out: str) -> str:
    """A line for a training that the machine's speed cut short, with the command for more steps; else ""."""
    if steps >= FEW_STEPS:
        return ""
    words = ["dualenc", "quickstart", "--steps", str(ENOUGH_STEPS), "--out", out]
    return f"{steps} steps are too few to learn much. For more, however long it takes: {shlex.join(words)}"


def measure(
    model: TextEncoder,
    pairs: BeirPairs,
    collection: RetrievalSet,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Time a training step, and everything after the training, in seconds; the model does not change.

    A copy of the model makes ten steps. The collection will be embedded three times, twice to evaluate and once for the
    index; here a sample of it is.
    """
    from dualenc.data import Corpus
    from dualenc.data.columns import Picked
    from dualenc.search.embed import embed

    ticks: list[float] = []
    objective = _objective(pairs)
    objective.register_forward_pre_hook(lambda *_: ticks.append(clock()))
    with tempfile.TemporaryDirectory(prefix="dualenc-") as folder:
        _trainer(Path(folder), 10, seed, progress=False).fit(copy.deepcopy(model), pairs, objective)
    step_seconds = statistics.median(after - before for before, after in itertools.pairwise(ticks))
    corpus = collection.corpus
    rows = np.linspace(0, len(corpus) - 1, min(len(corpus), 1000)).astype(int)
    sample = Corpus([corpus.ids[row] for row in rows], Picked(corpus.items, rows))
    began = clock()
    embed(model.right, sample, progress=False)
    return step_seconds, 3 * (clock() - began) * (len(corpus) + len(collection.queries)) / len(sample)


def _trainer(output: Path, steps: int, seed: int, progress: bool = True) -> Trainer:
    from dualenc.training.trainer import Trainer

    return Trainer(
        output=output,
        max_steps=steps,
        seed=seed,
        progress=progress,
        batch_size=BATCH_SIZE,
        learning_rate=4e-3,
        save_every=None,
        overwrite=True,
    )


def _objective(pairs: BeirPairs) -> GlobalCache:
    from dualenc.objectives import GlobalCache

    # At equal CPU time two thirds of SogCLR's steps, and nDCG@10 0.385 in place of 0.373 (3,000 documents, two seeds).
    return GlobalCache(num_left=pairs.num_left, num_right=pairs.num_right, temperature=0.05)


def _search(model: DualEncoder, folder: Path) -> None:
    from dualenc.evaluation.report import Table, print_table
    from dualenc.search import Index

    index = Index.open(folder / "index")
    queries = model.encode_query(list(SEARCHES))
    for query, found in zip(SEARCHES, index.search(queries, 3), strict=True):
        hits = [{"score": hit.score, "id": hit.id, "text": hit.snippet.removeprefix(hit.id)[:80]} for hit in found]
        print_table(Table(f"Search: {query}", hits))
