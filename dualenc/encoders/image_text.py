"""Image-text encoders on open_clip: left the images, right the texts."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dualenc.encoders import open_clip_folder
from dualenc.encoders.dual import DualEncoder, Prepare, Tower, unit_norm
from dualenc.encoders.image import ImagePrepare, Seeded
from dualenc.encoders.load import model_folder
from dualenc.encoders.open_clip_folder import (
    CONTEXT_LENGTH,
    Tokenize,
    config_tokenizer,
    folder_tokenizer,
    get_tokenizer,
)
from dualenc.encoders.tokenizer import load_tokenizer, save_tokenizer
from dualenc.errors import DualencError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

End: TypeAlias = "int | Literal['max'] | None"


class ImageTextEncoder(DualEncoder):
    """Images and texts through an open_clip model.

    Args:
        name: an open_clip name such as "ViT-B-32", a folder (`local-dir:` before it is optional), or a hub name.
        pretrained: with an open_clip name: the tag of its weights, or a safetensors file of them; None starts from
            random ones.
        config: instead of a name: an open_clip configuration with embed_dim, vision_cfg and text_cfg.
        tokenizer: with config: folder, hub name or object of a transformers tokenizer; None: open_clip's own.
        image_size: pixels per side; None: as the model says.
        context_length: longest text in tokens; None: as the model says.
        mean: of each colour channel in [0, 1], to normalise by; None: as the model says.
        std: standard deviation of each channel; likewise.
        crop_scale: smallest and largest share of an image's area that training crops to.
        pretrained_towers: load the weights that timm or transformers towers inside the configuration have.
        gradient_checkpointing: recompute activations in the backward pass instead of storing them.

    Raises:
        DualencError: the model does not load, or an argument is missing or does not fit the others.
    """

    left: ClipImageTower
    right: ClipTextTower

    def __init__(
        self,
        name: str | None = None,
        pretrained: str | None = None,
        *,
        config: dict[str, Any] | None = None,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        image_size: int | None = None,
        context_length: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        crop_scale: tuple[float, float] = (0.9, 1.0),
        pretrained_towers: bool = False,
        gradient_checkpointing: bool = False,
    ) -> None:
        options = {
            "force_image_size": image_size,
            "force_context_length": context_length,
            "force_preprocess_cfg": {"mean": mean, "std": std},
            "pretrained_image": pretrained_towers,
            "pretrained_text": pretrained_towers,
        }
        clip, own_config, tokenize = _create(name, pretrained, config, tokenizer, options)
        if gradient_checkpointing:
            clip.set_grad_checkpointing(True)
        visual = clip.visual
        del clip.visual  # each half belongs to one tower
        for scalar in (clip.logit_scale, clip.logit_bias):
            if scalar is not None:
                scalar.requires_grad_(False)  # the objective owns the temperature
        dim = int(own_config["embed_dim"])
        super().__init__(
            ClipImageTower(visual, _image_prepare(visual.preprocess_cfg, crop_scale), dim),
            ClipTextTower(clip, ClipTextPrepare(tokenize, end_token(clip)), dim),
            kind="image-text",
        )
        self.config = own_config

    @property
    def temperature(self) -> float:
        """The temperature by which open_clip divides cosines to get logits."""
        return math.exp(-float(self.right.encoder.clip.logit_scale))

    def set_temperature(self, temperature: float) -> None:
        """Record the temperature that training ended with, for those who want open_clip's logits."""
        with torch.no_grad():
            self.right.encoder.clip.logit_scale.fill_(-math.log(temperature))

    def write(self, folder: Path) -> None:
        """Write an open_clip folder, for `local-dir:`."""
        weights = {f"visual.{name}": value for name, value in self.left.visual.state_dict().items()}
        weights |= self.right.encoder.clip.state_dict()
        preprocess = self.left.visual.preprocess_cfg
        open_clip_folder.write_folder(folder, self.config, preprocess, weights)  # type: ignore[arg-type]
        tokenizer = self.right.prepare.tokenizer
        if hasattr(tokenizer, "save_pretrained"):
            save_tokenizer(tokenizer.tokenizer, folder, tokenizer.context_length)  # type: ignore[attr-defined]

    def describe(self) -> dict[str, str]:
        """What the model is, as rows of a table."""
        size = self.left.visual.preprocess_cfg["size"]  # type: ignore[index]
        return {
            "Image size": "×".join(map(str, size)) if isinstance(size, (tuple, list)) else str(size),
            "Longest text": f"{self.config['text_cfg'].get('context_length', CONTEXT_LENGTH)} tokens",
            "Temperature": f"{self.temperature:.4g}",
            **super().describe(),
        }


class ClipTextPrepare(Prepare):
    """Tokenize to the model's context length, then cut the columns that no text of the batch reaches.

    Args:
        tokenizer: open_clip tokenizer, texts to (B, context length) ids.
        end: the id at which the tower reads its output; "max" for the largest id of each text; None when the
            tower looks at the padding, so that nothing may be cut.
    """

    modality = "text"

    def __init__(self, tokenizer: Callable[[list[str]], Tensor], end: End) -> None:
        self.tokenizer = tokenizer
        self.end: End = end

    def __call__(self, items: Sequence[str], seeds: Sequence[int] | None = None) -> dict[str, Tensor]:
        tokens = self.tokenizer(list(items))
        if self.end is None:
            return {"text": tokens}
        at_end = tokens.argmax(1) if self.end == "max" else tokens.eq(self.end).int().argmax(1)
        return {"text": tokens[:, : int(at_end.max()) + 1]}

    def lengths(self, items: Sequence[str]) -> list[int]:
        """Characters of each text."""
        return [len(text) for text in items]


