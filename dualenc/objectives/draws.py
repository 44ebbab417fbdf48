"""Counter-based random draws: the same on every rank, with two integers of state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dualenc.objectives.anchors import Anchors
from dualenc.seeds import derive_seed


class SharedRandom(nn.Module):
    """A random stream shared by all ranks.

    Each rank draws for the global batch, then takes its own rows. Draw k comes from a generator
    seeded by (seed, k), so the state is valid on any device and for any number of ranks.

        random = SharedRandom(seed=0)
        random.uniform(4, like=embeddings)

    Args:
        seed: random seed of the stream.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.position = 0

    def uniform(self, *shape: int, like: Tensor) -> Tensor:
        """Return draws in [0, 1) on the device of `like`.

        They are in double precision, which the inverse CDF of a large corpus needs.
        """
        generator = self._next(like.device)
        return torch.rand(shape, generator=generator, device=like.device, dtype=torch.float64)

    def per_anchor(self, anchors: Anchors) -> Tensor:
        """Return (X, A) draws in [0, 1), one per anchor, whatever the number of ranks."""
        num_directions = len(anchors.directions)
        all_draws = self.uniform(num_directions, anchors.num_batch, like=anchors.embeddings)
        return all_draws[:, anchors.batch_rows]

    def integers(self, high: int, *shape: int, device: torch.device) -> Tensor:
        """Return integers drawn uniformly from [0, high)."""
        return torch.randint(high, shape, generator=self._next(device), device=device)

    def permutation(self, size: int, device: torch.device) -> Tensor:
        """Return (size,) the numbers [0, size) in random order."""
        return torch.randperm(size, generator=self._next(device), device=device)

    def get_extra_state(self) -> Tensor:
        """Return the seed and the number of draws made, for the state dict."""
        return torch.tensor([self.seed, self.position])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore from `get_extra_state()`."""
        self.seed, self.position = state.long().tolist()

    def _next(self, device: torch.device) -> torch.Generator:
        # Not a generator's own state, which differs between the CPU and CUDA and would tie a
        # checkpoint to the device.
        seed = derive_seed("draw", self.seed, self.position)
        self.position += 1
        return torch.Generator(device).manual_seed(seed)


@contextmanager
def rewound(module: nn.Module) -> Iterator[None]:
    """Reset the random streams in a module to their current positions on exit."""
    streams = [child for child in module.modules() if isinstance(child, SharedRandom)]
    positions = [stream.position for stream in streams]
    try:
        yield
    finally:
        for stream, position in zip(streams, positions, strict=True):
            stream.position = position
