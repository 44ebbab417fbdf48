from __future__ import annotations

import multiprocessing
import os
import pickle
import tarfile
from pathlib import Path

import pytest
import webdataset

from dualenc.data import TablePairs, WebDatasetPairs
from dualenc.data.bad_rows import BadRows
from dualenc.data.readers import webdataset as reader
from dualenc.data.readers.webdataset import tar_corpus
from dualenc.data.store import cache as arrow_cache
from dualenc.errors import BadSample, DualencError
from tests.helpers.make import contents, encoded, picture, shade_of, shades_in
from tests.helpers.tars import sample, write_tar


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every index goes through the cache folder, however small its tar."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(arrow_cache, "IN_MEMORY_BYTES", -1)
    monkeypatch.setattr(arrow_cache, "cache_folder", lambda: folder)
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two shards as the webdataset package writes them, five samples."""
    with webdataset.ShardWriter(str(tmp_path / "s-%03d.tar"), maxcount=3, verbose=0) as sink:
        for i in range(5):
            record = {"caption": f"json {i}", "list": [1]}
            sink.write(
                {"__key__": f"{i:03d}", "png": picture(i), "txt": f"text {i}", "json": record}
            )
    return tmp_path


def test_the_pairs_that_webdataset_reads(shards: Path) -> None:
    urls = sorted(str(path) for path in shards.glob("*.tar"))
    other = (
        webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
        .decode("pil")
        .to_tuple("png", "txt")
    )
    expected = [(shade_of(image), text) for image, text in other]
    assert expected == [(i, f"text {i}") for i in range(5)]
    assert contents(WebDatasetPairs(shards)) == expected
    assert contents(WebDatasetPairs(str(shards / "s-*.tar"))) == expected
    assert contents(WebDatasetPairs(shards / "s-001.tar")) == expected[3:]


def test_names_with_dots_folders_and_capitals_are_grouped_as_webdataset_does(
    tmp_path: Path,
) -> None:
    files = [
        ("__meta__/x.txt", b"none"),
        ("./a.b/1.png", encoded(picture(1))),
        ("./a.b/1.TXT", b"one"),
        ("noextension", b"none"),
        ("c/2.left.png", encoded(picture(2))),
        ("c/2.png", encoded(picture(3))),
        ("c/2.txt", b"two"),
    ]
    path = write_tar(tmp_path / "x.tar", files)
    other = webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False).decode("pil")
    expected = [(shade_of(s["png"]), s["txt"]) for s in other]
    assert contents(WebDatasetPairs(path)) == expected == [(1, "one"), (3, "two")]


@pytest.mark.parametrize("name", ["shards [v2]", "a*b", "what?"])
def test_folders_with_signs_of_globs_are_taken_by_their_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    write_tar(folder / "x.tar", sample("1", 1, "one"))
    for path in (folder, folder / "x.tar", f"{folder}/*.tar", f"{tmp_path}/*/x.tar"):
        assert contents(WebDatasetPairs(path)) == [(1, "one")]
    (folder / "x.csv").write_text("query,document\na,b\n")
    assert len(TablePairs(f"{folder}/*.csv", "query", "document")) == 1


def test_the_index_is_written_once_and_again_for_a_changed_tar(
    shards: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = contents(WebDatasetPairs(shards))
    with monkeypatch.context() as patch:
        patch.setattr(reader, "_members", lambda *_: pytest.fail("scanned again"))
        assert contents(WebDatasetPairs(shards)) == first
    for file in cache.glob("*.arrow"):
        file.write_bytes(b"nothing")
    with pytest.raises(DualencError, match=r"\.arrow: damaged data cache .*; remove this file"):
        WebDatasetPairs(shards)
    for names in ("ab", "ba", "cd"):  # with the old time and size
        tar = write_tar(shards / "x.tar", [(f"{name}.txt", name.encode()) for name in names])
        os.utime(tar, ns=(0, 10**18))
        assert tar_corpus(tar, "text", BadRows(tar)).ids == list(names)


def test_equal_captions_share_an_id(tmp_path: Path) -> None:
    files = (
        sample("1", 1, "same")
        + sample("2", 2, "same\n")
        + sample("3", 3, "other")
        + sample("4", 1, " ")
    )
    path = write_tar(tmp_path / "x.tar", files)
    pairs = WebDatasetPairs(path)
    assert (pairs.left_id.tolist(), pairs.right_id.tolist()) == ([0, 1, 2, 0], [0, 0, 1, 2])
    assert WebDatasetPairs(path, deduplicate=False).right_id.tolist() == [0, 1, 2, 3]
    assert [pairs[i].right for i in range(3)] == ["same", "same", "other"]
    with pytest.raises(BadSample, match=r"its \.txt is empty or not UTF-8"):
        pairs[3]


def link(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


BROKEN = [
    ([("9.png", encoded(picture(9)))], "x.tar:9: missing or empty file 'txt'"),
    ([("9.txt", b"nine")], "x.tar:9: missing or empty file 'jpg;jpeg;png;webp;…'"),
    ([("9.png", encoded(picture(9))), ("9.txt", b"")], "x.tar:9: missing or empty file 'txt'"),
    ([("1.txt", b"again")], "x.tar: 1.txt: duplicate file in a tar"),
    ([(os.fsdecode(b"caf\xe9.txt"), b"x")], "name in a tar that is not UTF-8"),
    *(
        ([link("9.png", kind)], "9.png: link, device, pipe or sparse")
        for kind in (tarfile.SYMTYPE, tarfile.FIFOTYPE)
    ),
]


@pytest.mark.parametrize(("extra", "message"), BROKEN)
def test_a_bad_sample_is_named_or_skipped(tmp_path: Path, extra: list, message: str) -> None:
    files = [file for file in extra if isinstance(file, tuple)]
    path = write_tar(tmp_path / "x.tar", sample("1", 1, "one") + files)
    with tarfile.open(path, "a") as archive:
        for info in extra:
            if isinstance(info, tarfile.TarInfo):
                archive.addfile(info)
    with pytest.raises(BadSample) as error:
        WebDatasetPairs(path, on_error="raise")
    assert message in str(error.value)
    for _ in range(2):  # with the index, too
        pairs = WebDatasetPairs(path)
        assert (contents(pairs), pairs.skipped) == ([(1, "one")], 1)


def test_a_truncated_tar_keeps_its_whole_samples(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [*sample("1", 1, "one"), ("2.png", bytes(50_000))])
    path.write_bytes(path.read_bytes()[:-30_000])
    with pytest.raises(BadSample, match=r"x\.tar: truncated, broken or compressed tar"):
        WebDatasetPairs(path, on_error="raise")
    for _ in range(2):
        pairs = WebDatasetPairs(path)
        assert (contents(pairs), pairs.skipped) == ([(1, "one")], 1)


def with_size(header: bytes, size: int) -> bytes:
    """A header of a tar with another size, also a negative one, and its checksum."""
    fields = bytearray(header)
    fields[124:136] = (
        (256**12 + size).to_bytes(13, "big")[1:] if size < 0 else b"\x80" + size.to_bytes(11, "big")
    )
    fields[148:156] = b" " * 8
    fields[148:156] = b"%06o\0 " % sum(fields)
    return bytes(fields)


@pytest.mark.parametrize(
    ("size", "message"), [(-512, "negative"), (-4096, "negative"), (2**62, "2.png is cut off")]
)
def test_hostile_sizes_end_the_tar(tmp_path: Path, size: int, message: str) -> None:
    path = write_tar(tmp_path / "x.tar", sample("1", 1, "one"))
    with tarfile.open(path) as archive:
        end = archive.getmembers()[-1].offset_data + 512
    header = with_size(tarfile.TarInfo("2.png").tobuf(tarfile.USTAR_FORMAT), size)
    path.write_bytes(path.read_bytes()[:end] + header + bytes(1024))
    with pytest.raises(BadSample, match=message):
        WebDatasetPairs(path, on_error="raise")
    pairs = WebDatasetPairs(path)
    assert (contents(pairs), pairs.skipped) == ([(1, "one")], 1)


def test_tars_that_cannot_be_read_at_random(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match=r"truncated, broken or compressed tar; .*decompress it"):
        WebDatasetPairs(
            write_tar(tmp_path / "x.tar", sample("1", 1, "one"), "w:gz"), on_error="raise"
        )
    with pytest.raises(DualencError, match="no such tar"):
        WebDatasetPairs(tmp_path / "no-*.tar")


def test_worker_processes_read_for_themselves(shards: Path) -> None:
    pairs = WebDatasetPairs(shards)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(shades_in, [pickle.dumps(pairs)] * 4) == [[0, 1, 2, 3, 4]] * 4


def test_corpora_take_the_names_of_samples_as_ids(
    shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    corpus = tar_corpus(shards, "image", BadRows(shards))
    assert (corpus.ids, corpus.modality, shade_of(corpus[3])) == (
        ["000", "001", "002", "003", "004"],
        "image",
        3,
    )
    assert tar_corpus(shards, "text", BadRows(shards)).text(2) == "text 2"
    folder = tmp_path_factory.mktemp("alike")
    for name in ("a", "b"):
        write_tar(folder / f"{name}.tar", [("1.txt", name.encode())])
    alike = tar_corpus(folder, "text", BadRows(folder))
    assert (alike.ids, [alike[i] for i in range(2)]) == (["a/1", "b/1"], ["a", "b"])


def test_members_that_are_too_large_or_do_not_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar = write_tar(tmp_path / "x.tar", [("a/17.png", b"no image"), ("a/17.txt", b"x" * 2000)])
    pairs = WebDatasetPairs(tar)
    with pytest.raises(
        BadSample, match=r"x\.tar:a/17: image cannot be decoded \(it is not an image"
    ):
        pairs[0]
    monkeypatch.setattr("dualenc.data.readers.webdataset.MAX_BYTES", 1000)
    with pytest.raises(
        BadSample, match=r"x\.tar:a/17: file of more than 1,000 bytes; remove the sample"
    ):
        WebDatasetPairs(tar, on_error="raise")
    with pytest.raises(DualencError, match=r"no usable pair: 1 file of more than 1,000 bytes"):
        WebDatasetPairs(tar)
