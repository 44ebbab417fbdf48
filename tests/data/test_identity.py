"""Equal data has one identity wherever it lies; changed data has another, even under the same names
and sizes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import datasets
import pytest

from dualenc.data import BeirPairs, Corpus, PairDataset, WebDatasetPairs, open_corpus
from dualenc.data.store import identity
from dualenc.data.store.identity import items_identity
from tests.helpers.make import encoded, picture, write_beir, write_csv, write_jsonl
from tests.helpers.tars import sample, write_tar


def replace_keeping_times(path: Path, data: bytes) -> None:
    """Other contents of equal size under the same name, with the old time of change."""
    before = path.stat()
    assert len(data) == before.st_size
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def image_folder(folder: Path, count: int = 5) -> Path:
    folder.mkdir(parents=True)
    for i in range(count):
        picture(i).save(folder / f"{i}.bmp")
    return folder


@pytest.mark.slow
def test_texts_have_one_identity_in_memory_in_csv_in_parquet_and_picked(tmp_path: Path) -> None:
    texts = [f"text {i} é" for i in range(40_000)]
    ids = [str(i) for i in range(len(texts))]
    write_csv(tmp_path / "x.csv", ["_id", "text"], zip(ids, texts))
    datasets.Dataset.from_dict({"_id": ids, "text": texts}).to_parquet(tmp_path / "x.parquet")
    here = Corpus(ids, texts).identity()
    assert (
        here
        == open_corpus(tmp_path / "x.csv").identity()
        == open_corpus(tmp_path / "x.parquet").identity()
    )
    picked = Corpus([*ids, "more"], [*texts, "more"]).take(range(len(ids)))
    assert picked.identity() == here


def test_every_text_id_label_and_negative_counts() -> None:
    texts = [["abc", "d"], ["ab", "d"], ["abc", ""], ["d", "abc"], ["abc", "D"], ["abc", "d", "d"]]
    assert len({items_identity(other) for other in texts}) == len(texts)
    corpora = [
        Corpus(list(ids), ["x", "y"], labels=labels)
        for ids in ("ab", "ba")
        for labels in ([0, 1], [1, 0])
    ]
    assert len({corpus.identity() for corpus in corpora}) == 2
    assert len({corpus.identity(labels=True) for corpus in corpora}) == 4

    def pairs(negatives: list[list[int]] | None) -> str:
        return PairDataset(
            ["q", "r"], ["a", "b", "c"], right_id=[0, 1], negatives=negatives
        ).identity()

    assert len({pairs(None), pairs([[2], [2]]), pairs([[2], []]), pairs([[], [2]])}) == 4


@pytest.mark.parametrize("kind", ["files", "paths", "records"])
def test_an_image_replaced_in_a_folder_or_a_table_changes_the_identity(
    tmp_path: Path, kind: str
) -> None:
    folder = image_folder(tmp_path / "a")
    (tmp_path / "tables").mkdir()

    def identity_with(shade: int, folder: Path) -> str:
        replace_keeping_times(folder / "3.bmp", encoded(picture(shade), "BMP"))
        if kind == "files":
            return open_corpus(folder).identity()
        files = [folder / f"{i}.bmp" for i in range(5)]
        columns: dict[str, list[Any]] = {
            "paths": [file.name for file in files],
            "records": [{"bytes": file.read_bytes(), "path": None} for file in files],
        }
        datasets.Dataset.from_dict({"image": columns[kind]}).to_parquet(folder / "train.parquet")
        return open_corpus(
            folder / "train.parquet", image_column="image", modality="image"
        ).identity()

    before = identity_with(3, folder)
    shutil.copytree(folder, tmp_path / "b", copy_function=shutil.copyfile)
    assert identity_with(3, tmp_path / "b") == before, "another place and other times of change"
    assert identity_with(77, folder) != before


def test_a_changed_tar_changes_the_identity_of_its_samples(tmp_path: Path) -> None:
    def identity_of(texts: str) -> str:
        files = [file for i, text in enumerate(texts) for file in sample(str(i), i, text)]
        return WebDatasetPairs(write_tar(tmp_path / "x.tar", files)).identity()

    assert identity_of("abc") == identity_of("abc") != identity_of("abd")


def test_of_huge_sets_all_sizes_times_and_a_sample_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "MAX_IMAGES": 10,
        "SAMPLED_IMAGES": 3,
        "MAX_TEXTS": 10,
        "SAMPLED_TEXTS": 3,
    }.items():
        monkeypatch.setattr(identity, name, value)
    folder = image_folder(tmp_path / "a", 20)
    seen = {open_corpus(folder).identity()}
    for i in range(20):  # every single file is noticed
        os.utime(folder / f"{i}.bmp", ns=(0, 1 + i))
        seen.add(open_corpus(folder).identity())
    assert len(seen) == 21
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": f"text {i}"} for i in range(20)])
    before = open_corpus(path).identity()
    for i in range(20):  # a text of another length, too
        write_jsonl(path, [{"text": f"text {j}{'!' * (i == j)}"} for j in range(20)])
        assert open_corpus(path).identity() != before


def test_reversed_judgements_and_rewritten_documents_are_told_apart(tmp_path: Path) -> None:
    def pairs(
        name: str, texts: tuple[str, str] = ("one", "two"), documents: str = "ab"
    ) -> dict[str, str]:
        corpus = [
            {"_id": i, "title": "t", "text": text} for i, text in zip("ab", texts, strict=True)
        ]
        queries = [{"_id": "q", "text": "x"}, {"_id": "r", "text": "y"}]
        qrels = {"train": [["q", documents[0], 1], ["r", documents[1], 1]]}
        return BeirPairs(write_beir(tmp_path / name, corpus, queries, qrels)).identities()

    first = pairs("first")
    assert pairs("same") == first
    for other, differing in (
        (pairs("reversed", documents="ba"), {"pairs"}),
        (pairs("rewritten", texts=("one", "owt")), {"right_items"}),
    ):
        assert {key for key in first if other[key] != first[key]} == differing
