"""The click model of a log: against a generic optimizer, enumeration, and known parameters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import scipy.optimize

from dualenc.data.logs.click_model import KnownPropensities, fit_click_model
from dualenc.errors import DualencError

RELEVANT, IRRELEVANT = 0.9, 0.1


class Simulated(NamedTuple):
    """Showings of a log whose relevance is known, by (query, document)."""

    query: np.ndarray
    document: np.ndarray
    position: np.ndarray
    clicked: np.ndarray
    relevant: np.ndarray


def simulate(
    sessions: int,
    *,
    queries: int = 100,
    depth: int = 5,
    shuffled: float = 0.3,
    rates: tuple[float, float] = (RELEVANT, IRRELEVANT),
    seed: int = 0,
) -> Simulated:
    """Show each query's documents in a fixed order, better ones first, some lists shuffled."""
    draw = np.random.default_rng(seed)
    relevant = draw.random((queries, depth)) < 0.6 / np.arange(1, depth + 1)
    query = draw.integers(0, queries, sessions)
    order = np.tile(np.arange(depth), (sessions, 1))
    is_shuffled = draw.random(sessions) < shuffled
    order[is_shuffled] = draw.permuted(order[is_shuffled], axis=1)
    position = np.tile(np.arange(1, depth + 1), (sessions, 1))
    rate = np.where(relevant[query[:, None], order], *rates) / position
    clicked = draw.random(order.shape) < rate
    return Simulated(
        np.repeat(query, depth), order.ravel(), position.ravel(), clicked.ravel(), relevant
    )


def negative_log_likelihood(vector: np.ndarray, log: Simulated) -> float:
    """Compute the documented likelihood with pseudo-counts, one pair after the other."""
    depth = int(log.position.max())
    theta = np.exp(np.concatenate([[0.0], vector[: depth - 1]]))
    rates = 1 / (1 + np.exp(-vector[depth - 1 : depth + 1]))
    prior = 1 / (1 + np.exp(-vector[depth + 1 :]))
    if theta.max() * rates.max() >= 1:
        return 1e10
    total = 0.0
    for query, document in sorted(set(zip(log.query.tolist(), log.document.tolist()))):
        own = (log.query == query) & (log.document == document)
        shown = np.bincount(log.position[own], minlength=depth + 1)[1:]
        clicks = np.bincount(log.position[own], log.clicked[own], depth + 1)[1:]
        share = prior[int(shown.argmax())]
        terms = [share, 1 - share]
        for kind in (0, 1):
            chance = theta * rates[kind]
            terms[kind] *= math.prod(chance**clicks * (1 - chance) ** (shown - clicks))
        total += math.log(sum(terms))
    for value in (*rates, *prior):
        total += 0.5 * math.log(value) + 0.5 * math.log(1 - value)
    return -total


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_em_finds_the_maximum_that_a_generic_optimizer_finds(seed: int) -> None:
    log = simulate(150, queries=12, depth=3, seed=seed)
    model = fit_click_model(*log[:4])
    start = np.array([-0.7, -1.1, 2.0, -2.0, 0.5, -1.0, -1.5])
    found = scipy.optimize.minimize(negative_log_likelihood, start, args=(log,), method="BFGS")
    rates = 1 / (1 + np.exp(-found.x[2:4]))
    assert model.theta[1:] == pytest.approx(np.exp(found.x[:2]), rel=0.01)
    assert [model.click_relevant, model.click_irrelevant] == pytest.approx(rates, rel=0.01)


