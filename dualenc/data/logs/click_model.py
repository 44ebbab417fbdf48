"""A position-based click model with noise: examination, relevance of pairs, and what a log tells.

Shapes: n showings, P distinct pairs of a query and a document, K positions, C cells, which are
distinct (pair, place); a place is a position, or several of them far down a results list.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dualenc.errors import DualencError
from dualenc.types import Integers, StrPath

NUM_SINGLE, POOLED_WITHIN = 20, 1.25
"""Positions below these are pooled if they differ by less than this factor."""
NUM_PERMUTATIONS = 99
MAX_ITERATIONS, TOLERANCE = 2000, 1e-5
"""EM ends when an iteration adds less than this to the log-likelihood of the log."""
PSEUDO = 0.5
"""Half a click and half a miss of each class at the first place, and half a pair of each class."""
MAX_RATE, MIN_THETA = 1 - 1e-6, 1e-4
NORMAL = 1.959964
"""Standard errors on each side of a 95% interval."""


class KnownPropensities(NamedTuple):
    """Parameters of a click model that are known, for example from an experiment.

        KnownPropensities.read("propensities.json")

    Attributes:
        theta: θ_k of positions 1, 2, …, relative to position 1.
        click_relevant: a, probability of a click on a relevant document at position 1.
        click_irrelevant: b, the same of a document that is not relevant.
    """

    theta: tuple[float, ...]
    click_relevant: float
    click_irrelevant: float

    @classmethod
    def read(cls, path: StrPath) -> KnownPropensities:
        """Read a JSON file {"theta": [1, 0.5], "relevant": 0.9, "irrelevant": 0.1}.

        Raises:
            DualencError: the file is missing, lacks a key, or has values out of range.
        """
        fix = 'write {"theta": [1, 0.5], "relevant": 0.9, "irrelevant": 0.1}'
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            theta = tuple(float(value) for value in content["theta"])
            known = cls(theta, float(content["relevant"]), float(content["irrelevant"]))
        except OSError as error:
            raise DualencError(error.strerror or "cannot be read", fix=fix, where=path) from error
        except KeyError as error:
            raise DualencError(f"has no {error.args[0]!r}", fix=fix, where=path) from error
        except (TypeError, ValueError) as error:
            raise DualencError("does not hold propensities", fix=fix, where=path) from error
        known.check(path)
        return known

    def check(self, where: object = "propensities") -> None:
        """Raise unless 0 < θ_k, 0 < b < a, and all click probabilities are at most 1."""
        if not self.theta or not all(0 < value < math.inf for value in self.theta):
            raise DualencError(
                "theta must hold a number above 0 for each position",
                fix="give for example [1, 0.5, 0.33]",
                where=where,
            )
        if not 0 < self.click_irrelevant < self.click_relevant <= 1:
            raise DualencError(
                f"irrelevant is {self.click_irrelevant:g} and relevant {self.click_relevant:g}",
                fix="give 0 < irrelevant < relevant ≤ 1",
                where=where,
            )
        if max(self.theta) * self.click_relevant > 1:
            raise DualencError(
                f"the largest theta times relevant is {max(self.theta) * self.click_relevant:g}",
                fix="give probabilities of at most 1",
                where=where,
            )


class ClickModel(NamedTuple):
    """What a click log says about positions and about pairs; see `fit_click_model`.

        fit_click_model(log.query, log.document, log.position, log.reward > 0).relevance

    Attributes:
        theta: θ_k of positions 1 to K, (K,), relative to the first position with a showing; NaN
            for a position without one, and everywhere if nothing was fitted.
        theta_low: lower ends of their 95% intervals, (K,).
        theta_high: upper ends.
        click_relevant: a, probability of a click on a relevant document at the first position.
        click_irrelevant: b, the same of a document that is not relevant.
        prior: π, mean probability of relevance of the pairs.
        relevance: posterior probability of relevance of each pair, (P,).
        pairs: distinct pairs (query, document), (P, 2), ascending.
        moved: number of pairs seen at two positions or more.
        unidentified: why the log cannot tell relevance from position, in one line; the caller
            counts clicks as they are. None if it can.
        position_alone: says that clicks depend on the position alone, so that no pair counts as
            relevant: `relevance` is 0. None if they depend on the pair.
    """

    theta: np.ndarray
    theta_low: np.ndarray
    theta_high: np.ndarray
    click_relevant: float
    click_irrelevant: float
    prior: float
    relevance: np.ndarray
    pairs: Integers
    moved: int
    unidentified: str | None = None
    position_alone: str | None = None


def fit_click_model(
    query: Integers,
    document: Integers,
    position: Integers,
    clicked: np.ndarray,
    *,
    known: KnownPropensities | None = None,
) -> ClickModel:
    """Fit a position-based model with noisy clicks to showings, and infer the relevance of pairs.

    A pair p is relevant, r_p = 1, with probability π. A showing of it at position k is clicked with
    probability θ_k·a if it is relevant and θ_k·b if it is not ("trust bias" with the same noise at
    all positions: Agarwal et al. 2019, "Addressing Trust Bias for Unbiased Learning-to-Rank", Eq.
    5), where θ_1 = 1. With n_pk showings and c_pk clicks of pair p at position k the likelihood is

        Π_p Σ_r P(r) Π_k (θ_k q_r)^c_pk (1 − θ_k q_r)^(n_pk − c_pk),  q_1 = a, q_0 = b.

    EM (Wang et al. 2018, "Position Bias Estimation for Unbiased Learning to Rank in Personal
    Search", where relevance is drawn anew in each showing) alternates the posterior

        γ_p = P(r_p = 1 | all showings of p)

    with the maximum of Σ_kr C_kr log(θ_k q_r) + (N_kr − C_kr) log(1 − θ_k q_r), where C_kr and N_kr
    are the clicks and showings at k, weighted by γ or 1 − γ. It is concave in log θ and log q:
    Newton steps. A ranker puts relevant documents first, so π is one number for each usual position
    of a pair (that with most showings); with a single π a lower position would seem to be examined
    less than it is. Half a pair of each class at each usual position, and half a click and half a
    miss of each class at the first position, keep all numbers inside their range.

    The 95% intervals of θ come from the observed information H and the scores s of whole queries,
    H⁻¹ (Σ_query s sᵀ) H⁻¹ (White 1982), in log θ. For a position without a click the upper end is
    that at which 3 clicks are expected. Positions after the 20th share θ with others within 25%.

    A log identifies the model if pairs seen at several positions connect all positions (Hager et
    al. 2025, arXiv:2506.20501) and some showings have no click. Whether clicks depend on pairs at
    all is tested by Σ_p d_p², d_p = Σ_k (c_pk − n_pk·p_k)/(1 − p_k), p_k the click rate of position
    k (the score test of a mixture: Neyman and Scott 1966; Tarone 1979): it must be larger than in
    99 permutations of the clicks of each position, a test at 1%.

        fit_click_model([0, 0], [3, 5], [1, 2], [True, False]).unidentified

    Args:
        query: row of the query of each showing, (n,).
        document: row of the document, (n,).
        position: position from 1, (n,); 0 where unknown. Such showings are not used.
        clicked: whether the showing had an action, (n,).
        known: parameters to use in place of estimates; only π is then estimated.

    Raises:
        DualencError: there is no showing, or known values have fewer positions than the log.
    """
    if not len(query):
        raise DualencError("the log is empty", fix="give at least one showing")
    counts = _count(query, document, position, clicked, pool=known is None)
    if known is not None:
        known.check()
        return _with_known(counts, known)
    reason = counts.unidentified()
    if reason is not None:
        return _unfitted(counts, unidentified=reason)
    if not _depends_on_pairs(counts):
        said = "clicks depend on the position alone, as far as this log can tell"
        return _unfitted(counts, position_alone=f"{said}: no pair counts as relevant")
    parameters = _maximize(counts)
    low, high = _intervals(counts, parameters)
    relevance = counts.relevance(parameters)
    return ClickModel(
        counts.of_positions(np.exp(parameters.log_theta)),
        counts.of_positions(low),
        counts.of_positions(high),
        float(np.exp(parameters.log_rates[0])),
        float(np.exp(parameters.log_rates[1])),
        float(relevance.mean()),
        relevance,
        counts.pairs,
        counts.moved,
    )


class Parameters(NamedTuple):
    """log θ (K,), log a and log b (2,), and the prior of each usual place (K,)."""

    log_theta: np.ndarray
    log_rates: np.ndarray
    prior: np.ndarray


class Counts(NamedTuple):
    """Showings and clicks of C cells (pair, place), where places are numbered from 0.

    Attributes:
        pairs: distinct (query, document), (P, 2).
        pair: row of the pair of each cell, (C,).
        place: number of the place of each cell, (C,).
        clicks: clicks of each cell, (C,).
        misses: showings without a click of each cell, (C,).
        usual: usual place of each pair, (P,); that with most showings.
        place_of: place of positions 1, 2, …, (K,); -1 without a showing.
        moved: number of pairs seen at two positions or more.
    """

    pairs: Integers
    pair: Integers
    place: Integers
    clicks: np.ndarray
    misses: np.ndarray
    usual: Integers
    place_of: Integers
    moved: int

    @property
    def num_places(self) -> int:
        """Number of places that have a showing."""
        return int(self.place_of.max(initial=-1)) + 1

    def of_positions(self, values: np.ndarray) -> np.ndarray:
        """Return the value of each position's place, (K,); NaN without a showing."""
        padded = np.append(values, np.nan)
        return padded[self.place_of]

    def at_places(self, values: np.ndarray) -> np.ndarray:
        """Sum values of cells (C,) by place."""
        return np.bincount(self.place, values, self.num_places)

    def of_pairs(self, values: np.ndarray) -> np.ndarray:
        """Sum values of cells (C,) by pair."""
        return np.bincount(self.pair, values, len(self.pairs))

    def log_odds(self, parameters: Parameters) -> tuple[np.ndarray, np.ndarray]:
        """Return log P(data, r) of each pair for r = 1 and r = 0, (2, P), and without the prior."""
        rates = np.exp(parameters.log_theta[:, None] + parameters.log_rates).clip(max=MAX_RATE)
        own = np.stack(
            [
                self.of_pairs(self.clicks * hit[self.place] + self.misses * miss[self.place])
                for hit, miss in zip(np.log(rates).T, np.log1p(-rates).T, strict=True)
            ]
        )
        prior = parameters.prior[self.usual]
        return own + np.log(np.stack([prior, 1 - prior])), own

    def relevance(self, parameters: Parameters) -> np.ndarray:
        """Return the posterior probability of relevance of each pair, (P,)."""
        joint, _ = self.log_odds(parameters)
        return 1 / (1 + np.exp((joint[1] - joint[0]).clip(-500, 500)))

    def objective(self, parameters: Parameters) -> float:
        """Return the log-likelihood, with that of the pseudo-counts."""
        joint, _ = self.log_odds(parameters)
        rates = np.exp(parameters.log_rates + parameters.log_theta[0])
        inside = np.concatenate([parameters.prior, rates])
        pseudo = PSEUDO * (np.log(inside) + np.log1p(-inside)).sum()
        return float(np.logaddexp(*joint).sum() + pseudo)

    def unidentified(self) -> str | None:
        """Return why relevance and position cannot be told apart, or None if they can."""
        if not self.num_places:
            return "the log has no positions"
        if not self.clicks.any():
            return "the log has no click"
        if not self.misses.any():
            return "the log has no showing without a click"
        if self.num_places > 1 and not self.moved:
            return "every pair was shown at one position only"
        if self._num_parts() > 1:
            return "some positions share no pair, directly or through others, with the first ones"
        return None

    def _num_parts(self) -> int:
        """Return the number of connected parts of the places, which pairs connect."""
        # Label propagation: a place takes the smallest label of the places that it shares pairs
        # with; cells are sorted by pair.
        label = np.arange(self.num_places)
        starts = np.flatnonzero(np.diff(self.pair, prepend=-1))
        row = np.cumsum(np.diff(self.pair, prepend=-1) > 0) - 1
        while True:
            least = np.minimum.reduceat(label[self.place], starts)[row]
            new = label.copy()
            np.minimum.at(new, self.place, least)
            if (new == label).all():
                return len(np.unique(label))
            label = new


def _count(
    query: Integers, document: Integers, position: Integers, clicked: np.ndarray, pool: bool
) -> Counts:
    """Count showings and clicks by pair and place: a position, or a pool of them."""
    query, document, position = (np.asarray(own, np.int64) for own in (query, document, position))
    clicked = np.asarray(clicked) > 0
    pairs, pair = distinct_pairs(query, document)
    is_used = position > 0
    pair, position, clicked = pair[is_used], position[is_used], clicked[is_used]
    pools = _pool(position) if pool else position
    place = np.unique(pools, return_inverse=True)[1]
    cells, cell = distinct_pairs(pair, place)
    shown = np.bincount(cell, minlength=len(cells)).astype(float)
    clicks = np.bincount(cell, clicked, len(cells))
    # Sorted by pair and then by showings, the last cell of a pair is its usual one.
    order = np.lexsort((-cells[:, 1], shown, cells[:, 0]))
    usual = np.zeros(len(pairs), np.int64)
    usual[cells[order, 0]] = cells[order, 1]
    place_of = np.full(position.max(initial=0), -1)
    place_of[position - 1] = place
    positions, _ = distinct_pairs(pair, position)
    moved = int((np.bincount(positions[:, 0]) > 1).sum()) if len(positions) else 0
    return Counts(pairs, cells[:, 0], cells[:, 1], clicks, shown - clicks, usual, place_of, moved)


def distinct_pairs(first: Integers, second: Integers) -> tuple[Integers, Integers]:
    """Return the distinct pairs of two arrays (n,), ascending (P, 2), and each row's among them."""
    span = int(second.max(initial=0)) + 1
    keys, row = np.unique(first * span + second, return_inverse=True)
    return np.stack(np.divmod(keys, span), axis=1), row


def _pool(position: Integers) -> Integers:
    """Return a number for each position (n,), the same for those far down that share θ."""
    ratio = np.maximum(position, NUM_SINGLE) / NUM_SINGLE
    deeper = np.log(ratio) // math.log(POOLED_WITHIN)
    return np.minimum(position, NUM_SINGLE + 1) + deeper.astype(np.int64)


def _depends_on_pairs(counts: Counts) -> bool:
    """Return True if clicks vary more between pairs than chance explains."""
    clicks = counts.at_places(counts.clicks)
    shown = clicks + counts.at_places(counts.misses)
    rate = (clicks / shown)[counts.place]
    own = (counts.clicks + counts.misses).astype(np.int64)
    # A place where all showings were clicked says nothing about pairs.
    factor = np.divide(1, 1 - rate, out=np.zeros_like(rate), where=rate < 1)

    def statistic(clicked: np.ndarray) -> float:
        deviation = (clicked - own * rate) * factor
        return float((counts.of_pairs(deviation) ** 2).sum())

    generator = np.random.default_rng(0)
    cells = [np.flatnonzero(counts.place == place) for place in range(counts.num_places)]
    showings = [np.repeat(members, own[members]) for members in cells]
    found = statistic(counts.clicks)
    for _ in range(NUM_PERMUTATIONS):
        drawn = [
            generator.choice(rows, int(number), replace=False, shuffle=False)
            for rows, number in zip(showings, clicks, strict=True)
        ]
        permuted = np.bincount(np.concatenate(drawn), minlength=len(own))
        # The tolerance: sums that are equal but for rounding are no evidence.
        if statistic(permuted) >= found * (1 - 1e-9):
            return False
    return True


def _maximize(counts: Counts) -> Parameters:
    """Return the parameters with the largest likelihood by EM, from the best of several starts."""
    clicks = counts.at_places(counts.clicks)
    shown = clicks + counts.at_places(counts.misses)
    rate = (clicks + PSEUDO) / (shown + 2 * PSEUDO)
    overall = clicks.sum() / shown.sum()
    trials = []
    for slope in (1.0, 0.5):
        log_theta = slope * np.log(rate / rate[0])
        for share, ratio in ((0.1, 10.0), (0.3, 5.0), (0.05, 3.0)):
            # The mean over both classes is the overall click rate.
            low = overall / (np.exp(log_theta) @ shown / shown.sum())
            low /= 1 + share * (ratio - 1)
            rates = np.array([min(ratio * low, 0.9 / np.exp(log_theta).max()), low])
            rates[1] = min(rates[1], rates[0] / 2)
            prior = np.full(counts.num_places, share)
            start = Parameters(log_theta, np.log(rates), prior)
            trials.append(_em(counts, start, iterations=20))
    parameters = _em(counts, max(trials, key=counts.objective), MAX_ITERATIONS)
    if parameters.log_rates[0] < parameters.log_rates[1]:
        parameters = Parameters(
            parameters.log_theta, parameters.log_rates[::-1], 1 - parameters.prior
        )
    return parameters


def _em(counts: Counts, parameters: Parameters, iterations: int) -> Parameters:
    """Return the parameters after EM, which ends when the likelihood stops to grow."""
    before = -math.inf
    for _ in range(iterations):
        parameters = _step(counts, parameters)
        now = counts.objective(parameters)
        if now - before < TOLERANCE:
            break
        before = now
    return parameters


def _step(counts: Counts, parameters: Parameters) -> Parameters:
    """Return the parameters after one iteration of EM."""
    relevance = counts.relevance(parameters)
    own = np.stack([relevance, 1 - relevance])
    clicks, misses = (
        np.stack([counts.at_places(values * share[counts.pair]) for share in own], axis=1)
        for values in (counts.clicks, counts.misses)
    )
    clicks[0] += PSEUDO
    misses[0] += PSEUDO
    log_theta, log_rates = _newton(clicks, misses, parameters.log_theta, parameters.log_rates)
    return Parameters(log_theta, log_rates, _prior(counts, relevance))


def _prior(counts: Counts, relevance: np.ndarray) -> np.ndarray:
    """Return the mean relevance of the pairs of each usual place, (K,), with pseudo-counts."""
    total = np.bincount(counts.usual, relevance, counts.num_places)
    number = np.bincount(counts.usual, minlength=counts.num_places)
    return (total + PSEUDO) / (number + 2 * PSEUDO)


def _newton(
    clicks: np.ndarray, misses: np.ndarray, log_theta: np.ndarray, log_rates: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Take Newton steps towards the maximum of Σ clicks·log p + misses·log(1 − p), p = θ_k q_r.

    Args:
        clicks: weighted clicks by place and class, (K, 2).
        misses: weighted showings without a click, (K, 2).
        log_theta: log θ before, (K,); the first stays as it is.
        log_rates: log a and log b before, (2,).
    """

    def value(log_theta: np.ndarray, log_rates: np.ndarray) -> float:
        logs = log_theta[:, None] + log_rates
        if (logs >= math.log(MAX_RATE)).any():
            return -math.inf
        return float((clicks * logs + misses * np.log1p(-np.exp(logs))).sum())

    best = value(log_theta, log_rates)
    for _ in range(3):
        rate = np.exp(log_theta[:, None] + log_rates).clip(max=MAX_RATE)
        gradient = clicks - misses * rate / (1 - rate)
        curvature = misses * rate / (1 - rate) ** 2
        # The Hessian has a diagonal block for θ and one for the rates: eliminate θ.
        inner = curvature.sum(axis=1) + 1e-9
        slope = gradient.sum(axis=1)
        coupling = curvature[1:] / inner[1:, None]
        schur = np.diag(curvature.sum(axis=0) + 1e-9) - curvature[1:].T @ coupling
        change_rates = np.linalg.solve(schur, gradient.sum(axis=0) - coupling.T @ slope[1:])
        change_theta = (slope - curvature @ change_rates) / inner
        change_theta[0] = 0
        largest = max(np.abs(change_theta).max(), np.abs(change_rates).max(), 1.0)
        length = 1 / largest
        for _ in range(20):
            theta = (log_theta + length * change_theta).clip(min=math.log(MIN_THETA))
            rates = log_rates + length * change_rates
            now = value(theta, rates)
            if now >= best:
                log_theta, log_rates, best = theta, rates, now
                break
            length /= 2
        else:
            break
    return log_theta, log_rates


def _intervals(counts: Counts, parameters: Parameters) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper ends (K,) of the 95% intervals of θ."""
    theta = np.exp(parameters.log_theta)
    size = counts.num_places
    low, high = theta.copy(), theta.copy()
    center = _as_vector(parameters)
    scores = _scores(counts, parameters)
    step = 1e-4
    hessian = np.empty((len(center), len(center)))
    for column in range(len(center)):
        ends = []
        for sign in (1, -1):
            moved = center.copy()
            moved[column] += sign * step
            ends.append(_scores(counts, _as_parameters(moved, size)).sum(axis=0))
        hessian[column] = (ends[0] - ends[1]) / (2 * step)
    # The first θ is 1 by definition.
    free = np.arange(1, len(center))
    hessian = (hessian + hessian.T)[np.ix_(free, free)] / 2
    inverse = np.linalg.pinv(hessian, rcond=1e-10, hermitian=True)
    middle = scores[:, free].T @ scores[:, free]
    error = np.sqrt(np.diag(inverse @ middle @ inverse).clip(min=0))[: size - 1]
    with np.errstate(over="ignore"):
        low[1:] = theta[1:] * np.exp(-NORMAL * error)
        high[1:] = theta[1:] * np.exp(NORMAL * error)
    clicks = counts.at_places(counts.clicks)
    if (clicks == 0).any():
        # Clicks that are expected at θ = 1.
        relevance = counts.relevance(parameters)
        rates = np.exp(parameters.log_rates)
        rate = (relevance * rates[0] + (1 - relevance) * rates[1])[counts.pair]
        expected = counts.at_places((counts.clicks + counts.misses) * rate)
        low = np.where(clicks == 0, 0, low)
        high = np.where(clicks == 0, np.maximum(3 / expected, theta), high)
    return low, high


def _as_vector(parameters: Parameters) -> np.ndarray:
    """Return log θ, log a, log b and the logits of the prior in one array."""
    prior = parameters.prior
    return np.concatenate([parameters.log_theta, parameters.log_rates, np.log(prior / (1 - prior))])


def _as_parameters(vector: np.ndarray, size: int) -> Parameters:
    """Return the parameters in an array that `_as_vector` returned."""
    logits = vector[size + 2 :]
    return Parameters(vector[:size], vector[size : size + 2], 1 / (1 + np.exp(-logits)))


def _scores(counts: Counts, parameters: Parameters) -> np.ndarray:
    """Return the derivative of each query's log-likelihood in `_as_vector`, (Q, 2K + 2)."""
    size = counts.num_places
    query = np.unique(counts.pairs[:, 0], return_inverse=True)[1]
    num_queries = int(query.max()) + 1
    relevance = counts.relevance(parameters)
    scores = np.zeros((num_queries, 2 * size + 2))
    rates = np.exp(parameters.log_theta[:, None] + parameters.log_rates).clip(max=MAX_RATE)
    own = query[counts.pair]
    for kind, share in enumerate((relevance, 1 - relevance)):
        rate = rates[counts.place, kind]
        value = share[counts.pair] * (counts.clicks - counts.misses * rate / (1 - rate))
        scores[:, size + kind] = np.bincount(own, value, num_queries)
        np.add.at(scores, (own, counts.place), value)
    place = size + 2 + counts.usual
    np.add.at(scores, (query, place), relevance - parameters.prior[counts.usual])
    return scores


def _with_known(counts: Counts, known: KnownPropensities) -> ClickModel:
    """Return the model with known θ, a and b, for which only the prior is estimated."""
    if not counts.num_places:
        return _unfitted(counts, unidentified="the log has no positions to use propensities at")
    if len(known.theta) < len(counts.place_of):
        raise DualencError(
            f"theta has {len(known.theta)} values and the log has position {len(counts.place_of)}",
            fix="give one for each position",
            where="propensities",
        )
    theta = np.array(known.theta[: len(counts.place_of)])
    log_theta = np.log(theta[counts.place_of >= 0])
    log_rates = np.log([known.click_relevant, known.click_irrelevant])
    parameters = Parameters(log_theta, log_rates, np.full(counts.num_places, 0.1))
    for _ in range(MAX_ITERATIONS):
        prior = _prior(counts, counts.relevance(parameters))
        change = np.abs(prior - parameters.prior).max()
        parameters = parameters._replace(prior=prior)
        if change < 1e-9:
            break
    relevance = counts.relevance(parameters)
    rates = (known.click_relevant, known.click_irrelevant)
    mean = float(relevance.mean())
    theta = np.where(counts.place_of >= 0, theta, np.nan)
    return ClickModel(theta, theta, theta, *rates, mean, relevance, counts.pairs, counts.moved)


def _unfitted(
    counts: Counts, unidentified: str | None = None, position_alone: str | None = None
) -> ClickModel:
    """Return a model without parameters, with the reason."""
    nothing = np.full(len(counts.place_of), np.nan)
    relevance = np.full(len(counts.pairs), np.nan if position_alone is None else 0.0)
    return ClickModel(
        nothing,
        nothing,
        nothing,
        math.nan,
        math.nan,
        math.nan if position_alone is None else 0.0,
        relevance,
        counts.pairs,
        counts.moved,
        unidentified,
        position_alone,
    )
