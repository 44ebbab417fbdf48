"""Qdrant's client on a folder, which it searches exactly, in place of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import qdrant_client

CLIENT = qdrant_client.QdrantClient


def url_of(folder: Path | str) -> str:
    """The URL that stands for a folder."""
    return f"http://local{folder}"


def open_folder(url: str, **_: Any) -> Any:
    return CLIENT(path=urlsplit(url).path)


def use_folders(patch: pytest.MonkeyPatch) -> None:
    """Let the URLs of `url_of` open folders."""
    patch.setattr(qdrant_client, "QdrantClient", open_folder)
