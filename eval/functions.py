"""A large retrieval task from what is on the machine: the signature of a function finds the words
of its body.

    python eval/functions.py FOLDER
    python eval/small_batch.py run vectors FOLDER --pairs 102400 --epochs 2

Functions of the standard library and of everything that is installed, without their documentation:
two hundred thousand beside this package's own requirements. Queries are the words of module, name
and parameters; documents the names that the body uses, in their order, without the function's own.
One document per distinct body; functions whose queries are equal share one. FOLDER is in BEIR's
form, with a thousand held-out and a thousand test queries over all documents.
"""

from __future__ import annotations

import ast
import json
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

FEWEST_WORDS, MOST_WORDS = 12, 128


def words(name: str) -> list[str]:
    """Of an identifier, in lower case: `readHTTPHeader_2` is read, http, header."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def functions(file: Path, module: str) -> Iterator[tuple[str, str]]:
    """(signature, body) of every function of a file, nested ones included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, RecursionError, ValueError, OSError):
            return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith(
            "__"
        ):
            continue
        used: list[str] = []
        for part in (inner for statement in node.body for inner in ast.walk(statement)):
            if isinstance(part, ast.Name | ast.Attribute | ast.keyword):
                name = (
                    part.id
                    if isinstance(part, ast.Name)
                    else part.attr
                    if isinstance(part, ast.Attribute)
                    else part.arg
                )
                used += words(name or "")
        own = words(node.name)
        parameters = [
            word
            for argument in node.args.args
            if argument.arg != "self"
            for word in words(argument.arg)
        ]
        body = [word for word in used if len(word) > 1 and word != "self" and word not in own][
            :MOST_WORDS
        ]
        if len(body) >= FEWEST_WORDS and own:
            yield " ".join([*words(module), *own, *parameters]), " ".join(body)


def write(bodies: dict[str, str], folder: Path, held_out: int, limit: int, seed: int) -> None:
    """A random part of what was read (signature by body), as a BEIR folder."""
    draw = np.random.default_rng(seed)
    pairs = list(bodies.items())
    chosen = [pairs[row] for row in np.sort(draw.permutation(len(pairs))[:limit])]
    queries = {
        signature: f"q{number}"
        for number, signature in enumerate(dict.fromkeys(own for _, own in chosen))
    }
    part = np.full(len(queries), "train", dtype="U5")
    part[draw.permutation(len(queries))[: 2 * held_out]] = ["dev", "test"] * held_out
    part_of = dict(zip(queries, part.tolist(), strict=True))
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    with (folder / "queries.jsonl").open("w") as file:
        file.writelines(
            json.dumps({"_id": own, "text": text}) + "\n" for text, own in queries.items()
        )
    with (folder / "corpus.jsonl").open("w") as file:
        file.writelines(
            json.dumps({"_id": f"d{row}", "text": body}) + "\n"
            for row, (body, _) in enumerate(chosen)
        )
    for split in ("train", "dev", "test"):
        rows = [
            f"{queries[own]}\td{row}\t1\n"
            for row, (_, own) in enumerate(chosen)
            if part_of[own] == split
        ]
        (folder / "qrels" / f"{split}.tsv").write_text(
            "query-id\tcorpus-id\tscore\n" + "".join(rows)
        )
    print(f"{len(chosen)} bodies of {len(bodies)}, {len(queries)} signatures in {folder}")


def main(
    folder: Path,
    held_out: int = 1000,
    limit: int = 105_000,
    seed: int = 0,
    roots: list[Path] | None = None,
) -> None:
    """Write the task.

    Args:
        folder: where to.
        held_out: queries for tuning, and as many for testing.
        limit: documents at most, a random part of all.
        seed: of the draws.
        roots: folders of Python files; by default the standard library and what is installed.
    """
    roots = roots or [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    files = sorted({file.resolve() for root in roots for file in root.rglob("*.py")})
    bodies: dict[str, str] = {}
    for file in tqdm(files, "reading functions", unit="file"):
        for signature, body in functions(file, f"{file.parent.name} {file.stem}"):
            bodies.setdefault(body, signature)
    write(bodies, folder, held_out, limit, seed)


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
