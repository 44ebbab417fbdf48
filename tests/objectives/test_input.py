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

from dualenc.errors import DualencError
from dualenc.objectives import (
    DCL,
    EMC2,
    ISIR,
    ExactGlobal,
    FrozenCorpus,
    InfoNCE,
    ISogCLR,
    Matryoshka,
    MomentumQueue,
    Objective,
    SogCLR,
)
from dualenc.recipe.check import parameters
from tests.helpers.every import CLASSES, momentum_keys

EYE, IDS = torch.eye(4), torch.arange(4)
GOOD = {"left": EYE, "right": EYE, "left_id": IDS}
BAD_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("left_id holds ids in [0, 99]", {"left_id": torch.tensor([0, 1, 2, 99])}),
    ("left_id holds ids in [-1, 2]", {"left_id": torch.tensor([0, 1, 2, -1])}),
    ("left_id has shape (3,)", {"left_id": torch.arange(3)}),
    ("right_id has shape (4,) (torch.float32)", {"right_id": torch.arange(4.0)}),
    ("left_id is on meta", {"left_id": torch.arange(4, device="meta")}),
    ("left has shape (4,)", {"left": torch.ones(4)}),
    ("right has shape (3, 4)", {"right": EYE[:3]}),
    ("right holds NaN", {"right": EYE * torch.nan}),
    ("left holds NaN or infinite", {"left": EYE / 0}),
    (
        "left has rows of norm in [1, 4000]",
        {"left": torch.diag(torch.tensor([1.0, 4000.0, 1.0, 1.0]))},
    ),
    (
        "right has rows of norm in [0.98, 1]",
        {"right": torch.diag(torch.tensor([0.98, 1.0, 1.0, 1.0]))},
    ),
    ("left holds zero vectors", {"left": torch.diag(torch.tensor([1.0, 0.0, 1.0, 1.0]))}),
    ("left has rows of norm in [4000, 4000]", {"left": 4000 * EYE.half(), "right": EYE.half()}),
    ("negatives and negative_id", {"negatives": EYE}),
    ("negatives and negative_id", {"negative_id": IDS}),
    ("negatives has shape (4, 3)", {"negatives": EYE[:, :3], "negative_id": IDS}),
    ("negatives has rows of norm", {"negatives": 2 * EYE, "negative_id": IDS}),
    ("negative_id has shape (3,)", {"negatives": EYE, "negative_id": torch.arange(3)}),
    (
        "negative_id holds ids in [0, 99]",
        {"negatives": EYE, "negative_id": torch.tensor([0, 1, 2, 99])},
    ),
    (
        "left_positives holds ids in [0, 10]",
        {"left_positives": torch.tensor([[0], [1], [2], [10]])},
    ),
    (
        "left_positives holds ids in [-2, 2]",
        {"left_positives": torch.tensor([[0], [1], [2], [-2]])},
    ),
    (
        "right_positives holds ids in [0, 12]",
        {"right_positives": torch.tensor([[0], [1], [2], [12]])},
    ),
    ("right_positives has shape (4,)", {"right_positives": IDS}),
    ("left is None; it must be a float tensor", {"left": None}),
    ("left is of type list", {"left": EYE.tolist()}),
    ("left has shape ()", {"left": torch.ones(())}),
    ("right is of type ndarray", {"right": EYE.numpy()}),
    ("right is on meta, left is on cpu", {"right": EYE.to("meta")}),
    ("negatives is of type ndarray", {"negatives": EYE.numpy(), "negative_id": IDS}),
    ("left_id is None", {"left_id": None}),
    ("left_id is of type list", {"left_id": [[0], [1, 2]]}),
    ("left_id is of type list", {"left_id": ["a", "b", "c", "d"]}),
    ("left_id has shape (4,) (torch.bool)", {"left_id": IDS > 0}),
    ("right_id has shape (4,) (torch.bool)", {"right_id": [True, False, True, False]}),
    ("right_id has shape (4,) (torch.float64)", {"right_id": np.arange(4.0)}),
    ("right_id has shape (4,) (torch.complex64)", {"right_id": IDS.cfloat()}),
    ("weights is of type list", {"weights": [1, 2, 3, None]}),
    ("weights has shape (3,)", {"weights": torch.ones(3)}),
    ("weights is on meta", {"weights": torch.ones(4, device="meta")}),
    ("keys_left and keys_right do not apply", {"keys_left": EYE, "keys_right": EYE}),
    ("keys_left and keys_right do not apply", {"keys_right": EYE}),
    ("weights holds numbers in [-0.5, 1]", {"weights": torch.tensor([1, -0.5, 1, 1])}),
    ("weights holds numbers in [nan, nan]", {"weights": torch.tensor([1, torch.nan, 1, 1])}),
    ("weights holds numbers in [1, inf]", {"weights": torch.tensor([1, torch.inf, 1, 1])}),
]
VIEWS = [
    ("negatives do not go with views=True", {"negatives": EYE, "negative_id": torch.arange(4, 8)}),
    ("right_id differs", {"right_id": torch.tensor([1, 0, 2, 3])}),
]
MINED: dict[str, Any] = {"negatives": EYE, "negative_id": IDS, "encode": lambda side, ids: EYE[ids]}
MINED_IDS = {"negative_id": IDS, "encode": lambda side, ids: EYE[ids]}
KEYS = [
    ("keys_left and keys_right are missing", {}),
    ("keys_left and keys_right are missing", {"keys_left": EYE}),
    ("keys_right has shape (2, 4)", {"keys_left": EYE, "keys_right": EYE[:2]}),
    ("keys_right has rows of norm in [2, 2]", {"keys_left": EYE, "keys_right": 2 * EYE}),
]


