"""A large batch is computed in blocks of anchors: same loss, gradients and state, and no whole (A,
C) matrix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualenc.objectives import anchors, global_cache
from tests.helpers.every import EVERY, FIRST, Run, Setting, assert_same_state, momentum_keys

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("setting", EVERY, ids=lambda s: s.name)
def test_blocks_give_what_the_whole_gives(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for num_entries in (anchors.BLOCK_ENTRIES, 40):  # a block gets a few anchors
        for module in (anchors, global_cache):
            monkeypatch.setattr(module, "BLOCK_ENTRIES", num_entries)
        training = Run(setting)
        gradients = [training.step(step) for step in range(3)]
        results.append((torch.stack(gradients), training.state()["criterion"]))
    (whole, whole_state), (blocks, block_state) = results
    torch.testing.assert_close(blocks, whole, rtol=1e-10, atol=1e-10)
    assert_same_state(block_state, whole_state, tolerance=1e-10)


class LargestTensor(TorchDispatchMode):
    """`entries` of the largest tensor that an operation made, forward and backward."""

    entries = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # Views that repeat entries take no memory.
            if isinstance(leaf, Tensor) and 0 not in leaf.stride():
                self.entries = max(self.entries, leaf.numel())
        return result


# EMC2 holds all scores of a step by design; exact sums and memories are as large as the corpus.
IN_BLOCKS = [s for s in FIRST if not s.objective.needs_encode or s.objective.__name__ == "ISIR"]


@pytest.mark.parametrize("setting", IN_BLOCKS, ids=lambda s: s.name)
def test_no_matrix_of_all_anchors_and_candidates_is_made(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_size, block = 96, 1024
    monkeypatch.setattr(anchors, "BLOCK_ENTRIES", block)
    arguments = setting.arguments | ({"recent": 0} if setting.objective.__name__ == "ISIR" else {})
    criterion = replace(setting, arguments=arguments).build(
        num_left=batch_size, num_right=batch_size
    )
    left, right = (normalize(torch.randn(batch_size, 5), dim=1).requires_grad_() for _ in range(2))
    encode = lambda side, ids: normalize(torch.ones(len(ids), 5).requires_grad_(), dim=1)  # noqa: E731
    with LargestTensor() as largest:
        keys = momentum_keys(criterion, left, right)
        criterion(left, right, torch.arange(batch_size), encode=encode, **keys).loss.backward()
    assert left.numel() <= largest.entries <= 2 * block < batch_size**2
