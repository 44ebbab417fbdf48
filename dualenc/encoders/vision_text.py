"""Image-text encoders on transformers (CLIP, SigLIP, SigLIP 2), left the images, right the texts; their folder."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode, v2

from dualenc.encoders.dual import DualEncoder, Prepare, Tower, check_items, unit_norm
from dualenc.encoders.hub import base_metadata, model_folder, save_weights
from dualenc.encoders.image import check_crop_scale, seeded
from dualenc.encoders.lora import adapt, merged_state
from dualenc.encoders.text import enable_checkpointing, load_pretrained, quiet_transformers
from dualenc.encoders.tokenizer import load_tokenizer, save_tokenizer
from dualenc.errors import DualencError, explain
from dualenc.reading import read_json_object
from dualenc.types import Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WEIGHTS_FILE = "model.safetensors"
MODEL_TYPES = {"clip": False, "siglip": True, "siglip2": True}
"""What `model_type` may be, and whether its texts are always padded to full length: SigLIP reads the last position."""


class VisionTextEncoder(DualEncoder):
    """Images and texts through a CLIP, SigLIP or SigLIP 2 model of transformers.

    CLIP: Radford et al. 2021, arXiv 2103.00020. SigLIP: Zhai et al. 2023, arXiv 2303.15343. SigLIP 2: Tschannen et
    al. 2025, arXiv 2502.14786, with images of any proportions (NaFlex) where the folder's model takes them.

    Args:
        name: a transformers folder (`local-dir:` before it is optional), or a hub name.
        max_length: longest text in tokens; None: the model's default.
        crop_scale: smallest and largest share of an image's area that training crops to.
        gradient_checkpointing: recompute activations in the backward pass instead of storing them.
        lora_rank: train adapters of this rank in both towers instead of their own weights; 0 trains the weights.
        lora_targets: endings of the names of the layers to adapt; None: all.
    """

    left: VisionTower
    right: CaptionTower
    ecosystem = "vision-text"

    def __init__(
        self,
        name: str,
        *,
        max_length: int | None = None,
        crop_scale: tuple[float, float] = (0.9, 1.0),
        gradient_checkpointing: bool = False,
        lora_rank: int = 0,
        lora_targets: list[str] | None = None,
    ) -> None:
        from transformers import AutoImageProcessor, AutoModel

        check_crop_scale(crop_scale)
        folder = model_folder(name)
        if not has_two_towers(folder):
            raise DualencError(
                f"{folder}: no transformers model of the types {', '.join(MODEL_TYPES)}; give another folder"
            )
        model = load_pretrained(folder, lambda _: AutoModel, "image-text model")
        with (
            quiet_transformers(),
            explain(f"{folder}: the image processor does not load", "restore its files"),
        ):
            processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        config = model.config
        full = MODEL_TYPES[config.model_type]
        tokenizer = load_tokenizer(folder, stored_side=full)
        positions = int(config.text_config.max_position_embeddings)
        length = min(positions, tokenizer.model_max_length) if max_length is None else max_length
        if not 3 <= length <= positions:
            raise DualencError(f"max_length is {length}: give 3 to {positions}, the model's positions")
        accepted = inspect.signature(model.text_model.forward).parameters
        tokenizer.model_input_names = [n for n in tokenizer.model_input_names if n in accepted]
        if gradient_checkpointing:
            enable_checkpointing(model)
        if lora_rank:
            adapt(model, lora_rank, lora_targets)
        super().__init__(
            VisionTower(model, VisionPrepare(processor, crop_scale)),
            CaptionTower(model, CaptionPrepare(tokenizer, length, full)),
            kind="image-text",
        )
        self.config = config
        self.base = base_metadata(name, folder)

    @property
    def temperature(self) -> float:
        """The temperature by which the model divides cosines to get logits."""
        return math.exp(-float(self.right.logit_scale))

    def set_temperature(self, temperature: float) -> None:
        """Store the temperature that training ended with, for the model's logits."""
        with torch.no_grad():
            self.right.logit_scale.fill_(-math.log(temperature))

    def write(self, folder: Path) -> None:
        """Write a transformers folder, for `AutoModel` and `AutoProcessor`."""
        with quiet_transformers():
            self.config.save_pretrained(folder)
            self.left.prepare.processor.save_pretrained(folder)
        save_tokenizer(self.right.prepare.tokenizer, folder, self.right.prepare.max_length)
        save_weights(merged_state(self.left) | merged_state(self.right), folder / WEIGHTS_FILE)


