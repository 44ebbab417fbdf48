"""Hold out the end of a log: what users asked after the rest of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dualenc.data.logs.click_log import ClickLog
from dualenc.errors import DualencError

SHARE = 0.1
"""Share of the results lists that are held out."""


class TimeSplit(NamedTuple):
    """A log in two parts, and when the second one begins.

    Attributes:
        earlier: results lists before `begins`.
        later: results lists from then on.
        begins: seconds since 1970.
    """

    earlier: ClickLog
    later: ClickLog
    begins: float


def split_by_time(log: ClickLog, share: float = SHARE) -> TimeSplit | None:
    """Divide a log at the time from which on a `share` of its results lists begin.

    A results list belongs to the time of its first showing and is not divided.

        split = split_by_time(open_log("events.parquet", open_documents("index")))
        print(len(split.later))

    Args:
        log: the log.
        share: share of the results lists in the later part, between 0 and 1.

    Returns:
        The two parts, or None if a showing has no time, or all results lists have the same.

    Raises:
        DualencError: the share is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise DualencError(f"share is {share}", fix="give a number between 0 and 1")
    if not len(log) or not np.isfinite(log.time).all():
        return None
    _, session = np.unique(log.session, return_inverse=True)
    begun = np.full(session.max() + 1, np.inf)
    np.minimum.at(begun, session, log.time)
    begins = float(np.quantile(begun, 1 - share, method="higher"))
    is_later = begun[session] >= begins
    # Where many begin at once, as in a log of whole days, the later part may be all of them.
    if is_later.all():
        return None
    return TimeSplit(log.take(~is_later), log.take(is_later), begins)
