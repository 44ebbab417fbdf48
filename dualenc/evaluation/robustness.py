"""Accuracy under corruptions: the table of a classifier's errors, and the mean corruption error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dualenc.errors import DualencError

Errors = npt.NDArray[np.floating]


def error_rates(right: npt.NDArray[np.bool_]) -> Errors:
    """Share of images classified wrongly, of each condition.

    Args:
        right: (N, ...) whether image i is classified rightly under each condition.
    """
    if len(right) == 0:
        raise DualencError("no image was classified; the data is empty or every image is bad")
    return 1 - right.mean(axis=0)


def mean_corruption_error(errors: Errors, baseline: Errors | None = None) -> float:
    """Mean corruption error, unnormalised or relative to a baseline (Hendrycks & Dietterich 2019, §4.1).

    Args:
        errors: (K, S) error rates of K corruptions at S severities.
        baseline: (K, S) of the classifier to compare with. Given, the errors of a corruption are summed over
            severities and divided by the baseline's sum, and the K quotients averaged. Without, the plain mean of
            all errors, as papers on CIFAR-C report it.

    Raises:
        DualencError: the shapes differ, or the baseline makes no error under a corruption.
    """
    if errors.ndim != 2 or errors.size == 0:
        raise DualencError(f"errors have shape {errors.shape}; (corruptions, severities) is needed")
    if baseline is None:
        return float(errors.mean())
    if baseline.shape != errors.shape:
        raise DualencError(f"the baseline's errors have shape {baseline.shape}, these {errors.shape}")
    if (baseline.sum(axis=1) <= 0).any():
        row = int(np.argmin(baseline.sum(axis=1)))
        raise DualencError(f"the baseline makes no error under corruption {row}; its error cannot be divided by")
    return float(np.mean(errors.sum(axis=1) / baseline.sum(axis=1)))


def robustness_rows(
    errors: Errors, corruptions: Sequence[str], severities: Sequence[int]
) -> list[dict[str, str | float]]:
    """Rows of a table: accuracy of each corruption at each severity and their mean, and a last row of means.

    Args:
        errors: (K, S) error rates.
        corruptions: K names.
        severities: S numbers.
    """
    if errors.shape != (len(corruptions), len(severities)):
        raise DualencError(f"errors of shape {errors.shape} for {len(corruptions)} corruptions x {len(severities)}")
    accuracies = 1 - errors
    rows = [_row(name, row, severities) for name, row in zip(corruptions, accuracies)]
    return [*rows, _row("mean", accuracies.mean(axis=0), severities)]


def as_mapping(errors: Errors, corruptions: Sequence[str], severities: Sequence[int]) -> dict[str, dict[str, float]]:
    """(K, S) numbers by corruption and severity, as `metrics.json` keeps them."""
    return {
        name: {str(severity): float(value) for severity, value in zip(severities, row)}
        for name, row in zip(corruptions, errors)
    }


def from_mapping(
    found: Mapping[str, Mapping[str, float]], corruptions: Sequence[str], severities: Sequence[int]
) -> Errors:
    """The (K, S) numbers back from `as_mapping`, in this order.

    Raises:
        DualencError: a corruption or a severity is not there, or its number is no rate.
    """
    for name in corruptions:
        for severity in severities:
            value = found.get(name, {}).get(str(severity))
            if value is None:
                raise DualencError(
                    f"the baseline has no error of {name} at severity {severity}; evaluate it on the same"
                )
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise DualencError(f"the baseline's error of {name} at severity {severity} is no rate from 0 to 1")
    return np.array([[found[name][str(severity)] for severity in severities] for name in corruptions], float)


def _row(name: str, accuracies: Errors, severities: Sequence[int]) -> dict[str, str | float]:
    cells: dict[str, str | float] = {"corruption": name}
    cells.update({f"severity {severity}": float(value) for severity, value in zip(severities, accuracies)})
    cells["mean"] = float(accuracies.mean())
    return cells
