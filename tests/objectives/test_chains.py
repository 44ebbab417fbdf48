"""EMC2 and ISIR: one transition against the algorithm, what a chain's state weighs, and what is
encoded."""

from __future__ import annotations

from functools import partial
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from dualenc.objectives import DCL, EMC2, ISIR
from dualenc.objectives.chains import ChainObjective
from dualenc.objectives.emc2 import metropolis_hastings
from dualenc.objectives.isir import isir_step
from tests.helpers.frozen_embeddings import Frozen
from tests.helpers.slow import Corpus

unit = partial(torch.nn.functional.normalize, dim=-1)
NUM = 20
NO_PAIR = NUM + 1  # keys per item of two towers: item·21 + partner + 1


def one_chain(
    start: float, scores: Any, is_negative: Any, uniform: Any, burn_in: float
) -> tuple[list[float], int]:
    """Algorithm 1 of Yau et al. 2024: shares of the visits of each proposal and of the start, and
    the last state."""
    proposals = np.flatnonzero(is_negative)
    state, score = len(scores), start
    visited = []
    for proposal in proposals:
        if uniform[proposal] < np.exp(min(scores[proposal] - score, 0.0)):
            state, score = int(proposal), scores[proposal]
        visited.append(state)
    counted = visited[int(len(proposals) * burn_in + 1e-9) :]
    if not len(proposals) and start > -np.inf:
        counted = [state]
    return [counted.count(place) / max(len(counted), 1) for place in range(len(scores) + 1)], state


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    num_chains=st.integers(0, 4),
    num_proposals=st.integers(0, 30),
    spread=st.sampled_from([1.0, 20.0, 200.0]),
    burn_in=st.sampled_from([0.0, 0.29, 0.5, 0.9]),
)
def test_the_walk_is_algorithm_1(
    seed: int, num_chains: int, num_proposals: int, spread: float, burn_in: float
) -> None:
    draw = np.random.default_rng(seed)
    scores = draw.uniform(-spread, spread, (num_proposals, num_chains))
    start = np.where(
        draw.random(num_chains) < 0.3, -np.inf, draw.uniform(-spread, spread, num_chains)
    )
    is_negative = draw.random(scores.shape) < 0.8
    uniform = draw.random(scores.shape)
    negatives = np.where(is_negative, scores, -np.inf)
    visits, state = metropolis_hastings(start, negatives, np.log(uniform), burn_in)
    for chain in range(num_chains):
        own = scores[:, chain], is_negative[:, chain], uniform[:, chain]
        expected, last = one_chain(float(start[chain]), *own, burn_in)
        np.testing.assert_allclose(visits[:, chain], expected)
        assert state[chain] == last


def test_the_softmax_is_invariant_under_the_walk() -> None:
    draw, num_items, num_chains = np.random.default_rng(0), 6, 20_000
    scores = draw.normal(size=num_items) * 1.5
    law = np.exp(scores) / np.exp(scores).sum()
    start = draw.choice(num_items, num_chains, p=law)
    proposals = draw.integers(0, num_items, (5, num_chains))
    uniform = np.log(draw.random(proposals.shape))
    visits, state = metropolis_hastings(scores[start], scores[proposals], uniform, 0.0)
    ends = np.where(
        state < 5, np.take_along_axis(proposals, np.minimum(state, 4)[None], 0)[0], start
    )
    assert chisquare(np.bincount(ends, minlength=num_items), law * num_chains).pvalue > 0.001
    weights = np.zeros(num_items)
    np.add.at(weights, np.concatenate([proposals, start[None]]), visits)
    np.testing.assert_allclose(weights / num_chains, law, atol=0.01)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights of left anchor 0 in every step of ISIR."""
    weights: list[torch.Tensor] = []

    def recorded(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = isir_step(*arguments)
        weights.append(result[0][0, 0].clone())
        return result

    monkeypatch.setattr("dualenc.objectives.isir.isir_step", recorded)
    return weights


def transition(frozen: Frozen, moves: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of left anchor 0: the law (P,) of its negative pairs, and (P, N) the mean law of the next
    item from each of them.

    Every batch of three of the four pairs that holds the anchor's own is tried; nothing is drawn.
    """
    right_id, pairs = [0, 1, 1, 2], [1, 2, 3]
    similarities = (frozen.left[0] @ frozen.right.T).detach()
    law = torch.softmax(
        torch.stack([similarities[right_id[pair]] / frozen.tau for pair in pairs]), dim=0
    )
    following = torch.zeros(len(pairs), 3, dtype=torch.float64)
    for start, others in product(pairs, combinations(pairs, 2)):
        criterion = frozen.build(ISIR, recent=0).double()
        criterion.state[0] = right_id[start] * 5 + start + 1
        moves.clear()
        frozen.loss(criterion, torch.tensor([0, *others]))
        # Three proposals, and the state.
        items = torch.tensor([right_id[pair] for pair in (0, *others, start)])
        following[pairs.index(start)].index_add_(0, items, moves[0] / 3)
    return law, following


