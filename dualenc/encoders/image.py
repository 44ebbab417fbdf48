"""Encoders of images alone: a timm backbone, and the projector that it is trained through."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualenc.encoders import timm_folder
from dualenc.encoders import timm_folder as small_stem
from dualenc.encoders.dual import DUALENC_FILE, DualEncoder, Tower, unit_norm
from dualenc.encoders.hub import model_folder
from dualenc.encoders.image_prepare import Augment, ImagePrepare, Normalized, Seeded
from dualenc.errors import DualencError
from dualenc.files import read_json_object, write_json


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


PROJECTOR_FILE = "projector.safetensors"
SMALL = 64
"""Images of at most this many pixels per side get the small-image stem, and are not cropped for evaluation."""


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
        options = {"image_size": image_size, "in_chans": in_chans, "args": backbone_args or {}}
        model, args, small = _backbone(backbone, pretrained, small_image_stem, options)
        if gradient_checkpointing:
            model.set_grad_checkpointing(True)
        config = _data_config(model, image_size, in_chans, mean, std, crop_pct)
        features = timm_folder.feature_size(model, config)
        hidden = features if projector_hidden is None else projector_hidden
        sizes = None if projector_dim is None else {"dim": projector_dim, "hidden": hidden, "layers": projector_layers}
        head = nn.Identity() if sizes is None else projector(features, **sizes)
        tower = ProjectedTower(model, head, _prepare(config, augment), features, projector_dim or features)
        super().__init__(tower, tower, kind="image", views=True)
        self.backbone_args, self.small_image_stem = args, small
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

        tower = self.left
        timm_folder.write_folder(folder, tower.backbone, self.backbone_args, self.data_config, self.small_image_stem)
        extra = {
            "kind": self.kind,
            "projector": self.projector_sizes,
            "small_image_stem": self.small_image_stem,
            "backbone_args": self.backbone_args,
            "preprocessing": self.data_config,
        }
        write_json(folder / DUALENC_FILE, extra)
        if self.projector_sizes is not None:
            save_file(tower.projector.state_dict(), folder / PROJECTOR_FILE)

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


def _backbone(
    name: str, pretrained: bool, small: bool | None, options: dict[str, Any]
) -> tuple[Any, dict[str, Any], bool]:
    """The backbone, the arguments of its architecture, and whether it has the small-image stem."""
    if timm_folder.is_registered(name):
        model: Any = timm_folder.create_backbone(name, pretrained=pretrained, **options)
        if small is None:
            size = options["image_size"] or model.pretrained_cfg["input_size"][-1]
            small = size <= SMALL and small_stem.is_plain_resnet(model)
        if small:
            small_stem.replace_stem(model)
        return model, options["args"], small
    folder = model_folder(name)
    model = timm_folder.load_backbone(folder, **options)
    has = timm_folder.has_small_stem(folder)
    if small is not None and small != has:
        raise DualencError(f"{folder}: small_image_stem is {has} in this folder; leave it out")
    return model, {**timm_folder.saved_args(folder), **options["args"]}, has


def _data_config(
    model: Any,
    image_size: int | None,
    in_chans: int | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
    crop_pct: float | None,
) -> dict[str, Any]:
    """timm's description of the preprocessing."""
    channels = in_chans or model.pretrained_cfg["input_size"][0]
    for name, value in (("mean", mean), ("std", std)):
        if value is not None and len(value) not in (1, channels):
            raise DualencError(f"{name} has {len(value)} numbers for {channels} channels: give one per channel")
    if crop_pct is None and image_size is not None and image_size <= SMALL:
        crop_pct = 1.0
    return timm_folder.data_config(
        model, image_size=image_size, in_chans=in_chans, mean=mean, std=std, crop_pct=crop_pct
    )


def _prepare(config: dict[str, Any], augment: Augment | None) -> ImagePrepare:
    from timm.data import create_transform
    from torchvision.transforms import v2

    if augment is None:
        flips = v2.RandomHorizontalFlip()
        crops = v2.RandomResizedCrop(config["input_size"][1:], interpolation=v2.InterpolationMode.BICUBIC)
        augment = Seeded(v2.Compose([crops, flips, v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]))
    training = Normalized(augment, config["mean"], config["std"])
    return ImagePrepare(create_transform(**config, is_training=False), training, grey=config["input_size"][0] == 1)
