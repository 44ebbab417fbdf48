"""Targets of engines: URLs without credentials, and folders that may be opened."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

from dualenc.errors import DualencError
from dualenc.files import check_folder_target
from dualenc.terminal import printable

QDRANT_KEY = "QDRANT_API_KEY"
"""Environment variable with the key of a Qdrant server."""
_COLLECTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def is_server(target: str) -> bool:
    """Whether a target is the URL of a server, not a folder for the embedded mode."""
    return target.startswith(("http://", "https://"))


def check_target(kind: str, target: str, collection: str) -> str:
    """Return the target, a folder as an absolute path.

    Raises:
        DualencError: an unusable target, or a collection name that not every engine takes.
    """
    if not _COLLECTION.fullmatch(collection):
        raise DualencError(f"--collection is {collection[:40]!r}; give a name of letters, digits, - and _")
    # A path may look like this, but a server without its scheme is the likelier mistake.
    if kind == "qdrant" and re.fullmatch(r"[\w.-]+:[0-9]+(/.*)?", target):
        raise DualencError(f"{target}: is it a server? then write http://{target}, or ./{target} for a folder")
    if kind == "qdrant" and "://" in target and not is_server(target):
        raise DualencError(f"{target}: no URL of a Qdrant server; give one with http:// or https://, or a folder")
    if kind == "lancedb" and target.startswith("db://"):
        raise DualencError(f"{target}: LanceDB's hosted service is not supported; give a folder or an object store")
    if "://" in target:
        return target
    return os.path.abspath(os.path.expanduser(target))


def qdrant_key(url: str) -> str | None:
    """The server's key from the environment; refuses a URL with credentials, because URLs are saved and shown."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise DualencError(f"{url!r} is no URL ({error}); give one such as http://localhost:6333") from None
    if parts.username or parts.password or parts.query:
        raise DualencError(
            f"the URL of {parts.hostname}:{port or 6333} carries a key or query; set {QDRANT_KEY} instead"
        )
    key = os.environ.get(QDRANT_KEY) or None
    if key and parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        note = f"note: {QDRANT_KEY} goes to {parts.hostname} unencrypted; https:// would hide it"
        print(printable(note), file=sys.stderr)
    return key


def qdrant_folder(target: str) -> str:
    """The folder of the embedded mode: new, empty, or one that it has written; its files are trusted, with a note."""
    check_folder_target(target, _is_qdrant, "Qdrant collections")
    if _is_qdrant(Path(target)):
        warning = "Qdrant's embedded mode unpickles what it holds, which can run code; open only what you trust"
        print(printable(f"note: {target}: {warning}"), file=sys.stderr)
    return target


def _is_qdrant(folder: Path) -> bool:
    return (folder / "meta.json").is_file() and (folder / ".lock").exists()
