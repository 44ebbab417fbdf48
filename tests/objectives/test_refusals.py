"""What an objective refuses in one line, and what it never does silently."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.errors import DualencError
from dualenc.objectives import InfoNCE, Objective, SogCLR
from tests.objectives.every import CLASSES

SIZE = 12
NEEDS_ENCODE = [kind for kind in CLASSES if kind.needs_encode]


def unit(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return normalize(torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=-1).to(
        dtype
    )


def call(criterion: Objective, scale: float = 1.0, **further: Any) -> Tensor:
    """Two steps on the first pairs; `encode` scales what it gives."""
    left, right = unit(2, SIZE, 5)

    def encode(side: str, ids: Tensor) -> Tensor:
        return scale * (left if side == "left" else right)[ids]

    for start in (0, 6):
        ids = torch.arange(start, start + 6)
        loss = criterion(left[ids], right[ids], ids, encode=encode, **further).loss
    return loss


def assert_refused(message: str, function: Any, *given: Any, **named: Any) -> None:
    with pytest.raises(DualencError, match=re.escape(message)) as caught:
        function(*given, **named)
    assert "\n" not in str(caught.value)


def arguments(kind: type[Objective]) -> dict[str, Any]:
    """So that every objective asks for items within two steps."""
    return {"EMC2": {"proposals": 5}, "ISIR": {"proposals": 5}}.get(kind.__name__, {})


@pytest.mark.parametrize("kind", NEEDS_ENCODE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dims", [None, [5]])
def test_items_that_are_not_normalised_are_refused(kind: type[Objective], dims: list[int] | None) -> None:
    build = {"num_left": SIZE, "temperature": 0.2, "dims": dims, **arguments(kind)}
    message = "encode gave rows of norm in [1.5, 1.5]; they must be unit vectors (or 0): normalise them"
    assert_refused(message, call, kind(**build).double(), 1.5)
    call(kind(**build).double(), 1.005)
    # What some encoders give for an empty item.
    assert torch.isfinite(call(kind(**build).double(), 0.0))


@pytest.mark.parametrize("value", [-0.5, torch.nan, torch.inf])
def test_weights_that_are_no_weights_are_refused(value: float) -> None:
    weights = torch.ones(6)
    weights[3] = value
    assert_refused("weights holds numbers in [", call, InfoNCE(), weights=weights)
    call(InfoNCE(), weights=weights.clamp(min=0).nan_to_num(posinf=0.0))


@pytest.mark.parametrize("names", [["teacher_scores"], ["teacher_rows"], ["teacher_scores", "teacher_rows"]])
@pytest.mark.parametrize("dims", [None, [2, 5]])
def test_scores_without_a_teacher_are_refused(names: list[str], dims: list[int] | None) -> None:
    given = {"teacher_scores": torch.zeros(6, 2), "teacher_rows": torch.zeros(6, 1, dtype=torch.long)}
    further = {name: given[name] for name in names}
    message = "InfoNCE: teacher_scores and teacher_rows are given without a teacher"
    assert_refused(message, call, InfoNCE(dims=dims), **further)


@pytest.mark.parametrize("row", [-2, 3])
def test_rows_that_are_no_negatives_are_refused(row: int) -> None:
    given = {
        "negatives": unit(3, 5),
        "negative_id": torch.arange(20, 23),
        "teacher_scores": torch.zeros(6, 2),
        "teacher_rows": torch.tensor([[0], [1], [2], [-1], [0], [1]]),
    }
    call(InfoNCE(teacher="kl"), **given)
    given["teacher_rows"] = torch.tensor([[0], [1], [2], [-1], [row], [1]])
    assert_refused(
        f"teacher_rows holds rows in [{min(row, -1)}, {max(row, 2)}]; they must be rows of the 3 negatives",
        *(call, InfoNCE(teacher="kl")),
        **given,
    )


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ([1, 1, 1], [2, 2], "left_counts and right_counts sum to 3 and 4"),
        ([1, -1, 3], [1, 2], "left_counts holds negative"),
        ([1, 1, 1], [torch.nan, 1], "right_counts holds negative or infinite counts, or NaN"),
        ([1, 1, torch.inf], [1, 1], "left_counts holds negative or infinite"),
    ],
)
def test_counts_that_are_no_counts_are_refused(left: list[float], right: list[float], message: str) -> None:
    for dims in (None, [2, 5]):
        criterion = SogCLR(num_left=3, num_right=2, dims=dims)
        assert_refused(message, criterion.set_counts, torch.tensor(left), torch.tensor(right))
        criterion.set_counts(torch.tensor([0.5, 0.5, 1.5]), torch.tensor([1.0, 1.5]))


OWN_DERIVATIVES = {"InfoNCE", "DCL", "HCL", "SigLIP"}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_second_derivatives_are_right_or_refused(kind: type[Objective]) -> None:
    """The gradient of an estimator with constant weights is the loss's; the derivative of that gradient is not."""
    torch.manual_seed(0)
    left, right = unit(2, SIZE, 5)
    left.requires_grad_()
    criterion, ids = kind(num_left=SIZE, temperature=0.5, **arguments(kind)).double(), torch.arange(SIZE)

    def encode(side: str, ids: Tensor) -> Tensor:
        return (left if side == "left" else right)[ids]

    loss = criterion(left, right, ids, encode=encode).loss
    if kind.__name__ in OWN_DERIVATIVES:
        (gradient,) = torch.autograd.grad(loss, left, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), left)
        assert torch.isfinite(second).all()
    else:
        assert_refused("an objective has no second derivatives", loss.backward, create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prefixes_of_half_precision_are_scaled_in_full(dtype: torch.dtype) -> None:
    """What is rounded is the embeddings that come in, and nothing else."""
    left, right = unit(2, SIZE, 40).to(dtype)
    ids = torch.arange(SIZE)
    found = InfoNCE(dims=[16])(left, right, ids).loss
    scaled = (normalize(vectors.double()[:, :16], dim=1) for vectors in (left, right))
    torch.testing.assert_close(found.double(), InfoNCE()(*scaled, ids).loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lowering_the_precision_leaves_parameters_and_tables(kind: type[Objective], dtype: torch.dtype) -> None:
    for on_cpu in ("auto", "cpu"):
        criterion = kind(num_left=SIZE, temperature=0.0713, state_device=on_cpu)
        call(criterion)
        before = {name: value.clone() for name, value in criterion.state_dict().items()}
        after = criterion.to(dtype).state_dict()
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert after[name].dtype == value.dtype, name
            assert torch.equal(after[name].nan_to_num(), value.nan_to_num()), name
        # The other way it is a request for more.
        assert criterion.double().log_temperature.dtype == torch.float64
    whole = torch.nn.ModuleDict({"towers": torch.nn.Linear(2, 2), "criterion": SogCLR(num_left=3, dims=[2, 4])})
    whole.to(dtype)
    assert whole["towers"].weight.dtype == dtype
    assert {p.dtype for p in whole["criterion"].parameters()} == {torch.float32}
