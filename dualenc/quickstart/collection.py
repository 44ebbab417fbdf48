"""Docstrings as a BEIR folder: the summary line is the query, the rest of the docstring its relevant document."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from dualenc.errors import DualencError
from dualenc.files import atomic_path
from dualenc.quickstart.docstrings import Docstring


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
