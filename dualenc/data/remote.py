"""Remote files: ranges and whole copies over https, http, s3 and hf, through fsspec.

Added to fsspec: retries (its HTTP has none), an error when a file changes while it is read, read-ahead for sequential
reads only, and error lines without credentials. URLs may come from an untrusted recipe: `dualenc.data.urls.SCHEMES`
are opened, and no redirect leads from https to anything else.

Not its `filecache` and `blockcache`: they compare versions by `ukey`, which over HTTP is the URL alone, so a changed
file is never noticed; two processes download into the same file; and the cache of blocks grows to the size of the tars.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import urlsplit

import fsspec
from fsspec.caching import ReadAheadCache
from fsspec.callbacks import TqdmCallback

from dualenc.data.cache import cache_folder, unwritable_cache
from dualenc.data.urls import SCHEMES, check_url, display_name, expand_braces
from dualenc.errors import DualencError
from dualenc.files import atomic_path
from dualenc.terminal import without_credentials

ATTEMPTS = 6
FIRST_PAUSE = 0.5
"""Seconds before the second attempt; doubled each time."""
STALL_SECONDS = 30.0
"""An attempt fails after that long without a byte."""
MAX_READ = 4 << 20
"""Bytes of one request when a file is read sequentially."""

_CHANGED = "has changed since it was opened; run the same command again"
_FIRST_READ = 64 << 10
_MAX_GAP = 64 << 10  # a read that begins this close behind the previous one counts as sequential

Result = TypeVar("Result")


def expand(url: str) -> list[str]:
    """The URLs that one names: `{000..123}` counts up, and where files can be listed (s3, hf) `*` and `?` match.

    Raises:
        DualencError: a scheme that is not opened, a glob over http, or nothing that matches.
    """
    check_url(url)
    urls = expand_braces(url)
    scheme = urlsplit(url).scheme
    if scheme in ("http", "https"):
        if "*" in urlsplit(url).path:
            name = display_name(url)
            raise DualencError(f"{name}: files cannot be listed over {scheme}; write {{000..123}} for numbers")
        return urls
    if not any(character in url for character in "*?["):
        return urls
    # A listing is a request like any other, and tried again.
    found = []
    for pattern in urls:
        names = _attempt(display_name(pattern), partial(_file_system(pattern).glob, pattern))
        found += [f"{scheme}://{name}" for name in names]
    if not found:
        raise DualencError(f"{display_name(url)}: nothing there matches; check the URL")
    return sorted(found)


def open_files(urls: Sequence[str]) -> list[RemoteFile]:
    """Open several URLs at a time: each one costs a request."""
    with ThreadPoolExecutor(max_workers=16) as threads:
        return list(threads.map(RemoteFile, urls))


class RemoteFile:
    """One file behind a URL, read at random; safe to fork, to pickle, and to use from several threads.

    Args:
        url: of one of `SCHEMES`.

    Attributes:
        size: in bytes.
        stamp: the server's ETag or modification time; without either, a checksum of both ends of the file.

    Raises:
        DualencError: no such file, not allowed, not reached, or of unknown size.
    """

    def __init__(self, url: str) -> None:
        check_url(url)
        self.url = url
        info = _attempt(str(self), lambda: _info(url))
        if not isinstance(info.get("size"), int):
            raise DualencError(f"{self}: the server does not report its size; download it and give the file")
        self.size = int(info["size"])
        self._version = _version(info)
        self._conditions = _conditions(url, info)
        self._reset()
        self.stamp = self._version
        if not self.stamp:
            ends = self.read(0, _FIRST_READ) + self.read(max(0, self.size - _FIRST_READ), _FIRST_READ)
            self.stamp = hashlib.sha256(ends).hexdigest()

    def _reset(self) -> None:
        self._file: BinaryIO | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return display_name(self.url)

    @property
    def name(self) -> str:
        """The last part of the URL's path."""
        return PurePosixPath(urlsplit(self.url).path).name

    @cached_property
    def key(self) -> str:
        """Cache key of URL, size and stamp."""
        return hashlib.sha256(f"{self.url}\n{self.size}\n{self.stamp}".encode()).hexdigest()[:32]

    def identity(self) -> bytes:
        """Size and stamp, as `dualenc.data.identity.file_identity` of a local file."""
        return f"{self.size} {self.stamp}".encode()

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, or fewer where the file ends.

        Raises:
            DualencError: all attempts failed, the file has changed, or the server sends whole files only.
        """
        # A forked child must not share its parent's connections and lock.
        if self._process != os.getpid():
            self._reset()
        with self._lock:
            if self._file is None:
                self._file = self.open()
            self._file.seek(min(offset, self.size))
            return self._file.read(size)

    def open(self) -> BinaryIO:
        """An open file for libraries that read files, for this process alone; it raises what `read` raises."""
        # fsspec opens empty files over HTTP as streams that cannot seek.
        if not self.size:
            return io.BytesIO()
        file = _attempt(str(self), self._open)
        # Retries sit below the cache, so that a library that reads the file never sees a failed read.
        file.cache = _SequentialReadAhead(0, partial(self._fetch, file.cache.fetcher), self.size)
        return cast(BinaryIO, file)

    def _open(self) -> Any:
        options: dict[str, Any] = {}
        if self._conditions:
            options["headers"] = self._conditions
        else:
            info = _info(self.url)
            self._check_size(info.get("size") if _version(info) == self._version else None)
        if self.url.startswith("http"):
            # Saves a request; s3fs compares no ETags when it is given.
            options["size"] = self.size
        return _file_system(self.url).open(self.url, "rb", cache_type="none", **options)

    def _fetch(self, fetch: Callable[[int, int], bytes], start: int, end: int) -> bytes:
        def fetch_once() -> bytes:
            data = fetch(start, end)
            # A short answer is a broken connection, or another file.
            if len(data) != end - start:
                self._check_size(_info(self.url).get("size"))
                raise OSError(f"{len(data):,} of {end - start:,} bytes came")
            return data

        return _attempt(str(self), fetch_once)

    def _check_size(self, size: object) -> None:
        if size != self.size:
            raise DualencError(f"{self}: {_CHANGED}")

    def copy(self) -> Path:
        """A copy of the whole file in the cache folder, fetched unless it is there; it raises what `read` raises."""
        name = re.sub(r"[^\w.-]", "_", self.name)[-100:] or "file"
        target = cache_folder() / "remote" / self.key / name
        if not target.is_file() or target.stat().st_size != self.size:
            try:
                with atomic_path(target) as part:
                    _attempt(str(self), lambda: self._download(part))
            except OSError as error:
                raise unwritable_cache(target.parent, error) from None
        return target

    def _download(self, part: Path) -> None:
        options: dict[str, Any] = {"headers": self._conditions} if self._conditions else {}
        bar = {"desc": self.name, "unit": "B", "unit_scale": True, "delay": 2, "leave": False}
        _file_system(self.url).get_file(self.url, str(part), callback=TqdmCallback(bar), **options)
        self._check_size(part.stat().st_size)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_file", "_process", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


class _SequentialReadAhead(ReadAheadCache):
    """Read-ahead that doubles while reads are sequential, up to `MAX_READ`, and is off while they are not.

    fsspec's own caches always read ahead, 5 MB by default: a hundred times a random image of a tar.
    """

    _ahead = 0

    def _fetch(self, start: int | None, end: int | None) -> bytes:
        first = start or 0
        last = self.size if end is None else min(end, self.size)
        hit = self.start <= first and last <= self.end
        if not hit:
            sequential = bool(self.cache) and self.start <= first <= self.end + _MAX_GAP
            # Beyond the bytes asked for only as far as requests of `MAX_READ` go.
            self._ahead = min(max(2 * self._ahead, _FIRST_READ), MAX_READ) if sequential else 0
            self.blocksize = max(0, self._ahead - (last - first))
        return super()._fetch(first, last)


def _file_system(url: str) -> Any:
    """The fsspec file system that opens a URL, one for each process: connections do not survive a fork."""
    scheme = urlsplit(url).scheme
    try:
        return _new_file_system(scheme, os.getpid())
    except ImportError:
        package = SCHEMES[scheme]
        raise DualencError(f"{display_name(url)}: {scheme}:// needs {package}; pip install {package}") from None


@cache
def _new_file_system(scheme: str, process: int) -> Any:
    session = {"client_kwargs": _session_options()} if SCHEMES[scheme] == "aiohttp" else {}
    return fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False, **session)


def _session_options() -> dict[str, Any]:
    """Options of an aiohttp session: timeouts, the environment's proxies, and no redirect from https to http."""
    import aiohttp  # an extra of its own

    async def refuse_downgrade(session: Any, context: Any, parameters: Any) -> None:
        target = parameters.response.headers.get("Location", "")
        if parameters.url.scheme == "https" and urlsplit(target).scheme not in ("", "https"):
            source = display_name(str(parameters.url))
            raise DualencError(f"{source}: redirects to {display_name(target)[:80]}; give that URL itself")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse_downgrade)
    # No limit on the total: a whole file may take hours, as long as bytes keep coming.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
    return {"timeout": timeout, "trace_configs": [trace], "trust_env": True}


