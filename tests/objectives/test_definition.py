"""Value and gradient of the in-batch objectives equal a loop written from the paper's formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualenc.objectives import DCL, HCL, InfoNCE, Objective, SigLIP
from tests.objectives import slow
from tests.objectives.slow import gradients

FORMULAS = {
    "InfoNCE": (lambda **a: InfoNCE(**a), lambda row, tau: slow.info_nce(row, tau)),
    "DCL": (lambda **a: DCL(**a), lambda row, tau: slow.dcl(row, tau)),
    "debiased": (lambda **a: HCL(hardness=0.0, class_prior=0.1, **a), lambda row, tau: slow.hcl(row, tau, 0.0, 0.1)),
    "HCL": (lambda **a: HCL(hardness=0.7, class_prior=0.05, **a), lambda row, tau: slow.hcl(row, tau, 0.7, 0.05)),
    "SigLIP": (
        lambda **a: SigLIP(bias=-2.0, **a | {"learnable_temperature": False}),
        lambda row, tau: slow.siglip(row, tau, -2.0),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(2, 7),
    views=st.booleans(),
    tau=st.sampled_from([0.05, 0.2, 1.0]),
    guided=st.booleans(),
)
def test_loss_and_gradient_equal_the_formula(
    name: str, seed: int, size: int, views: bool, tau: float, guided: bool
) -> None:
    build, formula = FORMULAS[name]
    case = slow.make_case(seed, size, views, guide=slow.GuideTable.make(seed) if guided else None)
    out = build(temperature=tau, views=views)(**case.arguments())
    expected = slow.mean_loss(case, lambda row: formula(row, tau))
    torch.testing.assert_close(out.loss, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradients(out.loss, case), gradients(expected, case), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("tau", [0.005, 0.01, 0.07, 1.0])
def test_single_precision_agrees_with_double_at_every_temperature(name: str, views: bool, tau: float) -> None:
    exact_case = slow.make_case(3, 8, views)
    exact = gradients(FORMULAS[name][0](temperature=tau, views=views)(**exact_case.arguments()).loss, exact_case)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        case = slow.make_case(3, 8, views)
        if dtype == torch.bfloat16:
            # What is compared is the objective's arithmetic, not the rounding of its input.
            case.left, case.right = (v.detach().to(dtype).requires_grad_() for v in (case.left, case.right))
            rounded = slow.make_case(3, 8, views)
            rounded.left, rounded.right = (v.detach().double().requires_grad_() for v in (case.left, case.right))
            loss = FORMULAS[name][0](temperature=tau, views=views)(**rounded.arguments()).loss
            exact = gradients(loss, rounded)
        else:
            case.left, case.right = (v.detach().to(dtype).requires_grad_() for v in (case.left, case.right))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = FORMULAS[name][0](temperature=tau, views=views)(**case.arguments())
        found = gradients(out.loss, case).double()
        assert torch.isfinite(found).all()
        assert (found - exact).norm() <= tolerance * exact.norm() + 1e-12


def test_agrees_with_cross_entropy_where_no_ids_repeat() -> None:
    left, right = (torch.nn.functional.normalize(torch.randn(9, 6), dim=1) for _ in range(2))
    logits = left @ right.T / 0.07
    target = torch.arange(9)
    expected = (
        torch.nn.functional.cross_entropy(logits, target) + torch.nn.functional.cross_entropy(logits.T, target)
    ) / 2
    torch.testing.assert_close(InfoNCE(temperature=0.07)(left, right, target).loss, expected)


def test_agrees_with_pytorch_metric_learning() -> None:
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    left, right = (torch.nn.functional.normalize(torch.randn(9, 6), dim=1) for _ in range(2))
    labels = torch.arange(9)
    expected = losses.NTXentLoss(temperature=0.2)(torch.cat([left, right]), torch.cat([labels, labels]))
    torch.testing.assert_close(InfoNCE(temperature=0.2, views=True)(left, right, labels).loss, expected)


def test_mined_negatives_join_the_candidates_of_left_anchors_only() -> None:
    case = slow.make_case(5, 4, views=False)
    case.left_id, case.right_id, case.relevant = [0, 1, 2, 3], [0, 1, 2, 3], set()
    mined = torch.nn.functional.normalize(torch.randn(2, 5, dtype=torch.float64), dim=1)
    out = DCL(temperature=0.1)(**case.arguments(), negatives=mined, negative_id=torch.tensor([7, 0]))
    forward, backward = slow.directions(case)
    for i, row in enumerate(forward):
        row.negatives.append(case.left[i] @ mined[0])
        if i != 0:  # the second mined item is document 0, the positive of query 0
            row.negatives.append(case.left[i] @ mined[1])
    expected = sum(torch.stack([slow.dcl(r, 0.1) for r in rows]).mean() for rows in (forward, backward)) / 2
    torch.testing.assert_close(out.loss, expected)


def test_learned_temperature_gets_the_gradient_of_the_formula() -> None:
    case = slow.make_case(1, 6, views=False)
    criterion = InfoNCE(temperature=0.2, learnable_temperature=True).double()
    criterion(**case.arguments()).loss.backward()
    step = 1e-6
    up, down = (
        float(slow.mean_loss(case, lambda row, t=0.2 * (1 + sign * step): slow.info_nce(row, t))) for sign in (1, -1)
    )
    assert criterion.log_temperature.grad is not None
    assert float(criterion.log_temperature.grad) == pytest.approx((up - down) / (2 * step), rel=1e-4)


def test_hardness_anneals_to_zero_in_equal_steps() -> None:
    criterion = HCL(hardness=1.0, annealing_steps=4)
    seen = []
    for fraction in (0.0, 0.24, 0.25, 0.5, 0.75, 1.0):
        criterion.set_progress(fraction)
        seen.append(criterion.hardness)
    assert seen == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_hcl_is_finite_at_the_temperature_where_published_code_gives_nan() -> None:
    case = slow.make_case(2, 6, views=True, dtype=torch.float32)
    out = HCL(hardness=1.0, class_prior=0.1, temperature=0.01, views=True)(**case.arguments())
    assert torch.isfinite(out.loss)
    assert torch.isfinite(gradients(out.loss, case)).all()


def test_every_objective_can_be_imported_from_the_package() -> None:
    import dualenc.objectives as package

    for name in package.__all__:
        assert name == "ObjectiveOutput" or issubclass(getattr(package, name), Objective)
