"""A teacher's scores against slow loops from the formulas, alone and added to an objective."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.errors import DualencError
from dualenc.objectives import ISIR, Distilled, InfoNCE, Objective

B, N, DIM, TAU = 6, 9, 5, 0.25
COUNTS = [2, 0, 3, 1, 0, 3]


def unit(rows: int, seed: int) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(rows, DIM, generator=draws, dtype=torch.float64), dim=1)


def case(seed: int = 0, missing: float = 0.0) -> dict[str, Tensor]:
    """A batch in which pairs have 0 to 3 mined negatives of their own; a share of the teacher's scores is missing."""
    draws = torch.Generator().manual_seed(100 + seed)
    rows = torch.full((B, max(COUNTS)), -1)
    scores = torch.full((B, 1 + max(COUNTS)), math.nan, dtype=torch.float64)
    first = 0
    for pair, count in enumerate(COUNTS):
        rows[pair, :count] = torch.arange(first, first + count)
        scores[pair, : 1 + count] = 3 * torch.randn(1 + count, generator=draws, dtype=torch.float64)
        first += count
    scores[torch.rand(scores.shape, generator=draws) < missing] = math.nan
    return {
        "left": unit(B, seed),
        "right": unit(B, seed + 1),
        "left_id": torch.arange(B),
        "right_id": torch.arange(B),
        "negatives": unit(N, seed + 2),
        "negative_id": torch.arange(B, B + N),
        "teacher_scores": scores,
        "teacher_rows": rows,
    }


def slow(kind: str, batch: dict[str, Tensor], temperature: float = 1.0, weights: list[float] | None = None) -> Tensor:
    """Pair by pair and negative by negative."""
    terms: list[Tensor] = []
    for pair in range(B):
        weight = 1.0 if weights is None else weights[pair]
        listed = [
            batch["right"][pair],
            *(batch["negatives"][n] for n in batch["teacher_rows"][pair].tolist() if n >= 0),
        ]
        said = [float(t) / temperature for t in batch["teacher_scores"][pair][: len(listed)]]
        if math.isnan(said[0]):
            continue
        known = [(batch["left"][pair] @ d / TAU, t) for d, t in zip(listed, said) if not math.isnan(t)]
        if kind == "margin_mse":
            (s, t), *others = known
            terms += [weight * ((s - s_k) - (t - t_k)) ** 2 for s_k, t_k in others]
        elif len(known) > 1:
            total = sum(math.exp(t) for _, t in known)
            log_sum = torch.stack([s for s, _ in known]).exp().sum().log()
            shares = [(math.exp(t) / total, s - log_sum) for s, t in known]
            terms.append(weight * sum(p * (math.log(p) - log_q) for p, log_q in shares))
    return sum(terms) / len(terms) if terms else torch.zeros((), dtype=torch.float64)


def value_and_gradient(loss: Any, batch: dict[str, Tensor]) -> tuple[float, Tensor]:
    names = ("left", "right", "negatives")
    leaves = {name: batch[name].clone().requires_grad_() for name in names}
    value = loss(batch | leaves)
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    parts = [torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(names, found)]
    return float(value.detach()), torch.cat(parts)


def alone(kind: Any, **more: Any) -> Objective:
    return Distilled(InfoNCE(temperature=TAU), kind, own_weight=0.0, **more).double()


@pytest.mark.parametrize("kind", ["margin_mse", "kl"])
@settings(max_examples=10)
@given(seed=st.integers(0, 30), missing=st.sampled_from([0.0, 0.3]), temperature=st.sampled_from([1.0, 0.3]))
def test_equals_a_slow_loop(kind: Any, seed: int, missing: float, temperature: float) -> None:
    batch = case(seed, missing)
    criterion = alone(kind, teacher_temperature=temperature)
    found = value_and_gradient(lambda given: criterion(**given).loss, batch)
    leaves = value_and_gradient(lambda given: slow(kind, given, temperature) + 0 * given["left"].sum(), batch)
    assert found[0] == pytest.approx(leaves[0], rel=1e-5, abs=1e-8)
    torch.testing.assert_close(found[1], leaves[1], rtol=1e-5, atol=1e-6)


def test_is_added_to_an_objective_by_its_weight() -> None:
    batch = case()

    def run(taught: bool) -> tuple[float, Tensor]:
        criterion: Objective = ISIR(num_left=20, temperature=TAU)
        if taught:
            criterion = Distilled(criterion, "kl", weight=0.7, own_weight=0.4)
        given = batch if taught else {k: v for k, v in batch.items() if not k.startswith("teacher")}
        criterion = criterion.double()
        encode = lambda side, ids: unit(20, 7)[ids]  # noqa: E731
        return value_and_gradient(lambda leaves: criterion(**{k: leaves[k] for k in given}, encode=encode).loss, batch)

    own, taught = run(taught=False), run(taught=True)
    teacher = value_and_gradient(lambda given: slow("kl", given) + 0 * given["left"].sum(), batch)
    assert taught[0] == pytest.approx(0.4 * own[0] + 0.7 * teacher[0], rel=1e-5)
    torch.testing.assert_close(taught[1], 0.4 * own[1] + 0.7 * teacher[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["margin_mse", "kl"])
def test_a_batch_that_the_teacher_has_not_seen_gives_zero(kind: Any) -> None:
    batch = case(missing=1.0)
    value, gradient = value_and_gradient(lambda given: alone(kind)(**given).loss, batch)
    assert value == 0
    assert not gradient.any()
    without = {name: tensor for name, tensor in case().items() if not name.startswith("negative")}
    without["teacher_rows"] = torch.full_like(without["teacher_rows"], -1)
    assert float(alone(kind)(**without).loss) == 0


@pytest.mark.parametrize("kind", ["margin_mse", "kl"])
def test_weights_count_for_the_teacher_too(kind: Any) -> None:
    batch, weights = case(), [1.0, 0.0, 2.5, 1.0, 0.5, 0.25]
    found = alone(kind)(**batch, weights=torch.tensor(weights, dtype=torch.float64)).loss
    assert float(found) == pytest.approx(float(slow(kind, batch, weights=weights)), rel=1e-5)


@pytest.mark.parametrize("row", [-2, N])
def test_rows_that_are_no_negatives_are_refused(row: int) -> None:
    batch = case()
    batch["teacher_rows"][4, 0] = row
    ends = rf"\[{min(row, -1)}, {max(row, N - 1)}\]; they must be rows of the {N} negatives"
    with pytest.raises(DualencError, match=f"Distilled: teacher_rows holds rows in {ends}"):
        alone("kl")(**batch)
    with pytest.raises(DualencError, match="Distilled: teacher_scores has shape"):
        alone("kl")(**{**batch, "teacher_scores": batch["teacher_scores"][:, :2]})
