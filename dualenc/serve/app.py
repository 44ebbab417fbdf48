"""The service's HTTP interface: search, embeddings in OpenAI's form, health, metrics, and the page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any, Literal

import anyio
import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from dualenc import __version__
from dualenc.encoders.tokenizer import check_texts
from dualenc.errors import DualencError
from dualenc.search import searcher as searching
from dualenc.serve.errors import HANDLERS
from dualenc.serve.gate import Gate
from dualenc.serve.schema import (
    MAX_CHARACTERS,
    EmbeddingsRequest,
    Result,
    SearchLink,
    SearchRequest,
    SearchResponse,
)
from dualenc.serve.service import Service

router = APIRouter()


@dataclass(frozen=True)
class Settings:
    """How an index is served.

    Attributes:
        token: required of requests, except for the page and /health; None: none.
        hosts: accepted values of `Host`; None: any. Without it, a page from elsewhere whose name is made to point here
            (DNS rebinding) could read the answers.
        max_body: largest request in bytes.
        timeout_s: seconds that a request may take to arrive, and again to be answered.
        watch: reload when the folder of the index is written anew, and on SIGHUP.
        rerank_top: how many of the best a cross-encoder scores again, where the service has one.
    """

    token: str | None = None
    hosts: Sequence[str] | None = None
    max_body: int = 16 << 20
    timeout_s: float = 10.0
    watch: bool = True
    rerank_top: int = 100


def create_app(service: Service, settings: Settings) -> FastAPI:
    """The ASGI application of a service."""
    paths = {"/openapi.json", *(route.path for route in router.routes if isinstance(route, APIRoute))}
    gate = Middleware(
        Gate,
        metrics=service.metrics,
        paths=paths,
        token=settings.token,
        max_body=settings.max_body,
        timeout_s=settings.timeout_s,
    )
    app = FastAPI(
        title="dualenc",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        exception_handlers=HANDLERS,
        middleware=[gate, Middleware(TrustedHostMiddleware, allowed_hosts=settings.hosts, www_redirect=False)],
    )
    app.state.service = service
    app.state.settings = settings
    app.include_router(router)
    return app


def _settings(request: Request) -> Settings:
    return request.app.state.settings


def _service(request: Request) -> Service:
    return request.app.state.service


HasSettings = Annotated[Settings, Depends(_settings)]
HasService = Annotated[Service, Depends(_service)]


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Watch the index while the server runs; answer what waits at its end."""
    service: Service = app.state.service
    settings: Settings = app.state.settings
    watching = asyncio.create_task(service.watch()) if settings.watch else None
    if settings.watch and threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, service.reload_quietly))
    yield
    if watching is not None:
        watching.cancel()
    await asyncio.to_thread(service.close)


def content_security_policy(page: str) -> str:
    """A policy that allows only the page's own script and style, by their hashes, and no other origin."""

    def hashes(tag: str) -> str:
        sources = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources]
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; img-src 'self' blob: data:; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    )


PAGE = resources.files("dualenc.serve").joinpath("page.html").read_text(encoding="utf-8")
POLICY = content_security_policy(PAGE)


@router.get("/", include_in_schema=False)
async def show_page() -> HTMLResponse:
    """The page to search on."""
    return HTMLResponse(PAGE, headers={"content-security-policy": POLICY})


@router.get("/health")
async def health(service: HasService) -> dict[str, Any]:
    """Whether the service and its search thread live."""
    if not service.batcher.is_alive:
        raise HTTPException(503, "the thread that searches has ended; start the server again")
    return {"status": "ok", "generation": service.generation}


@router.get("/info")
async def info(service: HasService, settings: HasSettings) -> dict[str, Any]:
    """What is searched: how many vectors, with what, and by which columns results can be filtered."""
    searcher = service.searcher
    return {
        "name": searcher.folder.resolve().name,
        "vectors": len(searcher),
        "takes": list(searcher.takes),
        "columns": dict(searcher.index.column_kinds),
        "filter": searcher.filter_language,
        "images": service.pictures is not None,
        "texts": searcher.texts is not None,
        "hybrid": searcher.lexical is not None,
        "rerank": settings.rerank_top if searcher.judge is not None else 0,
        "generation": service.generation,
        "loaded": round(service.changed),
    }


@router.get("/search")
async def search_by_link(
    service: HasService, settings: HasSettings, link: Annotated[SearchLink, Query()]
) -> SearchResponse:
    """Search with a text, or for items like those with these ids."""
    return await _search(service, settings, link)


@router.post("/search")
async def search(service: HasService, settings: HasSettings, request: SearchRequest) -> SearchResponse:
    """Search with a text, or for items like those with these ids."""
    return await _search(service, settings, request)


@router.post("/search/image", openapi_extra={"requestBody": {"required": True, "content": {"image/*": {}}}})
async def search_with_image(
    service: HasService, settings: HasSettings, link: Annotated[SearchLink, Query()], request: Request
) -> SearchResponse:
    """Search with the image that is the body of the request."""
    return await _search(service, settings, link, await request.body())


