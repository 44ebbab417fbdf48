"""Matryoshka is the mean of independent objectives of prefixes, and encodes an item once."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.errors import DualencError
from dualenc.objectives import (
    EMC2,
    ISIR,
    ExactGlobal,
    GlobalCache,
    InfoNCE,
    Matryoshka,
    Objective,
    SogCLR,
)
from dualenc.objectives.matryoshka import EncodedOnce, prefix

NUM, DIM = 12, 6
DIMS = [2, 3, 6]
ALL = torch.arange(NUM)


def features() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(NUM, DIM, generator=draw).double(), torch.randn(
        NUM, DIM, generator=draw
    ).double()


def unit() -> tuple[Tensor, Tensor]:
    left, right = features()
    return normalize(left, dim=1), normalize(right, dim=1)


def losses_and_gradients(criteria: list[tuple[int, Objective]]) -> list[tuple[Tensor, Tensor]]:
    """Of each step the mean over (length, objective), written out, and the gradient of the
    features."""
    found = []
    for step in range(6):
        ids = torch.randperm(NUM, generator=torch.Generator().manual_seed(step))[:5]
        left, right = (values.requires_grad_() for values in features())
        losses = []
        for dim, criterion in criteria:

            def encode(
                side: str, ids: Tensor, dim: int = dim, left: Tensor = left, right: Tensor = right
            ) -> Tensor:
                return normalize((left if side == "left" else right)[ids][:, :dim], dim=1)

            losses.append(
                criterion(encode("left", ids), encode("right", ids), ids, ids, encode).loss
            )
        loss = torch.stack(losses).mean()
        found.append((loss.detach(), torch.cat(torch.autograd.grad(loss, [left, right]))))
    return found


MAKERS: dict[str, Callable[[], Objective]] = {
    "InfoNCE": lambda: InfoNCE(temperature=0.2),
    "SogCLR": lambda: SogCLR(num_left=NUM, temperature=0.2, gamma=0.5),
    "EMC2": lambda: EMC2(num_left=NUM, temperature=0.2),
    "ISIR": lambda: ISIR(num_left=NUM, temperature=0.2, proposals=4),
    "GlobalCache": lambda: GlobalCache(num_left=NUM, temperature=0.2),
    "ExactGlobal": lambda: ExactGlobal(num_left=NUM, temperature=0.2, corpus_chunk_size=5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MAKERS))
def test_it_is_the_mean_of_independent_objectives_of_prefixes(name: str) -> None:
    alone = losses_and_gradients([(dim, MAKERS[name]().double()) for dim in DIMS])
    together = losses_and_gradients([(DIM, Matryoshka(MAKERS[name](), DIMS).double())])
    for found, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(found, expected)


def test_each_length_has_a_memory_of_its_own_which_a_pickle_holds() -> None:
    together, (left, right) = Matryoshka(SogCLR(num_left=NUM), DIMS).double(), unit()
    together(left, right, ALL)
    tables = [criterion.log_u for criterion in together.objectives]
    assert not torch.equal(tables[0], tables[2])
    assert torch.equal(
        pickle.loads(pickle.dumps(together))(left, right, ALL).loss, together(left, right, ALL).loss
    )


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=5))
def test_items_are_encoded_once(asked: list[list[int]]) -> None:
    table, encoded = torch.randn(10, 4), []

    def encode(side: str, ids: Tensor) -> Tensor:
        encoded.append(ids.tolist())
        return table[ids]

    once = EncodedOnce(encode)
    for ids in asked:
        wanted = torch.tensor(ids, dtype=torch.int64)
        torch.testing.assert_close(once("right", wanted), table[wanted])
    assert len(encoded) == len(asked), "as often as other ranks, be it for nothing"
    assert sorted(item for ids in encoded for item in ids) == sorted(
        {item for ids in asked for item in ids}
    )


def test_shared_proposals_are_encoded_once_for_all_lengths() -> None:
    counts, (left, right), ids = [], unit(), ALL[:5]
    for lengths in ([DIM], DIMS):
        asked: list[int] = []

        def encode(side: str, wanted: Tensor, asked: list[int] = asked) -> Tensor:
            asked.extend(wanted.tolist())
            return (left if side == "left" else right)[wanted]

        Matryoshka(ISIR(num_left=NUM, proposals=4), lengths).double()(
            left[ids], right[ids], ids, ids, encode
        )
        counts.append(len(asked))
    assert counts[0] <= counts[1] < 2 * counts[0], (
        "the proposals are shared, the states need not be"
    )


def test_metrics_of_every_length() -> None:
    left, right = unit()
    output = Matryoshka(InfoNCE(), [3, 6])(left, right, ALL)
    alone = InfoNCE()(prefix(left, 3), prefix(right, 3), ALL)
    whole = InfoNCE()(left, right, ALL)
    assert {name: float(value) for name, value in output.metrics.items()} == {
        **{name: float(value) for name, value in whole.metrics.items()},
        **{f"{name}@3": float(value) for name, value in alone.metrics.items()},
    }
    torch.testing.assert_close(output.per_anchor, (alone.per_anchor + whole.per_anchor) / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prefixes_of_half_precision_are_scaled_in_full(dtype: torch.dtype) -> None:
    left, right = (normalize(torch.randn(2, NUM, 40), dim=2)).to(dtype)
    found = Matryoshka(InfoNCE(), [16])(left, right, ALL).loss
    scaled = (normalize(vectors.double()[:, :16], dim=1) for vectors in (left, right))
    torch.testing.assert_close(found.double(), InfoNCE()(*scaled, ALL).loss, rtol=1e-5, atol=1e-5)


def test_counts_reach_every_length() -> None:
    together = Matryoshka(SogCLR(num_left=3, num_right=2), [2, 4])
    together.set_counts(torch.tensor([1, 2, 3]), torch.tensor([2, 4]))
    for objective in together.objectives:
        assert objective.corpus.pair_counts.tolist() == [1, 2, 3, 2, 4]
    with pytest.raises(DualencError, match="left_counts and right_counts sum to 6 and 5"):
        together.set_counts(torch.tensor([1, 2, 3]), torch.tensor([2, 3]))
