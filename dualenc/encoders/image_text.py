"""Image-text encoders on open_clip, left the images, right the texts; their folder, read and
written."""

from __future__ import annotations

import copy
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dualenc.encoders.card import base_metadata
from dualenc.encoders.dual import DualEncoder, Prepare, Tower, check_items, unit_norm
from dualenc.encoders.hub import model_folder, quiet_loading
from dualenc.encoders.image import ImagePrepare, check_crop_scale, checked_pixels, seeded_transform
from dualenc.encoders.limits import check_sizes
from dualenc.encoders.lora import add_adapters, merge_adapters
from dualenc.encoders.tokenizer import forget_last_call, load_tokenizer
from dualenc.encoders.weights import count_weights, save_weights
from dualenc.errors import DualencError, explain
from dualenc.io.files import write_json
from dualenc.io.reading import check_fields, read_json_object
from dualenc.types import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenize: TypeAlias = Callable[[list[str]], Tensor]
"""Texts to token ids (B, context length)."""
EndToken: TypeAlias = "int | Literal['max'] | None"

CONTEXT_LENGTH = 77
VOCAB_SIZE = 49408
"""open_clip's defaults, of the original CLIP."""

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
WEIGHTS_FILES = (WEIGHTS_FILE, "open_clip_pytorch_model.safetensors", "model.safetensors")
SECTIONS = ("embed_dim", "vision_cfg", "text_cfg")
TOKENIZER_ARGUMENTS = (
    "clean",
    "strip_sep_token",
    "language",
    "additional_special_tokens",
    "reduction_mask",
)
"""Arguments that cannot lead a tokenizer to other files or to code."""


class ImageTextEncoder(DualEncoder):
    """Images and texts through an open_clip model: CLIP, SigLIP, or the two towers of CoCa.

    CoCa's (Yu et al. 2022, arXiv 2205.01917) text decoder stays in the model as it is, and in its
    folder.

    Args:
        name: an open_clip name such as "ViT-B-32", a folder (`local-dir:` before it is optional),
            or a hub name.
        pretrained: with an open_clip name: the tag of its weights, or a safetensors file of them;
            None starts from random ones.
        config: instead of a name: an open_clip configuration with embed_dim, vision_cfg and
            text_cfg.
        tokenizer: with config: folder, hub name or object of a transformers tokenizer; None:
            open_clip's own.
        image_size: pixels per side; None: the model's default.
        context_length: longest text in tokens; None: the model's default.
        crop_scale: smallest and largest share of an image's area that training crops to.
        gradient_checkpointing: recompute activations in the backward pass instead of storing them.
        lora_rank: train adapters of this rank in both towers instead of their own weights; 0 trains
            the weights.
        lora_targets: "all-linear", a list of endings of the names of layers, or a regular
            expression of whole names.
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
        crop_scale: tuple[float, float] = (0.9, 1.0),
        gradient_checkpointing: bool = False,
        lora_rank: int = 0,
        lora_targets: str | list[str] = "all-linear",
    ) -> None:
        check_crop_scale(crop_scale)
        _check_arguments(name, pretrained, config, tokenizer)
        arguments = name, pretrained, config, tokenizer, image_size, context_length
        clip, own_config, tokenize = load_clip(*arguments)
        if gradient_checkpointing:
            clip.set_grad_checkpointing(True)
        visual = clip.visual
        # Each half belongs to one tower.
        del clip.visual
        if lora_rank:
            for half in (visual, clip):
                add_adapters(half, lora_rank, lora_targets)
        _freeze_unused(clip)
        dim = int(own_config["embed_dim"])
        source = name or "config"
        # Of a foreign folder, these settings may be anything.
        advice = "correct its preprocess_cfg and tokenizer"
        with explain(f"{source}: does not prepare images and texts", advice):
            prepare_image = _image_prepare(visual.preprocess_cfg, crop_scale)
            size = visual.image_size
            sides = (size, size) if isinstance(size, int) else size
            checked_pixels(prepare_image.evaluate, (3, *sides))
            prepare_text = ClipTextPrepare(tokenize, _end_token(clip), _token_ids(clip))
            prepare_text(["a", "a " * dim])
        super().__init__(
            ClipImageTower(visual, prepare_image, dim),
            ClipTextTower(clip, prepare_text, dim),
            kind="image-text",
        )
        self.config = own_config
        if name is not None and not is_open_clip_name(name):
            self.base = base_metadata(name)

    @property
    def temperature(self) -> float:
        """The temperature by which open_clip divides cosines to get logits."""
        return math.exp(-float(self.right.clip.logit_scale))

    def set_temperature(self, temperature: float) -> None:
        """Store the temperature that training ended with, for open_clip's logits."""
        with torch.no_grad():
            self.right.clip.logit_scale.fill_(-math.log(temperature))

    def write(self, folder: Path) -> None:
        """Write an open_clip folder, for `local-dir:`."""
        config = copy.deepcopy(self.config)
        # Towers are complete here: nothing is to be fetched when the folder is loaded.
        config["vision_cfg"].pop("timm_model_pretrained", None)
        config["text_cfg"].pop("hf_model_pretrained", None)
        visual: Any = self.left.visual
        known = visual.preprocess_cfg
        names = ("mean", "std", "interpolation", "resize_mode")
        preprocess = {name: known[name] for name in names if name in known}
        write_json(folder / CONFIG_FILE, {"model_cfg": config, "preprocess_cfg": preprocess})
        weights = {
            f"visual.{name}": value for name, value in merge_adapters(visual).state_dict().items()
        }
        weights |= merge_adapters(self.right.clip).state_dict()
        save_weights(weights, folder / WEIGHTS_FILE)
        tokenizer: Any = self.right.prepare.tokenizer
        if hasattr(tokenizer, "save_pretrained"):  # one of transformers inside open_clip's
            tokenizer.tokenizer.model_max_length = tokenizer.context_length
            forget_last_call(tokenizer.tokenizer)
            tokenizer.save_pretrained(folder)


