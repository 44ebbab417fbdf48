"""The choice of an adaptation by folds, against loops over its candidates."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dualenc.workflows.adaptation_choice import (
    KNOWN,
    NEW,
    Choice,
    HeldOut,
    Trial,
    choose,
    unmeasured_choice,
)
from dualenc.workflows.adaptation_report import finding_of, quality_rows
from dualenc.workflows.adapting import Interpolated

SHARES = (0.0, 0.5, 1.0)
ALPHAS = (math.inf, 0.1)


def held_out(
    gains: dict[tuple[float, float], tuple[float, float]],
    *,
    folds: int = 5,
    documents: int = 20,
    noise: float = 0.0,
    seed: int = 0,
) -> HeldOut:
    """Folds of `documents` new and as many known queries, each of its own document, whose scores
    rise by gains of new and known ones at (α, share)."""
    generator = np.random.default_rng(seed)
    trials, rows = [], []
    for fold in range(folds):
        base = {task: 0.5 * generator.random(documents) for task in (NEW, KNOWN)}
        own = []
        for alpha in ALPHAS:
            points = []
            for share in SHARES:
                by_task = dict(zip((NEW, KNOWN), gains.get((alpha, share), (0.0, 0.0))))
                spread = 0 if share == 1 else noise
                scores = {
                    task: base[task] + gain + spread * generator.standard_normal(documents)
                    for task, gain in by_task.items()
                }
                points.append(Interpolated(share, scores))
            own.append(Trial(alpha, 10 * (fold + 1), points))
        trials.append(own)
        numbers = np.arange(documents) + fold * documents
        rows.append({NEW: numbers, KNOWN: numbers + 10_000})
    return HeldOut.of_folds(trials, rows)


def test_the_best_mean_among_those_that_do_no_harm_to_new_documents() -> None:
    choice = choose(
        held_out({(math.inf, 0.0): (-0.1, 0.4), (0.1, 0.0): (-0.01, 0.3), (0.1, 0.5): (0.0, 0.1)})
    )
    assert (choice.alpha, choice.keep, choice.steps) == (0.1, 0.5, 30)
    assert choice.unmeasured is None
    rows = {row["queries of"]: row for row in quality_rows(choice.compared)}
    assert rows[NEW]["difference"] == pytest.approx(0)
    assert rows[KNOWN]["difference"] == pytest.approx(0.1)
    assert rows[NEW]["documents"] == 100
    assert finding_of(choice).startswith("adapting helps: nDCG@10 of held-out queries +0.050 [")


def test_new_documents_come_first() -> None:
    """What is more than a standard error behind the best for new documents is left out, whatever
    seen ones gain."""
    gains = {(0.1, 0.0): (0.02, 0.4), (0.1, 0.5): (0.06, 0.2)}
    assert choose(held_out(gains)).keep == 0.5
    # The same within the noise: seen ones decide.
    assert choose(held_out(gains, noise=0.5)).keep == 0.0


def test_no_gain_is_the_original() -> None:
    harmful = {(alpha, share): (-0.1, -0.1) for alpha in ALPHAS for share in SHARES[:2]}
    choice = choose(held_out(harmful))
    assert choice.keep == 1
    assert finding_of(choice).startswith("adapting does not help: no share of the adapted weights")


def test_numbers_are_those_of_other_folds_choice() -> None:
    """Of pure noise, the best of the choices seems to gain, and the reported numbers do not; each
    fold is scored at the choice that a loop over the other folds makes."""
    found = []
    for seed in range(40):
        pooled = held_out({}, noise=0.2, seed=seed, documents=10)
        choice = choose(pooled)
        before, after = (
            np.concatenate([getattr(choice.compared[task], name) for task in (NEW, KNOWN)])
            for name in ("before", "after")
        )
        own = pooled.scores[ALPHAS.index(choice.alpha), SHARES.index(choice.keep)]
        found.append((np.mean(after - before), np.mean(own - pooled.scores[0, -1])))
    crossed, chosen = np.mean(found, axis=0)
    assert chosen > 0.01
    assert abs(crossed) < 0.006


def test_each_fold_is_scored_at_the_choice_of_the_others() -> None:
    pooled = held_out({(0.1, 0.5): (0.01, 0.01)}, noise=0.1, seed=3)
    choice = choose(pooled)
    after = np.empty(len(pooled.document))
    for fold in range(5):
        others = np.flatnonzero(pooled.part != fold)
        rest = HeldOut(
            pooled.alphas,
            pooled.shares,
            pooled.of,
            pooled.steps,
            pooled.is_new[others],
            pooled.document[others],
            pooled.part[others],
            pooled.scores[:, :, others],
        )
        theirs = choose(rest)
        place = ALPHAS.index(theirs.alpha), SHARES.index(theirs.keep)
        own = pooled.part == fold
        after[own] = pooled.scores[place][own]
    for task, mask in pooled.tasks().items():
        np.testing.assert_array_equal(choice.compared[task].after, after[mask])


@pytest.mark.parametrize(("known", "keep"), [(0.1, 0.5), (-0.1, 1.0)])
def test_too_few_documents_are_halfway_or_the_original(known: float, keep: float) -> None:
    gains = {(0.1, 0.5): (-0.2, known), (0.1, 0.0): (0.5, 0.5)}
    choice = choose(held_out(gains, documents=5))
    assert (choice.alpha, choice.keep) == (0.1, keep)
    assert finding_of(choice) == (
        "cannot tell whether adapting helps: held-out queries of new documents name 25 documents, "
        "and fewer than 30 cannot tell"
    )


def test_a_given_share_leaves_the_choice_of_the_weights() -> None:
    gains = {(math.inf, 0.5): (0.0, 0.1), (0.1, 0.5): (0.1, 0.1), (math.inf, 0.0): (0.3, 0.3)}
    choice = choose(held_out(gains), keep=0.5)
    assert (choice.alpha, choice.keep, choice.reason) == (0.1, 0.5, "--keep")


def test_halves_of_a_single_fold_choose_for_one_another() -> None:
    pooled = held_out({(0.1, 0.5): (0.1, 0.1)}, folds=1, documents=40)
    assert set(pooled.part.tolist()) == {0, 1}
    assert choose(pooled).keep == 0.5


def test_nothing_held_out() -> None:
    choice = unmeasured_choice(None, "no query was held out")
    assert (choice.alpha, choice.keep, choice.steps) == (0.1, 1.0, None)
    assert isinstance(choice, Choice)
    assert unmeasured_choice(0.5, "no query was held out").keep == 0.5
    assert finding_of(choice) == "cannot tell whether adapting helps: no query was held out"
