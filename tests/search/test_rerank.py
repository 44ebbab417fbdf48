"""A cross-encoder's second look, against sentence-transformers' own `predict` and `rank`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers import CrossEncoder

from dualenc.data import Corpus
from dualenc.errors import DualencError
from dualenc.search.rerank import open_cross_encoder, rerank
from dualenc.search.searcher import Query, Searcher
from dualenc.search.texts import add_texts
from tests.commands import toy
from tests.commands.in_process import failure, found, run
from tests.local_qdrant import url_of, use_folders

LONG = "fox " + "ant " * 100 + "hen"


def ranked(judge: Path, query: str, names: list[str], texts: list[str]) -> list[tuple[str, float]]:
    """Ids and scores of some documents as sentence-transformers ranks them."""
    return [(names[row["corpus_id"]], float(row["score"])) for row in CrossEncoder(str(judge)).rank(query, texts)]


@given(st.lists(st.lists(st.integers(-3, 3), max_size=5), max_size=4))
def test_each_query_keeps_its_own_and_equal_scores_their_order(scores: list[list[int]]) -> None:
    pairs = [[(f"q{q}", f"{q} {d} {own}") for d, own in enumerate(row)] for q, row in enumerate(scores)]
    reranked = rerank(lambda texts: np.array([float(text.split()[2]) for _, text in texts]), pairs)
    assert len(reranked) == len(scores)
    for row, (order, own) in zip(scores, reranked):
        assert [(-row[place], place) for place in order.tolist()] == sorted((-s, d) for d, s in enumerate(row))
        assert own.tolist() == [row[place] for place in order.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", [None, "rrf"])
def test_the_best_of_a_search_in_the_order_of_the_library(made: Path, hybrid: Any) -> None:
    judge = open_cross_encoder(str(made / "judge"))[0]
    searcher = Searcher.open(made / "index", cross_encoder=judge)
    texts = dict(zip([f"d{i}" for i in range(60)], toy.texts(60)))
    names = [hit.id for hit in searcher.search(Query("left", "fox dog", k=20, hybrid=hybrid))]
    after = searcher.search(Query("left", "fox dog", k=7, rerank=20, hybrid=hybrid))
    expected = ranked(made / "judge", "fox dog", names, [texts[name] for name in names])[:7]
    assert [hit.id for hit in after] == [name for name, _ in expected]
    np.testing.assert_allclose([hit.score for hit in after], [score for _, score in expected], atol=1e-5)
    assert [hit.snippet for hit in after] == [texts[name] for name, _ in expected]
    assert [hit.id for hit in after] != names[:7], "or nothing was tested"


def test_the_command_shows_the_scores_of_the_cross_encoder(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("search", made / "index", "fox dog", "--rerank", made / "judge")
    shown = found(capsys, *words[1:], "--rerank-top", 60, "-k", 60)
    expected = ranked(made / "judge", "fox dog", [f"d{i}" for i in range(60)], toy.texts(60))
    assert {row["id"]: row["score"] for row in shown} == pytest.approx(dict(expected), abs=1e-5)
    assert "k is 10, and 9 are reranked" in failure(capsys, *words, "--rerank-top", 9)
    message = failure(capsys, *words[:-1], made / "model")
    assert "model: is a BertModel; give a model that was trained" in message


def test_the_whole_text_is_read_and_not_its_snippet(made: Path, tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_text(json.dumps({"_id": "long", "text": LONG}))
    run("index", made / "model", tmp_path / "docs.jsonl", "--out", tmp_path / "index", "--texts")
    read: list[tuple[str, str]] = []

    def judge(pairs: list[tuple[str, str]]) -> np.ndarray:
        read.extend(pairs)
        return np.zeros(len(pairs))

    Searcher.open(tmp_path / "index", cross_encoder=judge).search(Query("left", "hen", k=1, rerank=1))  # type: ignore[arg-type]
    assert read == [("hen", LONG)]


@pytest.mark.slow
def test_texts_beside_an_engine(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("embed", made / "model", made / "docs.jsonl", "--out", tmp_path / "emb")
    use_folders(monkeypatch)
    run("push", tmp_path / "emb", url_of(tmp_path / "store"), "--out", tmp_path / "pushed")
    words: list[Any] = ["search", tmp_path / "pushed", "fox dog"]
    words += ["--rerank", made / "judge", "--rerank-top", 60]
    assert "keeps no texts for a cross-encoder to read" in failure(capsys, *words)
    run("index", tmp_path / "pushed", "--texts")
    assert "60 texts kept for cross-encoders" in capsys.readouterr().out
    results = found(capsys, *words[1:])
    expected = ranked(made / "judge", "fox dog", [f"d{i}" for i in range(60)], toy.texts(60))[:10]
    assert {row["id"]: row["score"] for row in results} == pytest.approx(dict(expected), abs=1e-5)
    assert "searched by vectors alone" in failure(capsys, "index", tmp_path / "pushed", "--texts", "--bm25")


def test_texts_are_never_those_of_another_index(made: Path, tmp_path: Path) -> None:
    judge = open_cross_encoder(str(made / "judge"))[0]
    folder = tmp_path / "index"
    shutil.copytree(made / "index", folder)
    (folder / "texts" / "items.arrow").write_bytes(b"broken")
    with pytest.raises(DualencError, match=r"items\.arrow: truncated or corrupt"):
        Searcher.open(folder, made / "model", cross_encoder=judge)
    for name in ("bm25", "texts"):
        shutil.rmtree(folder / name)
    (tmp_path / "gone.txt").write_text("d3\n")
    run("index", folder, "--remove", tmp_path / "gone.txt")
    with pytest.raises(DualencError, match=r"keeps no texts .*; run dualenc index INDEX --texts"):
        Searcher.open(folder, made / "model", cross_encoder=judge)
    shutil.copytree(made / "index" / "texts", folder / "texts")
    with pytest.raises(DualencError, match="is of other texts than the index"):
        Searcher.open(folder, made / "model", cross_encoder=judge)


def test_mistakes(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DualencError, match="the data has no text 'd0'"):
        add_texts(made / "index", Corpus(["x"], ["fox"]))
    with pytest.raises(DualencError, match="its data holds vectors"):
        add_texts(made / "index", Corpus(["d0"], [np.zeros(3)], "vector"))
    with pytest.raises(DualencError, match="reranking needs a text, and a cross-encoder"):
        Searcher.open(made / "index").search(Query("left", "fox", rerank=10))
    searcher = Searcher.open(made / "index", cross_encoder=lambda texts: np.zeros(len(texts)))
    with pytest.raises(DualencError, match="reranking needs a text"):
        searcher.search(Query(ids=("d1",), rerank=10))
    assert searcher.texts is not None
    with pytest.raises(DualencError, match="has no text of 'nobody'"):
        searcher.texts.of_ids(["d1", "nobody"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DualencError, match="empty: no cross-encoder that sentence-transformers reads"):
        open_cross_encoder(str(tmp_path / "empty"))
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(DualencError, match=r"needs sentence-transformers; pip install 'dualenc\[mining\]'"):
        open_cross_encoder("any")


HOSTILE = "torch.distributed.run.main"
MODULE = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.dense.Dense"}


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config_sentence_transformers.json", {"activation_fn": HOSTILE}, "is no activation of torch.nn"),
        ("config.json", {"sentence_transformers": {"activation_fn": HOSTILE}}, "is no activation of torch.nn"),
        ("config.json", {"sbert_ce_default_activation_function": HOSTILE}, "is no activation of torch.nn"),
        ("config.4.0.0.json", {"sbert_ce_default_activation_function": HOSTILE}, "is no activation of torch.nn"),
        ("1_Dense/config.json", {"activation_function": "torch.nn.modules.this.that"}, "is no activation of torch.nn"),
        ("sentence_bert_config.json", {"model_args": {"attn_implementation": "me/kernel"}}, "are not passed on"),
        ("sentence_bert_config.json", {"modality_config": {"text": {"method": "push_to_hub"}}}, "other than forward"),
        ("config.json", {"attn_implementation": "me/kernel"}, "is code from the hub"),
        ("adapter_config.json", {"base_model_name_or_path": "elsewhere"}, "holds adapters of another model"),
        ("modules.json", [MODULE | {"type": HOSTILE}], f"its module {HOSTILE} is not supported"),
        ("modules.json", [MODULE], r"no model\.safetensors"),
    ],
)
def test_a_folder_that_leads_to_code_is_refused_before_it_is_loaded(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, change: Any, message: str
) -> None:
    monkeypatch.setattr("torch.distributed.run.main", lambda: pytest.fail("was called"))
    monkeypatch.setattr("sentence_transformers.CrossEncoder.__init__", lambda *_, **__: pytest.fail("was loaded"))
    judge = tmp_path / "judge"
    shutil.copytree(made / "judge", judge)
    path = judge / file
    path.parent.mkdir(exist_ok=True)
    if file == "modules.json":
        (judge / "model.safetensors").rename(judge / "other.safetensors")
    else:
        change = (json.loads(path.read_text()) if path.is_file() else {}) | change
    path.write_text(json.dumps(change))
    with pytest.raises(DualencError, match=message) as error:
        open_cross_encoder(str(judge))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("activation", ["torch.nn.modules.linear.Identity", "torch.nn.Tanh", None])
def test_activations_of_torch_are_applied(made: Path, tmp_path: Path, activation: str | None) -> None:
    shutil.copytree(made / "judge", tmp_path / "judge")
    path = tmp_path / "judge" / "config_sentence_transformers.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"activation_fn": activation}))
    pairs = [("fox", "hen"), ("fox", "dog")]
    expected = CrossEncoder(str(tmp_path / "judge")).predict(pairs)
    np.testing.assert_allclose(open_cross_encoder(str(tmp_path / "judge"))[0](pairs), expected, atol=1e-6)