def _info(url: str) -> dict[str, Any]:
    """The server's current description of a file; its real error where fsspec hides it behind "not found"."""
    system = _file_system(url)
    system.invalidate_cache()
    try:
        return dict(system.info(url))
    except FileNotFoundError as error:
        if isinstance(error.__cause__, Exception) and not isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        raise


def _version(info: dict[str, Any]) -> str | None:
    """The server's name for this version of a file, if it has one."""
    keys = ("ETag", "etag", "Last-Modified", "LastModified", "last_modified", "mtime", "blob_id")
    return next((str(info[key]) for key in keys if info.get(key)), None)


def _conditions(url: str, info: dict[str, Any]) -> dict[str, str]:
    """Headers by which a web server refuses to serve another version of a file; s3fs compares by itself."""
    if not url.startswith("http"):
        return {}
    etag = info.get("ETag") or info.get("etag")
    # A weak ETag ("W/…") promises equal meaning only; servers do not compare by it.
    if isinstance(etag, str) and etag.startswith('"'):
        return {"If-Match": etag}
    changed = info.get("Last-Modified")
    return {"If-Unmodified-Since": changed} if changed else {}


def _attempt(name: str, action: Callable[[], Result]) -> Result:
    """Call `action` until it succeeds, up to `ATTEMPTS` times with growing pauses.

    Raises:
        DualencError: no attempt succeeded, or another one would not help; without credentials.
    """
    failure = ""
    for attempt in range(ATTEMPTS):
        # Growing pauses give a server that restarts time to come back.
        if attempt:
            time.sleep(FIRST_PAUSE * 2 ** (attempt - 1))
        try:
            return action()
        except DualencError:
            raise
        except Exception as error:  # each library has its own
            reason = _reason(error)
            permanent = _permanent(error, reason)
            if permanent:
                raise DualencError(f"{name}: {permanent}") from None
            failure = f"{type(error).__name__}: {reason}"
    raise DualencError(
        f"{name}: cannot be read after {ATTEMPTS} attempts ({failure}); "
        "check the network and the server, then run the same command again"
    )


