"""`dualenc serve`: an index over HTTP."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualenc.commands.checks import check_range
from dualenc.commands.options import SEARCH, SearchOptions
from dualenc.errors import BadSample, DualencError
from dualenc.reading import open_regular
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.search.searcher import Searcher

REQUIRED_PACKAGES = {
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "prometheus_client": "prometheus-client",
}
TOKEN = "DUALENC_SERVE_TOKEN"
MIN_TOKEN_LENGTH = 16
MAX_TOKEN_LENGTH = 4096
MAX_CONNECTIONS = 1024


def serve(
    index: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: str | None = None,
    images: str | None = None,
    batch_size: int = 32,
    wait_ms: float = 2.0,
    queue: int = 256,
    timeout: float = 10.0,
    max_body: str = "16MiB",
    rerank: str | None = None,
    rerank_top: int = 100,
    watch: bool = True,
    options: SearchOptions = SEARCH,
) -> None:
    """Serve an index or an engine over HTTP: a page to search on, /search, /v1/embeddings, /health, /metrics.

    On 127.0.0.1 no token is needed. On another host a token is required, from a file or from DUALENC_SERVE_TOKEN;
    clients send it as Authorization: Bearer TOKEN. The index is reopened, without a dropped request, when its folder is
    written again, on SIGHUP, and on POST /reload with the token.

    Args:
        index: folder that `dualenc index` or `dualenc push` wrote.
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        token_file: file with the token, of 16 characters or more, on its only line.
        images: folder, table or tars with the images of the index, to show them; by default where they were.
        batch_size: queries encoded and searched together.
        wait_ms: how long the first query of a batch waits for others.
        queue: queries that may wait; more are refused (429).
        timeout: seconds that a request may take to arrive, and again to be answered (504).
        max_body: largest request; larger ones are refused (413).
        rerank: folder or name of a sentence-transformers CrossEncoder that scores the best again, by their texts
            (`dualenc index --texts`): of every text that is searched for, unless the request says rerank=false.
        rerank_top: how many of the best it scores; so many results at most are given then.
        watch: open the index again when its folder is written anew, and on SIGHUP.
    """
    missing = [package for module, package in REQUIRED_PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise DualencError(f"serve needs the package {missing[0]}: pip install 'dualenc[serve]'")
    from dualenc.evaluation.output import start_processes
    from dualenc.search.build import MAX_PARAMETER
    from dualenc.search.kinds import parse_bytes
    from dualenc.search.rerank import open_cross_encoder
    from dualenc.search.searcher import Searcher
    from dualenc.serve.app import Settings, create_app
    from dualenc.serve.metrics import Metrics
    from dualenc.serve.schema import MAX_RESULTS
    from dualenc.serve.service import Service

    check_range(0, 65535, port=port)
    check_range(1, MAX_RESULTS, rerank_top=rerank_top)
    check_range(1, 4096, batch_size=batch_size)
    check_range(0, 1000, wait_ms=wait_ms)
    check_range(1, 1 << 20, queue=queue)
    check_range(0.1, 3600, timeout=timeout)
    check_range(1, MAX_PARAMETER, nprobe=options.nprobe, ef_search=options.ef_search)
    max_bytes = parse_bytes(max_body, "--max-body", 1 << 12)
    token = _read_token(token_file)
    listening = _bind(host, port, token)
    device = start_processes(options.device)
    judge = None if rerank is None else open_cross_encoder(rerank, device=str(device))[0]

    def open_searcher(before: Searcher | None) -> Searcher:
        return Searcher.open(
            index,
            options.model,
            device=device,
            before=before,
            judge=judge,
            nprobe=options.nprobe,
            ef_search=options.ef_search,
            qdrant_path=options.qdrant_path,
        )

    # The first searcher is opened here, so that its errors end the command.
    searcher = open_searcher(None)
    opened = [searcher]
    service = Service(
        lambda before: opened.pop() if opened else open_searcher(before),
        pictures=_pictures(searcher, images),
        metrics=Metrics(),
        batch_size=batch_size,
        wait_s=wait_ms / 1000,
        queue_size=queue,
    )
    hosts = ("localhost", "127.0.0.1", "[::1]") if token is None else None
    settings = Settings(token, hosts, max_bytes, timeout, watch, rerank_top)
    app = create_app(service, settings)
    _run(app, listening, timeout, f"{len(searcher):,} vectors of {index}")


def _run(app: Any, listening: socket.socket, timeout: float, title: str) -> None:
    """Serve the app until the process is ended; print its address once it answers."""
    import uvicorn

    from dualenc.serve.gate import TimedProtocol

    class Protocol(TimedProtocol):
        head_timeout_s = timeout

    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        log_level="info",
        access_log=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=int(timeout) + 1,
        server_header=False,
    )
    # On Linux, drop clients that do not read what is sent to them.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * timeout))
    listening.listen(MAX_CONNECTIONS)
    address, port = listening.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            # The startup installs the handler of SIGHUP; a signal before would end the process.
            await super().startup(sockets)
            print(printable(f"{title} at http://{shown}:{port}/"), flush=True)

    Server(config).run(sockets=[listening])


def _read_token(path: str | None) -> str | None:
    """The token of the file, or of the environment; None if there is none."""
    token = os.environ.get(TOKEN)
    where = path or TOKEN
    if path is not None:
        try:
            with open_regular(path) as file:
                token = file.read(MAX_TOKEN_LENGTH + 6).decode("utf-8-sig").strip()  # with BOM and the end of its line
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no ASCII"
            raise DualencError(f"{path}: cannot be read as a token ({reason}); write one line of ASCII") from None
    if token is None:
        return None
    if not MIN_TOKEN_LENGTH <= len(token) <= MAX_TOKEN_LENGTH or not re.fullmatch(r"[!-~]+", token):
        raise DualencError(
            f"{where}: a token has {MIN_TOKEN_LENGTH} to {MAX_TOKEN_LENGTH:,} printable ASCII characters and no "
            "spaces; write one"
        )
    return token


def _bind(host: str, port: int, token: str | None) -> socket.socket:
    """A bound socket; one that other machines can reach requires a token."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise DualencError(f"--host is {host!r}, which is no address ({error}); give one such as 127.0.0.1") from None
    if token is None and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise DualencError(
            f"--host {host} can be reached from elsewhere: set a token by --token-file or {TOKEN}, or leave --host out"
        )
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise DualencError(f"{host}:{port}: {error.strerror}; give another --port, or 0 for a free one") from None
    return listening


def _pictures(searcher: Searcher, images: str | None) -> Corpus | None:
    """The images of the index: as named, or from where it was made if that is on this machine."""
    from dualenc.data.sources import open_corpus
    from dualenc.data.urls import is_url

    recorded = searcher.index.meta.get("data")
    if searcher.index.meta.get("modality") != "image":
        if images is not None:
            raise DualencError(f"{searcher.folder}: holds no images; leave --images out")
        return None
    if images is None and (not isinstance(recorded, str) or is_url(recorded) or not Path(recorded).exists()):
        note = "note: the images are not where they were, so none are shown; name the place with --images"
        print(note, file=sys.stderr)
        return None
    try:
        return open_corpus(images or str(recorded), modality="image")
    except (DualencError, BadSample):
        if images is not None:
            raise
        return None
