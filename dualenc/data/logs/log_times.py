"""Times of log rows: ISO texts, numbers since 1970, calendar days, or Arrow timestamps."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dualenc.data.readers.plain_types import is_type

# Largest number of each unit: as seconds the year 5138, as 10^11 milliseconds 1973, and so on.
_UNITS = ((1e11, "seconds", 1.0), (1e14, "milliseconds", 1e3), (1e17, "microseconds", 1e6))
_LEAST_SECONDS = 1e8  # 1973; smaller numbers are not times
_FIRST_DAY = 19000101
_LAST_DAY = 21001231
_PARSED = 0.5  # share of the values that must be times


def read_times(array: pa.ChunkedArray) -> tuple[np.ndarray, str] | None:
    """Return seconds since 1970 (n,), NaN where unknown, and how the values were read.

    Whole numbers of eight digits are days such as 20260301. Other numbers are seconds,
    milliseconds, microseconds or nanoseconds by the size of their median. Texts are ISO 8601, in
    UTC without a time zone. None if most of the values are not times.
    """
    kind = array.type
    if is_type(kind, "timestamp", "date"):
        stamps = array.cast(pa.timestamp("us")) if is_type(kind, "date") else array
        numbers = _numbers(stamps.cast(pa.timestamp("us", stamps.type.tz), safe=False))
        zone = "timestamps" if stamps.type.tz else "timestamps in UTC"
        return numbers / 1e6, zone
    if is_type(kind, "integer", "floating", "decimal"):
        return _of_numbers(array.cast(pa.float64(), safe=False).to_numpy())
    if not is_type(kind, "string", "large_string"):
        return None
    codes = array.dictionary_encode().combine_chunks()
    texts = codes.dictionary
    try:
        numbers = pc.if_else(pc.equal(pc.utf8_trim_whitespace(texts), ""), None, texts)
        found = _of_numbers(numbers.cast(pa.float64()).to_numpy(zero_copy_only=False))
    except pa.ArrowInvalid:
        found = _of_texts(texts)
    if found is None:
        return None
    # The last entry is for missing values.
    by_code = np.append(found[0], np.nan)
    indices = codes.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False)
    return by_code[indices], found[1]


def _numbers(array: pa.ChunkedArray) -> np.ndarray:
    """Return timestamps as float64, NaN where missing."""
    whole = array.cast(pa.int64())
    numbers = pc.fill_null(whole, 0).to_numpy().astype(np.float64)
    numbers[pc.is_null(whole).to_numpy()] = np.nan
    return numbers


def _of_numbers(numbers: np.ndarray) -> tuple[np.ndarray, str] | None:
    known = numbers[np.isfinite(numbers)]
    if not len(known):
        return None
    middle = float(np.median(known))
    if known.min() >= _FIRST_DAY and known.max() <= _LAST_DAY and (known % 1 == 0).all():
        days = pa.array([None if day != day else f"{day:.0f}" for day in numbers.tolist()])
        return _of_texts(days, "days (YYYYMMDD)")
    if middle < _LEAST_SECONDS:
        return None
    for limit, name, factor in _UNITS:
        if middle < limit:
            return numbers / factor, f"{name} since 1970"
    return numbers / 1e9, "nanoseconds since 1970"


def _of_texts(
    texts: pa.Array, name: str = "ISO times in UTC where none is given"
) -> tuple[np.ndarray, str] | None:
    seconds = np.array([_seconds(text) for text in texts.to_pylist()], np.float64)
    if not len(seconds) or np.isfinite(seconds).mean() < _PARSED:
        return None
    return seconds, name


def _seconds(text: str | None) -> float:
    """Return the seconds since 1970 of an ISO 8601 text, NaN for other texts."""
    try:
        # BigQuery writes "2026-03-01 08:00:00 UTC".
        time = datetime.fromisoformat((text or "").strip().removesuffix(" UTC"))
        return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return np.nan
