"""`dualenc serve` as a process: what it refuses to start with, slow and large requests, a new index under load."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dualenc.commands.serve import serve
from tests.commands import toy
from tests.commands.in_process import failure, run


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model = toy.text_model(folder / "model")
    toy.save_documents(folder / "docs.jsonl", 20)
    run("index", model, folder / "docs.jsonl", "--out", folder / "index")
    return folder / "index"


@contextmanager
def served(index: Path, *words: str) -> Iterator[tuple[subprocess.Popen, int]]:
    """The process and its port."""
    command = [sys.executable, "-m", "dualenc", "serve", str(index), "--port", "0", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
        assert found is not None
        yield process, int(found[1])
    finally:
        process.terminate()
        process.communicate(timeout=30)


def get(port: int, path: str) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
        return json.load(response)


def said(port: int, *parts: bytes, pause: float = 0.0, wait: float = 20.0) -> bytes:
    """What the server answers to bytes that are sent one after the other."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as connection:
        for part in parts:
            try:
                connection.sendall(part)
            except (BrokenPipeError, ConnectionResetError):
                break
            time.sleep(pause)
        answer = b""
        while block := connection.recv(65536):
            answer += block
        return answer


def check_dropped(port: int) -> None:
    """A client that asks and never reads loses its connection, here after a second."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(1)
        client.connect(("127.0.0.1", port))
        with suppress(TimeoutError):
            while True:  # until nothing more goes in, because no answer goes out
                client.send(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1000)
        time.sleep(4)
        with pytest.raises(ConnectionError):
            while client.recv(1 << 20):
                pass


def test_what_cannot_be_served(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DUALENC_SERVE_TOKEN", raising=False)
    for host in ("0.0.0.0", "::"):
        assert "set a token by --token-file" in failure(capsys, "serve", index, "--host", host)
    (tmp_path / "token").write_text("too short\n")
    told = failure(capsys, "serve", index, "--host", "0.0.0.0", "--token-file", tmp_path / "token")
    assert "16 to 4,096 printable ASCII characters" in told
    assert "cannot be read as a token" in failure(capsys, "serve", index, "--token-file", tmp_path / "none")
    assert "nprobe=2 does not apply to this index" in failure(capsys, "serve", index, "--port", 0, "--nprobe", 2)
    assert "is no address" in failure(capsys, "serve", index, "--host", "no.such.host.invalid")
    assert "--port is 65536" in failure(capsys, "serve", index, "--port", 65536)
    assert "--queue is 0" in failure(capsys, "serve", index, "--queue", 0)
    assert "holds no images" in failure(capsys, "serve", index, "--port", 0, "--images", tmp_path)
    assert "no such folder" in failure(capsys, "serve", tmp_path / "nothing", "--port", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = failure(capsys, "serve", index, "--port", taken.getsockname()[1])
        assert "give another --port" in told


@pytest.mark.nightly
def test_slow_large_and_broken_requests_are_the_clients_fault(index: Path) -> None:
    head = b"POST /search HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with served(index, "--timeout", "1", "--max-body", "64KiB") as (process, port):
        begin = time.monotonic()
        assert said(port, b"GET /health HT") == b"", "a head that never ends"
        assert said(port) == b"", "nothing at all"
        assert said(port, head + b"Content-Length: 100\r\n\r\n{").startswith(b"HTTP/1.1 408"), "a body that never ends"
        assert time.monotonic() - begin < 10
        large = b"x" * 100_000
        assert said(port, head + b"Connection: close\r\nContent-Length: 100000\r\n\r\n", large).startswith(
            b"HTTP/1.1 413"
        )
        chunks = [b"4000\r\n" + b"x" * 0x4000 + b"\r\n" for _ in range(40)]
        answer = said(port, head + b"Transfer-Encoding: chunked\r\n\r\n", *chunks)
        assert answer.startswith(b"HTTP/1.1 413"), answer[:100]
        close = b"Host: 127.0.0.1\r\nConnection: close\r\n\r\n"
        for broken in (
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"GET\r\n\r\n",
            b"GET / HTTP/1.1\r\nA" + b"a" * 100_000 + b"\r\n\r\n",
            b"GET /search?text=%FF&where=a HTTP/1.1\r\n" + close,
            b"FOO /search HTTP/1.1\r\n" + close,
            b"POST /search HTTP/1.1\r\nHost: evil\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        ):
            assert re.match(rb"HTTP/1\.1 4\d\d", said(port, broken))
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            check_dropped(port)
        assert get(port, "/health")["status"] == "ok"
        assert process.poll() is None


@pytest.mark.nightly
def test_a_new_index_drops_no_request(tmp_path: Path) -> None:
    model = toy.text_model(tmp_path / "model")
    toy.save_documents(tmp_path / "docs.jsonl", 20)
    run("index", model, tmp_path / "docs.jsonl", "--out", tmp_path / "index")
    answers: list[int] = []
    errors: list[Exception] = []
    done = threading.Event()

    with served(tmp_path / "index") as (process, port):

        def ask() -> None:
            while not done.is_set():
                try:
                    answers.append(len(get(port, "/search?text=fox&k=100")["results"]))
                except Exception as error:
                    errors.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 30
        while get(port, "/health")["generation"] < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        toy.save_documents(tmp_path / "docs.jsonl", 30)
        run("index", model, tmp_path / "docs.jsonl", "--out", tmp_path / "index")
        while get(port, "/health")["generation"] < 3:  # nobody told it
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(get(port, "/search?text=fox&k=100")["results"]) == 30
        done.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert set(answers) == {20, 30}


def test_sighup_is_obeyed_before_the_url_is_printed(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Printed(Exception):
        """Raised in place of printing, to end the server."""

    handlers = []

    def note(*words: str, **how: bool) -> None:
        handlers.append(signal.getsignal(signal.SIGHUP))
        raise Printed

    monkeypatch.setattr("dualenc.commands.serve.print", note, raising=False)
    with pytest.raises(Printed):
        serve(str(index), port=0)
    assert handlers != [signal.SIG_DFL]


@pytest.mark.slow
def test_the_page_is_part_of_the_package_and_the_server_ends_when_told(index: Path) -> None:
    with served(index) as (process, port):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as response:
            assert b"<title>dualenc search</title>" in response.read()
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(port, "/search?text=")
        assert refused.value.code == 400
        os.kill(process.pid, signal.SIGTERM)
        process.wait(timeout=30)
