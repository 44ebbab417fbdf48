"""The end of a log against a loop over its results lists."""

from __future__ import annotations

import numpy as np
import pytest

from dualenc.data import Corpus
from dualenc.data.logs.click_log import ClickLog
from dualenc.data.logs.split_by_time import split_by_time
from dualenc.errors import DualencError


def log_of(session: list[int], time: list[float]) -> ClickLog:
    count = len(session)
    return ClickLog(
        queries=Corpus(["0"], ["a query"]),
        query=np.zeros(count, np.int64),
        document=np.arange(count),
        reward=np.ones(count, np.float32),
        position=np.zeros(count, np.int64),
        session=np.array(session),
        time=np.array(time, float),
        grades_are_relevance=False,
        finding="",
        skipped=0,
    )


def test_last_sessions_are_held_out_whole() -> None:
    random = np.random.default_rng(0)
    session = random.integers(0, 40, 500)
    time = 10.0 * session + random.uniform(0, 30, 500)
    split = split_by_time(log_of(session.tolist(), time.tolist()))
    assert split is not None
    begun = {own: min(time[session == own]) for own in set(session.tolist())}
    ranked = sorted(begun, key=lambda own: begun[own])
    later = set(ranked[-4:])
    assert set(split.later.session.tolist()) == later
    assert set(split.earlier.session.tolist()) == set(ranked) - later
    assert split.begins == min(begun[own] for own in later)
    assert len(split.later) + len(split.earlier) == 500


@pytest.mark.parametrize("time", [[1.0, np.nan, 2.0], [5.0, 5.0, 5.0], []])
def test_without_times_nothing_is_divided(time: list[float]) -> None:
    assert split_by_time(log_of(list(range(len(time))), time)) is None


def test_shares_are_checked() -> None:
    with pytest.raises(DualencError, match="share is 1"):
        split_by_time(log_of([0, 1], [0, 1]), share=1)
