"""timm backbones: created from a name, adapted to small images; their folder, read and written."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dualenc.encoders import timm_folder as small_stem
from dualenc.encoders.dual import DUALENC_FILE
from dualenc.encoders.hub import first_line
from dualenc.errors import DualencError
from dualenc.files import read_json_object, write_json

STEM_WIDTH = 32
TIMM_ARGS = {"stem_type": "deep", "stem_width": STEM_WIDTH, "replace_stem_pool": True}
"""Arguments of timm's ResNet that build the layers above."""

ENLARGEMENT = 4
"""How many times timm's model wants the image larger, by interpolation "nearest"."""

STEM = "conv1.weight"


def is_plain_resnet(backbone: nn.Module) -> bool:
    """Whether this is a ResNet that begins with one 7×7 convolution and a max-pooling."""
    stem = getattr(backbone, "conv1", None)
    return (
        isinstance(stem, nn.Conv2d)
        and stem.kernel_size == (7, 7)
        and stem.out_channels == 2 * STEM_WIDTH
        and isinstance(getattr(backbone, "maxpool", None), nn.MaxPool2d)
    )


def replace_stem(backbone: nn.Module) -> None:
    """Give a ResNet the stem for small images; its weights are drawn from torch's generator.

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


def to_timm(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of a small-stem ResNet as one of timm's ResNet with `TIMM_ARGS`, for images enlarged four times."""
    kernel = weights[STEM]
    width, channels = kernel.shape[0] // 2, kernel.shape[1]
    split, shift = kernel.new_zeros(width, channels, 3, 3), kernel.new_zeros(width, width, 3, 3)
    combine = kernel.new_zeros(2 * width, width, 3, 3)
    for channel in range(channels):
        split[2 * channel, channel, 1, 1] = 1
        split[2 * channel + 1, channel, 1, 1] = -1
    signed = torch.stack([kernel, -kernel], dim=2).flatten(1, 2)
    for row in range(3):
        for column in range(3):
            block = _block(row, column, channels)
            combine[:, block, row, column] = signed[:, :, row, column]
            if row and column:  # the four shifts, once each
                shift[block, : 2 * channels, row, column] = torch.eye(2 * channels)
    pick = kernel.new_zeros(2 * width, 2 * width, 3, 3)
    pick[:, :, 1, 1] = torch.eye(2 * width)
    stem = {"conv1.0.weight": split, "conv1.3.weight": shift, "conv1.6.weight": combine, "maxpool.0.weight": pick}
    stem |= _no_normalisation("conv1.1", width) | _no_normalisation("conv1.4", width)
    stem |= _no_normalisation("maxpool.1", 2 * width)
    return stem | {name: value for name, value in weights.items() if name != STEM}