@pytest.mark.parametrize(
    ("criterion", "message", "change"),
    [
        *((InfoNCE(num_left=10), *case) for case in BAD_CALLS),
        *((InfoNCE(views=True), *case) for case in VIEWS),
        *((MomentumQueue(), *case) for case in KEYS),
        (ExactGlobal(num_left=4), "encode is missing", {}),
        (ExactGlobal(num_left=4), "encode is missing", {"encode": EYE}),
        *((ISIR(num_left=4), "negatives do not apply", case) for case in (MINED, MINED_IDS)),
        (EMC2(num_left=4, proposals=3), "negatives do not apply", MINED),
        (FrozenCorpus(EYE), "negatives do not apply", MINED),
        (SogCLR(num_left=4), "keys_left and keys_right do not apply", {"keys_left": EYE}),
        (Matryoshka(InfoNCE(), [2, 4]), "left is None", {"left": None}),
        (Matryoshka(InfoNCE(), [2, 4]), "left has shape (4,)", {"left": torch.ones(4)}),
        (Matryoshka(InfoNCE(), [2, 5]), "dims are [2, 5], but the embeddings have 4", {}),
    ],
)
def test_forward_names_the_class_and_the_argument(
    criterion: Objective, message: str, change: dict[str, Any]
) -> None:
    with pytest.raises(
        DualencError, match=re.escape(f"{type(criterion).__name__}: {message}")
    ) as caught:
        criterion(**GOOD | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [list, np.array, tuple])
def test_ids_weights_and_counts_may_be_lists_or_arrays(kind: Any) -> None:
    left, right = normalize(torch.randn(2, 4, 5), dim=2)
    numbers = {"left_id": [3, 1, 2, 1], "right_id": [0, 1, 2, 3], "weights": [1.0, 0.5, 2.0, 0.0]}
    numbers |= {"left_positives": [[0, 1]] * 4, "negative_id": [4, 5, 6, 7]}
    losses = []
    for convert in (torch.tensor, kind):
        criterion = SogCLR(num_left=4, num_right=8)
        criterion.set_counts(convert([0, 2, 1, 1]), convert([1, 1, 1, 1, 0, 0, 0, 0]))
        given = {name: convert(values) for name, values in numbers.items()}
        losses.append(criterion(left, right, negatives=right, **given).loss)
    assert torch.equal(*losses)
    nobody = EYE[:0]
    assert float(InfoNCE()(nobody, nobody, [], weights=[]).loss) == 0


