"""Seeds are pure functions of what they are for, well mixed, and different for every purpose."""

import numpy as np
import torch

from dualenc.training.loader import augmentation_seeds, derive_seed, item_seeds


def test_seeds_are_pure_fit_a_generator_and_do_not_collide():
    grid = [(s, e, i, v) for s in range(4) for e in range(10) for i in range(500) for v in (0, 1)]
    seeds = [derive_seed("batch", *cell) for cell in grid]
    assert seeds == [derive_seed("batch", *cell) for cell in grid]
    assert len(set(seeds)) == len(grid)
    torch.Generator().manual_seed(max(seeds))
    # Every bit is a fair coin, and neighbours in any coordinate differ in half of the bits.
    bits = (np.array(seeds)[:, None] >> np.arange(63)) & 1
    assert np.abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(len(grid))
    cube = bits.reshape(4, 10, 500, 2, 63)
    for axis in range(4):
        assert abs(np.abs(np.diff(cube, axis=axis)).mean() - 0.5) < 0.005


def test_streams_and_sides_are_told_apart():
    cell = (1, 2, [3])
    seeds = [make(*cell, side)[0] for make in (augmentation_seeds, item_seeds) for side in ("left", "right")]
    assert len({*seeds, derive_seed("rank", 1, 2, 3, 0)}) == 5