class VisionPrepare(Prepare):
    """Images by the model's own image processor; in training, a random crop of a share of their area."""

    modality = "image"

    def __init__(self, processor: Any, crop_scale: tuple[float, float]) -> None:
        self.processor = processor
        size = dict(getattr(processor, "crop_size", None) or getattr(processor, "size", None) or {})
        self.size = (size["height"], size["width"]) if size.get("height") and size.get("width") else None
        self.crop_scale = crop_scale

    def __call__(self, items: Sequence[Image.Image], seeds: Sequence[int] | None = None) -> Inputs:
        # The processor would open a string as a path or a URL.
        check_items(items, "image")
        if seeds is not None:
            items = [self.crop(item, seed) for item, seed in zip(items, seeds, strict=True)]
        return dict(self.processor(images=list(items), return_tensors="pt"))

    def crop(self, image: Image.Image, seed: int) -> Image.Image:
        """A random crop, brought to the model's size where it has one: nothing is left for the processor to cut."""
        with seeded(seed):
            box = v2.RandomResizedCrop.get_params(image, list(self.crop_scale), [3 / 4, 4 / 3])
        top, left, height, width = box
        cropped = image.crop((left, top, left + width, top + height))
        if self.size is None:
            return cropped
        resize = v2.Resize(list(self.size), interpolation=InterpolationMode.BICUBIC)
        resized: Image.Image = resize(cropped)
        return resized


class CaptionPrepare(Prepare):
    """Tokenize, truncate and pad; `full`: to `max_length`, for models that read the last position, padding or not."""

    modality = "text"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, full: bool) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.full = full

    def __call__(self, items: Sequence[str], seeds: Sequence[int] | None = None) -> Inputs:
        padding = "max_length" if self.full else True
        check_items(items, "text")
        inputs = self.tokenizer(
            list(items), padding=padding, truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        # "attention_mask" would say that columns of padding alone may be cut.
        return {
            "mask" if self.full and name == "attention_mask" else name: t for name, t in inputs.items()
        }


class VisionTower(Tower):
    """The image half of a two-tower model: its pooled output, and CLIP's projection of it."""

    modality = "image"

    def __init__(self, model: Any, prepare: VisionPrepare) -> None:
        super().__init__()
        self.vision_model: nn.Module = model.vision_model
        self.visual_projection: nn.Module = getattr(model, "visual_projection", None) or nn.Identity()
        self.prepare: VisionPrepare = prepare
        projects = isinstance(self.visual_projection, nn.Linear)
        self.dim = self.feature_dim = (
            model.config.projection_dim if projects else model.config.vision_config.hidden_size
        )

    def forward(self, inputs: Inputs) -> Tensor:
        """Encode B images, pixels or patches, to (B, D) unit-norm float32."""
        return unit_norm(self.visual_projection(self.vision_model(**inputs).pooler_output))


class CaptionTower(Tower):
    """The text half of a two-tower model, with the scale (and bias) of its logits."""

    modality = "text"

    def __init__(self, model: Any, prepare: CaptionPrepare) -> None:
        super().__init__()
        self.text_model: nn.Module = model.text_model
        self.text_projection: nn.Module = getattr(model, "text_projection", None) or nn.Identity()
        self.prepare: CaptionPrepare = prepare
        self.logit_scale: nn.Parameter
        for name in ("logit_scale", "logit_bias"):
            if isinstance(scalar := getattr(model, name, None), nn.Parameter):
                scalar.requires_grad_(False)  # the objective owns the temperature
                self.register_parameter(name, scalar)
        projects = isinstance(self.text_projection, nn.Linear)
        text = model.config.text_config
        sizes = (text.hidden_size, getattr(text, "projection_size", None))
        self.dim = self.feature_dim = model.config.projection_dim if projects else sizes[1] or sizes[0]

    def forward(self, inputs: Inputs) -> Tensor:
        """Encode B tokenized texts, each (B, T), to (B, D) unit-norm float32."""
        inputs = {"attention_mask" if name == "mask" else name: tensor for name, tensor in inputs.items()}
        return unit_norm(self.text_projection(self.text_model(**inputs).pooler_output))


def has_two_towers(folder: Path) -> bool:
    """Whether a folder has a model that `VisionTextEncoder` reads."""
    path = folder / "config.json"
    return path.is_file() and read_json_object(path).get("model_type") in MODEL_TYPES
