"""Image-text encoders against open_clip itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from open_clip.transformer import QuickGELU
from PIL import Image
from tokenizers.processors import ByteLevel
from torch import nn
from transformers import PreTrainedTokenizerBase

from dualenc.encoders import ImageTextEncoder, load_model
from dualenc.errors import DualencError

HUGE_TEXT = "very " * 200 + "long"


@pytest.fixture(params=["open_clip's tokenizer", "own tokenizer", "custom text tower"])
def model(
    request: pytest.FixtureRequest, clip: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> ImageTextEncoder:
    torch.manual_seed(0)
    if request.param == "custom text tower":
        clip["custom_text"] = True
    own = None if request.param == "open_clip's tokenizer" else tokenizer
    return ImageTextEncoder(config=clip, tokenizer=own)


@pytest.mark.parametrize("trained_with", [nn.GELU, QuickGELU])
def test_weights_by_a_tag_get_the_activation_that_they_were_trained_with(
    clip: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained_with: type[nn.Module],
) -> None:
    """open_clip's tags of ViT-B-32 need QuickGELU, and open_clip only warns; the saved folder says
    so."""
    ImageTextEncoder(config=clip).save(tmp_path / "theirs")
    weights = tmp_path / "theirs" / "open_clip_model.safetensors"
    tag = {"url": "", "quick_gelu": trained_with is QuickGELU}
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny", clip)
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "tiny", {"tag": tag})
    monkeypatch.setattr(
        open_clip.factory, "download_pretrained", lambda *args, **options: str(weights)
    )
    model = ImageTextEncoder("tiny", "tag")
    model.save(tmp_path / "ours")
    for each in (model, load_model(tmp_path / "ours")):
        kinds = {type(layer) for layer in each.modules() if isinstance(layer, (nn.GELU, QuickGELU))}
        assert kinds == {trained_with}
    config = json.loads((tmp_path / "ours" / "open_clip_config.json").read_text())["model_cfg"]
    assert config.get("quick_gelu", False) is (trained_with is QuickGELU)


def siglip(clip: dict[str, Any]) -> dict[str, Any]:
    """SigLIP as open_clip configures it, small: a timm tower, a bias, texts without causal mask
    read at their end."""
    text = {
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
    }
    vision = {
        "timm_model_name": "test_vit",
        "timm_pool": "avg",
        "timm_proj": "linear",
        "image_size": 32,
    }
    return {
        "embed_dim": 24,
        "custom_text": True,
        "init_logit_bias": -10,
        "vision_cfg": vision,
        "text_cfg": clip["text_cfg"] | text,
    }


def coca(clip: dict[str, Any]) -> dict[str, Any]:
    """CoCa as open_clip configures it, small."""
    vision = {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True}
    decoder = {"width": 24, "heads": 2, "layers": 1, "attn_pooler_heads": 2, "context_length": 19}
    text = {"context_length": 19, "embed_cls": True, "output_tokens": True}
    return {
        "embed_dim": 24,
        "custom_text": True,
        "multimodal_cfg": decoder,
        "vision_cfg": clip["vision_cfg"] | vision,
        "text_cfg": clip["text_cfg"] | text,
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", [siglip, coca])
def test_siglip_and_coca_against_open_clip(
    family: Any, clip: dict[str, Any], texts: list[str], images: list[Image.Image], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = ImageTextEncoder(config=family(clip)).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    pixels, tokens = model.left.prepare(images), model.right.prepare(texts[:3])
    (model("left", pixels) * model("right", tokens)).sum().backward()
    optimizer.step()
    assert all(p.grad is None for n, p in model.named_parameters() if "text_decoder" in n)
    model.eval().save(tmp_path / "model")
    place = f"local-dir:{tmp_path / 'model'}"
    reference, _, preprocess = open_clip.create_model_and_transforms(place)
    reference.eval()
    assert (reference.logit_bias is not None) == (family is siglip)
    with torch.no_grad():
        whole = torch.stack([preprocess(image) for image in images])
        expected = reference.encode_image(whole, normalize=True)
        captions = reference.encode_text(open_clip.get_tokenizer(place)(texts), normalize=True)
        for found in (model, load_model(tmp_path / "model")):
            assert (found("left", found.left.prepare(images)) - expected).abs().max() < 1e-5
            assert (found("right", found.right.prepare(texts)) - captions).abs().max() < 1e-5


@pytest.mark.slow
@torch.no_grad()
def test_saved_model_loads_in_open_clip_with_equal_vectors(
    model: ImageTextEncoder, texts: list[str], images: list[Image.Image], tmp_path: Path
) -> None:
    model.set_temperature(0.02)
    model.save(tmp_path / "model")
    place = f"local-dir:{tmp_path / 'model'}"
    reference, _, preprocess = open_clip.create_model_and_transforms(place)
    tokenize = open_clip.get_tokenizer(place)
    reference.eval()
    again = load_model(tmp_path / "model")
    assert isinstance(again, ImageTextEncoder)

    pixels = model.left.prepare(images)
    assert torch.equal(pixels["image"], torch.stack([preprocess(image) for image in images]))
    assert torch.equal(again.left.prepare(images)["image"], pixels["image"])
    expected = reference.encode_image(pixels["image"], normalize=True)
    assert (model("left", pixels) - expected).abs().max() < 1e-5
    assert (again("left", pixels) - expected).abs().max() < 1e-5

    for given in (texts, texts[:1], [HUGE_TEXT]):
        expected = reference.encode_text(tokenize(given), normalize=True)
        for side in (model.right, again.right):
            assert (side(side.prepare(given)) - expected).abs().max() < 1e-5
    assert reference.logit_scale.exp().item() == pytest.approx(50, rel=1e-5)
    assert again.temperature == pytest.approx(0.02, rel=1e-5)


def test_short_texts_cost_less_and_gradients_are_the_same(model: ImageTextEncoder) -> None:
    short = model.right.prepare(["a dog"])["text"]
    assert short.shape[1] < 12
    whole = model.right.prepare.tokenizer(["a dog"])
    assert whole.shape[1] == 20
    gradients = []
    for tokens in (short, whole):
        model.zero_grad()
        model("right", {"text": tokens})[:, 0].sum().backward()
        gradients.append(
            {n: p.grad.clone() for n, p in model.right.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name])


def test_towers_hold_every_weight_once(clip: dict[str, Any]) -> None:
    model = ImageTextEncoder(config=clip)
    reference = open_clip.model.CLIP(
        **{k: clip[k] for k in ("embed_dim", "vision_cfg", "text_cfg")}
    )
    assert model.num_parameters == sum(p.numel() for p in reference.parameters())
    assert len(model.state_dict()) == len(reference.state_dict())
    assert not model.shares_weights
    # the objective owns the temperature
    assert model.num_parameters - model.num_trainable_parameters == 1


@pytest.mark.slow
def test_image_size_and_context_length_can_be_set(clip: dict[str, Any], tmp_path: Path) -> None:
    model = ImageTextEncoder(config=clip, image_size=48, context_length=9)
    model.save(tmp_path / "model")
    for each in (model, load_model(tmp_path / "model")):
        assert each.left.prepare([Image.new("RGB", (60, 50))])["image"].shape == (1, 3, 48, 48)
        assert each.right.prepare([HUGE_TEXT])["text"].shape == (1, 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a name or a config"),
        ({"name": "ViT-B-32", "config": {}}, "either a name or a config"),
        ({"name": "ViT-B-32", "tokenizer": "x"}, "leave tokenizer out"),
        ({"name": "./here", "pretrained": "openai"}, "requires an open_clip name"),
        ({"name": "ViT-B-32", "pretrained": "no-such-tag"}, "not a known tag"),
        ({"config": {"embed_dim": 3}}, "vision_cfg, text_cfg missing"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DualencError, match=message):
        ImageTextEncoder(**arguments)


def test_a_tokenizer_without_an_end_token_is_refused(
    clip: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    """The vector would be read at whatever token the word "a" has."""
    tokenizer.backend_tokenizer.post_processor = ByteLevel()
    with pytest.raises(DualencError, match=r"does not append an end token.*; add a post-processor"):
        ImageTextEncoder(config=clip, tokenizer=tokenizer)
    clip["text_cfg"] |= {"pool_type": "last", "eos_id": 0}
    ImageTextEncoder(config=clip, tokenizer=tokenizer)


def test_a_size_that_a_folder_cannot_say_is_refused(clip: dict[str, Any], tmp_path: Path) -> None:
    """Of towers of timm that take one size; those of open_clip are resized, and convolutions take
    any."""
    tower = {"timm_model_name": "vit_tiny_patch16_224", "timm_pool": "avg", "timm_proj": "linear"}
    whole = {**clip, "vision_cfg": {**tower, "image_size": 224}}
    message = (
        r"image_size is 96, but vit_tiny_patch16_224 requires 224 pixels; leave image_size out"
    )
    for config, size in ((whole, 96), ({**clip, "vision_cfg": {**tower, "image_size": 96}}, None)):
        with pytest.raises(DualencError, match=message):
            ImageTextEncoder(config=config, image_size=size)
    ImageTextEncoder(config=whole, image_size=224).save(tmp_path / "model")
    with pytest.raises(DualencError, match=message):
        ImageTextEncoder(str(tmp_path / "model"), image_size=96)
    convolutions = {
        "timm_model_name": "test_resnet",
        "timm_pool": "avg",
        "timm_proj": "linear",
        "image_size": 160,
    }
    ImageTextEncoder(config={**clip, "vision_cfg": convolutions}, image_size=64).save(
        tmp_path / "small"
    )
    assert (
        load_model(tmp_path / "small").left.prepare([Image.new("RGB", (60, 50))])["image"].shape[-1]
        == 64
    )


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("vision_cfg", {"no_such_field": 1}, "no_such_field"),
        ("text_cfg", {"vocab_size": 100}, "open_clip's tokenizer needs 49408"),
    ],
)
def test_unfit_configurations(
    clip: dict[str, Any], section: str, change: dict[str, Any], message: str
) -> None:
    clip[section] |= change
    with pytest.raises(DualencError, match=message):
        ImageTextEncoder(config=clip)
