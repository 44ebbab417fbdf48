"""timm backbones: created from a name, adapted to small images; their folder, read and written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dualenc.encoders.dual import DUALENC_FILE
from dualenc.encoders.hub import first_line
from dualenc.errors import DualencError
from dualenc.files import read_json, write_json

WEIGHTS_FILE = "model.safetensors"


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

    size = {"img_size": image_size} if image_size is not None and _has_fixed_size(name) else {}
    with _explained(name):
        # timm leaves out arguments that are None
        return timm.create_model(name, pretrained=pretrained, num_classes=0, in_chans=in_chans, **{**size, **args})


def load_backbone(folder: Path, *, image_size: int | None, in_chans: int | None, args: dict[str, Any]) -> nn.Module:
    """The backbone of a timm folder, from its safetensors weights only.

    Args:
        folder: config.json and model.safetensors.
        image_size: pixels per side; None: as the folder says.
        in_chans: channels of the images; None: as the model says.
        args: further arguments of the architecture.

    Raises:
        DualencError: configuration or weights are missing, corrupt, or do not fit each other.
    """
    if not (folder / WEIGHTS_FILE).is_file():
        raise DualencError(f"{folder}: no {WEIGHTS_FILE}; convert its weights to safetensors first")
    if "architecture" not in read_json(folder / "config.json"):
        raise DualencError(f"{folder / 'config.json'}: names no timm architecture; give another folder")
    small = has_small_stem(folder)
    options = {"image_size": image_size, "in_chans": in_chans, "args": args}
    backbone = create_backbone(f"local-dir:{folder}", pretrained=not small, **options)  # type: ignore[arg-type]
    if small:
        replace_stem(backbone)
        load_weights(backbone, folder / WEIGHTS_FILE)
    return backbone


def load_weights(module: nn.Module, path: Path) -> None:
    """Load a safetensors file whose names and shapes are exactly the module's.

    Raises:
        DualencError: the file is missing, corrupt, or of another module.
    """
    from safetensors.torch import load_file

    with _explained(str(path)):
        module.load_state_dict(load_file(path))


def has_small_stem(folder: Path) -> bool:
    """Whether the folder's ResNet had its stem replaced for small images."""
    path = folder / DUALENC_FILE
    return path.is_file() and bool(read_json(path).get("small_image_stem"))


def is_plain_resnet(backbone: nn.Module) -> bool:
    """Whether this is a ResNet that begins with one 7×7 convolution and a max-pooling."""
    stem = getattr(backbone, "conv1", None)
    return (
        isinstance(stem, nn.Conv2d)
        and stem.kernel_size == (7, 7)
        and isinstance(getattr(backbone, "maxpool", None), nn.MaxPool2d)
    )


def replace_stem(backbone: nn.Module) -> None:
    """Give a ResNet the stem for small images: a 3×3 convolution of stride 1, no pooling (SimCLR, appendix B.9).

    Raises:
        DualencError: the backbone is no plain ResNet.
    """
    if not is_plain_resnet(backbone):
        raise DualencError(
            f"{type(backbone).__name__} has no stem that small_image_stem could replace: leave it out, "
            "or set backbone_args such as patch_size"
        )
    old: Any = backbone.conv1
    new = nn.Conv2d(old.in_channels, old.out_channels, 3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    backbone.conv1 = new
    backbone.maxpool = nn.Identity()


def data_config(backbone: Any, **settings: Any) -> dict[str, Any]:
    """timm's description of a model's preprocessing, with those settings replaced that are not None."""
    from timm.data import resolve_data_config

    known = backbone.pretrained_cfg
    side = settings.pop("image_size")
    channels = settings.pop("in_chans") or known["input_size"][0]
    height, width = known["input_size"][1:] if side is None else (side, side)
    given = {"input_size": (channels, height, width), **{k: v for k, v in settings.items() if v is not None}}
    if channels == 1:
        # A grey image is the mean of the channels, and so is what to normalise it by.
        given = {key: [sum(known[key]) / len(known[key])] for key in ("mean", "std")} | given
    return resolve_data_config(given, pretrained_cfg=known)


def write_folder(folder: Path, backbone: Any, args: dict[str, Any], config: dict[str, Any]) -> None:
    """Write a timm folder, for `local-dir:`.

    Args:
        folder: where.
        backbone: a timm model without classifier.
        args: the arguments of its architecture beside image size and channels.
        config: its `data_config`.
    """
    from safetensors.torch import save_file

    known = backbone.pretrained_cfg
    preprocessing = {**config, "fixed_input_size": bool(known.get("fixed_input_size")), "num_classes": 0}
    layers = {key: known[key] for key in ("first_conv", "classifier") if known.get(key)}
    write_json(
        folder / "config.json",
        {
            "architecture": known["architecture"],
            "num_classes": 0,
            "num_features": backbone.num_features,
            "model_args": args,
            "pretrained_cfg": {**preprocessing, **layers},
        },
    )
    tensors = {name: tensor.contiguous() for name, tensor in backbone.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def feature_size(backbone: Any, config: dict[str, Any]) -> int:
    """Size of what the backbone returns, by running it once on an empty image."""
    mode = backbone.training
    with torch.no_grad():
        size = backbone.eval()(torch.zeros(1, *config["input_size"])).shape[-1]
    backbone.train(mode)
    return int(size)


def _has_fixed_size(name: str) -> bool:
    from timm.models import get_pretrained_cfg

    if name.startswith("local-dir:"):
        config = read_json(Path(name.removeprefix("local-dir:")) / "config.json")
        return bool(config.get("pretrained_cfg", config).get("fixed_input_size"))
    found = get_pretrained_cfg(name, allow_unregistered=True)
    return bool(found and found.fixed_input_size)


@contextmanager
def _explained(where: str) -> Iterator[None]:
    try:
        yield
    except DualencError:
        raise
    except Exception as error:
        raise DualencError(f"{where}: timm cannot make the model ({first_line(error)}); mend that") from error
