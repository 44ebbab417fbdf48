"""Bad input raises one clear line that names the argument; odd but good input passes."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.encoders.dual import unit_norm
from dualenc.errors import DualencError
from dualenc.objectives import (
    DCL,
    EMC2,
    HCL,
    ISIR,
    SACLR,
    Distilled,
    ExactGlobal,
    GlobalCache,
    InfoNCE,
    ISogCLR,
    Matryoshka,
    MomentumQueue,
    NegativeCache,
    Objective,
    SogCLR,
)
from dualenc.recipe_check import argument_types
from tests.objectives.every import CLASSES, momentum_keys

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
    "left holds zero vectors: the model has diverged": {"left": torch.diag(torch.tensor([1.0, 0.0, 1.0, 1.0]))},
    "right holds zero vectors: the model has diverged": {"right": unit_norm(1e30 * torch.ones(4, 4))},
    "right holds NaN or infinite values": {"right": unit_norm(torch.eye(4) / 0)},
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_forward_names_the_argument(message: str) -> None:
    with pytest.raises(DualencError, match=message) as caught:
        InfoNCE(num_left=10)(**GOOD | BAD_CALLS[message])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8])
def test_ids_of_every_integer_type_are_ids(dtype: torch.dtype) -> None:
    """They are made 64 bits wide first: 100 + 100 does not fit into int8, nor -1 into uint8."""
    left, right = torch.nn.functional.normalize(torch.randn(2, 4, 5), dim=2)
    ids, known = torch.tensor([100, 101, 101, 7]), torch.tensor([[7, 100], [101, 7], [101, 7], [100, 100]])
    for build in (lambda: InfoNCE(num_left=110), lambda: SogCLR(num_left=110), lambda: DCL(views=True)):
        given = {"left_id": ids, "right_id": ids, "left_positives": known}
        expected, found = (build()(left, right, **{k: v.to(d) for k, v in given.items()}) for d in (torch.long, dtype))
        assert torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dimension", [1, 2048])
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


NEEDS_ENCODE = [kind for kind in CLASSES if kind.needs_encode]
SIZE = 12


def unit(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return normalize(torch.randn(shape, generator=draw, dtype=torch.float64), dim=-1)


def arguments(kind: type[Objective]) -> dict[str, Any]:
    """So that every objective asks for items within two steps."""
    return {"proposals": 5} if kind in (EMC2, ISIR) else {}


def two_steps(criterion: Objective, scale: float = 1.0, **further: Any) -> Tensor:
    """`encode` scales what it gives."""
    left, right = unit(2, SIZE, 5)

    def encode(side: str, ids: Tensor) -> Tensor:
        return scale * (left if side == "left" else right)[ids]

    for start in (0, 6):
        ids = torch.arange(start, start + 6)
        keys = momentum_keys(criterion, left[ids], right[ids])
        loss = criterion(left[ids], right[ids], ids, encode=encode, **keys, **further).loss
    return loss


@pytest.mark.parametrize("kind", NEEDS_ENCODE, ids=lambda kind: kind.__name__)
def test_encodings_that_are_not_normalised_are_refused_but_zeros_pass(kind: type[Objective]) -> None:
    """Zeros are what some encoders give for an empty item."""

    def build() -> Objective:
        return kind(num_left=SIZE, temperature=0.2, **arguments(kind)).double()

    message = ", 1.5]; they must be unit vectors (or 0): normalise them"
    with pytest.raises(DualencError, match=re.escape(message)):
        two_steps(build(), 1.5)
    with pytest.raises(DualencError, match="encode gave NaN or infinite values"):
        two_steps(build(), torch.nan)
    two_steps(build(), 1.005)
    assert torch.isfinite(two_steps(build(), 0.0))
    two_steps(Matryoshka(build(), [2, 5]), 0.0)


@pytest.mark.parametrize("kind", [ExactGlobal, EMC2, NegativeCache, GlobalCache])
def test_encodings_of_another_shape_are_refused(kind: type[Objective]) -> None:
    criterion = kind(num_left=400, **arguments(kind))
    with pytest.raises(DualencError, match=r"encode gave shape \(\d+, 3\) .* for \d+ ids; it must be .* \(\d+, 4\)"):
        for ids in torch.arange(8).split(4):
            criterion(torch.eye(4), torch.eye(4), ids, encode=lambda side, ids: torch.eye(3)[ids % 3])


@pytest.mark.parametrize("value", [-0.5, torch.nan, torch.inf])
def test_weights_that_are_negative_or_infinite_are_refused(value: float) -> None:
    weights = torch.ones(6)
    weights[3] = value
    with pytest.raises(DualencError, match=r"InfoNCE: weights holds numbers in .*; they must be finite and 0 or more"):
        two_steps(InfoNCE(), weights=weights)
    with pytest.raises(DualencError, match=r"InfoNCE: weights has shape \(3,\); it must hold 6 numbers"):
        two_steps(InfoNCE(), weights=torch.ones(3))
    two_steps(InfoNCE(), weights=weights.clamp(min=0).nan_to_num(posinf=0.0))


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ([1, 1, 1], [2, 2], "left_counts and right_counts sum to 3 and 4"),
        ([1, 1, 1], [1, 1, 1], r"right_counts has shape \(3,\); it must hold 2 counts"),
        ([1, -1, 3], [1, 2], "left_counts holds negative"),
        ([1, 1, 1], [torch.nan, 1], "right_counts holds negative or infinite counts"),
        ([1, 1, torch.inf], [1, 1], "left_counts holds negative or infinite counts"),
    ],
)
def test_counts_that_do_not_fit_are_refused(left: list[float], right: list[float], message: str) -> None:
    criterion = SogCLR(num_left=3, num_right=2)
    with pytest.raises(DualencError, match=f"SogCLR: {message}"):
        criterion.set_counts(torch.tensor(left), torch.tensor(right))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_second_derivatives_are_right_or_refused(kind: type[Objective]) -> None:
    """The gradient of an estimator with constant weights is the loss's; the derivative of that gradient is not."""
    left, right = unit(2, SIZE, 5)
    left.requires_grad_()
    criterion, ids = kind(num_left=SIZE, temperature=0.5, **arguments(kind)).double(), torch.arange(SIZE)

    def encode(side: str, ids: Tensor) -> Tensor:
        return (left if side == "left" else right)[ids]

    loss = criterion(left, right, ids, encode=encode, **momentum_keys(criterion, left, right)).loss
    if kind.__name__ in ("InfoNCE", "DCL", "HCL", "SigLIP", "MomentumQueue"):
        (gradient,) = torch.autograd.grad(loss, left, create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), left)
        assert torch.isfinite(second).all()
    else:
        with pytest.raises(DualencError, match="an objective has no second derivatives"):
            loss.backward(create_graph=True)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_half_precision_leaves_temperatures_and_tables_alone(kind: type[Objective]) -> None:
    criterion = kind(num_left=SIZE, temperature=0.0713)
    two_steps(criterion)
    before = {name: value.clone() for name, value in criterion.state_dict().items()}
    for dtype in (torch.bfloat16, torch.float16):
        after = torch.nn.ModuleList([criterion]).to(dtype)[0].state_dict()
        assert before.keys() == after.keys()
        for name, value in before.items():
            assert after[name].dtype == value.dtype, name
            assert torch.equal(after[name].nan_to_num(), value.nan_to_num()), name
    assert criterion.double().log_temperature.dtype == torch.float64, "more precision is given"


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
        (lambda: GlobalCache(num_left=5, extra_encodes=-1), "extra_encodes is -1"),
        (lambda: GlobalCache(num_left=5, control=2), "control is 2"),
        (lambda: GlobalCache(num_left=5, partition="all"), "partition is 'all'; it must be one of sample, memory"),
        (lambda: GlobalCache(num_left=5, pool=0), "pool is 0"),
        (lambda: NegativeCache(num_left=5, refresh=1.5), "refresh is 1.5"),
        (lambda: MomentumQueue(queue_size=0), "MomentumQueue: queue_size is 0; it must be at least 1"),
        (lambda: MomentumQueue(momentum=1.0), r"momentum is 1.0; it must lie in \[0, 1\)"),
        (lambda: EMC2(num_left=5, score="old"), "score is 'old'"),
        (lambda: InfoNCE(temperature="0.07"), "InfoNCE: temperature is '0.07'; it must be a finite number"),
        (lambda: DCL(learnable_temperature="false"), "learnable_temperature is 'false'; it must be True or False"),
        (lambda: SogCLR(num_left="20"), "num_left is '20'; it must be a whole number or None"),
        (lambda: SogCLR(num_left=20.0), "num_left is 20.0; it must be a whole number or None"),
        (lambda: SogCLR(num_left=3, gamma_schedule="linear"), "gamma_schedule is 'linear'; .* one of constant, cosine"),
        (lambda: SACLR(num_left=3, negatives=2), "negatives is 2; it must be one of 1, all"),
        (lambda: Matryoshka(InfoNCE(), 64), "dims is 64; it must be of type Sequence"),
        (lambda: Distilled("InfoNCE"), "objective is 'InfoNCE'; it must be of type Objective"),
        (lambda: EMC2(num_left=5, burn_in=1.0), "burn_in is 1.0"),
        (lambda: ISIR(num_left=5, proposals=0), "proposals is 0"),
        (lambda: ISIR(num_left=5, recent=-1), "recent is -1"),
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


