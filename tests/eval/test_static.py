"""The comparison of static encoders runs, in small."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from tests.helpers import toy
from tests.helpers.eval_scripts import load_script

pytestmark = pytest.mark.slow
PARTS = {"train": range(16), "dev": range(16, 22), "test": range(22, 30)}


def write_task(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Documents of six words and queries of their first three: (queries, documents) by id."""
    draw = np.random.default_rng(0)
    documents = {f"d{row}": " ".join(draw.choice(toy.WORDS, 6)) for row in range(30)}
    queries = {f"q{row}": " ".join(text.split()[:3]) for row, text in enumerate(documents.values())}
    (folder / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", documents), ("queries", queries)):
        lines = [json.dumps({"_id": own, "text": text}) for own, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    for part, rows in PARTS.items():
        lines = ["query-id\tcorpus-id\tscore", *(f"q{row}\td{row}\t1" for row in rows)]
        (folder / "qrels" / f"{part}.tsv").write_text("\n".join(lines) + "\n")
    return queries, documents


def test_rows_and_references_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table before training has the nDCG@10 that sentence-transformers' own evaluator gives
    it."""
    queries, documents = write_task(tmp_path / "task")
    words = toy.text_model(tmp_path / "words")
    script = load_script("static.py")
    rows = ["InfoNCE 128", "sentence-transformers, words"]
    results = tmp_path / "results.jsonl"
    script.PCA_DIM = 8
    script.run([tmp_path / "task"], rows, seconds=0.1, seeds=1, words=str(words), results=results)
    script.report(results)
    assert "InfoNCE 128" in capsys.readouterr().out
    tested = {
        run["row"]: run["test"]
        for line in results.read_text().splitlines()
        if "test" in (run := json.loads(line))
    }
    assert tested.keys() == {"BM25", "words, untrained", "distilled table", *rows}

    transformer = SentenceTransformer(str(words), device="cpu")
    table = transformer[0].model.get_input_embeddings().weight.detach()  # type: ignore[union-attr]
    static = StaticEmbedding(transformer.tokenizer, embedding_weights=table)
    static.tokenizer.no_truncation()
    relevant = {f"q{row}": {f"d{row}"} for row in PARTS["test"]}
    judge = InformationRetrievalEvaluator(
        {own: queries[own] for own in relevant}, documents, relevant
    )
    expected = judge(SentenceTransformer(modules=[static], device="cpu"))["cosine_ndcg@10"]
    assert tested["words, untrained"] == pytest.approx(expected, abs=1e-6)
