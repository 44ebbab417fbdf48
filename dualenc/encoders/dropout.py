"""Dropout at half the cost on a CPU: 16 random bits per element instead of a random float."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEVELS = 2**16


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` with a faster mask on a CPU, where the probability is rounded to 2⁻¹⁶.

    On other devices, and when compiled, torch's own dropout runs.

        dropped = Dropout(0.1).train()(torch.ones(4, 8))
    """

    def forward(self, input: Tensor) -> Tensor:
        """Zero elements at random in training, and scale up the others."""
        is_drawn_here = input.device.type == "cpu" and not torch.compiler.is_compiling()
        if not (self.training and is_drawn_here and 0 < self.p < 1):
            return super().forward(input)
        return input * dropout_mask(input, self.p).div_(1 - self.p)


def convert_dropout(module: nn.Module) -> None:
    """Replace every `torch.nn.Dropout` inside a module by `Dropout`."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                setattr(parent, name, Dropout(child.p).train(child.training))


def dropout_mask(values: Tensor, dropout: float) -> Tensor:
    """Draw a mask in the shape of `values`: 0 with probability `dropout`, else 1."""
    # One 64-bit random number decides about four elements, 16 bits each.
    count = values.numel()
    numbers = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    # Uniform over -2¹⁵ … 2¹⁵ - 1, hence the shift of the threshold by one half.
    uniform = numbers.view(torch.int16)[:count].view(values.shape)
    return (uniform >= round((dropout - 0.5) * LEVELS)).to(values.dtype)
