"""What objectives say of their memory: the numbers in it, at no cost until asked, and metrics of
the batch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.objectives import EMC2, ISIR, InfoNCE, ISogCLR, Objective, SogCLR
from dualenc.objectives.chains import ChainObjective
from tests.helpers.every import FIRST, WRAPPED, Run, Setting
from tests.helpers.frozen_embeddings import Frozen

WITH_MEMORY = {
    "EMC2",
    "ISIR",
    "SogCLR",
    "ISogCLR",
    "SACLR",
    "ExactGlobal",
    "NegativeCache",
    "GlobalCache",
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", FIRST + WRAPPED, ids=lambda s: s.name)
def test_every_objective_with_a_memory_gives_finite_numbers(setting: Setting) -> None:
    training = Run(setting)
    assert training.criterion.diagnostics() == {}, "nothing yet"
    names = []
    for step in range(3):
        training.step(step)
        found = training.criterion.diagnostics()
        assert all(
            value.ndim == 0 and math.isfinite(value) and not value.requires_grad
            for value in found.values()
        )
        names.append(list(found))
    assert names[0] == names[1] == names[2]
    assert bool(names[0]) == (setting.objective.__name__ in WITH_MEMORY)


@pytest.mark.parametrize("kind", [EMC2, ISIR])
def test_moves_of_chains_are_counted(kind: type[ChainObjective]) -> None:
    frozen, ids = Frozen.make(40), torch.arange(10)
    criterion = frozen.build(kind, recent=0)
    frozen.loss(criterion, ids)
    found = criterion.diagnostics()
    assert float(found["chains_begun"]) == 1
    assert float(found["chains_moved"]) == 0, "a chain that begins has not moved"
    rows = torch.cat([ids, ids + 40])
    before = criterion.state[rows].clone()
    frozen.loss(criterion, ids)
    found = criterion.diagnostics()
    assert float(found["chains_begun"]) == 0
    assert float(found["chains_moved"]) == pytest.approx(
        float((before != criterion.state[rows]).float().mean())
    )
    assert 0 < float(found["chains_moved"]) < 1


@pytest.mark.parametrize(
    ("kind", "arguments"), [(SogCLR, {}), (ISogCLR, {"temperature_rate": 0.0})]
)
def test_averages_are_those_of_the_last_batch(
    kind: type[Objective], arguments: dict[str, float]
) -> None:
    frozen, ids = Frozen.make(40), torch.arange(5, 15)
    criterion = frozen.build(kind, **arguments)
    frozen.loss(criterion, torch.arange(40))
    frozen.loss(criterion, ids)
    log_u = criterion.log_u[torch.cat([ids, ids + 40])].double()
    found = criterion.diagnostics()
    assert float(found["log_mean_exp"]) == pytest.approx(float(log_u.mean()), rel=1e-5)
    assert float(found["log_mean_exp_spread"]) == pytest.approx(
        float(log_u.std(correction=0)), rel=1e-4
    )
    assert float(found.get("own_temperature", frozen.tau)) == pytest.approx(frozen.tau, rel=1e-5)


def test_metrics_are_those_of_a_loop_and_computed_when_read() -> None:
    left, right = normalize(
        torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=2
    )
    calls: list[int] = []
    criterion = InfoNCE(temperature=0.2, num_left=50, num_right=80)
    directions = criterion._directions
    criterion._directions = lambda *given: calls.append(1) or directions(*given)  # type: ignore[method-assign]
    output = criterion(left, right, torch.arange(6))
    assert len(calls) == 1
    metrics = output.metrics
    estimates, hits = [], []
    for own, other, corpus_size in ((left, right, 80), (right, left, 50)):
        for i in range(6):
            scores: Tensor = own[i] @ other.T / 0.2
            negatives = torch.cat([scores[:i], scores[i + 1 :]])
            estimates.append(negatives.exp().mean().log() + math.log(corpus_size - 1) - scores[i])
            hits.append(bool((negatives < scores[i]).all()))
    assert float(metrics["batch_estimate"]) == pytest.approx(float(torch.stack(estimates).mean()))
    assert float(metrics["accuracy"]) == pytest.approx(sum(hits) / 12)
    assert float(metrics["positive_similarity"]) == pytest.approx(
        float((left * right).sum(dim=1).mean())
    )
    assert float(metrics["temperature"]) == pytest.approx(0.2)
    assert output.metrics is metrics
    assert len(calls) == 2
