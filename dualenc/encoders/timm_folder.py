"""timm backbones: created from a name, adapted to small images; their folder, read and written."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dualenc.encoders import small_stem
from dualenc.encoders.dual import DUALENC_FILE
from dualenc.encoders.hub import first_line
from dualenc.errors import DualencError
from dualenc.files import read_json_object, write_json

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
