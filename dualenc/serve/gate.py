"""Middleware that counts requests and rejects them by token, size or time; uvicorn's protocol with a head timeout."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Collection, MutableMapping
from typing import Any

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dualenc.serve.errors import SECURITY_HEADERS, error_response
from dualenc.serve.metrics import Metrics

OPEN_PATHS = ("/", "/health")
"""Paths that need no token: the page holds no data, and health checks ask only whether the service lives."""
MAX_DISCARDED = 4
"""Multiple of the largest body that is read and discarded, so that a client that sends too much reads why."""


class Gate:
    """ASGI middleware that counts requests, rejects them by token, size or time, and passes on complete ones.

    It reads bodies itself: starlette's own limit of a body's size bounds neither the time that it takes nor the memory
    of all bodies, and closes the connection on clients that still send, which then lose the response.

    Args:
        app: the application behind it.
        metrics: counters.
        paths: counted one by one; all others are counted as one, so that clients cannot add metrics.
        token: required as `Authorization: Bearer …`; None: none.
        max_body: bytes of one body; all bodies at one time may have 256 MiB, or twice as much if that is more.
        timeout_s: seconds that a body may take to arrive.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        paths: Collection[str],
        token: str | None,
        max_body: int,
        timeout_s: float,
    ) -> None:
        self.app = app
        self.metrics = metrics
        self.paths = paths
        self.token = None if token is None else token.encode()
        self.max_body = max_body
        self.max_held = max(256 << 20, 2 * max_body)
        self.timeout_s = timeout_s
        self.held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin = time.perf_counter()
        status = 500  # unless a response begins
        body = bytearray()

        async def send_on(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        try:
            self._check_token(scope)
            await self._read(Request(scope, receive), body)
            await self.app(scope, _replay(bytes(body), receive), send_on)
        except HTTPException as error:
            response = error_response(error.status_code, error.detail, error.headers)
            await response(scope, receive, send_on)
        except ClientDisconnect:
            status = 499  # nginx's number for a client that went away; nobody is left to answer
        finally:
            self.held -= len(body)
            self.metrics.held_bytes.set(self.held)
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - begin)

    def _check_token(self, scope: Scope) -> None:
        if self.token is None or scope["path"] in OPEN_PATHS:
            return
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self.token):
            message = "a token is needed: send the header Authorization: Bearer TOKEN"
            raise HTTPException(401, message, {"www-authenticate": "Bearer"})

    async def _read(self, request: Request, body: bytearray) -> None:
        """Read the body, within the limits."""
        size = 0
        error: HTTPException | None = None
        try:
            with anyio.fail_after(self.timeout_s):
                async for part in request.stream():
                    size += len(part)
                    if size > self.max_body:
                        error = HTTPException(413, f"the request has more than {self.max_body:,} bytes; shorten it")
                    elif self.held + len(part) > self.max_held:
                        error = HTTPException(429, "too many large requests at a time; try again", {"retry-after": "1"})
                    if error is None:
                        body += part
                        self.held += len(part)
                    elif size > MAX_DISCARDED * self.max_body:
                        break
        except TimeoutError:
            message = f"the request did not arrive within {self.timeout_s:g} s; send it faster"
            raise error or HTTPException(408, message) from None
        if error is not None:
            raise error
        self.metrics.held_bytes.set(self.held)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read, then the client's further messages."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 that closes a connection whose request's head does not arrive in time.

    uvicorn's own timeout begins after the first response.
    """

    head_timeout_s = 10.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        """Pass the data on; the timer runs until it completes a head."""
        super().data_received(data)
        self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def _set_timer(self) -> None:
        waits_for_head = self.cycle is None or self.cycle.response_complete
        if not waits_for_head:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