def test_posterior_is_that_of_enumeration() -> None:
    """P(r | clicks) ∝ π Π_k P(click_k | r), for each pair by a loop over its showings."""
    log = simulate(200, queries=30, depth=4)
    known = KnownPropensities((1, 1 / 2, 1 / 3, 1 / 4), RELEVANT, IRRELEVANT)
    model = fit_click_model(*log[:4], known=known)
    usual, joint = [], []
    for query, document in model.pairs.tolist():
        own = np.flatnonzero((log.query == query) & (log.document == document))
        usual.append(np.bincount(log.position[own]).argmax())
        terms = [1.0, 1.0]
        for row in own:
            for kind, rate in enumerate((IRRELEVANT, RELEVANT)):
                chance = known.theta[log.position[row] - 1] * rate
                terms[kind] *= chance if log.clicked[row] else 1 - chance
        joint.append(terms)
    prior = {}
    for place in set(usual):
        own = np.flatnonzero(np.array(usual) == place)
        prior[place] = (model.relevance[own].sum() + 0.5) / (len(own) + 1)
    expected = []
    for place, (no, yes) in zip(usual, joint, strict=True):
        expected.append(prior[place] * yes / (prior[place] * yes + (1 - prior[place]) * no))
    assert model.relevance == pytest.approx(np.array(expected), abs=1e-6)
    assert model.prior == pytest.approx(model.relevance.mean())


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_known_parameters_of_a_simulated_log_come_out(noise: float) -> None:
    log = simulate(20_000, queries=300, rates=(RELEVANT, noise))
    model = fit_click_model(*log[:4])
    truth = log.relevant[model.pairs[:, 0], model.pairs[:, 1]]
    assert model.unidentified is None
    assert model.position_alone is None
    assert model.theta == pytest.approx(1 / np.arange(1, 6), rel=0.05)
    assert model.click_relevant == pytest.approx(RELEVANT, rel=0.02)
    assert model.click_irrelevant == pytest.approx(noise, rel=0.05)
    assert model.prior == pytest.approx(truth.mean(), abs=0.01)
    assert ((model.relevance > 0.5) == truth).mean() > 0.98
    assert model.moved == len(model.pairs)


@pytest.mark.slow
def test_intervals_hold_the_true_positions_19_times_of_20() -> None:
    held = []
    for seed in range(30):
        model = fit_click_model(*simulate(1500, depth=4, seed=seed)[:4])
        truth = 1 / np.arange(2, 5)
        held.append((model.theta_low[1:] <= truth) & (truth <= model.theta_high[1:]))
    # 90 intervals, of which those of a log are correlated.
    assert 0.88 <= np.mean(held) <= 1


def test_one_position_of_every_pair_tells_nothing_where_pairs_are_shown_seldom() -> None:
    log = simulate(300, shuffled=0)
    model = fit_click_model(*log[:4])
    assert model.unidentified == "every pair was shown at one position only, and seldom"
    assert model.moved == 0
    assert np.isnan(model.relevance).all()
    assert np.isnan(model.theta).all()


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_repeated_showings_at_one_position_tell_relevance_from_chance(noise: float) -> None:
    log = simulate(60_000, queries=1000, shuffled=0, rates=(RELEVANT, noise))
    model = fit_click_model(*log[:4])
    truth = log.relevant[model.pairs[:, 0], model.pairs[:, 1]]
    assert model.unidentified is None
    assert model.moved == 0
    assert model.theta == pytest.approx(1 / np.arange(1, 6), rel=0.05)
    assert model.click_relevant == pytest.approx(RELEVANT, rel=0.02)
    assert model.click_irrelevant == pytest.approx(noise, rel=0.05)
    assert ((model.relevance > 0.5) == truth).mean() > 0.98


@pytest.mark.parametrize(("own", "is_fitted"), [(100, True), (99, False)])
def test_a_hundred_pairs_shown_three_times_connect_a_position(own: int, is_fitted: bool) -> None:
    query = np.repeat(np.arange(2 * own), 3)
    position = np.where(query < own, 1, 2)
    clicked = np.random.default_rng(0).random(len(query)) < np.where(query % 4 == 0, 0.9, 0.1)
    model = fit_click_model(query, np.zeros_like(query), position, clicked)
    assert (model.unidentified is None) == is_fitted
    query = np.repeat(np.arange(2 * own), 2)
    position = np.where(query < own, 1, 2)
    model = fit_click_model(query, np.zeros_like(query), position, query % 4 == 0)
    assert model.unidentified is not None


def test_positions_have_to_be_connected_by_pairs() -> None:
    """Positions 1 and 2 change places, and so do 3 and 4, but nothing moves between them."""
    query = np.repeat(np.arange(50), 8)
    document = np.tile([0, 1, 2, 3, 1, 0, 3, 2], 50)
    position = np.tile([1, 2, 3, 4, 1, 2, 3, 4], 50)
    clicked = np.random.default_rng(0).random(400) < 0.5
    model = fit_click_model(query, document, position, clicked)
    assert "connect only positions with 50% of the showings" in str(model.unidentified)
    document[:8] = [1, 2, 0, 3, 1, 0, 3, 2]
    assert fit_click_model(query, document, position, clicked).unidentified is None


