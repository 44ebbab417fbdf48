"""The exact loss of a model on a finite set, and its gradient norm, against plain autograd."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dualenc.data import open_pairs
from dualenc.encoders import load_model
from dualenc.objectives import ExactGlobal
from tests.helpers import toy
from tests.helpers.eval_scripts import load_script


@pytest.fixture(scope="module")
def convergence() -> ModuleType:
    return load_script("convergence.py")


def unit(count: int, seed: int, dim: int = 4) -> Tensor:
    rows = torch.from_numpy(np.random.default_rng(seed).normal(size=(count, dim)))
    return nn.functional.normalize(rows, dim=1)


SHARED = {
    "left_id": torch.tensor([0, 0, 1, 2, 3, 4, 5]),
    "right_id": torch.tensor([0, 1, 2, 2, 3, 4, 5]),
    "left_positives": torch.tensor([[0, 1], [0, 1], [2, -1], [2, -1], [3, 5], [4, -1], [5, -1]]),
    "right_positives": torch.tensor([[0, -1], [0, -1], [1, 2], [1, 2], [3, -1], [4, -1], [5, 3]]),
}
"""Items in several pairs, and positives that are in no pair together."""


class Towers(nn.Module):
    """Two towers (or one), each with dropout, which evaluation mode must silence."""

    def __init__(self, shared: bool):
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Sequential(
            nn.Linear(5, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 4)
        ).double()
        self.right = self.left if shared else nn.Sequential(nn.Linear(5, 4)).double()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, side: str, inputs: dict[str, Tensor]) -> Tensor:
        return nn.functional.normalize(
            (self.left if side == "left" else self.right)(inputs["x"]), dim=1
        )


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize("sizes", [[6], [2, 2, 2], [1] * 6])
def test_the_models_gradient_norm_is_that_of_plain_autograd(
    sizes: list[int], views: bool, convergence: ModuleType
) -> None:
    frozen = convergence.FrozenPairs
    make = partial(frozen.one_to_one, views=True) if views else partial(frozen, **SHARED)
    model = Towers(shared=views).eval()
    inputs = {side: unit(6, seed, dim=5) for side, seed in (("left", 3), ("right", 4))}
    left, right = (model(side, {"x": x}) for side, x in inputs.items())
    pairs = make(left, right)
    batch = {"left_positives": pairs.left_positives, "right_positives": pairs.right_positives}
    expected = pairs.build(ExactGlobal, 0.1)(
        left[pairs.left_id],
        right[pairs.right_id],
        pairs.left_id,
        pairs.right_id,
        encode=lambda side, ids: (left if side == "left" else right)[ids],
        **batch,
    ).loss
    expected.backward()
    norm = sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)
    chunks = {side: [{"x": part} for part in x.split(sizes)] for side, x in inputs.items()}
    found = convergence.exact_gradient(model, model, chunks, make, 0.1)
    assert found.loss == pytest.approx(expected.item(), rel=1e-6)
    assert found.squared_gradient_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 1e-6
    assert torch.allclose(found.pairs.left, left)
    assert all(p.grad is None for p in model.parameters()), "no gradients are left behind"


def test_a_tower_with_fixed_weights_adds_nothing(convergence: ModuleType) -> None:
    model = Towers(shared=False).eval()
    model.right.requires_grad_(False)
    chunks = {"left": [{"x": unit(4, 0, dim=5)}], "right": [{"x": unit(4, 1, dim=5)}]}
    found = convergence.exact_gradient(
        model, model, chunks, convergence.FrozenPairs.one_to_one, 0.1
    )
    model.right.requires_grad_(True)
    both = convergence.exact_gradient(model, model, chunks, convergence.FrozenPairs.one_to_one, 0.1)
    assert 0 < found.squared_gradient_norm < both.squared_gradient_norm


def test_negatives_leave_out_positives_by_id(convergence: ModuleType) -> None:
    left = unit(9, 0)
    right = unit(9, 1)
    pairs = convergence.FrozenPairs(left, right, **SHARED)
    left_id = pairs.left_id.tolist()
    right_id = pairs.right_id.tolist()
    rows = (left[pairs.left_id], right[pairs.right_id])
    expected = [
        float(rows[0][i] @ rows[1][j])
        for i, j in itertools.product(range(7), range(7))
        if left_id[i] != left_id[j]
        and right_id[i] != right_id[j]
        and right_id[j] not in pairs.left_positives[i]
    ]
    found = convergence.negative_cosines(rows[0].numpy(), rows[1].numpy(), pairs)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert convergence.overlap(np.ones(3), np.ones(5)) == 1
    assert convergence.overlap(np.ones(3), np.zeros(5)) == 0


def test_items_are_prepared_once_and_keep_their_positives(
    convergence: ModuleType, toy_text: Path, tmp_path: Path
) -> None:
    """Thirteen pairs; the first two share their document, the last two their query."""
    texts = list(dict.fromkeys(toy.texts(40)))[:26]
    rows = [
        {"query": query, "document": document} for query, document in zip(texts[:13], texts[13:])
    ]
    rows[1]["document"], rows[12]["query"] = rows[0]["document"], rows[11]["query"]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = open_pairs(tmp_path / "pairs.jsonl")
    model = load_model(str(toy_text), device="cpu").eval()
    chosen = convergence.PairSet(pairs, np.arange(13))
    embeddings: dict[Any, Tensor] = {}
    with torch.no_grad():
        for side in ("left", "right"):
            embeddings[side] = torch.cat(
                [model(side, inputs) for inputs in chosen.inputs(model, side)]
            )
        frozen = chosen.pairs(embeddings["left"], embeddings["right"])
        assert (len(frozen.left), len(frozen.right), len(frozen)) == (12, 12, 13)
        for side in ("left", "right"):
            items = [getattr(pairs[row], side) for row in range(13)]
            ids = getattr(frozen, f"{side}_id")
            expected = model(side, model.tower(side).prepare(items))
            assert torch.allclose(getattr(frozen, side)[ids], expected, atol=1e-5)
            documents = getattr(frozen, f"{'right' if side == 'left' else 'left'}_id")
            for row, listed in enumerate(getattr(frozen, f"{side}_positives").tolist()):
                assert set(listed) - {-1} == set(documents[ids == ids[row]].tolist())


@pytest.mark.slow
def test_every_checkpoint_is_in_the_table(
    convergence: ModuleType, short_run: Path, classes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convergence.main(str(short_run), str(classes), pairs=12, temperature=0.2, split="test")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row and row[0].isdigit()] == ["2", "4", "6"]
