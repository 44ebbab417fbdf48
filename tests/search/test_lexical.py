"""BM25 beside an index, and searches that fuse both, against slow loops."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data import Corpus, RetrievalSet
from dualenc.errors import DualencError
from dualenc.evaluation.retrieval import bm25_run
from dualenc.io.checksums import recorded
from dualenc.search.fusion import fuse
from dualenc.search.lexical import K1, B, Lexical, split_terms
from dualenc.search.searcher import Searcher
from tests.helpers import toy
from tests.helpers.in_process import failure, run

TEXTS = st.lists(
    st.lists(st.sampled_from(toy.ANIMALS), min_size=1, max_size=8).map(" ".join),
    min_size=1,
    max_size=12,
)


def slow_bm25(texts: list[str], query: str) -> np.ndarray:
    """Lucene's BM25, word by word: idf · tf / (tf + k1 · (1 − b + b · length / mean length))."""
    words = [text.split() for text in texts]
    mean = sum(map(len, words)) / len(words)
    scores = np.zeros(len(texts))
    for word in query.split():
        holders = sum(word in own for own in words)
        idf = math.log(1 + (len(texts) - holders + 0.5) / (holders + 0.5))
        for row, own in enumerate(words):
            count = Counter(own)[word]
            scores[row] += idf * count / (count + K1 * (1 - B + B * len(own) / mean))
    return scores


@given(
    TEXTS,
    st.lists(st.sampled_from([*toy.ANIMALS, "nowhere"]), min_size=1, max_size=3, unique=True),
    st.integers(1, 12),
)
def test_scores_are_those_of_the_formula(texts: list[str], words: list[str], k: int) -> None:
    found = Lexical.build(texts).search(" ".join(words), k)
    slow = slow_bm25(texts, " ".join(words))
    assert len(found) == min(k, int((slow > 0).sum()))
    np.testing.assert_allclose(
        [score for _, score in found], np.sort(slow)[::-1][: len(found)], rtol=1e-5
    )
    np.testing.assert_allclose(
        [slow[row] for row, _ in found], [score for _, score in found], rtol=1e-5
    )


@pytest.mark.parametrize(
    ("text", "document", "query"),
    [
        ("The C of T-cells", ["c", "t", "cells"], None),
        ("Straße STRASSE ﬁn ２０２０", ["strasse", "strasse", "fin", "2020"], None),
        ("cafe\u0301 café", ["café", "café"], None),
        ("हिन्दी, தமிழ்", ["हिन्दी", "தமிழ்"], None),
        ("iPhone手机。很", ["iphone", "手", "机", "手机", "很"], ["iphone", "手机", "很"]),
        ("ｺｰﾋｰ", ["コ", "ー", "ヒ", "ー", "コー", "ーヒ", "ヒー"], ["コー", "ーヒ", "ヒー"]),
        ("서울에", ["서", "울", "에", "서울", "울에"], ["서울", "울에"]),
        ("ที่ดี5", ["ที่", "ดี", "ที่ดี", "5"], ["ที่ดี", "5"]),
        ("İstanbul I\u0307STANBUL i\u0307stanbul istanbul", ["istanbul"] * 4, None),
        (
            "co\u00adoper\u200bation zero\u2060width\ufeff co\u00adop",
            ["cooperation", "zerowidth", "coop"],
            None,
        ),
        ("می\u200cخواهم میخواهم", ["میخواهم"] * 2, None),
        ("ភាសា\u200bខ្មែរ", split_terms("ភាសាខ្មែរ"), split_terms("ភាសាខ្មែរ", is_query=True)),
    ],
)
def test_texts_are_split_by_unicode(
    text: str, document: list[str], query: list[str] | None
) -> None:
    assert split_terms(text) == document
    assert split_terms(text, is_query=True) == (query or document)


def test_folders_of_the_version_before_are_searched_by_its_terms(tmp_path: Path) -> None:
    """They hold what it split, so their queries are split likewise; what is built now has the new
    terms."""
    texts = ["visit İstanbul", "co\u00adoperation", "istanbul"]
    old = [split_terms(text, version=2) for text in texts]
    assert old == [["visit", "i\u0307stanbul"], ["co", "operation"], ["istanbul"]]
    Lexical.build(
        [" ".join(words) for words in (["visit", "dotted"], ["co", "operation"], ["istanbul"])]
    ).save(tmp_path, "x")
    vocabulary = tmp_path / "bm25" / "vocab.index.json"
    vocabulary.write_text(
        json.dumps(json.loads(vocabulary.read_text().replace("dotted", "i\u0307stanbul")))
    )
    files = recorded(
        tmp_path / "bm25",
        sorted(p.name for p in (tmp_path / "bm25").iterdir() if p.name != "meta.json"),
    )
    head = {"format": "dualenc bm25", "version": 2, "count": 3, "ids": "x"}
    (tmp_path / "bm25" / "meta.json").write_text(json.dumps(head | files))
    opened = Lexical.open(tmp_path, "x")
    assert [row for row, _ in opened.search("İSTANBUL", 3)] == [0]
    assert [row for row, _ in opened.search("co\u00adoperation", 3)] == [1]
    built = Lexical.build(texts)
    assert [row for row, _ in built.search("İSTANBUL", 3)] == [2, 0]
    assert [row for row, _ in built.search("cooperation", 3)] == [1]
    built.save(tmp_path, "x")
    assert json.loads((tmp_path / "bm25" / "meta.json").read_text())["version"] == 3


