"""Counter-based random draws: the same on every rank, with two integers of state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dualenc.errors import DualencError
from dualenc.seeds import derive_seed


class SharedRandom(nn.Module):
    """A random stream that all ranks share: each draws for the whole global batch, then takes its own rows.

    Draw k comes from a generator seeded by (seed, k) on the device that needs it, so nothing is copied to an
    accelerator, and the state is valid on any device and for any number of ranks.

    Args:
        seed: start of the sequence.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.position = 0

    def uniform(self, *shape: int, like: Tensor) -> Tensor:
        """Draws in [0, 1) of the given shape, in double precision, on the device of `like`."""
        generator = self._next(like.device)
        # Always double: inverse-CDF draws from large corpora need more than float32's 24 bits.
        return torch.rand(shape, generator=generator, device=like.device, dtype=torch.float64)

    def integers(self, high: int, *shape: int, device: torch.device) -> Tensor:
        """Integers in [0, high) of the given shape."""
        return torch.randint(high, shape, generator=self._next(device), device=device)

    def permutation(self, size: int, device: torch.device) -> Tensor:
        """(size,) the numbers [0, size) in random order."""
        return torch.randperm(size, generator=self._next(device), device=device)

    def get_extra_state(self) -> Tensor:
        """Seed and number of draws made, for the state dict."""
        return torch.tensor([self.seed, self.position])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore from `get_extra_state()`."""
        if state.shape != (2,):
            raise DualencError("objective state: _extra_state of the random draws must hold seed and position")
        self.seed, self.position = state.long().tolist()

    def _next(self, device: torch.device) -> torch.Generator:
        # A fresh generator per draw has no state to save or to keep alike between devices.
        seed = derive_seed("draw", self.seed, self.position)
        self.position += 1
        return torch.Generator(device).manual_seed(seed)
