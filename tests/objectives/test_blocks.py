"""A large batch is worked off in blocks of anchors: same loss, gradients and state, and no whole (A, C) matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dualenc.objectives.state import SharedRandom
from torch.utils._pytree import tree_leaves

from dualenc.objectives import Objective, anchors
from dualenc.objectives import state as row_draws
from tests.objectives.every import GUIDED, SETTINGS, Dispatched, Run, Setting

# A few anchors per block; the chains of EMC², which hold more per anchor, get one.
FEW_ENTRIES = 40


def three_steps(setting: Setting) -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of three steps, and the objective's state after each."""
    training = Run(setting)
    found: list[torch.Tensor] = []
    training.criterion.register_forward_hook(lambda module, given, out: found.append(out.loss.detach()))
    states = []
    for step in range(3):
        found.append(training.step(step))
        states.append(training.state()["criterion"])
    return found, states


@pytest.mark.parametrize("setting", SETTINGS + GUIDED, ids=lambda s: s.name)
def test_blocks_give_what_the_whole_gives(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, whole_states = three_steps(setting)
    monkeypatch.setattr(anchors, "BLOCK_ENTRIES", FEW_ENTRIES)
    blocks, block_states = three_steps(setting)
    for found, expected in zip(blocks, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for state, expected_state in zip(block_states, whole_states, strict=True):
        for key, expected in expected_state.items():
            torch.testing.assert_close(state[key], expected, rtol=1e-10, atol=1e-10, equal_nan=True, msg=key)


IN_BATCH = [s for s in SETTINGS if s.objective.__name__ not in ("ExactGlobal", "GlobalCache", "NegativeCache")]


@pytest.mark.slow
@pytest.mark.parametrize("setting", IN_BATCH, ids=lambda s: s.name)
def test_no_matrix_of_all_anchors_and_candidates_is_made(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_size, block = 96, 1024
    monkeypatch.setattr(anchors, "BLOCK_ENTRIES", block)
    monkeypatch.setattr(row_draws, "ENTRIES_PER_DRAW", 8 * batch_size)
    criterion = large(setting, batch_size)
    draws = torch.randn(2, batch_size, 5)
    left, right = (torch.nn.functional.normalize(draw, dim=1).requires_grad_() for draw in draws)

    def encode(side: str, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(torch.ones(len(ids), 5).requires_grad_(), dim=1)

    with Dispatched() as watched:
        criterion(left, right, torch.arange(batch_size), encode=encode).loss.backward()
    assert left.numel() <= watched.largest <= 2 * block < batch_size**2


@pytest.mark.parametrize("setting", IN_BATCH, ids=lambda s: s.name)
def test_what_a_block_gives_keeps_no_matrix_alive(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    join, sizes = anchors.joined, []

    def watched(parts: list[Any]) -> Any:
        sizes.extend((leaf.untyped_storage().nbytes(), leaf.nbytes) for leaf in tree_leaves(parts) if leaf is not None)
        return join(parts)

    monkeypatch.setattr(anchors, "joined", watched)
    monkeypatch.setattr(anchors, "BLOCK_ENTRIES", FEW_ENTRIES)
    three_steps(setting)
    assert sizes
    assert all(held == shown for held, shown in sizes)


# What draws nothing: both directions at once draw other numbers.
DRAWS_NOTHING = [
    s
    for s in SETTINGS + GUIDED
    if s.objective.both_at_once and s.objective.takes_mined and "negatives" not in s.arguments
]


@pytest.mark.parametrize("setting", DRAWS_NOTHING, ids=lambda s: s.name)
def test_both_directions_at_once_give_what_one_after_the_other_gives(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sides of different size, and documents that several queries share."""
    at_once, at_once_states = three_steps(setting)
    monkeypatch.setattr(setting.objective, "both_at_once", False)
    apart, apart_states = three_steps(setting)
    for found, expected in zip([*at_once, *at_once_states], [*apart, *apart_states], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, equal_nan=True)


def large(setting: Setting, batch_size: int) -> Objective:
    common = {"num_left": batch_size, "temperature": 0.2, "views": setting.views}
    return setting.objective(**common, **setting.arguments)


def test_rows_of_draws_do_not_depend_on_what_they_are_looked_at_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_draws, "ENTRIES_PER_DRAW", 8 * 5)
    num_rows, like = 2 * 8 + 3, torch.zeros(0, dtype=torch.float64)
    random = SharedRandom(3)
    draws_of = random.rows(num_rows, width=5)
    assert random.draws == 3
    every = draws_of(None, like)
    assert every.unique().numel() == num_rows * 5
    chosen = torch.tensor([num_rows - 1, 0, 8, 7])
    for rows in (torch.arange(num_rows), chosen, torch.tensor([9, 10]), torch.tensor([15, 16])):
        assert torch.equal(draws_of(rows, like), every[rows])
    assert torch.equal(every[:8], SharedRandom(3).exponential(8, 5, like=like))