def test_few_showings_at_positions_that_nothing_connects_are_not_used() -> None:
    log = simulate(300, depth=4)
    whole = fit_click_model(*log[:4])
    more = [
        np.concatenate([log.query, [0, 1]]),
        np.concatenate([log.document, [70, 71]]),
        np.concatenate([log.position, [9, 9]]),
        np.concatenate([log.clicked, [True, False]]),
    ]
    model = fit_click_model(*more)
    assert model.unidentified is None
    assert model.theta == pytest.approx(whole.theta, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"position": 0}, "the log has no positions"),
        ({"clicked": True}, "the log has no showing without a click"),
        ({"clicked": False}, "the log has no click"),
    ],
)
def test_log_that_lacks_a_column_is_unidentified(change: dict[str, int], reason: str) -> None:
    log = simulate(100)
    log = log._replace(**{name: np.full(500, value) for name, value in change.items()})
    model = fit_click_model(*log[:4])
    assert model.unidentified == reason
    assert len(model.relevance) == len(model.pairs)


def test_empty_log_is_refused() -> None:
    nothing = np.zeros(0, np.int64)
    with pytest.raises(DualencError, match="the log is empty"):
        fit_click_model(nothing, nothing, nothing, nothing)


@pytest.mark.slow
def test_showings_without_a_position_are_not_used() -> None:
    log = simulate(300)
    whole = fit_click_model(*log[:4])
    more = [
        np.concatenate([log.query, [0, 99]]),
        np.concatenate([log.document, [0, 77]]),
        np.concatenate([log.position, [0, 0]]),
        np.concatenate([log.clicked, [True, True]]),
    ]
    model = fit_click_model(*more)
    assert model.theta == pytest.approx(whole.theta, rel=1e-3)
    # A pair without any known position has no evidence.
    assert model.pairs.tolist()[-1] == [99, 77]
    assert 0 < model.relevance[-1] < 1


@pytest.mark.slow
def test_clicks_that_depend_on_the_position_alone_are_no_relevance() -> None:
    """The test is at 1%: of 100 such logs one is expected to pass."""
    models = [
        fit_click_model(*simulate(300, rates=(0.4, 0.4), seed=seed)[:4]) for seed in range(100)
    ]
    alone = [each for each in models if each.position_alone is not None]
    assert len(alone) >= 95
    assert not any(each.relevance.any() for each in alone)
    assert "position alone" in str(alone[0].position_alone)


@pytest.mark.slow
def test_positions_far_down_share_their_value_and_holes_have_none() -> None:
    log = simulate(3000, depth=30)
    position = np.where(log.position == 30, 40, log.position)
    model = fit_click_model(log.query, log.document, position, log.clicked)
    assert model.theta.shape == model.theta_low.shape == model.theta_high.shape == (40,)
    assert model.theta[20] == model.theta[23] != model.theta[28]
    assert np.isnan(model.theta[29:39]).all()
    assert not np.isnan(model.theta[39])
    assert (model.theta_low <= model.theta_high)[:29].all()


def test_known_propensities_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "propensities.json"
    path.write_text(json.dumps({"theta": [1, 0.5], "relevant": 0.8, "irrelevant": 0.1}))
    known = KnownPropensities.read(path)
    assert known == ((1, 0.5), 0.8, 0.1)
    # One position of each pair is enough where the parameters are known.
    model = fit_click_model([0, 0, 0], [3, 5, 3], [1, 2, 1], [True, False, True], known=known)
    assert model.unidentified is None
    assert model.theta.tolist() == [1, 0.5]
    assert (model.click_relevant, model.click_irrelevant) == (0.8, 0.1)
    assert model.relevance[0] > 0.9
    with pytest.raises(DualencError, match="theta has 2 values and the log has position 3"):
        fit_click_model([0], [3], [3], [True], known=known)
    without = fit_click_model([0], [3], [0], [True], known=known)
    assert "no positions" in str(without.unidentified)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"theta": [1], "relevant": 0.5}', "has no 'irrelevant'"),
        ('{"theta": 1, "relevant": 0.5, "irrelevant": 0.1}', "does not hold propensities"),
        ("[", "does not hold propensities"),
        ('{"theta": [1], "relevant": 0.1, "irrelevant": 0.5}', "0 < irrelevant < relevant"),
        ('{"theta": [1, 0], "relevant": 0.5, "irrelevant": 0.1}', "above 0"),
        ('{"theta": [1, 3], "relevant": 0.5, "irrelevant": 0.1}', "is 1.5"),
        (None, "No such file"),
    ],
)
def test_wrong_file_of_propensities_is_refused(
    tmp_path: Path, content: str | None, said: str
) -> None:
    path = tmp_path / "propensities.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DualencError, match=said):
        KnownPropensities.read(path)
