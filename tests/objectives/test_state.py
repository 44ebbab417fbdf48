"""The state dict is the whole truth: a run that stops and resumes is the run that never stopped, bit by bit."""

from __future__ import annotations

import io

import pytest
import torch

from tests.objectives.every import SETTINGS, STEPS, Run, Setting


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
@pytest.mark.parametrize("stop", [1, 3])
def test_resuming_is_bit_exact(setting: Setting, stop: int) -> None:
    whole = Run(setting)
    expected = [whole.step(step) for step in range(STEPS)]
    first = Run(setting)
    for step in range(stop):
        first.step(step)
    file = io.BytesIO()
    torch.save(first.state(), file)
    second = Run(setting)
    second.load(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for step in range(stop, STEPS):
        assert torch.equal(second.step(step), expected[step])
    for key, values in whole.state()["criterion"].items():
        assert torch.equal(torch.nan_to_num(second.state()["criterion"][key]), torch.nan_to_num(values)), key


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_an_empty_batch_is_harmless(setting: Setting) -> None:
    """A rank may have nothing in the last batch of an epoch; so may all."""
    training = Run(setting)
    nothing = torch.zeros(0, dtype=torch.long)
    left, right = (training.towers.encode(side, nothing) for side in ("left", "right"))
    loss = training.criterion(left, right, nothing, encode=training.towers.encode).loss
    loss.backward()
    assert float(loss.detach()) == 0
    training.step(0)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_state_holds_tensors_only(setting: Setting) -> None:
    """So that any format for tensors can hold it."""
    training = Run(setting)
    training.step(0)
    state = training.criterion.state_dict()
    assert all(isinstance(values, torch.Tensor) for values in state.values())
    assert "log_temperature" in state


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.objective.needs_num_left], ids=lambda s: s.name)
def test_memory_is_in_the_state(setting: Setting) -> None:
    """What a step changes in the objective, besides learned parameters, shows in the state dict."""
    training = Run(setting)
    learned = dict(training.criterion.named_parameters())
    before = training.state()["criterion"]
    training.step(0)
    after = training.state()["criterion"]
    changed = {
        key
        for key in after
        if key not in learned and not torch.equal(torch.nan_to_num(before[key]), torch.nan_to_num(after[key]))
    }
    assert changed or setting.objective.__name__ == "ExactGlobal"
