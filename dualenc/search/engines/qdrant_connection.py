"""Connect to a Qdrant server, and report its errors in one line."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import qdrant_client
from qdrant_client.http.exceptions import ResponseHandlingException

from dualenc.errors import DualencError
from dualenc.io.terminal import without_credentials
from dualenc.search.engines.qdrant_filters import one_line

API_KEY = "QDRANT_API_KEY"
"""Environment variable with the API key of a server."""


def connect(target: str, location: str) -> Any:
    """Return a client of a server; its key comes from the environment.

    Args:
        target: URL of the server, without credentials.
        location: server and collection, for errors.

    Raises:
        DualencError: the URL is invalid, or contains a key.
    """
    # The client would unpickle the contents of a local folder, which can run code.
    if not target.startswith(("http://", "https://")):
        raise DualencError(
            "is not the URL of PostgreSQL or a Qdrant server",
            fix="write postgresql://user@host/database or http://localhost:6333",
            where=without_credentials(target),
        )
    if "@" in target or urlsplit(target).query:
        raise DualencError(
            "the URL of the server contains a key or query", fix=f"set {API_KEY} instead"
        )
    key = os.environ.get(API_KEY) or None
    with one_line_errors(location):
        return qdrant_client.QdrantClient(
            url=target, api_key=key, timeout=60, check_compatibility=False
        )


@contextmanager
def one_line_errors(location: str, resume: str = "") -> Iterator[None]:
    """Report the client's errors, of many types, in one line, and hide its warnings.

    Args:
        location: server and collection.
        resume: how to resume after an error that may pass.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except DualencError:
        raise
    except Exception as error:
        status = getattr(error, "status_code", None) or 0
        problem = one_line(error)
        remedy = ""
        if status in (401, 403):
            problem = "Qdrant refuses the key"
            remedy = f"set {API_KEY} to one that may do it"
        # Retrying may help without a response, or with one that does not blame the request.
        elif isinstance(error, ResponseHandlingException) or status == 429 or status >= 500:
            remedy = resume
        raise DualencError(problem, fix=remedy, where=location) from error
