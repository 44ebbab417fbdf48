"""Collections laid out as on the hub: mteb's and NanoBEIR's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.make import write_jsonl

Rows = list[dict[str, Any]]
DOCUMENTS: Rows = [
    {"_id": f"d{i}", "title": f"T{i}" if i else "", "text": f"text {i}"} for i in range(4)
]
QUERIES: Rows = [{"_id": f"q{i}", "text": f"query {i}"} for i in range(3)]
QRELS: dict[str, list[tuple]] = {
    "train": [("q2", "d3", 1.0), ("q0", "d3", 2.0), ("q0", "d0", 0.0)],
    "test": [("q1", "d0", 1.0)],
}


def card(configs: dict[str, dict[str, str]]) -> str:
    """A README.md with the header that the hub reads."""
    lines = ["---", "language:", "  - en", "configs:"]
    for config, files in configs.items():
        lines += [f"  - config_name: {config}", "    data_files:"]
        lines += [f"      - split: {split}\n        path: {path}" for split, path in files.items()]
    return "\n".join([*lines, "---", "# A collection", ""])


def judgements(entries: list[tuple], score: bool = True) -> list[dict[str, Any]]:
    """Rows of a table of judgements."""
    names = ("query-id", "corpus-id", "score")[: 3 if score else 2]
    return [dict(zip(names, entry)) for entry in entries]


def mteb(
    folder: Path,
    kind: str,
    qrels: dict[str, list[tuple]] = QRELS,
    parts: tuple = (DOCUMENTS, QUERIES),
) -> Path:
    """mteb/scifact: judgements in the configuration default; json lines, or parquet as the newer
    ones are."""
    (folder / "qrels").mkdir(parents=True)
    tables = {"corpus": parts[0], "queries": parts[1]}
    tables |= {f"qrels/{split}": judgements(entries) for split, entries in qrels.items()}
    for name, rows in tables.items():
        if kind == "jsonl":
            write_jsonl(folder / f"{name}.jsonl", rows)
        else:
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    configs = {"default": {split: f"qrels/{split}.{kind}" for split in qrels}}
    configs |= {part: {part: f"{part}.{kind}"} for part in ("corpus", "queries")}
    (folder / "README.md").write_text(card(configs))
    return folder


def nano(
    folder: Path, documents: Rows = DOCUMENTS, queries: Rows = QUERIES, pairs: list = QRELS["train"]
) -> Path:
    """zeta-alpha-ai/NanoSciFact: three configurations with one split train, no titles and no
    scores."""
    documents = [
        {"_id": row["_id"], "text": f"{row['title']} {row['text']}".strip()} for row in documents
    ]
    tables = {"corpus": documents, "queries": queries, "qrels": judgements(pairs, score=False)}
    for part, rows in tables.items():
        (folder / part).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / part / "train-00000-of-00001.parquet")
    (folder / "README.md").write_text(card({part: {"train": f"{part}/train-*"} for part in tables}))
    return folder
