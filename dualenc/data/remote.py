"""Files behind URLs: fetched once into the cache folder by fsspec, and read as local files there."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.callbacks import TqdmCallback

from dualenc.data.cache import FIX_CACHE, cache_folder
from dualenc.data.urls import SCHEMES, display_name, split_url
from dualenc.errors import DualencError, explain
from dualenc.files import atomic_path

MAX_FILES = 100_000
"""Files that one URL may name."""

_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")
_VERSION_KEYS = (
    "ETag",
    "etag",
    "Last-Modified",
    "LastModified",
    "last_modified",
    "mtime",
    "blob_id",
    "size",
)


def local_copies(url: str) -> list[Path]:
    """The files that a URL names, as copies in the cache folder; `{000..123}` counts up, `*` matches on s3 and hf.

    A copy is stored by URL and version (ETag, modification time, size): a changed file is fetched again.
    """
    scheme = split_url(url).scheme
    try:
        system = fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError:
        package = SCHEMES[scheme]
        raise DualencError(
            f"{display_name(url)}: {scheme}:// needs {package}; pip install {package}"
        ) from None
    urls = _expand_braces(url)
    if "*" in split_url(url).path:
        urls = _matches(system, scheme, urls)
    folder = cache_folder() / "remote"
    with explain(f"{folder}: cannot write the data cache", FIX_CACHE):
        folder.mkdir(parents=True, exist_ok=True)
    return [_local_copy(system, name, folder) for name in urls]


def _expand_braces(url: str) -> list[str]:
    urls = [url]
    while match := _BRACES.search(urls[0]):
        numbers = range(int(match[1]), int(match[2]) + 1)
        if not 0 < len(numbers) * len(urls) <= MAX_FILES:
            raise DualencError(
                f"{display_name(url)}: {match[0]} names no file, or more than {MAX_FILES:,} together"
            )
        names = [str(number).zfill(len(match[1])) for number in numbers]
        urls = [pattern.replace(match[0], name, 1) for pattern in urls for name in names]
    return urls


def _matches(system: Any, scheme: str, patterns: list[str]) -> list[str]:
    name = display_name(patterns[0])
    if scheme in ("http", "https"):
        raise DualencError(f"{name}: files cannot be listed over {scheme}; write {{000..123}} for numbers")
    paths: list[str] = []
    for pattern in patterns:
        try:
            paths += system.glob(pattern)
        except Exception as error:  # each library has its own
            raise _unreachable(pattern, error) from None
    if not paths:
        raise DualencError(f"{name}: no file matches; check the URL")
    return [f"{scheme}://{path.lstrip('/')}" for path in sorted(paths)]


def _local_copy(system: Any, url: str, folder: Path) -> Path:
    name = re.sub(r"[^\w.-]", "_", PurePosixPath(split_url(url).path).name)
    try:
        info = system.info(url)
        version = [str(info.get(key)) for key in _VERSION_KEYS]
        key = hashlib.sha256(f"{url}\n{version}".encode()).hexdigest()[:32]
        target = folder / key / name
        if not target.is_file():
            bar = {"desc": name, "unit": "B", "unit_scale": True, "delay": 2, "leave": False}
            # Not fsspec's filecache: over HTTP it notices no change, and two ranks would write into one file.
            with atomic_path(target) as part:
                system.get_file(url, str(part), callback=TqdmCallback(bar))
    except DualencError:
        raise
    except Exception as error:  # each library has its own
        raise _unreachable(url, error) from None
    return target


def _unreachable(url: str, error: Exception) -> DualencError:
    # Not the error's own text: it may hold the whole URL, with its keys.
    cause = error.__cause__ or error
    status = getattr(cause, "status", None)
    reason = f"HTTP {status}" if status else type(cause).__name__
    return DualencError(
        f"{display_name(url)}: cannot be fetched ({reason}); check URL, credentials and network"
    )
