"""Collections of the hub: folders laid out as mteb and NanoBEIR have them, loaded by the call that
loads names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualenc.data import BeirPairs, open_corpus, open_pairs, read_beir
from dualenc.data.readers.beir import expand_name
from dualenc.data.readers.detect import detect
from dualenc.errors import BadSample, DualencError
from tests.helpers.hub_collections import DOCUMENTS, QRELS, QUERIES, card, mteb, nano
from tests.helpers.make import write_beir


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def plain(collection: Any) -> tuple:
    queries, corpus, qrels = collection
    return ([*zip(queries.ids, queries.items)], [*zip(corpus.ids, corpus.items)], qrels)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_mteb_is_the_beir_folder_of_the_same_rows(tmp_path: Path, kind: str) -> None:
    qrels = {
        split: [(q, d, int(grade)) for q, d, grade in entries] for split, entries in QRELS.items()
    }
    beir = write_beir(tmp_path / "beir", DOCUMENTS, QUERIES, qrels)
    folder = mteb(tmp_path / "mteb", kind)
    assert (detect(folder), detect(beir)) == ("collection", "beir")
    for split in QRELS:
        assert plain(read_beir(folder, split)) == plain(read_beir(beir, split))
        pairs = BeirPairs(folder, split)
        assert list(pairs) == list(BeirPairs(beir, split)) == list(open_pairs(folder, split=split))
        assert pairs.identity() == BeirPairs(beir, split).identity(), (
            "so that a run resumes with either"
        )
    assert [pair.right for pair in BeirPairs(folder, titles=False)] == ["text 3", "text 3"]
    for part in ("corpus", "queries"):
        assert list(open_corpus(folder, part=part).items) == list(
            open_corpus(beir, part=part).items
        )
    with pytest.raises(DualencError, match="no split 'dev'; there are: train, test"):
        read_beir(folder, "dev")


def test_a_changed_folder_is_read_again(tmp_path: Path) -> None:
    folder = mteb(tmp_path / "x", "parquet")
    before = BeirPairs(folder)
    assert BeirPairs(folder).identity() == before.identity()
    pq.write_table(
        pa.Table.from_pylist([*DOCUMENTS[:3], {**DOCUMENTS[3], "text": "other"}]),
        folder / "corpus.parquet",
    )
    assert BeirPairs(folder).identity() != before.identity()
    assert BeirPairs(folder)[0].right == "T3 other"


def test_nano_beir_calls_its_test_train_and_has_no_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nano(tmp_path / "zeta-alpha-ai" / "NanoSciFact")
    monkeypatch.chdir(tmp_path)
    name = "zeta-alpha-ai/NanoSciFact"
    expected = {"q2": {"d3": 1}, "q0": {"d3": 1, "d0": 1}}
    for split in ("train", "test"):
        queries, corpus, qrels = read_beir(name, split)
        assert (queries.ids, corpus.ids, qrels) == (
            ["q0", "q2"],
            [f"d{i}" for i in range(4)],
            expected,
        )
        assert corpus[1] == "T1 text 1"
    assert (BeirPairs(name)[0].left, BeirPairs(name)[0].right) == ("query 2", "T3 text 3")
    # Only its layout: in mteb's a split train is one to train on.
    with pytest.raises(DualencError, match="no split 'test'; there are: train"):
        read_beir(mteb(tmp_path / "mteb", "parquet", {"train": QRELS["train"]}), "test")


def test_the_thirteen_are_those_of_sentence_transformers() -> None:
    from sentence_transformers.sentence_transformer.evaluation import nano_beir

    theirs = nano_beir.DATASET_NAME_TO_HUMAN_READABLE.values()
    assert sorted(expand_name("NanoBEIR")) == sorted(f"zeta-alpha-ai/Nano{name}" for name in theirs)
    assert expand_name("mteb/scifact") == ["mteb/scifact"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([("none", "d0", 1.0)], r"default row 1: judgement of an unknown query"),
        ([("q1", "none", 1.0)], r"default row 1: judged document that is not in the corpus"),
        ([("q2", "d3", 1.0)], r"default row 1: pair judged twice"),
        ([("q1", "d0", 0.5)], r"default row 1: malformed judgement"),
        ([(None, "d0", 1.0)], r"default row 1: malformed judgement"),
    ],
)
def test_a_bad_judgement_is_named_or_skipped(
    tmp_path: Path, entries: list[tuple], message: str
) -> None:
    folder = mteb(tmp_path / "x", "parquet", {"train": [*QRELS["train"][:1], *entries]})
    with pytest.raises(BadSample, match=message):
        BeirPairs(folder, on_error="raise")
    assert (len(BeirPairs(folder)), BeirPairs(folder).skipped) == (1, 1)


def test_bad_rows_of_the_corpus_and_numbers_as_ids(tmp_path: Path) -> None:
    documents = [
        {"_id": 7, "title": "T", "text": "a"},
        {"_id": 8, "title": "", "text": ""},
        {"_id": 9, "text": "b"},
    ]
    queries = [{"_id": 1, "text": "q"}]
    folder = mteb(tmp_path / "x", "parquet", {"test": [(1, 9, 1)]}, (documents, queries))
    _, corpus, qrels = read_beir(folder)
    assert (corpus.ids, list(corpus.items), corpus.skipped, qrels) == (
        ["7", "9"],
        ["T a", "b"],
        1,
        {"1": {"9": 1}},
    )


def test_other_data_sets_of_the_hub_are_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pairs"
    folder.mkdir()
    datasets.Dataset.from_dict({"query": ["q"], "document": ["d"]}).to_parquet(
        folder / "train.parquet"
    )
    (folder / "README.md").write_text(card({"default": {"train": "train.parquet"}}))
    assert (detect(folder), len(open_pairs(folder))) == ("folder", 1)
    # A header that leads out of the folder is not followed.
    for path in (
        "../x.parquet",
        "/etc/x.csv",
        '"/etc/x.csv"',
        "https://host/x.csv",
        '"\\x2e./x"',
        "*a",
        "[y, /x]",
        "\n - /x",
    ):
        (folder / "README.md").write_text(
            card({"corpus": {"train": path}, "queries": {"train": "y.parquet"}})
        )
        assert detect(folder) == "folder", path
    monkeypatch.chdir(tmp_path)
    assert detect("owner/nothing") == "hub"
    with pytest.raises(
        DualencError,
        match=r"owner/nothing: not a local file, and loading it as a hub data set fails",
    ):
        BeirPairs("owner/nothing")
