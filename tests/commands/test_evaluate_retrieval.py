"""`dualenc evaluate retrieval` as a user runs it: files and numbers, with trec_eval as the
witness."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import pytrec_eval
import torch

from dualenc.data.readers.beir import expand_name, read_beir
from dualenc.encoders import load_model
from dualenc.encoders.index_encoder import IndexEncoder
from dualenc.search import Index
from dualenc.search.documents import fingerprint
from dualenc.search.fusion import fuse
from tests.helpers.hub_collections import nano
from tests.helpers.in_process import evaluated, failure, run
from tests.helpers.result_files import read_per_query, read_qrels
from tests.helpers.toy import ANIMALS, WORDS, text_model, write_beir


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_beir(tmp_path_factory.mktemp("data") / "toy")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, toy_text: Path, data: Path) -> Path:
    """An index of the documents of `data`, with the texts to show."""
    folder = tmp_path_factory.mktemp("indexes") / "index"
    run("index", toy_text, data, "--out", folder)
    return folder


def adapted(folder: Path, toy_text: Path, index: Path, trained_ids: Sequence[str]) -> Path:
    """The query tower of a model with other weights, for an index."""
    model = load_model(toy_text)
    encoder = IndexEncoder(model, Index.open(index).provenance)
    with torch.no_grad():
        for weight in encoder.left.parameters():
            weight.add_(
                0.1
                * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
            )
    encoder.trained_ids = list(trained_ids)
    encoder.save(folder)
    return folder


def read_trec(file: Path) -> dict[str, dict[str, float]]:
    with open(file, encoding="utf-8") as stream:
        return pytrec_eval.parse_run(stream)


def trec_ndcg(qrels: dict[str, dict[str, int]], file: Path) -> float:
    scores = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"}).evaluate(read_trec(file))
    return sum(query["ndcg_cut_10"] for query in scores.values()) / len(qrels)


@pytest.mark.slow
def test_one_folder(
    toy_text: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    systems = evaluated("retrieval", tmp_path, toy_text, data, "--bm25")["systems"]
    scores = systems["toy-text"]["datasets"]["toy"]
    assert (scores["queries"], scores["documents"]) == (8, 40)
    qrels = read_qrels(data / "qrels" / "test.tsv")
    for folder, system in ((tmp_path, "toy-text"), (tmp_path / "bm25", "BM25")):
        assert systems[system]["mean"]["ndcg@10"] == pytest.approx(
            trec_ndcg(qrels, folder / "run.trec")
        )
        assert read_per_query(folder / "per_query.ndjson").keys() == qrels.keys()
    # A query is a part of its document, so BM25 all but solves this; random weights do not.
    assert systems["BM25"]["mean"]["recall@10"] > 0.8
    assert all(query not in found for query, found in read_trec(tmp_path / "run.trec").items())
    assert "All metrics" in (tmp_path / "report.html").read_text()
    assert f"{scores['metrics']['ndcg@10']:.4f}" in capsys.readouterr().out
    evaluated("retrieval", tmp_path, toy_text, data, "--keep_self_matches")
    assert all(query in found for query, found in read_trec(tmp_path / "run.trec").items())


@pytest.mark.slow
def test_a_table_of_pairs_is_a_test_set_beside_a_beir_folder(
    toy_text: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Left texts are the queries, right texts the corpus; a query in two rows has two right
    documents."""
    pairs = tmp_path / "pairs.csv"
    pairs.write_text(
        "a,b\nwhat is a fox,an animal\nwhat is a wing,a part of a bird\nwhat is a fox,it is red\n"
    )
    assert "it is unclear which column is left_column" in failure(
        capsys, "evaluate", "retrieval", toy_text, pairs
    )
    named = ("--left-column", "a", "--right-column", "b", "--bm25")
    system = evaluated("retrieval", tmp_path / "out", toy_text, data, pairs, *named)["systems"][
        "toy-text"
    ]
    assert system["datasets"].keys() == {"toy", "pairs"}
    bars = capsys.readouterr().err
    assert all(f"embed {name}/documents:" in bars for name in ("toy", "pairs"))
    scores = system["datasets"]["pairs"]
    assert (scores["queries"], scores["documents"]) == (2, 3)
    qrels = {"left-0": {"right-0": 1, "right-2": 1}, "left-1": {"right-1": 1}}
    expected = trec_ndcg(qrels, tmp_path / "out" / "pairs" / "run.trec")
    assert scores["metrics"]["ndcg@10"] == pytest.approx(expected)
    values = [system["datasets"][name]["metrics"]["mrr@10"] for name in ("toy", "pairs")]
    assert system["mean"]["mrr@10"] == pytest.approx(sum(values) / 2)


