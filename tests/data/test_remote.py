"""Files behind URLs: what is fetched, what becomes of servers that fail, stall or change files, and what is refused."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import pickle
import re
import shutil
import ssl
import subprocess
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualenc.data import MinedPairs, TablePairs, WebDatasetPairs, open_corpus, remote, remote_table
from dualenc.data.remote import RemoteFile, expand
from dualenc.data.sources import open_pairs
from dualenc.data.urls import display_name, is_url
from dualenc.errors import DualencError
from dualenc.search.embed import embed
from tests.data.make import encoded, picture, shade_of
from tests.data.server import Server, serving
from tests.data.test_webdataset import contents, sample, write_tar
from tests.fake_towers import LetterTower

pytest.importorskip("aiohttp")


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as started:
        yield started


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Short waits, an empty cache, and no file system of an earlier test."""
    monkeypatch.setattr(remote, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(remote, "STALL_SECONDS", 0.5)
    remote._new_file_system.cache_clear()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def failure(action: Any) -> str:
    with pytest.raises(DualencError) as error:
        action()
    assert "\n" not in str(error.value)
    return str(error.value)


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def jsonl(count: int = 5) -> bytes:
    return "".join(json.dumps({"_id": f"d{i}", "text": f"text {i}"}) + "\n" for i in range(count)).encode()


def parquet(path: Path, count: int = 50, rows: int = 10, **columns: Any) -> bytes:
    """A table of ids, texts and what else, in row groups of `rows`."""
    usual = {"_id": [f"d{i}" for i in range(count)], "text": [f"text {i}" for i in range(count)]}
    pq.write_table(pa.table({**usual, **columns}), path, row_group_size=rows)
    return path.read_bytes()


class TestReading:
    @pytest.mark.slow
    @given(ranges=st.lists(st.tuples(st.integers(0, 300_000), st.integers(0, 100_000)), max_size=20))
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    def test_any_ranges_are_those_of_the_file(self, server: Server, ranges: list[tuple[int, int]]) -> None:
        content = noise(250_000)
        file = RemoteFile(server.put("x.bin", content))
        assert file.size == 250_000
        for offset, size in ranges:
            assert file.read(offset, size) == content[offset : offset + size]

    def test_a_read_in_the_middle_fetches_no_more(self, server: Server) -> None:
        file = RemoteFile(server.put("x.bin", noise(10 << 20)))
        file.read(5 << 20, 1000)
        file.read(1 << 20, 1000)
        assert server.bytes_asked() == 2000

    def test_reading_through_takes_few_requests(self, server: Server) -> None:
        content = noise(10 << 20)
        file = RemoteFile(server.put("x.bin", content))
        assert b"".join(file.read(start, 1000) for start in range(0, len(content), 1000)) == content
        assert len(server.gets()) < 15
        assert server.bytes_asked() < 1.01 * len(content)

    @pytest.mark.slow
    def test_threads_forks_and_pickles_read_the_same(self, server: Server) -> None:
        content = noise(200_000)
        file = RemoteFile(server.put("x.bin", content))
        starts = list(range(0, 200_000, 7777))
        expected = [content[start : start + 500] for start in starts]
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(lambda start: file.read(start, 500), starts)) == expected
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.starmap(file.read, [(start, 500) for start in starts]) == expected
        copy = pickle.loads(pickle.dumps(file))
        assert [copy.read(start, 500) for start in starts] == expected

    def test_libraries_read_it_as_a_stream(self, server: Server, tmp_path: Path) -> None:
        file = RemoteFile(server.put("x.parquet", parquet(tmp_path / "x.parquet")))
        assert pq.read_table(file.open()).equals(pq.read_table(tmp_path / "x.parquet"))


