"""Training at several lengths: recipes, model cards and folders name them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dualenc.data import PairDataset
from dualenc.encoders import TextEncoder, load_model, train_tokenizer
from dualenc.objectives import InfoNCE, Matryoshka, SogCLR
from dualenc.recipe import make_recipe
from dualenc.training import Trainer
from tests.training.fakes import TinyEncoder, tiny_pairs


@pytest.mark.slow
def test_a_recipe_takes_dims(tmp_path: Any) -> None:
    rows = [{"query": [i, 1.0, 2.0, 3.0], "document": [1.0, 2.0, i, 1.0]} for i in range(8)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = make_recipe(
        {
            "model": {"class_path": "VectorEncoder", "init_args": {"tower": "linear"}},
            "data": {
                "class_path": "TablePairs",
                "init_args": {
                    "path": str(tmp_path / "pairs.jsonl"),
                    "left_column": "query",
                    "right_column": "document",
                    "left_modality": "vector",
                    "right_modality": "vector",
                },
            },
            "objective": {
                "class_path": "Matryoshka",
                "init_args": {"dims": [2, 4], "objective": {"class_path": "SogCLR"}},
            },
            "trainer": {"output": str(tmp_path / "run"), "batch_size": 4, "max_steps": 3, "progress": False},
        }
    )
    objective = recipe.build().objective
    assert isinstance(objective, Matryoshka)
    assert [criterion.num_left for criterion in objective] == [8, 8]
    recipe.train()
    assert "The first 2, 4 components" in (tmp_path / "run" / "model" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_a_text_model_tells_its_lengths_and_gives_whole_vectors(shared: bool, tmp_path: Any) -> None:
    from sentence_transformers import SentenceTransformer
    from transformers import AutoConfig

    config = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    texts = [f"{word} {number}" for word in ("one", "two") for number in range(6)]
    pairs = PairDataset(texts, texts)
    model = TextEncoder(config=config, tokenizer=train_tokenizer(texts, 261), max_length=16, shared=shared)
    for folder, dims in (("first", [16, 4]), ("second", None)):
        trainer = Trainer(output=tmp_path / folder, batch_size=6, max_steps=1, progress=False)
        trainer.fit(model, pairs, Matryoshka(InfoNCE(), dims) if dims else InfoNCE())
        model = load_model(tmp_path / folder / "model")  # type: ignore[assignment]
        for place in [""] if shared else ["query", "document"]:
            written = AutoConfig.from_pretrained(tmp_path / folder / "model" / place)
            assert getattr(written, "matryoshka_dimensions", None) == (sorted(dims) if dims else None)
            theirs = SentenceTransformer(str(tmp_path / folder / "model" / place), device="cpu")
            assert theirs.truncate_dim is None
            assert theirs.encode(["one"]).shape == (1, 16)
        card = (tmp_path / folder / "model" / "README.md").read_text()
        assert ("| Trained lengths | 4, 16 |" in card) == (dims is not None)


def test_it_trains(tmp_path: Any) -> None:
    pairs, model = tiny_pairs(), TinyEncoder()
    criterion = Matryoshka(SogCLR(num_left=pairs.num_left, num_right=pairs.num_right), [2, model.dim])
    result = Trainer(output=tmp_path, batch_size=6, epochs=2, progress=False).fit(model, pairs, criterion)
    assert result.steps > 0
