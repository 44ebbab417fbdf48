"""Encoders of images alone: a timm backbone with its projector, and how images become tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import rgb_to_grayscale

from dualenc.encoders import timm_folder
from dualenc.encoders.dual import DUALENC_FILE, DualEncoder, Prepare, Tower, unit_norm
from dualenc.encoders.load import model_folder
from dualenc.errors import DualencError
from dualenc.files import read_json_object, write_json

PROJECTOR_FILE = "projector.safetensors"

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
        if in_chans not in (None, 1, 3):
            raise DualencError(f"in_chans is {in_chans}: images have 3 channels, or 1 if they are to be grey")
        args = backbone_args or {}
        model: Any
        if timm_folder.is_registered(backbone):
            model = timm_folder.create_backbone(
                backbone, pretrained=pretrained, image_size=image_size, in_chans=in_chans, args=args
            )
            if small_image_stem is None:
                side = image_size or model.pretrained_cfg["input_size"][-1]
                small_image_stem = side <= timm_folder.SMALL and timm_folder.is_plain_resnet(model)
            if small_image_stem:
                timm_folder.replace_stem(model)
        else:
            folder = model_folder(backbone)
            model = timm_folder.load_backbone(folder, image_size=image_size, in_chans=in_chans, args=args)
            args = {**timm_folder.saved_args(folder), **args}
            has_stem = timm_folder.has_small_stem(folder)
            if small_image_stem not in (None, has_stem):
                raise DualencError(f"{folder}: small_image_stem is {has_stem} in this folder; leave it out")
            small_image_stem = has_stem
        if gradient_checkpointing:
            model.set_grad_checkpointing(True)
        config = timm_folder.data_config(
            model, image_size=image_size, in_chans=in_chans, mean=mean, std=std, crop_pct=crop_pct
        )
        features = timm_folder.feature_size(model, config)
        sizes = None
        head: nn.Module = nn.Identity()
        if projector_dim is not None:
            hidden = features if projector_hidden is None else projector_hidden
            sizes = {"dim": projector_dim, "hidden": hidden, "layers": projector_layers}
            head = projector(features, **sizes)
        tower = ProjectedTower(model, head, _prepare(config, augment), features, projector_dim or features)
        super().__init__(tower, tower, kind="image", views=True)
        self.backbone_args, self.small_image_stem = args, small_image_stem
        self.data_config, self.projector_sizes = config, sizes

    @classmethod
    def from_folder(cls, folder: Path) -> ImageEncoder:
        """Load a timm folder, with its projector if there is one.

        Raises:
            DualencError: files are missing, corrupt, or do not fit each other.
        """
        path = folder / DUALENC_FILE
        sizes = read_json_object(path).get("projector") if path.is_file() else None
        if sizes is None:
            return cls(str(folder), projector_dim=None)
        model = cls(
            str(folder),
            projector_dim=sizes["dim"],
            projector_hidden=sizes["hidden"],
            projector_layers=sizes["layers"],
        )
        timm_folder.load_weights(model.left.projector, folder / PROJECTOR_FILE)
        return model

    def write(self, folder: Path) -> None:
        """Write a timm folder, for `local-dir:`, and the projector beside the backbone."""
        from safetensors.torch import save_file

        timm_folder.write_folder(folder, self.left.backbone, self.backbone_args, self.data_config)
        write_json(
            folder / DUALENC_FILE,
            {"kind": self.kind, "projector": self.projector_sizes, "small_image_stem": self.small_image_stem},
        )
        if self.projector_sizes is not None:
            save_file(self.left.projector.state_dict(), folder / PROJECTOR_FILE)

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
    """A backbone, and a projector behind it.

    Args:
        backbone: pixels (B, C, H, W) to features (B, feature_dim).
        head: features to (B, D); the identity leaves them as they are.
        prepare: the preprocessing.
        feature_dim: size of the features.
        dim: D, size of the vectors.
    """

    modality = "image"

    def __init__(self, backbone: nn.Module, head: nn.Module, prepare: ImagePrepare, feature_dim: int, dim: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.projector = head
        self.prepare: ImagePrepare = prepare
        self.feature_dim = feature_dim
        self.dim = dim

    def features(self, inputs: dict[str, Tensor]) -> Tensor:
        """The backbone's pooled features (B, feature_dim) of pixels (B, C, H, W), in float32."""
        return self.backbone(inputs["image"]).float()

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """The projector's output for pixels (B, C, H, W), as (B, D) unit-norm float32."""
        return unit_norm(self.projector(self.backbone(inputs["image"])))


def _prepare(config: dict[str, Any], augment: Augment | None) -> ImagePrepare:
    from timm.data import create_transform

    if augment is None:
        flips = v2.RandomHorizontalFlip()
        crops = v2.RandomResizedCrop(config["input_size"][1:], interpolation=v2.InterpolationMode.BICUBIC)
        augment = Seeded(v2.Compose([crops, flips, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]))
    training = Normalized(augment, config["mean"], config["std"])
    return ImagePrepare(create_transform(**config, is_training=False), training, grey=config["input_size"][0] == 1)


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

    def __call__(self, items: Sequence[Image.Image], seeds: Sequence[int] | None = None) -> dict[str, Tensor]:
        if seeds is None:
            modes = [item.convert("L") if self.grey else item for item in items]
            return {"image": torch.stack([self.evaluate(item) for item in modes])}
        return {"image": torch.stack([self.augment(item, seed) for item, seed in zip(items, seeds, strict=True)])}


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
