"""Image-text encoders on open_clip (left images, right texts), and their model folders."""

from __future__ import annotations

import copy
import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from PIL import Image
from torch import Tensor, nn
from torch.func import functional_call

from dualenc.encoders.card import base_metadata
from dualenc.encoders.dual import DualEncoder, Prepare, Tower, unit_norm
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
"""Defaults of open_clip, those of the original CLIP."""

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
WEIGHTS_FILES = (WEIGHTS_FILE, "open_clip_pytorch_model.safetensors", "model.safetensors")
LOADING_ADVICE = "check name, weights and configuration"
SECTIONS = ("embed_dim", "vision_cfg", "text_cfg")
TOKENIZER_ARGUMENTS = (
    "clean",
    "strip_sep_token",
    "language",
    "additional_special_tokens",
    "reduction_mask",
)
"""Tokenizer arguments that cannot name other files or code."""


class ImageTextEncoder(DualEncoder):
    """Image and text towers of an open_clip model: CLIP, SigLIP, or the two towers of CoCa.

    The captioning decoder of CoCa (Yu et al. 2022, arXiv:2205.01917) is saved with the model but
    not trained.

        model = ImageTextEncoder("ViT-B-32", "openai")
        scores = model.encode([image]) @ model.encode(["a dog", "a cat"], "right").T

    Args:
        name: open_clip name such as "ViT-B-32", a folder (prefix `local-dir:` optional), or a hub
            name.
        pretrained: tag of the weights of an open_clip name, or a safetensors file; None for random
            weights.
        config: open_clip configuration with embed_dim, vision_cfg and text_cfg, instead of a name.
        tokenizer: folder, hub name or object of a transformers tokenizer, together with a config;
            None for open_clip's own.
        image_size: pixels per side; None for the model's default.
        context_length: longest text in tokens; None for the model's default.
        crop_scale: smallest and largest share of an image's area that training crops keep.
        gradient_checkpointing: recompute activations in the backward pass instead of storing them.
        lora_rank: rank of the adapters to train in both towers; 0 trains the weights themselves.
        lora_targets: "all-linear", a list of suffixes of layer names, or a regular expression that
            matches whole names.
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
        # Each half belongs to one tower, so no weight is registered twice.
        del clip.visual
        if lora_rank:
            for half in (visual, clip):
                add_adapters(half, lora_rank, lora_targets)
        _freeze_unused(clip)
        dim = int(own_config["embed_dim"])
        source = name or "config"
        # A foreign folder may contain any settings, so try them out.
        advice = "correct its preprocess_cfg and tokenizer"
        with explain(f"{source}: its preprocessing fails", advice):
            prepare_image = _image_prepare(visual.preprocess_cfg, crop_scale)
            size = visual.image_size
            sides = (size, size) if isinstance(size, int) else size
            checked_pixels(prepare_image.evaluate, (3, *sides))
            prepare_text = ClipTextPrepare(tokenize, _end_token(clip), _token_ids(clip))
            # The second text is longer than the context, to exercise truncation.
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
        """Temperature by which open_clip divides cosine similarities."""
        return math.exp(-float(self.right.clip.logit_scale))

    def set_temperature(self, temperature: float) -> None:
        """Store the final training temperature as open_clip's logit scale."""
        with torch.no_grad():
            self.right.clip.logit_scale.fill_(-math.log(temperature))

    def write(self, folder: Path) -> None:
        """Write an open_clip folder, to be opened as `local-dir:FOLDER`."""
        config = copy.deepcopy(self.config)
        # All weights are in the folder, so nothing must be downloaded when it is loaded.
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
        # A wrapper of open_clip around a tokenizer of transformers; open_clip's own needs no file.
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.tokenizer.model_max_length = tokenizer.context_length
            forget_last_call(tokenizer.tokenizer)
            tokenizer.save_pretrained(folder)


def _freeze_unused(clip: Any) -> None:
    """Freeze open_clip's temperature (the objective has one) and CoCa's captioning decoder."""
    for scalar in (clip.logit_scale, clip.logit_bias):
        if scalar is not None:
            scalar.requires_grad_(False)
    if hasattr(clip, "text_decoder"):
        clip.text_decoder.requires_grad_(False)


