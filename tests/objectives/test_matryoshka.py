"""Objectives at several lengths: the mean of independent ones, state per length, shared encodes, recipes."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.data import PairDataset
from dualenc.encoders import TextEncoder, load_model, train_tokenizer
from dualenc.errors import DualencError
from dualenc.objectives import EMC2, ISIR, GlobalCache, InfoNCE, Objective, SogCLR
from dualenc.objectives.matryoshka import Matryoshka, Remembered, prefix
from dualenc.recipe import make_recipe
from dualenc.training import Trainer
from tests.training.fakes import TinyEncoder, tiny_pairs

NUM, DIM = 12, 6
DIMS = [2, 3, 6]


def features(seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {side: torch.randn(NUM, DIM, generator=draw, dtype=torch.float64) for side in ("left", "right")}


def batches() -> list[Tensor]:
    return [torch.randperm(NUM, generator=torch.Generator().manual_seed(step))[:5] for step in range(6)]


def trained(criteria: list[tuple[int, Objective]], table: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of each step by the mean over (length, objective), written out; and the gradients of the features."""
    losses, gradients = [], []
    for ids in batches():
        leaves = {side: values.clone().requires_grad_() for side, values in table.items()}
        step = torch.zeros((), dtype=torch.float64)
        for dim, criterion in criteria:

            def encode(side: str, wanted: Tensor, dim: int = dim, of: dict[str, Tensor] = leaves) -> Tensor:
                return normalize(of[side][wanted][:, :dim], dim=1)

            step = step + criterion(encode("left", ids), encode("right", ids), ids, ids, encode).loss / len(criteria)
        step.backward()
        losses.append(step.detach())
        gradients.append(torch.cat([leaf.grad for leaf in leaves.values() if leaf.grad is not None]))
    return losses, gradients


MAKERS: dict[str, Callable[..., Objective]] = {
    "InfoNCE": lambda **more: InfoNCE(temperature=0.2, **more),
    "SogCLR": lambda **more: SogCLR(num_left=NUM, temperature=0.2, gamma=0.5, **more),
    "EMC2": lambda **more: EMC2(num_left=NUM, temperature=0.2, **more),
    "ISIR": lambda **more: ISIR(num_left=NUM, temperature=0.2, proposals=4, **more),
    "GlobalCache": lambda **more: GlobalCache(num_left=NUM, temperature=0.2, **more),
}


@pytest.mark.parametrize("name", list(MAKERS))
def test_it_is_the_mean_of_independent_objectives_of_prefixes(name: str) -> None:
    alone = [(dim, MAKERS[name]().double()) for dim in DIMS]
    expected, gradients = trained(alone, features())
    together = MAKERS[name](dims=DIMS).double()
    assert isinstance(together, Matryoshka)
    for ids, loss, gradient in zip(batches(), expected, gradients, strict=True):
        leaves = {side: values.clone().requires_grad_() for side, values in features().items()}

        def encode(side: str, wanted: Tensor, of: dict[str, Tensor] = leaves) -> Tensor:
            return normalize(of[side][wanted], dim=1)

        output = together(encode("left", ids), encode("right", ids), ids, ids, encode)
        torch.testing.assert_close(output.loss.detach(), loss)
        output.loss.backward()
        found = torch.cat([leaf.grad for leaf in leaves.values() if leaf.grad is not None])
        torch.testing.assert_close(found, gradient)


def test_state_is_kept_per_length_and_saved() -> None:
    together = SogCLR(num_left=NUM, dims=DIMS).double()
    ids = batches()[0]
    left, right = (normalize(values[ids], dim=1) for values in features().values())
    together(left, right, ids)
    tables = [criterion.left_averages.log_u for criterion in together]  # type: ignore[attr-defined]
    assert len(tables) == 3
    assert not torch.equal(tables[0][ids], tables[2][ids])
    again = SogCLR(num_left=NUM, dims=DIMS).double()
    again.load_state_dict(together.state_dict())
    torch.testing.assert_close(again(left, right, ids).loss, together(left, right, ids).loss)
    for other in (copy.deepcopy(together), pickle.loads(pickle.dumps(together))):
        torch.testing.assert_close(other(left, right, ids).loss, together(left, right, ids).loss)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=5))
def test_items_are_encoded_once(asked: list[list[int]]) -> None:
    table, given_ids = torch.randn(10, 4), []

    def encode(side: str, ids: Tensor) -> Tensor:
        given_ids.append(ids.tolist())
        return table[ids]

    remembered = Remembered(encode)
    for ids in asked:
        wanted = torch.tensor(ids, dtype=torch.int64)
        torch.testing.assert_close(remembered("right", wanted), table[wanted])
    assert len(given_ids) == len(asked)
    encoded = [item for ids in given_ids for item in ids]
    assert sorted(encoded) == sorted({item for ids in asked for item in ids})


def test_shared_proposals_are_encoded_once_for_all_lengths() -> None:
    counts = []
    for dims in (None, [2, 3, 6]):
        criterion, asked = ISIR(num_left=NUM, proposals=4, dims=dims).double(), 0

        def encode(side: str, ids: Tensor) -> Tensor:
            nonlocal asked
            asked += len(ids)
            return normalize(features()[side][ids], dim=1)

        ids = batches()[0]
        criterion(*(normalize(v[ids], dim=1) for v in features().values()), ids, ids, encode)
        counts.append(asked)
    assert counts[0] <= counts[1] < 2 * counts[0]  # not three times: the proposals are shared, the states need not be


def test_metrics_of_every_length() -> None:
    left, right = (normalize(values, dim=1) for values in features().values())
    metrics = InfoNCE(dims=[3, 6])(left, right, torch.arange(NUM)).metrics
    alone = InfoNCE()(prefix(left, 3), prefix(right, 3), torch.arange(NUM)).metrics
    assert float(metrics["accuracy@3"]) == float(alone["accuracy"])
    assert set(metrics) == {*alone, *(f"{name}@3" for name in alone)}


@pytest.mark.parametrize("dims", [[], [2, 2], [0, 3], [2, 2.5], [True]])
def test_lengths_that_are_none(dims: Any) -> None:
    with pytest.raises(DualencError, match="dims are") as caught:
        InfoNCE(dims=dims)
    assert "\n" not in str(caught.value)


def test_more_components_than_there_are() -> None:
    left, right = (normalize(values, dim=1) for values in features().values())
    with pytest.raises(DualencError, match="but the embeddings have 6"):
        InfoNCE(dims=[3, 7])(left, right, torch.arange(NUM))


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
            "objective": {"class_path": "SogCLR", "init_args": {"dims": [2, 4]}},
            "trainer": {"output": str(tmp_path / "run"), "batch_size": 4, "max_steps": 3, "progress": False},
        }
    )
    objective = recipe.build().objective
    assert isinstance(objective, Matryoshka)
    assert [criterion.num_left for criterion in objective] == [8, 8]
    recipe.train()
    assert "The first 2, 4 components" in (tmp_path / "run" / "model" / "README.md").read_text()


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
        trainer.fit(model, pairs, InfoNCE(dims=dims))
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
    criterion = SogCLR(num_left=pairs.num_left, num_right=pairs.num_right, dims=[2, model.dim])
    result = Trainer(output=tmp_path, batch_size=6, epochs=2, progress=False).fit(model, pairs, criterion)
    assert result.steps > 0