BAD_VALUES: dict[str, tuple[Any, ...]] = {
    "num_left": (0, "20", 1e6, True),
    "num_right": (0, "20", 20.5, True),
    "temperature": (0.0, -1.0, 5e-4, torch.tensor(0.07), True),
    "seed": (2**65, 0.5, True),
    "bias": (math.inf, True),
    "class_prior": (-0.1, 1.0),
    "gamma": (0.0, 1.1),
    "temperature_momentum": (-0.1, 1.0),
    "min_temperature": (0.0, 2.0),
    "max_temperature": (0.0,),
    "proposals": (0, "all", 6.5),
    "burn_in": (-0.1, 1.0),
    "pool": (0, 1e3),
    "refresh": (-0.5, 1.5),
    "queue_size": (0, 1e4),
    "momentum": (-0.1, 1.0),
    "form": ("column",),
    "negatives": (2,),
    "alpha": (-0.1, 2.0),
    "rho": (-0.1, 1.0),
    "corpus_chunk_size": (0, 7.5),
    "recent": (-1, 1e4),
}
NOT_NEGATIVE = ("hardness", "radius", "temperature_rate", "extra_encodes")
BAD_VALUES |= dict.fromkeys(NOT_NEGATIVE, (-1,))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_constructor_names_the_class_and_the_argument(kind: type[Objective]) -> None:
    """Every argument of every objective; numpy's numbers are numbers."""
    kind(num_left=np.int64(5), temperature=np.float32(0.2))
    kind(num_left=5, temperature=1)
    hints = {
        name: each.annotation
        for name, each in parameters(kind).items()
        if each.annotation is not bool
    }
    assert hints.keys() <= BAD_VALUES.keys()
    for name in hints.keys() & BAD_VALUES:
        for value in BAD_VALUES[name] + ("x", math.nan) * (hints[name] in (int, float)):
            with pytest.raises(DualencError, match=f"^{kind.__name__}: {name} ") as caught:
                kind(**{"num_left": 5, name: value})
            assert "\n" not in str(caught.value)


def test_what_an_objective_lacks_is_named() -> None:
    with pytest.raises(DualencError, match="SogCLR: num_left is missing"):
        SogCLR()
    with pytest.raises(DualencError, match="ISogCLR: learnable_temperature does not apply"):
        ISogCLR(num_left=5, learnable_temperature=True)
    for start in (0.002, 2.0):
        with pytest.raises(
            DualencError, match=r"ISogCLR: temperature is .*; it must be a number in \[0.005, 1.0\]"
        ):
            ISogCLR(num_left=5, temperature=start)


@pytest.mark.parametrize("dims", [[], [2, 2], [0, 3], [2.5, 4], [True, 2], 64], ids=str)
def test_lengths_are_checked(dims: Any) -> None:
    with pytest.raises(DualencError, match=r"^Matryoshka: dims "):
        Matryoshka(InfoNCE(), dims)
    with pytest.raises(DualencError, match=r"^Matryoshka: objective is of type CosineSimilarity"):
        Matryoshka(torch.nn.CosineSimilarity(), [2, 4])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8])
def test_ids_of_every_integer_type_are_ids(dtype: torch.dtype) -> None:
    """They are made 64 bits wide first: 100 + 100 does not fit into int8, nor -1 into uint8."""
    left, right = normalize(torch.randn(2, 4, 5), dim=2)
    ids, known = (
        torch.tensor([100, 101, 101, 7]),
        torch.tensor([[7, 100], [101, 7], [101, 7], [100, 100]]),
    )
    for build in (lambda: SogCLR(num_left=110), lambda: DCL(views=True)):
        given = {"left_id": ids, "right_id": ids, "left_positives": known}
        expected, found = (
            build()(left, right, **{k: v.to(d) for k, v in given.items()})
            for d in (torch.long, dtype)
        )
        assert torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dimension", [1, 2048])
def test_rounded_unit_vectors_pass(dtype: torch.dtype, dimension: int) -> None:
    """Normalised in their own precision, and normalised exactly and then rounded."""
    draw = torch.randn(2, 50, dimension, dtype=torch.float64)
    for left, right in (normalize(draw.to(dtype), dim=2), normalize(draw, dim=2).to(dtype)):
        assert torch.isfinite(InfoNCE()(left, right, torch.arange(50)).loss)


