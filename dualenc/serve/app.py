"""The search service: an index over HTTP, with a page to search on."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import threading
from importlib import resources
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualenc import __version__
from dualenc.decoding import decode_upload
from dualenc.errors import BadSample, DualencError, UnknownId, Unsupported
from dualenc.search import searcher as searching
from dualenc.terminal import printable

MAX_BODY = 16 << 20
"""Bytes of a request."""
MAX_RESULTS = 1000
MAX_CHARACTERS = 32_768
SERVED_FILTERS = ("JSON",)
"""Filter languages that are data. SQL is not: it reads what the owner of the connection may read."""
PAGE = resources.files("dualenc.serve").joinpath("page.html").read_text(encoding="utf-8")

log = logging.getLogger("dualenc.serve")
router = APIRouter()
Name = Annotated[str, Field(max_length=4096)]


class SearchRequest(BaseModel):
    """What to search with: a text, or ids of the index for similar items."""

    model_config = ConfigDict(extra="forbid")
    text: Annotated[str, Field(max_length=MAX_CHARACTERS)] | None = None
    ids: Annotated[list[Name], Field(max_length=100)] = []
    k: Annotated[int, Field(ge=1, le=MAX_RESULTS)] = 10
    where: Annotated[
        list[Name], Field(max_length=32, description="such as year>=2020; all must hold")
    ] = []
    filter: Annotated[
        str, Field(max_length=MAX_CHARACTERS, description="of an engine, in its own language")
    ] = ""
    hybrid: Literal["rrf", "weighted"] | None = None
    weight: Annotated[float, Field(ge=0, le=1, description="of the vectors in hybrid search")] = 0.5
    rerank: Annotated[bool | None, Field(description="by default if there is a cross-encoder")] = None

    @field_validator("text")
    @classmethod
    def _not_blank(cls, text: str | None) -> str | None:
        if text is not None and not text.strip():
            raise ValueError("the text is empty")
        return text


class SearchLink(SearchRequest):
    """The same in the query of a link, where `id` may repeat and unknown parameters are ignored."""

    model_config = ConfigDict(extra="ignore")
    ids: Annotated[list[Name], Field(max_length=100)] = Field(default=[], alias="id")


class BodyLimit:
    """Middleware that refuses a request whose body is larger than `MAX_BODY`."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY:
                raise HTTPException(413, f"the body has more than {MAX_BODY:,} bytes")
            return message

        await self.app(scope, limited, send)


class Service:
    """An open index that answers one request at a time."""

    def __init__(self, searcher: searching.Searcher, rerank_top: int = 100) -> None:
        self.searcher = searcher
        self.rerank_top = rerank_top
        self.lock = threading.Lock()

    def search(self, request: SearchRequest, image: bytes | None = None) -> dict[str, Any]:
        """Search with a text, ids or an uploaded image. Blocks until earlier requests are answered."""
        with self.lock:
            try:
                query = self._query(request, image)
            except DualencError as error:
                raise HTTPException(400, str(error)) from None
            hits = self.searcher.search(query)
        results = []
        for rank, hit in enumerate(hits, 1):
            score = round(hit.score, 6)
            row = {
                "rank": rank,
                "id": hit.id,
                "score": score,
                "snippet": hit.snippet,
                "columns": hit.columns,
            }
            results.append(row)
        return {"results": results}

    def _query(self, request: SearchRequest, image: bytes | None) -> searching.Query:
        searcher = self.searcher
        if (request.text is not None) + bool(request.ids) + (image is not None) != 1:
            raise Unsupported("search with one of text, image and ids")
        if request.filter and searcher.filter_language not in ("", *SERVED_FILTERS):
            raise Unsupported("this engine takes no filter over HTTP; give conditions (where)")
        if image is not None:
            query = searching.Query(searcher.query_side("image"), decode_upload(image, "the upload"))
        elif request.ids:
            query = searching.Query(ids=tuple(dict.fromkeys(request.ids)))
        else:
            query = searching.Query(searcher.query_side("text"), request.text)
        can_rerank = request.text is not None and searcher.cross_encoder is not None
        wants_rerank = can_rerank if request.rerank is None else request.rerank
        query = query._replace(
            k=request.k,
            where=searcher.conditions(request.where),
            filter=request.filter,
            hybrid=request.hybrid,
            weight=request.weight,
            rerank=self.rerank_top if wants_rerank else 0,
        )
        searcher.check(query)
        return query


