"""The service's HTTP interface: search, embeddings in OpenAI's form, health, metrics, and the page."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from importlib import resources
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException

from dualenc import __version__
from dualenc.encoders.tokenizer import check_texts
from dualenc.errors import BadSample, DualencError, UnknownId, Unsupported
from dualenc.search import searcher as searching
from dualenc.serve.batching import QueueFull
from dualenc.serve.gate import Gate, Refused
from dualenc.serve.service import Service
from dualenc.terminal import printable

log = logging.getLogger("dualenc.serve")

MOST_RESULTS = 1000
MOST_IDS = 100
MOST_CHARACTERS = 32_768
MOST_CONDITIONS = 32
MOST_FORM_FIELDS = 2 * MOST_CONDITIONS

T = TypeVar("T")
Text = Annotated[str, Field(max_length=MOST_CHARACTERS, description="text to search with")]
Ids = Annotated[list[Annotated[str, Field(max_length=4096)]], Field(max_length=MOST_IDS, description="more like these")]
Words = Annotated[
    list[Annotated[str, Field(max_length=4096)]],
    Field(max_length=MOST_CONDITIONS, description="conditions such as year>=2020 or lang=en,de; all must hold"),
]
Filter = Annotated[str, Field(max_length=MOST_CHARACTERS, description="of an engine, in its own language: SQL or JSON")]


class SearchRequest(BaseModel):
    """What to search with: a text, or ids of the index; an image is uploaded as multipart/form-data."""

    model_config = ConfigDict(extra="forbid")
    text: Text | None = None
    ids: Ids = []
    k: Annotated[int, Field(ge=1, le=MOST_RESULTS, description="how many results")] = 10
    where: Words = []
    filter: Filter = ""
    hybrid: Annotated[
        Literal["rrf", "weighted"] | None, Field(description="fuse with BM25, by reciprocal ranks or weighted scores")
    ] = None
    weight: Annotated[float, Field(ge=0, le=1, description="of the vectors in hybrid; BM25 has the rest")] = 0.5
    rerank: Annotated[
        bool | None, Field(description="score the best again by the cross-encoder; by default if there is one")
    ] = None

    @model_validator(mode="after")
    def _not_blank(self) -> SearchRequest:
        if self.text is not None and not self.text.strip():
            raise ValueError("the text is empty")
        return self


class Result(BaseModel):
    """One item of the index."""

    rank: int
    id: str
    score: float
    snippet: str = ""
    columns: dict[str, Any] = {}


class SearchResponse(BaseModel):
    """The best items, best first."""

    results: list[Result]
    took_ms: float
    generation: int


class EmbeddingsRequest(BaseModel):
    """OpenAI's request, and which side of the model is to encode."""

    model_config = ConfigDict(extra="ignore")
    input: str | list[str]
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    input_type: Annotated[
        Literal["query", "document"], Field(description="not OpenAI's: which side of a query-document model encodes")
    ] = "query"


