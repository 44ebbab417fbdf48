"""LARS against a loop written from Algorithm 1."""

import copy

import pytest
import torch

from dualenc.errors import DualencError
from dualenc.training.optim import LARS


def slow_lars(weights, gradients_by_step, *, lr, momentum, weight_decay, trust, adapt):
    """One parameter at a time, one number at a time where it matters."""
    velocity = [torch.zeros_like(w) for w in weights]
    for gradients in gradients_by_step:
        for i, g in enumerate(gradients):
            w = weights[i]
            rate = 1.0
            weight_norm, gradient_norm = sum(x * x for x in w.flatten()) ** 0.5, sum(x * x for x in g.flatten()) ** 0.5
            if adapt and weight_norm > 0 and gradient_norm > 0:
                rate = trust * weight_norm / (gradient_norm + weight_decay * weight_norm)
            velocity[i] = momentum * velocity[i] + rate * (g + weight_decay * w)
            weights[i] = w - lr * velocity[i]
    return weights


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_updates_are_those_of_the_formula(adapt, weight_decay, momentum):
    draw = torch.Generator().manual_seed(0)
    start = [torch.randn(3, 4, generator=draw, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)]
    steps = [[torch.randn_like(w) for w in start] for _ in range(4)]
    arguments = {"lr": 0.3, "momentum": momentum, "weight_decay": weight_decay, "trust": 0.01, "adapt": adapt}
    parameters = [torch.nn.Parameter(w.clone()) for w in start]
    optimizer = LARS(parameters, **arguments)
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    expected = slow_lars([w.clone() for w in start], steps, **arguments)
    for parameter, weight in zip(parameters, expected, strict=True):
        assert torch.allclose(parameter, weight, rtol=1e-9)


def test_state_survives_a_round_trip():
    def make():
        weight = torch.nn.Parameter(torch.ones(2, 2))
        return weight, LARS([weight], lr=0.1)

    first, optimizer = make()
    first.grad = torch.ones(2, 2)
    optimizer.step()
    second, other = make()
    second.data.copy_(first)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for weight, o in ((first, optimizer), (second, other)):
        weight.grad = torch.full((2, 2), 0.5)
        o.step()
    assert torch.equal(first, second)


def test_arguments_out_of_range_are_refused():
    with pytest.raises(DualencError, match="momentum"):
        LARS([torch.nn.Parameter(torch.ones(1))], momentum=1.0)
