"""SogCLR, iSogCLR and SACLR equal float64 loops over several steps (gradient, tables,
temperatures), and LibAUC."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from dualenc.objectives import SACLR, ISogCLR, Objective, SogCLR
from tests.helpers import slow
from tests.helpers.slow import gradients

NUM, STEPS = 20, 3
TAU = 0.2
few = settings(max_examples=8)
BATCHES = {"seed": st.integers(0, 1000), "size": st.integers(2, 7), "views": st.booleans()}


def assert_equals_loop(criterion: Objective, batch: dict[str, Any], step_of: Any) -> None:
    for step in range(STEPS):
        case = slow.make_case(batch["seed"] * STEPS + step, batch["size"], batch["views"])
        is_learned = criterion.log_temperature.requires_grad
        log_tau = torch.tensor(math.log(TAU), dtype=torch.float64, requires_grad=is_learned)
        found = all_gradients(criterion(**case.arguments()).loss, case, criterion.log_temperature)
        expected = all_gradients(step_of(case, log_tau.exp()), case, log_tau)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def all_gradients(
    loss: torch.Tensor, case: slow.Case, log_temperature: torch.Tensor
) -> torch.Tensor:
    """The gradients in the embeddings and, where it is learned, in log τ."""
    inputs = [tensor for tensor in (case.left, case.right, log_temperature) if tensor.requires_grad]
    found = torch.autograd.grad(loss, inputs, materialize_grads=True, allow_unused=True)
    return torch.cat([gradient.flatten() for gradient in found])


def assert_holds(table: torch.Tensor, values: slow.Table, take: Any = math.log) -> None:
    """A table of left items, then right ones, against a dictionary."""
    for (side, item), value in values.items():
        assert float(table[item + (NUM if side == "right" else 0)]) == pytest.approx(
            take(value), abs=1e-6
        )


@few
@given(gamma=st.sampled_from([0.3, 0.9, 1.0]), **BATCHES)
def test_sogclr_equals_the_loop(gamma: float, **batch: Any) -> None:
    options = {
        "temperature": TAU,
        "learnable_temperature": True,
        "gamma": gamma,
        "views": batch["views"],
    }
    criterion = SogCLR(num_left=NUM, **options).double()
    u: slow.Table = {}
    assert_equals_loop(
        criterion, batch, lambda case, tau: slow.sogclr_surrogate(case, u, tau, gamma)
    )
    assert_holds(criterion.log_u, u)


@few
@given(**BATCHES)
def test_isogclr_equals_the_loop(**batch: Any) -> None:
    arguments = {"temperature": TAU, "gamma": 0.6, "radius": 0.3, "temperature_rate": 0.02}
    arguments |= {"temperature_momentum": 0.4, "min_temperature": 0.05, "max_temperature": 0.5}
    criterion = ISogCLR(num_left=NUM, views=batch["views"], **arguments).double()
    u: slow.Table = {}
    taus: slow.Table = {}
    slopes: slow.Table = {}
    assert_equals_loop(
        criterion, batch, lambda case, _: slow.isogclr_surrogate(case, u, taus, slopes, arguments)
    )
    assert_holds(criterion.tau, taus, float)


@few
@given(**BATCHES)
def test_saclr_equals_the_loop(**batch: Any) -> None:
    arguments = {"alpha": 0.25, "rho": 0.7, "views": batch["views"]}
    criterion = SACLR(
        num_left=NUM, temperature=TAU, learnable_temperature=True, **arguments
    ).double()
    table: slow.Table = {}
    assert_equals_loop(
        criterion, batch, lambda case, tau: slow.saclr_surrogate(case, table, tau, 0.25, 0.7)
    )
    assert_holds(criterion.log_scale, table)


@pytest.mark.parametrize("own_temperatures", [False, True], ids=["SogCLR", "ISogCLR"])
def test_gradients_are_those_of_libauc(own_temperatures: bool) -> None:
    """Up to a factor: theirs sums both views' losses, each of them times τ. From the third step on
    their temperatures differ, which see s in place of s − s⁺."""
    losses = pytest.importorskip("libauc.losses.contrastive")
    theirs = losses.GCLoss_v1(
        N=NUM, tau=TAU, gamma=0.6, enable_isogclr=own_temperatures, beta=0.6, device="cpu"
    )
    ours: Objective = SogCLR(num_left=NUM, temperature=TAU, gamma=0.6, views=True)
    if own_temperatures:
        limits = {"min_temperature": 0.05, "max_temperature": 0.7}
        ours = ISogCLR(
            num_left=NUM, temperature=TAU, gamma=0.6, views=True, temperature_momentum=0.4, **limits
        )
    draw = torch.Generator().manual_seed(0)
    for _ in range(2 if own_temperatures else 4):
        views = normalize(torch.randn(2, 6, 5, generator=draw), dim=2).requires_grad_()
        (found,) = torch.autograd.grad(ours(views[0], views[1], torch.arange(6)).loss, views)
        (expected,) = torch.autograd.grad(theirs(views[0], views[1], torch.arange(6)), views)
        # Theirs normalises once more, which leaves the part of the gradient across a vector.
        across = found - (found * views).sum(dim=2, keepdim=True) * views
        torch.testing.assert_close(across * 2 * TAU, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("tau", [0.05, 0.005])
@pytest.mark.parametrize(("form", "negatives"), [("row", "all"), ("row", 1), ("matrix", "all")])
def test_saclr_gradient_is_bounded_whatever_the_embeddings_do(
    tau: float, form: Any, negatives: Any
) -> None:
    """The repulsion of an anchor is at most r = 1/((1 − ρ)(1 − α)), in the matrix form on average,
    spread over unit vectors; so its loss pulls at its own and at other embeddings with a total of
    at most 2·(1 + r)/τ."""
    alpha, rho, draw = 0.125, 0.9, torch.Generator().manual_seed(0)
    criterion = SACLR(
        num_left=40, temperature=tau, alpha=alpha, rho=rho, form=form, negatives=negatives
    )
    largest = 0.0
    for _ in range(50):
        ids = torch.randperm(40, generator=draw)[:8]
        # Embeddings far from those of the last visit, and a pair that was apart may now be
        # together.
        left, right = normalize(torch.randn(2, 8, 4, generator=draw), dim=2).unbind()
        left, right = left.requires_grad_(), right.requires_grad_()
        criterion(left, right, ids).loss.backward()
        largest = max(largest, float(torch.cat([left.grad, right.grad]).norm()))
    assert 1 / tau / 8 < largest <= 2 * (1 + 1 / ((1 - rho) * (1 - alpha))) / tau


def test_saclr_matrix_form_keeps_the_mean_of_the_row_scales() -> None:
    row, matrix = (
        SACLR(num_left=NUM, alpha=0.25, rho=0.0, form=form, views=True).double()
        for form in ("row", "matrix")
    )
    case = slow.make_case(0, 6, views=True)
    row(**case.arguments())
    matrix(**case.arguments())
    torch.testing.assert_close(
        matrix.log_scale.exp(), row.log_scale[case.left_id].exp().mean()[None]
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", ["row", "matrix"])
def test_saclr_with_one_negative_estimates_the_gradient_with_all(form: Any) -> None:
    case = slow.make_case(0, 6, views=True)
    shared = {"num_left": NUM, "temperature": 0.5, "rho": 0.99, "form": form, "views": True}
    with_all = SACLR(negatives="all", **shared).double()
    with_all(**case.arguments())
    one = SACLR(negatives=1, **shared).double()
    one.load_state_dict(with_all.state_dict())
    expected = gradients(with_all(**case.arguments()).loss, case)
    one.eval()  # which leaves the scales as they are
    total, num_draws = torch.zeros_like(expected), 400
    for position in range(num_draws):
        one.draws.position = position
        total += gradients(one(**case.arguments()).loss, case)
    assert (total / num_draws - expected).norm() < 0.1 * expected.norm()
