"""Parameter groups, optimizers by name, schedules."""

import math
from typing import get_args

import pytest
import torch
from torch import nn

from dualenc.errors import DualencError
from dualenc.training.optim import (
    OptimizerName,
    build_optimizer,
    build_schedule,
    check_optimizer,
    check_schedule,
    parameter_groups,
    trainable_parameters,
)
from tests.training.fakes import TinyEncoder, tiny_objective, tiny_pairs


def test_norms_biases_and_the_temperature_do_not_decay():
    model, objective = TinyEncoder(batchnorm=True), tiny_objective(tiny_pairs())
    decayed, others = parameter_groups([model, objective], weight_decay=0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert any(p is objective.log_temperature for p in others["params"])
    expected = [p for m in (model, objective) for p in m.parameters()]
    assert len(decayed["params"]) + len(others["params"]) == len(expected)


def test_a_shared_parameter_counts_once_and_a_fixed_one_not_at_all():
    model = TinyEncoder(shared=True)
    model.left.layers[0].requires_grad_(False)
    assert len(trainable_parameters([model, model])) == 2


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9))),
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1, momentum=0.7, nesterov=True)),
    ],
)
def test_updates_are_those_of_torch(name, reference):
    layers = [nn.Linear(4, 3, bias=False, dtype=torch.float64) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    ours = build_optimizer([layers[0]], name, 0.01, weight_decay=0.1, momentum=0.7, betas=(0.8, 0.9))
    theirs = reference(layers[1].parameters())
    for _ in range(3):
        for layer, optimizer in zip(layers, (ours, theirs), strict=True):
            optimizer.zero_grad()
            layer(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
    assert torch.allclose(layers[0].weight, layers[1].weight, rtol=1e-12)


@pytest.mark.parametrize(("weight_decay", "momentum"), [(0.0, 0.9), (0.1, 0.0), (0.1, 0.9)])
def test_lars_is_algorithm_1_for_matrices_and_sgd_for_the_rest(weight_decay, momentum):
    """You et al. 2017, arXiv:1708.03888: one parameter at a time, with the learning rate outside the momentum."""
    draw = torch.Generator().manual_seed(0)
    layer = nn.Linear(4, 3, dtype=torch.float64)
    optimizer = build_optimizer([layer], "lars", 0.3, weight_decay=weight_decay, momentum=momentum)
    expected = [parameter.detach().clone() for parameter in (layer.weight, layer.bias)]
    velocity = [torch.zeros_like(w) for w in expected]
    for _ in range(4):
        for i, (parameter, w) in enumerate(zip((layer.weight, layer.bias), expected, strict=True)):
            g = parameter.grad = torch.randn(w.shape, generator=draw, dtype=torch.float64)
            decay, rate = 0.0, 1.0
            if w.dim() == 2:
                weight_norm, gradient_norm = (sum(x * x for x in t.flatten()) ** 0.5 for t in (w, g))
                decay = weight_decay
                rate = 0.001 * weight_norm / (gradient_norm + decay * weight_norm + 1e-8)
            velocity[i] = momentum * velocity[i] + rate * (g + decay * w)
            w -= 0.3 * velocity[i]
        optimizer.step()
    for parameter, w in zip((layer.weight, layer.bias), expected, strict=True):
        assert torch.allclose(parameter, w, rtol=1e-12)


def test_lars_leaves_weights_of_zero_their_own_rate():
    layer = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(layer.weight)
    layer.weight.grad = torch.ones(2, 2)
    build_optimizer([layer], "lars", 0.1, momentum=0.0).step()
    assert torch.allclose(layer.weight, torch.full((2, 2), -0.1))


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_each_name_is_one_of_timms(name):
    layer = nn.Linear(3, 2)
    layer.weight.grad = torch.ones(2, 3)
    before = layer.weight.clone()
    optimizer = build_optimizer([layer], name, 0.1)
    for _ in range(2):  # the first of ADOPT only looks at the gradient
        optimizer.step()
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_the_state_of_timms_optimizers_survives_a_round_trip(name, tmp_path):
    def step(layer, optimizer, size):
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, size)
        optimizer.step()

    layers = [nn.Linear(3, 2) for _ in range(2)]
    optimizers = [build_optimizer([layer], name, 0.1) for layer in layers]
    step(layers[0], optimizers[0], 1.0)
    torch.save(optimizers[0].state_dict(), tmp_path / "state.pt")
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers[1].load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for layer, optimizer in zip(layers, optimizers, strict=True):
        step(layer, optimizer, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(layers[0].parameters(), layers[1].parameters(), strict=True))


def rates(name, total, **arguments):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    schedule = build_schedule(optimizer, name, total, **arguments)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("name", "warmup", "steps"),
    [("cosine", 0, 0), ("cosine", 0.3, 6), ("linear", 4, 4), ("linear", 20, 20), ("constant", 4, 4)],
)
def test_rates_are_those_of_the_formula(name, warmup, steps):
    decay = {"cosine": lambda p: (1 + math.cos(math.pi * p)) / 2, "linear": lambda p: 1 - p, "constant": lambda _: 1.0}
    expected = [2.0 * (k + 1) / steps for k in range(steps)]
    expected += [2.0 * decay[name](k / (20 - steps)) for k in range(20 - steps)]
    assert rates(name, 20, warmup=warmup) == pytest.approx(expected, rel=1e-12)


def test_other_schedules_of_transformers():
    found = rates("warmup_stable_decay", 40, warmup=4)
    assert found[3:37] == [2.0] * 34
    assert found[37:] == sorted(found[37:], reverse=True)
    assert 0 < found[-1] < 1
    assert rates("inverse_sqrt", 20, warmup=4)[15] == pytest.approx(2 * (4 / 15) ** 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "adamv"}, r"optimizer is 'adamv' \(did you mean adam.*\?\); choose one of adamw, sgd, lars"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be above 0"),
        ({"learning_rate": math.nan}, "learning_rate is nan; it must be above 0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; it must be at least 0"),
        ({"momentum": -1.0}, r"momentum is -1.0; it must be in \[0, 1\)"),
        ({"momentum": math.nan}, "momentum is nan"),
        ({"betas": (2.0, 3.0)}, r"betas are \[2.0, 3.0\]; give two numbers in \[0, 1\)"),
        ({"betas": (0.9,)}, r"betas are \[0.9\]; give two numbers"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(DualencError, match=message):
        check_optimizer(
            **{"name": "sgd", "learning_rate": 1, "weight_decay": 0, "momentum": 0, "betas": (0, 0), **arguments}
        )


def test_nothing_to_train_and_bad_schedules_are_named():
    with pytest.raises(DualencError, match="nothing to train"):
        build_optimizer([nn.Linear(2, 2).requires_grad_(False)])
    with pytest.raises(DualencError, match=r"schedule is 'cosin' \(did you mean cosine\?\); choose one of cosine"):
        check_schedule("cosin", 0)
    for warmup in (1.5, -1, -0.5, math.nan, math.inf):
        with pytest.raises(DualencError, match=rf"warmup is {warmup}; give a number of steps"):
            check_schedule("cosine", warmup)
