"""Adapters are what trains, and are merged into what is saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense

from dualenc.encoders import DualEncoder, ImageTextEncoder, TextEncoder, load_model
from dualenc.encoders.lora import add_adapters, merge_adapters
from dualenc.errors import DualencError

pytest.importorskip("peft", reason="peft is not installed: pip install 'dualenc[lora]'")


@pytest.fixture
def model(text_encoder: Any) -> TextEncoder:
    torch.manual_seed(0)
    return text_encoder(lora_rank=2, lora_targets=["query", "value"])


def test_only_adapters_train(model: TextEncoder) -> None:
    # 2 layers × (query, value) × rank 2 × (32 inputs + 32 outputs)
    assert model.num_trainable_parameters == 2 * 2 * 2 * 64
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lora_rank": 2, "lora_targets": ["no_such_layer"]}, "LoRA"),
        (
            {"lora_rank": 2, "lora_targets": "query"},
            r"suffixes of layer names as a list, such as \[query, value\]",
        ),
        ({"lora_rank": -1}, "LoRA"),
        ({"dtype": "bfloat16"}, "bfloat16 with lora_rank"),
    ],
)
def test_unfit_arguments(text_encoder: Any, arguments: Any, message: str) -> None:
    with pytest.raises(DualencError, match=message):
        text_encoder(**arguments)
    with pytest.raises(
        DualencError, match=r"LoRA of rank 2.*'nothing'.* not found in the base model"
    ):
        add_adapters(torch.nn.Sequential(torch.nn.Linear(2, 2)), 2, targets=["nothing"])


def test_a_step_moves_adapters_alone_and_the_saved_model_has_them_merged(
    model: TextEncoder, texts: list[str], tmp_path: Path
) -> None:
    inputs = model.left.prepare(texts)
    untrained = model("left", inputs).detach()
    trained, _ = trained_a_little(model, texts, texts)
    assert (trained - untrained).abs().max() > 0.01
    model.save(tmp_path / "model")
    assert torch.equal(model("left", inputs), trained)  # saving changed nothing
    reloaded = load_model(tmp_path / "model")
    assert not any("lora" in name for name in reloaded.state_dict())
    assert (reloaded("left", inputs) - trained).abs().max() < 1e-5
    other = SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(texts)
    assert (torch.tensor(other) - trained).abs().max() < 1e-5


@pytest.mark.slow
def test_what_adapters_leave_alone_may_be_in_bfloat16(
    text_encoder: Any, texts: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = text_encoder(lora_rank=2, dtype="bfloat16")
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    inputs = model.left.prepare(texts)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.add_(0.05)
    embedded = model("left", inputs)
    assert embedded.dtype == torch.float32
    model.save(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    assert (load_model(tmp_path / "model")("left", inputs) - embedded).abs().max() < 0.02


def test_a_dense_behind_a_transformer_in_bfloat16(
    text_encoder: Any, texts: list[str], tmp_path: Path
) -> None:
    text_encoder().save(tmp_path / "base")
    modules = [*SentenceTransformer(str(tmp_path / "base"), device="cpu"), Dense(32, 8)]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "theirs"))
    whole = TextEncoder(str(tmp_path / "theirs")).encode_query(texts)
    model = TextEncoder(str(tmp_path / "theirs"), lora_rank=2, dtype="bfloat16")
    dense = model.left.head[-1].linear.weight
    assert (dense.dtype, dense.requires_grad) == (torch.float32, True)
    assert np.abs(model.encode_query(texts) - whole).max() < 0.02
    model.save(tmp_path / "model")
    assert np.abs(load_model(tmp_path / "model").encode_query(texts) - whole).max() < 0.02
    assert (
        np.abs(SentenceTransformer(str(tmp_path / "model")).encode_query(texts) - whole).max()
        < 0.02
    )


def trained_a_little(model: DualEncoder, left: list[Any], right: list[str]) -> list[torch.Tensor]:
    """Vectors of both sides after a step that moves the adapters."""
    inputs = model.left.prepare(left), model.right.prepare(right)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    (model("left", inputs[0])[:, 0].sum() + model("right", inputs[1])[:, 0].sum()).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)
    torch.optim.SGD(trained, lr=0.1).step()
    assert all(
        torch.equal(frozen[name], p) for name, p in model.named_parameters() if name in frozen
    )
    with torch.no_grad():
        return [model("left", inputs[0]), model("right", inputs[1])]


@pytest.mark.slow
@pytest.mark.parametrize("custom_text", [False, True])
def test_both_towers_of_open_clip(
    clip: dict[str, Any], images: list[Any], texts: list[str], tmp_path: Path, custom_text: bool
) -> None:
    torch.manual_seed(0)
    model = ImageTextEncoder(config={**clip, "custom_text": custom_text}, lora_rank=4)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in names)
    for part in ("left.visual.transformer.resblocks.0", "right.clip.text.transformer.resblocks.1"):
        part = part if custom_text else part.replace(".text.", ".")
        layers = {
            name.removeprefix(f"{part}.").partition(".lora_")[0]
            for name in names
            if name.startswith(part)
        }
        assert layers == {"attn", "mlp.c_fc", "mlp.c_proj"}
    expected = trained_a_little(model, images, texts)
    model.save(tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert not any("lora" in name for name in again.state_dict())
    for side, items, vectors in (("left", images, expected[0]), ("right", texts, expected[1])):
        found = again(side, again.tower(side).prepare(items))  # type: ignore[arg-type]
        assert (found - vectors).abs().max() < 2e-6
    place = f"local-dir:{tmp_path / 'model'}"
    other = open_clip.create_model_and_transforms(place)[0].eval()
    pixels = model.left.prepare(images)["image"]
    assert (other.encode_image(pixels, normalize=True) - expected[0]).abs().max() < 1e-5


def test_a_tower_whose_layers_are_never_called_is_refused(clip: dict[str, Any]) -> None:
    """CLIP's ResNets have no other layers than those of their pooling, which reads the weights
    alone."""
    clip["vision_cfg"] = {
        "image_size": 64,
        "layers": [1, 1, 1, 1],
        "width": 32,
        "head_width": 16,
        "patch_size": None,
    }
    with pytest.raises(DualencError, match="LoRA of rank 4"):
        ImageTextEncoder(config=clip, lora_rank=4)


class Attention(torch.nn.Module):
    """Attention of torch with one matrix of projections, or with one per input, and a layer behind
    it."""

    def __init__(self, other_size: int) -> None:
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(
            16, 2, kdim=other_size, vdim=other_size, batch_first=True
        )
        self.last = torch.nn.Linear(16, 16)

    def forward(self, query: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self.last(self.attn(query, other, other, need_weights=False)[0])


@pytest.mark.parametrize(
    ("other_size", "names"), [(16, ["in_proj"]), (12, ["k_proj", "q_proj", "v_proj"])]
)
def test_attention_reads_weights_with_adapters(other_size: int, names: list[str]) -> None:
    torch.manual_seed(0)
    model = Attention(other_size)
    whole = copy.deepcopy(model)
    add_adapters(model, 2)
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inputs = torch.randn(3, 5, 16), torch.randn(3, 4, other_size)
    assert torch.equal(model(*inputs), whole(*inputs))  # B begins at zero
    for name, parameter in adapters.items():
        assert "lora_" in name
        torch.nn.init.normal_(parameter, std=0.3)
    model(*inputs).sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in adapters.values())
    before = {name: weight.clone() for name, weight in whole.state_dict().items()}
    merged = merge_adapters(model).state_dict()
    whole.load_state_dict(merged)
    torch.testing.assert_close(whole(*inputs), model(*inputs), atol=1e-5, rtol=0)
    changed = {name for name, weight in before.items() if not torch.equal(merged[name], weight)}
    assert changed == {"last.weight", *(f"attn.{name}_weight" for name in names)}


def test_merged_weights_are_those_of_the_paper() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    plain = copy.deepcopy(model)
    assert merge_adapters(model) is model
    add_adapters(model, 2, targets=["2"])
    low_rank: Any = model[2]
    torch.nn.init.normal_(low_rank.lora_B["default"].weight)
    change = 2 * low_rank.lora_B["default"].weight @ low_rank.lora_A["default"].weight  # W + 2·BA
    state = merge_adapters(model).state_dict()
    torch.testing.assert_close(state["2.weight"], plain[2].weight + change)
    assert torch.equal(state["0.weight"], plain[0].weight)
    assert [
        name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name
    ] == []
