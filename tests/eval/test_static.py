"""Fine-tuned and static encoders: the tables of the docs, and the words before training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from tests.helpers.eval_scripts import load_script

DOCS = Path(__file__).parents[2] / "docs" / "results.md"


@pytest.mark.parametrize(
    ("name", "section"), [("fine_tuning", "Fine-tuning"), ("static", "Static encoders")]
)
def test_the_docs_show_what_the_store_holds(name: str, section: str) -> None:
    script = load_script(f"{name}.py")
    side_by_side = load_script("fine_tuning.py").side_by_side
    shown = side_by_side(script.Store(script.STORE), script.SHOWN, script.COLUMNS)
    table = DOCS.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n\n")[1]
    columns = list(zip(*(line.split("|")[2:-1] for line in table.splitlines()), strict=True))
    # Quality and steps by turns; the last column holds what two columns show.
    of_docs = dict(zip(("papers", "medquad", "scifact", "8e-5"), columns[::2], strict=False))
    for title, cells in of_docs.items():
        own = {row[name] for row in shown for name in script.COLUMNS if name.endswith(title)}
        assert set(re.findall(r"\d\.\d+ ± \d\.\d+", " ".join(cells))) <= own


@pytest.mark.slow
def test_words_before_training_are_judged_as_by_sentence_transformers(tmp_path: Path) -> None:
    toys, script = load_script("toys.py"), load_script("static.py")
    words = str(toys.text_model(tmp_path / "words"))
    task = script.open_task(toys.beir(tmp_path / "toy"), words)
    queries, corpus, qrels = task.test.collection
    texts = [dict(zip(side.ids, side.items, strict=True)) for side in (queries, corpus)]
    judge = InformationRetrievalEvaluator(*texts, {own: set(found) for own, found in qrels.items()})
    transformer = SentenceTransformer(words, device="cpu")
    table = transformer[0].model.get_input_embeddings().weight.detach()  # type: ignore[union-attr]
    static = StaticEmbedding(transformer.tokenizer, embedding_weights=table)
    expected = judge(SentenceTransformer(modules=[static], device="cpu"))["cosine_ndcg@10"]
    assert task.test(task.new_model())["ndcg@10"] == pytest.approx(expected, abs=1e-6)
