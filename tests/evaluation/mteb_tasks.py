"""A retrieval task of MTEB over local data, nothing of which comes from the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata

from dualenc.data.beir import read_qrels


def text_task(folder: Path) -> AbsTaskRetrieval:
    """The test split of a BEIR folder."""

    class LocalTexts(AbsTaskRetrieval):
        metadata = TaskMetadata(
            name="LocalTexts",
            dataset={"path": "local/data", "revision": "local"},
            description="Read from a folder.",
            reference=None,
            type="Retrieval",
            category="t2t",
            modalities=["text"],
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
            split = {
                "corpus": _dataset(folder / "corpus.jsonl"),
                "queries": _dataset(folder / "queries.jsonl"),
                "relevant_docs": read_qrels(folder / "qrels" / "test.tsv"),
                "top_ranked": None,
            }
            self.dataset = {"default": {"test": split}}  # type: ignore[typeddict-item]
            self.data_loaded = True

    return LocalTexts()


def _dataset(path: Path) -> Dataset:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return Dataset.from_list(rows).rename_columns({"_id": "id"})
