"""URLs as sources: which ones are opened, which files they name, and how they are shown without credentials."""

from __future__ import annotations

import re
from pathlib import PurePath, PurePosixPath
from urllib.parse import SplitResult, urlsplit

from dualenc.errors import DualencError
from dualenc.terminal import without_credentials

SCHEMES = {"https": "aiohttp", "http": "aiohttp", "s3": "s3fs", "hf": "huggingface_hub"}
"""Schemes that are opened, and the package that each one needs. None reaches files or programs of this machine."""
MAX_FILES = 100_000
"""Files that one URL may name."""

_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def is_url(source: object) -> bool:
    """Whether a source is written as a URL."""
    return isinstance(source, str) and re.match(r"[A-Za-z][\w+.-]*(://|::)", source) is not None


def display_name(source: object) -> str:
    """A source for messages and reports: of a URL without password, query and fragment, which may hold a key."""
    if not is_url(source):
        return str(source)
    return without_credentials(re.split(r"[?#]", str(source))[0])


def split_url(url: str) -> SplitResult:
    """The parts of a URL; a `DualencError` if it has none, such as `http://[::1/x`."""
    try:
        return urlsplit(url)
    except ValueError as error:
        raise DualencError(f"{display_name(url)}: cannot be read as a URL ({error}); mend it") from None


def file_format(path: PurePath) -> str:
    """The suffix that decides how a file is read, in lower case and without `.gz`."""
    return PurePath(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


def url_suffix(url: str) -> str:
    """The `file_format` of the file that a URL names."""
    return file_format(PurePosixPath(split_url(url).path))


def check_url(url: str) -> None:
    """Refuse other schemes, and chains such as `zip::…`, before anything is imported or connected."""
    scheme = split_url(url).scheme
    if "::" in url or scheme not in SCHEMES:
        allowed = ", ".join(f"{name}://" for name in SCHEMES)
        raise DualencError(
            f"{display_name(url)}: not a URL that is opened; give a file of this machine, or one of {allowed}"
        )


def expand_braces(url: str) -> list[str]:
    """The URLs that `{000..123}` stands for, in order.

    Raises:
        DualencError: an empty range, or more than `MAX_FILES` URLs.
    """
    urls = [url]
    while match := _BRACES.search(urls[0]):
        first = int(match[1])
        last = int(match[2])
        count = last - first + 1
        if not 0 < count * len(urls) <= MAX_FILES:
            raise DualencError(f"{display_name(url)}: {match[0]} means no file, or more than {MAX_FILES:,} together")
        numbers = [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
        urls = [_BRACES.sub(number, pattern, count=1) for pattern in urls for number in numbers]
    return urls