def _image_prepare(
    preprocess_config: dict[str, Any], crop_scale: tuple[float, float]
) -> ImagePrepare:
    """Return open_clip's image preprocessing for evaluation and training."""
    from open_clip.transform import AugmentationCfg, PreprocessCfg, image_transform_v2

    preprocess = PreprocessCfg(**preprocess_config)
    train = image_transform_v2(preprocess, is_train=True, aug_cfg=AugmentationCfg(scale=crop_scale))
    augment = partial(seeded_transform, transform=train)
    return ImagePrepare(_evaluation(preprocess_config), augment, preprocess_config, _evaluation)


def _evaluation(preprocess_config: Mapping[str, Any]) -> Callable[[Image.Image], Tensor]:
    """Return open_clip's image preprocessing for evaluation."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    preprocess = PreprocessCfg(**preprocess_config)
    evaluate: Callable[[Image.Image], Tensor] = image_transform_v2(preprocess, is_train=False)
    return evaluate


class ClipImageTower(Tower):
    """The image half of an open_clip model: its `visual`, from pixels (B, 3, H, W) to (B, D).

    `ImageTextEncoder` builds it, and `ImageTextEncoder(...).left` is one.

    Args:
        visual: the image tower of open_clip.
        prepare: its preprocessing.
        dim: D, the size of the vectors.
    """

    modality = "image"

    def __init__(self, visual: nn.Module, prepare: ImagePrepare, dim: int) -> None:
        super().__init__()
        self.visual = visual
        self.prepare: ImagePrepare = prepare
        self.dim = self.feature_dim = dim

    def forward(self, inputs: Inputs) -> Tensor:
        """Encode pixels (B, 3, H, W) to (B, D) unit-norm float32."""
        vectors = self.visual(inputs["image"])
        # CoCa returns its image tokens as well.
        return unit_norm(vectors[0] if isinstance(vectors, tuple) else vectors)


class ClipTextPrepare(Prepare):
    """Tokenize with an open_clip tokenizer, and cut the columns that no text of the batch reaches.

        prepare = ImageTextEncoder("ViT-B-32").right.prepare
        prepare(["a dog"])["text"]  # (1, 4): start, two words, end

    Args:
        tokenizer: function from texts to (B, context length) ids.
        end: id at which the tower reads its output; "max" for the largest id of each text; None if
            nothing may be cut.
        ids: valid ids of the tower; a published tokenizer may have more ids, which no text
            produces.
    """

    modality = "text"

    def __init__(self, tokenizer: Tokenize, end: EndToken, ids: range) -> None:
        self.tokenizer = tokenizer
        self.end: EndToken = end
        self.ids = ids

    def __call__(self, items: Sequence[str], seeds: Sequence[int] | None = None) -> Inputs:
        """Tokenize B texts to {"text": (B, T) int64}.

        Args:
            items: B texts.
            seeds: ignored, since texts are not augmented.
        """
        tokens = self.tokenizer(list(items))
        if (last := int(tokens.max())) not in self.ids:
            raise DualencError(
                f"the tokenizer returns id {last}, but the model has {len(self.ids)} token vectors",
                fix="use the model's own tokenizer",
            )
        # Cut behind the last end token. Without a known end, the tower may read any column.
        if self.end is None:
            return {"text": tokens}
        ends = tokens if self.end == "max" else tokens.eq(self.end).int()
        last = int(ends.argmax(dim=1).max())
        return {"text": tokens[:, : last + 1]}


class ClipTextTower(Tower):
    """The text half of an open_clip model: the model without its `visual`.

    `ImageTextEncoder` builds it, and `ImageTextEncoder(...).right` is one.

    Args:
        clip: open_clip model whose `visual` was removed.
        prepare: its preprocessing.
        dim: D, the size of the vectors.
    """

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
        # open_clip's text towers always run over the full context. Under a causal mask the output
        # token attends to no later one, so shorter inputs give the same vectors for less work.
        # `functional_call` swaps in shorter positions and mask for this pass.
        shorter = {
            f"clip.{prefix}positional_embedding": transformer.positional_embedding[:length],
            f"clip.{prefix}attn_mask": transformer.attn_mask[:length, :length],
        }
        vectors: Tensor = functional_call(self, shorter, (inputs,))
        return vectors


def add_clip_adapters(tower: Tower, rank: int) -> None:
    """Freeze the image or the text tower of an open_clip model, and add LoRA adapters to it.

    Args:
        tower: the tower, or one that maps its vectors.
        rank: rank of the adapters.
    """
    for half in (
        part for part in tower.modules() if isinstance(part, ClipImageTower | ClipTextTower)
    ):
        if isinstance(half, ClipTextTower):
            add_adapters(half.clip, rank)
            _freeze_unused(half.clip)
        else:
            add_adapters(half.visual, rank)


def _causal_transformer(clip: nn.Module) -> tuple[str, Any]:
    """Return prefix and module with positions and causal mask; the module is None if not causal."""
    prefix = "text." if hasattr(clip, "text") else ""
    module = clip.text if hasattr(clip, "text") else clip
    is_causal = (
        isinstance(getattr(module, "attn_mask", None), Tensor)
        and getattr(module, "cls_emb", None) is None
    )
    return prefix, module if is_causal else None


def _end_token(clip: nn.Module) -> EndToken:
    """Return the argument `end` of `ClipTextPrepare`."""
    _, module = _causal_transformer(clip)
    if module is None:
        return None
    pooling = getattr(module, "text_pool_type", None) or getattr(module, "pool_type", None)
    if pooling == "eos":
        return int(module.text_eos_id if hasattr(module, "text_eos_id") else module.eos_id)
    return "max" if pooling == "argmax" else None


def is_open_clip_name(name: str | None) -> bool:
    """Return True if open_clip has an architecture of this name."""
    import open_clip

    return name in open_clip.list_models()


def _check_arguments(name: str | None, pretrained: str | None, config: Any, tokenizer: Any) -> None:
    """Raise if arguments of `ImageTextEncoder` exclude each other."""
    if (name is None) == (config is None):
        raise DualencError(
            "an image-text encoder needs either a name or a config",
            fix="give the name of an open_clip model, or a config to start from scratch",
        )
    if tokenizer is not None and config is None:
        raise DualencError(
            f"{name} has its own tokenizer",
            fix="leave tokenizer out; it requires a config",
        )
    if pretrained is None:
        return
    if not is_open_clip_name(name):
        raise DualencError(
            f"pretrained={pretrained} requires an open_clip name",
            fix="leave it out",
        )
    is_file = os.path.isfile(pretrained) and pretrained.endswith(".safetensors")
    if os.path.exists(pretrained) and not is_file:
        raise DualencError(
            f"pretrained={pretrained} is not a safetensors file",
            fix="convert the weights to safetensors first",
        )


def load_clip(
    name: str | None,
    pretrained: str | None,
    config: dict[str, Any] | None,
    tokenizer: str | PreTrainedTokenizerBase | None,
    image_size: int | None,
    context_length: int | None,
) -> tuple[Any, dict[str, Any], Tokenize]:
    """Load an open_clip model; the arguments are those of `ImageTextEncoder`.

    Returns:
        The model, its configuration and its tokenizer.
    """
    from open_clip.factory import load_checkpoint

    weights = None
    with tempfile.TemporaryDirectory() as scratch:
        if config is not None:
            own = copy.deepcopy(config)
            place = f"local-dir:{scratch}"
        elif is_open_clip_name(name):
            own = _named_config(str(name), pretrained)
            place = str(name)
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
            own_tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
            _write_source(Path(scratch), own, own_tokenizer)
        tokenize = _open_tokenizer(place, own, context_length, where)
        # open_clip would also read pickled weights in a folder, so a folder's are loaded here.
        options: dict[str, Any] = (
            {"pretrained": pretrained} if place == name else {"load_weights": False}
        )
        options |= {"force_image_size": image_size, "force_context_length": context_length}
        clip = _create_clip(place, own, options, where)
        # A resized tower of fixed size could neither be loaded nor saved.
        if image_size is not None or config is not None:
            _check_image_size(clip.visual, own["vision_cfg"], where)
        if weights is not None:
            with quiet_loading(), explain(f"{where}: open_clip does not load it", LOADING_ADVICE):
                load_checkpoint(clip, str(weights))
    return clip, own, tokenize


def _named_config(name: str, pretrained: str | None) -> dict[str, Any]:
    """Return the configuration of an open_clip name, with the activation of its weights."""
    import open_clip
    from open_clip.factory import get_pretrained_cfg

    config: dict[str, Any] = open_clip.get_model_config(name)
    # Some weights were trained with QuickGELU although their architecture has GELU. open_clip only
    # warns about it, and the vectors are wrong.
    if pretrained is not None and get_pretrained_cfg(name, pretrained).get("quick_gelu"):
        config["quick_gelu"] = True
    return config


def _open_tokenizer(
    place: str, config: dict[str, Any], context_length: int | None, where: str
) -> Tokenize:
    """Open the tokenizer of an open_clip name or folder."""
    import open_clip

    # Only tokenizers of transformers accept the argument.
    is_foreign = bool(config["text_cfg"].get("hf_tokenizer_name"))
    options: dict[str, Any] = {"trust_remote_code": False} if is_foreign else {}
    advice = "restore the tokenizer's files"
    with quiet_loading(), explain(f"{where}: the tokenizer does not load", advice):
        tokenize: Tokenize = open_clip.get_tokenizer(
            place, context_length=context_length, **options
        )
    return tokenize


def _create_clip(place: str, config: dict[str, Any], options: dict[str, Any], where: str) -> Any:
    """Create an open_clip model, without the weights of a folder."""
    import open_clip

    with quiet_loading(), explain(f"{where}: open_clip does not load it", LOADING_ADVICE):
        # The towers' own pretrained weights would be overwritten, so do not download them.
        clip: Any = open_clip.create_model(
            place,
            weights_only=True,
            force_quick_gelu=config.get("quick_gelu", False),
            pretrained_image=False,
            pretrained_text=False,
            **options,
        )
    return clip


def _folder_config(folder: Path) -> dict[str, Any]:
    """Return the `model_cfg` of an open_clip folder; raise if its tokenizer is custom code."""
    config = read_json_object(folder / CONFIG_FILE).get("model_cfg")
    if not isinstance(config, dict):
        raise DualencError(
            "model_cfg is missing, so this is not an open_clip model",
            fix="restore the file",
            where=folder / CONFIG_FILE,
        )
    settings = folder / "tokenizer_config.json"
    if settings.is_file() and "auto_map" in read_json_object(settings):
        raise DualencError(
            "its tokenizer is custom code, which is not run",
            fix="save the model with a standard tokenizer",
            where=folder,
        )
    return config


def _check_size_of_weights(config: dict[str, Any], where: Path, num_weights: int) -> None:
    """Raise if a configuration describes far larger towers than the weights beside it."""
    check_sizes(config, where, num_weights)
    text = config.get("text_cfg")
    names = ("vocab_size", "width")
    sizes: list[Any] = [text.get(name) for name in names] if isinstance(text, dict) else []
    if all(type(size) is int for size in sizes) and math.prod(sizes) > num_weights:
        raise DualencError(
            f"text_cfg needs vocab_size × width weights, but the file has {num_weights:,}",
            fix="correct the file",
            where=where,
        )


def _folder_weights(folder: Path) -> Path:
    """Return the safetensors file of an open_clip folder."""
    for name in WEIGHTS_FILES:
        if (folder / name).is_file():
            return folder / name
    raise DualencError(
        f"no {WEIGHTS_FILE}",
        fix="convert its weights to safetensors first",
        where=folder,
    )


def check_config(config: dict[str, Any], where: str) -> None:
    """Raise unless a configuration has two towers that open_clip builds without foreign code."""
    from transformers import AutoConfig

    missing = [section for section in SECTIONS if section not in config]
    if missing:
        raise DualencError(
            f"{', '.join(missing)} missing from the configuration",
            fix=f"open_clip needs {', '.join(SECTIONS)}",
            where=where,
        )
    check_fields(config, {"embed_dim": int, "vision_cfg": dict, "text_cfg": dict}, where)
    check_sizes(config, where)
    text = config["text_cfg"]
    for key in text.get("tokenizer_kwargs") or {}:
        if key not in TOKENIZER_ARGUMENTS:
            raise DualencError(
                f"{key} in tokenizer_kwargs could load custom code, which is not run",
                fix=f"leave it out; only {', '.join(TOKENIZER_ARGUMENTS)} are allowed",
                where=where,
            )
    if name := text.get("hf_model_name"):
        # open_clip does not pass on trust_remote_code. Loading the configuration first refuses
        # a model with custom code.
        problem = f"{where}: hf_model_name {name} may need custom code, which is not run"
        with explain(problem, "choose a model that transformers supports"):
            AutoConfig.from_pretrained(str(name), trust_remote_code=False)


def _token_ids(clip: Any) -> range:
    """Return the ids that have a row in the text tower's embedding table."""
    # CLIP, CLIP with a separate text tower, or one with a transformer of the hub.
    text = getattr(clip, "text", clip)
    table = getattr(text, "token_embedding", None)
    if table is None and hasattr(getattr(text, "transformer", None), "get_input_embeddings"):
        table = text.transformer.get_input_embeddings()
    return range(getattr(table, "num_embeddings", sys.maxsize))


