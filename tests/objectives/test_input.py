"""Bad input raises one clear line that names the argument."""

from __future__ import annotations

import pytest
import torch

from dualenc.errors import DualencError
from dualenc.objectives import DCL, HCL, SACLR, ExactGlobal, InfoNCE, ISogCLR, SigLIP, SogCLR

GOOD = {"left": torch.eye(4), "right": torch.eye(4), "left_id": torch.arange(4)}
BAD_CALLS = {
    "left_id holds": {"left_id": torch.tensor([0, 1, 2, 99])},
    "left_id holds ids in": {"left_id": torch.tensor([0, 1, 2, -1])},
    "right_id holds": {"right_id": torch.tensor([0, 1, 2, 50])},
    "left_id has shape": {"left_id": torch.arange(3)},
    "right_id has shape": {"right_id": torch.arange(4.0)},
    "left, right": {"right": torch.eye(4)[:3]},
    "left has shape": {"left": torch.ones(4)},
    "right holds NaN": {"right": torch.eye(4) * torch.nan},
    "left holds NaN or infinite": {"left": torch.eye(4) / 0},
    "left_id is on meta, the embeddings are on cpu": {"left_id": torch.arange(4, device="meta")},
    "negative_id has shape": {"negatives": torch.eye(4)},
    "negative_id holds": {"negatives": torch.eye(4), "negative_id": torch.tensor([0, 1, 2, 99])},
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_forward_names_the_argument(message: str) -> None:
    with pytest.raises(DualencError, match=message) as caught:
        InfoNCE(num_left=10)(**GOOD | BAD_CALLS[message])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: InfoNCE(temperature=0.0), "temperature is 0.0"),
        (lambda: DCL(temperature=-1.0), "temperature is -1.0"),
        (lambda: DCL(temperature=float("nan")), "temperature is nan"),
        (lambda: InfoNCE(num_left=0), "num_left is 0"),
        (lambda: SogCLR(), "num_left is missing"),
        (lambda: SogCLR(num_left=3, gamma=0.0), "gamma is 0.0"),
        (lambda: HCL(class_prior=1.0), "class_prior is 1.0"),
        (lambda: HCL(hardness=-1.0), "hardness is -1.0"),
        (lambda: HCL(annealing_steps=-1), "annealing_steps is -1"),
        (lambda: SACLR(num_left=3, alpha=2.0), "alpha is 2.0"),
        (lambda: SACLR(num_left=3, rho=1.0), "rho is 1.0"),
        (lambda: ISogCLR(num_left=3, temperature_momentum=1.0), "temperature_momentum"),
        (lambda: ISogCLR(num_left=3, min_temperature=0.5, max_temperature=0.1), "min_temperature"),
        (lambda: ISogCLR(num_left=3, learnable_temperature=True), "learnable_temperature"),
        (lambda: ExactGlobal(num_left=3, corpus_chunk_size=0), "corpus_chunk_size is 0"),
    ],
)
def test_constructor_names_the_argument(build: object, message: str) -> None:
    with pytest.raises(DualencError, match=message):
        build()


def test_encode_is_asked_for_where_it_is_needed() -> None:
    with pytest.raises(DualencError, match="encode is missing"):
        ExactGlobal(num_left=4)(**GOOD)


def test_two_views_carry_one_id() -> None:
    with pytest.raises(DualencError, match="right_id differs"):
        InfoNCE(views=True)(**GOOD, right_id=torch.tensor([1, 0, 2, 3]))


@pytest.mark.parametrize("criterion", [InfoNCE(), DCL(), HCL(), SogCLR(num_left=9), SACLR(num_left=9), SigLIP()])
def test_a_batch_of_one_pair_and_an_empty_batch_stay_finite(criterion: torch.nn.Module) -> None:
    for size in (1, 0):
        left = torch.eye(4)[:size].requires_grad_()
        out = criterion(left, torch.eye(4)[:size], torch.arange(size))
        out.loss.backward()
        assert torch.isfinite(out.loss)
        assert torch.isfinite(left.grad).all()
