"""mteb loads a saved text model through sentence-transformers, and scores what our own evaluation scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dualenc.cli import main
from tests.commands import toy

mteb = pytest.importorskip("mteb", reason="mteb is not installed; pip install mteb")


@pytest.mark.slow
def test_a_model_folder_scores_in_mteb_as_in_our_evaluation(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    from tests.evaluation.mteb_tasks import text_task

    model = toy.text_model(tmp_path / "texts")
    data = toy.write_beir(tmp_path / "beir", documents=120, queries=30)
    words = ["evaluate", "retrieval", str(model), str(data), "--out", str(tmp_path / "out"), "--keep-self-matches"]
    assert main(words) == 0
    ours = json.loads((tmp_path / "out" / "metrics.json").read_text())["systems"]["texts"]["mean"]
    results = mteb.evaluate(
        SentenceTransformer(str(model), device="cpu"), text_task(data), cache=None, show_progress_bar=False
    )
    theirs = results.task_results[0].scores["test"][0]
    assert 0.05 < ours["ndcg@10"] < 0.95
    for name in ("ndcg@10", "recall@10", "recall@100", "map@100"):
        # mteb rounds to five places.
        assert theirs[name.replace("@", "_at_")] == pytest.approx(round(ours[name], 5), abs=1e-6), name
