"""What the objectives estimate, at frozen embeddings: N = 200 pairs, τ = 0.07."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from scipy.stats import chisquare

from dualenc.objectives import DCL, EMC2, ISIR, ExactGlobal, GlobalCache, InfoNCE, NegativeCache, Objective, SogCLR
from dualenc.objectives.chains import ChainObjective
from dualenc.objectives.isir import iterated_sir
from tests.objectives.frozen import TAU, Frozen, averaged_bias, batches

N, B = 200, 40
EXACT = {
    "EMC2-fresh-draws": (EMC2, {"score": "fresh", "proposals": B}),
    "ISIR-batch": (ISIR, {}),
    "ISIR-draws": (ISIR, {"proposals": B}),
}

NEIGHBORS = {
    "EMC2-neighbors": (EMC2, {"score": "fresh", "proposals": 10, "neighbor_share": 0.7}),
    "ISIR-neighbors": (ISIR, {"proposals": 10, "neighbor_share": 0.7}),
}


def build(name: str) -> ChainObjective:
    """A criterion by name; neighbours are the five nearest items."""
    kind, arguments = (EXACT | NEIGHBORS)[name]
    criterion = kind(num_left=N, temperature=TAU, **arguments)
    for side in ("left", "right"):
        criterion.set_neighbors(side, Frozen.make().softmax(side).topk(5, dim=1).indices)
    return criterion


def states_as_quantiles(
    frozen: Frozen, criterion: ChainObjective, num_records: int, forget: bool = False
) -> torch.Tensor:
    """Where chain states fall in the exact law of their anchor: uniform in (0, 1) if that is their law.

    Items are ordered by probability, so that too flat and too peaked laws both show.
    """
    laws = {side: frozen.softmax(side) for side in ("left", "right")}
    states = {side: criterion.chains.state[criterion.chains_of(side)] for side in ("left", "right")}
    draw, quantiles = torch.Generator().manual_seed(1), []
    for epoch, order in enumerate(batches(N, B, 10 * (num_records + 2))):
        for ids in order:
            if forget:
                criterion.chains.state[:] = -1
            frozen.loss(criterion, ids)
            # Chains ten epochs apart, and far from the start: nearly independent.
            if epoch % 10 == 9 and epoch >= 20:
                for side in ("left", "right"):
                    law, state = laws[side][ids], states[side][ids]
                    own = law.gather(1, state[:, None])
                    below = torch.where(law < own, law, 0.0).sum(dim=1, keepdim=True)
                    quantiles.append(below + torch.rand(len(ids), 1, generator=draw) * own)
    return torch.cat(quantiles)


def p_value(quantiles: torch.Tensor) -> float:
    return float(chisquare(torch.histc(quantiles.float(), bins=25, min=0, max=1).numpy()).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT | NEIGHBORS)
def test_states_follow_the_softmax_over_the_whole_corpus(name: str) -> None:
    assert p_value(states_as_quantiles(Frozen.make(), build(name), num_records=6)) > 0.001


def test_the_law_test_rejects_a_sampler_without_memory() -> None:
    criterion = ISIR(num_left=N, temperature=TAU, recent=0)
    assert p_value(states_as_quantiles(Frozen.make(), criterion, num_records=1, forget=True)) < 1e-6


NOISE = 0.05
"""What 160 epochs leave of the noise: of three seeds 0.03, 0.01 and 0.00 after 480. The in-batch softmax is at 0.2."""


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_averaged_gradient_of_exact_chains_is_the_global_gradient(name: str) -> None:
    assert averaged_bias(Frozen.make(), build(name), B, warm_up=20, num_epochs=160) <= NOISE


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_two_views_are_exact_by_default(name: str) -> None:
    kind, arguments = EXACT[name]
    criterion = kind(num_left=N, temperature=TAU, views=True, **arguments)
    assert averaged_bias(Frozen.make(views=True), criterion, B, warm_up=20, num_epochs=160) <= NOISE


@pytest.mark.slow
def test_one_chain_for_both_views_is_nearer_than_the_in_batch_softmax() -> None:
    frozen, common = Frozen.make(views=True), {"temperature": TAU, "views": True}
    shared = averaged_bias(frozen, ISIR(num_left=N, shared_chain=True, **common), B, 20, 80)
    in_batch = averaged_bias(frozen, DCL(**common), B, warm_up=0, num_epochs=40)
    assert 0.03 < shared < 0.7 * in_batch


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EMC2, ISIR])
def test_proposals_from_neighbors_reach_the_law_in_fewer_steps(kind: type[ChainObjective]) -> None:
    """After three visits with four proposals each, batch size 4."""
    frozen, distances = Frozen.make(), []
    law = frozen.softmax("left")
    for share in (0.0, 0.7):
        criterion = kind(num_left=N, temperature=TAU, proposals=4, neighbor_share=share, recent=0)
        criterion.set_neighbors("left", law.topk(5, dim=1).indices)
        for order in batches(N, 4, 3):
            for ids in order:
                frozen.loss(criterion, ids)
        mass = law.gather(1, criterion.chains.state[criterion.chains_of("left"), None])[:, 0]
        # Under the law itself, the mean probability of the state is Σ p².
        distances.append(float((law.pow(2).sum(dim=1) - mass).mean()))
    assert abs(distances[1]) < 0.5 * abs(distances[0])


@pytest.mark.slow
def test_averaged_gradient_of_the_full_cache_is_the_global_gradient() -> None:
    criterion = NegativeCache(num_left=N, temperature=TAU, refresh=0.5)
    assert averaged_bias(Frozen.make(), criterion, B, warm_up=2, num_epochs=80) <= 0.03


@pytest.mark.slow
@pytest.mark.parametrize("views", [False, True])
def test_averaged_gradient_of_shared_draws_is_nearly_the_global_gradient(views: bool) -> None:
    criterion = GlobalCache(num_left=N, temperature=TAU, views=views, extra_encodes=4.0)
    assert averaged_bias(Frozen.make(views=views), criterion, B, warm_up=2, num_epochs=80) <= 0.06


@pytest.mark.parametrize("criterion", [InfoNCE(temperature=TAU), DCL(temperature=TAU)])
def test_averaged_gradient_of_in_batch_softmax_is_not(criterion: Objective) -> None:
    assert averaged_bias(Frozen.make(), criterion, B, warm_up=0, num_epochs=40) > 0.2


def transition(frozen: Frozen) -> tuple[torch.Tensor, torch.Tensor]:
    """Of left anchor 0: the law (P,) of its negative pairs, and (P, N) the mean law of the next item from each of them.

    Every batch of three of the four pairs that holds the anchor's own is tried; nothing is drawn.
    """
    moves = []

    def recorded(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, column = iterated_sir(*arguments)
        moves.append(weights.clone())
        return weights, column

    right_id = [0, 1, 1, 2]
    pairs = [1, 2, 3]
    similarities = (frozen.left[0] @ frozen.right.T).detach()
    tau = frozen.build(EMC2).double().temperature.detach()
    law = torch.softmax(torch.stack([similarities[right_id[pair]] / tau for pair in pairs]), dim=0)
    following = torch.zeros(len(pairs), 3, dtype=torch.float64)
    for start, others in product(pairs, combinations(pairs, 2)):
        criterion = frozen.build(ISIR, recent=0).double()
        criterion.chains.state[0] = right_id[start]
        criterion.chains.partner[0] = start
        moves.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dualenc.objectives.isir.iterated_sir", recorded)
            frozen.loss(criterion, torch.tensor([0, *others]))
        # Three proposals, and the state.
        items = torch.tensor([right_id[pair] for pair in (0, *others, start)])
        following[pairs.index(start)].index_add_(0, items, moves[0][0] / 3)
    return law, following


@pytest.mark.parametrize("equal", [True, False], ids=["equal similarities", "unequal similarities"])
def test_isir_leaves_the_softmax_over_unevenly_shared_items_invariant(equal: bool) -> None:
    """Queries 1 and 2 share document 1: over all batches it comes twice as often, and weighs twice."""
    draw = torch.Generator().manual_seed(3)
    left = torch.nn.functional.normalize(torch.randn(4, 3, generator=draw, dtype=torch.float64), dim=1)
    right = torch.nn.functional.normalize(torch.randn(3, 3, generator=draw, dtype=torch.float64), dim=1)
    if equal:
        right = right[:1].repeat(3, 1)
    frozen = Frozen(left.requires_grad_(), right.requires_grad_(), right_id=torch.tensor([0, 1, 1, 2]), tau=0.2)
    law, following = transition(frozen)
    # Copies of an item are alike, so the law of items says all about the law of pairs.
    expected = torch.stack([law[:0].sum(), law[:2].sum(), law[2]])
    torch.testing.assert_close(law @ following, expected, rtol=0, atol=1e-12)
    if equal:
        torch.testing.assert_close(expected[1:], torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))


@pytest.mark.parametrize("kind", [ISIR, EMC2])
def test_with_all_pairs_in_the_batch_isir_is_the_global_loss(kind: type[ChainObjective]) -> None:
    frozen = Frozen.zipf(num_pairs=30, num_documents=8)
    everything = torch.arange(30)
    exact, gradient = frozen.exact()
    criterion = frozen.build(kind)
    for _ in range(4):
        found = frozen.gradient(criterion, everything)
        if kind is ISIR:
            torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)
        assert float(frozen.loss(criterion, everything).detach()) == pytest.approx(exact, abs=1e-4)
    torch.testing.assert_close(frozen.gradient(DCL(temperature=frozen.tau), everything), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ISIR, EMC2])
@pytest.mark.parametrize("batch_size", [16, 64])
def test_documents_shared_as_in_zipfs_law_make_no_bias(kind: type[ChainObjective], batch_size: int) -> None:
    frozen = Frozen.zipf()
    criterion = frozen.build(kind)
    assert averaged_bias(frozen, criterion, batch_size, warm_up=8, num_epochs=80) <= 0.03


@pytest.mark.slow
@pytest.mark.parametrize("proposals", ["batch", "draws"])
@pytest.mark.parametrize("views", [False, True], ids=["pairs", "views"])
@pytest.mark.parametrize("kind", [ISIR, EMC2])
@pytest.mark.parametrize(("tau", "batch_size"), [(0.02, 4), (0.02, 16), (0.07, 4), (0.5, 16)])
def test_the_value_is_that_of_the_global_loss_after_two_epochs(
    kind: type[ChainObjective], views: bool, proposals: str, tau: float, batch_size: int
) -> None:
    frozen = Frozen.make(num_pairs=120, views=views)
    frozen.tau = tau
    exact, _ = frozen.exact()
    criterion = frozen.build(kind, proposals=batch_size if proposals == "draws" else "batch")
    assert value_of_epoch(frozen, criterion, batch_size, epoch=2) == pytest.approx(exact, abs=0.2)


@pytest.mark.parametrize("kind", [ISIR, EMC2])
@pytest.mark.parametrize("tau", [0.02, 0.5])
def test_the_value_counts_shared_documents_as_often_as_they_are_shared(kind: type[ChainObjective], tau: float) -> None:
    frozen = Frozen.zipf(tau=tau)
    exact, _ = frozen.exact()
    assert value_of_epoch(frozen, frozen.build(kind), 16, epoch=2) == pytest.approx(exact, abs=0.2)


def test_the_value_with_proposals_from_the_corpus_counts_every_document_once() -> None:
    frozen = Frozen.zipf()
    criterion = frozen.build(ISIR, proposals=16)
    oracle = ExactGlobal(num_left=len(frozen.left), num_right=len(frozen.right), temperature=frozen.tau)
    exact = float(frozen.loss(oracle, torch.arange(len(frozen.left))).detach())
    assert value_of_epoch(frozen, criterion, 16, epoch=2) == pytest.approx(exact, abs=0.1)


@pytest.mark.parametrize("kind", [ISIR, EMC2])
def test_the_value_of_a_corpus_that_recent_does_not_hold_is_not_reported(kind: type[ChainObjective]) -> None:
    frozen = Frozen.make(num_pairs=20)
    reported = {}
    for recent in (0, 19, 20):
        criterion = frozen.build(kind, recent=recent)
        frozen.loss(criterion, torch.arange(8))
        reported[recent] = criterion.reports_loss
    assert reported == {0: False, 19: False, 20: True}


def value_of_epoch(frozen: Frozen, criterion: Objective, batch_size: int, epoch: int) -> float:
    """Mean over the pairs of the loss that is reported in an epoch."""
    values: list[float] = []
    for order in batches(len(frozen.left), batch_size, epoch + 1):
        values = [float(frozen.loss(criterion, ids).detach()) * len(ids) for ids in order]
    return sum(values) / len(frozen.left)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ISIR, EMC2])
@pytest.mark.parametrize("views", [False, True], ids=["pairs", "views"])
def test_chains_start_by_the_law_as_soon_as_every_item_was_seen(kind: type[ChainObjective], views: bool) -> None:
    """One epoch of batches of 4 at τ = 0.02, and one to start on. Without recent items chains are far off then."""
    frozen = Frozen.make(views=views)
    frozen.tau = 0.02
    similarities = (frozen.left @ frozen.right.T).detach().double()
    law = torch.softmax((similarities / frozen.tau).fill_diagonal_(-torch.inf), dim=1)
    if views:
        both = torch.stack([(frozen.left @ view.T).detach().double() for view in (frozen.left, frozen.right)])
        both[:, torch.arange(N), torch.arange(N)] = -torch.inf
        law = torch.softmax(torch.cat(list(both / frozen.tau), dim=1), dim=1)
        law = law[:, :N] + law[:, N:]
    distances = {}
    for recent in (0, 4096):
        criterion = frozen.build(kind, recent=recent, **({"score": "fresh"} if kind is EMC2 else {}))
        for order in batches(N, 4, 2):
            for ids in order:
                frozen.loss(criterion, ids)
        state = criterion.chains.state[criterion.chains_of("left")]
        state = state[0::2] // 2 if views else state
        mass = law.gather(1, state[:, None])[:, 0]
        # Under the law itself, the mean probability of the state is Σ p².
        distances[recent] = float((law.pow(2).sum(dim=1) - mass).mean())
    assert distances[0] > 0.3
    assert abs(distances[4096]) < 0.1


@pytest.mark.parametrize("kind", [ISIR, EMC2])
@pytest.mark.parametrize("proposals", ["batch", 6])
def test_evaluation_leaves_chains_recent_items_and_draws_alone(
    kind: type[ChainObjective], proposals: str | int
) -> None:
    frozen = Frozen.make(num_pairs=20)
    criterion = frozen.build(kind, proposals=proposals)
    frozen.loss(criterion, torch.arange(8))
    before = {key: value.clone() for key, value in criterion.state_dict().items()}
    criterion.eval()
    frozen.loss(criterion, torch.arange(4, 12))
    criterion.train()
    with torch.no_grad():
        frozen.loss(criterion, torch.arange(4, 12))
    for key, value in criterion.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.slow
def test_log_averages_of_sogclr_converge_to_the_log_mean() -> None:
    frozen = Frozen.make()
    criterion = SogCLR(num_left=N, temperature=TAU, gamma=0.04)
    total, count = torch.zeros(N), 0
    for epoch, order in enumerate(batches(N, B, 260)):
        for ids in order:
            frozen.loss(criterion, ids)
        if epoch >= 80:
            total, count = total + criterion.left_averages.log_u.exp(), count + 1
    similarities = (frozen.left @ frozen.right.T).detach() / TAU
    exact = (similarities.exp().sum(dim=1) - similarities.diagonal().exp()) / (N - 1)
    assert ((total / count).log() - exact.log()).abs().mean() < 0.1
