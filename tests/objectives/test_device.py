"""On another device than the CPU everything stays there, and a step without encoding waits once."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.every import EVERY, FIRST, WRAPPED, Setting, Towers, momentum_keys
from tests.helpers.plain_training import train_plainly
from tests.helpers.pretended_device import DEVICE, pretended_device


@pytest.mark.slow
@pytest.mark.parametrize("setting", [s for s in EVERY if s not in WRAPPED], ids=lambda s: s.name)
def test_losses_are_those_of_the_cpu(setting: Setting) -> None:
    with pretended_device():
        found = train_plainly(setting, DEVICE)
    assert found == pytest.approx(train_plainly(setting, "cpu"), rel=1e-9)


STATELESS = ("InfoNCE", "DCL", "HCL", "SigLIP", "SogCLR", "ISogCLR", "SACLR", "MomentumQueue")


@pytest.mark.parametrize(
    "setting", [s for s in FIRST if s.objective.__name__ in STATELESS], ids=lambda s: s.name
)
def test_a_step_without_encoding_waits_once_to_check_the_values(setting: Setting) -> None:
    with pretended_device() as device:
        criterion, ids = setting.build().to(DEVICE), torch.arange(8).to(DEVICE)
        draws = torch.nn.functional.normalize(torch.randn(2, 8, 5).double(), dim=2)
        left, right = (draw.to(DEVICE).requires_grad_() for draw in draws)
        before = device.waits
        criterion(
            left, right, ids, ids.clone(), **momentum_keys(criterion, left, right)
        ).loss.backward()
        assert device.waits - before == 1, device.places


# The values of the batch, the ids to encode, what was encoded; EMC2's scores; NegativeCache's
# refresh of each side.
MOST_WAITS = {"EMC2": 4, "ISIR": 3, "GlobalCache": 3, "NegativeCache": 5}


@pytest.mark.parametrize(
    "setting", [s for s in FIRST if s.objective.__name__ in MOST_WAITS], ids=lambda s: s.name
)
def test_a_step_with_encoding_waits_no_more_than_it_must(setting: Setting) -> None:
    with pretended_device() as device:
        towers, criterion, ids = (
            Towers(setting.views).to(DEVICE),
            setting.build().to(DEVICE),
            torch.arange(8).to(DEVICE),
        )
        towers.left_features, towers.right_features = (
            towers.left_features.to(DEVICE),
            towers.right_features.to(DEVICE),
        )

        def encode(side: str, ids: torch.Tensor) -> torch.Tensor:
            return towers.encode(side, ids.to(DEVICE, non_blocking=True))

        for _ in range(3):
            before = device.waits
            criterion(
                encode("left", ids), encode("right", ids), ids, ids.clone(), encode=encode
            ).loss.backward()
            assert device.waits - before <= MOST_WAITS[setting.objective.__name__], device.places