class TestTrouble:
    @pytest.mark.slow
    @pytest.mark.parametrize("trouble", ["fail", "stall", "cut"])
    def test_what_passes_is_waited_for(self, server: Server, trouble: str) -> None:
        content = noise(50_000)
        file = RemoteFile(server.put("x.bin", content))
        setattr(server, trouble, 2)
        assert file.read(1000, 20_000) == content[1000:21_000]
        assert len(server.gets()) == 3

    @pytest.mark.slow
    @pytest.mark.parametrize("trouble", ["fail", "stall", "cut"])
    def test_what_does_not_pass_is_told_in_a_line(
        self, server: Server, trouble: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote, "ATTEMPTS", 3)
        file = RemoteFile(server.put("x.bin", noise(50_000)) + "?token=secret")
        setattr(server, trouble, 10**6)
        told = failure(lambda: file.read(1000, 20_000))
        assert told.startswith(f"{server.url}/x.bin: cannot be read after 3 attempts (")
        assert told.endswith("check the network and the server, then run the same command again")
        assert "secret" not in told
        assert len(server.gets()) == 3

    @pytest.mark.slow
    def test_a_server_that_is_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(remote, "ATTEMPTS", 2)
        assert "127.0.0.1:9/x.bin: cannot be read after 2 attempts" in failure(
            lambda: RemoteFile("http://127.0.0.1:9/x.bin")
        )

    @pytest.mark.parametrize(("status", "told"), [(403, "not allowed"), (404, "no such file"), (400, "refuses")])
    def test_what_will_not_pass_is_not_tried_again(self, server: Server, status: int, told: str) -> None:
        file = RemoteFile(server.put("x.bin", noise(5000)) + "?token=secret")
        server.fail, server.status = 10**6, status
        message = failure(lambda: file.read(0, 10))
        assert told in message
        assert "secret" not in message
        assert len(server.gets()) == 1

    def test_a_file_that_is_not_there(self, server: Server) -> None:
        assert failure(lambda: RemoteFile(f"{server.url}/no.bin")).endswith("no such file on the server; check the URL")

    @pytest.mark.parametrize("told", ["ETag", "Last-Modified", None])
    def test_a_file_that_changes_meanwhile(self, server: Server, told: str | None) -> None:
        """Where a server tells neither, a change of the size is noticed."""
        server.told = told
        file = RemoteFile(server.put("x.bin", noise(500_000)))
        server.put("x.bin", noise(500_000 if told else 300_000, seed=1))
        message = failure(lambda: file.read(299_000, 3000))
        assert "has changed since it was opened; run the same command again" in message

    @pytest.mark.parametrize("told", ["ETag", "Last-Modified", None])
    def test_another_file_under_the_same_url_is_told_apart(self, server: Server, told: str | None) -> None:
        server.told = told
        keys = {RemoteFile(server.put("x.bin", noise(5000, seed))).key for seed in (0, 1, 2)}
        assert len(keys) == 3

    def test_a_server_without_ranges(self, server: Server) -> None:
        server.ranges = False
        file = RemoteFile(server.put("x.tar", noise(9 << 20)))
        assert "sends whole files only; download it" in failure(lambda: file.read(5 << 20, 1000))
        assert file.copy().read_bytes() == server.files["/x.tar"]


class TestCopies:
    @pytest.mark.parametrize("trouble", ["fail", "cut"])
    def test_an_interrupted_download_starts_again(self, server: Server, trouble: str) -> None:
        content = noise(500_000)
        file = RemoteFile(server.put("x.jsonl", content))
        setattr(server, trouble, 2)
        assert file.copy().read_bytes() == content
        assert len(server.gets()) == 3

    def test_a_download_that_is_killed_leaves_no_copy(self, server: Server, tmp_path: Path) -> None:
        content = noise(500_000)
        file = RemoteFile(server.put("x.jsonl", content))
        server.stall, server.stall_seconds = 1, 60.0
        process = multiprocessing.get_context("fork").Process(target=file.copy)
        process.start()
        while not server.gets():
            time.sleep(0.01)
        process.kill()
        process.join()
        assert not list((tmp_path / "cache").rglob("x.jsonl"))
        assert file.copy().read_bytes() == content

    def test_a_file_that_changes_before_it_is_fetched(self, server: Server) -> None:
        file = RemoteFile(server.put("x.jsonl", noise(5000)))
        server.put("x.jsonl", noise(5000, seed=1))
        assert "has changed since it was opened" in failure(file.copy)