def _freeze_unused(clip: Any) -> None:
    """Freeze open_clip's own temperature, as the objective has one, and CoCa's decoder, which
    writes captions."""
    for scalar in (clip.logit_scale, clip.logit_bias):
        if scalar is not None:
            scalar.requires_grad_(False)
    if hasattr(clip, "text_decoder"):
        clip.text_decoder.requires_grad_(False)


def _image_prepare(
    preprocess_config: dict[str, Any], crop_scale: tuple[float, float]
) -> ImagePrepare:
    from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2

    preprocess = PreprocessCfg(**preprocess_config)
    train = image_transform_v2(preprocess, is_train=True, aug_cfg=AugmentationCfg(scale=crop_scale))
    evaluate = image_transform_v2(preprocess, is_train=False)
    return ImagePrepare(evaluate, partial(seeded_transform, transform=train), preprocess_config)


class ClipImageTower(Tower):
    """The image half of an open_clip model: its `visual`, pixels (B, 3, H, W) to (B, D)."""

    modality = "image"

    def __init__(self, visual: nn.Module, prepare: ImagePrepare, dim: int) -> None:
        super().__init__()
        self.visual = visual
        self.prepare: ImagePrepare = prepare
        self.dim = self.feature_dim = dim

    def forward(self, inputs: Inputs) -> Tensor:
        """Encode pixels (B, 3, H, W) to (B, D) unit-norm float32."""
        vectors = self.visual(inputs["image"])
        # With those of CoCa come its tokens.
        return unit_norm(vectors[0] if isinstance(vectors, tuple) else vectors)


