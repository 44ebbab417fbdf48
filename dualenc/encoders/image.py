"""Encoders of images alone: a timm backbone with its projector, its folder, and how images become tensors."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import rgb_to_grayscale

from dualenc.encoders.dual import DUALENC_FILE, DualEncoder, Prepare, Tower, check_item, unit_norm
from dualenc.encoders.hub import base_metadata, model_folder
from dualenc.errors import DualencError, first_line
from dualenc.files import write_json
from dualenc.reading import read_json_object
from dualenc.types import Inputs

WEIGHTS_FILE = "model.safetensors"
PROJECTOR_FILE = "projector.safetensors"
SMALL = 64
"""Images of at most this many pixels per side get the small-image stem, and are not cropped for evaluation."""

MAX_IMAGE_SIZE = 4096
"""Pixels per side that a model may ask for; one image is encoded to learn how many features there are."""

# jsonargparse would take a class as the result's type to be one whose making gives the result; hence Any.
Augment = Callable[[Image.Image, int], Any]
"""An RGB image and a seed to pixels (3, H, W), float32; a pure function of both."""


class ImageEncoder(DualEncoder):
    """Two views of an image through one timm backbone and projector (SimCLR, Chen et al. 2020).

    Args:
        backbone: a timm name such as "resnet18", a timm folder (`local-dir:` before it is optional), or a hub name.
        pretrained: with a timm name: load its weights; folders and hub names always bring theirs.
        projector_dim: D, size of the vectors that training compares; None trains the features themselves.
        projector_hidden: size between the projector's layers; None: as the features.
        projector_layers: number of its linear layers.
        small_image_stem: begin a ResNet with a 3×3 convolution of stride 1 and no pooling; None: for images of at
            most 64 pixels.
        image_size: pixels per side; None: as the backbone says.
        in_chans: channels of the images: 3, or 1 for grey ones; None: as the backbone says.
        mean: of each channel in [0, 1], to normalise by; None: as the backbone says.
        std: standard deviation of each channel; likewise.
        crop_pct: share of the side that evaluation keeps; None: all of small images, else as the backbone says.
        augment: training augmentation: image and seed to pixels (C, H, W) in [0, 1]; None crops and flips.
        backbone_args: further arguments of the timm architecture.
        gradient_checkpointing: recompute activations in the backward pass instead of storing them.

    Raises:
        DualencError: the backbone does not load, or an argument does not fit the others.
    """

    left: ProjectedTower
    right: ProjectedTower

    def __init__(
        self,
        backbone: str = "resnet18",
        *,
        pretrained: bool = False,
        projector_dim: int | None = 128,
        projector_hidden: int | None = None,
        projector_layers: int = 2,
        small_image_stem: bool | None = None,
        image_size: int | None = None,
        in_chans: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        crop_pct: float | None = None,
        augment: Augment | None = None,
        backbone_args: dict[str, Any] | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        from timm.data import create_transform

        check_pixels(image_size, crop_pct, std)
        if in_chans not in (None, 1, 3):
            raise DualencError(f"in_chans is {in_chans}: images have 3 channels, or 1 if they are to be grey")
        model, args, has_small_stem = load_backbone(
            backbone, pretrained, small_image_stem, image_size, in_chans, backbone_args or {}
        )
        if gradient_checkpointing:
            model.set_grad_checkpointing(True)
        config = _data_config(model.pretrained_cfg, image_size, in_chans, mean, std, crop_pct)
        with torch.no_grad(), _explained(backbone):
            features = int(model.eval()(torch.zeros(1, *config["input_size"])).shape[-1])
        sizes = None
        head: nn.Module = nn.Identity()
        if projector_dim is not None:
            hidden = features if projector_hidden is None else projector_hidden
            sizes = {"dim": projector_dim, "hidden": hidden, "layers": projector_layers}
            head = projector(features, **sizes)
        if augment is None:
            crops = v2.RandomResizedCrop(config["input_size"][1:], interpolation=v2.InterpolationMode.BICUBIC)
            to_pixels = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
            augment = Seeded(v2.Compose([crops, v2.RandomHorizontalFlip(), *to_pixels]))
        evaluate = create_transform(**config, is_training=False)
        training = Normalized(augment, config["mean"], config["std"])
        prepare = ImagePrepare(evaluate, training, grey=config["input_size"][0] == 1)
        tower = ProjectedTower(model, head, prepare, features, projector_dim or features)
        super().__init__(tower, tower, kind="image", views=True)
        self.backbone_args = args
        self.small_image_stem = has_small_stem
        if not is_registered(backbone):
            self.base = base_metadata(backbone, model_folder(backbone))
        elif pretrained:
            known = {
                "base_model": model.pretrained_cfg.get("hf_hub_id"),
                "license": model.pretrained_cfg.get("license"),
            }
            self.base = {key: value for key, value in known.items() if value}
        self.data_config = config
        self.projector_sizes = sizes

    @classmethod
    def from_folder(cls, folder: Path) -> ImageEncoder:
        """Load a timm folder, with its projector if there is one."""
        path = folder / DUALENC_FILE
        sizes = read_json_object(path).get("projector") if path.is_file() else None
        if sizes is None:
            return cls(str(folder), projector_dim=None)
        model = cls(str(folder), **{f"projector_{name}": sizes[name] for name in ("dim", "hidden", "layers")})
        _load_weights(model.left.projector, folder / PROJECTOR_FILE)
        return model

    def write(self, folder: Path) -> None:
        """Write a timm folder, for `local-dir:`, and the projector next to the backbone.

        timm's `create_model("local-dir:FOLDER", pretrained=True)` loads it. A ResNet with the small-image stem is
        saved with the weights of that stem: timm creates it from the folder without its weights, gets the stem as in
        `replace_stem`, and then loads the weights; the model card shows the lines.
        """
        backbone: Any = self.left.backbone
        known = backbone.pretrained_cfg
        pretrained_cfg = {
            **self.data_config,
            "fixed_input_size": bool(known.get("fixed_input_size")),
            "num_classes": 0,
            **{key: known[key] for key in ("first_conv", "classifier") if known.get(key)},
        }
        write_json(
            folder / "config.json",
            {
                "architecture": known["architecture"],
                "num_classes": 0,
                "num_features": backbone.num_features,
                "model_args": self.backbone_args,
                "pretrained_cfg": pretrained_cfg,
            },
        )
        write_json(
            folder / DUALENC_FILE,
            {"kind": self.kind, "projector": self.projector_sizes, "small_image_stem": self.small_image_stem},
        )
        tensors = {name: tensor.contiguous() for name, tensor in backbone.state_dict().items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        if self.projector_sizes is not None:
            save_file(self.left.projector.state_dict(), folder / PROJECTOR_FILE)

    @property
    def usage(self) -> str:
        """Which example of the model card's template shows how the folder is loaded."""
        return f"{self.kind}, small" if self.small_image_stem else self.kind

    def describe(self) -> dict[str, str]:
        """What the model is, as rows of a table."""
        backbone: Any = self.left.backbone
        stem = ", small-image stem" if self.small_image_stem else ""
        return {
            "Backbone": backbone.pretrained_cfg["architecture"] + stem,
            "Image size": "×".join(str(side) for side in self.data_config["input_size"][1:]),
            "Feature size": str(self.left.feature_dim),
            **super().describe(),
        }