@pytest.mark.slow
def test_saved_and_opened_it_finds_the_same(made: Path) -> None:
    texts = toy.texts(60)
    searcher = Searcher.open(made / "index")
    assert searcher.lexical is not None
    for query in ("fox", "hen hen cat", "nowhere"):
        corpus = Corpus([f"d{i}" for i in range(60)], texts)
        expected = bm25_run(RetrievalSet(Corpus(["q"], [query]), corpus, {"q": {}}), 60)["q"]
        assert {
            f"d{row}": score for row, score in searcher.lexical.search(query, 60)
        } == pytest.approx(expected)


@pytest.mark.parametrize(("how", "weight"), [("rrf", 0.9), ("weighted", 0.3), ("weighted", 1.0)])
def test_hybrid_search_is_the_fusion_of_both_rankings(made: Path, how: Any, weight: float) -> None:
    query, searcher = "fox dog dog", Searcher.open(made / "index")
    assert searcher.lexical is not None
    dense = [(hit.id, hit.score) for hit in searcher.search(query, k=60)]
    words = [(f"d{row}", score) for row, score in searcher.lexical.search(query, 60)]
    expected = fuse([dense, words], how, weights=[weight, 1 - weight])[:10]
    hits = searcher.search(query, k=10, hybrid=how, weight=weight)
    np.testing.assert_allclose(
        [hit.score for hit in hits], [score for _, score in expected], atol=1e-5
    )
    assert hits[0].snippet == toy.texts(60)[int(hits[0].id[1:])]


def test_it_is_never_of_other_texts(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "index"
    shutil.copytree(made / "index", folder)
    shutil.rmtree(folder / "texts")
    (tmp_path / "gone.txt").write_text("d3\n")
    message = failure(capsys, "remove", folder, tmp_path / "gone.txt")
    assert "not the whole texts to rebuild it from; run dualenc index" in message
    shutil.rmtree(folder / "bm25")
    run("remove", folder, tmp_path / "gone.txt")
    with pytest.raises(DualencError, match=r"lacks a BM25 index; run dualenc index .*index --bm25"):
        Searcher.open(folder, made / "model", hybrid=True)
    shutil.copytree(made / "index" / "bm25", folder / "bm25")
    with pytest.raises(DualencError, match="is of other texts"):
        Searcher.open(folder, made / "model")
    run("index", folder, made / "docs.jsonl", "--bm25")
    assert "BM25 over 59 texts" in capsys.readouterr().out
    meta = json.loads((folder / "bm25" / "meta.json").read_text())
    (folder / "bm25" / "meta.json").write_text(json.dumps(meta | {"version": 1}))
    with pytest.raises(
        DualencError, match="is tokenized differently than by this version; run dualenc index"
    ):
        Searcher.open(folder, made / "model")
    (folder / "bm25" / "meta.json").write_text(json.dumps(meta))
    (folder / "bm25" / "data.csc.index.npy").write_bytes(b"broken")
    with pytest.raises(DualencError, match="corrupt"):
        Searcher.open(folder, made / "model")


@pytest.mark.parametrize(
    "name", ["bm25/data.csc.index.npy", "bm25/vocab.index.json", "texts/items.arrow"]
)
def test_verifying_reads_texts_and_words(
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setattr("dualenc.io.checksums.READ_AT_OPENING", 0)
    folder = tmp_path / "index"
    shutil.copytree(made / "index", folder)
    data = bytearray((folder / name).read_bytes())
    data[-20] ^= 1
    (folder / name).write_bytes(data)
    assert f"{name}: corrupt" in failure(capsys, "verify", folder)
    (folder / name).write_bytes(data[:-1])
    assert f"{name}: truncated" in failure(capsys, "verify", folder)


def test_mistakes(made: Path, tmp_path: Path) -> None:
    with pytest.raises(DualencError, match="no text contains a word"):
        Lexical.build(["", "the of"])
    run("index", made / "model", made / "docs.jsonl", "--out", tmp_path / "plain")
    with pytest.raises(DualencError, match="hybrid search needs a text"):
        Searcher.open(tmp_path / "plain").search("fox", hybrid="rrf")
    with pytest.raises(
        DualencError, match="the query is vector, and the model of this index takes a text"
    ):
        Searcher.open(tmp_path / "plain").search(np.ones(32))


@pytest.mark.parametrize("before", ["", "import jax; "], ids=["alone", "beside jax"])
def test_jax_is_not_asked_for_a_device(tmp_path: Path, before: str) -> None:
    """bm25s tries JAX, which takes most of a GPU's memory; a program that uses JAX keeps it."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("")
    (tmp_path / "jax" / "lax.py").write_text("raise SystemExit('JAX was used')")
    after = (
        "import sys; assert sys.modules.get('jax', ...) is not None; "
        "import jax; assert jax.__file__"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    code = f"{before}from dualenc.search.lexical import Lexical; Lexical.build(['a word']); {after}"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