class ClipTextPrepare(Prepare):
    """Tokenize by an open_clip tokenizer, and cut the columns that no text of the batch reaches.

    Args:
        tokenizer: texts to (B, context length) ids.
        end: the id at which the tower reads its output; "max": the largest id of each text; None:
            nothing may be cut.
        ids: those that the tower knows; a published tokenizer may have more, which no text gives.
    """

    modality = "text"

    def __init__(self, tokenizer: Tokenize, end: EndToken, ids: range) -> None:
        self.tokenizer = tokenizer
        self.end: EndToken = end
        self.ids = ids

    def __call__(self, items: Sequence[str], seeds: Sequence[int] | None = None) -> Inputs:
        check_items(items, "text")
        tokens = self.tokenizer(list(items))
        if (last := int(tokens.max())) not in self.ids:
            problem = f"the tokenizer gives the id {last}, but the model has {len(self.ids)} token vectors"
            raise DualencError(f"{problem}; give the model its own tokenizer")
        if self.end is None:
            return {"text": tokens}
        ends = tokens if self.end == "max" else tokens.eq(self.end).int()
        last = int(ends.argmax(dim=1).max())
        return {"text": tokens[:, : last + 1]}


class ClipTextTower(Tower):
    """The text half of an open_clip model, whose `visual` was taken out."""

    modality = "text"

    def __init__(self, clip: nn.Module, prepare: ClipTextPrepare, dim: int) -> None:
        super().__init__()
        self.clip: Any = clip
        self.prepare: ClipTextPrepare = prepare
        self.dim = self.feature_dim = dim

    def forward(self, inputs: Inputs) -> Tensor:
        """Encode token ids (B, T), T at most the context length, to (B, D) unit-norm float32."""
        tokens = inputs["text"]
        length = tokens.shape[1]
        prefix, transformer = _causal_transformer(self.clip)
        if transformer is None or length == len(transformer.positional_embedding):
            return unit_norm(self.clip.encode_text(tokens))
        # Under a causal mask the output token sees nothing of what follows it: the same vectors for
        # less work.
        shorter = {
            f"clip.{prefix}positional_embedding": transformer.positional_embedding[:length],
            f"clip.{prefix}attn_mask": transformer.attn_mask[:length, :length],
        }
        vectors: Tensor = functional_call(self, shorter, (inputs,))
        return vectors


def _causal_transformer(clip: nn.Module) -> tuple[str, Any]:
    """Prefix and module that hold positions and causal mask; (.., None) for other kinds of text
    tower."""
    prefix = "text." if hasattr(clip, "text") else ""
    module = clip.text if hasattr(clip, "text") else clip
    is_causal = (
        isinstance(getattr(module, "attn_mask", None), Tensor)
        and getattr(module, "cls_emb", None) is None
    )
    return prefix, module if is_causal else None


def _end_token(clip: nn.Module) -> EndToken:
    """The argument `end` of `ClipTextPrepare`."""
    _, module = _causal_transformer(clip)
    if module is None:
        return None
    pooling = getattr(module, "text_pool_type", None) or getattr(module, "pool_type", None)
    if pooling == "eos":
        return int(module.text_eos_id if hasattr(module, "text_eos_id") else module.eos_id)
    return "max" if pooling == "argmax" else None


def is_open_clip_name(name: str | None) -> bool:
    """Whether open_clip knows an architecture of this name."""
    import open_clip

    return name in open_clip.list_models()


def _check_arguments(name: str | None, pretrained: str | None, config: Any, tokenizer: Any) -> None:
    """Refuse arguments of `ImageTextEncoder` that do not go together."""
    if (name is None) == (config is None):
        raise DualencError(
            "give either the name of an open_clip model or a config to start from scratch"
        )
    if tokenizer is not None and config is None:
        raise DualencError(
            f"{name} has its own tokenizer: leave tokenizer out, it goes with config"
        )
    if pretrained is None:
        return
    if not is_open_clip_name(name):
        raise DualencError(f"pretrained={pretrained} goes with an open_clip name: leave it out")
    is_file = os.path.isfile(pretrained) and pretrained.endswith(".safetensors")
    if os.path.exists(pretrained) and not is_file:
        raise DualencError(
            f"pretrained={pretrained} is no safetensors file; convert the weights to safetensors first"
        )


