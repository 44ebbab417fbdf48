"""Make tasks and models from what is at hand, for `small_batch.py` and `migrating.py`.

    python eval/make_data.py functions FOLDER
    python eval/make_data.py short FOLDER OUT --documents 5000
    python eval/make_data.py project MODEL OUT --dim 256

`functions` and `short` write BEIR folders, `project` a model to begin from.
"""

from __future__ import annotations

import ast
import json
import random
import re
import shutil
import string
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import toys
from frame import command_line
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from tqdm.auto import tqdm

from dualenc.data import BeirPairs, open_corpus
from dualenc.encoders import load_model

PARTS = ("train", "dev", "test")
MOST_FUNCTIONS = 105_000
FEWEST_WORDS, MOST_WORDS = 12, 128  # of a function's body
NAME_IN = {ast.Name: "id", ast.Attribute: "attr", ast.keyword: "arg"}


def functions(folder: Path, held_out: int = 1000, roots: Sequence[Path] = ()) -> None:
    """Let the signature of a function find the words of its body.

    Functions are those of the standard library and of what is installed: two hundred thousand with
    this package's requirements. Queries are the words of module, name and parameters; documents the
    names in distinct bodies without the function's own. `held_out` queries are for tuning, and as
    many for testing.
    """
    roots = roots or [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = sorted({file.resolve() for root in roots for file in root.rglob("*.py")})
    bodies: dict[str, str] = {}
    for file in tqdm(files, "reading functions", unit="file"):
        for signature, body in signatures_and_bodies(file):
            bodies.setdefault(body, signature)
    draw = np.random.default_rng(0)
    pairs = list(bodies.items())
    chosen = [pairs[row] for row in np.sort(draw.permutation(len(pairs))[:MOST_FUNCTIONS])]
    ids = {text: f"q{row}" for row, text in enumerate(dict.fromkeys(text for _, text in chosen))}
    part_of = np.full(len(ids), "train", dtype="U5")
    part_of[draw.permutation(len(ids))[: 2 * held_out]] = ["dev", "test"] * held_out
    parts = dict(zip(ids, part_of.tolist(), strict=True))
    judged: dict[str, list[str]] = {part: [] for part in PARTS}
    for row, (_, signature) in enumerate(chosen):
        judged[parts[signature]].append(f"{ids[signature]}\td{row}")
    corpus = {f"d{row}": body for row, (body, _) in enumerate(chosen)}
    toys.write_beir(folder, {own: text for text, own in ids.items()}, corpus, judged)


def signatures_and_bodies(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the words of every function of a file, nested ones included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, RecursionError, ValueError, OSError):
            return
    for node in ast.walk(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if not is_function or node.name.startswith("__"):
            continue
        own = words(node.name)
        parameters = [each.arg for each in node.args.args if each.arg != "self"]
        inside = [part for statement in node.body for part in ast.walk(statement)]
        used = words(*(getattr(part, NAME_IN.get(type(part), ""), None) or "" for part in inside))
        body = [word for word in used if len(word) > 1 and word != "self" and word not in own]
        if len(body) >= FEWEST_WORDS and own:
            signature = words(file.parent.name, file.stem) + own + words(*parameters)
            yield " ".join(signature), " ".join(body[:MOST_WORDS])


def words(*names: str) -> list[str]:
    """Return the words of identifiers in lower case: readHTTPHeader_2 is read, http, header."""
    found = [word for name in names for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    return [word.lower() for word in found]


def short(folder: Path, out: Path, words: int = 64, documents: int | None = None) -> None:
    """Copy a BEIR folder with the first words of each document, and with so many documents.

    Documents of test pairs stay, and others are drawn from those of the training pairs.
    """
    files = (folder / "qrels").glob("*.tsv")
    judged = {file.name: file.read_text("utf-8").splitlines() for file in files}
    corpus = [json.loads(line) for line in (folder / "corpus.jsonl").open(encoding="utf-8")]
    ids = {row["_id"] for row in corpus}
    if documents is not None:
        test, train = (
            {line.split("\t")[1] for line in judged.get(f"{part}.tsv", [])[1:]}
            for part in ("test", "train")
        )
        others = sorted(train - test)
        random.Random(0).shuffle(others)
        ids = test | set(others[: max(documents - len(test), 0)])
    (out / "qrels").mkdir(parents=True, exist_ok=True)
    for name, (header, *lines) in judged.items():
        kept = [line for line in lines if line.split("\t")[1] in ids]
        (out / "qrels" / name).write_text("\n".join([header, *kept, ""]), encoding="utf-8")
    shutil.copy(folder / "queries.jsonl", out)
    kept = [row for row in corpus if row["_id"] in ids]
    texts = [{**row, "text": " ".join(row["text"].split()[:words])} for row in kept]
    lines = "".join(json.dumps(row) + "\n" for row in texts)
    (out / "corpus.jsonl").write_text(lines, encoding="utf-8")


def project(model: str, out: Path, dim: int = 256, seed: int = 0) -> None:
    """Write a model whose vectors are those of another times a random matrix, to be fine-tuned."""
    torch.manual_seed(seed)
    original = SentenceTransformer(model, device="cpu")
    transformer, pooling = list(original)[:2]
    width = transformer.auto_model.config.hidden_size
    modules = [transformer, pooling, Dense(width, dim, activation_function=torch.nn.Identity())]
    modules.append(Normalize())
    SentenceTransformer(modules=modules, prompts=original.prompts, device="cpu").save(str(out))


def check(folder: Path) -> None:
    """Read functions, and make vectors of another size."""
    names = [2 * letter for letter in string.ascii_lowercase[:FEWEST_WORDS]]
    code = f"def read_HTTPFile_{{0}}(path): {', '.join(names)}, {{0}}s\n"
    lines = [code.format(verb) for verb in ("get", "set", "cut")]
    (folder / "code").mkdir()
    (folder / "code" / "io.py").write_text("".join(lines))
    functions(folder / "functions", held_out=1, roots=[folder / "code"])
    [pair] = BeirPairs(folder / "functions", "train")
    *body, last = pair.right.split()
    assert (pair.left, body) == (f"code io read http file {last[:-1]} path", names)
    short(folder / "functions", folder / "short", words=3, documents=2)
    for pair in BeirPairs(folder / "short", "test"):
        assert pair.right.split() == names[:3]
    assert len(open_corpus(folder / "short")) == 2
    project(str(toys.text_model(folder / "model")), folder / "projected", dim=5)
    assert load_model(folder / "projected").left.dim == 5


if __name__ == "__main__":
    command_line(functions, short, project, check=check)