def _check_image_size(visual: Any, vision: dict[str, Any], where: str) -> None:
    """Raise if image_size would change a timm tower of fixed size, which no folder can record."""
    from timm.models import get_pretrained_cfg

    name = vision.get("timm_model_name")
    known = get_pretrained_cfg(name, allow_unregistered=True) if name else None
    if known is None or not known.fixed_input_size:
        return
    # Fully convolutional and dynamic towers accept any size.
    if not getattr(getattr(visual.trunk, "patch_embed", None), "strict_img_size", True):
        return
    native = known.input_size[-1]
    if vision.get("image_size", native) not in (native, (native, native), [native, native]):
        raise DualencError(
            f"image_size is {vision['image_size']}, but {name} requires {native} pixels",
            fix="leave image_size out, or choose a model of that size",
            where=where,
        )


def _write_source(
    folder: Path, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Write a configuration, and the tokenizer that it is adapted to, where open_clip reads both.

    Args:
        folder: an empty folder.
        config: the configuration, changed in place.
        tokenizer: tokenizer of transformers; None for open_clip's own.
    """
    text = config["text_cfg"]
    if tokenizer is not None:
        # "." makes open_clip load the tokenizer from the folder of the configuration.
        text["hf_tokenizer_name"] = "."
        size = text.setdefault("vocab_size", len(tokenizer))
        if size < len(tokenizer):
            raise DualencError(
                f"text_cfg.vocab_size is {size}, but the tokenizer has {len(tokenizer)} tokens",
                fix="leave vocab_size out",
            )
        if "hf_model_name" not in text:
            # With pool_type eos the vector of a text is read at its first end token.
            end = tokenizer("a").input_ids[-1]
            if end not in tokenizer.all_special_ids and text.get("pool_type", "eos") == "eos":
                raise DualencError(
                    "the tokenizer does not append an end token, at which "
                    "text_cfg.pool_type eos reads the vector",
                    fix="add a post-processor that does, or choose another pool_type",
                )
            text.setdefault("pad_id", tokenizer.pad_token_id)
            text.setdefault("pool_type", "eos")
            text.setdefault("eos_id", end)
        tokenizer.model_max_length = text.get("context_length", CONTEXT_LENGTH)
        tokenizer.save_pretrained(folder)
    elif not text.get("hf_tokenizer_name") and text.get("vocab_size", VOCAB_SIZE) < VOCAB_SIZE:
        raise DualencError(
            f"text_cfg.vocab_size is {text['vocab_size']}, but open_clip's tokenizer "
            f"needs {VOCAB_SIZE}",
            fix="leave vocab_size out, or give a tokenizer",
        )
    write_json(folder / CONFIG_FILE, {"model_cfg": config})
