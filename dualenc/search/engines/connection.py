"""Connections: the target of a collection, the description that dualenc stores in it, and errors in one line."""

from __future__ import annotations

import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.parse import urlsplit

import pyarrow as pa

from dualenc.errors import DualencError
from dualenc.files import check_folder_target
from dualenc.search.where import Kind
from dualenc.terminal import printable
from dualenc.types import Metric

Quantization = Literal["none", "scalar", "binary"]
"""Compression of the searched vectors: none, one byte per number, one bit per number. The best candidates are scored
again with the original vectors."""
KEY = "QDRANT_API_KEY"
"""Environment variable with the key of a Qdrant server."""
_COLLECTION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""Names that every engine takes."""
Found = list[tuple[dict[str, Any], float]]
"""Stored items, each as its values by name and its score, best first."""


@dataclass(frozen=True)
class CollectionInfo:
    """Description of a collection of N vectors of size D, stored inside it when it is created."""

    fingerprint: str  # checksum over the files of the embeddings
    count: int  # N, once all have arrived
    dim: int  # D
    metric: Metric
    dtype: str  # "float16" or "float32", of the stored vectors
    quantization: Quantization  # of the searched vectors
    columns: dict[str, Kind]  # the user's, by name
    has_snippets: bool  # whether each id has a text to show

    @classmethod
    def from_dict(cls, values: Any, source: str) -> CollectionInfo:
        """From untrusted JSON, whose entries are checked; all but these are strings."""
        types = {"count": int, "dim": int, "columns": dict, "has_snippets": bool}
        names = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or any(not isinstance(values.get(n), types.get(n, str)) for n in names):
            raise DualencError(f"{source}: holds no embeddings that dualenc pushed; name another collection")
        return cls(**{name: values[name] for name in names})


class Connection:
    """The place of a collection: a name at a URL or in a folder, and errors that name both in one line."""

    kind = ""  # of the engine, and of the extra that installs its client

    def __init__(self, target: str, collection: str) -> None:
        if not _COLLECTION.fullmatch(collection):
            raise DualencError(f"--collection is {collection[:40]!r}; give a name of letters, digits, - and _")
        self.target = target if "://" in target else os.path.abspath(os.path.expanduser(target))
        self.collection = collection
        self.place = f"{self.target} collection {collection!r}"
        self.is_remote = "://" in target

    def import_client(self, module: str) -> ModuleType:
        """Import the engine's client, which an extra installs."""
        try:
            return importlib.import_module(module)
        except ImportError as error:
            remedy = f"pip install 'dualenc[{self.kind}]'"
            raise DualencError(f"this engine needs the package {module}, and {one_line(error)}; {remedy}") from None

    def close(self) -> None:
        """Release what the client holds."""

    def explain(self, error: Exception) -> str:
        """What an error of the client's library means."""
        return one_line(error)

    @contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """Turn the library's errors, of many types, into one line; its warnings are for developers."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except DualencError:
            raise
        except Exception as error:
            raise DualencError(f"{self.place}: {self.explain(error)}") from error


def with_short_strings(schema: pa.Schema) -> pa.Schema:
    """The schema with 32-bit offsets of strings, without which LanceDB builds no index and Spark reads no column."""
    fields = [field.with_type(pa.string()) if pa.types.is_large_string(field.type) else field for field in schema]
    return pa.schema(fields)


def one_line(error: Exception) -> str:
    """The beginning of an error's text, without line breaks."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def is_server(target: str) -> bool:
    """Whether a target is the URL of a server, not a folder for the embedded mode."""
    return target.startswith(("http://", "https://"))


def qdrant_place(target: str) -> dict[str, Any]:
    """The arguments of Qdrant's client: a server with its key, or a folder, whose files are trusted, with a note.

    Raises:
        DualencError: a URL with credentials, because URLs are saved and shown, or a folder of something else.
    """
    # A path may look like the second, but a server without its scheme is the likelier mistake.
    if not is_server(target) and re.match(r"\w+://|[\w.-]+:[0-9]+(/|$)", target):
        url = f"http://{target.rpartition('://')[2]}"
        raise DualencError(f"{target}: no URL of a Qdrant server; write {url}, or ./{target} for a folder")
    if not is_server(target):
        target = os.path.abspath(os.path.expanduser(target))
        check_folder_target(target, _is_qdrant, "Qdrant collections")
        if _is_qdrant(Path(target)):
            warning = "Qdrant's embedded mode unpickles what it holds, which can run code; open only what you trust"
            print(printable(f"note: {target}: {warning}"), file=sys.stderr)
        return {"path": target}
    try:
        parts = urlsplit(target)
        port = parts.port or 6333
    except ValueError as error:
        raise DualencError(f"{target!r} is no URL ({error}); give one such as http://localhost:6333") from None
    if parts.username or parts.password or parts.query:
        raise DualencError(f"the URL of {parts.hostname}:{port} carries a key or query; set {KEY} instead")
    key = os.environ.get(KEY) or None
    if key and parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
        note = f"note: {KEY} goes to {parts.hostname} unencrypted; https:// would hide it"
        print(printable(note), file=sys.stderr)
    return {"url": target, "api_key": key}


def _is_qdrant(folder: Path) -> bool:
    return (folder / "meta.json").is_file() and (folder / ".lock").exists()
