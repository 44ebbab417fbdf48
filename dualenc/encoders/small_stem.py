"""The small-image stem of ResNets, and the same function in layers that timm can build.

timm's ResNet always begins with two halvings: a convolution of stride 2, and a pooling. For images of 32 pixels that
is too much, so the stem here is one 3×3 convolution of stride 1 (SimCLR, Chen et al. 2020, appendix B.9). No argument
of timm gives that. Its "deep" stem with a convolution as pooling can however compute it exactly, on the image enlarged
four times without interpolation, if its weights are these (V is the image enlarged twice, r = 2p a position in it):

    conv1.0  stride 2    V and -V;                      the ReLU behind keeps the positive part of each
    conv1.3              the same, shifted by (0 or 1, 0 or 1): V[r], V[r + 1]
    conv1.6              the stem's kernel: its taps -1, 0, 1 want V[r - 2], V[r], V[r + 2]; the first equals
                         V[r - 1], the last is the shifted V at r + 1
    bn1, act1            as they are
    maxpool.0  stride 2  the value at r = 2p

Batch normalisations between them do nothing. So a folder of a small-stem ResNet loads in timm without its
knowing, and gives the same features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dualenc.errors import DualencError

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