NEEDS_ENCODE = [kind for kind in CLASSES if kind.needs_encode]
SIZE = 12


def unit(*shape: int) -> Tensor:
    return normalize(
        torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64), dim=-1
    )


def build(kind: type[Objective], temperature: float = 0.2) -> Objective:
    """So that every objective asks for items within two steps."""
    arguments: dict[str, Any] = {"proposals": 5} if kind in (EMC2, ISIR) else {}
    return kind(num_left=SIZE, temperature=temperature, **arguments)


def two_steps(criterion: Objective, change: Any = lambda vectors: vectors) -> Tensor:
    """The loss of the second step; `change` is made to what `encode` gives."""
    left, right = unit(2, SIZE, 5)
    for ids in torch.arange(SIZE).split(6):
        encode = lambda side, ids: change((left if side == "left" else right)[ids])  # noqa: E731
        keys = momentum_keys(criterion, left[ids], right[ids])
        loss = criterion(left[ids], right[ids], ids, encode=encode, **keys).loss
    return loss


@pytest.mark.parametrize("kind", NEEDS_ENCODE, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda vectors: 1.5 * vectors, r"the result of encode has rows of norm in \[.*, 1.5\]"),
        (lambda vectors: torch.nan * vectors, "the result of encode holds NaN"),
        (lambda vectors: vectors.long(), r"encode returned shape \(\d+, 5\) \(torch.int64\)"),
        (
            lambda vectors: vectors[:, :3],
            r"encode returned shape \(\d+, 3\) .* must return .* \(\d+, 5\)",
        ),
        (
            lambda vectors: None,
            r"encode returned a value that is None for \d+ ids; it must return a float tensor",
        ),
        (
            lambda vectors: vectors.numpy(),
            r"encode returned a value that is of type ndarray for \d+ ids",
        ),
        (lambda vectors: vectors[:0], r"encode returned shape \(0, 5\)"),
    ],
)
def test_bad_encodings_are_refused(kind: type[Objective], change: Any, message: str) -> None:
    with pytest.raises(DualencError, match=f"{kind.__name__}: {message}"):
        two_steps(build(kind).double(), change)
    if "rows of norm" not in message and "NaN" not in message:
        with pytest.raises(DualencError, match=f"{kind.__name__}: {message}"):
            two_steps(Matryoshka(build(kind), [2, 5]).double(), change)


class BothSides:
    """An `encode` whose method for both sides gives too little."""

    def __call__(self, side: str, ids: Tensor) -> Tensor:
        raise AssertionError("called one side at a time")

    def sides(self, parts: list[tuple[str, Tensor]]) -> list[Tensor]:
        return [unit(len(ids), 5) for _, ids in parts[:1]]


def test_an_encode_of_both_sides_must_give_both() -> None:
    left, right = unit(2, SIZE, 5)
    with pytest.raises(
        DualencError,
        match=r"ISIR: encode returned the wrong number .* its method sides; it must return 2",
    ):
        build(ISIR).double()(left, right, torch.arange(SIZE), encode=BothSides())


NAMES = ("EMC2", "ISIR", "GlobalCache", "NegativeCache")
REMEMBER = [kind for kind in CLASSES if kind.__name__ in NAMES]


@pytest.mark.parametrize("kind", [*REMEMBER, MomentumQueue], ids=lambda kind: kind.__name__)
def test_a_dimension_that_changes_is_refused_where_embeddings_are_remembered(kind: Any) -> None:
    criterion, other = build(kind).double(), unit(SIZE, 4)
    two_steps(criterion)
    keys = momentum_keys(criterion, other, other)
    for mode in (True, False):
        encode = lambda side, ids: other[ids]  # noqa: E731
        with pytest.raises(
            DualencError, match=f"{kind.__name__}: left has 4 components, and rem.* 5"
        ):
            criterion.train(mode)(other, other, IDS.repeat(3), encode=encode, **keys)