async def _search(
    service: Service, settings: Settings, request: SearchRequest, image: bytes | None = None
) -> SearchResponse:
    begin = time.perf_counter()
    # A reload may exchange them while this request waits.
    searcher = service.searcher
    generation = service.generation
    if (request.text is not None) + bool(request.ids) + (image is not None) != 1:
        raise HTTPException(400, "search with one of text, image and ids")
    can_rerank = request.text is not None and searcher.judge is not None
    wants_rerank = can_rerank if request.rerank is None else request.rerank
    with _bad_request(), _time_limit(settings.timeout_s):
        if image is not None:
            query = await asyncio.to_thread(service.prepare_image, searcher, image)
        elif request.ids:
            query = searching.Query(ids=tuple(dict.fromkeys(request.ids)))
        else:
            query = searching.Query(searcher.query_side("text"), request.text)
        query = query._replace(
            k=request.k,
            where=searcher.conditions(request.where),
            filter=request.filter,
            hybrid=request.hybrid,
            weight=request.weight,
            rerank=settings.rerank_top if wants_rerank else 0,
        )
        searcher.check(query)
        # Off the event loop: an engine parses its filter, perhaps over the network.
        await asyncio.to_thread(searcher.check_filter, request.filter)
    with _time_limit(settings.timeout_s):
        hits = await asyncio.wrap_future(service.search(searcher, query))
    results = [
        Result(rank=rank, id=hit.id, score=round(hit.score, 6), snippet=hit.snippet, columns=hit.columns)
        for rank, hit in enumerate(hits, 1)
    ]
    milliseconds = round(1000 * (time.perf_counter() - begin), 2)
    return SearchResponse(results=results, took_ms=milliseconds, generation=generation)


@router.get("/texts")
async def whole_text(service: HasService, id: Annotated[str, Field(max_length=4096)]) -> dict[str, str]:
    """The whole text of an item of the index."""
    text = await asyncio.to_thread(service.text, id)
    if text is None:
        raise HTTPException(404, "no text of that id; the index keeps texts if it was built with --texts")
    return {"id": id, "text": text}


@router.get("/images", responses={200: {"content": {"image/jpeg": {}}}}, response_class=Response)
async def thumbnail(service: HasService, id: Annotated[str, Field(max_length=4096)]) -> Response:
    """A small JPEG of an image of the index."""
    content = await asyncio.to_thread(service.thumbnail, id)
    if content is None:
        raise HTTPException(404, "no image of that id")
    return Response(content, media_type="image/jpeg", headers={"cache-control": "private, max-age=3600"})


@router.post("/v1/embeddings")
async def embeddings(service: HasService, settings: HasSettings, request: EmbeddingsRequest) -> dict[str, Any]:
    """Vectors of texts, in OpenAI's form; `model` may be anything, there is one."""
    searcher = service.searcher
    texts = check_texts([request.input] if isinstance(request.input, str) else request.input)
    max_texts = service.batcher.queue_size
    if not 1 <= len(texts) <= max_texts:
        raise HTTPException(400, f"input has {len(texts)} texts; send 1 to {max_texts}")
    for place, text in enumerate(texts):
        if not text.strip() or len(text) > MAX_CHARACTERS:
            raise HTTPException(400, f"input[{place}] is empty or has more than {MAX_CHARACTERS:,} characters; mend it")
    with _bad_request():
        side = _text_side(searcher, request.input_type)
    with _time_limit(settings.timeout_s):
        embedded = await asyncio.gather(*map(asyncio.wrap_future, service.embed(searcher, side, texts)))
    dim = len(embedded[0].vector)
    if request.dimensions not in (None, dim):
        raise HTTPException(400, f"dimensions is {request.dimensions}; the model gives {dim}")
    data = [
        {"object": "embedding", "index": place, "embedding": _encode(each.vector, request.encoding_format)}
        for place, each in enumerate(embedded)
    ]
    tokens = sum(each.tokens for each in embedded)
    name = str(searcher.index.meta.get("model", "dualenc")).rstrip("/").rpartition("/")[2]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": name, "usage": usage}


def _text_side(searcher: searching.Searcher, input_type: str) -> Literal["left", "right"]:
    """The side that encodes texts; of a query-document model, the one asked for."""
    if input_type == "document" and searcher.encoder.kind == "query-document":
        return "right"
    return searcher.query_side("text")


def _encode(vector: np.ndarray, encoding: str) -> list[float] | str:
    """As numbers, or base64 of little-endian float32."""
    if encoding == "float":
        return vector.tolist()
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


@router.post("/reload")
async def reload(service: HasService, settings: HasSettings) -> dict[str, Any]:
    """Open the index again; always needs a token."""
    if settings.token is None:
        raise HTTPException(403, "the server has no token, and reloads on SIGHUP or when the index is written anew")
    try:
        return {"generation": await asyncio.to_thread(service.reload)}
    except DualencError:
        raise HTTPException(409, "not reloaded, the old index stays; the server's log says why") from None


@router.get("/metrics", response_class=Response)
async def metrics(service: HasService) -> Response:
    """Prometheus metrics."""
    return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Beyond the limit, what has not begun is cancelled."""
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError:
        raise HTTPException(504, f"no answer within {seconds:g} s; the server is busy, try again later") from None


@contextmanager
def _bad_request() -> Iterator[None]:
    """Errors within it are the request's fault, and not the index's."""
    try:
        yield
    except DualencError as error:
        raise HTTPException(400, str(error)) from None