class ClipTextTower(Tower):
    """The text half of an open_clip model.

    Args:
        clip: an open_clip model whose `visual` was taken out.
        prepare: its tokenizer.
        dim: D, the size of the vectors.
    """

    modality = "text"

    def __init__(self, clip: nn.Module, prepare: ClipTextPrepare, dim: int) -> None:
        super().__init__()
        self.encoder = _TextModel(clip)
        self.prepare: ClipTextPrepare = prepare
        self.dim = self.feature_dim = dim

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Encode token ids (B, T), T at most the context length, to (B, D) unit-norm float32."""
        tokens = inputs["text"]
        prefix, transformer = _causal_transformer(self.encoder.clip)
        length = tokens.shape[1]
        if transformer is None or length == len(transformer.positional_embedding):
            return unit_norm(self.encoder(tokens))
        # Under a causal mask what follows the output token is never seen: the same vectors for less work.
        shorter = {
            f"clip.{prefix}positional_embedding": transformer.positional_embedding[:length],
            f"clip.{prefix}attn_mask": transformer.attn_mask[:length, :length],
        }
        return unit_norm(functional_call(self.encoder, shorter, (tokens,)))


class _TextModel(nn.Module):
    """`encode_text` as a forward."""

    clip: Any

    def __init__(self, clip: nn.Module) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, tokens: Tensor) -> Tensor:
        return self.clip.encode_text(tokens)


def _causal_transformer(clip: nn.Module) -> tuple[str, Any]:
    """Prefix and module that hold positions and causal mask; (.., None) for other kinds of text tower."""
    prefix, module = ("text.", clip.text) if hasattr(clip, "text") else ("", clip)
    causal = isinstance(getattr(module, "attn_mask", None), Tensor) and getattr(module, "cls_emb", None) is None
    return prefix, module if causal else None


def end_token(clip: nn.Module) -> End:
    """Where a causal text tower reads its output, as `ClipTextPrepare` wants it; None if nothing may be cut."""
    _, module = _causal_transformer(clip)
    if module is None:
        return None
    pooling = getattr(module, "text_pool_type", None) or getattr(module, "pool_type", None)
    if pooling == "eos":
        return int(module.text_eos_id if hasattr(module, "text_eos_id") else module.eos_id)
    return "max" if pooling == "argmax" else None


class ClipImageTower(Tower):
    """The image half of an open_clip model.

    Args:
        visual: its `visual`, pixels to (B, D).
        prepare: its preprocessing.
        dim: D, the size of the vectors.
    """

    modality = "image"

    def __init__(self, visual: nn.Module, prepare: ImagePrepare, dim: int) -> None:
        super().__init__()
        self.visual = visual
        self.prepare: ImagePrepare = prepare
        self.dim = self.feature_dim = dim

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Encode pixels (B, 3, H, W) to (B, D) unit-norm float32."""
        return unit_norm(self.visual(inputs["image"]))


def is_registered(name: str | None) -> bool:
    """Whether open_clip knows an architecture of this name."""
    import open_clip

    return name in open_clip.list_models()


def _create(
    name: str | None,
    pretrained: str | None,
    config: dict[str, Any] | None,
    tokenizer: str | PreTrainedTokenizerBase | None,
    options: dict[str, Any],
) -> tuple[Any, dict[str, Any], Tokenize]:
    """The open_clip model, its configuration, and its tokenizer."""
    if (name is None) == (config is None):
        raise DualencError("give either the name of an open_clip model or a config to start from scratch")
    if tokenizer is not None and config is None:
        raise DualencError(f"{name} has its own tokenizer: leave tokenizer out, it goes with config")
    if pretrained is not None and not is_registered(name):
        raise DualencError(f"pretrained={pretrained} goes with an open_clip name: leave it out")
    if (
        pretrained is not None
        and os.path.exists(pretrained)
        and not (os.path.isfile(pretrained) and pretrained.endswith(".safetensors"))
    ):
        raise DualencError(f"pretrained={pretrained} is no safetensors file; convert the weights to safetensors first")
    if name is None:
        own = copy.deepcopy(config or {})
        open_clip_folder.check_config(own, "config")
        _override(own, options)
        tokenize = config_tokenizer(own, None if tokenizer is None else load_tokenizer(tokenizer))
        return open_clip_folder.create(own, **options), own, tokenize
    length = options["force_context_length"]
    if is_registered(name):
        own = open_clip_folder.registered_config(name)
        open_clip_folder.check_config(own, name)
        _override(own, options)
        clip = open_clip_folder.create(name, pretrained=pretrained, **options)
        return clip, own, get_tokenizer(name, own, length)
    folder = model_folder(name)
    own = open_clip_folder.folder_config(folder)
    _override(own, options)
    tokenize = folder_tokenizer(folder, own, length)
    return open_clip_folder.load_folder(folder, **options), own, tokenize


def _override(config: dict[str, Any], options: dict[str, Any]) -> None:
    """Write into the configuration what the user sets otherwise."""
    for section, key in (("vision_cfg", "image_size"), ("text_cfg", "context_length")):
        if options[f"force_{key}"] is not None:
            config[section][key] = options[f"force_{key}"]


def _image_prepare(settings: dict[str, Any], crop_scale: tuple[float, float]) -> ImagePrepare:
    from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2

    low, high = crop_scale
    if not 0 < low <= high <= 1:
        raise DualencError(f"crop_scale is ({low}, {high}): give two increasing shares of the area in (0, 1]")
    preprocess = PreprocessCfg(**settings)
    train = image_transform_v2(preprocess, is_train=True, aug_cfg=AugmentationCfg(scale=(low, high)))
    return ImagePrepare(image_transform_v2(preprocess, is_train=False), Seeded(train))
