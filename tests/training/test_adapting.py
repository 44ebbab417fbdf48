"""The share of the original weights that an adaptation keeps, on scores written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dualenc.workflows.adapting import Interpolated, best_share, harmless_share


def points(new: dict[float, float], known: dict[float, float]) -> list[Interpolated]:
    """Models at shares of the original weights, with the same score for each of four new and of two
    known queries."""
    scores = {
        keep: {"new": np.full(4, new[keep]), "known": np.full(2, known[keep])} for keep in new
    }
    return [Interpolated(keep, of_tasks) for keep, of_tasks in scores.items()]


@pytest.mark.parametrize(
    ("new", "known", "expected"),
    [
        # Both gain by all of the adaptation.
        ({0: 0.6, 0.5: 0.55, 1: 0.5}, {0: 0.9, 0.5: 0.7, 1: 0.5}, 0),
        # New documents lose by all of it, and gain by half.
        ({0: 0.4, 0.5: 0.55, 1: 0.5}, {0: 0.9, 0.5: 0.7, 1: 0.5}, 0.5),
        # New documents always lose: the model stays as it is, whatever the known ones gain.
        ({0: 0.4, 0.5: 0.45, 1: 0.5}, {0: 0.9, 0.5: 0.9, 1: 0.5}, 1),
        # Four new queries weigh more than two known ones: 0.58 against 0.57.
        ({0: 0.5, 0.5: 0.6, 1: 0.5}, {0: 0.7, 0.5: 0.55, 1: 0.5}, 0.5),
        # Equals: more of the original.
        ({0: 0.6, 0.5: 0.6, 1: 0.5}, {0: 0.7, 0.5: 0.7, 1: 0.5}, 0.5),
    ],
)
def test_best_share_costs_new_documents_nothing(
    new: dict[float, float], known: dict[float, float], expected: float
) -> None:
    assert best_share(points(new, known), "new", ["new", "known"]) == expected


@pytest.mark.parametrize("tasks", [[], ["known"]])
def test_without_held_out_new_documents_the_original_stays(tasks: list[str]) -> None:
    assert best_share(points({0: 0.9, 1: 0.1}, {0: 0.9, 1: 0.1}), "new", tasks) == 1


def test_harmless_share_is_where_the_interval_reaches_zero() -> None:
    """From one share on and for all larger ones; a smaller share that happens to be level does not
    count."""
    generator = np.random.default_rng(0)
    original = generator.uniform(0.4, 0.6, 200)
    losses = {1.0: 0.0, 0.8: 0.0, 0.6: 0.002, 0.4: 0.1, 0.2: 0.0, 0.0: 0.2}
    noise = {keep: generator.normal(0, 0.05, 200) if keep < 1 else 0 for keep in losses}
    noise = {keep: values - np.mean(values) for keep, values in noise.items()}
    scored = [
        Interpolated(keep, {"second": original - loss + noise[keep]})
        for keep, loss in losses.items()
    ]
    assert harmless_share(scored, "second") == 0.6
