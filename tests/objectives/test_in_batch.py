"""InfoNCE, DCL, HCL and SigLIP: value and gradient equal the paper's formula, and other
libraries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy, normalize

from dualenc.objectives import DCL, HCL, InfoNCE, SigLIP
from tests.helpers import slow
from tests.helpers.slow import gradients

FORMULAS = {
    "InfoNCE": (InfoNCE, {}, slow.info_nce),
    "DCL": (DCL, {}, slow.dcl),
    "debiased": (
        HCL,
        {"hardness": 0.0, "class_prior": 0.1},
        lambda row, tau: slow.hcl(row, tau, 0.0, 0.1),
    ),
    "HCL": (
        HCL,
        {"hardness": 0.7, "class_prior": 0.05},
        lambda row, tau: slow.hcl(row, tau, 0.7, 0.05),
    ),
    "SigLIP": (SigLIP, {"bias": -2.0}, lambda row, tau: slow.siglip(row, tau, -2.0)),
}


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=8)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(2, 7),
    views=st.booleans(),
    tau=st.sampled_from([0.05, 0.2, 1.0]),
)
def test_loss_and_gradient_equal_the_formula(
    name: str, seed: int, size: int, views: bool, tau: float
) -> None:
    kind, arguments, formula = FORMULAS[name]
    case = slow.make_case(seed, size, views)
    found = kind(temperature=tau, views=views, **arguments)(**case.arguments()).loss
    expected = slow.mean_loss(case, lambda row: formula(row, tau))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        gradients(found, case), gradients(expected, case), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(
    "tau", [0.01, *(pytest.param(tau, marks=pytest.mark.nightly) for tau in (0.005, 0.07, 1.0))]
)
@pytest.mark.parametrize("views", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_lower_precisions_agree_with_double(name: str, views: bool, tau: float) -> None:
    kind, arguments, _ = FORMULAS[name]
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        found = []
        for precision in (torch.float64, dtype):
            case = slow.make_case(3, 8, views)
            # What is compared is the objective's arithmetic, not the rounding of its input.
            case.left, case.right = (
                v.detach().to(dtype).to(precision).requires_grad_() for v in (case.left, case.right)
            )
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16):
                loss = kind(temperature=tau, views=views, **arguments)(**case.arguments()).loss
            found.append(gradients(loss, case).double())
        assert torch.isfinite(found[1]).all()
        assert (found[1] - found[0]).norm() <= tolerance * found[0].norm() + 1e-12


def unit_pairs(number: int = 9) -> torch.Tensor:
    return normalize(torch.randn(2, number, 6, generator=torch.Generator().manual_seed(1)), dim=2)


def test_info_nce_is_what_the_room_begins_with() -> None:
    """As written in `dualenc/objectives/__init__.py`."""
    left, right = unit_pairs()
    scores = left @ right.T / 0.07
    pairs = torch.arange(len(scores))
    loss = (cross_entropy(scores, pairs) + cross_entropy(scores.T, pairs)) / 2
    torch.testing.assert_close(InfoNCE(temperature=0.07)(left, right, pairs).loss, loss)


def test_info_nce_is_the_clip_loss_of_open_clip() -> None:
    losses = pytest.importorskip("open_clip.loss")
    left, right = unit_pairs()
    expected = losses.ClipLoss()(left, right, logit_scale=1 / 0.07)
    torch.testing.assert_close(
        InfoNCE(temperature=0.07)(left, right, torch.arange(9)).loss, expected
    )


def test_siglip_is_the_siglip_loss_of_open_clip() -> None:
    losses = pytest.importorskip("open_clip.loss")
    left, right = unit_pairs()
    # Ours is the mean over both directions, each of which sees every pair of items once.
    expected = losses.SigLipLoss()(left, right, logit_scale=10.0, logit_bias=-10.0)
    torch.testing.assert_close(SigLIP()(left, right, torch.arange(9)).loss, expected)


def test_info_nce_of_views_is_that_of_pytorch_metric_learning_and_lightly() -> None:
    left, right = unit_pairs()
    labels = torch.arange(9)
    found = InfoNCE(temperature=0.2, views=True)(left, right, labels).loss
    theirs = pytest.importorskip("pytorch_metric_learning.losses").NTXentLoss(temperature=0.2)
    torch.testing.assert_close(found, theirs(torch.cat([left, right]), torch.cat([labels, labels])))
    theirs = pytest.importorskip("lightly.loss").NTXentLoss(temperature=0.2)
    torch.testing.assert_close(found, theirs(left, right))


def test_dcl_of_views_is_that_of_lightly() -> None:
    losses = pytest.importorskip("lightly.loss")
    left, right = unit_pairs()
    found = DCL(temperature=0.2, views=True)(left, right, torch.arange(9)).loss
    torch.testing.assert_close(found, losses.DCLLoss(temperature=0.2)(left, right))


def test_mined_negatives_join_the_candidates_of_left_anchors_only() -> None:
    case = slow.make_case(5, 4, views=False)
    case.left_id, case.right_id, case.relevant = [0, 1, 2, 3], [0, 1, 2, 3], set()
    mined = normalize(torch.randn(2, 5, dtype=torch.float64), dim=1)
    found = DCL(temperature=0.1)(
        **case.arguments(), negatives=mined, negative_id=torch.tensor([7, 0])
    ).loss
    forward, backward = slow.directions(case)
    for i, row in enumerate(forward):
        row.negatives.append(case.left[i] @ mined[0])
        if i != 0:  # the second mined item is document 0, the positive of query 0
            row.negatives.append(case.left[i] @ mined[1])
    expected = (
        sum(torch.stack([slow.dcl(r, 0.1) for r in rows]).mean() for rows in (forward, backward))
        / 2
    )
    torch.testing.assert_close(found, expected)


def test_positives_listed_for_either_view_hold_for_both() -> None:
    left, right = unit_pairs(4)
    known = torch.tensor([[2], [-1], [0], [-1]])
    losses = [
        float(DCL(views=True)(left, right, torch.arange(4), **{name: known}).loss)
        for name in ("left_positives", "right_positives")
    ]
    assert losses[0] == losses[1] != float(DCL(views=True)(left, right, torch.arange(4)).loss)


def test_weights_multiply_each_pairs_loss_in_both_directions() -> None:
    left, right = unit_pairs(6).double()
    weights = torch.tensor([1.0, 0.0, 2.5, 1.0, 0.5, 1.0], dtype=torch.float64)
    logits = left @ right.T / 0.25
    each = [-m.log_softmax(dim=1).diagonal() for m in (logits, logits.T)]
    out = InfoNCE(temperature=0.25)(left, right, torch.arange(6), weights=weights)
    assert float(out.loss) == pytest.approx(float(sum((weights * e).mean() for e in each) / 2))
    torch.testing.assert_close(out.per_anchor, torch.cat([weights * e for e in each]))
