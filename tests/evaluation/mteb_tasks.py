"""Retrieval tasks of MTEB over local data, nothing of which comes from the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata

from dualenc.data.beir import read_qrels


def text_task(folder: Path, name: str = "LocalTexts") -> AbsTaskRetrieval:
    """The test split of a BEIR folder."""
    documents, queries = (_dataset(folder / f"{part}.jsonl") for part in ("corpus", "queries"))
    return retrieval_task(queries, documents, read_qrels(folder / "qrels" / "test.tsv"), name, "Retrieval", "t2t")


def retrieval_task(
    queries: Dataset,
    documents: Dataset,
    qrels: dict[str, dict[str, int]],
    name: str,
    kind: str = "Any2AnyRetrieval",
    category: str = "i2t",
) -> AbsTaskRetrieval:
    """Any queries among any documents; `category` says what they are, such as i2t."""
    modalities = sorted({{"t": "text", "i": "image"}[letter] for letter in category if letter != "2"})

    class Local(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name=name,
            dataset={"path": "local/data", "revision": "local"},
            description="Read from a folder.",
            reference=None,
            type=kind,  # type: ignore[arg-type]
            category=category,  # type: ignore[arg-type]
            modalities=modalities,
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="ndcg_at_10",
            date=("1960-01-01", "1970-01-01"),
            domains=["Academic"],
            task_subtypes=[],
            license="not specified",
            annotations_creators="expert-annotated",
            dialect=[],
            sample_creation="found",
            bibtex_citation="",
        )

        def load_data(self, num_proc: int | None = None, **_: Any) -> None:
            split = {"corpus": documents, "queries": queries, "relevant_docs": qrels, "top_ranked": None}
            self.dataset = {"default": {"test": split}}  # type: ignore[typeddict-item]
            self.data_loaded = True

    return Local()


def _dataset(path: Path) -> Dataset:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return Dataset.from_list(rows).rename_columns({"_id": "id"})
