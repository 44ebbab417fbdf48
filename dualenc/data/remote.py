"""Files behind URLs, read in ranges through fsspec: what is needed, when it is needed, and again when that fails.

A read that fails or stalls is tried several times, with growing pauses. A file that changes while it is read is an
error: ids are positions in a file, and half of one with half of another are no data. What is kept on this machine
(indexes of tars, copies of tables of lines) is kept by URL, size and the server's ETag or time of change.

URLs may come from a recipe, which is untrusted: only the schemes in `SCHEMES` are opened, none of which reaches files
of this machine, and no redirect leads from https to anything else. What is read is data like that of a file.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast
from urllib.parse import SplitResult, urlsplit

from tqdm import tqdm

from dualenc.errors import DualencError
from dualenc.files import atomic_path
from dualenc.terminal import without_credentials

SCHEMES = {"https": "aiohttp", "http": "aiohttp", "s3": "s3fs", "hf": "huggingface_hub"}
"""What is opened, and the package behind it."""
ATTEMPTS = 6
FIRST_PAUSE = 0.5
"""Seconds before the second attempt; doubled each time."""
STALL_SECONDS = 30.0
"""Without a byte for that long an attempt has failed."""
LARGEST_READ = 4 << 20
"""Bytes of one request when a file is read from one end to the other."""

_FIRST_READ = 64 << 10
_KEPT = 8  # ranges kept in memory, of each file
_GAP = 64 << 10  # a read that begins that near behind the last one goes on with it
_MOST_FILES = 100_000
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")

Result = TypeVar("Result")


class NoRanges(DualencError):
    """The server sends whole files only."""


def is_url(source: object) -> bool:
    """Whether a source is meant as a URL."""
    return isinstance(source, str) and re.match(r"[A-Za-z][\w+.-]*(://|::)", source) is not None


def shown(source: object) -> str:
    """A source as it may be printed and written down: a URL without password and query, which may hold a key."""
    return without_credentials(re.split(r"[?#]", str(source))[0]) if is_url(source) else str(source)


def split_url(url: str) -> SplitResult:
    """The parts of a URL.

    Raises:
        DualencError: it has none, such as `http://[::1/x`.
    """
    try:
        return urlsplit(url)
    except ValueError as error:
        raise DualencError(f"{shown(url)}: cannot be read as a URL ({error}); mend it") from None


def url_suffix(url: str) -> str:
    """The suffix of the file that a URL names, in lower case, `.gz` put aside."""
    path = PurePosixPath(split_url(url).path)
    return PurePosixPath(path.stem if path.suffix.lower() == ".gz" else path.name).suffix.lower()


def expand(url: str) -> list[str]:
    """The URLs that one means: `{000..123}` counts up, and where files are listed (s3, hf) `*` and `?` match.

    Raises:
        DualencError: a scheme that is not opened, a glob over http, or nothing that matches.
    """
    _check(url)
    urls = [url]
    while match := _BRACES.search(urls[0]):
        first, last = match[1], match[2]
        count = int(last) - int(first) + 1
        if not 0 < count * len(urls) <= _MOST_FILES:
            raise DualencError(f"{shown(url)}: {match[0]} means no file, or more than {_MOST_FILES:,} together")
        numbers = [str(int(first) + step).zfill(len(first)) for step in range(count)]
        urls = [_BRACES.sub(number, one, count=1) for one in urls for number in numbers]
    scheme = urlsplit(url).scheme
    if scheme in ("http", "https") or not any(character in url for character in "*?["):
        if "*" in urlsplit(url).path:
            raise DualencError(f"{shown(url)}: files cannot be listed over {scheme}; write {{000..123}} for numbers")
        return urls
    found = []
    for one in urls:
        names = _tried(shown(one), partial(lambda pattern: _system(pattern).glob(pattern), one))
        found += [f"{scheme}://{name}" for name in names]
    if not found:
        raise DualencError(f"{shown(url)}: nothing there matches; check the URL")
    return sorted(found)


class RemoteFile:
    """One file behind a URL, read at random; safe to fork, to pickle, and to use from several threads.

    Ranges read one behind the other are fetched in growing pieces, up to `LARGEST_READ`; others alone.

    Args:
        url: of one of `SCHEMES`.

    Attributes:
        size: in bytes.
        stamp: the server's ETag or time of change; where it tells none, a checksum of both ends of the file.

    Raises:
        DualencError: no such file, not allowed, not reached, or of unknown size.
    """

    def __init__(self, url: str) -> None:
        _check(url)
        self.url, self._shown = url, shown(url)
        info = _tried(self._shown, lambda: _told(_system(url), url))
        if not isinstance(info.get("size"), int):
            raise DualencError(f"{self}: the server does not tell its size; download it and give the file")
        self.size = int(info["size"])
        etag, changed = info.get("ETag") or info.get("etag"), info.get("Last-Modified")
        self._unchanged: dict[str, str] = {}  # what a web server is to compare
        if url.startswith("http"):  # s3fs compares by itself
            # A weak ETag ("W/…") says that contents mean the same, not that they are; servers do not compare by it.
            if isinstance(etag, str) and etag.startswith('"'):
                self._unchanged = {"If-Match": etag}
            elif changed:
                self._unchanged = {"If-Unmodified-Since": changed}
        self._told_stamp = stamp = _stamp(info)
        self._reset()
        if stamp is None:
            ends = self.read(0, min(self.size, _FIRST_READ)) + self.read(max(0, self.size - _FIRST_READ), _FIRST_READ)
            stamp = hashlib.sha256(ends).hexdigest()
        self.stamp = stamp

    def _reset(self) -> None:
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._ahead, self._process, self._lock = 0, os.getpid(), threading.Lock()
        self._open: Any = None

    def __str__(self) -> str:
        return self._shown

    @property
    def name(self) -> str:
        """The last part of the URL's path."""
        return PurePosixPath(urlsplit(self.url).path).name

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return PurePosixPath(self.name).stem

    @cached_property
    def key(self) -> str:
        """For what is kept of the file: another URL, size or stamp gives another one."""
        return hashlib.sha256(f"{self.url}\n{self.size}\n{self.stamp}".encode()).hexdigest()[:32]

    def identity(self) -> bytes:
        """As `dualenc.data.identity.file_identity`: size and stamp."""
        return f"{self.size} {self.stamp}".encode()

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`, or fewer where the file ends.

        Raises:
            DualencError: all attempts failed, the file has changed since it was opened, or the server sends whole
                files only (`NoRanges`).
        """
        if self._process != os.getpid():  # a forked child shares its parent's connections
            self._reset()
        end = min(offset + size, self.size)
        if offset >= end:
            return b""
        with self._lock:
            near = False
            for start, data in self._kept.items():
                if start <= offset and end <= start + len(data):
                    self._kept.move_to_end(start)
                    return data[offset - start : end - start]
                near |= start <= offset <= start + len(data) + _GAP
            self._ahead = min(max(2 * self._ahead, _FIRST_READ), LARGEST_READ) if near else 0
            data = _tried(str(self), lambda: self._fetch(offset, max(end, min(offset + self._ahead, self.size))))
            self._kept[offset] = data
            self._kept.move_to_end(offset)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return data[: end - offset]

    def _fetch(self, start: int, end: int) -> bytes:
        """One attempt."""
        try:
            if self._open is None:
                info = {} if self._unchanged else _told(_system(self.url), self.url)
                if info and (info.get("size"), _stamp(info)) != (self.size, self._told_stamp):
                    raise DualencError(f"{self}: has changed since it was opened; run the same command again")
                options: dict[str, Any] = {"headers": self._unchanged} if self._unchanged else {}
                if self.url.startswith("http"):
                    options["size"] = self.size  # given to s3fs, it would compare no ETags
                self._open = _system(self.url).open(self.url, "rb", cache_type="none", **options)
            self._open.seek(start)
            data = self._open.read(end - start)
        except Exception as error:
            self._open = None
            if "support range requests" in str(error):
                raise NoRanges(f"{self}: the server sends whole files only; download it and give the file") from None
            if getattr(error, "status", None) == 412 or "PreconditionFailed" in f"{error!r} {error.__cause__!r}":
                raise DualencError(f"{self}: has changed since it was opened; run the same command again") from None
            raise
        if len(data) != end - start:
            self._open = None
            if _told(_system(self.url), self.url).get("size") != self.size:
                raise DualencError(f"{self}: has changed since it was opened; run the same command again")
            raise OSError(f"{len(data):,} of {end - start:,} bytes came")
        return data

    def stream(self, buffered: bool = True) -> BinaryIO:
        """The file as a stream with a position of its own, for libraries that read files, in small steps or large."""
        stream = _Stream(self)
        return cast(BinaryIO, io.BufferedReader(stream, _FIRST_READ) if buffered else stream)

    def copy(self) -> Path:
        """A copy of the whole file in the cache folder, fetched unless it is there.

        Raises:
            DualencError: what `read` raises, or the cache cannot be written.
        """
        from dualenc.data.tables import cache_folder

        name = re.sub(r"[^\w.-]", "_", self.name)[-100:] or "file"
        target = cache_folder() / "remote" / self.key / name
        if target.is_file() and target.stat().st_size == self.size:
            return target
        try:
            with (
                atomic_path(target) as part,
                open(part, "wb") as out,
                tqdm(total=self.size, desc=self.name, unit="B", unit_scale=True, delay=2, leave=False) as bar,
            ):
                try:
                    for start in range(0, self.size, LARGEST_READ):
                        bar.update(out.write(self.read(start, LARGEST_READ)))
                except NoRanges:
                    _tried(str(self), lambda: _system(self.url).get_file(self.url, str(part)))
                    if part.stat().st_size != self.size:
                        raise DualencError(f"{self}: has changed since it was opened; run it again") from None
        except OSError as error:
            reason = f"cannot write the data cache ({error.strerror or error})"
            raise DualencError(f"{target.parent}: {reason}; set HF_DATASETS_CACHE to another folder") from None
        return target

    def __getstate__(self) -> dict[str, Any]:
        dropped = ("_kept", "_ahead", "_open", "_process", "_lock")
        return {name: value for name, value in self.__dict__.items() if name not in dropped}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()


def open_files(urls: Sequence[str]) -> list[RemoteFile]:
    """The files behind some URLs, several at a time: each has to be asked about."""
    with ThreadPoolExecutor(max_workers=16) as threads:
        return list(threads.map(RemoteFile, urls))


class _Stream(io.RawIOBase):
    """A remote file with a position."""

    def __init__(self, file: RemoteFile) -> None:
        self.file, self.position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.file.size}[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        data = self.file.read(self.position, len(buffer))
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def _check(url: str) -> None:
    """Refuse what is not opened, before anything is imported or connected."""
    scheme = split_url(url).scheme
    if "::" in url or scheme not in SCHEMES:
        allowed = ", ".join(f"{name}://" for name in SCHEMES)
        raise DualencError(f"{shown(url)}: not a URL that is opened; give a file of this machine, or one of {allowed}")


_systems: dict[tuple[int, str], Any] = {}
_one_at_a_time = threading.Lock()


def _system(url: str) -> Any:
    """The file system of fsspec that opens a URL, in this process."""
    import fsspec

    scheme = urlsplit(url).scheme
    with _one_at_a_time:
        key = (os.getpid(), scheme)
        if key not in _systems:
            options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
            try:
                if SCHEMES[scheme] == "aiohttp":
                    options["client_kwargs"] = _http_options()
                _systems[key] = fsspec.filesystem(scheme, **options)
            except ImportError:
                package = SCHEMES[scheme]
                raise DualencError(f"{shown(url)}: {scheme}:// needs {package}; pip install {package}") from None
        return _systems[key]


def _http_options() -> dict[str, Any]:
    """For a session of aiohttp: an end to stalling, proxies of the environment, and no redirect from https to http."""
    import aiohttp

    async def check(session: Any, context: Any, parameters: Any) -> None:
        there = parameters.response.headers.get("Location", "")
        if parameters.url.scheme == "https" and urlsplit(there).scheme not in ("", "https"):
            raise DualencError(f"{shown(str(parameters.url))}: redirects to {shown(there)[:80]}; give that URL itself")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(check)
    timeout = aiohttp.ClientTimeout(total=20 * STALL_SECONDS, sock_connect=STALL_SECONDS, sock_read=STALL_SECONDS)
    return {"timeout": timeout, "trace_configs": [trace], "trust_env": True}


def _told(system: Any, url: str) -> dict[str, Any]:
    """What the server says of a file now; the reason where fsspec hides it behind "not found"."""
    try:
        system.invalidate_cache()
        return dict(system.info(url))
    except FileNotFoundError as error:
        if isinstance(error.__cause__, Exception) and not isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        raise


def _stamp(info: dict[str, Any]) -> str | None:
    """What tells one version of a file from another, if the server tells anything."""
    keys = ("ETag", "etag", "Last-Modified", "LastModified", "last_modified", "mtime", "blob_id")
    return next((str(info[key]) for key in keys if info.get(key)), None)


def _tried(name: str, action: Callable[[], Result]) -> Result:
    """Do something remote, again and again with growing pauses if it fails in a way that may pass."""
    pause = FIRST_PAUSE
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except DualencError:
            raise
        except Exception as error:  # each library has its own
            status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
            # aiohttp names the whole URL, of which the query may hold a key.
            text = f"HTTP {status}: {getattr(error, 'message', '')}" if isinstance(status, int) else str(error)
            # It also names where redirects lead, without a scheme if they do.
            text = re.sub(r"\?\S*|(?<=//)[^/\s]*@", "", without_credentials(text))
            reason = " ".join(text.split())[:200] or type(error).__name__
            if type(error).__name__ == "TooManyRedirects":
                raise DualencError(f"{name}: the server redirects without end; give the URL of the file") from None
            no_key = type(error).__name__ == "NoCredentialsError"
            if status in (401, 403) or isinstance(error, PermissionError) or no_key:
                raise DualencError(f"{name}: not allowed ({reason}); check the URL and your credentials") from None
            if isinstance(error, FileNotFoundError) or (status is not None and status in (404, 410)):
                raise DualencError(f"{name}: no such file on the server; check the URL") from None
            if isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429):
                raise DualencError(f"{name}: the server refuses ({reason}); check the URL") from None
            if type(error).__name__ == "OfflineModeIsEnabled":
                raise DualencError(f"{name}: the hub is switched off; unset HF_HUB_OFFLINE to read from it") from None
            if attempt == ATTEMPTS:
                raise DualencError(
                    f"{name}: cannot be read after {ATTEMPTS} attempts ({type(error).__name__}: {reason}); "
                    "check the network and the server, then run the same command again"
                ) from None
        time.sleep(pause)
        pause *= 2
    raise AssertionError("the last attempt returns or raises")
