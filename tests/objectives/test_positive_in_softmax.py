"""With `positive_in_softmax` the global loss is that of InfoNCE over the whole corpus."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from dualenc import objectives
from dualenc.errors import DualencError
from dualenc.objectives import (
    ExactGlobal,
    GlobalCache,
    InfoNCE,
    ISogCLR,
    NegativeCache,
    Objective,
    SogCLR,
)

NUM, DIM, TAU = 12, 6, 0.2


def tables() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(3)
    return tuple(
        normalize(torch.randn(NUM, DIM, generator=draws, dtype=torch.float64), dim=1)
        for _ in range(2)
    )


def loss_and_gradients(
    criterion: Objective, left: Tensor, right: Tensor, rows: Tensor
) -> tuple[float, Tensor]:
    """Of a batch of pairs (row, row), with respect to both whole tables."""
    left, right = left.clone().requires_grad_(), right.clone().requires_grad_()

    def encode(side: str, ids: Tensor) -> Tensor:
        return (left if side == "left" else right)[ids]

    loss = criterion(left[rows], right[rows], rows, rows, encode=encode).loss
    loss.backward()
    return float(loss.detach()), torch.cat([left.grad, right.grad])


def test_exact_is_cross_entropy_over_the_corpus() -> None:
    (left, right), rows = tables(), torch.tensor([1, 4, 7])
    found = loss_and_gradients(
        ExactGlobal(num_left=NUM, temperature=TAU, positive_in_softmax=True), left, right, rows
    )
    left, right = left.requires_grad_(), right.requires_grad_()
    directions = [
        cross_entropy(a[rows] @ b.T / TAU, rows) for a, b in ((left, right), (right, left))
    ]
    expected = sum(directions) / 2
    expected.backward()
    assert found[0] == pytest.approx(float(expected.detach()), rel=1e-6)
    torch.testing.assert_close(found[1], torch.cat([left.grad, right.grad]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "criterion",
    [
        SogCLR(num_left=NUM, temperature=TAU, gamma=1.0, positive_in_softmax=True),
        ISogCLR(
            num_left=NUM, temperature=TAU, gamma=1.0, temperature_rate=0.0, positive_in_softmax=True
        ),
    ],
    ids=lambda criterion: type(criterion).__name__,
)
def test_a_batch_that_is_the_corpus_gives_infonce(criterion: Objective) -> None:
    rows = torch.arange(NUM)
    found = loss_and_gradients(criterion, *tables(), rows)
    expected = loss_and_gradients(InfoNCE(temperature=TAU), *tables(), rows)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", [GlobalCache, NegativeCache])
def test_a_pair_pulls_and_pushes_by_its_chance_to_be_missed(kind: type[Objective]) -> None:
    """With equal tables both anchors of a pair have one loss L, and σ(L) scales their gradients."""
    (table, _), rows, found = tables(), torch.tensor([5]), {}
    for inside in (False, True):
        criterion = kind(num_left=NUM, temperature=TAU, positive_in_softmax=inside)
        loss_and_gradients(criterion, table, table, torch.arange(NUM))  # remembers all
        found[inside] = loss_and_gradients(criterion, table, table, rows)
    loss, gradients = found[False]
    odds = table @ table[5] / TAU
    missed = torch.exp(odds[torch.arange(NUM) != 5] - odds[5]).sum()
    assert loss == pytest.approx(float(missed.log()), abs=1e-2)  # what is remembered is float16
    share = torch.tensor(loss, dtype=torch.float64).sigmoid()
    assert found[True][0] == pytest.approx(float(torch.tensor(loss).exp().log1p()), rel=1e-4)
    torch.testing.assert_close(found[True][1], share * gradients, rtol=1e-4, atol=1e-6)


def test_other_objectives_name_those_that_can() -> None:
    able = {
        name
        for name in objectives.__all__
        if getattr(getattr(objectives, name), "estimates_partition", False)
    }
    with pytest.raises(DualencError, match="InfoNCE: positive_in_softmax does not apply") as caught:
        InfoNCE(positive_in_softmax=True)
    assert all(name in str(caught.value) for name in able)
    assert able == {
        "SogCLR",
        "ISogCLR",
        "GlobalCache",
        "NegativeCache",
        "ExactGlobal",
        "FrozenCorpus",
    }
