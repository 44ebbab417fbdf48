"""The random draws of an objective: the same on every rank, and part of its state."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SharedRandom(nn.Module):
    """A generator that all ranks advance alike: draw for the whole global batch, then take the rank's own rows.

    It lives on the CPU, so that draws depend neither on the device nor on the number of ranks, and its position is
    in the state dict.

    Args:
        seed: start of the sequence.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, *shape: int, like: Tensor) -> Tensor:
        """Draws in the open interval (0, 1) of the given shape, with the device and precision of `like`."""
        draws = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        # log(0) and 1.0 (after rounding to float32) must not appear.
        tiny = 2.0**-24
        return draws.clamp(tiny, 1 - tiny).to(device=like.device, dtype=like.dtype)

    def integers(self, high: int, *shape: int, device: torch.device) -> Tensor:
        """Integers in [0, high) of the given shape."""
        return torch.randint(high, shape, generator=self.generator).to(device)

    def get_extra_state(self) -> Tensor:
        """Position of the generator, for the state dict."""
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Continue from a saved position."""
        self.generator.set_state(state.cpu())
