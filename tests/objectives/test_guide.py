"""A guide's rule: what it finds more alike than the positive is no negative, in every objective of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.errors import DualencError
from dualenc.objectives import DCL, HCL, ISIR, SACLR, GlobalCache, InfoNCE, ISogCLR, Objective, SigLIP, SogCLR

B, N, DIM, TAU = 8, 5, 6, 0.3
IN_BATCH = [InfoNCE, DCL, HCL, SogCLR, ISogCLR, SACLR, SigLIP]


def unit(rows: int, seed: int, dim: int = DIM) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(rows, dim, generator=draws, dtype=torch.float64), dim=1)


def case(mined: bool) -> dict[str, Tensor]:
    batch = {"left": unit(B, 0), "right": unit(B, 1), "left_id": torch.arange(B), "right_id": torch.arange(B)}
    batch |= {"guide_left": unit(B, 2, 3), "guide_right": normalize(unit(B, 2, 3) + 0.7 * unit(B, 3, 3), dim=1)}
    if mined:
        batch |= {"negatives": unit(N, 4), "negative_id": torch.arange(B, B + N), "guide_negatives": unit(N, 5, 3)}
    return batch


def slow_masks(batch: dict[str, Tensor], margin: float) -> tuple[list[list[int]], list[list[int]]]:
    """The candidates that stay negatives: of each left anchor, mined ones behind those of the batch; of each right."""
    candidates = torch.cat([batch["guide_right"], batch.get("guide_negatives", batch["guide_right"][:0])])
    left, right = [], []
    for i in range(B):
        limit = float(batch["guide_left"][i] @ batch["guide_right"][i]) - margin
        told = [float(batch["guide_left"][i] @ of) for of in candidates]
        left.append([j for j, alike in enumerate(told) if j != i and not alike > limit])
        told = [float(batch["guide_right"][i] @ of) for of in batch["guide_left"]]
        right.append([j for j, alike in enumerate(told) if j != i and not alike > limit])
    return left, right


@pytest.mark.parametrize("mined", [False, True])
@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_infonce_equals_a_slow_loop(mined: bool, margin: float) -> None:
    batch = case(mined)
    left, right = slow_masks(batch, margin)
    assert 0 < sum(map(len, left)) < B * (B - 1 + N * mined), "some are judged"
    documents = torch.cat([batch["right"], batch.get("negatives", batch["right"][:0])])
    losses = []
    for i in range(B):
        for anchor, partner, others, kept in (
            (batch["left"][i], batch["right"][i], documents, left[i]),
            (batch["right"][i], batch["left"][i], batch["left"], right[i]),
        ):
            logits = torch.stack([anchor @ partner, *(anchor @ others[j] for j in kept)]) / TAU
            losses.append(logits.logsumexp(0) - logits[0])
    found = InfoNCE(temperature=TAU, guide_margin=margin).double()(**batch).loss
    assert float(found) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


@pytest.mark.parametrize("build", IN_BATCH, ids=lambda build: build.__name__)
def test_what_the_guide_takes_for_a_positive_has_no_gradient(build: type[Objective]) -> None:
    """A pair whose both items every guide's vector is near to is a negative of nobody, and pushes nobody away."""
    batch = case(False)
    batch["guide_left"] = torch.eye(B, dtype=torch.float64)
    batch["guide_right"] = torch.eye(B, dtype=torch.float64)
    # The guide finds document 0 still more alike to query 1 than query 1's own.
    batch["guide_right"][0] = normalize(batch["guide_right"][0] + 2 * batch["guide_left"][1], dim=0)
    batch["guide_right"][1] = normalize(batch["guide_right"][1] + 2 * batch["guide_left"][5], dim=0)

    def gradient(given: dict[str, Tensor]) -> Tensor:
        left = given["left"].clone().requires_grad_()
        criterion = build(num_left=B, temperature=TAU).double()
        criterion(**{**given, "left": left}).loss.backward()
        return left.grad[1]

    moved = {**batch, "right": batch["right"].clone()}
    moved["right"][0] = unit(1, 9)[0]
    without = [{k: v for k, v in given.items() if not k.startswith("guide")} for given in (batch, moved)]
    torch.testing.assert_close(gradient(batch), gradient(moved), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(gradient(without[0]), gradient(without[1]), atol=1e-4)


def test_a_guide_without_a_vector_judges_nobody() -> None:
    batch = case(True)
    plain = {name: tensor for name, tensor in batch.items() if not name.startswith("guide")}
    unknown = {name: torch.full_like(batch[name], torch.nan) for name in batch if name.startswith("guide")}
    for build in (InfoNCE, DCL, SogCLR):
        found, expected = (
            float(build(num_left=B + N, temperature=TAU).double()(**given).loss) for given in (batch | unknown, plain)
        )
        assert found == pytest.approx(expected)


def test_blocks_of_rows_are_judged_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = case(True)
    whole = float(DCL(temperature=TAU).double()(**batch).loss)
    monkeypatch.setattr("dualenc.objectives.anchors.BLOCK_ENTRIES", 3 * (B + N))
    assert float(DCL(temperature=TAU).double()(**batch).loss) == pytest.approx(whole)


def test_what_a_guide_cannot_judge_is_told() -> None:
    batch = case(True)
    for build in (ISIR, GlobalCache):
        with pytest.raises(DualencError, match=f"{build.__name__}: guide_left judges what is in the batch"):
            build(num_left=B + N)(**batch, encode=lambda side, ids: unit(len(ids), 0))
    for changed, told in (
        ({"guide_right": None}, "guide_right and, with negatives, guide_negatives are given together"),
        ({"guide_negatives": None}, "guide_right and, with negatives, guide_negatives are given together"),
        ({"guide_right": unit(B, 0, 4)}, "have shapes .*; give a vector per item"),
    ):
        with pytest.raises(DualencError, match=f"InfoNCE: guide_left {told}"):
            InfoNCE()(**(batch | changed))
