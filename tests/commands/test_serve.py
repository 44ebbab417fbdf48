"""`dualenc serve` as a process, and what it refuses to start with."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.commands import toy
from tests.commands.in_process import failure, run


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    model = toy.text_model(folder / "model")
    toy.save_documents(folder / "docs.jsonl", 20)
    run("index", model, folder / "docs.jsonl", "--out", folder / "index")
    return folder / "index"


def test_what_cannot_be_served(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nprobe=2 does not apply to this index" in failure(capsys, "serve", index, "--port", 0, "--nprobe", 2)
    assert "--host no.such.host.invalid" in failure(capsys, "serve", index, "--host", "no.such.host.invalid")
    assert "--port is 65536" in failure(capsys, "serve", index, "--port", 65536)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "a free port" in failure(capsys, "serve", index, "--port", taken.getsockname()[1])


@pytest.mark.slow
def test_the_server_answers_and_ends_when_told(index: Path) -> None:
    command = [sys.executable, "-m", "dualenc", "serve", str(index), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert address is not None
        with urllib.request.urlopen(address[0], timeout=30) as response:
            assert b"<title>dualenc search</title>" in response.read()
        with urllib.request.urlopen(f"{address[0]}search?text=fox&k=3", timeout=30) as response:
            assert len(json.load(response)["results"]) == 3
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{address[0]}search?text=", timeout=30)
        assert refused.value.code == 400
        process.terminate()
        process.communicate(timeout=30)
