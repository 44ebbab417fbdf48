"""A position-based click model with noise: examination, relevance of pairs, and what a log tells.

Shapes: n showings, P distinct pairs of a query and a document, K positions.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dualenc.data.logs.click_counts import Counts, count
from dualenc.data.logs.click_em import (
    MAX_ITERATIONS,
    Parameters,
    intervals,
    maximize,
    mean_relevance,
    posterior,
)
from dualenc.errors import DualencError
from dualenc.types import Integers, StrPath

NUM_PERMUTATIONS = 99


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

    A log identifies the model if its positions are connected and some showings have no click. Pairs
    seen at several positions connect these (Hager et al. 2025, arXiv:2506.20501). So do repeated
    showings, by the assumption that there are two classes with the same a and b everywhere: three
    showings of each pair identify a mixture of two click rates, and all positions with at least 100
    pairs shown there three times are connected. Positions with up to a tenth of the showings that
    are not connected with the others are not used. Whether clicks depend on pairs at
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
    counts = count(query, document, position, clicked, pool=known is None)
    if known is not None:
        known.check()
        return _with_known(counts, known)
    reason = counts.unidentified()
    if reason is not None:
        return _unfitted(counts, unidentified=reason)
    if not _depends_on_pairs(counts):
        said = "clicks depend on the position alone, as far as this log can tell"
        return _unfitted(counts, position_alone=f"{said}: no pair counts as relevant")
    parameters = maximize(counts)
    low, high = intervals(counts, parameters)
    relevance = posterior(counts, parameters)
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
        prior = mean_relevance(counts, posterior(counts, parameters))
        change = np.abs(prior - parameters.prior).max()
        parameters = parameters._replace(prior=prior)
        if change < 1e-9:
            break
    relevance = posterior(counts, parameters)
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