@pytest.mark.slow
def test_nano_beir_is_thirteen_collections_of_the_hub_and_their_mean(
    toy_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Folders where the hub's names lead, in the hub's layout, give what BEIR folders of the same
    rows give."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    values = []
    for number, name in enumerate(expand_name("NanoBEIR")):
        folder = write_beir(tmp_path / f"beir{number}", 20, 4, seed=number)
        documents, queries = (
            [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]
            for part in ("corpus", "queries")
        )
        qrels = read_qrels(folder / "qrels" / "test.tsv")
        nano(
            Path(name),
            documents,
            queries,
            [(query, document) for query in qrels for document in qrels[query]],
        )
    system = evaluated("retrieval", tmp_path / "out", toy_text, "NanoBEIR")["systems"]["toy-text"]
    for number, name in enumerate(expand_name("NanoBEIR")):
        qrels = read_qrels(tmp_path / f"beir{number}" / "qrels" / "test.tsv")
        values.append(trec_ndcg(qrels, tmp_path / "out" / Path(name).name / "run.trec"))
        scores = system["datasets"][Path(name).name]
        assert (scores["queries"], scores["documents"]) == (4, 20)
        assert scores["metrics"]["ndcg@10"] == pytest.approx(values[-1])
    assert (len(values), system["mean"]["ndcg@10"]) == (13, pytest.approx(sum(values) / 13))
    # The only system is named once, which leaves room for all metrics.
    caption, _, header, *_ = capsys.readouterr().out.splitlines()
    assert caption == "Retrieval by toy-text"
    assert header.split()[:2] == ["data", "ndcg@10"]
    assert header.split()[-2:] == ["queries", "documents"]
    one = evaluated("retrieval", tmp_path / "one", toy_text, "beir0")["systems"]["toy-text"]
    assert one["mean"]["ndcg@10"] == pytest.approx(values[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rrf", "weighted"])
def test_hybrid_is_the_fusion_of_the_runs_beside_it(
    toy_text: Path, data: Path, tmp_path: Path, method: Any
) -> None:
    measured = evaluated("retrieval", tmp_path, toy_text, data, "--hybrid", method, "--weight", 0.3)
    both = [read_trec(tmp_path / "run.trec"), read_trec(tmp_path / "bm25" / "run.trec")]
    for query, documents in read_trec(tmp_path / "hybrid" / "run.trec").items():
        rankings = [
            sorted(one.get(query, {}).items(), key=lambda pair: pair[::-1], reverse=True)
            for one in both
        ]
        expected = dict(fuse(rankings, method, weights=[0.3, 0.7]))
        assert documents == pytest.approx({name: expected[name] for name in documents}, abs=1e-4)
    assert set(measured["systems"]) == {"toy-text", "BM25", "hybrid"}
    assert measured["systems"]["hybrid"]["mean"]["recall@10"] > 0.8
    assert (measured["hybrid"], measured["weight"]) == (method, 0.3)


def test_a_model_with_the_name_of_another_system_keeps_its_results(
    toy_text: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "hybrid").symlink_to(toy_text)
    measured = evaluated(
        "retrieval", tmp_path / "out", tmp_path / "hybrid", data, "--hybrid", "rrf"
    )["systems"]
    expected = evaluated("retrieval", tmp_path / "alone", toy_text, data)["systems"]["toy-text"][
        "mean"
    ]
    assert set(measured) == {"hybrid (model)", "BM25", "hybrid"}
    assert measured["hybrid (model)"]["mean"] == expected


def numbered(folder: Path, offset: int) -> Path:
    """Ten queries and ten documents, both with the ids 0 to 9; number n is answered by number n +
    offset."""
    (folder / "qrels").mkdir(parents=True)
    words = [*WORDS[:6], *ANIMALS[:4]]
    queries = [{"_id": str(row), "text": words[(row + offset) % 10]} for row in range(10)]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    documents = [{"_id": str(row), "text": word} for row, word in enumerate(words)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (folder / "qrels" / "test.tsv").write_text(
        "".join(f"{row}\t{(row + offset) % 10}\t1\n" for row in range(10))
    )
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("offset", "judged"), [(0, 10), (1, 0)])
def test_queries_and_documents_may_be_numbered_alike(
    toy_text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, offset: int, judged: int
) -> None:
    systems = evaluated(
        "retrieval", tmp_path / "out", toy_text, numbered(tmp_path / "n", offset), "--hybrid", "rrf"
    )["systems"]
    assert systems["BM25"]["mean"]["ndcg@10"] == 1
    assert [system["mean"]["recall@100"] for system in systems.values()] == [1, 1, 1]
    counts = f"{judged} of these documents are judged and kept, the other {10 - judged} are removed"
    assert caplog.text.count(f"n: 10 of 10 queries have the id of a document: {counts}") == 1
    retrieved = read_trec(tmp_path / "out" / "run.trec")
    assert sum(query in documents for query, documents in retrieved.items()) == judged


@pytest.mark.slow
def test_documents_of_an_index_are_ranked_as_if_they_were_embedded(
    toy_text: Path, data: Path, index: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = fingerprint(index)
    own = evaluated("retrieval", tmp_path / "own", toy_text, data, "--bm25")["systems"]
    again = evaluated(
        "retrieval", tmp_path / "again", toy_text, data, "--bm25", "--documents", index
    )["systems"]
    for system in ("toy-text", "BM25"):
        assert again[system]["datasets"]["toy"] == own[system]["datasets"]["toy"]
    bare = tmp_path / "toy"
    shutil.copytree(data, bare)
    (bare / "corpus.jsonl").unlink()
    with open(bare / "qrels" / "test.tsv", "a") as file:
        file.write("d1\tunknown\t1\n")
    scores = evaluated("retrieval", tmp_path / "bare", toy_text, bare, "--documents", index)[
        "systems"
    ]["toy-text"]
    assert "1 judged document that is not in the corpus (kept as never found)" in caplog.text
    assert (scores["datasets"]["toy"]["queries"], scores["datasets"]["toy"]["documents"]) == (8, 40)
    expected = trec_ndcg(read_qrels(bare / "qrels" / "test.tsv"), tmp_path / "bare" / "run.trec")
    assert scores["mean"]["ndcg@10"] == pytest.approx(expected)
    # In half precision.
    embedded = read_trec(tmp_path / "own" / "run.trec")
    for query, ranking in read_trec(tmp_path / "bare" / "run.trec").items():
        assert ranking == pytest.approx(embedded[query], abs=1e-3)
    assert fingerprint(index) == before


@pytest.mark.slow
def test_an_adapted_model_is_scored_by_what_it_has_seen(
    toy_text: Path, data: Path, index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    qrels = read_qrels(data / "qrels" / "test.tsv")
    seen = sorted(qrels)[:3]
    trained = [name for query in seen for name in qrels[query]]
    model = adapted(tmp_path / "adapted", toy_text, index, [*trained, "no judged document"])
    systems = evaluated("retrieval", tmp_path / "out", model, data, "--documents", index)["systems"]
    run_file = tmp_path / "out" / "run.trec"
    ranking = read_trec(run_file)
    queries = load_model(model).encode_query(list(read_beir(data).queries.items))
    documents = Index.open(index)
    for query, vector in zip(read_beir(data).queries.ids, queries):
        scores = {hit.id: hit.score for hit in documents.search(vector, 40)[0] if hit.id != query}
        assert ranking[query] == pytest.approx(scores, abs=2e-3)
    parts = {
        "adapted: documents seen in training": seen,
        "adapted: documents not seen": sorted(qrels)[3:],
    }
    assert list(systems) == ["adapted", *parts]
    for system, part in parts.items():
        scores = systems[system]["datasets"]["toy"]
        assert scores["queries"] == len(part)
        expected = trec_ndcg({query: qrels[query] for query in part}, run_file)
        assert scores["metrics"]["ndcg@10"] == pytest.approx(expected)
    assert systems["adapted"]["mean"]["ndcg@10"] == pytest.approx(trec_ndcg(qrels, run_file))
    shown = capsys.readouterr().out
    assert all(system in shown for system in parts)


def test_documents_that_do_not_fit(
    toy_text: Path, data: Path, index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = text_model(tmp_path / "other", seed=1)
    run("index", other, data, "--out", tmp_path / "theirs")
    model = adapted(tmp_path / "adapted", toy_text, index, [])
    bare = write_beir(tmp_path / "bare")
    (bare / "corpus.jsonl").unlink()
    write_beir(tmp_path / "renamed")
    (tmp_path / "renamed" / "qrels" / "test.tsv").write_text("d0\tx1\t1\nd1\tx2\t1\n")
    write_beir(tmp_path / "fewer", documents=30)
    (tmp_path / "pairs.csv").write_text("query,document\na,b\n")
    documents = ("--documents", index)
    cases = {
        (
            model,
            bare,
        ): "adapted: encodes queries for the vectors of an index; name it by --documents INDEX",
        (
            model,
            data,
            "--documents",
            tmp_path / "theirs",
        ): "the model was adapted for an index of other vectors",
        (other, data, *documents): "was built with other weights than the model has now",
        (toy_text, tmp_path / "renamed", *documents): "holds none of its 2 judged documents",
        (toy_text, tmp_path / "fewer", *documents, "--bm25"): "its corpus lacks 'd30', which is in",
        (toy_text, tmp_path / "pairs.csv", *documents): "--documents needs a BEIR folder",
        (toy_text, data, "--documents", data): "its corpus consists of texts; index them",
    }
    for words, message in cases.items():
        told = failure(capsys, "evaluate", "retrieval", *words, "--out", tmp_path / "out")
        assert message in told
        assert not (tmp_path / "out").exists()
