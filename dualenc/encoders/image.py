"""Image encoders: a timm backbone with a projector, its model folder, and image preprocessing."""

from __future__ import annotations

import inspect
import json
import logging
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

from dualenc.encoders.card import base_metadata
from dualenc.encoders.dual import DUALENC_FILE, DualEncoder, Prepare, Tower, unit_norm
from dualenc.encoders.hub import model_folder
from dualenc.encoders.limits import check_sizes
from dualenc.encoders.weights import (
    check_safetensors,
    count_weights,
    load_weights,
    save_weights,
    settle_missing,
)
from dualenc.errors import DualencError, explain
from dualenc.io.files import write_json
from dualenc.io.reading import check_fields, read_json_object
from dualenc.types import Inputs

logger = logging.getLogger("dualenc.encoders")

WEIGHTS_FILE = "model.safetensors"
PROJECTOR_FILE = "projector.safetensors"
MAX_DIM = 2**20
"""Larger projectors are taken for mistakes."""
MIN_CROP, MAX_CROP = 0.1, 10
"""Bounds of crop_pct. Images are resized to size / crop_pct, so a tiny value exhausts memory."""
SMALL = 64
"""Up to this number of pixels per side, images get the small-image stem and are not cropped for
evaluation."""

Build = Callable[[Mapping[str, Any]], Callable[[Image.Image], Tensor]]
"""A function from settings of preprocessing to a function from an image to pixels."""
Augment = Callable[[Image.Image, int], Any]
"""A pure function from an RGB image and a seed to pixels (3, H, W), float32."""


