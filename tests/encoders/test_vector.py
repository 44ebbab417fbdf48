"""Adapters: towers against plain torch, what they begin as, folders, refusals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dualenc.encoders import VectorEncoder, load_model
from dualenc.errors import DualencError
from tests.helpers.pages import ROOT, code

VECTORS = np.random.default_rng(0).normal(size=(7, 12)).astype(np.float32) * 3


def shaken(model: VectorEncoder) -> VectorEncoder:
    """With random weights: new ones are zeros and identities."""
    torch.manual_seed(1)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def encoded(model: VectorEncoder, side: Any, vectors: np.ndarray = VECTORS) -> torch.Tensor:
    with torch.no_grad():
        return model(side, model.tower(side).prepare(vectors))


def test_linear_is_a_matrix_and_a_bias_between_two_normalisations() -> None:
    model = shaken(VectorEncoder(12, tower="linear", dim=5))
    weights = model.state_dict()
    x = F.normalize(torch.from_numpy(VECTORS))
    wanted = F.normalize(x @ weights["left.map.weight"].T + weights["left.map.bias"])
    torch.testing.assert_close(encoded(model, "left"), wanted)


@pytest.mark.parametrize("dim", [12, 5])
def test_mlp_is_a_perceptron_beside_the_vectors_themselves(dim: int) -> None:
    model = shaken(VectorEncoder(12, tower="mlp", dim=dim, hidden=9))
    w = {name.removeprefix("left.map."): tensor for name, tensor in model.state_dict().items()}
    x = F.normalize(torch.from_numpy(VECTORS))
    centred = x - x.mean(dim=1, keepdim=True)
    normed = (
        centred / (centred.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * w["norm.weight"]
        + w["norm.bias"]
    )
    change = F.gelu(normed @ w["up.weight"].T + w["up.bias"]) @ w["down.weight"].T + w["down.bias"]
    skip = x if dim == 12 else x @ w["skip.weight"].T
    torch.testing.assert_close(encoded(model, "left"), F.normalize(math.sqrt(12) * skip + change))


@pytest.mark.parametrize("tower", ["linear", "mlp", "identity"])
def test_a_new_adapter_gives_the_similarities_of_the_vectors(tower: Any) -> None:
    model = VectorEncoder(12, tower=tower)
    x = F.normalize(torch.from_numpy(VECTORS).double())
    found = encoded(model, "left") @ encoded(model, "right").T
    torch.testing.assert_close(found.double(), x @ x.T, atol=1e-6, rtol=0)


def test_towers_are_shared_where_they_are_alike_unless_told() -> None:
    assert VectorEncoder(12).shares_weights
    assert not VectorEncoder(12, shared=False).shares_weights
    assert not VectorEncoder(12, right_input_dim=8).shares_weights
    queries_only = VectorEncoder(12, tower="linear", right_tower="identity")
    assert queries_only.num_trainable_parameters == 12 * 12 + 12
    apart = VectorEncoder(12, right_input_dim=8, tower="mlp")
    assert apart.dim == 8
    assert apart.left.config["hidden"] == apart.right.config["hidden"] == 24


@pytest.mark.parametrize(
    "arguments",
    [
        {"tower": "linear", "dim": 5},
        {"tower": "mlp", "shared": False, "hidden": 7},
        {"tower": "mlp", "shared": False},
        {"tower": "mlp", "right_input_dim": 8},
        {"tower": "linear", "right_tower": "identity"},
        {"tower": "linear", "right_tower": "mlp", "right_input_dim": 8, "hidden": 6},
        {"tower": "identity"},
    ],
)
def test_a_saved_model_loads_with_the_same_vectors_and_the_same_bytes(
    tmp_path: Path, arguments: Any
) -> None:
    model = shaken(VectorEncoder(12, **arguments))
    model.save(tmp_path / "one")
    loaded = load_model(tmp_path / "one")
    assert isinstance(loaded, VectorEncoder)
    assert loaded.shares_weights == model.shares_weights
    right = VECTORS[:, : arguments.get("right_input_dim", 12)]
    assert torch.equal(encoded(loaded, "left"), encoded(model, "left"))
    assert torch.equal(encoded(loaded, "right", right), encoded(model, "right", right))
    loaded.save(tmp_path / "two" / "one")
    for file in (tmp_path / "one").iterdir():
        assert (tmp_path / "two" / "one" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"input_dim": 0}, "input_dim is 0"),
        ({"input_dim": None}, "does not consist of vectors"),
        ({"right_input_dim": 0, "dim": 4}, "input_dim is 0"),
        ({"hidden": -1}, "hidden is -1"),
        ({"dim": 1 << 40}, "dim is"),
        ({"tower": "identity", "dim": 5}, "an identity cannot map vectors of size 12"),
        ({"shared": True, "right_input_dim": 8}, "leave shared out"),
        ({"tower": "conv"}, "linear, mlp, identity"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments: Any, told: str) -> None:
    with pytest.raises(DualencError, match=told):
        VectorEncoder(**{"input_dim": 12, **arguments})


def test_vectors_of_another_size_are_refused() -> None:
    with pytest.raises(DualencError, match="dimension 3, but this side of the model takes 12"):
        VectorEncoder(12).left.prepare([np.zeros(3)])


def test_the_lines_of_the_page_put_a_linear_tower_behind_its_base(
    tmp_path: Path, text_encoder: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = text_encoder()
    base.save("base")
    model = shaken(VectorEncoder(32, tower="linear", dim=24))
    model.save("runs/adapter/model")
    (lines,) = [
        block for block in code(ROOT / "docs" / "encoders.md", "python") if "Dense(" in block
    ]
    exec(lines.replace("sentence-transformers/all-MiniLM-L6-v2", "base"), {})
    expected = encoded(model, "right", base.encode(texts)).numpy()
    np.testing.assert_allclose(load_model("runs/whole").encode(texts), expected, atol=1e-5)
