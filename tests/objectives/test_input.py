"""Bad input raises one clear line that names the argument."""

from __future__ import annotations

import pytest
import torch

from dualenc.errors import DualencError
from dualenc.objectives import (
    DCL,
    EMC2,
    HCL,
    SACLR,
    ExactGlobal,
    InfoNCE,
    ISogCLR,
    NegativeCache,
    Objective,
    SigLIP,
    SogCLR,
)

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
    "negatives and negative_id must be given together, .n, D": {"negatives": torch.eye(4)},
    "negative_id has shape": {"negatives": torch.eye(4), "negative_id": torch.arange(3)},
    "negative_id holds": {"negatives": torch.eye(4), "negative_id": torch.tensor([0, 1, 2, 99])},
    "negatives and negative_id": {"negative_id": torch.tensor([0, 1, 2, 3])},
    "negatives has rows of norm": {"negatives": 2 * torch.eye(4), "negative_id": torch.arange(4)},
    "left_id has shape .* .torch.bool.": {"left_id": torch.ones(4, dtype=torch.bool)},
    "left_id holds ids in .0, 200.": {"left_id": torch.tensor([0, 1, 2, 200], dtype=torch.uint8)},
    "left_positives holds ids in .0, 10.": {"left_positives": torch.tensor([[0], [1], [2], [10]])},
    "left_positives holds ids in .-2, 2.": {"left_positives": torch.tensor([[0], [1], [2], [-2]])},
    "right_positives holds ids in .-7, 12.": {"right_positives": torch.tensor([[0, -7], [1, 1], [2, 2], [12, 3]])},
    "left_positives has shape .* .torch.float32.": {"left_positives": torch.zeros(4, 1)},
    "right_positives has shape .4,.": {"right_positives": torch.arange(4)},
    "right_positives has shape .3, 1.": {"right_positives": torch.arange(3)[:, None]},
    "left has rows of norm in .1, 4000.; they must be unit vectors: normalise them": {
        "left": torch.diag(torch.tensor([1.0, 4000.0, 1.0, 1.0]))
    },
    "right has rows of norm in .0.98, 1.": {"right": torch.diag(torch.tensor([0.98, 1.0, 1.0, 1.0]))},
    "left has rows of norm in .0, 1.": {"left": torch.diag(torch.tensor([1.0, 0.0, 1.0, 1.0]))},
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_forward_names_the_argument(message: str) -> None:
    with pytest.raises(DualencError, match=message) as caught:
        InfoNCE(num_left=10)(**GOOD | BAD_CALLS[message])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8, torch.int64])
def test_ids_of_every_integer_type_are_ids(dtype: torch.dtype) -> None:
    """They are made 64 bits wide first: 100 + 100 does not fit into int8, nor -1 into uint8."""
    left, right = torch.nn.functional.normalize(torch.randn(2, 4, 5), dim=2)
    ids, known = torch.tensor([100, 101, 101, 7]), torch.tensor([[7, 100], [101, 7], [101, 7], [100, 100]])
    for build in (lambda: InfoNCE(num_left=110), lambda: SogCLR(num_left=110), lambda: DCL(views=True)):
        given = {"left_id": ids, "right_id": ids, "left_positives": known}
        expected, found = (build()(left, right, **{k: v.to(d) for k, v in given.items()}) for d in (torch.long, dtype))
        assert torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dimension", [1, 3, 64, 2048])
def test_rounded_unit_vectors_pass(dtype: torch.dtype, dimension: int) -> None:
    """Normalised in their own precision, and normalised exactly and then rounded."""
    draw = torch.randn(2, 50, dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    normalize = torch.nn.functional.normalize
    for left, right in (normalize(draw.to(dtype), dim=2), normalize(draw, dim=2).to(dtype)):
        assert torch.isfinite(InfoNCE()(left, right, torch.arange(50)).loss)


def test_large_half_precision_is_not_called_infinite() -> None:
    """The norm of the whole batch is beyond float16, every entry is not."""
    embeddings = 4000 * torch.eye(400, dtype=torch.float16)
    with pytest.raises(DualencError, match=r"left has rows of norm in .4000, 4000.; .* normalise them"):
        InfoNCE()(embeddings, embeddings, torch.arange(400))


def test_mined_negatives_do_not_go_with_views() -> None:
    given = {"negatives": torch.eye(4), "negative_id": torch.arange(4, 8)}
    with pytest.raises(DualencError, match="negatives do not go with views=True"):
        InfoNCE(views=True)(**GOOD, **given)


def test_positives_of_either_view_hold_for_both() -> None:
    left, right = torch.nn.functional.normalize(torch.randn(2, 4, 5), dim=2)
    known = torch.tensor([[2], [-1], [0], [-1]])
    losses = [
        float(DCL(views=True)(left, right, torch.arange(4), **{name: known}).loss)
        for name in ("left_positives", "right_positives")
    ]
    assert losses[0] == losses[1] != float(DCL(views=True)(left, right, torch.arange(4)).loss)


@pytest.mark.parametrize("build", [ExactGlobal, EMC2, NegativeCache])
@pytest.mark.parametrize("side", ["left", "right"])
def test_bad_encodings_are_told(build: type[Objective], side: str) -> None:
    """With the one mechanism, so in every objective that asks for items."""

    def encode(of: str, ids: torch.Tensor) -> torch.Tensor:
        return torch.eye(4)[ids % 4] * (torch.nan if of == side else 1)

    arguments = {"proposals": 5} if build is EMC2 else {}
    with pytest.raises(DualencError, match="encode gave NaN or infinite values"):
        build(num_left=400, **arguments)(**GOOD, encode=encode)
    with pytest.raises(DualencError, match=r"encode gave shape \(\d+, 3\) for \d+ ids; it must be \(\d+, 4\)"):
        build(num_left=400, **arguments)(**GOOD, encode=lambda side, ids: torch.eye(3)[ids % 3])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: InfoNCE(temperature=0.0), "temperature is 0.0"),
        (lambda: DCL(temperature=-1.0), "temperature is -1.0"),
        (lambda: DCL(temperature=float("nan")), "temperature is nan"),
        (lambda: DCL(temperature=5e-4), "temperature is 0.0005; it must be a number such as 0.07, at least 0.001"),
        (lambda: InfoNCE(temperature=torch.tensor(0.07)), "pass a number, and learnable_temperature=True"),
        (lambda: SogCLR(num_left=3, temperature=torch.nn.Parameter(torch.tensor(0.07))), "learnable_temperature=True"),
        (lambda: InfoNCE(num_left=0), "num_left is 0"),
        (lambda: SogCLR(), "num_left is missing"),
        (lambda: SogCLR(num_left=3, gamma=0.0), "gamma is 0.0"),
        (lambda: SogCLR(num_left=3, state_device="gpu"), "state_device is 'gpu'; it must be one of auto, cpu"),
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
