"""`dualenc quickstart`: train, embed, index, search and evaluate on text that is on every
machine."""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import itertools
import json
import shlex
import statistics
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from cyclopts.types import PositiveInt, UInt32
from tqdm import tqdm

from dualenc.commands.embed import embed
from dualenc.commands.index import index
from dualenc.commands.options import (
    BuildOptions,
    EmbedOptions,
    RankingOptions,
    SearchOptions,
    SourceOptions,
)
from dualenc.commands.search import search
from dualenc.errors import DualencError
from dualenc.io.files import (
    atomic_folder,
    check_folder_target,
    is_folder_of,
    locked,
    remove,
    write_json,
)
from dualenc.io.targets import check_outside

if TYPE_CHECKING:
    from dualenc.data import BeirPairs
    from dualenc.encoders import TextEncoder
    from dualenc.objectives import GlobalCache
    from dualenc.training.trainer import Trainer

# Read after the standard library, if they are installed.
PACKAGES = (
    *("numpy", "scipy", "sklearn", "pandas", "matplotlib"),
    *("networkx", "sympy", "PIL", "torch", "datasets"),
)
SKIPPED_FOLDERS = {
    *(
        "test",
        "tests",
        "testing",
        "idlelib",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "_vendor",
    ),
}
MIN_LENGTH = 80  # characters that must follow the summary line
FORMAT = "dualenc quickstart"
MAX_STEPS = 600
MIN_STEPS = 20
FEW_STEPS = 100  # with fewer the model hardly learns
TRAINING_SECONDS = 130  # with everything else about four minutes
BATCH_SIZE = 128
MAX_TOKENS = 64
VOCABULARY = 8000
CONFIG = {
    **{"model_type": "bert", "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4},
    **{"intermediate_size": 512, "max_position_embeddings": MAX_TOKENS},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
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
  dualenc adapt {out}/index your_clicks.csv --out adapted
  dualenc embed {out}/model your_texts.jsonl --out your-embeddings
  dualenc recipe text-pairs > mine.yaml && dualenc train mine.yaml data.path=your.csv"""


def quickstart(
    *,
    out: str = "quickstart-run",
    max_docs: int = 16000,
    test_docs: PositiveInt = 1000,
    steps: PositiveInt | None = None,
    seed: UInt32 = 0,
) -> None:
    """Train a small text encoder from scratch on the documentation already on this machine; needs
    no network.

    A query is the summary line of a docstring, its document the qualified name and the rest.
    Sources are parsed only.

    Args:
        out: folder for the data, the model, the embeddings and the index; replaced by the next
            quickstart.
        max_docs: documents in the corpus at most.
        test_docs: functions that are held out from training and measured on.
        steps: training steps of 128 pairs; by default up to 600, as many as take about two minutes.
        seed: of everything random.
    """
    if max_docs < test_docs + BATCH_SIZE:
        raise DualencError(
            f"--max-docs is {max_docs}; it must be at least {test_docs + BATCH_SIZE:,}"
        )
    start = time.perf_counter()
    folder = Path(out)
    check_outside(folder)
    check_folder_target(folder, lambda path: is_folder_of(path / "data", FORMAT), "quickstart")

    import torch

    from dualenc.data import BeirPairs, read_beir
    from dualenc.evaluation.report_page import Table, print_table
    from dualenc.evaluation.retrieval import Result, bm25_run
    from dualenc.training.checkpoint import mark_run
    from dualenc.training.evaluators import RetrievalEvaluator

    with locked(folder, wait=False):
        docstrings = read_docstrings(max_docs)
        write_collection(folder / "data", docstrings, test_docs, seed)
        mark_run(folder)
        count = (
            f"{len(docstrings):,} documented functions and classes, {test_docs:,} of them held out"
        )
        print(f"{count} → {folder}/data")
        pairs = BeirPairs(folder / "data", "train")
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
        steps = steps or affordable_steps(untrained, pairs, seed)
        print(
            "The loss is log(Z/e⁺) over all documents: below 0 where a positive outweighs all negatives"
        )
        evaluator = RetrievalEvaluator(folder / "data")
        trainer = _trainer(folder, steps, seed)
        trained = trainer.fit(untrained, pairs, _objective(pairs), evaluator=evaluator)
        model = str(trained.model_folder)
        remove(folder / "embeddings")
        embeddings = str(folder / "embeddings")
        embed(
            model,
            str(folder / "data"),
            out=embeddings,
            source=SourceOptions(),
            options=EmbedOptions(),
        )
        index(embeddings, out=str(folder / "index"), build=BuildOptions(), items=SourceOptions())
        systems = {"untrained": trained.before, "BM25": bm25.means, "trained": trained.metrics}
        rows = []
        for name, metrics in systems.items():
            rows.append(
                {"system": name, "nDCG@10": metrics["ndcg@10"], "recall@10": metrics["recall@10"]}
            )
        title = f"{test_docs:,} held-out functions, searched among {len(docstrings):,} documents"
        print_table(Table(title, rows))
    for query in SEARCHES:
        search(str(folder / "index"), query, k=3, ranking=RankingOptions(), options=SearchOptions())
    if steps < FEW_STEPS:
        print(f"{steps} steps are too few to learn much; for more: dualenc quickstart --steps 300")
    print(
        f"Done in {time.perf_counter() - start:.0f} s.\n\n{NEXT.format(out=shlex.quote(str(folder)))}"
    )


class Docstring(NamedTuple):
    """One documented object: its qualified name, the summary line, and the rest of its
    docstring."""

    name: str
    summary: str
    rest: str


def read_docstrings(limit: int, packages: Sequence[str] = PACKAGES) -> list[Docstring]:
    """Docstrings of the standard library and of packages with a summary line and more, in the same
    order each time."""
    docstrings = itertools.islice(_docstrings(packages), limit)
    return list(tqdm(docstrings, "reading docstrings", limit, unit="doc", leave=False))


def _docstrings(packages: Sequence[str]) -> Iterator[Docstring]:
    seen: set[str] = set()
    for module, tree in _modules(packages):
        for name, node in _documented_nodes(tree, module):
            summary, _, rest = inspect.cleandoc(
                ast.get_docstring(node, clean=False) or ""
            ).partition("\n")
            rest = " ".join(rest.split())
            summary = summary.strip()
            # The same summary over many overloads is one question with many answers: keep the
            # first.
            is_new = seen.isdisjoint((summary, name))
            if is_new and len(summary.split()) >= 3 and len(rest) >= MIN_LENGTH:
                seen.update((summary, name))
                yield Docstring(name, summary, rest)


def _modules(packages: Sequence[str]) -> Iterator[tuple[str, ast.Module]]:
    """The names and the parsed sources of the modules of the standard library and of packages,
    without tests."""
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
            except (SyntaxError, RecursionError, ValueError, OSError):
                continue
            module = prefix + ".".join(part for part in parts if part != "__init__")
            yield module.rstrip("."), tree


def _documented_nodes(
    node: ast.AST, prefix: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{prefix}.{child.name}"
            yield name, child
            if isinstance(child, ast.ClassDef):
                yield from _documented_nodes(child, name)


def write_collection(
    folder: Path, docstrings: Sequence[Docstring], num_test: int, seed: int = 0
) -> None:
    """Write corpus.jsonl, queries.jsonl, qrels/train.tsv and qrels/test.tsv in place of an older
    collection.

    Of the documents, which are all in the corpus, `num_test` random ones are held out from the
    training pairs.
    """
    if len(docstrings) < 2 * num_test:
        raise DualencError(
            f"found only {len(docstrings)} docstrings; give at most half as --test-docs"
        )
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
    """An untrained one-layer transformer, and a tokenizer trained on the texts."""
    from dualenc.encoders import TextEncoder
    from dualenc.encoders.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(texts, VOCABULARY, max_length=MAX_TOKENS)
    config = {**CONFIG, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    return TextEncoder(config=config, tokenizer=tokenizer, max_length=MAX_TOKENS)


def affordable_steps(model: TextEncoder, pairs: BeirPairs, seed: int) -> int:
    """As many training steps as take about two minutes, by the time of ten steps of a copy of the
    model."""
    ticks: list[float] = []
    objective = _objective(pairs)
    objective.register_forward_pre_hook(lambda *_: ticks.append(time.perf_counter()))
    with tempfile.TemporaryDirectory(prefix="dualenc-") as folder:
        _trainer(Path(folder), 10, seed, progress=False).fit(copy.deepcopy(model), pairs, objective)
    seconds = statistics.median(after - before for before, after in itertools.pairwise(ticks))
    steps = min(max(int(TRAINING_SECONDS / seconds), MIN_STEPS), MAX_STEPS)
    print(f"A step takes {seconds:.2f} s on this machine now: {steps} steps of at most {MAX_STEPS}")
    return steps


def _trainer(output: Path, steps: int, seed: int, progress: bool = True) -> Trainer:
    from dualenc.training.trainer import Trainer

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
    from dualenc.objectives import GlobalCache

    return GlobalCache(num_left=pairs.num_left, num_right=pairs.num_right, temperature=0.05)
