"""What the objectives estimate, at frozen embeddings: N = 200 pairs, τ = 0.07."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from dualenc.objectives import (
    EMC2,
    ISIR,
    ExactGlobal,
    GlobalCache,
    InfoNCE,
    NegativeCache,
    Objective,
)
from dualenc.objectives.chains import ChainObjective
from tests.helpers.frozen_embeddings import TAU, Frozen, averaged_bias, batches

N, B = 200, 40
NIGHTLY, SLOW = pytest.mark.nightly, pytest.mark.slow
UNBIASED: dict[str, tuple[type[Objective], dict[str, Any]]] = {
    "EMC2-draws": (EMC2, {"proposals": B}),
    "ISIR-batch": (ISIR, {}),
    "ISIR-draws": (ISIR, {"proposals": B}),
    "NegativeCache": (NegativeCache, {"refresh": 0.5}),
}


def items_of_chains(criterion: ChainObjective) -> dict[str, torch.Tensor]:
    """(N,) the item that the chain of each anchor is on; with views the image of the left view's
    chain."""
    if criterion.views:
        state = criterion.state[0::2]
        return {"left": torch.where(state < 0, state, state // 2)}
    items = criterion.items_of(criterion.state.view(2, -1))
    return {"left": items[0], "right": items[1]}


def p_value(
    frozen: Frozen, criterion: ChainObjective, num_records: int, forget: bool = False
) -> float:
    """Of where chain states fall in the exact law of their anchor: uniform in (0, 1) if that is
    their law.

    Items are ordered by probability, so that too flat and too peaked laws both show.
    """
    draw, quantiles = torch.Generator().manual_seed(1), []
    for epoch, order in enumerate(batches(N, B, 10 * (num_records + 2))):
        for ids in order:
            if forget:
                criterion.state[:] = -1
            frozen.loss(criterion, ids)
            # Chains ten epochs apart, and far from the start: nearly independent.
            if epoch % 10 == 9 and epoch >= 20:
                for side, state in items_of_chains(criterion).items():
                    law = frozen.softmax(side)[ids]
                    own = law.gather(1, state[ids, None])
                    below = torch.where(law < own, law, 0.0).sum(dim=1, keepdim=True)
                    quantiles.append(below + torch.rand(len(ids), 1, generator=draw) * own)
    counts = torch.histc(torch.cat(quantiles).float(), bins=25, min=0, max=1)
    return float(chisquare(counts.numpy()).pvalue)


@SLOW
@pytest.mark.parametrize(
    "name", ["EMC2-draws", "ISIR-batch", pytest.param("ISIR-draws", marks=NIGHTLY)]
)
def test_states_follow_the_softmax_over_the_whole_corpus(name: str) -> None:
    kind, arguments = UNBIASED[name]
    assert (
        p_value(Frozen.make(), kind(num_left=N, temperature=TAU, **arguments), num_records=4)
        > 0.001
    )


@SLOW
def test_the_law_test_rejects_a_sampler_without_memory() -> None:
    criterion = ISIR(num_left=N, temperature=TAU, recent=0)
    assert p_value(Frozen.make(), criterion, num_records=1, forget=True) < 1e-6


@SLOW
@pytest.mark.parametrize("name", ["EMC2-draws", "ISIR-batch"])
def test_the_averaged_gradient_is_the_global_gradient(name: str) -> None:
    """Up to the noise that 64 epochs leave; the in-batch softmax (DCL) is at 0.28."""
    kind, arguments = UNBIASED[name]
    criterion = kind(num_left=N, temperature=TAU, **arguments)
    assert averaged_bias(Frozen.make(), criterion, B, warm_up=10, num_epochs=64) <= 0.1


@NIGHTLY
@pytest.mark.parametrize("views", [False, True], ids=["pairs", "views"])
@pytest.mark.parametrize("name", UNBIASED)
def test_the_averaged_gradient_is_the_global_gradient_over_longer_runs(
    name: str, views: bool
) -> None:
    kind, arguments = UNBIASED[name]
    criterion = kind(num_left=N, temperature=TAU, views=views, **arguments)
    assert averaged_bias(Frozen.make(views=views), criterion, B, warm_up=20, num_epochs=240) <= 0.05


@NIGHTLY
@pytest.mark.parametrize("views", [False, True], ids=["pairs", "views"])
def test_the_bias_of_the_cache_falls_with_the_draws_and_is_below_that_of_the_batch(
    views: bool,
) -> None:
    """Weights that sum to at most 1 have one; the in-batch softmax (DCL) is at 0.28."""
    biases = []
    for extra_encodes in (1.0, 4.0):
        criterion = GlobalCache(
            num_left=N, temperature=TAU, views=views, extra_encodes=extra_encodes
        )
        biases.append(
            averaged_bias(Frozen.make(views=views), criterion, B, warm_up=10, num_epochs=64)
        )
    assert biases[1] < 0.14
    assert 1.3 * biases[1] < biases[0] < 0.27


def test_the_averaged_gradient_of_the_in_batch_softmax_is_not() -> None:
    assert averaged_bias(Frozen.make(), InfoNCE(temperature=TAU), B, warm_up=0, num_epochs=24) > 0.2


@SLOW
@pytest.mark.parametrize("kind", [pytest.param(ISIR, marks=NIGHTLY), EMC2])
def test_documents_shared_as_in_zipfs_law_make_no_bias(kind: type[ChainObjective]) -> None:
    frozen = Frozen.zipf()
    assert averaged_bias(frozen, frozen.build(kind), 40, warm_up=4, num_epochs=48) <= 0.05


@pytest.mark.parametrize("kind", [ISIR, EMC2])
def test_with_all_pairs_in_the_batch_the_value_is_the_global_loss(
    kind: type[ChainObjective],
) -> None:
    """And the gradient of ISIR the global one."""
    frozen = Frozen.zipf(num_pairs=30, num_documents=8)
    everything = torch.arange(30)
    exact, gradient = frozen.exact()
    criterion = frozen.build(kind)
    for _ in range(3):
        found = frozen.gradient(criterion, everything)
        if kind is ISIR:
            torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)
        assert float(frozen.loss(criterion, everything).detach()) == pytest.approx(exact, abs=2e-3)


def value_after_two_epochs(frozen: Frozen, criterion: Objective, batch_size: int = 16) -> float:
    """Mean over the pairs of the loss that is reported in the third epoch."""
    values: list[float] = []
    for order in batches(len(frozen.left), batch_size, 3):
        values = [float(frozen.loss(criterion, ids).detach()) * len(ids) for ids in order]
    assert criterion.reports_loss
    return sum(values) / len(frozen.left)


@SLOW
@pytest.mark.parametrize("views", [False, True], ids=["pairs", "views"])
@pytest.mark.parametrize("kind", [ISIR, EMC2, NegativeCache, GlobalCache])
def test_the_value_is_that_of_the_global_loss_after_two_epochs(
    kind: type[Objective], views: bool
) -> None:
    frozen = Frozen.make(num_pairs=120, views=views)
    frozen.tau = 0.02
    assert value_after_two_epochs(frozen, frozen.build(kind)) == pytest.approx(
        frozen.exact()[0], abs=0.2
    )


@SLOW
@pytest.mark.parametrize("kind", [ISIR, EMC2, GlobalCache])
def test_the_value_counts_shared_documents_as_often_as_they_are_shared(
    kind: type[Objective],
) -> None:
    frozen = Frozen.zipf()
    assert value_after_two_epochs(frozen, frozen.build(kind)) == pytest.approx(
        frozen.exact()[0], abs=0.1
    )


@SLOW
@pytest.mark.parametrize(
    ("kind", "arguments"), [(ISIR, {"proposals": 16}), (NegativeCache, {"refresh": 0.0})]
)
def test_the_value_with_draws_from_the_corpus_counts_every_document_once(
    kind: Any, arguments: Any
) -> None:
    frozen = Frozen.zipf()
    oracle = ExactGlobal(
        num_left=len(frozen.left), num_right=len(frozen.right), temperature=frozen.tau
    )
    exact = float(frozen.loss(oracle, torch.arange(len(frozen.left))).detach())
    assert value_after_two_epochs(frozen, frozen.build(kind, **arguments)) == pytest.approx(
        exact, abs=0.1
    )


@SLOW
@pytest.mark.parametrize(("kind", "views"), [(ISIR, False), (EMC2, True)])
def test_chains_start_by_the_law_as_soon_as_every_item_was_seen(
    kind: type[ChainObjective], views: bool
) -> None:
    """One epoch of batches of 4 at τ = 0.02, and one to start on. Without recent items chains are
    far off then."""
    frozen = Frozen.make(views=views)
    frozen.tau = 0.02
    tables = (frozen.left, frozen.right) if views else (frozen.right,)
    scores = (
        torch.stack([(frozen.left @ table.T).detach().double() for table in tables]) / frozen.tau
    )
    scores[:, torch.arange(N), torch.arange(N)] = -torch.inf
    law = (
        torch.softmax(torch.cat(list(scores), dim=1), dim=1)
        .unflatten(1, (len(tables), N))
        .sum(dim=1)
    )
    distances = {}
    for recent in (0, 4096):
        criterion = frozen.build(kind, recent=recent)
        for order in batches(N, 4, 2):
            for ids in order:
                frozen.loss(criterion, ids)
        mass = law.gather(1, items_of_chains(criterion)["left"][:, None])[:, 0]
        # Under the law itself, the mean probability of the state is Σ p².
        distances[recent] = float((law.pow(2).sum(dim=1) - mass).mean())
    assert distances[0] > 0.3
    assert abs(distances[4096]) < 0.1
