"""What objectives tell of their memory: the numbers that stand in it, of every kind of them, and for nothing."""

from __future__ import annotations

import math

import pytest
import torch

from dualenc.objectives import EMC2, ISIR, GlobalCache, ISogCLR, NegativeCache, SogCLR
from dualenc.objectives.chains import ChainObjective
from tests.objectives.every import GUIDED, SETTINGS, Run, Setting, batch
from tests.objectives.frozen import Frozen

TELLING = {"EMC2", "ISIR", "SogCLR", "ISogCLR", "SACLR", "ExactGlobal", "NegativeCache", "GlobalCache"}


@pytest.mark.parametrize("setting", SETTINGS + GUIDED, ids=lambda s: s.name)
def test_every_objective_with_a_memory_tells_finite_numbers(setting: Setting) -> None:
    training = Run(setting)
    assert training.criterion.diagnostics().keys() <= {"remembered", "effective_items"}, "nothing yet"
    names = []
    for step in range(3):
        training.step(step)
        found = training.criterion.diagnostics()
        assert all(value.ndim == 0 and math.isfinite(value) and not value.requires_grad for value in found.values())
        names.append(list(found))
    assert names[0] == names[1] == names[2]
    assert bool(names[0]) == (setting.objective.__name__ in TELLING)


@pytest.mark.parametrize("kind", [EMC2, ISIR])
def test_moves_of_chains_are_counted(kind: type[ChainObjective]) -> None:
    frozen = Frozen.make(40)
    criterion = frozen.build(kind, recent=0)
    ids = torch.arange(10)
    frozen.loss(criterion, ids)
    found = criterion.diagnostics()
    assert float(found["chains_begun"]) == 1
    assert float(found["chains_moved"]) == 0, "who begins has not moved"
    states = [criterion.chains.state[criterion.chains_of(side)] for side in ("left", "right")]
    before = torch.cat([of[ids] for of in states])
    frozen.loss(criterion, ids)
    after = torch.cat([of[ids] for of in states])
    found = criterion.diagnostics()
    assert float(found["chains_begun"]) == 0
    assert float(found["chains_moved"]) == pytest.approx(float((before != after).float().mean()))
    assert 0 < float(found["chains_moved"]) < 1


def test_averages_of_the_last_batch_are_told() -> None:
    frozen, ids = Frozen.make(40), torch.arange(5, 15)
    for kind, arguments in ((SogCLR, {}), (ISogCLR, {"temperature_rate": 0.0})):
        criterion = frozen.build(kind, **arguments)
        frozen.loss(criterion, torch.arange(40))
        frozen.loss(criterion, ids)
        log_u = torch.cat([of.log_u[ids] for of in (criterion.left_averages, criterion.right_averages)]).double()
        found = criterion.diagnostics()
        assert float(found["log_mean_exp"]) == pytest.approx(float(log_u.mean()), rel=1e-5)
        assert float(found["log_mean_exp_spread"]) == pytest.approx(float(log_u.std(correction=0)), rel=1e-4)
    assert float(found["own_temperature"]) == pytest.approx(frozen.tau, rel=1e-5)


@pytest.mark.parametrize("kind", [GlobalCache, NegativeCache])
def test_caches_tell_how_much_they_remember(kind: type[GlobalCache]) -> None:
    frozen = Frozen.make(40)
    criterion = frozen.build(kind, **({"refresh": 0.0} if kind is NegativeCache else {"extra_encodes": 0.0}))
    for ids in torch.arange(20).split(10):
        frozen.loss(criterion, ids)
    found = criterion.diagnostics()
    filled = sum(int(of.filled.sum()) for of in (criterion.left_cache, criterion.right_cache))
    assert float(found["remembered"]) == filled / 80
    if kind is GlobalCache:
        assert 1 <= float(found["effective_items"]) <= 10, "the first ten were remembered when the second came"


def test_a_matryoshka_tells_of_its_greatest_length() -> None:
    setting = next(s for s in SETTINGS if s.arguments == {"dims": [2, 5]} and s.objective is SogCLR and not s.views)
    training = Run(setting)
    training.step(0)
    widest = training.criterion.widest.diagnostics()
    assert training.criterion.diagnostics() == widest
    assert set(widest) == {"log_mean_exp", "log_mean_exp_spread"}
    assert len(batch(0, False)["left_id"]) > 1