def from_timm(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_timm`, exactly."""
    combine, channels = weights["conv1.6.weight"], weights["conv1.0.weight"].shape[1]
    kernel = combine.new_zeros(combine.shape[0], channels, 3, 3)
    for row in range(3):
        for column in range(3):
            kernel[:, :, row, column] = combine[:, _block(row, column, channels), row, column][:, ::2]
    rest = {name: value for name, value in weights.items() if not name.startswith(("conv1.", "maxpool."))}
    return {STEM: kernel, **rest}


def _block(row: int, column: int, channels: int) -> slice:
    """Where the channels are that hold the image shifted as this tap of the kernel needs it."""
    shifted = 2 * (row == 2) + (column == 2)
    return slice(shifted * 2 * channels, (shifted + 1) * 2 * channels)


def _no_normalisation(name: str, width: int) -> dict[str, Tensor]:
    """The state of a BatchNorm that returns its input in evaluation."""
    return {
        f"{name}.weight": torch.full((width,), (1 + 1e-5) ** 0.5),  # undoes the epsilon
        f"{name}.bias": torch.zeros(width),
        f"{name}.running_mean": torch.zeros(width),
        f"{name}.running_var": torch.ones(width),
        f"{name}.num_batches_tracked": torch.tensor(0),
    }


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

    _check_args(name, args)
    size = {"img_size": image_size} if image_size is not None and _has_fixed_size(name) else {}
    with _explained(name):
        # timm leaves out arguments that are None
        return timm.create_model(name, pretrained=pretrained, num_classes=0, in_chans=in_chans, **{**size, **args})


def load_backbone(folder: Path, *, image_size: int | None, in_chans: int | None, args: dict[str, Any]) -> nn.Module:
    """The backbone of a timm folder, from its safetensors weights only.

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
    config = read_json_object(folder / "config.json")
    if "architecture" not in config:
        raise DualencError(f"{folder / 'config.json'}: names no timm architecture; give another folder")
    if has_small_stem(folder):
        return _load_small(folder, config["architecture"], {**saved_args(folder), **args})
    _check_args(str(folder), saved_args(folder))
    return create_backbone(f"local-dir:{folder}", pretrained=True, image_size=image_size, in_chans=in_chans, args=args)


def saved_args(folder: Path) -> dict[str, Any]:
    """The arguments of the architecture that a folder was saved with."""
    if has_small_stem(folder):  # its config.json has those of timm's equivalent
        return read_json_object(folder / DUALENC_FILE, {"backbone_args": dict})["backbone_args"]
    return read_json_object(folder / "config.json").get("model_args", {})


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
    return path.is_file() and bool(read_json_object(path).get("small_image_stem"))


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
    config = resolve_data_config(given, pretrained_cfg=known)
    return {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}


def write_folder(folder: Path, backbone: Any, args: dict[str, Any], config: dict[str, Any], small: bool) -> None:
    """Write a timm folder, for `local-dir:`.

    Args:
        folder: where.
        backbone: a timm model without classifier.
        args: the arguments of its architecture beside image size and channels.
        config: its `data_config`.
        small: whether it has the small-image stem, which timm is given in layers of its own.
    """
    from safetensors.torch import save_file

    known, weights = backbone.pretrained_cfg, backbone.state_dict()
    layers = {key: known[key] for key in ("first_conv", "classifier") if known.get(key)}
    if small:
        weights, args = small_stem.to_timm(weights), {**args, **small_stem.TIMM_ARGS}
        config = {**config, "input_size": _enlarged(config["input_size"]), "interpolation": "nearest"}
        layers["first_conv"] = "conv1.0"
    fixed = bool(known.get("fixed_input_size"))
    write_json(
        folder / "config.json",
        {
            "architecture": known["architecture"],
            "num_classes": 0,
            "num_features": backbone.num_features,
            "model_args": args,
            "pretrained_cfg": {**config, "fixed_input_size": fixed, "num_classes": 0, **layers},
        },
    )
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def feature_size(backbone: Any, config: dict[str, Any]) -> int:
    """Size of what the backbone returns, by running it once on an empty image."""
    mode = backbone.training
    with torch.no_grad():
        size = backbone.eval()(torch.zeros(1, *config["input_size"])).shape[-1]
    backbone.train(mode)
    return int(size)


def _load_small(folder: Path, architecture: str, args: dict[str, Any]) -> nn.Module:
    from safetensors.torch import load_file

    preprocessing = read_json_object(folder / DUALENC_FILE, {"preprocessing": dict})["preprocessing"]
    channels = preprocessing["input_size"][0]
    backbone: Any = create_backbone(architecture, pretrained=False, image_size=None, in_chans=channels, args=args)
    small_stem.replace_stem(backbone)
    with _explained(str(folder / WEIGHTS_FILE)):
        backbone.load_state_dict(small_stem.from_timm(load_file(folder / WEIGHTS_FILE)))
    backbone.pretrained_cfg = {**backbone.pretrained_cfg, **preprocessing}
    return backbone


def _enlarged(size: Sequence[int]) -> list[int]:
    return [size[0], *(small_stem.ENLARGEMENT * side for side in size[1:])]


def _check_args(where: str, args: dict[str, Any]) -> None:
    """Refuse what timm takes beside an architecture's arguments: other weights, other configurations, compilation."""
    import timm

    others = inspect.signature(timm.create_model).parameters
    for key in args:
        if key in others or key.startswith("pretrained"):
            raise DualencError(f"{where}: {key} is no argument of an architecture (backbone_args); leave it out")


def _has_fixed_size(name: str) -> bool:
    from timm.models import get_pretrained_cfg

    if name.startswith("local-dir:"):
        config = read_json_object(Path(name.removeprefix("local-dir:")) / "config.json")
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
        raise DualencError(f"{where}: timm says: {first_line(error)}; check name, weights and arguments") from error
