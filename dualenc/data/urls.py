"""URLs as sources: which ones are opened, and how they are shown without credentials."""

from __future__ import annotations

import re
from pathlib import PurePath, PurePosixPath
from urllib.parse import SplitResult, urlsplit

from dualenc.errors import DualencError
from dualenc.terminal import without_credentials

SCHEMES = {"https": "aiohttp", "http": "aiohttp", "s3": "s3fs", "hf": "huggingface_hub"}
"""Schemes that are opened, and the package that each one needs. None reaches files or programs of this machine."""


def is_url(source: object) -> bool:
    """Whether a source is written as a URL."""
    return isinstance(source, str) and re.match(r"[A-Za-z][\w+.-]*(://|::)", source) is not None


def display_name(source: object) -> str:
    """A source for messages and reports: of a URL without password, query and fragment, which may hold a key."""
    if not is_url(source):
        return str(source)
    return without_credentials(re.split(r"[?#]", str(source))[0])


def split_url(url: str) -> SplitResult:
    """The parts of a URL; a `DualencError` for another scheme than `SCHEMES`, or a chain such as `zip::…`."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise DualencError(f"{display_name(url)}: not a valid URL ({error}); fix it") from None
    if "::" in url or parts.scheme not in SCHEMES:
        allowed = ", ".join(f"{name}://" for name in SCHEMES)
        raise DualencError(
            f"{display_name(url)}: not a URL that is opened; give a local file, or one of {allowed}"
        )
    return parts


def file_format(path: PurePath) -> str:
    """The suffix that decides how a file is read, in lower case and without `.gz` or `.zst`."""
    return PurePath(path.stem if path.suffix.lower() in (".gz", ".zst") else path.name).suffix.lower()


def url_suffix(url: str) -> str:
    """The `file_format` of the file that a URL names."""
    return file_format(PurePosixPath(split_url(url).path))
