"""On another device than the CPU everything stays there, and a step seldom waits for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dualenc.objectives.item_state import ItemState
from torch import Tensor

from dualenc.objectives import SogCLR
from tests.objectives.every import SETTINGS, STEPS, Setting, Towers, batch
from tests.pretended_device import DEVICE, pretended_device

STATELESS = ("InfoNCE", "DCL", "HCL", "SigLIP")


def train(setting: Setting, device: torch.device | str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps of plain gradient descent, and the objective's state after them."""
    towers, criterion = Towers(setting.views).to(device), setting.build().to(device)
    if setting.views:
        towers.right = towers.left  # moving has made two of one
    towers.left_features, towers.right_features = towers.left_features.to(device), towers.right_features.to(device)
    parameters = [*towers.parameters(), *criterion.parameters()]
    losses = []
    for step in range(STEPS):
        given = {name: ids.to(device) for name, ids in batch(step, setting.views).items()}
        for side in ("left", "right"):
            given[side] = towers.encode(side, given[f"{side}_id"])
        if "negative_id" in given:
            given["negatives"] = towers.encode("right", given["negative_id"])
        out = criterion(**given, encode=towers.encode)
        out.loss.backward()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
        assert {value.device for value in out.metrics.values()} == {out.loss.device} == {torch.device(device)}
        losses.append(float(out.loss.detach().to("cpu")))
    return losses, criterion.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_losses_are_those_of_the_cpu(setting: Setting) -> None:
    expected, _ = train(setting, "cpu")
    with pretended_device():
        found, _ = train(setting, DEVICE)
    assert found == pytest.approx(expected, rel=1e-9)


KEEP_TABLES = [s for s in SETTINGS if s.objective.__name__ not in (*STATELESS, "ExactGlobal")]


@pytest.mark.parametrize("setting", KEEP_TABLES, ids=lambda s: s.name)
def test_tables_in_cpu_memory_give_the_same_losses_and_state(setting: Setting) -> None:
    on_cpu = replace(setting, arguments=setting.arguments | {"state_device": "cpu"})
    expected, state = train(setting, "cpu")
    with pretended_device():
        found, found_state = train(on_cpu, DEVICE)
        found_state = {name: values.to("cpu") for name, values in found_state.items()}
    assert found == pytest.approx(expected, rel=1e-9)
    assert found_state.keys() == state.keys()
    for name, values in state.items():
        torch.testing.assert_close(found_state[name], values, equal_nan=True)


@pytest.mark.parametrize("setting", KEEP_TABLES, ids=lambda s: s.name)
def test_tables_in_cpu_memory_stay_there(setting: Setting) -> None:
    criterion = replace(setting, arguments=setting.arguments | {"state_device": "cpu"}).build()
    with pretended_device():
        criterion.to(DEVICE)
        assert criterion.log_temperature.device == DEVICE
        # The one scale of SACLR's matrix form is no table.
        tables = [t for m in criterion.modules() if isinstance(m, ItemState) for t in m.buffers() if t.numel() != 1]
        assert {t.device.type for t in tables} <= {"cpu"}


def test_tables_in_cpu_memory_follow_the_precision_of_the_rest() -> None:
    criterion = SogCLR(num_left=5, state_device="cpu")
    assert criterion.double().left_averages.log_u.dtype == torch.float64


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.objective.__name__ in STATELESS], ids=lambda s: s.name)
def test_a_step_seldom_waits(setting: Setting) -> None:
    """Once, to look at the values."""
    with pretended_device() as device:
        criterion, ids = setting.build().to(DEVICE), torch.arange(8).to(DEVICE)
        draws = torch.nn.functional.normalize(torch.randn(2, 8, 5).double(), dim=2)
        left, right = (draw.to(DEVICE).requires_grad_() for draw in draws)
        before = device.waits
        criterion(left, right, ids, ids.clone()).loss.backward()
        assert device.waits - before == 1