def load_clip(
    name: str | None,
    pretrained: str | None,
    config: dict[str, Any] | None,
    tokenizer: str | PreTrainedTokenizerBase | None,
    image_size: int | None,
    context_length: int | None,
) -> tuple[Any, dict[str, Any], Tokenize]:
    """An open_clip model, its configuration and its tokenizer; the arguments are those of
    `ImageTextEncoder`."""
    import open_clip
    from open_clip.factory import get_pretrained_cfg, load_checkpoint

    weights = None
    with tempfile.TemporaryDirectory() as scratch:
        if config is not None:
            own = copy.deepcopy(config)
            place = f"local-dir:{scratch}"
        elif is_open_clip_name(name):
            own = open_clip.get_model_config(name)
            place = str(name)
            # The name of an architecture says GELU for weights trained with QuickGELU, where
            # open_clip only warns.
            if pretrained is not None and get_pretrained_cfg(place, pretrained).get("quick_gelu"):
                own["quick_gelu"] = True
        else:
            folder = model_folder(str(name))
            own = _folder_config(folder)
            weights = _folder_weights(folder)
            _check_size_of_weights(own, folder / CONFIG_FILE, count_weights(weights))
            place = f"local-dir:{folder}"
        where = "config" if config is not None else place.removeprefix("local-dir:")
        check_config(own, where)
        if image_size is not None:
            own["vision_cfg"]["image_size"] = image_size
        if context_length is not None:
            own["text_cfg"]["context_length"] = context_length
        if config is not None:
            _write_source(
                Path(scratch), own, None if tokenizer is None else load_tokenizer(tokenizer)
            )

        # A tokenizer of open_clip's own takes no such argument.
        options: dict[str, Any] = (
            {"trust_remote_code": False} if own["text_cfg"].get("hf_tokenizer_name") else {}
        )
        with (
            quiet_loading(),
            explain(f"{where}: its tokenizer does not load", "restore the tokenizer's files"),
        ):
            tokenize = open_clip.get_tokenizer(place, context_length=context_length, **options)

        # Weights come from safetensors alone: of a folder, open_clip itself would read others, too.
        loading: dict[str, Any] = (
            {"pretrained": pretrained} if place == name else {"load_weights": False}
        )
        with (
            quiet_loading(),
            explain(
                f"{where}: open_clip does not load it", "check name, weights and configuration"
            ),
        ):
            clip = open_clip.create_model(
                place,
                weights_only=True,
                force_quick_gelu=own.get("quick_gelu", False),
                force_image_size=image_size,
                force_context_length=context_length,
                pretrained_image=False,
                pretrained_text=False,
                **loading,
            )
            if image_size is not None or config is not None:
                _check_image_size(clip.visual, own["vision_cfg"], where)
            if weights is not None:
                load_checkpoint(clip, str(weights))
    return clip, own, tokenize


def _folder_config(folder: Path) -> dict[str, Any]:
    """The `model_cfg` of an open_clip folder whose tokenizer is not code of its own."""
    config = read_json_object(folder / CONFIG_FILE).get("model_cfg")
    if not isinstance(config, dict):
        raise DualencError(
            f"{folder / CONFIG_FILE}: no model_cfg, so no open_clip model; restore the file"
        )
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and "auto_map" in read_json_object(settings):
        raise DualencError(
            f"{folder}: its tokenizer is code of its own, which is not run; save it with a plain one"
        )
    return config


def _check_size_of_weights(config: dict[str, Any], where: Path, num_weights: int) -> None:
    """Refuse a configuration that describes far larger towers than the weights beside it."""
    check_sizes(config, where, num_weights)
    text = config.get("text_cfg")
    names = ("vocab_size", "width")
    sizes: list[Any] = [text.get(name) for name in names] if isinstance(text, dict) else []
    if all(type(size) is int for size in sizes) and math.prod(sizes) > num_weights:
        problem = f"text_cfg needs vocab_size × width weights, and there are {num_weights:,}"
        raise DualencError(f"{where}: {problem}; correct the file")


def _folder_weights(folder: Path) -> Path:
    for name in WEIGHTS_FILES:
        if (folder / name).is_file():
            return folder / name
    raise DualencError(f"{folder}: no {WEIGHTS_FILE}; convert its weights to safetensors first")