@pytest.mark.parametrize("kind", NEEDS_ENCODE, ids=lambda kind: kind.__name__)
def test_zeros_which_some_encoders_give_for_an_empty_item_pass(kind: type[Objective]) -> None:
    two_steps(build(kind).double(), lambda vectors: 1.005 * vectors)
    for criterion in (build(kind), Matryoshka(build(kind), [2, 5])):
        assert torch.isfinite(two_steps(criterion.double(), lambda vectors: 0 * vectors))


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ([1, 1, 1], [2, 2], "left_counts and right_counts sum to 3 and 4"),
        ([1, 1, 1], [1, 1, 1], r"right_counts has shape \(3,\)"),
        ([1, -1, 3], [1, 2], "left_counts holds negative"),
        ([1, 1, 1], [torch.nan, 1], "right_counts holds negative"),
        ([1, 1, torch.inf], [1, 1], "left_counts holds negative"),
        ([0, 0, 0], [0, 0], "left_counts and right_counts sum to 0"),
        ([True, True, False], [1, 1], "left_counts holds booleans"),
    ],
)
def test_counts_that_do_not_fit_are_refused(
    left: list[float], right: list[float], message: str
) -> None:
    with pytest.raises(DualencError, match=f"SogCLR: {message}"):
        SogCLR(num_left=3, num_right=2).set_counts(torch.tensor(left), torch.tensor(right))


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_second_derivatives_of_estimators_are_refused(kind: type[Objective]) -> None:
    """The gradient of an estimator with constant weights is the loss's; the derivative of that
    gradient is not."""
    left, right = unit(2, SIZE, 5)
    left.requires_grad_()
    criterion, ids = build(kind, temperature=0.5).double(), torch.arange(SIZE)
    encode = lambda side, ids: (left if side == "left" else right)[ids]  # noqa: E731
    loss = criterion(left, right, ids, encode=encode, **momentum_keys(criterion, left, right)).loss
    if kind.__name__ in ("InfoNCE", "DCL", "HCL", "SigLIP", "MomentumQueue", "SACLR"):
        (gradient,) = torch.autograd.grad(loss, left, create_graph=True)
        assert torch.isfinite(torch.autograd.grad(gradient.square().sum(), left)[0]).all()
    else:
        with pytest.raises(
            DualencError, match="second derivatives of an objective are not supported"
        ):
            loss.backward(create_graph=True)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_half_precision_leaves_temperatures_and_tables_alone(kind: type[Objective]) -> None:
    criterion = kind(num_left=SIZE, temperature=0.0713)
    two_steps(criterion)
    before = {name: value.clone() for name, value in criterion.state_dict().items()}
    for dtype in (torch.bfloat16, torch.float16):
        after = torch.nn.ModuleList([criterion]).to(dtype)[0].state_dict()
        for name, value in before.items():
            assert after[name].dtype == value.dtype, name
            assert torch.equal(after[name].nan_to_num(), value.nan_to_num()), name
    assert criterion.double().log_temperature.dtype == torch.float64, "more precision is given"


@pytest.mark.parametrize(
    "kind", [k for k in CLASSES if not k.needs_encode], ids=lambda kind: kind.__name__
)
def test_a_batch_of_one_pair_has_a_finite_gradient(kind: type[Objective]) -> None:
    left, right = EYE[:1].clone().requires_grad_(), EYE[:1]
    criterion = kind(num_left=9)
    out = criterion(left, right, torch.arange(1), **momentum_keys(criterion, left, right))
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(left.grad).all()


@pytest.mark.parametrize("kind", NEEDS_ENCODE, ids=lambda kind: kind.__name__)
def test_encode_runs_under_the_autocast_of_the_caller(kind: type[Objective]) -> None:
    """Objectives turn it off for their own sums."""
    left, right = unit(2, SIZE, 5)
    criterion = build(kind)
    seen = []

    def encode(side: str, ids: Tensor) -> Tensor:
        seen.append(torch.is_autocast_enabled("cpu"))
        return (left if side == "left" else right)[ids]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        for ids in torch.arange(SIZE).split(6):
            criterion(left[ids], right[ids], ids, encode=encode)
    assert seen
    assert all(seen)