class ProjectedTower(Tower):
    """A backbone, pixels (B, C, H, W) to features (B, feature_dim), and a projector behind it, to (B, D)."""

    modality = "image"

    def __init__(self, backbone: nn.Module, head: nn.Module, prepare: ImagePrepare, feature_dim: int, dim: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = head
        self.prepare: ImagePrepare = prepare
        self.feature_dim = feature_dim
        self.dim = dim

    def features(self, inputs: Inputs) -> Tensor:
        """The backbone's pooled features (B, feature_dim) of pixels (B, C, H, W), in float32."""
        return self.backbone(inputs["image"]).float()

    def forward(self, inputs: Inputs) -> Tensor:
        """The projector's output for pixels (B, C, H, W), as (B, D) unit-norm float32."""
        return unit_norm(self.projector(self.backbone(inputs["image"])))


def projector(features: int, dim: int, hidden: int, layers: int) -> nn.Sequential:
    """A perceptron with batch normalisation and ReLU between its layers (SimCLR, Chen et al. 2020, section 4.2).

    Args:
        features: size of the backbone's features.
        dim: D, size of the output.
        hidden: size between layers.
        layers: number of linear layers, at least 1; SimCLR has 2, VICReg's expander 3.

    Raises:
        DualencError: a size is not positive.
    """
    if min(dim, hidden, layers) < 1:
        raise DualencError(f"projector of {layers} layers, hidden {hidden}, dim {dim}: give positive numbers")
    parts: list[Any] = []
    for _ in range(layers - 1):
        parts += [nn.Linear(features, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU()]
        features = hidden
    return nn.Sequential(*parts, nn.Linear(features, dim, bias=False))


def is_registered(name: str) -> bool:
    """Whether timm knows an architecture of this name, a tag after a dot left aside."""
    import timm

    return timm.is_model(name.partition(".")[0])


def load_backbone(
    name: str,
    pretrained: bool,
    small_stem: bool | None,
    image_size: int | None,
    in_chans: int | None,
    args: dict[str, Any],
) -> tuple[Any, dict[str, Any], bool]:
    """A timm model without classifier, by its name or from the safetensors weights of a folder.

    The arguments are those of `ImageEncoder`; random weights are drawn from torch's generator.

    Returns:
        The model, (B, in_chans, H, W) to pooled features; all arguments of its architecture; whether it has the
        small-image stem.

    Raises:
        DualencError: timm cannot make the model, or configuration or weights are missing, corrupt, or do not fit.
    """
    import timm
    from timm.models import get_pretrained_cfg

    folder = None
    source = name
    saved = {}
    if is_registered(name):
        known = get_pretrained_cfg(name, allow_unregistered=True)
        fixed_size = known and known.fixed_input_size
    else:
        folder = model_folder(name)
        if not (folder / WEIGHTS_FILE).is_file():
            raise DualencError(f"{folder}: no {WEIGHTS_FILE}; convert its weights to safetensors first")
        config = read_json_object(folder / "config.json")
        if "architecture" not in config:
            raise DualencError(f"{folder / 'config.json'}: names no timm architecture; give another folder")
        source = f"local-dir:{folder}"
        saved = config.get("model_args", {})
        fixed_size = config.get("pretrained_cfg", config).get("fixed_input_size")
        path = folder / DUALENC_FILE
        has_stem = path.is_file() and bool(read_json_object(path).get("small_image_stem"))
        if small_stem not in (None, has_stem):
            raise DualencError(f"{folder}: small_image_stem is {has_stem} in this folder; leave it out")
        small_stem = has_stem
        pretrained = not has_stem
    # What timm takes besides an architecture's arguments: other weights, other configurations, compilation.
    others = inspect.signature(timm.create_model).parameters
    for key in (*saved, *args):
        if key in others or key.startswith("pretrained"):
            raise DualencError(f"{source}: {key} is no argument of an architecture (backbone_args); leave it out")
    size = {"img_size": image_size} if fixed_size and image_size is not None else {}
    with _explained(source):
        # timm leaves out arguments that are None
        model: Any = timm.create_model(
            source, pretrained=pretrained, num_classes=0, in_chans=in_chans, **{**size, **args}
        )
    side = image_size or model.pretrained_cfg["input_size"][-1]
    small = side <= SMALL and is_plain_resnet(model) if small_stem is None else small_stem
    if small:
        replace_stem(model)
        if folder is not None:  # timm does not know this stem, so its weights go in here
            _load_weights(model, folder / WEIGHTS_FILE)
    return model, {**saved, **args}, small


def is_plain_resnet(backbone: nn.Module) -> bool:
    """Whether this is a ResNet that begins with one 7×7 convolution and a max-pooling."""
    stem = getattr(backbone, "conv1", None)
    pooling = getattr(backbone, "maxpool", None)
    return isinstance(stem, nn.Conv2d) and stem.kernel_size == (7, 7) and isinstance(pooling, nn.MaxPool2d)


def replace_stem(backbone: Any) -> None:
    """Begin a ResNet with a 3×3 convolution of stride 1 and no pooling (SimCLR, Chen et al. 2020, appendix B.9).

    The convolution's weights are drawn from torch's generator.

    Raises:
        DualencError: the backbone is no plain ResNet.
    """
    if not is_plain_resnet(backbone):
        raise DualencError(
            f"{type(backbone).__name__} has no stem that small_image_stem could replace: leave it out, "
            "or set backbone_args such as patch_size"
        )
    old = backbone.conv1
    backbone.conv1 = nn.Conv2d(old.in_channels, old.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(backbone.conv1.weight, mode="fan_out", nonlinearity="relu")
    backbone.maxpool = nn.Identity()


def _data_config(
    known: dict[str, Any],
    image_size: int | None,
    in_chans: int | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    crop_pct: float | None,
) -> dict[str, Any]:
    """timm's description of a model's preprocessing, with those settings replaced that are not None."""
    from timm.data import resolve_data_config

    channels = in_chans or known["input_size"][0]
    height, width = known["input_size"][1:] if image_size is None else (image_size, image_size)
    if crop_pct is None and image_size is not None and image_size <= SMALL:
        crop_pct = 1.0
    settings: dict[str, Any] = {"input_size": (channels, height, width)}
    if channels == 1:
        # A grey image is the mean of the channels, and so is what to normalise it by.
        settings |= {key: [sum(known[key]) / len(known[key])] for key in ("mean", "std")}
    for name, values in (("mean", mean), ("std", std)):
        if values is not None:
            if len(values) not in (1, channels):
                raise DualencError(f"{name} has {len(values)} numbers for {channels} channels: give one per channel")
            settings[name] = values
    if crop_pct is not None:
        settings["crop_pct"] = crop_pct
    config = resolve_data_config(settings, pretrained_cfg=known)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}


def _load_weights(module: nn.Module, path: Path) -> None:
    """Load a safetensors file whose names and shapes are exactly the module's."""
    with _explained(str(path)):
        module.load_state_dict(load_file(path))


@contextmanager
def _explained(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DualencError(f"{where}: timm says: {first_line(error)}; check name, weights and arguments") from error


class ImagePrepare(Prepare):
    """Stack transformed images.

    Args:
        evaluate: RGB image to pixels (3, H, W).
        augment: the same for training, as a pure function of image and seed.
        grey: give `evaluate` grey images, of one channel.
    """

    modality = "image"

    def __init__(self, evaluate: Callable[[Image.Image], Tensor], augment: Augment, grey: bool = False) -> None:
        self.evaluate = evaluate
        self.augment = augment
        self.grey = grey

    def __call__(self, items: Sequence[Any], seeds: Sequence[int] | None = None) -> Inputs:
        """As `Prepare.__call__`; items are RGB images."""
        for item in items:
            check_item(item, "image")
        if seeds is None:
            modes = [image.convert("L") if self.grey else image for image in items]
            return {"image": torch.stack([self.evaluate(image) for image in modes])}
        return {"image": torch.stack([self.augment(image, seed) for image, seed in zip(items, seeds, strict=True)])}


class Seeded:
    """Makes a transform that draws from the global generators a pure function of image and seed.

    Args:
        transform: RGB image to pixels (3, H, W), random through torch, `random` or numpy.
    """

    def __init__(self, transform: Callable[[Image.Image], Tensor]) -> None:
        self.transform = transform

    def __call__(self, image: Image.Image, seed: int) -> Tensor:
        with seeded(seed):
            return self.transform(image)


class Normalized:
    """An augmentation to pixels in [0, 1], followed by the model's own normalisation.

    Args:
        augment: image and seed to pixels (3, H, W) in [0, 1].
        mean: subtracted, one number per channel of the model; pixels are made grey for a single one.
        std: divided by, one number per channel of the model.
    """

    def __init__(self, augment: Augment, mean: Sequence[float], std: Sequence[float]) -> None:
        self.augment = augment
        self.mean = torch.tensor(mean, dtype=torch.float32).reshape(-1, 1, 1)
        self.std = torch.tensor(std, dtype=torch.float32).reshape(-1, 1, 1)

    def __call__(self, image: Image.Image, seed: int) -> Tensor:
        pixels = self.augment(image, seed)
        if len(pixels) == 3 and len(self.mean) == 1:
            pixels = rgb_to_grayscale(pixels)
        return (pixels - self.mean) / self.std


def check_pixels(image_size: int | None, crop_pct: float | None, std: Sequence[float] | None) -> None:
    """Refuse what no image can be scaled, cropped or normalised by; None is what a model says itself."""
    if image_size is not None and not 1 <= image_size <= MAX_IMAGE_SIZE:
        raise DualencError(f"image_size is {image_size}: give 1 to {MAX_IMAGE_SIZE:,} pixels per side, such as 224")
    if crop_pct is not None and not 0 < crop_pct <= 1:
        raise DualencError(f"crop_pct is {crop_pct}: give a share of the side in (0, 1]")
    if std is not None and not all(0 < number < math.inf for number in std):
        raise DualencError(f"std is {list(std)}: give numbers above 0")


def checked_crop_scale(crop_scale: tuple[float, float]) -> tuple[float, float]:
    """The least and the greatest share of an image's area that a training crop may have; increasing, in (0, 1]."""
    low, high = crop_scale
    if not 0 < low <= high <= 1:
        raise DualencError(f"crop_scale is ({low}, {high}): give two increasing shares of the area in (0, 1]")
    return low, high


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generators of torch, `random` and numpy within this context, and put them back after it."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs too
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])  # noqa: NPY002
