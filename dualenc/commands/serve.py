"""`dualenc serve`: an index over HTTP."""

from __future__ import annotations

import ipaddress
import socket

from dualenc.commands.checks import check_options
from dualenc.commands.options import SEARCH, SearchOptions
from dualenc.errors import DualencError
from dualenc.terminal import printable

MAX_REQUESTS = 64  # at a time; more are answered with 503


def serve(
    index: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    rerank: str | None = None,
    rerank_top: int = 100,
    options: SearchOptions = SEARCH,
) -> None:
    """Serve an index or an engine over HTTP: a page to search on, /search, /texts, /health.

    Anybody who reaches the address may search. TLS, tokens and time limits are the work of a reverse proxy.

    Args:
        index: folder that `dualenc index` wrote.
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        rerank: folder or name of a sentence-transformers CrossEncoder that scores the best results of a text again, by
            their texts (`dualenc index --texts`), unless the request says rerank=false.
        rerank_top: how many of the best it scores; so many results at most are given then.
    """
    import uvicorn

    from dualenc.commands.output import start_processes
    from dualenc.search.build import MAX_PARAMETER
    from dualenc.search.rerank import open_cross_encoder
    from dualenc.search.searcher import Searcher
    from dualenc.serve.app import MAX_RESULTS, Service, create_app

    check_options(0, 65535, port=port)
    check_options(1, MAX_RESULTS, rerank_top=rerank_top)
    check_options(1, MAX_PARAMETER, nprobe=options.nprobe, ef_search=options.ef_search)
    listening = _bind(host, port)
    device = start_processes(options.device)
    cross_encoder = None if rerank is None else open_cross_encoder(rerank, device=str(device))[0]
    searcher = Searcher.open(index, **vars(options) | {"device": device, "cross_encoder": cross_encoder})
    address, port = listening.getsockname()[:2]
    is_local = ipaddress.ip_address(address).is_loopback
    app = create_app(
        Service(searcher, rerank_top), ["localhost", "127.0.0.1", "[::1]"] if is_local else None
    )
    host = f"[{address}]" if ":" in address else address
    print(printable(f"{len(searcher):,} vectors of {index} at http://{host}:{port}/"), flush=True)
    config = uvicorn.Config(
        app, ws="none", access_log=False, server_header=False, limit_concurrency=MAX_REQUESTS
    )
    uvicorn.Server(config).run(sockets=[listening])


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DualencError(
            f"--host {host} --port {port}: {reason}; give another address or a free port"
        ) from None
