"""What a request must pass before anything looks at it: host, token, size, time."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Collection, MutableMapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import h11
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dualenc.serve.metrics import Metrics

OPEN_PATHS = ("/", "/health")
"""Need no token: the page holds no data, and whoever watches over the service asks only whether it lives."""
DISCARDED = 4
"""So many times the largest body is read and forgotten, that a client which sends too much hears why."""
SECURITY_HEADERS = [
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("x-frame-options", "DENY"),
]
"""For uvicorn, which puts them on every response, its own and those to errors that nobody foresaw, too."""
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(Exception):
    """A request that is not answered with what it asks for.

    Attributes:
        status: of HTTP.
        message: why, in a line.
        headers: further ones of the response.
    """

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers or {}

    def response(self) -> JSONResponse:
        """As OpenAI's clients expect an error."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": None, "code": self.status}
        return JSONResponse({"error": error}, self.status, self.headers)


class Gate:
    """ASGI middleware: refuses what is not allowed, and hands on complete requests of bounded size.

    A body is read here, in full and in bounded time, so that nobody behind ever waits for a client.

    Args:
        app: what is behind.
        metrics: counts.
        paths: the known ones; all others are counted as one.
        token: what `Authorization: Bearer …` must bring; None: nothing.
        hosts: names that `Host` may have, or all if None. Without it, a page from elsewhere whose name is made to point
            here (DNS rebinding) could read the answers.
        max_body: bytes of one body.
        max_held: bytes of all bodies at one time.
        body_timeout_s: seconds that a body may take to arrive.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        paths: Collection[str] = (),
        token: str | None = None,
        hosts: Collection[str] | None = None,
        max_body: int = 16 << 20,
        max_held: int = 256 << 20,
        body_timeout_s: float = 10.0,
    ) -> None:
        self.app, self.metrics, self.paths, self.hosts = app, metrics, frozenset(paths), hosts
        self.token = None if token is None else token.encode()
        self.max_body, self.max_held, self.body_timeout_s = max_body, max_held, body_timeout_s
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status, body = time.perf_counter(), 500, bytearray()

        async def send_on(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._check_head(scope)
            if not await self._read(scope, receive, body):
                status = 499  # the client went away; nobody is left to answer
                return
            await self.app(scope, _replay(bytes(body), receive), send_on)
        except Refused as refused:
            await refused.response()(scope, receive, send_on)
        finally:
            self.held -= len(body)
            self.metrics.held_bytes.set(self.held)
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - begin)

    def _check_head(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if self.hosts is not None:
            try:
                host = urlsplit("//" + headers.get(b"host", b"").decode("latin-1")).hostname
            except ValueError:
                host = None
            if host not in self.hosts:
                raise Refused(400, f"this server is not called that; it answers to {', '.join(sorted(self.hosts))}")
        if self.token is not None and scope["path"] not in OPEN_PATHS:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            if kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.token):
                raise Refused(
                    401,
                    "a token is needed: send the header Authorization: Bearer TOKEN",
                    {"www-authenticate": "Bearer"},
                )

    async def _read(self, scope: Scope, receive: Receive, body: bytearray) -> bool:
        """Read the body; whether the client waited."""
        deadline = time.monotonic() + self.body_timeout_s
        size, more = 0, True
        refused: Refused | None = None
        while more:
            try:
                message = await asyncio.wait_for(receive(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                raise refused or Refused(
                    408, f"the request did not arrive within {self.body_timeout_s:g} s; send it faster"
                ) from None
            if message["type"] == "http.disconnect":
                return False
            part = message.get("body", b"")
            size, more = size + len(part), message.get("more_body", False)
            if refused is None:
                if size > self.max_body:
                    refused = Refused(413, f"the request has more than {self.max_body:,} bytes; send a smaller one")
                elif self.held + len(part) > self.max_held:
                    refused = Refused(429, "too many large requests at a time; try again", {"retry-after": "1"})
                else:
                    body += part
                    self.held += len(part)
            if refused is not None and size > DISCARDED * self.max_body:
                break
        if refused is not None:
            raise refused
        self.metrics.held_bytes.set(self.held)
        return True


def _replay(body: bytes, receive: Receive) -> Receive:
    """A body that is there already, then whatever else the client says."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which also ends connections on which no complete head of a request arrives in time."""

    head_timeout_s = 10.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Take what came; wait on if it was not a whole head."""
        super().data_received(data)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._unset_timer()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._unset_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self._refuse(Refused(408, f"no complete request arrived within {self.head_timeout_s:g} s; send it faster"))

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, as uvicorn does, but as other errors look."""
        self._refuse(Refused(400, msg))

    def _refuse(self, refused: Refused) -> None:
        response = refused.response()
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        head = h11.Response(status_code=refused.status, headers=headers, reason=HTTPStatus(refused.status).phrase)
        with suppress(h11.LocalProtocolError):  # an answer was begun already
            for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True  # so that it answers nothing more
        self.transport.close()