class ImageEncoder(DualEncoder):
    """Encode two views of an image with one timm backbone and projector (SimCLR).

    SimCLR is by Chen et al. 2020 (arXiv:2002.05709).

        model = ImageEncoder("resnet18", projector_dim=128, image_size=32)
        vectors = model.encode([Image.new("RGB", (32, 32))])  # (1, 128)

    Args:
        backbone: timm name such as "resnet18", a timm folder (prefix `local-dir:` optional), or a
            hub name.
        pretrained: load the weights of a timm name; those of folders and hub names are always
            loaded.
        projector_dim: D, size of the vectors that training compares; None trains the features
            themselves. A folder saved by dualenc provides its projector if it has this size.
        small_image_stem: start a ResNet with a 3×3 convolution of stride 1 and no pooling; None for
            images of at most 64 pixels.
        image_size: pixels per side; None for the backbone's default.
        augment: training augmentation, from image and seed to pixels (3, H, W) in [0, 1]; None for
            crops and flips.
        backbone_args: further arguments of the timm architecture.
        gradient_checkpointing: recompute activations in the backward pass instead of storing them.
    """

    left: ProjectedTower
    right: ProjectedTower

    def __init__(
        self,
        backbone: str = "resnet18",
        *,
        pretrained: bool = False,
        projector_dim: int | None = 128,
        small_image_stem: bool | None = None,
        image_size: int | None = None,
        augment: Augment | None = None,
        backbone_args: dict[str, Any] | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        folder = None if is_timm_name(backbone) else model_folder(backbone)
        source = backbone if folder is None else f"local-dir:{folder}"
        model, all_args, has_small_stem = load_backbone(
            source, pretrained, small_image_stem, image_size, backbone_args or {}
        )
        if gradient_checkpointing:
            model.set_grad_checkpointing(True)
        config = _data_config(model.pretrained_cfg, image_size)
        evaluate, (mean, std), features = _try_backbone(model, config, backbone)
        head = nn.Identity() if projector_dim is None else projector(features, projector_dim)
        size = config["input_size"][1:]
        if augment is None:
            augment = partial(seeded_transform, transform=_crops_and_flips(size))
        else:
            _report_other_size(augment, size)
        # Augmentations end with pixels in [0, 1], whatever statistics the backbone expects.
        augmented = partial(normalized, augment=augment, mean=mean, std=std)
        prepare = ImagePrepare(evaluate, augmented, config, _evaluation)
        tower = ProjectedTower(model, head, prepare, features, projector_dim or features)
        super().__init__(tower, tower, kind="image", views=True)
        self.backbone_args = all_args
        self.small_image_stem = has_small_stem
        self.usage = "image, small" if has_small_stem else None
        self.data_config = config
        self.projector_dim = projector_dim
        if folder is not None:
            self.base = base_metadata(backbone)
            if projector_dim is not None and _saved_projector_dim(folder) == projector_dim:
                load_weights(head, folder / PROJECTOR_FILE)

    @classmethod
    def from_folder(cls, folder: Path) -> ImageEncoder:
        """Load a timm folder, with its projector if it has one."""
        return cls(str(folder), projector_dim=_saved_projector_dim(folder))

    def write(self, folder: Path) -> None:
        """Write a timm folder, for `create_model("local-dir:FOLDER")`, and the projector."""
        backbone: Any = self.left.backbone
        known = backbone.pretrained_cfg
        layers = {key: known[key] for key in ("first_conv", "classifier") if known.get(key)}
        config = {
            "architecture": known["architecture"],
            "num_classes": 0,
            "num_features": backbone.num_features,
            "model_args": self.backbone_args,
            "pretrained_cfg": {
                **self.data_config,
                "fixed_input_size": bool(known.get("fixed_input_size")),
                "num_classes": 0,
                **layers,
            },
        }
        own = {
            "kind": self.kind,
            "projector_dim": self.projector_dim,
            "small_image_stem": self.small_image_stem,
        }
        write_json(folder / "config.json", config)
        write_json(folder / DUALENC_FILE, own)
        save_weights(backbone.state_dict(), folder / WEIGHTS_FILE)
        if self.projector_dim is not None:
            save_weights(self.left.projector.state_dict(), folder / PROJECTOR_FILE)


class ProjectedTower(Tower):
    """A backbone, from pixels (B, 3, H, W) to features (B, feature_dim), and a projector to (B, D).

    `ImageEncoder` builds it, and `ImageEncoder("resnet18").left` is one.

    Args:
        backbone: module from pixels to features.
        head: projector.
        prepare: preprocessing of images.
        feature_dim: size of the features.
        dim: D, size of the vectors.
    """

    modality = "image"

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        prepare: ImagePrepare,
        feature_dim: int,
        dim: int,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = head
        self.prepare: ImagePrepare = prepare
        self.feature_dim = feature_dim
        self.dim = dim

    def features(self, inputs: Inputs) -> Tensor:
        """Return the backbone's pooled features (B, feature_dim), in float32."""
        return self.backbone(inputs["image"]).float()

    def forward(self, inputs: Inputs) -> Tensor:
        """Encode pixels (B, 3, H, W) to (B, D) unit-norm float32."""
        return unit_norm(self.projector(self.backbone(inputs["image"])))


def projector(features: int, dim: int) -> nn.Sequential:
    """Return SimCLR's projector: linear, BatchNorm, ReLU, linear (Chen et al. 2020, section 4.2).

    Args:
        features: size of the input and of the hidden layer.
        dim: D, size of the output.
    """
    if type(dim) is not int or not 1 <= dim <= MAX_DIM:
        raise DualencError(
            f"projector_dim is {str(dim)[:40]}",
            fix=f"give a number from 1 to {MAX_DIM:,}, or null for none",
        )
    first = nn.Linear(features, features, bias=False)
    return nn.Sequential(
        first, nn.BatchNorm1d(features), nn.ReLU(), nn.Linear(features, dim, bias=False)
    )


def _try_backbone(
    model: nn.Module, config: dict[str, Any], backbone: str
) -> tuple[Callable[[Image.Image], Tensor], tuple[list[float], list[float]], int]:
    """Encode a gray image; return preprocessing, mean and std of pixels, and number of features."""
    # A foreign folder may contain any preprocessing and any model, so try them out.
    with torch.no_grad(), explain(f"{backbone}: cannot encode an image", "check its arguments"):
        evaluate = _evaluation(config)
        pixels = checked_pixels(evaluate, config["input_size"])
        shape = tuple(model.eval()(pixels[None]).shape)
        statistics = list(config["mean"]), list(config["std"])
    if len(shape) != 2:
        raise DualencError(
            f"returns features {shape}, not one vector per image",
            fix="set global_pool (backbone_args)",
            where=backbone,
        )
    return evaluate, statistics, shape[1]


def _evaluation(config: Mapping[str, Any]) -> Callable[[Image.Image], Tensor]:
    """Return timm's preprocessing for evaluation."""
    from timm.data import create_transform

    evaluate: Callable[[Image.Image], Tensor] = create_transform(**config, is_training=False)
    return evaluate


def _crops_and_flips(size: tuple[int, int]) -> v2.Compose:
    """Return the default training views: random crops (height, width) and horizontal flips."""
    crops = v2.RandomResizedCrop(size, interpolation=v2.InterpolationMode.BICUBIC)
    to_pixels = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    return v2.Compose([crops, v2.RandomHorizontalFlip(), *to_pixels])


def is_timm_name(name: str) -> bool:
    """Return True if timm has an architecture of this name, with or without a tag after a dot."""
    import timm

    return timm.is_model(name.partition(".")[0])


def load_backbone(
    name: str,
    pretrained: bool,
    small_stem: bool | None,
    image_size: int | None,
    args: dict[str, Any],
) -> tuple[Any, dict[str, Any], bool]:
    """Load a timm model without classifier, by its name or from a folder.

    Args:
        name: timm name, or a folder (prefix `local-dir:` optional).
        pretrained: load the weights of a timm name.
        small_stem: use the small-image stem; None to decide by image size.
        image_size: pixels per side; None for the model's default.
        args: further arguments of the architecture.

    Returns:
        The model, all its arguments, and whether it has the small-image stem.
    """
    from timm.models import get_pretrained_cfg

    folder = None if is_timm_name(name) else model_folder(name)
    saved: dict[str, Any] = {}
    if folder is None:
        source = name
        known = get_pretrained_cfg(name, allow_unregistered=True)
        fixed_size = known and known.fixed_input_size
    else:
        source = f"local-dir:{folder}"
        config, small_stem = _folder_settings(folder, small_stem)
        saved = config.get("model_args", {})
        fixed_size = config.get("pretrained_cfg", config).get("fixed_input_size")
        # timm does not know the small stem, so it cannot load a folder's weights into it.
        pretrained = not small_stem
    _check_backbone_args((*saved, *args), source)
    # Only some architectures accept a size; others derive everything from the image.
    size: dict[str, Any] = {"img_size": image_size} if fixed_size and image_size is not None else {}
    model = _create_backbone(source, pretrained, {**size, **args})
    side = _data_config(model.pretrained_cfg, image_size)["input_size"][-1]
    small = side <= SMALL and is_plain_resnet(model) if small_stem is None else small_stem
    if small:
        replace_stem(model)
        if folder is not None:
            load_weights(model, folder / WEIGHTS_FILE)
    return model, {**saved, **args, **size}, small


def _folder_settings(folder: Path, small_stem: bool | None) -> tuple[dict[str, Any], bool]:
    """Return the checked config.json of a timm folder, and whether it has the small-image stem."""
    check_safetensors(folder, WEIGHTS_FILE)
    path = folder / "config.json"
    config = read_json_object(path)
    if "architecture" not in config:
        raise DualencError(
            "does not name a timm architecture", fix="choose another folder", where=path
        )
    optional: dict[str, Any] = {
        name: dict for name in ("model_args", "pretrained_cfg") if name in config
    }
    check_fields(config, {"architecture": str, **optional}, path)
    check_sizes(config, path, count_weights(folder / WEIGHTS_FILE))
    # timm's own folders lack this file, and so the stem.
    own = folder / DUALENC_FILE
    has_stem = own.is_file() and bool(read_json_object(own).get("small_image_stem"))
    if small_stem not in (None, has_stem):
        raise DualencError(
            f"small_image_stem is {has_stem} in this folder",
            fix="leave small_image_stem out",
            where=folder,
        )
    return config, has_stem


def _check_backbone_args(names: Iterable[str], source: str) -> None:
    """Raise if an argument is one of `create_model` and not of the architecture."""
    import timm

    # They would lead timm to other weights or configurations, or compile the model.
    others = inspect.signature(timm.create_model).parameters
    for name in names:
        if name in others or name.startswith("pretrained"):
            raise DualencError(
                f"{name} is not an argument of an architecture (backbone_args)",
                fix="leave it out",
                where=source,
            )


def _create_backbone(source: str, pretrained: bool, args: dict[str, Any]) -> Any:
    """Create a timm model without classifier; raise if weights that matter are missing."""
    import timm

    with explain(f"{source}: timm cannot build the model", "check name, weights and arguments"):
        with missing_weights() as missing:
            model: Any = timm.create_model(source, pretrained=pretrained, num_classes=0, **args)
        if missing:
            pixels = torch.zeros(2, *model.pretrained_cfg["input_size"])
            where = source.removeprefix("local-dir:")
            settle_missing(model, missing, [model.eval()(pixels)], where)
    return model


@contextmanager
def missing_weights() -> Iterator[list[str]]:
    """Collect the names of weights that a file lacks, which timm only logs."""
    missing: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        """Collect names from a log record, and keep only what is more serious than information."""
        if found := re.match(r"Missing keys \((.*)\) discovered", record.getMessage()):
            missing.extend(found[1].split(", "))
        return record.levelno > logging.INFO

    # The message is of level INFO, which is usually off.
    builder = logging.getLogger("timm.models._builder")
    level = builder.level
    builder.addFilter(collect)
    builder.setLevel(logging.INFO)
    try:
        yield missing
    finally:
        builder.removeFilter(collect)
        builder.setLevel(level)


def is_plain_resnet(backbone: nn.Module) -> bool:
    """Return True for a ResNet that starts with one 7×7 convolution and max pooling."""
    stem = getattr(backbone, "conv1", None)
    pooling = getattr(backbone, "maxpool", None)
    return (
        isinstance(stem, nn.Conv2d)
        and stem.kernel_size == (7, 7)
        and isinstance(pooling, nn.MaxPool2d)
    )


def replace_stem(backbone: Any) -> None:
    """Start a plain ResNet with a 3×3 convolution, without pooling (SimCLR, appendix B.9)."""
    if not is_plain_resnet(backbone):
        raise DualencError(
            f"{type(backbone).__name__} does not have a stem that small_image_stem could replace",
            fix="leave it out, or set backbone_args such as patch_size",
        )
    # The usual stem would shrink an image of 32 pixels to 8 before the first block.
    old = backbone.conv1
    backbone.conv1 = nn.Conv2d(old.in_channels, old.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(backbone.conv1.weight, mode="fan_out", nonlinearity="relu")
    backbone.maxpool = nn.Identity()


def _data_config(known: dict[str, Any], image_size: int | None) -> dict[str, Any]:
    """Return timm's description of a model's preprocessing, adapted to an image size."""
    from timm.data import resolve_data_config

    size: Any = known.get("input_size")
    is_size = isinstance(size, Sequence) and len(size) == 3
    if not is_size or not all(type(side) is int and side > 0 for side in size):
        raise DualencError(f"input_size is {str(size)[:40]}", fix="give channels, height and width")
    share = known.get("crop_pct")
    if share and not (isinstance(share, (int, float)) and MIN_CROP <= share <= MAX_CROP):
        raise DualencError(f"crop_pct is {str(share)[:40]}", fix=f"give {MIN_CROP} to {MAX_CROP}")
    settings: dict[str, Any] = {}
    if image_size is not None:
        settings["input_size"] = (known["input_size"][0], image_size, image_size)
        # Cropping would cut detail off images that are small already.
        if image_size <= SMALL:
            settings["crop_pct"] = 1.0
    config = resolve_data_config(settings, pretrained_cfg=known)
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in config.items()
    }


class ImagePrepare(Prepare):
    """Stack images as pixels (3, H, W), preprocessed for evaluation or augmented for training.

        prepare = ImageEncoder("resnet18").left.prepare
        prepare([Image.new("RGB", (80, 60))])["image"]  # (1, 3, 224, 224)

    Args:
        evaluate: function from an image to pixels.
        augment: function from image and seed to pixels, a pure function of both.
        settings: settings of `evaluate` in plain values, part of the model's checksum.
        build: function that makes `evaluate` of such settings; None if they cannot be changed.
    """

    modality = "image"

    def __init__(
        self,
        evaluate: Callable[[Image.Image], Tensor],
        augment: Augment,
        settings: Mapping[str, Any],
        build: Build | None = None,
    ) -> None:
        self.evaluate = evaluate
        self.augment = augment
        self.settings = json.dumps(settings, sort_keys=True)
        self.build = build

    def changed(self, **settings: Any) -> ImagePrepare:
        """Return the preprocessing with other settings, as another program may have had them.

        Args:
            settings: those that differ.
        """
        if self.build is None:
            raise DualencError("this preprocessing cannot be changed", fix="give it a `build`")
        other = {**json.loads(self.settings), **settings}
        return ImagePrepare(self.build(other), self.augment, other, self.build)

    def __call__(self, items: Sequence[Any], seeds: Sequence[int] | None = None) -> Inputs:
        """Preprocess B RGB images.

        Args:
            items: B images.
            seeds: one seed per image for augmentation; None for evaluation.
        """
        if seeds is None:
            pixels = [self.evaluate(image) for image in items]
        else:
            pixels = [self.augment(image, seed) for image, seed in zip(items, seeds, strict=True)]
        return {"image": torch.stack(pixels)}


def checked_pixels(evaluate: Callable[[Image.Image], Tensor], size: Sequence[int]) -> Tensor:
    """Preprocess a gray image, and raise unless its pixels are finite and of the expected size.

    Args:
        evaluate: preprocessing.
        size: expected (3, H, W).
    """
    pixels = evaluate(Image.new("RGB", (SMALL, SMALL), (128, 128, 128)))
    if tuple(pixels.shape) != tuple(size) or not torch.isfinite(pixels).all():
        raise DualencError(
            f"preprocessing gives pixels {tuple(pixels.shape)}, but finite ones of shape "
            f"{tuple(size)} are required",
            fix="correct its input_size, mean, std and interpolation",
        )
    return pixels


def seeded_transform(
    image: Image.Image, seed: int, transform: Callable[[Image.Image], Tensor]
) -> Tensor:
    """Apply a transform with global random generators as a pure function of image and seed."""
    with seeded(seed):
        return transform(image)


def normalized(
    image: Image.Image, seed: int, augment: Augment, mean: list[float], std: list[float]
) -> Tensor:
    """Augment an image to pixels in [0, 1], and normalize them as the model requires."""
    return v2.functional.normalize(augment(image, seed), mean, std)


def _report_other_size(augment: Augment, size: Sequence[int]) -> None:
    """Log a warning if training views and evaluation images differ in size (height, width)."""
    trained = augment(Image.new("RGB", (SMALL, SMALL)), 0).shape[-2:]
    if tuple(trained) != tuple(size):
        sizes = (*trained, *size)
        logger.warning(
            "training views have %dx%d pixels, but images to encode have %dx%d; use the same size",
            *sizes,
        )


def _saved_projector_dim(folder: Path) -> int | None:
    """Return the projector size in a folder that `ImageEncoder.write` wrote; None without one."""
    path = folder / DUALENC_FILE
    return read_json_object(path).get("projector_dim") if path.is_file() else None


def check_crop_scale(crop_scale: Sequence[float]) -> None:
    """Raise unless crop_scale is an increasing range of area shares in (0, 1]."""
    low, high = crop_scale
    if not 0 < low <= high <= 1:
        raise DualencError(
            f"crop_scale is ({low}, {high})",
            fix="give two increasing shares of the area in (0, 1]",
        )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generators of torch, `random` and numpy in this context, then restore them."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would reseed the GPUs too.
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
