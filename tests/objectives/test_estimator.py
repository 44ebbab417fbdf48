"""What the objectives estimate, at frozen embeddings: N = 200 pairs, τ = 0.07."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare

from dualenc.objectives import DCL, EMC2, InfoNCE, NegativeCache, Objective, SogCLR
from tests.objectives.frozen import TAU, Frozen, averaged_bias, batches

N, B = 200, 40
EXACT = {
    "mh-fresh-draws": {"kernel": "mh", "score": "fresh", "proposals": B},
    "isir-batch": {"kernel": "isir", "proposals": "batch"},
    "isir-draws": {"kernel": "isir", "proposals": B},
}

NEIGHBORS = {
    "mh-neighbors": {"kernel": "mh", "score": "fresh", "proposals": 10, "neighbor_share": 0.7},
    "isir-neighbors": {"kernel": "isir", "proposals": 10, "neighbor_share": 0.7},
}


def build(name: str) -> EMC2:
    """A criterion by name; neighbours are the five nearest items."""
    criterion = EMC2(num_left=N, temperature=TAU, **(EXACT | NEIGHBORS)[name])
    for side in ("left", "right"):
        criterion.set_neighbors(side, Frozen.make().softmax(side).topk(5, dim=1).indices)
    return criterion


def states_as_quantiles(frozen: Frozen, criterion: EMC2, num_records: int, forget: bool = False) -> torch.Tensor:
    """Where chain states fall in the exact law of their anchor: uniform in (0, 1) if that is their law.

    Items are ordered by probability, so that too flat and too peaked laws both show.
    """
    laws = {side: frozen.softmax(side) for side in ("left", "right")}
    chains = {"left": criterion.left_chains, "right": criterion.right_chains}
    draw, quantiles = torch.Generator().manual_seed(1), []
    for epoch, order in enumerate(batches(N, B, 10 * (num_records + 2))):
        for ids in order:
            if forget:
                criterion.left_chains.state[:] = criterion.right_chains.state[:] = -1
            with torch.no_grad():
                frozen.loss(criterion, ids)
            # Chains ten epochs apart, and far from the start: nearly independent.
            if epoch % 10 == 9 and epoch >= 20:
                for side in ("left", "right"):
                    law, state = laws[side][ids], chains[side].state[ids]
                    own = law.gather(1, state[:, None])
                    below = torch.where(law < own, law, 0.0).sum(dim=1, keepdim=True)
                    quantiles.append(below + torch.rand(len(ids), 1, generator=draw) * own)
    return torch.cat(quantiles)


def p_value(quantiles: torch.Tensor) -> float:
    return float(chisquare(torch.histc(quantiles.float(), bins=25, min=0, max=1).numpy()).pvalue)


@pytest.mark.parametrize("name", EXACT | NEIGHBORS)
def test_states_follow_the_softmax_over_the_whole_corpus(name: str) -> None:
    assert p_value(states_as_quantiles(Frozen.make(), build(name), num_records=6)) > 0.001


def test_the_law_test_rejects_a_sampler_without_memory() -> None:
    criterion = EMC2(num_left=N, temperature=TAU, kernel="isir")
    assert p_value(states_as_quantiles(Frozen.make(), criterion, num_records=1, forget=True)) < 1e-6


@pytest.mark.parametrize("name", EXACT)
def test_averaged_gradient_of_exact_chains_is_the_global_gradient(name: str) -> None:
    assert averaged_bias(Frozen.make(), build(name), B, warm_up=20, num_epochs=160) <= 0.03


@pytest.mark.parametrize("name", ["isir-batch", "isir-draws", "mh-fresh-draws"])
def test_a_chain_for_each_of_two_views_makes_them_exact_too(name: str) -> None:
    criterion = EMC2(num_left=N, temperature=TAU, views=True, shared_chain=False, **EXACT[name])
    assert averaged_bias(Frozen.make(views=True), criterion, B, warm_up=20, num_epochs=160) <= 0.03


def test_one_chain_for_both_views_is_nearer_than_the_in_batch_softmax() -> None:
    frozen, common = Frozen.make(views=True), {"temperature": TAU, "views": True}
    shared = averaged_bias(frozen, EMC2(num_left=N, kernel="isir", **common), B, warm_up=20, num_epochs=80)
    in_batch = averaged_bias(frozen, DCL(**common), B, warm_up=0, num_epochs=40)
    assert 0.03 < shared < 0.7 * in_batch


@pytest.mark.parametrize("kernel", ["mh", "isir"])
def test_proposals_from_neighbors_reach_the_law_in_fewer_steps(kernel: str) -> None:
    """After three visits with four proposals each, batch size 4."""
    frozen, distances = Frozen.make(), []
    law = frozen.softmax("left")
    for share in (0.0, 0.7):
        criterion = EMC2(num_left=N, temperature=TAU, kernel=kernel, proposals=4, neighbor_share=share)
        criterion.set_neighbors("left", law.topk(5, dim=1).indices)
        for order in batches(N, 4, 3):
            for ids in order:
                with torch.no_grad():
                    frozen.loss(criterion, ids)
        mass = law.gather(1, criterion.left_chains.state[:, None])[:, 0]
        # Under the law itself, the mean probability of the state is Σ p².
        distances.append(float((law.pow(2).sum(dim=1) - mass).mean()))
    assert abs(distances[1]) < 0.5 * abs(distances[0])


def test_averaged_gradient_of_the_full_cache_is_the_global_gradient() -> None:
    criterion = NegativeCache(num_left=N, temperature=TAU, refresh=0.5)
    assert averaged_bias(Frozen.make(), criterion, B, warm_up=2, num_epochs=80) <= 0.03


@pytest.mark.parametrize("criterion", [InfoNCE(temperature=TAU), DCL(temperature=TAU)])
def test_averaged_gradient_of_in_batch_softmax_is_not(criterion: Objective) -> None:
    assert averaged_bias(Frozen.make(), criterion, B, warm_up=0, num_epochs=40) > 0.2


def test_chains_estimate_the_value_of_the_loss() -> None:
    frozen = Frozen.make()
    exact, _ = frozen.exact()
    for criterion in (EMC2(num_left=N, temperature=TAU, kernel="isir"), EMC2(num_left=N, temperature=TAU)):
        values = []
        for epoch, order in enumerate(batches(N, B, 40)):
            with torch.no_grad():
                values += [float(frozen.loss(criterion, ids)) for ids in order if epoch >= 20]
        assert abs(sum(values) / len(values) - exact) < 0.15


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
