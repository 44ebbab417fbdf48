"""timm backbones: created from a name, given the stem for small images; their folder, read and written."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dualenc.encoders.dual import DUALENC_FILE
from dualenc.encoders.load import first_line
from dualenc.errors import DualencError
from dualenc.files import read_json_object, write_json

WEIGHTS_FILE = "model.safetensors"

SMALL = 64
"""Images of at most this many pixels per side get the small-image stem, and are not cropped for evaluation."""


def is_registered(name: str) -> bool:
    """Whether timm knows an architecture of this name, a tag after a dot left aside."""
    import timm

    return timm.is_model(name.partition(".")[0])


def create_backbone(
    name: str, *, pretrained: bool, image_size: int | None, in_chans: int | None, args: dict[str, Any]
) -> nn.Module:
    """A timm model without classifier, (B, in_chans, H, W) to pooled features.

    Args:
        name: a name that timm knows, or `local-dir:FOLDER`.
        pretrained: load the weights of that name or folder; otherwise random ones, from torch's generator.
        image_size: pixels per side; None: as the model says.
        in_chans: channels of the images; None: as the model says.
        args: further arguments of the architecture.

    Raises:
        DualencError: timm cannot make the model, or its weights cannot be had.
    """
    import timm
    from timm.models import get_pretrained_cfg

    _check_args(name, args)
    size = {}
    if image_size is not None:
        if name.startswith("local-dir:"):
            config = read_json_object(Path(name.removeprefix("local-dir:")) / "config.json")
            fixed = config.get("pretrained_cfg", config).get("fixed_input_size")
        else:
            known = get_pretrained_cfg(name, allow_unregistered=True)
            fixed = known and known.fixed_input_size
        size = {"img_size": image_size} if fixed else {}
    with _explained(name):
        # timm leaves out arguments that are None
        return timm.create_model(name, pretrained=pretrained, num_classes=0, in_chans=in_chans, **{**size, **args})


def load_backbone(folder: Path, *, image_size: int | None, in_chans: int | None, args: dict[str, Any]) -> nn.Module:
    """The backbone of a timm folder, from its safetensors weights only; with the small-image stem if it has one.

    Args:
        folder: config.json and model.safetensors.
        image_size: pixels per side; None: as the folder says.
        in_chans: channels of the images; None: as the folder says.
        args: further arguments of the architecture.

    Raises:
        DualencError: configuration or weights are missing, corrupt, or do not fit each other.
    """
    if not (folder / WEIGHTS_FILE).is_file():
        raise DualencError(f"{folder}: no {WEIGHTS_FILE}; convert its weights to safetensors first")
    if "architecture" not in read_json_object(folder / "config.json"):
        raise DualencError(f"{folder / 'config.json'}: names no timm architecture; give another folder")
    _check_args(str(folder), saved_args(folder))
    small = has_small_stem(folder)
    backbone = create_backbone(
        f"local-dir:{folder}", pretrained=not small, image_size=image_size, in_chans=in_chans, args=args
    )
    if small:  # timm does not know this stem, so its weights go in here
        replace_stem(backbone)
        load_weights(backbone, folder / WEIGHTS_FILE)
    return backbone


def saved_args(folder: Path) -> dict[str, Any]:
    """The arguments of the architecture that a folder was saved with."""
    return read_json_object(folder / "config.json").get("model_args", {})


def has_small_stem(folder: Path) -> bool:
    """Whether the folder's ResNet had its stem replaced for small images."""
    path = folder / DUALENC_FILE
    return path.is_file() and bool(read_json_object(path).get("small_image_stem"))


def load_weights(module: nn.Module, path: Path) -> None:
    """Load a safetensors file whose names and shapes are exactly the module's.

    Raises:
        DualencError: the file is missing, corrupt, or of another module.
    """
    from safetensors.torch import load_file

    with _explained(str(path)):
        module.load_state_dict(load_file(path))


def write_folder(folder: Path, backbone: Any, args: dict[str, Any], config: dict[str, Any]) -> None:
    """Write a timm folder, for `local-dir:`.

    timm's `create_model("local-dir:FOLDER", pretrained=True)` loads it. A ResNet with the small-image stem is saved
    with the weights of that stem: timm creates it from the folder without its weights, gets the stem as in
    `replace_stem`, and then loads the weights; the model card shows the lines.

    Args:
        folder: where.
        backbone: a timm model without classifier.
        args: the arguments of its architecture beside image size and channels.
        config: its `data_config`.
    """
    from safetensors.torch import save_file

    known = backbone.pretrained_cfg
    layers = {key: known[key] for key in ("first_conv", "classifier") if known.get(key)}
    write_json(
        folder / "config.json",
        {
            "architecture": known["architecture"],
            "num_classes": 0,
            "num_features": backbone.num_features,
            "model_args": args,
            "pretrained_cfg": {
                **config,
                "fixed_input_size": bool(known.get("fixed_input_size")),
                "num_classes": 0,
                **layers,
            },
        },
    )
    tensors = {name: tensor.contiguous() for name, tensor in backbone.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


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


def data_config(
    backbone: Any,
    *,
    image_size: int | None = None,
    in_chans: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    crop_pct: float | None = None,
) -> dict[str, Any]:
    """timm's description of a model's preprocessing, with those settings replaced that are not None.

    Raises:
        DualencError: mean or std has another number of channels.
    """
    from timm.data import resolve_data_config

    known = backbone.pretrained_cfg
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


def feature_size(backbone: nn.Module, config: dict[str, Any]) -> int:
    """Size of what the backbone returns, by running it once on an empty image."""
    mode = backbone.training
    with torch.no_grad():
        size = backbone.eval()(torch.zeros(1, *config["input_size"])).shape[-1]
    backbone.train(mode)
    return int(size)


def _check_args(where: str, args: dict[str, Any]) -> None:
    """Refuse what timm takes beside an architecture's arguments: other weights, other configurations, compilation."""
    import timm

    others = inspect.signature(timm.create_model).parameters
    for key in args:
        if key in others or key.startswith("pretrained"):
            raise DualencError(f"{where}: {key} is no argument of an architecture (backbone_args); leave it out")


@contextmanager
def _explained(where: str) -> Iterator[None]:
    try:
        yield
    except DualencError:
        raise
    except Exception as error:
        raise DualencError(f"{where}: timm says: {first_line(error)}; check name, weights and arguments") from error
