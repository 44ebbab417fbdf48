"""The share of the original weights that an adaptation keeps, on scores written by hand."""

from __future__ import annotations

import numpy as np

from dualenc.workflows.adapting import Interpolated, harmless_share


def points(new: dict[float, float], known: dict[float, float]) -> list[Interpolated]:
    """Models at shares of the original weights, with the same score for each of four new and of two
    known queries."""
    scores = {
        keep: {"new": np.full(4, new[keep]), "known": np.full(2, known[keep])} for keep in new
    }
    return [Interpolated(keep, of_tasks) for keep, of_tasks in scores.items()]


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
