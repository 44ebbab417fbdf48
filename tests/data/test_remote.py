"""Files behind URLs: fetched once from a web server and from fsspec's memory file system, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.data import TablePairs, WebDatasetPairs, open_corpus, open_pairs, urls
from dualenc.data.remote import _expand_braces, local_copies
from dualenc.errors import DualencError
from tests.data.make import contents, encoded, picture
from tests.data.test_webdataset import sample, write_tar


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/forbidden"):
            self.send_error(403)
        else:
            super().do_GET()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that the web server serves."""
    (tmp_path / "served").mkdir()
    return tmp_path / "served"


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a web server."""
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write_table(path: Path, texts: list[str]) -> None:
    rows = {"_id": [f"d{i}" for i in range(len(texts))], "text": texts, "query": [f"q{i}" for i in range(len(texts))]}
    if path.suffix == ".parquet":
        pq.write_table(pa.table(rows), path)
    elif path.suffix == ".csv":
        path.write_text("_id,text,query\n" + "".join(f"{a},{b},{c}\n" for a, b, c in zip(*rows.values())))
    else:
        path.write_text("".join(json.dumps(dict(zip(rows, row))) + "\n" for row in zip(*rows.values())))


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.parquet"])
def test_tables_are_those_of_the_local_file_and_fetched_once(server: str, folder: Path, name: str) -> None:
    write_table(folder / name, ["one", "two"])
    local = TablePairs(folder / name, "query", "text")
    for _ in range(2):
        pairs = TablePairs(f"{server}/{name}", "query", "text")
        assert list(pairs) == list(local)
        assert pairs.identities() == local.identities(), "so that a run resumes with either"
    fetched = local_copies(f"{server}/{name}")[0]
    assert fetched.read_bytes() == (folder / name).read_bytes()
    stamp = fetched.stat().st_mtime_ns
    write_table(folder / name, ["one", "two", "three"])
    assert open_corpus(f"{server}/{name}").ids == ["d0", "d1", "d2"], "the changed file is fetched again"
    assert fetched.stat().st_mtime_ns == stamp


def test_tars_and_names_with_numbers(server: str, folder: Path) -> None:
    assert _expand_braces("s3://b/{08..11}.tar") == [f"s3://b/{n}.tar" for n in ("08", "09", "10", "11")]
    assert _expand_braces("s3://b/{0..1}/{0..1}") == ["s3://b/0/0", "s3://b/0/1", "s3://b/1/0", "s3://b/1/1"]
    for number in range(2):
        write_tar(folder / f"s-{number:03}.tar", [file for i in range(3) for file in sample(f"{number}{i}", i, f"{i}")])
    url = f"{server}/s-{{000..001}}.tar"
    assert contents(WebDatasetPairs(url)) == contents(WebDatasetPairs(folder))
    assert open_pairs(url).identity() == WebDatasetPairs(folder).identity()


@pytest.mark.parametrize("allow_outside", [False, True])
def test_paths_in_a_remote_table_lead_nowhere(server: str, folder: Path, tmp_path: Path, allow_outside: bool) -> None:
    (tmp_path / "secret.png").write_bytes(encoded(picture(3)))
    paths = [str(tmp_path / "secret.png"), "../../../secret.png", f"{server}/x.png"]
    (folder / "x.jsonl").write_text("".join(json.dumps({"image": path, "caption": "x"}) + "\n" for path in paths))
    pairs = TablePairs(f"{server}/x.jsonl", "image", "caption", deduplicate=False, allow_outside=allow_outside)
    for row in range(3):
        with pytest.raises(DualencError):
            _ = pairs[row]


def test_a_glob_where_files_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(urls.SCHEMES, "memory", "fsspec")
    system = fsspec.filesystem("memory")
    for number in range(3):
        system.pipe(f"/bucket/x-{number}.jsonl", json.dumps({"text": f"text {number}"}).encode())
    assert list(open_corpus("memory://bucket/x-*.jsonl").items) == ["text 0", "text 1", "text 2"]
    with pytest.raises(DualencError, match="no file matches"):
        open_corpus("memory://bucket/y-*.jsonl")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "not a URL that is opened"),
        ("memory://x.jsonl", "not a URL that is opened"),
        ("simplecache::http://127.0.0.1/x.jsonl", "not a URL that is opened"),
        ("http://me:secret@[::1/x.jsonl?secret", "not a valid URL"),
        ("http://127.0.0.1:9/{3..1}.tar", "names no file"),
        ("http://127.0.0.1:9/{0..9999}/{0..9999}.tar", "more than 100,000"),
        ("http://127.0.0.1:9/*.tar", "cannot be listed over http"),
        ("http://me:secret@127.0.0.1:9/x.jsonl?key=secret", "cannot be fetched"),
        ("SERVER/no.jsonl?key=secret", "HTTP 404"),
        ("SERVER/forbidden.jsonl?key=secret", "HTTP 403"),
        ("SERVER/x.exe?key=secret", "no table"),
    ],
)
def test_what_is_refused_shows_no_key(url: str, reason: str, server: str) -> None:
    url = url.replace("SERVER", server)
    for action in (open_corpus, open_pairs):
        with pytest.raises(DualencError, match=reason) as error:
            action(url)
        assert "secret" not in str(error.value)