class TestRefused:
    @pytest.mark.parametrize(
        "url",
        [
            "file:///etc/passwd",
            "local:///etc/passwd",
            "memory://x.jsonl",
            "ssh://host/x.jsonl",
            "ftp://host/x.jsonl",
            "github://a:b@main/x.jsonl",
            "simplecache::http://127.0.0.1/x.jsonl",
            "zip://x.jsonl::file:///tmp/x.zip",
            "http://127.0.0.1/x.jsonl::file:///etc/passwd",
            "FILE:///etc/passwd",
            "data:///x.jsonl",
        ],
    )
    def test_schemes_that_reach_this_machine_or_run_programs(self, url: str) -> None:
        for action in (RemoteFile, expand, open_corpus, open_pairs, TablePairs, WebDatasetPairs):
            arguments = ("a", "b") if action is TablePairs else ()
            assert "not a URL that is opened" in failure(lambda a=action, w=arguments: a(url, *w))

    @pytest.mark.parametrize("there", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:text/plain,x"])
    def test_a_redirect_out_of_the_web(self, server: Server, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(remote, "ATTEMPTS", 2)
        server.redirects["/x.jsonl"] = there
        failure(lambda: open_corpus(f"{server.url}/x.jsonl"))

    @pytest.mark.parametrize("there", ["/x.jsonl?key=secret", "http://[::1/x?key=secret", "//me:secret@[/x?secret"])
    def test_a_redirect_in_a_circle_or_to_nowhere_shows_no_key(
        self, server: Server, there: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote, "ATTEMPTS", 2)
        server.redirects["/x.jsonl"] = there
        assert "secret" not in failure(lambda: open_corpus(f"{server.url}/x.jsonl?key=secret"))
        assert len(server.requests) < 50

    def test_a_redirect_within_the_web_is_followed(self, server: Server) -> None:
        server.redirects["/latest.jsonl"] = server.put("x.jsonl", jsonl())
        assert open_corpus(f"{server.url}/latest.jsonl").ids == [f"d{i}" for i in range(5)]

    @pytest.mark.slow
    def test_a_redirect_from_https_to_http(
        self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl to make a certificate")
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -keyout key.pem -out cert.pem"
        extended = [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run(extended, cwd=tmp_path, check=True, capture_output=True)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        url = server.put("x.jsonl", jsonl())
        with serving() as secure:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
            secure.socket = context.wrap_socket(secure.socket, server_side=True)
            address = secure.url.replace("http:", "https:")
            secure.put("x.jsonl", jsonl(3))
            secure.redirects = {"/same.jsonl": f"{address}/x.jsonl", "/away.jsonl": f"{url}?key=secret"}
            # aiohttp makes its contexts when it is imported, before the certificate was there.
            monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", ssl.create_default_context())
            assert len(open_corpus(f"{address}/same.jsonl")) == 3
            told = failure(lambda: open_corpus(f"{address}/away.jsonl"))
        assert told == f"{address}/away.jsonl: redirects to {url}; give that URL itself"
        assert server.requests == []

    def test_paths_in_a_remote_table_lead_nowhere(self, server: Server, tmp_path: Path) -> None:
        (tmp_path / "secret.png").write_bytes(encoded(picture(3)))
        rows = [str(tmp_path / "secret.png"), "../../secret.png", f"{server.url}/x.png"]
        lines = "".join(json.dumps({"image": row, "caption": "x"}) + "\n" for row in rows)
        url = server.put("x.jsonl", lines.encode())
        for pairs in (
            TablePairs(url, "image", "caption", deduplicate=False),
            TablePairs(url, "image", "caption", deduplicate=False, allow_outside=True),
        ):
            for row in range(3):
                failure(lambda p=pairs, r=row: p[r])

    def test_a_package_that_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import builtins

        imported = builtins.__import__

        def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
            if name.startswith(("s3fs", "aiohttp")):
                raise ImportError(name)
            return imported(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", refuse)
        assert failure(lambda: RemoteFile("s3://bucket/x")).endswith("s3:// needs s3fs; pip install s3fs")
        assert failure(lambda: RemoteFile("https://h/x")).endswith("https:// needs aiohttp; pip install aiohttp")

    def test_passwords_and_keys_are_not_display_name(self) -> None:
        assert display_name("https://me:word@host/a/b.tar?X-Amz-Signature=1#f") == "https://host/a/b.tar"
        assert display_name("s3://bucket/a") == "s3://bucket/a"
        assert display_name("http://me:word@[::1/x?key") == "http://[::1/x"
        assert display_name("simplecache::https://me:word@h/x?key=a b") == "simplecache::https://h/x"
        assert display_name("C:/data") == "C:/data"
        assert not is_url("a/b")
        assert not is_url("user/name")


class TestExpand:
    def test_braces_count(self) -> None:
        assert expand("https://h/{08..11}.tar") == [f"https://h/{n}.tar" for n in ("08", "09", "10", "11")]
        assert expand("https://h/{0..1}/{0..1}") == ["https://h/0/0", "https://h/0/1", "https://h/1/0", "https://h/1/1"]

    @pytest.mark.parametrize("url", ["https://h/{3..1}.tar", "https://h/{0..999999999}.tar", "https://h/*.tar"])
    def test_what_means_nothing_or_cannot_be_listed(self, url: str) -> None:
        failure(lambda: expand(url))

    def test_too_many_together(self) -> None:
        assert "more than 100,000 together" in failure(lambda: expand("https://h/{0..9999}/{0..9999}.tar"))


class TestTables:
    @pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.csv"])
    def test_lines_are_fetched_once(self, server: Server, name: str) -> None:
        rows = b"_id,text\nd0,text 0\nd1,text 1\n" if name == "x.csv" else jsonl(2)
        url = server.put(name, gzip.compress(rows) if name.endswith(".gz") else rows)
        for _ in range(2):
            corpus = open_corpus(url)
            assert (corpus.ids, list(corpus.items)) == (["d0", "d1"], ["text 0", "text 1"])
        assert len(server.gets()) == 1
        server.put(name, gzip.compress(jsonl(3)) if name.endswith(".gz") else rows + b"d2,text 2\n" * ("csv" in name))
        if name != "x.jsonl":
            assert len(open_corpus(url)) == 3, "the changed file is fetched again"

    def test_a_broken_line_is_told_with_its_file(self, server: Server) -> None:
        told = failure(lambda: open_corpus(server.put("docs.jsonl", jsonl(2) + b"{broken\n"), on_error="raise"))
        assert re.search(r"docs\.jsonl:3: malformed JSON line", told)

    @pytest.mark.slow
    def test_pairs_are_those_of_the_local_file(self, server: Server, tmp_path: Path) -> None:
        queries = [f"q{i % 7}" for i in range(50)]
        content = parquet(tmp_path / "x.parquet", query=queries, blob=[noise(30_000, i) for i in range(50)])
        url = server.put("x.parquet", content)
        local, there = (TablePairs(where, "query", "text") for where in (tmp_path / "x.parquet", url))
        assert list(local) == list(there)
        assert local.identities() == there.identities(), "so that a run resumes with either"
        assert server.bytes_asked() < len(content) / 10, "columns that are not named stay where they are"

    def test_mined_negatives(self, server: Server) -> None:
        line = json.dumps({"query": "q", "pos": ["p"], "neg": ["n"]}) + "\n"
        assert MinedPairs(server.put("x.jsonl", line.encode()))[0].negatives == ("n",)

    @pytest.mark.parametrize("name", ["x", "x.exe", "x.html"])
    def test_what_is_no_table(self, server: Server, name: str) -> None:
        assert "no table" in failure(lambda: open_corpus(server.put(name, b"x")))


class TestParquetCorpus:
    def test_texts_are_those_of_the_local_file(self, server: Server, tmp_path: Path) -> None:
        content = parquet(tmp_path / "x.parquet", title=[f"title {i}" if i % 3 else None for i in range(50)])
        local, there = (open_corpus(where) for where in (tmp_path / "x.parquet", server.put("x.parquet", content)))
        assert local.ids == there.ids
        assert [local[i] for i in range(50)] == [there[i] for i in range(50)]
        assert [local.text(i) for i in range(50)] == [there.text(i) for i in range(50)]

    @pytest.mark.slow
    def test_slices_are_those_of_the_local_file(self, server: Server, tmp_path: Path) -> None:
        url = server.put("x.parquet", parquet(tmp_path / "x.parquet"))
        local, there = (open_corpus(where, split="train[90%:]") for where in (tmp_path / "x.parquet", url))
        assert [local[i] for i in range(5)] == [there[i] for i in range(len(there))]
        assert "no split 'test'; there are: train" in failure(lambda: open_corpus(url, split="test"))

    @pytest.mark.slow
    def test_row_groups_are_read_when_asked_for(self, server: Server, tmp_path: Path) -> None:
        texts = [noise(2000, i).hex() for i in range(200)]
        content = parquet(tmp_path / "x.parquet", 200, 20, text=texts, blob=[noise(30_000, i) for i in range(200)])
        corpus = open_corpus(server.put("x.parquet", content))
        before = server.bytes_asked()
        assert before < len(content) / 10, "footer and ids"
        assert corpus[105] == texts[105]
        assert corpus[119] == texts[119]
        assert server.bytes_asked() - before < len(content) / 5, "one of ten groups, one of two columns"

    def test_several_files_in_their_order(self, server: Server, tmp_path: Path) -> None:
        for number in range(3):
            rows = {"_id": [f"{number}-{i}" for i in range(25)], "text": [f"{number} {i}" for i in range(25)]}
            server.put(f"{number:02}.parquet", parquet(tmp_path / "x.parquet", 25, 10, **rows))
        corpus = open_corpus(f"{server.url}/{{00..02}}.parquet")
        assert corpus.ids == [f"{number}-{i}" for number in range(3) for i in range(25)]
        assert [corpus[i] for i in (74, 0, 30)] == ["2 24", "0 0", "1 5"]

    def test_two_row_groups_stay_in_memory(self, server: Server, tmp_path: Path) -> None:
        corpus = open_corpus(server.put("x.parquet", parquet(tmp_path / "x.parquet", 500, 50)))
        assert [corpus[i] for i in range(500)] == [f"text {i}" for i in range(500)]
        asked = len(server.gets())
        assert [corpus[i] for i in (499, 449, 450)] == ["text 499", "text 449", "text 450"]
        assert len(server.gets()) == asked
        assert remote_table._row_group.cache_info().currsize <= 2

    @pytest.mark.slow
    def test_embeddings_are_those_of_the_local_file(self, server: Server, tmp_path: Path) -> None:
        texts = ["" if i == 17 else f"text {i}" for i in range(50)]
        content = parquet(tmp_path / "x.parquet", text=texts)
        url = server.put("x.parquet", content)
        local = embed(LetterTower(), open_corpus(tmp_path / "x.parquet"), progress=False)
        there = embed(LetterTower(), open_corpus(url), tmp_path / "emb", progress=False)
        assert local.ids == there.ids
        np.testing.assert_allclose(local.vectors[:], there.vectors[:], atol=1e-6)
        assert there.meta["skipped"] == 1
        assert there.meta["first_skipped"][0]["reason"].startswith(f"{url} row 17, column 'text': empty")
        tower = LetterTower()
        embed(tower, open_corpus(url), tmp_path / "emb", progress=False)
        assert tower.widths == [], "resumed, nothing to do"
        server.put("x.parquet", parquet(tmp_path / "x.parquet", text=[*texts[:-1], "changed"]))
        embed(tower, open_corpus(url), tmp_path / "emb", progress=False)
        assert tower.widths, "the changed file was noticed"

    @pytest.mark.slow
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_a_server_that_goes_away_stops_the_run_and_spoils_no_sample(
        self, server: Server, tmp_path: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(remote, "ATTEMPTS", 2)
        content = parquet(tmp_path / "x.parquet", 300, 50, text=[noise(200, i).hex() for i in range(300)])
        corpus = open_corpus(server.put("x.parquet", content))
        server.fail = 10**6
        told = failure(lambda: embed(LetterTower(), corpus, tmp_path / "emb", num_workers=num_workers, progress=False))
        assert "cannot be read after 2 attempts" in told
        server.fail = 0
        assert len(embed(LetterTower(), corpus, tmp_path / "emb", progress=False)) == 300

    @pytest.mark.slow
    def test_bad_ids_are_told(self, server: Server, tmp_path: Path) -> None:
        ids = ["a", "b", "a", None, "c"]
        corpus = open_corpus(server.put("x.parquet", parquet(tmp_path / "x.parquet", 5, 2, _id=ids)))
        assert (corpus.ids, corpus.skipped, corpus[2]) == (["a", "b", "c"], 2, "text 4")
        assert "row 2" in failure(lambda: open_corpus(f"{server.url}/x.parquet", on_error="raise"))

    def test_what_is_no_parquet(self, server: Server) -> None:
        assert "not a readable parquet file" in failure(lambda: open_corpus(server.put("x.parquet", noise(5000))))


class TestTars:
    def shards(self, server: Server, tmp_path: Path) -> str:
        for number in range(2):
            files = [file for i in range(3) for file in sample(f"{number}{i}", 10 * number + i, f"text {number} {i}")]
            server.put(f"s-{number:03}.tar", write_tar(tmp_path / f"s-{number:03}.tar", files).read_bytes())
        return f"{server.url}/s-{{000..001}}.tar"

    @pytest.mark.slow
    def test_pairs_are_those_of_the_local_tars(self, server: Server, tmp_path: Path) -> None:
        url = self.shards(server, tmp_path)
        local, there = WebDatasetPairs(tmp_path), WebDatasetPairs(url)
        assert contents(local) == contents(there)
        assert shade_of(there[4].left) == 11
        corpus = open_corpus(url, modality="text")
        assert corpus.ids == open_corpus(tmp_path, modality="text").ids
        assert corpus[5] == "text 1 2"

    @pytest.mark.slow
    def test_the_index_is_kept_and_a_changed_tar_is_scanned_again(self, server: Server, tmp_path: Path) -> None:
        url = self.shards(server, tmp_path)
        identity = WebDatasetPairs(url, deduplicate=False).identity()
        asked = server.bytes_asked()
        assert WebDatasetPairs(url, deduplicate=False).identity() == identity
        assert server.bytes_asked() == asked, "nothing but the index was needed"
        server.put("s-001.tar", write_tar(tmp_path / "s-001.tar", sample("9", 99, "new")).read_bytes())
        assert contents(WebDatasetPairs(url))[-1] == (99, "new")
        assert WebDatasetPairs(url, deduplicate=False).identity() != identity

    @pytest.mark.slow
    def test_one_sample_of_a_large_tar_is_one_small_read(self, server: Server, tmp_path: Path) -> None:
        files = [
            (f"{i}.{kind}", noise(300_000, i) if kind == "bin" else b"text %d" % i)
            for i in range(20)
            for kind in ("bin", "txt")
        ]
        content = write_tar(tmp_path / "x.tar", files).read_bytes()
        corpus = open_corpus(server.put("x.tar", content), modality="text")
        before = server.bytes_asked()
        assert before < len(content) / 2, "the scan leaps over large files"
        assert corpus[13] == "text 13"
        assert server.bytes_asked() - before < 100

    @pytest.mark.slow
    def test_a_tar_that_changes_meanwhile_stops_the_run(self, server: Server, tmp_path: Path) -> None:
        url = self.shards(server, tmp_path)
        pairs = WebDatasetPairs(url)
        server.put("s-000.tar", write_tar(tmp_path / "s-000.tar", sample("9", 99, "new")).read_bytes())
        elsewhere = pickle.loads(pickle.dumps(pairs))  # without what was read of so small a tar
        assert "has changed since it was opened" in failure(lambda: elsewhere[0])

    @pytest.mark.slow
    def test_trouble_passes(self, server: Server, tmp_path: Path) -> None:
        url = self.shards(server, tmp_path)
        server.fail = server.cut = 2
        assert contents(WebDatasetPairs(url)) == contents(WebDatasetPairs(tmp_path))

    @pytest.mark.slow
    def test_compressed_and_broken_tars(self, server: Server, tmp_path: Path) -> None:
        server.put("x.tar", write_tar(tmp_path / "x.tar", sample("1", 1, "one"), "w:gz").read_bytes())
        assert "decompress it first" in failure(lambda: WebDatasetPairs(f"{server.url}/x.tar"))
        whole = write_tar(tmp_path / "y.tar", [*sample("1", 1, "one"), ("2.png", bytes(50_000))]).read_bytes()
        pairs = WebDatasetPairs(server.put("y.tar", whole[:-30_000]))
        assert (contents(pairs), pairs.skipped) == ([(1, "one")], 1)
        assert tarfile.is_tarfile(tmp_path / "y.tar")


class TestS3:
    """Through s3fs, where it is installed, against the same server; S3 answers HEAD and GET of /BUCKET/KEY like it."""

    @pytest.fixture(autouse=True)
    def bucket(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("s3fs")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")

    def test_tables_and_tars(self, server: Server, tmp_path: Path) -> None:
        server.put("bucket/x.parquet", parquet(tmp_path / "x.parquet"))
        server.put("bucket/x.jsonl", jsonl())
        server.put("bucket/x.tar", write_tar(tmp_path / "x.tar", sample("1", 1, "one")).read_bytes())
        assert open_corpus("s3://bucket/x.parquet")[49] == "text 49"
        assert open_corpus("s3://bucket/x.jsonl")[4] == "text 4"
        assert contents(WebDatasetPairs("s3://bucket/x.tar")) == [(1, "one")]

    @pytest.mark.parametrize("opened", [False, True])
    def test_a_file_that_changes_meanwhile(self, server: Server, opened: bool) -> None:
        server.put("bucket/x.bin", noise(500_000))
        file = RemoteFile("s3://bucket/x.bin")
        if opened:
            file.read(100_000, 1000)
        server.put("bucket/x.bin", noise(500_000, seed=1))
        assert "has changed since it was opened" in failure(lambda: file.read(300_000, 1000))