@pytest.mark.parametrize("equal", [True, False], ids=["equal similarities", "unequal similarities"])
def test_isir_leaves_the_softmax_over_unevenly_shared_items_invariant(
    equal: bool, moves: Any
) -> None:
    """Queries 1 and 2 share document 1: over all batches it comes twice as often, and weighs
    twice."""
    draw = torch.Generator().manual_seed(3)
    left, right = (
        torch.nn.functional.normalize(torch.randn(n, 3, generator=draw, dtype=torch.float64), dim=1)
        for n in (4, 3)
    )
    if equal:
        right = right[:1].repeat(3, 1)
    frozen = Frozen(
        left.requires_grad_(), right.requires_grad_(), right_id=torch.tensor([0, 1, 1, 2]), tau=0.2
    )
    law, following = transition(frozen, moves)
    # Copies of an item are alike, so the law of items says all about the law of pairs.
    expected = torch.stack([law[:0].sum(), law[:2].sum(), law[2]])
    torch.testing.assert_close(law @ following, expected, rtol=0, atol=1e-6)
    if equal:
        torch.testing.assert_close(expected[1:], torch.tensor([2 / 3, 1 / 3], dtype=torch.float64))


@pytest.mark.slow
def test_isir_with_draws_leaves_the_softmax_over_items_invariant(
    monkeypatch: Any, moves: Any
) -> None:
    """Over all draws of three items with replacement, from each state."""
    corpus = Corpus.make(4, num_items=4)
    criterion = ISIR(num_left=4, temperature=0.5, proposals=3, recent=0).double()
    law = torch.softmax((corpus.left[0] @ corpus.right[1:].T / 0.5).detach(), dim=0)
    following = torch.zeros(3, 4, dtype=torch.float64)
    for start, drawn in product(range(1, 4), product(range(4), repeat=3)):
        monkeypatch.setattr(
            criterion.draws, "integers", lambda *_, ids=drawn, **__: torch.tensor(ids)
        )
        criterion.state[:] = start * 5
        moves.clear()
        criterion(**corpus.batch([0]))
        following[start - 1].index_add_(0, torch.tensor([*drawn, start]), moves[0] / 4**3)
    torch.testing.assert_close(law @ following[:, 1:], law, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", [EMC2, ISIR])
def test_a_chain_on_a_known_positive_begins_anew(kind: type[ChainObjective]) -> None:
    corpus, hard = hard_corpus()
    criterion = on_item(kind(num_left=NUM, temperature=0.01, recent=0), hard)
    listed = torch.full((4, 1), hard)
    (gradient,) = torch.autograd.grad(
        criterion(**corpus.batch([0, 1, 2, 3]), left_positives=listed).loss,
        corpus.right,
        allow_unused=True,
    )
    assert not gradient[hard].any()
    assert set((criterion.state[:4] // NO_PAIR).tolist()) <= {0, 1, 2, 3}


@pytest.mark.parametrize("views", [False, True])
def test_isir_without_a_state_is_dcl(views: bool) -> None:
    corpus = Corpus.make(3)
    found, expected = (
        torch.autograd.grad(criterion.double()(**corpus.batch([4, 1, 7])).loss, corpus.left)
        for criterion in (ISIR(num_left=NUM, views=views, recent=0), DCL(views=views))
    )
    torch.testing.assert_close(found, expected)


def hard_corpus() -> tuple[Corpus, int]:
    """A corpus where every left item is closest to right item 19, and nothing else is near."""
    corpus = Corpus.make(0)
    with torch.no_grad():
        corpus.left.zero_()[:, 0] = 1
        corpus.right.zero_()[:, 1] = 1
        corpus.right[19] = corpus.left[19]
    return corpus, 19


def on_item(criterion: ChainObjective, items: Any, similarity: Any = 1.0) -> ChainObjective:
    """The chains of left anchors stand on items that came with no pair."""
    criterion.state[:NUM] = torch.as_tensor(items) * NO_PAIR
    if isinstance(criterion, EMC2):
        criterion.similarity[:NUM] = torch.as_tensor(similarity)
    return criterion.double()


@pytest.mark.parametrize("burn_in", [0.0, 0.5, 0.9])
def test_a_state_that_outlives_burn_in_gets_all_the_weight_and_a_gradient(burn_in: float) -> None:
    corpus, hard = hard_corpus()
    criterion = on_item(EMC2(num_left=NUM, temperature=0.01, burn_in=burn_in), hard)
    out = criterion(**corpus.batch([0, 1, 2, 3]))
    (gradient,) = torch.autograd.grad(out.loss, corpus.right)
    # Half the loss is this direction; each of 4 anchors puts weight 1 on the state, at s/τ with s =
    # ⟨left, right⟩.
    torch.testing.assert_close(gradient[hard], 0.5 / 0.01 * corpus.left[0].detach())
    assert (criterion.state[:4] == hard * NO_PAIR).all()


def test_a_walk_through_the_batch_encodes_only_the_states_that_weigh() -> None:
    corpus, hard = hard_corpus()
    criterion = EMC2(num_left=NUM, temperature=0.01, recent=0)
    on_item(criterion, [hard] * 2 + [10] * 18, [1.0] * 2 + [-1.0] * 18)(
        **corpus.batch([0, 1, 2, 3])
    )
    assert corpus.asked == [("right", hard)]


def test_a_state_in_the_batch_is_not_encoded_again() -> None:
    corpus, hard = hard_corpus()
    on_item(ISIR(num_left=NUM, temperature=0.01, recent=0), hard)(**corpus.batch([0, 1, hard]))
    assert corpus.asked == []


def test_a_new_chain_accepts_its_first_proposal_and_remembers_its_similarity() -> None:
    corpus = Corpus.make(1)
    criterion = EMC2(num_left=NUM, temperature=0.01, burn_in=0.0, recent=0).double()
    criterion(**corpus.batch([0, 1]))
    assert criterion.state[:3].tolist() == [1 * NO_PAIR + 2, 0 * NO_PAIR + 1, -1]
    expected = torch.stack([corpus.left[0] @ corpus.right[1], corpus.left[1] @ corpus.right[0]])
    torch.testing.assert_close(criterion.similarity[:2], expected.detach())


@pytest.mark.parametrize("kind", [ISIR, EMC2])
def test_each_view_has_a_chain_of_its_own(kind: type[ChainObjective]) -> None:
    corpus = Corpus.make(1)
    criterion = kind(num_left=NUM, views=True, temperature=0.5).double()
    for _ in range(20):
        criterion(**corpus.batch([3, 5, 8]))
    assert len(criterion.state) == 2 * NUM
    begun = (criterion.state >= 0).nonzero()[:, 0]
    assert begun.tolist() == [6, 7, 10, 11, 16, 17]
    states = criterion.state[begun].view(3, 2)
    assert set((states // 2).flatten().tolist()) == {3, 5, 8}
    assert (states // 2 != torch.tensor([[3], [5], [8]])).all(), "an image is no negative of itself"
    assert not torch.equal(states[:, 0], states[:, 1])


@pytest.mark.parametrize("kind", [ISIR, EMC2])
def test_the_value_is_reported_once_every_item_was_seen_and_only_if_recent_holds_all(
    kind: Any,
) -> None:
    frozen = Frozen.make(num_pairs=20)
    reported = {}
    for recent in (0, 19, 20):
        criterion = frozen.build(kind, recent=recent)
        reported[recent] = []
        for ids in (torch.arange(12), torch.arange(8, 20)):
            frozen.loss(criterion, ids)
            reported[recent].append(criterion.reports_loss)
    assert reported == {0: [False, False], 19: [False, False], 20: [False, True]}


def error_of_weights(
    left_id: list[int], right_id: list[int], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> float:
    """By how much ISIR's mean weight of a pair is off for the first of six, in batches of three."""
    left, right = unit(torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0)).double())
    left_ids, right_ids = torch.tensor(left_id), torch.tensor(right_id)
    num_left, num_right = max(left_id) + 1, max(right_id) + 1
    keys = (right_ids * (num_left + 1) + left_ids + 1).tolist()
    sizes = {"num_left": num_left, "num_right": num_right}
    criterion = ISIR(**sizes, temperature=temperature, recent=0).double()
    weights: list[torch.Tensor] = []
    original = ISIR.chain_losses

    def chain_losses(self: Any, block: Any, chain: Any, own: Any, *scores: Any) -> torch.Tensor:
        weights.append(own[0, 0])  # of the first left anchor: of three proposals, and of the state
        return original(self, block, chain, own, *scores)

    monkeypatch.setattr(ISIR, "chain_losses", chain_losses)
    states = sorted(set(keys[1:]))
    transitions = np.zeros((len(states), len(states)))
    batches = list(combinations(range(1, 6), 2))
    for row, state in enumerate(states):
        for batch in batches:
            pairs = torch.tensor([0, *batch])
            criterion.state[0] = state
            own = left[left_ids[pairs]], right[right_ids[pairs]], left_ids[pairs], right_ids[pairs]
            criterion(*own, encode=lambda side, ids: (left if side == "left" else right)[ids])
            weighed = [*(keys[pair] for pair in pairs), state]
            for key, weight in zip(weighed, weights.pop().tolist(), strict=True):
                if key in states:
                    transitions[row, states.index(key)] += weight / len(batches)
    # The next state is drawn by the weights, so that they are the chain's transitions, too.
    law = np.linalg.matrix_power(transitions, 1000)[0]
    similarities = left[left_ids[0]] @ right[right_ids[1:]].T
    truths = torch.softmax(similarities / criterion.temperature.detach(), dim=0).tolist()
    truth = dict.fromkeys(states, 0.0)
    for key, score in zip(keys[1:], truths, strict=True):
        truth[key] += score
    return float(np.abs(law @ transitions - np.array([truth[state] for state in states])).max())


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_copies_are_told_apart_by_their_pairs(temperature: float, monkeypatch: Any) -> None:
    """The law is exact where pairs share an item; a pair that is in the data twice is taken for
    one."""
    numbers = list(range(6))
    assert error_of_weights(numbers, numbers, temperature, monkeypatch) < 1e-12
    assert error_of_weights(numbers, [0, 1, 2, 3, 4, 4], temperature, monkeypatch) < 1e-12
    repeated = [0, 1, 2, 3, 4, 4]
    assert 1e-3 < error_of_weights(repeated, repeated, temperature, monkeypatch) < 0.03