def create_app(
    service: Service,
    *,
    token: str | None = None,
    hosts: Sequence[str] | None = None,
    max_body: int = 16 << 20,
    timeout_s: float = 10.0,
    watch: bool = True,
    rerank_top: int = 100,
) -> FastAPI:
    """The ASGI application of a service.

    Args:
        service: what answers.
        token: that requests must bring, except for the page and /health; None: none.
        hosts: names by which the server may be called; None: any.
        max_body: largest request in bytes.
        timeout_s: seconds that a request may take to arrive, and again to be answered.
        watch: reload when the folder of the index is written anew, and on SIGHUP.
        rerank_top: how many of the best a cross-encoder scores again, where the service has one.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop, tasks = asyncio.get_running_loop(), []
        if watch:
            tasks.append(asyncio.create_task(service.watch()))
            if threading.current_thread() is threading.main_thread():
                loop.add_signal_handler(signal.SIGHUP, lambda: loop.run_in_executor(None, _reload_quietly, service))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.to_thread(service.close)

    app = FastAPI(title="dualenc", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    page = resources.files("dualenc.serve").joinpath("page.html").read_text(encoding="utf-8")

    async def answered(futures: Sequence[Future[T]]) -> list[T]:
        """Wait for answers, no longer than allowed; what is not begun by then is left out."""
        waiting = asyncio.gather(*map(asyncio.wrap_future, futures))
        try:
            return await asyncio.wait_for(waiting, timeout_s)
        except asyncio.TimeoutError:
            raise Refused(504, f"no answer within {timeout_s:g} s; the server is busy, try again later") from None

    def busy() -> Refused:
        return Refused(429, f"{service.queue_size} queries wait already; try again", {"retry-after": "1"})

    async def search_for(wanted: SearchRequest, image: bytes | None) -> SearchResponse:
        begin, searcher, generation = time.perf_counter(), service.searcher, service.generation
        if (wanted.text is not None) + bool(wanted.ids) + (image is not None) != 1:
            raise Refused(400, "search with one of text, image and ids")
        if wanted.where and not searcher.columns:
            raise Refused(400, "the index keeps no columns to filter by; leave where out")
        if wanted.where and searcher.filter_language:
            raise Refused(400, f"this engine filters by {searcher.filter_language}; give filter instead of where")
        try:
            where = searcher.conditions(wanted.where)
            # Off the event loop: an engine parses it, perhaps over the network.
            await asyncio.to_thread(searcher.check_filter, wanted.filter)
            if image is not None:
                query = await asyncio.wait_for(asyncio.to_thread(service.prepare_image, searcher, image), timeout_s)
            elif wanted.ids:
                query = searching.Query(ids=tuple(dict.fromkeys(wanted.ids)))
            else:
                query = searching.Query(searcher.query_side("text"), wanted.text)
        except asyncio.TimeoutError:
            raise Refused(504, f"the image was not decoded within {timeout_s:g} s; try again later") from None
        except DualencError as error:
            raise Refused(400, str(error)) from None
        if wanted.hybrid is not None and (wanted.text is None or searcher.lexical is None):
            raise Refused(400, "hybrid search needs a text, and an index that was built with --bm25; leave it out")
        judged = wanted.text is not None and searcher.judge is not None and wanted.rerank is not False
        if wanted.rerank and not judged:
            raise Refused(400, "reranking needs a text, and a server started with --rerank; leave it out")
        if judged and wanted.k > rerank_top:
            raise Refused(400, f"k is {wanted.k}, and {rerank_top} are reranked; ask for fewer, or with rerank=false")
        fused: dict[str, Any] = {"hybrid": wanted.hybrid, "weight": wanted.weight, "rerank": judged * rerank_top}
        try:
            future = service.search(searcher, query._replace(k=wanted.k, where=where, filter=wanted.filter, **fused))
        except QueueFull:
            raise busy() from None
        hits = (await answered([future]))[0]
        results = [
            Result(rank=rank, id=hit.id, score=round(hit.score, 6), snippet=hit.snippet, columns=hit.columns)
            for rank, hit in enumerate(hits, 1)
        ]
        took = round(1000 * (time.perf_counter() - begin), 2)
        return SearchResponse(results=results, took_ms=took, generation=generation)

    @app.get("/", include_in_schema=False)
    async def show_page() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": content_security_policy(page)})

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether the service lives, and its thread that searches."""
        if not service.is_alive:
            raise Refused(503, "the thread that searches has ended; start the server again")
        return {"status": "ok", "generation": service.generation}

    @app.get("/info")
    async def info() -> dict[str, Any]:
        """What is searched: how many vectors, with what, and by which columns results can be filtered."""
        searcher = service.searcher
        return {
            "name": searcher.folder.resolve().name,
            "vectors": len(searcher),
            "takes": list(searcher.takes),
            "columns": dict(searcher.columns),
            "filter": searcher.filter_language,
            "images": service.pictures is not None,
            "hybrid": searcher.lexical is not None,
            "rerank": rerank_top if searcher.judge is not None else 0,
            "generation": service.generation,
            "loaded": round(service.changed),
        }

    @app.get("/search")
    async def search_by_link(
        text: Text | None = None,
        id: Annotated[Ids, Query()] = [],  # noqa: B006
        k: int = 10,
        where: Annotated[Words, Query()] = [],  # noqa: B006
        filter: Filter = "",
        hybrid: Literal["rrf", "weighted"] | None = None,
        weight: float = 0.5,
        rerank: bool | None = None,
    ) -> SearchResponse:
        """Search with a text, or for what is like known items."""
        fused: dict[str, Any] = {"hybrid": hybrid, "weight": weight, "rerank": rerank}
        wanted = SearchRequest(text=text, ids=id, k=k, where=where, filter=filter, **fused)
        return await search_for(wanted, None)

    form = SearchRequest.model_json_schema()
    form["properties"] = {**form["properties"], "image": {"type": "string", "format": "binary"}}
    described = {
        "application/json": {"schema": SearchRequest.model_json_schema()},
        "multipart/form-data": {"schema": form},
    }

    @app.post("/search", openapi_extra={"requestBody": {"required": True, "content": described}})
    async def search(request: Request) -> SearchResponse:
        """Search with a text, an uploaded image, or for what is like known items."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "application/json":
            return await search_for(SearchRequest.model_validate_json(await request.body()), None)
        if kind != "multipart/form-data":
            raise Refused(415, "send application/json, or multipart/form-data with an image")
        wanted, image = await _read_form(request)
        return await search_for(SearchRequest.model_validate(wanted), image)

    @app.get("/images", responses={200: {"content": {"image/jpeg": {}}}}, response_class=Response)
    async def picture(id: Annotated[str, Field(max_length=4096)]) -> Response:
        """An image of the index, made small."""
        content = await asyncio.to_thread(service.thumbnail, id)
        if content is None:
            raise Refused(404, "no image of that id")
        return Response(content, media_type="image/jpeg", headers={"cache-control": "private, max-age=3600"})

    @app.post("/v1/embeddings")
    async def embeddings(wanted: EmbeddingsRequest) -> dict[str, Any]:
        """Vectors of texts, in OpenAI's form; `model` may be anything, there is one."""
        searcher = service.searcher
        texts = check_texts([wanted.input] if isinstance(wanted.input, str) else wanted.input)
        most = service.queue_size
        if not 1 <= len(texts) <= most:
            raise Refused(400, f"input has {len(texts)} texts; send 1 to {most}")
        for place, text in enumerate(texts):
            if not text.strip() or len(text) > MOST_CHARACTERS:
                raise Refused(400, f"input[{place}] is empty or has more than {MOST_CHARACTERS:,} characters; mend it")
        try:
            side = searcher.query_side("text") if wanted.input_type == "query" else _document_side(searcher)
        except DualencError as error:
            raise Refused(400, str(error)) from None
        try:
            found = await answered(service.embed(searcher, side, texts))
        except QueueFull:
            raise busy() from None
        dim, tokens = len(found[0].vector), sum(one.tokens for one in found)
        if wanted.dimensions not in (None, dim):
            raise Refused(400, f"dimensions is {wanted.dimensions}; the model gives {dim}")
        data = [
            {"object": "embedding", "index": place, "embedding": _written(one.vector, wanted.encoding_format)}
            for place, one in enumerate(found)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        name = str(searcher.index.meta.get("model", "dualenc")).rstrip("/").rpartition("/")[2]
        return {"object": "list", "data": data, "model": name, "usage": usage}

    @app.post("/reload")
    async def reload() -> dict[str, Any]:
        """Open the index again; needs a token, whatever the host."""
        if token is None:
            raise Refused(403, "the server has no token, and reloads on SIGHUP or when the index is written anew")
        try:
            return {"generation": await asyncio.to_thread(service.reload)}
        except DualencError:
            raise Refused(409, "not reloaded, the old index goes on; the server's log says why") from None

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(Refused)
    async def refuse(request: Request, error: Refused) -> Response:
        return error.response()

    @app.exception_handler(DualencError)
    async def refuse_mistake(request: Request, error: DualencError) -> Response:
        if isinstance(error, UnknownId):
            return Refused(404, str(error)).response()
        if isinstance(error, (BadSample, Unsupported)):
            return Refused(400, str(error)).response()
        log.error("%s", printable(error))  # of the index and not of the request; it names files
        return Refused(503, "the index cannot answer; the server's log says why").response()

    @app.exception_handler(Exception)
    async def refuse_unforeseen(request: Request, error: Exception) -> Response:
        return Refused(500, "unexpected error; the server's log says more").response()

    @app.exception_handler(HTTPException)
    async def refuse_plainly(request: Request, error: HTTPException) -> Response:
        return Refused(error.status_code, str(error.detail), dict(error.headers or {})).response()

    # Without what was sent, which need not even be text.
    @app.exception_handler(RequestValidationError)
    async def refuse_invalid(request: Request, error: RequestValidationError) -> Response:
        return Refused(400, _what_is_wrong(error.errors())).response()

    @app.exception_handler(ValidationError)
    async def refuse_invalid_body(request: Request, error: ValidationError) -> Response:
        return Refused(400, _what_is_wrong(error.errors(include_input=False, include_context=False))).response()

    paths = [path for route in app.routes if (path := getattr(route, "path", None))]
    app.add_middleware(
        Gate,
        metrics=service.metrics,
        paths=paths,
        token=token,
        hosts=hosts,
        max_body=max_body,
        max_held=max(256 << 20, 2 * max_body),
        body_timeout_s=timeout_s,
    )
    return app


def content_security_policy(page: str) -> str:
    """A policy that lets run nothing but the page's own script and style, by their hashes, and connect nowhere else."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()}'" for own in found)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; img-src 'self' blob: data:; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    )


async def _read_form(request: Request) -> tuple[dict[str, Any], bytes | None]:
    """The fields of a form as `SearchRequest` takes them, and the uploaded image."""
    try:
        async with request.form(max_files=1, max_fields=MOST_FORM_FIELDS, max_part_size=4 * MOST_CHARACTERS) as form:
            wanted: dict[str, Any] = {}
            image: bytes | None = None
            for name, value in form.multi_items():
                if name == "image":
                    image = value.encode() if isinstance(value, str) else await value.read()
                elif not isinstance(value, str):
                    raise Refused(400, "only the field image may be a file")
                elif name in ("ids", "where"):
                    wanted.setdefault(name, []).append(value)
                else:
                    wanted[name] = value
            return wanted, image
    except (Refused, HTTPException):
        raise
    except Exception as error:  # the parser's own kinds, and those of what it parses with
        raise Refused(400, f"the form cannot be read ({type(error).__name__}); send multipart/form-data") from None


def _document_side(searcher: searching.Searcher) -> Literal["left", "right"]:
    """The side that encodes documents, if they are texts."""
    if searcher.encoder.kind != "query-document":
        return searcher.query_side("text")
    return "right"


def _written(vector: np.ndarray, encoding: str) -> Any:
    """As numbers, or base64 of little-endian float32."""
    return vector.tolist() if encoding == "float" else base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _what_is_wrong(errors: Sequence[Any]) -> str:
    """The first errors of pydantic in one line, without the values."""
    told = [f"{'.'.join(str(part)[:40] for part in e['loc'][:4]) or 'request'}: {e['msg']}" for e in errors[:3]]
    return "; ".join(told)[:500].encode(errors="replace").decode()


def _reload_quietly(service: Service) -> None:
    """For SIGHUP: a failure is logged, and the old index goes on."""
    try:
        service.reload()
    except DualencError:
        return
