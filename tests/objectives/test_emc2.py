"""EMC2 and ISIR: every setting equals a loop over single chains; and what published implementations get wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualenc.errors import DualencError
from dualenc.objectives import DCL, EMC2, ISIR
from dualenc.objectives.chains import inverse_cdf
from dualenc.objectives.emc2 import AT_ONCE, RUN, walk, without_a_loop
from tests.objectives.every import Dispatched
from tests.objectives.slow import GuideTable, gradients, make_case
from tests.objectives.slow_chains import NUM_ITEMS, Corpus, SlowChains

SETTINGS = {
    "EMC2-stored-batch": (EMC2, {}),
    "EMC2-stored-draws": (EMC2, {"proposals": 9}),
    "EMC2-fresh-batch": (EMC2, {"score": "fresh"}),
    "EMC2-fresh-draws": (EMC2, {"score": "fresh", "proposals": 9}),
    "ISIR-batch": (ISIR, {}),
    "ISIR-draws": (ISIR, {"proposals": 9}),
}


def build(setting: str, burn_in: float = 0.5, **common: Any) -> EMC2 | ISIR:
    """A criterion over 20 items by its name; what has no burn-in ignores it."""
    kind, arguments = SETTINGS[setting]
    if kind is EMC2:
        arguments = {"burn_in": burn_in, **arguments}
    return kind(num_left=NUM_ITEMS, **common, **arguments)


@pytest.mark.parametrize("setting", SETTINGS)
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.integers(1, 7),
    views=st.booleans(),
    burn_in=st.sampled_from([0.0, 0.5, 0.9]),
    tau=st.sampled_from([0.07, 0.5]),
    guided=st.booleans(),
)
def test_equals_the_loop(
    setting: str, seed: int, size: int, views: bool, burn_in: float, tau: float, guided: bool
) -> None:
    common = {"temperature": tau, "views": views, "seed": seed, "shared_chain": True, "recent": 0}
    criterion = build(setting, burn_in, **common).double()
    slow = SlowChains(tau, *SETTINGS[setting], burn_in, random=copy.deepcopy(criterion.random))
    guide = GuideTable.make(seed) if guided else None
    for step in range(5):
        case, corpus = make_case(seed * 5 + step, size, views, guide=guide), Corpus.make(seed)
        out = criterion(**case.arguments(), encode=corpus.encode)
        asked = list(corpus.asked)
        assert len(set(asked)) == len(asked)
        expected = slow.surrogate(case, corpus)
        torch.testing.assert_close(gradients(out.loss, case, corpus), gradients(expected, case, corpus))
    for (side, anchor), chain in slow.chains.items():
        state = int(criterion.chains.state[criterion.chains_of(side)][anchor])
        assert (state // 2 if views else state) == chain.item.id


def batch_of(corpus: Corpus, ids: list[int]) -> dict[str, torch.Tensor]:
    """The corpus items as a batch, in the corpus's own embeddings."""
    rows = torch.tensor(ids)
    return {"left": corpus.left[rows], "right": corpus.right[rows], "left_id": rows}


def hard_corpus() -> tuple[Corpus, int]:
    """A corpus where every left item is closest to right item 19, and nothing else is near."""
    corpus = Corpus.make(0)
    with torch.no_grad():
        corpus.left.zero_()[:, 0] = 1
        corpus.right.zero_()[:, 1] = 1
        corpus.right[19] = corpus.left[19]
    return corpus, 19


