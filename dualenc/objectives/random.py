"""The random draws of an objective: the same on every rank, and part of its state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dualenc.errors import DualencError


class SharedRandom(nn.Module):
    """Numbered draws that all ranks make alike: draw for the whole global batch, then take the rank's own rows.

    Draw k comes from a generator seeded by (seed, k) on the device that wants it. So nothing is copied to an
    accelerator, and the whole state is two integers, valid on any device and for any number of ranks.

    Args:
        seed: start of the sequence.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.draws = 0

    def uniform(self, *shape: int, like: Tensor) -> Tensor:
        """Draws in the open interval (0, 1) of the given shape, with the device and precision of `like`."""
        draws = torch.rand(shape, generator=self._next(like.device), device=like.device)
        # log(0) and 1.0 must not appear; float32 is drawn whatever the precision, so that both see the same numbers.
        tiny = 2.0**-24
        return draws.clamp_(tiny, 1 - tiny).to(like.dtype)

    def integers(self, high: int, *shape: int, device: torch.device) -> Tensor:
        """Integers in [0, high) of the given shape."""
        return torch.randint(high, shape, generator=self._next(device), device=device)

    def permutation(self, size: int, device: torch.device) -> Tensor:
        """(size,) the numbers [0, size) in random order."""
        return torch.randperm(size, generator=self._next(device), device=device)

    def get_extra_state(self) -> Tensor:
        """Seed and number of draws made, for the state dict."""
        return torch.tensor([self.seed, self.draws])

    def set_extra_state(self, state: Tensor) -> None:
        """Continue from a saved position."""
        if state.shape != (2,):
            raise DualencError("objective state: _extra_state of the random draws must hold seed and position")
        self.seed, self.draws = (int(number) for number in state)

    def _next(self, device: torch.device) -> torch.Generator:
        seed = _mixed(_mixed(self.seed) + self.draws)
        self.draws += 1
        return torch.Generator(device).manual_seed(seed)


def _mixed(number: int) -> int:
    """A 63-bit integer whose bits all depend on all bits of the number (splitmix64, Steele et al. 2014)."""
    mask = 2**64 - 1
    number = (number + 0x9E3779B97F4A7C15) & mask
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & mask
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
    return (number ^ (number >> 31)) >> 1
