"""Counter-based random draws: the same on every rank, with two integers of state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dualenc.seeds import derive_seed


class SharedRandom(nn.Module):
    """A random stream that all ranks share: each draws for the whole global batch, then takes its
    own rows.

    Draw k comes from a generator seeded by (seed, k), so the state is valid on any device and
    number of ranks.

    Args:
        seed: start of the sequence.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.position = 0

    def uniform(self, *shape: int, like: Tensor) -> Tensor:
        """Draws in [0, 1) on the device of `like`; in double precision, which inverse CDFs of large
        corpora need."""
        generator = self._next(like.device)
        return torch.rand(shape, generator=generator, device=like.device, dtype=torch.float64)

    def integers(self, high: int, *shape: int, device: torch.device) -> Tensor:
        """Integers in [0, high)."""
        return torch.randint(high, shape, generator=self._next(device), device=device)

    def permutation(self, size: int, device: torch.device) -> Tensor:
        """(size,) the numbers [0, size) in random order."""
        return torch.randperm(size, generator=self._next(device), device=device)

    def get_extra_state(self) -> Tensor:
        """Seed and number of draws made, for the state dict."""
        return torch.tensor([self.seed, self.position])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore from `get_extra_state()`."""
        self.seed, self.position = state.long().tolist()

    def _next(self, device: torch.device) -> torch.Generator:
        seed = derive_seed("draw", self.seed, self.position)
        self.position += 1
        return torch.Generator(device).manual_seed(seed)