def check_config(config: dict[str, Any], where: str) -> None:
    """Refuse configurations that are not two towers, and ones with which open_clip would run a
    model's code."""
    from transformers import AutoConfig

    missing = [section for section in SECTIONS if section not in config]
    if missing:
        raise DualencError(
            f"{where}: {', '.join(missing)} missing; open_clip needs {', '.join(SECTIONS)}"
        )
    check_fields(config, {"embed_dim": int, "vision_cfg": dict, "text_cfg": dict}, where)
    check_sizes(config, where)
    text = config["text_cfg"]
    for key in text.get("tokenizer_kwargs") or {}:
        if key not in TOKENIZER_ARGUMENTS:
            raise DualencError(
                f"{where}: with {key} in tokenizer_kwargs a tokenizer can be code of its own, which is not run; "
                f"leave it out, only {', '.join(TOKENIZER_ARGUMENTS)} are taken"
            )
    if name := text.get("hf_model_name"):
        # open_clip loads it with no word about code; this load before it refuses code.
        problem = f"{where}: text_cfg.hf_model_name {name} does not load without code of its own, which is not run"
        with explain(problem, "choose another"):
            AutoConfig.from_pretrained(str(name), trust_remote_code=False)


def _token_ids(clip: Any) -> range:
    """The ids that have a row in the table of the text tower."""
    text = getattr(clip, "text", clip)
    table = getattr(text, "token_embedding", None)
    if table is None and hasattr(getattr(text, "transformer", None), "get_input_embeddings"):
        table = text.transformer.get_input_embeddings()
    return range(getattr(table, "num_embeddings", sys.maxsize))


def _check_image_size(visual: Any, vision: dict[str, Any], where: str) -> None:
    """Refuse a size that a timm tower would have to be changed to, which no folder of open_clip can
    say."""
    from timm.models import get_pretrained_cfg

    name = vision.get("timm_model_name")
    known = get_pretrained_cfg(name, allow_unregistered=True) if name else None
    if known is None or not known.fixed_input_size:
        return
    if not getattr(getattr(visual.trunk, "patch_embed", None), "strict_img_size", True):
        return
    native = known.input_size[-1]
    if vision.get("image_size", native) not in (native, (native, native), [native, native]):
        problem = f"{where}: image_size is {vision['image_size']}, and {name} takes images of {native} pixels"
        raise DualencError(f"{problem}; leave it out, or choose a model of that size")


def _write_source(
    folder: Path, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Write a configuration, fitted in place to its tokenizer (None: open_clip's own), where
    open_clip reads both."""
    text = config["text_cfg"]
    if tokenizer is not None:
        # In a folder, open_clip takes the tokenizer beside its configuration.
        text["hf_tokenizer_name"] = "."
        size = text.setdefault("vocab_size", len(tokenizer))
        if size < len(tokenizer):
            raise DualencError(
                f"text_cfg.vocab_size is {size}, the tokenizer has {len(tokenizer)} tokens: leave it out"
            )
        if "hf_model_name" not in text:
            end = tokenizer("a").input_ids[-1]
            if end not in tokenizer.all_special_ids and text.get("pool_type", "eos") == "eos":
                problem = "the tokenizer puts no end token behind a text, where text_cfg.pool_type eos reads the vector"
                raise DualencError(
                    f"{problem}; give it a post-processor that does, or another pool_type"
                )
            text.setdefault("pad_id", tokenizer.pad_token_id)
            text.setdefault("pool_type", "eos")
            text.setdefault("eos_id", end)
        tokenizer.model_max_length = text.get("context_length", CONTEXT_LENGTH)
        tokenizer.save_pretrained(folder)
    elif not text.get("hf_tokenizer_name") and text.get("vocab_size", VOCAB_SIZE) < VOCAB_SIZE:
        raise DualencError(
            f"text_cfg.vocab_size is {text['vocab_size']}: open_clip's tokenizer needs {VOCAB_SIZE}; "
            "leave it out or give a tokenizer"
        )
    write_json(folder / CONFIG_FILE, {"model_cfg": config})
