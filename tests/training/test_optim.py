"""Parameter groups, optimizers by name, schedules, averaged and frozen weights."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

from dualenc.training.averages import AveragedWeights
from dualenc.training.optim import (
    OptimizerName,
    build_optimizer,
    build_schedule,
    parameter_groups,
    trainable_parameters,
)
from tests.helpers.fakes import TinyEncoder, same, tiny_objective, tiny_pairs, weights
from tests.helpers.runs import FixedEvaluator, train


def test_norms_biases_and_the_temperature_do_not_decay():
    model, objective = TinyEncoder(batchnorm=True), tiny_objective(tiny_pairs())
    decayed, others = parameter_groups([model, objective], weight_decay=0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert any(p is objective.log_temperature for p in others["params"])
    expected = [p for m in (model, objective) for p in m.parameters()]
    assert len(decayed["params"]) + len(others["params"]) == len(expected)
    shared = TinyEncoder(shared=True)
    shared.left.layers[0].requires_grad_(False)
    assert len(trainable_parameters([shared, shared])) == 2, "each once, and fixed ones not at all"


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
        (
            "sgd",
            lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1, momentum=0.7, nesterov=True),
        ),
    ],
)
def test_updates_are_those_of_torch(name, reference):
    layers = [nn.Linear(4, 3, bias=False, dtype=torch.float64) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    ours = build_optimizer([layers[0]], name, 0.01, weight_decay=0.1, momentum=0.7)
    theirs = reference(layers[1].parameters())
    for _ in range(3):
        for layer, optimizer in zip(layers, (ours, theirs), strict=True):
            optimizer.zero_grad()
            layer(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
    assert torch.allclose(layers[0].weight, layers[1].weight, rtol=1e-12)


@pytest.mark.parametrize(("weight_decay", "momentum"), [(0.0, 0.9), (0.1, 0.0), (0.1, 0.9)])
def test_lars_is_algorithm_1_for_matrices_and_sgd_for_the_rest(weight_decay, momentum):
    """You et al. 2017, arXiv:1708.03888: one parameter at a time, with the learning rate outside
    the momentum."""
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
                weight_norm, gradient_norm = (
                    sum(x * x for x in t.flatten()) ** 0.5 for t in (w, g)
                )
                decay = weight_decay
                rate = 0.001 * weight_norm / (gradient_norm + decay * weight_norm + 1e-8)
            velocity[i] = momentum * velocity[i] + rate * (g + decay * w)
            w -= 0.3 * velocity[i]
        optimizer.step()
    for parameter, w in zip((layer.weight, layer.bias), expected, strict=True):
        assert torch.allclose(parameter, w, rtol=1e-12)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_each_name_is_one_of_timms_whose_state_survives_a_round_trip(name, tmp_path):
    def step(layer, optimizer, size):
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, size)
        optimizer.step()

    layers = [nn.Linear(3, 2) for _ in range(2)]
    optimizers = [build_optimizer([layer], name, 0.1) for layer in layers]
    before = layers[0].weight.clone()
    for _ in range(2):  # the first of ADOPT only looks at the gradient
        step(layers[0], optimizers[0], 1.0)
    assert not torch.equal(layers[0].weight, before)
    torch.save(optimizers[0].state_dict(), tmp_path / "state.pt")
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers[1].load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for layer, optimizer in zip(layers, optimizers, strict=True):
        step(layer, optimizer, 0.5)
    assert all(
        torch.equal(a, b)
        for a, b in zip(layers[0].parameters(), layers[1].parameters(), strict=True)
    )


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
    [
        ("cosine", 0, 0),
        ("cosine", 0.3, 6),
        ("linear", 4, 4),
        ("linear", 20, 20),
        ("constant", 4, 4),
    ],
)
def test_rates_are_those_of_the_formula(name, warmup, steps):
    decay = {
        "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
        "linear": lambda p: 1 - p,
        "constant": lambda _: 1.0,
    }
    expected = [2.0 * (k + 1) / steps for k in range(steps)]
    expected += [2.0 * decay[name](k / (20 - steps)) for k in range(20 - steps)]
    assert rates(name, 20, warmup=warmup) == pytest.approx(expected, rel=1e-12)
    stable = rates("warmup_stable_decay", 40, warmup=4)
    assert stable[3:37] == [2.0] * 34
    assert 0 < stable[-1] < 1
    assert rates("inverse_sqrt", 20, warmup=4)[15] == pytest.approx(2 * (4 / 15) ** 0.5)


def test_matching_weights_stay_and_all_others_move(tmp_path):
    model = TinyEncoder()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(tmp_path, model=model, freeze=("left.layers.0.*", "*.bias"))
    for name, parameter in model.named_parameters():
        fixed = name.startswith("left.layers.0.") or name.endswith(".bias")
        assert torch.equal(before[name], parameter) == fixed, name


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_average_is_that_of_the_formula(decay):
    model = TinyEncoder(batchnorm=True)
    average = AveragedWeights(model, decay)
    expected = {name: t.detach().double().numpy().copy() for name, t in model.state_dict().items()}
    for step in range(1, 6):
        with torch.no_grad():
            for number, tensor in enumerate(model.state_dict().values()):
                tensor.add_(step + number)
        share = min(decay, (1 + step) / (10 + step))
        for name, tensor in model.state_dict().items():
            new = tensor.double().numpy()
            whole = not tensor.is_floating_point()
            expected[name] = new.copy() if whole else share * expected[name] + (1 - share) * new
        average.update()
    last = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with average.applied():
        for name, tensor in model.state_dict().items():
            np.testing.assert_allclose(tensor.double().numpy(), expected[name], rtol=1e-5)
    assert same(last, model.state_dict())
    AveragedWeights(nn.Identity(), 0.9).update()


def test_frozen_weights_have_no_average():
    model = TinyEncoder(batchnorm=True)
    model.left.requires_grad_(False)
    average = AveragedWeights(model, 0.9)
    parameters = dict(model.named_parameters())
    assert all(name not in parameters or parameters[name].requires_grad for name in average.average)
    assert len(average.average) == len(model.state_dict()) - len(list(model.left.parameters()))


class Watching(FixedEvaluator):
    """Keeps the weights that it measures."""

    def __call__(self, model: Any) -> dict[str, float]:
        self.seen = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return super().__call__(model)


@pytest.mark.slow
def test_the_average_is_evaluated_and_saved_and_training_goes_on_without_it(tmp_path):
    evaluator, models = Watching(0.0, 1.0), [TinyEncoder(), TinyEncoder()]
    train(tmp_path / "plain", model=models[0])
    train(tmp_path / "averaged", model=models[1], weight_average=0.5, evaluator=evaluator)
    assert same(models[0].state_dict(), models[1].state_dict())
    saved = weights(tmp_path / "averaged")
    assert not same(saved, weights(tmp_path / "plain"))
    for name, tensor in saved.items():
        torch.testing.assert_close(evaluator.seen[name].to(tensor), tensor)
