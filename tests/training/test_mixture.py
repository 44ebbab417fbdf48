"""Training on several sources: a plain mixture is one source, and prompts of sources are saved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dualenc.data import Mixture, PairDataset
from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.objectives import InfoNCE
from tests.helpers.fakes import TinyEncoder, same, tiny_objective, tiny_pairs, weights
from tests.helpers.runs import train


def mixed() -> Mixture:
    """24 and 14 pairs, of which the second have mined negatives, scores and weights."""
    negatives = [[(i + 3) % 14] * (i % 3) for i in range(14)]
    few = tiny_pairs(14, seed=1, negatives=negatives, weights=np.linspace(0.5, 1.5, 14))
    return Mixture({"many": tiny_pairs(24), "few": few})


def joined(both: Mixture) -> PairDataset:
    """The same pairs as one source, read item by item."""
    items = [
        [both.item(side, i) for i in range(n)]
        for side, n in (("left", both.num_left), ("right", both.num_right))
    ]
    columns = {"negatives": both.negatives, "weights": both.weights}
    return PairDataset(*items, both.left_id, both.right_id, **columns)


@pytest.mark.slow
def test_a_plain_mixture_trains_the_model_of_one_source_with_all_pairs(tmp_path: Path) -> None:
    for name, pairs in (("mixture", mixed()), ("joined", joined(mixed()))):
        train(tmp_path / name, pairs=pairs, objective=tiny_objective(pairs), model=TinyEncoder())
    assert same(weights(tmp_path / "mixture"), weights(tmp_path / "joined"))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_the_saved_folder_knows_the_prompts_of_its_sources(tmp_path: Path, shared: bool) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    config = {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    tokenizer = train_tokenizer(["a dog runs", "query: ask: x"] * 3, vocab_size=300)
    config |= {"intermediate_size": 16, "max_position_embeddings": 40}
    model = TextEncoder(config=config, tokenizer=tokenizer, query_prompt="query: ", shared=shared)
    sources = {
        name: PairDataset([f"{name} {i}" for i in range(4)], ["a dog"] * 4)
        for name in ("asked", "told")
    }
    pairs = Mixture(sources, left_prompts={"asked": "ask: "})
    result = train(tmp_path, model=model, pairs=pairs, objective=InfoNCE(), batch_size=4, epochs=1)
    assert (
        "asked (4 pairs, weight 1, left prompt 'ask: '); told (4 pairs"
        in (tmp_path / "model/README.md").read_text()
    )
    theirs = sentence_transformers.SentenceTransformer(str(result.model_folder), device="cpu")
    with torch.no_grad():
        ours = model.eval()("left", model.left.prepare(["ask: asked 1"]))
    found = theirs.encode_query(["asked 1"], prompt_name="asked_query", normalize_embeddings=True)
    assert np.allclose(ours.numpy(), found, atol=1e-5)
    again = TextEncoder(str(result.model_folder))
    again = TextEncoder(str(result.model_folder), query_prompt=again.prompts["asked_query"])
    assert again.left.prepare.prompt == "query: ask: "