@router.get("/health")
def health(request: Request) -> dict[str, Any]:
    """What is searched: the number of vectors, and what a query may contain."""
    service: Service = request.app.state.service
    searcher = service.searcher
    language = searcher.filter_language
    return {
        "status": "ok",
        "name": searcher.folder.resolve().name,
        "vectors": len(searcher),
        "takes": list(searcher.takes),
        "columns": dict(searcher.index.column_kinds),
        "filter": language if language in SERVED_FILTERS else "",
        "texts": searcher.texts is not None,
        "hybrid": searcher.lexical is not None,
        "rerank": service.rerank_top if searcher.cross_encoder is not None else 0,
    }


@router.get("/search")
def search_by_link(request: Request, link: Annotated[SearchLink, Query()]) -> dict[str, Any]:
    """Search with a text, or for items similar to those with these ids."""
    return request.app.state.service.search(link)


@router.post("/search")
def search_by_body(request: Request, body: SearchRequest) -> dict[str, Any]:
    """Search with a text, or for items similar to those with these ids."""
    return request.app.state.service.search(body)


@router.post(
    "/search/image", openapi_extra={"requestBody": {"required": True, "content": {"image/*": {}}}}
)
async def search_with_image(request: Request, link: Annotated[SearchLink, Query()]) -> dict[str, Any]:
    """Search with the image that is the body of the request."""
    return await run_in_threadpool(request.app.state.service.search, link, await request.body())


@router.get("/texts")
def whole_text(request: Request, id: Name) -> dict[str, str]:
    """The whole text of an item of the index."""
    service: Service = request.app.state.service
    if service.searcher.texts is None:
        raise HTTPException(404, "the index was built without --texts")
    with service.lock:
        try:
            return {"id": id, "text": service.searcher.texts.of_ids([id])[0]}
        except DualencError:
            raise HTTPException(404, "no text of that id") from None


@router.get("/", include_in_schema=False)
def show_page() -> HTMLResponse:
    """The page to search on; its policy allows only its own script and style, and no other origin."""
    sources = {}
    for tag in ("script", "style"):
        code = PAGE.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        sources[tag] = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{sources['script']}'; style-src 'sha256-{sources['style']}'; "
        "img-src blob: data:; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    )
    return HTMLResponse(PAGE, headers={"content-security-policy": policy})


def _validation_error(request: Request, error: Exception) -> JSONResponse:
    """Pydantic's first errors in one line, without the values, which need not be valid Unicode or JSON."""
    assert isinstance(error, RequestValidationError)
    messages = [f"{'.'.join(map(str, each['loc'][1:4]))}: {each['msg']}" for each in error.errors()[:3]]
    line = re.sub(r"\s+", " ", "; ".join(messages))[:500]
    return JSONResponse({"detail": line.encode(errors="replace").decode()}, 400)


def _dualenc_error(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, UnknownId):
        return JSONResponse({"detail": str(error)}, 404)
    if isinstance(error, (BadSample, Unsupported)):
        return JSONResponse({"detail": str(error)}, 400)
    # The index is at fault, and the message may name files of the server.
    log.error("%s", printable(error))
    return JSONResponse({"detail": "the index cannot answer; the server's log says why"}, 503)


def create_app(service: Service, hosts: list[str] | None = None) -> FastAPI:
    """Create the ASGI application.

    Args:
        service: what answers.
        hosts: accepted values of the header `Host`; None: any. On a loopback address this keeps web pages of other
            origins from reading the answers under a name that resolves to this machine (DNS rebinding).
    """
    app = FastAPI(title="dualenc", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(router)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(DualencError, _dualenc_error)
    app.add_middleware(BodyLimit)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    return app
