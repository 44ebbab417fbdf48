"""CLIP, SigLIP and SigLIP 2 against transformers itself."""

from __future__ import annotations

import io
import json
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from dualenc.encoders import ImageTextEncoder, TextEncoder, VisionTextEncoder, load_model
from dualenc.errors import DualencError

HUGE_TEXT = "very " * 200 + "long"
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {
    "CLIP": {"image_size": 32, "patch_size": 16},
    "Siglip": {"image_size": 32, "patch_size": 16},
    "Siglip2": {"num_patches": 16, "patch_size": 16},
}


def make(family: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """A small random model of a family, written by transformers."""
    text = {
        **SMALL,
        "vocab_size": 400,
        "max_position_embeddings": 20,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
    }
    torch.manual_seed(0)
    projection = {"projection_dim": 24} if family == "CLIP" else {}
    kind = getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}Model")(
        kind(text_config=text, vision_config=SMALL | VISION[family], **projection)
    )
    with torch.no_grad():
        for parameter in model.parameters():  # as they begin, biases are 0 and tell nothing
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings: dict[str, Any] = {
        "CLIP": {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        "Siglip": {"size": {"height": 32, "width": 32}},
        "Siglip2": {"patch_size": 16, "max_num_patches": 16},
    }[family]
    getattr(transformers, f"{family}ImageProcessor")(**settings).save_pretrained(folder)
    return folder


@pytest.fixture(params=list(VISION))
def folder(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    return make(request.param, tokenizer, tmp_path / "source")


@torch.no_grad()
def reference(
    folder: Path, images: list[Image.Image], texts: list[str], padding: str | bool = "max_length"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The vectors of images and texts by transformers alone, texts padded as the models' authors tell to."""
    model = AutoModel.from_pretrained(folder).eval()
    pixels = AutoImageProcessor.from_pretrained(folder)(images=images, return_tensors="pt")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    names = [n for n in ("input_ids", "attention_mask") if n in tokenizer.model_input_names]
    tokens = tokenizer(texts, padding=padding, truncation=True, max_length=20, return_tensors="pt")
    left = model.get_image_features(**pixels).pooler_output
    right = model.get_text_features(**{name: tokens[name] for name in names}).pooler_output
    return left / left.norm(dim=1, keepdim=True), right / right.norm(dim=1, keepdim=True)


@pytest.mark.slow
@torch.no_grad()
def test_vectors_are_those_of_transformers_before_and_after_saving(
    folder: Path, images: list[Image.Image], texts: list[str], tmp_path: Path
) -> None:
    model = load_model(folder)
    assert isinstance(model, VisionTextEncoder)
    assert model.kind == "image-text"
    model.set_temperature(0.02)
    model.save(tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    assert isinstance(again, VisionTextEncoder)
    assert again.temperature == pytest.approx(0.02, rel=1e-5)
    for given in (texts, texts[:1], [HUGE_TEXT]):
        for place in (folder, tmp_path / "saved"):
            left, right = reference(place, images, given)
            for tower, items, expected in (("left", images, left), ("right", given, right)):
                for own in (model, again):
                    found = own(tower, own.tower(tower).prepare(items))  # type: ignore[arg-type]
                    assert (found - expected).abs().max() < 1e-5
    scale = AutoModel.from_pretrained(tmp_path / "saved").logit_scale.exp().item()
    assert scale == pytest.approx(50, rel=1e-5)
    assert "AutoModel.from_pretrained" in (tmp_path / "saved" / "README.md").read_text()


def test_crops_are_functions_of_image_and_seed(folder: Path, images: list[Image.Image]) -> None:
    prepare = VisionTextEncoder(str(folder), crop_scale=(0.3, 0.6)).left.prepare
    other = pickle.loads(pickle.dumps(prepare))
    torch.manual_seed(1)
    first = prepare(images, seeds=[1, 2, 3])
    second = other(images[1:], seeds=[2, 3])
    for name in first:
        torch.testing.assert_close(first[name][1:], second[name])
    assert not torch.equal(prepare(images, seeds=[4, 5, 6])["pixel_values"], first["pixel_values"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: VisionTextEncoder(folder, max_length=21), "max_length is 21"),
        (lambda folder: VisionTextEncoder(folder, crop_scale=(0.9, 0.1)), "crop_scale"),
        (ImageTextEncoder, "use VisionTextEncoder"),
        (TextEncoder, "type clip is no text encoder"),
    ],
)
def test_refusals(call: Any, message: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(DualencError, match=message):
        call(str(make("CLIP", tokenizer, tmp_path)))


@pytest.mark.slow
def test_code_in_a_folder_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(folder.parent / "modules"))
    canary = folder.parent / "canary"
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Thing: pass\n")
    names = ("AutoConfig", "AutoModel", "AutoImageProcessor", "AutoProcessor", "AutoTokenizer")
    auto_map = {"auto_map": dict.fromkeys(names, "evil.Thing")}
    for file in ("config.json", "preprocessor_config.json", "tokenizer_config.json"):
        held = json.loads((folder / file).read_text())
        unknown = {"image_processor_type": "Thing", "tokenizer_class": "Thing"}
        (folder / file).write_text(json.dumps(held | auto_map | unknown))
    with suppress(DualencError):
        load_model(folder)
    assert not canary.exists()
