"""One client on a folder for all that connect to it, request after request, as to a server."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tests.helpers.local_qdrant import CLIENT


class ServedClient:
    """Qdrant's client in local mode, or the engine behind it, which several threads may call.

    Args:
        folder: folder of the collections; None keeps them in memory.
        version: version of the server that it stands for.
        client: another client in place of the local mode.
    """

    def __init__(
        self, folder: Path | None = None, version: str = "1.20.0", client: Any = None
    ) -> None:
        place: dict[str, Any] = {"path": str(folder)} if folder else {"location": ":memory:"}
        self.client = client or CLIENT(**place, force_disable_check_same_thread=True)
        self.lock = threading.RLock()
        self.version = version

    def info(self) -> Any:
        return self.client.info().model_copy(update={"version": self.version})

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)

        def alone(*arguments: Any, **options: Any) -> Any:
            with self.lock:
                return method(*arguments, **options)

        return alone

    def close(self) -> None:
        """A server goes on."""
