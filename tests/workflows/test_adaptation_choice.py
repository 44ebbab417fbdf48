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
from dualenc.workflows.adaptation_report import finding_of, forgetting, quality_rows
from dualenc.workflows.adapting import BASE, ORIGINAL, Interpolated

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
    """What does not raise new documents by more than a standard error is left out, whatever seen
    ones gain."""
    gains = {(0.1, 0.0): (0.01, 0.4), (0.1, 0.5): (0.1, 0.2)}
    assert choose(held_out(gains)).keep == 0.0
    noisy = held_out(gains, noise=0.3, seed=1)
    of_new = noisy.scores[1, :, noisy.is_new] - noisy.scores[0, -1, noisy.is_new, None]  # (Q, S)
    least = of_new.mean(axis=0) - of_new.std(axis=0) / np.sqrt(len(of_new))
    assert least[0] < -0.003 < least[1]
    assert choose(noisy).keep == 0.5


def test_fewer_than_a_hundred_documents_are_at_most_halfway() -> None:
    gains = {(0.1, 0.0): (0.1, 0.4), (0.1, 0.5): (0.1, 0.2)}
    assert choose(held_out(gains, documents=20)).keep == 0.0
    assert choose(held_out(gains, documents=19)).keep == 0.5


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
        pooled = held_out({}, noise=0.2, seed=seed, documents=20)
        choice = choose(pooled)
        before, after = (
            np.concatenate([getattr(choice.compared[task], name) for task in (NEW, KNOWN)])
            for name in ("before", "after")
        )
        own = pooled.scores[ALPHAS.index(choice.alpha), SHARES.index(choice.keep)]
        found.append((np.mean(after - before), np.mean(own - pooled.scores[0, -1])))
    crossed, chosen = np.mean(found, axis=0)
    assert chosen > 0.006
    assert abs(crossed) < 0.003


def test_each_fold_is_scored_at_the_choice_of_the_others() -> None:
    pooled = held_out({(0.1, 0.5): (0.01, 0.01)}, noise=0.1, seed=3, documents=25)
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


LINES = [*((share, BASE) for share in SHARES[1:]), *((share, ORIGINAL) for share in SHARES)]
"""Candidates after a previous run: the trained model is on both lines."""


def continued(
    new: dict[tuple[float, str], float],
    known: dict[tuple[float, str], float] | None = None,
    *,
    noise: float = 0.0,
    documents: int = 40,
    seed: int = 0,
) -> HeldOut:
    """Three folds whose scores of new and known documents rise by gains at (share, end)."""
    generator = np.random.default_rng(seed)
    trials, rows = [], []
    for fold in range(3):
        start = {task: 0.3 + 0.4 * generator.random(documents) for task in (NEW, KNOWN)}
        points = []
        for candidate in LINES:
            gains = {NEW: new.get(candidate, 0.0), KNOWN: (known or new).get(candidate, 0.0)}
            scores = {
                task: start[task] + gain + noise * generator.standard_normal(documents)
                for task, gain in gains.items()
            }
            points.append(Interpolated(candidate[0], scores, candidate[1]))
        trials.append([Trial(0.1, 10, points)])
        numbers = np.arange(documents) + fold * documents
        rows.append({NEW: numbers, KNOWN: numbers + 10_000})
    return HeldOut.of_folds(trials, rows)


@pytest.mark.parametrize(
    ("new", "taken"),
    [
        ({(1.0, BASE): 0.1}, (1.0, BASE)),  # the previous model was spoiled
        ({(0.0, ORIGINAL): -0.1, (0.5, BASE): -0.1, (1.0, BASE): -0.1}, (1.0, ORIGINAL)),
        ({(0.0, ORIGINAL): 0.2, (0.5, BASE): 0.1, (0.5, ORIGINAL): 0.1}, (0.0, ORIGINAL)),
        ({(0.5, BASE): 0.2, (1.0, BASE): 0.1}, (0.5, BASE)),
        ({}, (1.0, ORIGINAL)),  # of equals
    ],
)
def test_after_a_previous_run_both_lines_are_candidates(
    new: dict[tuple[float, str], float], taken: tuple[float, str]
) -> None:
    choice = choose(continued(new))
    assert (choice.keep, choice.of) == taken
    for row in quality_rows(choice.compared):
        assert row["difference"] == pytest.approx(new.get(taken, 0))
        assert row["base"] == pytest.approx(row["original"] + new.get((1.0, BASE), 0))


@pytest.mark.parametrize("seed", range(10))
def test_nothing_far_below_the_base_model_is_taken(seed: int) -> None:
    """The choice is that of a loop over all candidates, with both floors."""
    generator = np.random.default_rng(seed)
    new, known = (
        dict(zip(LINES, 0.05 * generator.standard_normal(len(LINES)), strict=True))
        for _ in range(2)
    )
    pooled = continued(new, known, noise=0.2, seed=seed)
    scores = {candidate: pooled.scores[0, row] for row, candidate in enumerate(LINES)}
    of_new = {name: own[pooled.is_new] for name, own in scores.items()}
    allowed = []
    for name in LINES:
        gain = of_new[name] - of_new[LINES[-1]]
        error = np.sqrt(np.square(gain - gain.mean()).sum()) / len(gain)
        over_base = of_new[name].mean() - of_new[1.0, BASE].mean()
        if gain.mean() - error >= -0.003 and over_base >= -0.003:
            allowed.append(name)
    # With nothing allowed, the previous model stays.
    allowed = allowed or [(1.0, ORIGINAL)]
    choice = choose(pooled)
    assert (choice.keep, choice.of) == max(allowed, key=lambda name: scores[name].mean())


def test_too_few_documents_are_halfway_to_the_previous_model() -> None:
    spoiled = {(1.0, BASE): 0.3, (0.5, ORIGINAL): 0.1}
    choice = choose(continued(spoiled, documents=5))
    assert (choice.keep, choice.of) == (0.5, ORIGINAL)
    worse = {(1.0, BASE): 0.3, (0.5, ORIGINAL): -0.1}
    choice = choose(continued(worse, documents=5))
    assert choice.is_original
    assert choose(continued(spoiled), keep=0.5).of == ORIGINAL


def test_what_is_forgotten_on_the_way_to_the_base_model() -> None:
    generator = np.random.default_rng(0)
    scores = 0.5 + 0.1 * generator.random(50)
    of_share = {(0.5, BASE): scores - 0.2, (1.0, BASE): scores + 0.1}
    points = [
        Interpolated(keep, {"second task: x": of_share.get((keep, of), scores)}, of)
        for keep, of in LINES
    ]
    assert forgetting(points, 0.5, BASE) == ["second task: x: loses"]
    assert "nothing is lost" in forgetting(points, 1.0, BASE)[0]
    assert "from --keep 0 on" in forgetting(points, 0.5, ORIGINAL)[0]