def test_encode_is_demanded_where_it_is_needed() -> None:
    with pytest.raises(DualencError, match="encode is missing"):
        ExactGlobal(num_left=4)(**GOOD)


def test_two_views_carry_one_id() -> None:
    with pytest.raises(DualencError, match="right_id differs"):
        InfoNCE(views=True)(**GOOD, right_id=torch.tensor([1, 0, 2, 3]))


@pytest.mark.parametrize("kind", [k for k in CLASSES if not k.needs_encode], ids=lambda kind: kind.__name__)
def test_a_batch_of_one_pair_has_a_finite_gradient(kind: type[Objective]) -> None:
    left, right = torch.eye(4)[:1].requires_grad_(), torch.eye(4)[:1]
    criterion = kind(num_left=9)
    out = criterion(left, right, torch.arange(1), **momentum_keys(criterion, left, right))
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(left.grad).all()


WRAPPERS = {
    "": lambda criterion: criterion,
    "Matryoshka": lambda criterion: Matryoshka(criterion, [2, 5]),
    "Distilled": lambda criterion: Distilled(criterion),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_values_of_another_type_end_in_one_line(kind: type[Objective], wrapper: str) -> None:
    criterion = WRAPPERS[wrapper](kind(num_left=SIZE, temperature=0.2, **arguments(kind)))
    left, right = unit(2, SIZE, 5).float()
    ids = torch.arange(6)
    good = {"left": left[:6], "right": right[:6], "left_id": ids, "encode": lambda side, ids: left[ids]}
    good |= momentum_keys(criterion, left[:6], right[:6])
    if criterion.needs_teacher:
        good |= {"teacher_scores": torch.zeros(6, 1), "teacher_rows": torch.zeros(6, 0, dtype=torch.long)}
    bad = {
        "left_id is a list; it must be a tensor": {"left_id": list(range(6))},
        "left_id is None": {"left_id": None},
        "right_id is a ndarray; it must be a tensor": {"right_id": np.arange(6)},
        "left is a ndarray; it must be a tensor": {"left": left[:6].numpy()},
        "right is a list": {"right": right[:6].tolist()},
        "weights is a list": {"weights": [1.0] * 6},
        "left_positives is a list": {"left_positives": [[0]] * 6},
    }
    if kind.needs_encode:
        results = {
            "NoneType": lambda side, ids: None,
            "ndarray": lambda side, ids: left[ids].numpy(),
            "list": lambda side, ids: left[ids].tolist(),
            r"shape \(\d+, 5\) \(torch.int64\)": lambda side, ids: left[ids].long(),
        }
        bad |= {f"encode gave (a )?{result}": {"encode": encode} for result, encode in results.items()}
        for start in (6, 0):
            criterion(**good | {"left_id": ids + start, "left": left[start : start + 6]})
    for message, change in bad.items():
        with pytest.raises(DualencError, match=message) as caught:
            criterion(**good | change)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_arguments_of_another_type_end_in_one_line(kind: type[Objective]) -> None:
    """Every argument of every objective; numpy's numbers are numbers."""
    kind(num_left=np.int64(SIZE), temperature=np.float32(0.2))
    kind(num_left=SIZE, temperature=1)
    for name, hint in argument_types(kind).items():
        if hint is not str:
            with pytest.raises(DualencError, match=f"{kind.__name__}: {name} is 'x'; it must be") as caught:
                kind(**{"num_left": SIZE, name: "x"})
            assert "\n" not in str(caught.value)
        if hint is float:
            with pytest.raises(DualencError, match=f"{name} is nan; it must be a finite number"):
                kind(**{"num_left": SIZE, name: math.nan})
