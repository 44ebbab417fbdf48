"""A web server on this machine that serves files as real ones do, and misbehaves on request."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server(ThreadingHTTPServer):
    """Serves `files`, contents by path.

    Attributes:
        files: what there is.
        requests: (method, path, range or None) of all that was asked.
        fail: that many of the next GET requests are answered with `status`.
        stall: that many of the next GET requests send half of the bytes, and then nothing for `stall_seconds`.
        cut: that many of the next GET requests end after half of the bytes.
        ranges: whether parts of files are served.
        told: what it tells of a file's version and compares by: "ETag", "Last-Modified" or None.
        redirects: where the server says that a path is.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, str] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.fail = self.stall = self.cut = 0
        self.status, self.stall_seconds = 503, 5.0
        self.ranges = True
        self.told: str | None = "ETag"
        self.versions: dict[str, int] = {}
        self.etags: dict[str, str] = {}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, name: str, content: bytes) -> str:
        """Serve a file; its URL."""
        self.files[f"/{name}"] = content
        self.versions[f"/{name}"] = self.versions.get(f"/{name}", 0) + 1
        self.etags[f"/{name}"] = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        return f"{self.url}/{name}"

    def gets(self) -> list[tuple[str, str, str | None]]:
        return [request for request in self.requests if request[0] == "GET"]

    def bytes_asked(self) -> int:
        """Of all ranges."""
        ranges = [re.fullmatch(r"bytes=(\d+)-(\d+)", found or "") for _, _, found in self.gets()]
        return sum(int(match[2]) - int(match[1]) + 1 for match in ranges if match)

    def takes(self, trouble: str) -> bool:
        """Whether this request is to have a trouble."""
        with self.lock:
            left = getattr(self, trouble)
            setattr(self, trouble, max(0, left - 1))
            return left > 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path, wanted = self.path.partition("?")[0], self.headers.get("Range")
        self.server.requests.append((self.command, path, wanted))
        content = self.server.files.get(path)
        if path in self.server.redirects:
            return self.head(302, 0, {"Location": self.server.redirects[path]})
        if content is None:
            return self.head(404, 0)
        if body and self.server.takes("fail"):
            return self.head(self.server.status, 0)
        told = {}
        if self.server.told == "ETag":
            told["ETag"] = self.server.etags[path]
        elif self.server.told == "Last-Modified":
            told["Last-Modified"] = formatdate(86400 * self.server.versions[path], usegmt=True)
        asked = {"ETag": "If-Match", "Last-Modified": "If-Unmodified-Since"}
        if any(self.headers.get(asked[name], value) != value for name, value in told.items()):
            return self.head(412, 0)
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted or "") if self.server.ranges else None
        status, part = 200, content
        if match:
            first, last = int(match[1]), min(int(match[2]), len(content) - 1)
            status, part = 206, content[first : last + 1]
            told["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.head(status, len(part), told)
        if not body:
            return None
        if self.server.takes("stall"):
            self.wfile.write(part[: len(part) // 2])
            time.sleep(self.server.stall_seconds)
            self.close_connection = True
        elif self.server.takes("cut"):
            self.wfile.write(part[: len(part) // 2])
            self.close_connection = True
        else:
            self.wfile.write(part)
        return None

    def head(self, status: int, length: int, told: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(told or {}), "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def serving() -> Iterator[Server]:
    """A server for the time of this context."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
