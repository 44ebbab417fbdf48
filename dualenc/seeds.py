"""Random seeds: derived seeds, and the generator states of Python, numpy and torch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive_seed(*parts: int | str, bits: int = 63) -> int:
    """Derive a seed deterministically from integers and strings, independent of the platform.

    Different parts give different seeds.

    Args:
        parts: numbers and words, such as ("batch", seed, epoch, index, view).
        bits: number of bits, at most 64; the seed lies in [0, 2^bits).
    """
    # Converted to plain ints, because repr(np.int64(1)) differs between numpy versions.
    plain = tuple(part if isinstance(part, str) else int(part) for part in parts)
    digest = hashlib.blake2b(repr(plain).encode(), digest_size=-(-bits // 8)).digest()
    return int.from_bytes(digest, "little") >> -bits % 8


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed the generators of Python, numpy and torch as a function of (seed, rank)."""
    derived = derive_seed("rank", seed, rank)
    random.seed(derived)
    # Augmentations of other libraries use numpy's legacy generator.
    np.random.seed(derived % 2**32)  # noqa: NPY002
    torch.manual_seed(derived)


def random_state() -> dict[str, Any]:
    """Return the generator states of Python, numpy, torch on the CPU and the current CUDA device.

    All values have types that `torch.load` accepts with weights_only=True.
    """
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]  # noqa: NPY002
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore all generators from `random_state()`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore all generators on exit, so that an evaluation does not change the training draws."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)
