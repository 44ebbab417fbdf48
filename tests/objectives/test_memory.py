"""Objectives with memory equal float64 loops over several steps: gradient, tables, temperatures."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualenc.objectives import SACLR, ISogCLR, SogCLR
from tests.objectives import slow, slow_state
from tests.objectives.slow import gradients

STEPS = 4
many = settings(max_examples=10, deadline=None)


def cases(seed: int, size: int, views: bool, guided: bool) -> list[slow.Case]:
    guide = slow.GuideTable.make(seed) if guided else None
    return [slow.make_case(seed * STEPS + step, size, views, guide=guide) for step in range(STEPS)]


def assert_same_step(criterion: torch.nn.Module, case: slow.Case, expected: torch.Tensor) -> None:
    found = gradients(criterion(**case.arguments()).loss, case)
    torch.testing.assert_close(found, gradients(expected, case), rtol=1e-5, atol=1e-6)


@many
@given(
    seed=st.integers(0, 1000),
    size=st.integers(2, 7),
    views=st.booleans(),
    gamma=st.sampled_from([0.3, 0.9, 1.0]),
    guided=st.booleans(),
)
def test_sogclr(seed: int, size: int, views: bool, gamma: float, guided: bool) -> None:
    criterion = SogCLR(num_left=20, temperature=0.2, gamma=gamma, views=views).double()
    u: slow_state.Table = {}
    for case in cases(seed, size, views, guided):
        assert_same_step(criterion, case, slow_state.sogclr_surrogate(case, u, 0.2, gamma))
    for (side, item), value in u.items():
        table = criterion.left_averages if side == "left" else criterion.right_averages
        assert float(table.log_u[item]) == pytest.approx(math.log(value), abs=1e-6)


@many
@given(seed=st.integers(0, 1000), size=st.integers(2, 7), views=st.booleans(), guided=st.booleans())
def test_isogclr(seed: int, size: int, views: bool, guided: bool) -> None:
    given = {
        "temperature": 0.2,
        "gamma": 0.6,
        "radius": 0.3,
        "temperature_rate": 0.02,
        "temperature_momentum": 0.4,
        "min_temperature": 0.05,
        "max_temperature": 0.5,
    }
    criterion = ISogCLR(num_left=20, views=views, **given).double()
    u: slow_state.Table = {}
    taus: slow_state.Table = {}
    slopes: slow_state.Table = {}
    for case in cases(seed, size, views, guided):
        assert_same_step(criterion, case, slow_state.isogclr_surrogate(case, u, taus, slopes, given))
    for (side, item), value in taus.items():
        table = criterion.left_temperatures if side == "left" else criterion.right_temperatures
        assert float(table.tau[item]) == pytest.approx(value, rel=1e-5)


@many
@given(
    seed=st.integers(0, 1000), size=st.integers(2, 7), views=st.booleans(), cauchy=st.booleans(), guided=st.booleans()
)
def test_saclr_row_form(seed: int, size: int, views: bool, cauchy: bool, guided: bool) -> None:
    kernel = "cauchy" if cauchy else "gaussian"
    criterion = SACLR(num_left=20, temperature=0.2, alpha=0.25, rho=0.7, kernel=kernel, views=views).double()
    scales: slow_state.Table = {}
    for case in cases(seed, size, views, guided):
        assert_same_step(criterion, case, slow_state.saclr_surrogate(case, scales, 0.2, 0.25, 0.7, cauchy))


@many
@given(seed=st.integers(0, 1000), size=st.integers(2, 7), views=st.booleans(), guided=st.booleans())
def test_saclr_as_its_authors_program_it(seed: int, size: int, views: bool, guided: bool) -> None:
    criterion = SACLR(num_left=20, temperature=0.2, alpha=0.25, rho=0.7, variant="authors", views=views).double()
    scales: slow_state.Table = {}
    for case in cases(seed, size, views, guided):
        assert_same_step(criterion, case, slow_state.saclr_authors_surrogate(case, scales, 0.2, 0.25, 0.7))
    for (side, item), value in scales.items():
        table = criterion.left_scales if side == "left" else criterion.right_scales
        assert float(table.log_u[item]) == pytest.approx(math.log(value), abs=1e-6)


@pytest.mark.parametrize("tau", [0.05, 0.02, 0.005])
@pytest.mark.parametrize("form", ["row", "matrix"])
@pytest.mark.parametrize("negatives", ["all", 1])
def test_saclr_gradient_is_bounded_whatever_the_embeddings_do(tau: float, form: str, negatives: object) -> None:
    """The repulsion of an anchor is at most r = 1/((1 − ρ)(1 − α)), in the matrix form on average, spread over unit
    vectors; so its loss pulls at its own and at other embeddings with a total of at most 2·(1 + r)/τ."""
    alpha, rho, draw = 0.125, 0.9, torch.Generator().manual_seed(0)
    criterion = SACLR(num_left=40, temperature=tau, alpha=alpha, rho=rho, form=form, negatives=negatives)
    largest = 0.0
    for _ in range(65):
        ids = torch.randperm(40, generator=draw)[:8]
        # Embeddings far from those of the last visit, and a pair that was apart may now be together.
        left, right = torch.nn.functional.normalize(torch.randn(2, 8, 4, generator=draw), dim=2).unbind()
        left, right = left.requires_grad_(), right.requires_grad_()
        criterion(left, right, ids).loss.backward()
        largest = max(largest, float(torch.cat([left.grad, right.grad]).norm()))
    assert 1 / tau / 8 < largest <= 2 * (1 + 1 / ((1 - rho) * (1 - alpha))) / tau


def test_saclr_matrix_form_keeps_the_mean_of_the_row_scales() -> None:
    row, matrix = (
        SACLR(num_left=20, alpha=0.25, rho=0.0, form=form, views=True).double() for form in ("row", "matrix")
    )
    case = slow.make_case(0, 6, views=True)
    row(**case.arguments())
    matrix(**case.arguments())
    visited = row.left_scales.log_u[case.left_id]
    assert matrix.left_scales.log_u.shape == (1,)
    torch.testing.assert_close(matrix.left_scales.log_u.exp(), visited.exp().mean()[None])


@pytest.mark.parametrize("form", ["row", "matrix"])
def test_saclr_with_one_negative_estimates_the_gradient_with_all(form: str) -> None:
    case = slow.make_case(0, 6, views=True)
    shared = {"num_left": 20, "temperature": 0.5, "rho": 0.99, "form": form, "views": True}
    every = SACLR(negatives="all", **shared).double()
    every(**case.arguments())
    one = SACLR(negatives=1, **shared).double()
    one.load_state_dict(every.state_dict())
    expected = gradients(every(**case.arguments()).loss, case)
    # Evaluation leaves the scales as they are.
    one.eval()
    total, num_draws = torch.zeros_like(expected), 400
    for draw in range(num_draws):
        one.random.draws = draw
        total += gradients(one(**case.arguments()).loss, case)
    assert (total / num_draws - expected).norm() < 0.1 * expected.norm()


def test_sogclr_first_visit_is_decided_per_item() -> None:
    """A batch of known items and one new one: the new item starts from its own value, not from a batch-wide rule."""
    criterion = SogCLR(num_left=20, gamma=0.1, temperature=0.2, views=True).double()
    old = slow.make_case(0, 6, views=True)
    criterion(**old.arguments())
    new = slow.make_case(0, 6, views=True)
    stranger = next(i for i in range(20) if i not in new.left_id)
    new.left_id[0] = stranger
    new.right_id = new.left_id
    criterion(**new.arguments())
    alone = SogCLR(num_left=20, gamma=0.1, temperature=0.2, views=True).double()
    alone(**new.arguments())
    torch.testing.assert_close(criterion.left_averages.log_u[stranger], alone.left_averages.log_u[stranger])


def test_isogclr_average_converges_to_its_value() -> None:
    """At a frozen batch u tends to the value itself (a running sum stored unhalved would tend to a multiple)."""
    criterion = ISogCLR(num_left=20, gamma=0.3, temperature=0.2, temperature_rate=0.0, views=True).double()
    case = slow.make_case(4, 6, views=True)
    for _ in range(60):
        criterion(**case.arguments())
    for item in case.left_id:
        rows = [row for row in slow.directions(case)[0] if row.item == item]
        means = [torch.stack([(s / 0.2).exp() for s in row.negatives]).mean() for row in rows]
        expected = float(torch.stack(means).mean().detach())
        assert float(criterion.left_averages.log_u[item].exp()) == pytest.approx(expected, rel=1e-5)


def test_cosine_schedule_brings_gamma_from_one_to_its_value() -> None:
    criterion = SogCLR(num_left=2, gamma=0.2, gamma_schedule="cosine")
    seen = []
    for fraction in (0.0, 0.5, 1.0):
        criterion.set_progress(fraction)
        seen.append(criterion.gamma)
    assert seen == pytest.approx([1.0, 0.6, 0.2])
