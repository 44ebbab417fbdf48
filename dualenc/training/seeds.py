"""Seeds as pure functions of what they are for, so that randomness does not depend on workers, ranks or restarts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np

VIEWS = {"left": 0, "right": 1}
_STREAMS = {"batch": 0, "item": 1, "rank": 2, "table": 3, "compare": 4}

Stream = Literal["batch", "item", "rank", "table", "compare"]


def derive_seed(stream: Stream, *parts: int) -> int:
    """A 63-bit seed that is a pure function of non-negative integers, independent between streams.

    Args:
        stream: what the seed is for; equal parts give unrelated seeds in different streams.
        parts: for instance (seed, epoch, index, view).
    """
    return int(np.random.SeedSequence([_STREAMS[stream], *parts]).generate_state(1, np.uint64)[0] >> 1)


def augmentation_seeds(seed: int, epoch: int, indices: Iterable[int], side: Literal["left", "right"]) -> list[int]:
    """One seed per pair for the augmentation of one of its two views: of (seed, epoch, index, view)."""
    return [derive_seed("batch", seed, epoch, int(index), VIEWS[side]) for index in indices]


def item_seeds(seed: int, step: int, ids: Iterable[int], side: Literal["left", "right"]) -> list[int]:
    """One seed per item that an objective asks for by id: of (seed, step, id, view)."""
    return [derive_seed("item", seed, step, int(item), VIEWS[side]) for item in ids]


def generator(stream: Stream, *parts: int) -> np.random.Generator:
    """A numpy generator seeded as `derive_seed`."""
    return np.random.default_rng(derive_seed(stream, *parts))