@pytest.mark.parametrize("views", [False, True])
def test_isir_without_a_state_is_dcl(views: bool) -> None:
    corpus = Corpus.make(3)
    found, expected = (
        torch.autograd.grad(criterion.double()(**batch_of(corpus, [4, 1, 7]), encode=corpus.encode).loss, corpus.left)
        for criterion in (ISIR(num_left=20, views=views), DCL(views=views))
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("burn_in", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("setting", ["EMC2-stored-batch", "EMC2-fresh-batch"])
def test_a_state_that_outlives_burn_in_gets_all_the_weight(setting: str, burn_in: float) -> None:
    """Also at burn-in 0.5 and more: the state counts like any other, and is encoded with gradient."""
    corpus, hard = hard_corpus()
    criterion = build(setting, burn_in, temperature=0.01).double()
    criterion.chains.state[criterion.chains_of("left")] = hard
    criterion.chains.score[criterion.chains_of("left")] = 1.0
    out = criterion(**batch_of(corpus, [0, 1, 2, 3]), encode=corpus.encode)
    (gradient,) = torch.autograd.grad(out.loss, corpus.right)
    # Half the loss is this direction; each of 4 anchors puts weight 1 on the state, at s/τ with s = ⟨left, right⟩.
    torch.testing.assert_close(gradient[hard], 0.5 / 0.01 * corpus.left[0].detach())


def test_stored_encodes_only_the_states_that_weigh_and_fresh_all_of_them() -> None:
    corpus, hard = hard_corpus()
    asked = {}
    for score in ("stored", "fresh"):
        criterion = EMC2(num_left=20, temperature=0.01, score=score).double()
        criterion.chains.state[criterion.chains_of("left")] = torch.tensor([hard] * 2 + [10] * 18)
        criterion.chains.score[criterion.chains_of("left")] = torch.tensor([1.0] * 2 + [-1.0] * 18)
        criterion(**batch_of(corpus, [0, 1, 2, 3]), encode=corpus.encode)
        asked[score], corpus.asked = corpus.asked, []
    assert asked == {"stored": [("right", hard)], "fresh": [("right", 10), ("right", hard)]}


def test_a_state_in_the_batch_is_not_encoded_again() -> None:
    corpus, hard = hard_corpus()
    criterion = ISIR(num_left=20, temperature=0.01).double()
    criterion.chains.state[criterion.chains_of("left")] = hard
    criterion(**batch_of(corpus, [0, 1, hard]), encode=corpus.encode)
    assert corpus.asked == []


def test_a_new_chain_accepts_its_first_proposal() -> None:
    corpus, _ = hard_corpus()
    criterion = EMC2(num_left=20, temperature=0.01, burn_in=0.0, recent=0).double()
    criterion(**batch_of(corpus, [0, 1]), encode=corpus.encode)
    assert criterion.chains.state[:3].tolist() == [1, 0, -1]


def test_views_share_a_chain_and_the_first_view_moves_it() -> None:
    corpus = Corpus.make(1)
    criterion = ISIR(num_left=20, views=True, temperature=0.5, shared_chain=True).double()
    for _ in range(20):
        criterion(**batch_of(corpus, [3, 5, 8]), encode=corpus.encode)
    states = criterion.chains.state
    assert len(states) == 20
    assert set((states[[3, 5, 8]] // 2).tolist()) <= {3, 5, 8}
    assert (states != -1).sum() == 3


def test_mined_negatives_are_no_proposals() -> None:
    corpus = Corpus.make(2)
    mined = {"negatives": corpus.right[[15, 16]], "negative_id": torch.tensor([15, 16])}
    losses = [
        EMC2(num_left=20, burn_in=0.0).double()(**batch_of(corpus, [1, 2, 3]), **more, encode=corpus.encode).loss
        for more in ({}, mined)
    ]
    torch.testing.assert_close(losses[0], losses[1])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("tau", [0.005, 0.01, 0.07, 1.0])
def test_single_precision_and_bf16_agree_with_double(setting: str, views: bool, tau: float) -> None:
    """β = 200 does not overflow; the draws are the same numbers in every precision."""
    found = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        corpus = Corpus.make(5)
        with torch.no_grad():  # what is compared is the arithmetic, not the rounding of the input
            corpus.left.copy_(corpus.left.bfloat16())
            corpus.right.copy_(corpus.right.bfloat16())
        criterion = build(setting, temperature=tau, views=views, seed=2)
        criterion.chains.state[:] = 18
        if isinstance(criterion, EMC2):
            criterion.chains.score[:] = 0.5
        batch = {
            name: v.to(dtype) if v.is_floating_point() else v for name, v in batch_of(corpus, list(range(9))).items()
        }
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = criterion(**batch, encode=lambda side, ids, c=corpus, d=dtype: c.encode(side, ids).to(d))
        found[dtype] = torch.cat(torch.autograd.grad(out.loss, [corpus.left, corpus.right]))
    exact = found[torch.float64]
    assert torch.isfinite(exact).all()
    assert (found[torch.float32] - exact).norm() <= 1e-4 * exact.norm()
    assert (found[torch.bfloat16] - exact).norm() <= 2e-2 * exact.norm()


def test_bad_arguments_are_told() -> None:
    for arguments, message in (
        ({"score": "old"}, "score is 'old'"),
        ({"proposals": 0}, "proposals is 0"),
        ({"burn_in": 1.0}, "burn_in is 1.0"),
        ({"neighbor_share": 1.0, "proposals": 5}, "neighbor_share is 1.0"),
        ({"neighbor_share": 0.5}, "needs proposals to be a number"),
        ({"num_left": None}, "num_left is missing"),
    ):
        with pytest.raises(DualencError, match=message):
            EMC2(**{"num_left": 5, **arguments})
    criterion = EMC2(num_left=5, num_right=9, proposals=3, neighbor_share=0.5)
    with pytest.raises(DualencError, match=r"shape \(4, 2\); they must be integers \(5, k\)"):
        criterion.set_neighbors("left", torch.zeros(4, 2, dtype=torch.long))
    with pytest.raises(DualencError, match=r"lie in \[9, 9\]; ids end at 9"):
        criterion.set_neighbors("left", torch.full((5, 1), 9))
    corpus = Corpus.make(0)
    criterion = ISIR(num_left=20).double()
    with pytest.raises(DualencError, match="encode is missing"):
        criterion(**batch_of(corpus, [1, 2]))
    criterion.chains.state[criterion.chains_of("left")] = 9
    with pytest.raises(DualencError, match=r"encode gave shape \(1, 3\) for 1 ids; it must be \(1, 5\)"):
        criterion(**batch_of(corpus, [1, 2]), encode=lambda side, ids: torch.zeros(len(ids), 3))
    with pytest.raises(DualencError, match="encode gave NaN"):
        criterion(**batch_of(corpus, [1, 2]), encode=lambda side, ids: torch.full((len(ids), 5), torch.nan))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draw_never_leads_to_a_weight_of_zero(dtype: torch.dtype) -> None:
    """Not even the least and the greatest one, whatever the sum of the weights."""
    ends, random = (
        torch.tensor([[0.0], [2.0**-24], [0.5], [1 - 2.0**-24]], dtype=dtype),
        torch.Generator().manual_seed(0),
    )
    for _ in range(300):
        scale = 10 ** (torch.rand(4, 1, generator=random, dtype=dtype) * 8 - 4)
        weights = torch.rand(4, 17, generator=random, dtype=dtype) * scale
        weights[:, (torch.rand(17, generator=random) < 0.5).nonzero()[:, 0]] = 0
        weights[:, [0, 16]], weights[:, 8] = 0, 1
        assert bool((weights.gather(1, inverse_cdf(weights, ends)) > 0).all())


def slow_walk(start: list[float], scores: list[float], thresholds: list[float]) -> list[int]:
    """One chain, proposal by proposal: where it is after each."""
    (score,), on, where = start, 0, []
    for r, threshold in enumerate(thresholds):
        if score < threshold:
            score, on = scores[r], r + 1
        where.append(on)
    return where


def problem(
    seed: int, num_anchors: int, num_proposals: int, tau: float, dtype: torch.dtype, grid: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of states, scores of proposals, and thresholds; on a coarse grid many of them are equal."""
    draw = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw, dtype=dtype)

    scores = rand(num_anchors, num_proposals)
    thresholds = scores - tau * rand(num_anchors, num_proposals).log()
    start = rand(num_anchors, 1).masked_fill(rand(num_anchors, 1) < 0.3, -torch.inf)
    if grid:
        scores, thresholds, start = (torch.round(of / grid) * grid for of in (scores, thresholds, start))
    none = rand(num_anchors, num_proposals) < 0.2
    scores, thresholds = (of.masked_fill(none, -torch.inf) for of in (scores, thresholds))
    return start, scores, thresholds


@given(
    seed=st.integers(0, 10_000),
    num_anchors=st.integers(0, 4),
    num_proposals=st.integers(1, 300),
    tau=st.sampled_from([0.005, 0.07, 1.0, 20.0]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    grid=st.sampled_from([0.0, 0.1]),
)
def test_walk_is_the_loop_over_proposals(
    seed: int, num_anchors: int, num_proposals: int, tau: float, dtype: torch.dtype, grid: float
) -> None:
    """Also of more proposals than are compared at once, and where scores and thresholds are equal."""
    given = problem(seed, num_anchors, num_proposals, tau, dtype, grid)
    expected = [slow_walk(*row) for row in zip(*(of.tolist() for of in given), strict=True)]
    assert walk(*given).tolist() == expected
    assert without_a_loop(*given).tolist() == expected


@pytest.mark.parametrize("num_proposals", [AT_ONCE - 1, AT_ONCE, AT_ONCE * RUN - 1, AT_ONCE * RUN, 2500])
def test_walk_of_many_proposals_is_the_loop_over_them(num_proposals: int) -> None:
    given = problem(0, 2, num_proposals, 0.07, torch.float32)
    expected = [slow_walk(*row) for row in zip(*(of.tolist() for of in given), strict=True)]
    assert walk(*given).tolist() == without_a_loop(*given).tolist() == expected


def test_operations_of_the_walk_hardly_grow_with_the_proposals() -> None:
    calls = {}
    for num_proposals in (8, 32, 128, 1024):
        given = problem(0, 3, num_proposals, 0.07, torch.float32)
        with Dispatched() as watched:
            without_a_loop(*given)
        calls[num_proposals] = watched.count
    assert calls[8] == calls[32] <= 7
    assert calls[128] == calls[1024] <= 31