def _status(error: Exception) -> int | None:
    """The HTTP status of an error of aiohttp, requests or httpx."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _reason(error: Exception) -> str:
    """An error's message in one line without credentials."""
    status = _status(error)
    # aiohttp's own text holds the whole URL, of which the query may hold a key.
    text = str(error) if status is None else f"HTTP {status}: {getattr(error, 'message', '')}"
    # It also names targets of redirects, without a scheme if they have none.
    text = re.sub(r"\?\S*|(?<=//)[^/\s]*@", "", without_credentials(text))
    return " ".join(text.split())[:200] or type(error).__name__


def _permanent(error: Exception, reason: str) -> str | None:
    """What to tell the user of an error that another attempt would not mend; None of others."""
    status = _status(error)
    # The packages that define them may be missing.
    kind = type(error).__name__
    # s3fs turns the server's answer into an OSError.
    if status == 412 or re.search("Precondition ?Failed", f"{error!r} {error.__cause__!r}"):
        return _CHANGED
    if "support range requests" in str(error):
        return "the server sends whole files only; download it and give the file"
    if kind == "TooManyRedirects":
        return "the server redirects without end; give the URL of the file"
    if kind == "OfflineModeIsEnabled":
        return "the hub is switched off; unset HF_HUB_OFFLINE to read from it"
    if status in (401, 403) or isinstance(error, PermissionError) or kind == "NoCredentialsError":
        return f"not allowed ({reason}); check the URL and your credentials"
    if status in (404, 410) or isinstance(error, FileNotFoundError):
        return "no such file on the server; check the URL"
    if status is not None and 400 <= status < 500 and status not in (408, 425, 429):
        return f"the server refuses ({reason}); check the URL"
    return None
