"""Parameter groups, optimizers by name, schedules."""

import math

import pytest
import torch
from torch import nn

from dualenc.errors import DualencError
from dualenc.training.optim import build_optimizer, build_schedule, parameter_groups, trainable_parameters
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


def test_lars_adapts_the_rate_of_matrices_only():
    optimizer = build_optimizer([nn.Linear(3, 3)], "lars", 0.1, weight_decay=0.0)
    assert [group["adapt"] for group in optimizer.param_groups] == [True, False]


def rates(name, total, **arguments):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    schedule = build_schedule(optimizer, name, total, **arguments)
    found = []
    for _ in range(total):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_warm_up_then_cosine():
    found = rates("cosine", 10, warmup=4)
    assert found[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert found[4:] == pytest.approx([1 + math.cos(math.pi * k / 6) for k in range(6)])


def test_a_share_of_the_steps_as_warm_up_and_a_final_rate():
    assert rates("linear", 10, warmup=0.2, final_fraction=0.5)[:3] == pytest.approx([1.0, 2.0, 2.0])
    assert rates("linear", 11, final_fraction=0.5)[-1] == pytest.approx(1 + 1 / 11)
    assert rates("constant", 3) == [2.0] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "adam"}, "optimizer is 'adam'; choose one of adamw, sgd, lars"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be above 0"),
        ({"learning_rate": -1e-3}, "learning_rate is -0.001; it must be above 0"),
        ({"learning_rate": math.nan}, "learning_rate is nan; it must be above 0"),
        ({"learning_rate": math.inf}, "learning_rate is inf; it must be above 0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; it must be at least 0"),
        ({"weight_decay": math.nan}, "weight_decay is nan; it must be at least 0"),
        ({"momentum": -1.0}, r"momentum is -1.0; it must be in \[0, 1\)"),
        ({"momentum": 1.0}, r"momentum is 1.0; it must be in \[0, 1\)"),
        ({"momentum": math.nan}, "momentum is nan"),
        ({"betas": (2.0, 3.0)}, r"betas are \[2.0, 3.0\]; give two numbers in \[0, 1\)"),
        ({"betas": (0.9, math.nan)}, r"betas are \[0.9, nan\]"),
        ({"betas": (0.9,)}, r"betas are \[0.9\]; give two numbers"),
    ],
)
def test_mistakes_are_told(arguments, message):
    with pytest.raises(DualencError, match=message):
        build_optimizer([nn.Linear(2, 2)], **arguments)


def test_nothing_to_train_and_bad_schedules_are_told():
    with pytest.raises(DualencError, match="nothing to train"):
        build_optimizer([nn.Linear(2, 2).requires_grad_(False)])
    with pytest.raises(DualencError, match="schedule is 'cos'; choose one of cosine"):
        rates("cos", 3)
    with pytest.raises(DualencError, match=r"warmup is 1.5"):
        rates("cosine", 3, warmup=1.5)
    for warmup in (-1, -0.5, math.nan, math.inf):
        with pytest.raises(DualencError, match=rf"warmup is {warmup}; give a number of steps"):
            rates("cosine", 3, warmup=warmup)
    for fraction in (-1.0, 1.5, math.nan):
        with pytest.raises(DualencError, match=rf"final_fraction is {fraction}; it must be in \[0, 1\]"):
            rates("cosine", 3, final_fraction=fraction)
