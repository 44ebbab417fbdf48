"""Adapters are what trains, and are merged into what is saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import PreTrainedTokenizerBase

from dualenc.encoders import TextEncoder, load_model
from dualenc.errors import DualencError

pytest.importorskip("peft", reason="peft is not installed: pip install 'dualenc[lora]'")


@pytest.fixture
def model(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> TextEncoder:
    torch.manual_seed(0)
    return TextEncoder(config=bert, tokenizer=tokenizer, lora_rank=2, lora_targets=["query", "value"])


def test_only_adapters_train(model: TextEncoder) -> None:
    # 2 layers × (query, value) × rank 2 × (32 inputs + 32 outputs)
    assert model.num_trainable_parameters == 2 * 2 * 2 * 64
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)


def test_all_linear_leaves_the_unused_pooler_out(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    model = TextEncoder(config=bert, tokenizer=tokenizer, lora_rank=2)
    adapted = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(adapted) == 2 * 6 * 2  # layers × linear maps × (A, B)
    assert not any("pooler" in name for name in adapted)


def test_a_step_moves_adapters_alone_and_the_saved_model_has_them_merged(
    model: TextEncoder, texts: list[str], tmp_path: Path
) -> None:
    inputs = model.left.prepare(texts)
    untrained = model.encode("left", inputs).detach()
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=50.0)
    for _ in range(2):
        optimizer.zero_grad()
        model.encode("left", inputs)[:, 0].sum().backward()
        optimizer.step()
    assert all(torch.equal(frozen[name], p) for name, p in model.named_parameters() if name in frozen)
    trained = model.encode("left", inputs).detach()
    assert (trained - untrained).abs().max() > 0.01

    model.save(tmp_path / "model")
    assert torch.equal(model.encode("left", inputs), trained)  # saving changed nothing
    reloaded = load_model(tmp_path / "model")
    assert not any("lora" in name for name in reloaded.state_dict())
    assert (reloaded.encode("left", inputs) - trained).abs().max() < 1e-5
    other = SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(texts)
    assert (torch.tensor(other) - trained).abs().max() < 1e-5


@pytest.mark.parametrize("arguments", [{"lora_targets": ["no_such_layer"]}, {"lora_rank": -1}])
def test_unfit_arguments(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase, arguments: Any) -> None:
    with pytest.raises(DualencError, match="LoRA") as caught:
        TextEncoder(config=bert, tokenizer=tokenizer, **{"lora_rank": 2, **arguments})
    assert "\n" not in str(caught.value)


def test_without_peft(
    bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(DualencError, match=r"pip install 'dualenc\[lora\]'"):
        TextEncoder(config=bert, tokenizer=tokenizer, lora_rank=2)


def test_what_adapters_leave_alone_may_be_in_bfloat16(
    bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase, texts: list[str], tmp_path: Path
) -> None:
    found = {}
    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(0)
        model = TextEncoder(config=bert, tokenizer=tokenizer, lora_rank=2, dtype=dtype).train()
        inputs = model.left.prepare(texts)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        assert {p.dtype for p in model.parameters() if not p.requires_grad} == {getattr(torch, dtype)}
        model.eval().encode("left", inputs)[:, 0].sum().backward()
        found[dtype] = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    for name, gradient in found["float32"].items():
        assert gradient is not None
        assert (found["bfloat16"][name] - gradient).norm() <= 0.1 * gradient.norm() + 1e-6

    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.add_(0.05)
    embedded = model.encode("left", inputs)
    assert embedded.dtype == torch.float32
    model.save(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {weight.dtype for weight in stored.values()} == {torch.bfloat16}
    assert (load_model(tmp_path / "model").encode("left", inputs) - embedded).abs().max() < 0.02


def test_bfloat16_without_adapters_is_refused(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DualencError, match="bfloat16 with lora_rank"):
        TextEncoder(config=bert, tokenizer=tokenizer, dtype="bfloat16")
