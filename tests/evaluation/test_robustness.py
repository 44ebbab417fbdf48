"""Corruption errors on numbers worked by hand."""

import numpy as np
import pytest

from dualenc.errors import DualencError
from dualenc.evaluation.corrupted import as_mapping, error_rates, from_mapping, mean_corruption_error, robustness_rows

ERRORS = np.array([[0.1, 0.3], [0.2, 0.6]])
BASELINE = np.array([[0.4, 0.4], [0.5, 0.5]])


def test_errors_are_shares_of_wrong_images() -> None:
    right = np.array([[[True, False]], [[True, True]], [[False, False]], [[True, False]]])
    assert error_rates(right).tolist() == [[0.25, 0.75]]


def test_the_mean_error_is_plain_or_relative_to_a_baseline() -> None:
    assert mean_corruption_error(ERRORS) == pytest.approx(0.3)
    assert mean_corruption_error(ERRORS, BASELINE) == pytest.approx((0.4 / 0.8 + 0.8 / 1.0) / 2)
    assert mean_corruption_error(BASELINE, BASELINE) == 1.0


def test_rows_show_accuracy_and_means() -> None:
    rows = robustness_rows(ERRORS, ["fog", "snow"], [1, 5])
    assert rows[0] == {"corruption": "fog", "severity 1": 0.9, "severity 5": 0.7, "mean": pytest.approx(0.8)}
    assert rows[2]["corruption"] == "mean"
    assert rows[2]["severity 5"] == pytest.approx(0.55)
    assert rows[2]["mean"] == pytest.approx(0.7)


def test_errors_survive_metrics_json_in_any_order() -> None:
    kept = as_mapping(ERRORS, ["fog", "snow"], [1, 5])
    assert kept == {"fog": {"1": 0.1, "5": 0.3}, "snow": {"1": 0.2, "5": 0.6}}
    assert from_mapping(kept, ["snow", "fog"], [5, 1]).tolist() == [[0.6, 0.2], [0.3, 0.1]]
    with pytest.raises(DualencError, match="no error of fog at severity 3"):
        from_mapping(kept, ["fog"], [3])


def test_mistakes_are_one_line() -> None:
    with pytest.raises(DualencError, match="no image was classified"):
        error_rates(np.zeros((0, 2, 2), bool))
    with pytest.raises(DualencError, match="makes no error under corruption 1"):
        mean_corruption_error(ERRORS, BASELINE * [[1], [0]])
    with pytest.raises(DualencError, match=r"the baseline's errors have shape \(1, 2\)"):
        mean_corruption_error(ERRORS, BASELINE[:1])
    with pytest.raises(DualencError, match=r"errors have shape \(0, 2\)"):
        mean_corruption_error(ERRORS[:0])
    with pytest.raises(DualencError, match="for 1 corruptions x 2"):
        robustness_rows(ERRORS, ["fog"], [1, 5])
