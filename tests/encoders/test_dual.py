"""Two towers as one model: sides, counting, saving without losing what was there."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dualenc.data import PairDataset
from dualenc.encoders import DualEncoder, ImageTextEncoder, TextEncoder, Tower, VectorEncoder, dual
from dualenc.encoders.dual import unit_norm
from dualenc.encoders.text import TextPrepare
from dualenc.errors import BadSample, DualencError


class Linear(Tower):
    """A tower of one matrix."""

    modality = "text"

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.dim = self.feature_dim = layer.out_features

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.layer(inputs["x"])


@pytest.fixture
def model(text_encoder: Any) -> TextEncoder:
    return text_encoder()


def test_sides() -> None:
    left, right = Linear(nn.Linear(3, 2)), Linear(nn.Linear(3, 2))
    model = DualEncoder(left, right, "query-document")
    assert model.tower("left") is left
    assert model.tower("right") is right
    x = {"x": torch.randn(4, 3)}
    assert torch.equal(model("right", x), right(x))
    assert torch.equal(model("left", x), left(x))
    assert not model.training
    with pytest.raises(DualencError, match="side is 'middle'; choose 'left' or 'right'"):
        model.tower("middle")  # type: ignore[arg-type]


def test_dimensions_must_agree() -> None:
    with pytest.raises(DualencError, match="dimension 2, the right tower 4"):
        DualEncoder(Linear(nn.Linear(3, 2)), Linear(nn.Linear(3, 4)), "query-document")


def test_shared_weights_count_once_and_survive_copies_and_moves() -> None:
    layer = nn.Linear(3, 2)
    model = DualEncoder(Linear(layer), Linear(layer), "query-document")
    assert model.num_parameters == model.num_trainable_parameters == 8
    assert list(model.state_dict()) == ["left.layer.weight", "left.layer.bias"]
    for other in (copy.deepcopy(model), copy.deepcopy(model).to(torch.float64)):
        assert other.shares_weights
        assert other.right.layer is other.left.layer
        assert other.right.layer is not layer
    layer.bias.requires_grad_(False)
    assert model.num_trainable_parameters == 6


def test_saving_replaces_a_model_and_nothing_else(model: TextEncoder, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model.save(folder)
    (folder / "stray").touch()
    model.save(folder)
    assert not (folder / "stray").exists()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "precious.txt").touch()
    with pytest.raises(DualencError, match="holds no model; choose a new or empty folder"):
        model.save(tmp_path / "notes")
    assert (tmp_path / "notes" / "precious.txt").exists()
    (tmp_path / "empty").mkdir()
    model.save(tmp_path / "empty")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_unit_norm_keeps_the_direction_in_float32_and_survives_zero(dtype: torch.dtype) -> None:
    vectors = unit_norm(torch.tensor([[3.0, 4.0], [0.0, 0.0]]).to(dtype))
    torch.testing.assert_close(vectors, torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


def test_what_is_no_item_is_named_with_its_place(model: TextEncoder, clip: dict[str, Any]) -> None:
    image_text = ImageTextEncoder(config=clip)
    image = Image.new("RGB", (32, 32))
    vector = np.ones(4, np.float32)
    for encode, valid, others in (
        (model.encode_query, "a text", [image, vector]),
        (image_text.encode_document, "a text", [image, vector]),
        (image_text.encode_query, image, ["https://example.org/a.png", vector]),
        (
            VectorEncoder(4).encode_query,
            vector,
            ["a text", image, np.array([1, np.nan, 1, 1]), np.ones((2, 4)), [1.0]],
        ),
    ):
        for bad in (None, math.nan, 3, True, b"a", ["a", ["b"]], {"text": "a"}, *others):
            with pytest.raises(BadSample, match=r"^item 1 is .*, but an? .* is required"):
                encode([valid, bad])
        for items in (None, 3, "a text", b"a", {"a": 1}, {"a"}, (text for text in "ab")):
            with pytest.raises(DualencError, match=r"items is of type \w+; give a list of"):
                encode(items)
        for nothing in ([], (), np.zeros((0, 4))):
            assert encode(nothing).shape[0] == 0


def test_a_series_is_encoded_in_its_order_whatever_its_labels(model: TextEncoder) -> None:
    pandas = pytest.importorskip("pandas")
    texts = ["a dog runs", "two cats", "Ein Ball!"]
    np.testing.assert_array_equal(
        model.encode(pandas.Series(texts, index=[2, 0, 1])), model.encode(texts)
    )
    pairs = PairDataset(
        pandas.Series(texts, index=[7, 8, 9]), pandas.Series(texts[::-1], index=[2, 0, 1])
    )
    assert [(pair.left, pair.right) for pair in pairs] == list(zip(texts, texts[::-1]))


def test_items_are_encoded_to_numpy_in_their_order(text_encoder: Any) -> None:
    texts = ["a long text of several words about ants and bees", "cat", "dogs and eels", "cat"] * 3
    model = text_encoder(query_prompt="find: ")
    for found, side in (
        (model.encode(texts, batch_size=2), "left"),
        (model.encode_query(texts), "left"),
        (model.encode_document(texts, show_progress_bar=True), "right"),
    ):
        with torch.no_grad():
            expected = torch.cat([model(side, model.tower(side).prepare([text])) for text in texts])
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


@pytest.mark.parametrize(("length", "window"), [(20, 8), (40, 4), (10**6, 2), (math.inf, 2)])
def test_few_texts_share_a_window_where_they_may_be_long(
    text_encoder: Any, monkeypatch: pytest.MonkeyPatch, length: float, window: int
) -> None:
    """A window is padded to its longest text: with texts of 30,000 tokens thousands would take all
    memory."""
    model = text_encoder()
    model.left.prepare.max_length = length
    prepare, sizes = TextPrepare.__call__, []
    monkeypatch.setattr(
        TextPrepare,
        "__call__",
        lambda self, texts: sizes.append(len(texts)) or prepare(self, texts),
    )
    monkeypatch.setattr(dual, "TOKENS_PER_WINDOW", 160)
    assert model.encode(["a dog"] * 9, batch_size=2).shape == (9, 32)
    assert set(sizes[:-1]) == {window}
