"""mteb loads a saved text model through sentence-transformers, and scores what our own evaluation
scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dualenc.cli import main
from tests.helpers import toy
from tests.helpers.result_files import read_qrels

mteb = pytest.importorskip("mteb", reason="mteb is not installed; pip install mteb")


def text_task(folder: Path) -> Any:
    """The test split of a BEIR folder, as a task of which nothing comes from the hub."""
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval
    from mteb.abstasks.task_metadata import TaskMetadata

    def dataset(path: Path) -> Dataset:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return Dataset.from_list(rows).rename_columns({"_id": "id"})

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
                "corpus": dataset(folder / "corpus.jsonl"),
                "queries": dataset(folder / "queries.jsonl"),
                "relevant_docs": read_qrels(folder / "qrels" / "test.tsv"),
                "top_ranked": None,
            }
            self.dataset = {"default": {"test": split}}  # type: ignore[typeddict-item]
            self.data_loaded = True

    return LocalTexts()


@pytest.mark.slow
def test_a_model_folder_scores_in_mteb_as_in_our_evaluation(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    model = toy.text_model(tmp_path / "texts")
    data = toy.write_beir(tmp_path / "beir", documents=120, queries=30)
    words = [
        "evaluate",
        "retrieval",
        str(model),
        str(data),
        "--out",
        str(tmp_path / "out"),
        "--keep-self-matches",
    ]
    assert main(words) == 0
    ours = json.loads((tmp_path / "out" / "metrics.json").read_text())["systems"]["texts"]["mean"]
    results = mteb.evaluate(
        SentenceTransformer(str(model), device="cpu"),
        text_task(data),
        cache=None,
        show_progress_bar=False,
    )
    theirs = results.task_results[0].scores["test"][0]
    assert 0.05 < ours["ndcg@10"] < 0.95
    for name in ("ndcg@10", "recall@10", "recall@100", "map@100"):
        # mteb rounds to five places.
        assert theirs[name.replace("@", "_at_")] == pytest.approx(round(ours[name], 5), abs=1e-6), (
            name
        )
