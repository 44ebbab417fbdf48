"""HTTP errors in the form that OpenAI's clients expect, and what becomes one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dualenc.errors import BadSample, DualencError, UnknownId, Unsupported
from dualenc.serve.batching import QueueFull
from dualenc.terminal import printable

log = logging.getLogger("dualenc.serve")

SECURITY_HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "x-frame-options": "DENY"}
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error as OpenAI's clients expect it."""
    default_type = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": _TYPES.get(status, default_type), "param": None, "code": status}
    return JSONResponse({"error": error}, status, {**SECURITY_HEADERS, **(headers or {})})


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    return error_response(error.status_code, str(error.detail), error.headers)


async def _validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
    """The first errors of pydantic in one line, without the values: what was sent need not even be text."""
    lines = []
    for each in error.errors()[:3]:
        field = ".".join(str(part)[:40] for part in each["loc"][1:4]) or "request"  # after "body" or "query"
        lines.append(f"{field}: {each['msg']}")
    return error_response(400, "; ".join(lines)[:500].encode(errors="replace").decode())


async def _queue_full(request: Request, error: QueueFull) -> JSONResponse:
    return error_response(429, str(error), {"retry-after": "1"})


async def _dualenc_error(request: Request, error: DualencError) -> JSONResponse:
    if isinstance(error, UnknownId):
        return error_response(404, str(error))
    if isinstance(error, (BadSample, Unsupported)):
        return error_response(400, str(error))
    # The index is at fault and not the request; the message may name files of the server.
    log.error("%s", printable(error))
    return error_response(503, "the index cannot answer; the server's log says why")


async def _unexpected_error(request: Request, error: Exception) -> JSONResponse:
    return error_response(500, "unexpected error; the server's log says more")


HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    HTTPException: _http_error,
    RequestValidationError: _validation_error,
    QueueFull: _queue_full,
    DualencError: _dualenc_error,
    Exception: _unexpected_error,
}
