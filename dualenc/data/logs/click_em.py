"""The maximum of a click model's likelihood by EM, and intervals: see `fit_click_model`.

Shapes: P pairs, K places, C cells, Q queries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dualenc.data.logs.click_counts import Counts

MAX_ITERATIONS, TOLERANCE = 2000, 1e-5
"""EM ends when an iteration adds less than this to the log-likelihood of the log."""
PSEUDO = 0.5
"""Half a click and half a miss of each class at the first place, and half a pair of each class."""
MAX_RATE, MIN_THETA = 1 - 1e-6, 1e-4
NORMAL = 1.959964
"""Standard errors on each side of a 95% interval."""


class Parameters(NamedTuple):
    """log θ (K,), log a and log b (2,), and the prior of each usual place (K,)."""

    log_theta: np.ndarray
    log_rates: np.ndarray
    prior: np.ndarray


def log_joint(counts: Counts, parameters: Parameters) -> np.ndarray:
    """Return log P(clicks, r) of each pair for r = 1 and r = 0, (2, P)."""
    rates = np.exp(parameters.log_theta[:, None] + parameters.log_rates).clip(max=MAX_RATE)
    place = counts.place
    own = np.stack(
        [
            counts.of_pairs(counts.clicks * hit[place] + counts.misses * miss[place])
            for hit, miss in zip(np.log(rates).T, np.log1p(-rates).T, strict=True)
        ]
    )
    prior = parameters.prior[counts.usual]
    return own + np.log(np.stack([prior, 1 - prior]))


def posterior(counts: Counts, parameters: Parameters) -> np.ndarray:
    """Return the probability of relevance of each pair given its showings, (P,)."""
    relevant, not_relevant = log_joint(counts, parameters)
    return 1 / (1 + np.exp((not_relevant - relevant).clip(-500, 500)))


def objective(counts: Counts, parameters: Parameters) -> float:
    """Return the log-likelihood, with that of the pseudo-counts."""
    rates = np.exp(parameters.log_rates + parameters.log_theta[0])
    inside = np.concatenate([parameters.prior, rates])
    pseudo = PSEUDO * (np.log(inside) + np.log1p(-inside)).sum()
    return float(np.logaddexp(*log_joint(counts, parameters)).sum() + pseudo)


def maximize(counts: Counts) -> Parameters:
    """Return the parameters with the largest likelihood by EM, from the best of several starts.

    They are those of `fit_click_model`; a is at least b.
    """
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
    parameters = _em(
        counts, max(trials, key=lambda trial: objective(counts, trial)), MAX_ITERATIONS
    )
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
        now = objective(counts, parameters)
        if now - before < TOLERANCE:
            break
        before = now
    return parameters


def _step(counts: Counts, parameters: Parameters) -> Parameters:
    """Return the parameters after one iteration of EM."""
    relevance = posterior(counts, parameters)
    own = np.stack([relevance, 1 - relevance])
    clicks, misses = (
        np.stack([counts.at_places(values * share[counts.pair]) for share in own], axis=1)
        for values in (counts.clicks, counts.misses)
    )
    clicks[0] += PSEUDO
    misses[0] += PSEUDO
    log_theta, log_rates = _newton(clicks, misses, parameters.log_theta, parameters.log_rates)
    return Parameters(log_theta, log_rates, mean_relevance(counts, relevance))


def mean_relevance(counts: Counts, relevance: np.ndarray) -> np.ndarray:
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


def intervals(counts: Counts, parameters: Parameters) -> tuple[np.ndarray, np.ndarray]:
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
        relevance = posterior(counts, parameters)
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
    relevance = posterior(counts, parameters)
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
