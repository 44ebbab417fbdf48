"""`dualenc evaluate retrieval` as a user runs it: files, numbers, resumption, processes, mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import pytrec_eval
from sentence_transformers import CrossEncoder

from dualenc.cli import main
from dualenc.data.beir import read_beir, read_qrels
from dualenc.evaluation.runs import read_per_query, read_trec
from tests.commands.toy import cross_encoder, text_model, write_beir


@pytest.fixture
def model(toy_text: Path) -> Path:
    return toy_text


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_beir(tmp_path_factory.mktemp("data") / "toy")


def evaluate(model: Path, *rest: object) -> int:
    return main(["evaluate", "retrieval", str(model), *map(str, rest)])


def test_one_folder(model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(model, data, "--out", tmp_path, "--bm25") == 0
    measured = json.loads((tmp_path / "metrics.json").read_text())
    scores = measured["systems"]["toy-text"]["datasets"]["toy"]
    assert (scores["queries"], scores["documents"]) == (8, 40)
    qrels = read_qrels(data / "qrels" / "test.tsv")
    for folder, system in ((tmp_path, "toy-text"), (tmp_path / "bm25", "BM25")):
        trec = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"}).evaluate(read_trec(folder / "run.trec"))
        expected = sum(query["ndcg_cut_10"] for query in trec.values()) / len(qrels)
        assert measured["systems"][system]["mean"]["ndcg@10"] == pytest.approx(expected)
        assert read_per_query(folder / "per_query.ndjson").keys() == qrels.keys()
    # A query is a part of its document, so BM25 all but solves this; random weights do not.
    assert measured["systems"]["BM25"]["mean"]["recall@10"] > 0.8
    assert all(query not in found for query, found in read_trec(tmp_path / "run.trec").items())
    report = (tmp_path / "report.html").read_text()
    assert "Best queries (toy, toy-text, by ndcg@10)" in report
    printed = capsys.readouterr().out
    assert "toy-text" in printed
    assert f"{scores['metrics']['ndcg@10']:.4f}" in printed


@pytest.mark.parametrize("how", ["rrf", "weighted"])
def test_hybrid_is_the_fusion_of_the_runs_beside_it(model: Path, data: Path, tmp_path: Path, how: str) -> None:
    assert evaluate(model, data, "--out", tmp_path, "--hybrid", how, "--weight", 0.3) == 0
    dense, words = read_trec(tmp_path / "run.trec"), read_trec(tmp_path / "bm25" / "run.trec")
    fused = read_trec(tmp_path / "hybrid" / "run.trec")
    for query, documents in fused.items():
        slow = dict.fromkeys(documents, 0.0)
        for run, weight in ((dense, 0.3), (words, 0.7)):
            scores = run.get(query, {})
            ordered = sorted(scores, key=lambda name: (scores[name], name), reverse=True)
            for rank, name in enumerate(ordered, 1):
                low, high = scores[ordered[-1]], scores[ordered[0]]
                slow[name] += weight * (1 / (60 + rank) if how == "rrf" else (scores[name] - low) / (high - low))
        assert documents == pytest.approx(slow, abs=1e-4)
    measured = json.loads((tmp_path / "metrics.json").read_text())
    assert set(measured["systems"]) == {"toy-text", "BM25", "hybrid"}
    assert measured["systems"]["hybrid"]["mean"]["recall@10"] > 0.8
    assert (measured["hybrid"], measured["weight"]) == (how, 0.3)
    assert evaluate(model, data, "--hybrid", "rrf", "--weight", 1.5) == 2


@pytest.mark.parametrize(("more", "folder"), [((), "."), (("--hybrid", "rrf"), "hybrid")])
def test_reranked_is_the_best_of_a_run_in_the_order_of_the_library(
    model: Path, data: Path, tmp_path: Path, more: tuple[str, ...], folder: str
) -> None:
    judge = cross_encoder(tmp_path / "judge")
    words = ("--out", tmp_path / "out", "--rerank", judge, "--rerank-top", 12, *more)
    assert evaluate(model, data, *words) == 0
    first = read_trec(tmp_path / "out" / folder / "run.trec")
    again = read_trec(tmp_path / "out" / "reranked" / "run.trec")
    collection = read_beir(data)
    texts = dict(zip(collection.corpus.ids, collection.corpus.items))
    queries = dict(zip(collection.queries.ids, collection.queries.items))
    theirs = CrossEncoder(str(judge))
    assert again.keys() == first.keys() == queries.keys()
    for query, documents in again.items():
        best = sorted(first[query], key=lambda name: (first[query][name], name), reverse=True)[:12]
        scores = theirs.predict([(queries[query], texts[name]) for name in best])
        assert documents == pytest.approx(dict(zip(best, scores.tolist())), abs=1e-5)
    measured = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert set(measured["systems"]) >= {"toy-text", "reranked"}
    assert (measured["rerank"], measured["rerank_top"]) == (str(judge), 12)


def test_several_folders_have_a_mean(model: Path, data: Path, tmp_path: Path) -> None:
    other = write_beir(tmp_path / "other", seed=1)
    assert evaluate(model, data, other, "--out", tmp_path / "out") == 0
    system = json.loads((tmp_path / "out" / "metrics.json").read_text())["systems"]["toy-text"]
    values = [system["datasets"][name]["metrics"]["mrr@10"] for name in ("toy", "other")]
    assert system["mean"]["mrr@10"] == pytest.approx(sum(values) / 2)
    assert (tmp_path / "out" / "other" / "run.trec").is_file()


def test_self_matches_can_be_kept(model: Path, data: Path, tmp_path: Path) -> None:
    assert evaluate(model, data, "--out", tmp_path, "--keep_self_matches", "--depth", "100") == 0
    assert all(query in found for query, found in read_trec(tmp_path / "run.trec").items())


def test_finished_embeddings_are_not_computed_again(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evaluate(model, data, "--out", tmp_path) == 0
    first = (tmp_path / "run.trec").read_bytes()
    (tmp_path / "run.trec").unlink()
    (tmp_path / "embeddings" / "queries-test" / "shard-00000.npy").unlink()  # as if killed before it was written
    encoded = []
    from dualenc.search import embed as module

    encode = module._Encoder._encode
    monkeypatch.setattr(module._Encoder, "_encode", lambda *given: encoded.append(1) or encode(*given))
    assert evaluate(model, data, "--out", tmp_path) == 0
    assert len(encoded) == 1  # the queries, not the documents
    assert (tmp_path / "run.trec").read_bytes() == first


def test_mistakes_are_told_in_one_line_and_leave_nothing(
    model: Path, toy_clip: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spaced = write_beir(tmp_path / "spaced")
    (spaced / "queries.jsonl").write_text('{"_id": "a b", "text": "wing"}\n')
    (spaced / "qrels" / "test.tsv").write_text("a b\td1\t1\n")
    unjudged = write_beir(tmp_path / "unjudged")
    (unjudged / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n")
    twin = write_beir(tmp_path / "twin" / "toy")
    out = tmp_path / "out"
    for words, message in [
        ((model, data, "--split", "dev"), "no split 'dev'; there are: test"),
        ((model, tmp_path / "absent"), "no such folder"),
        ((model, unjudged), "no usable judgement"),
        ((model, spaced), "'a b' is empty or holds white space"),
        ((model, data, twin), "two folders are named toy"),
        ((model, data, "--depth", "10"), "depth=10"),
        ((toy_clip, data), "needs kind query-document or vector; use `dualenc evaluate image-text`"),
    ]:
        assert evaluate(*words, "--out", out) == 2  # type: ignore[arg-type]
        error = capsys.readouterr().err.strip().splitlines()
        assert message in error[-1], error
        assert not out.exists()


@pytest.mark.slow
def test_texts_and_weights_replaced_under_the_same_names_count_anew(tmp_path: Path) -> None:
    runs = []
    for seed_of_texts, seed_of_weights, out in ((0, 0, "out"), (1, 0, "out"), (1, 1, "out"), (1, 1, "fresh")):
        shutil.rmtree(tmp_path / "toy", ignore_errors=True)
        data = write_beir(tmp_path / "toy", seed=seed_of_texts)
        model = text_model(tmp_path / "model", seed=seed_of_weights)
        assert evaluate(model, data, "--out", tmp_path / out) == 0
        runs.append((tmp_path / out / "run.trec").read_bytes())
    assert runs[2] == runs[3]
    assert len(set(runs)) == 3


SCRIPT = "<script>alert(1)</script>"


def test_a_report_shows_scripts_and_formulas_as_text(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ids, queries and folder names are whatever a stranger wrote: HTML, formulas, mathematics, escapes."""
    data = write_beir(tmp_path / "$x_{ & <b>")
    for name in ("corpus", "queries"):
        path = data / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["text"] += f" {SCRIPT} \x1b[2J"
            row["_id"] += f"={SCRIPT}\x1b]0;owned\x07"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = data / "qrels" / "test.tsv"
    head, *lines = judged.read_text().splitlines()
    fields = [line.split("\t") for line in lines]
    mark = f"={SCRIPT}\x1b]0;owned\x07"
    judged.write_text("\n".join([head, *(f"{q}{mark}\t{d}{mark}\t{g}" for q, d, g in fields)]) + "\n")
    assert evaluate(model, data, "--out", tmp_path / "out") == 0
    report = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in report
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in report
    assert "\x1b" not in report
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out.replace("\x1b[1m", "")
    assert "\x07" not in captured.out + captured.err


@pytest.mark.parametrize("words", ["--depth 0", "--depth -1", "--batch-size 0", "--device foo", "--split ../test"])
def test_options_out_of_range_are_refused_before_any_work(
    words: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(model, data, "--out", tmp_path / "out", *words.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("dualenc: error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("file", ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv"])
def test_judgements_that_fit_no_query_leave_nothing(
    file: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_beir(tmp_path / "data")
    (data / file).write_bytes(b"caf\xe9\n")
    assert evaluate(model, data, "--out", tmp_path / "out") == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_small_vectors_are_compared_by_their_bytes(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(model, data, "--out", tmp_path, "--small-vectors") == 0
    measured = json.loads((tmp_path / "metrics.json").read_text())
    rows = measured["small_vectors"]["toy"]
    whole = measured["systems"]["toy-text"]["mean"]["ndcg@10"]
    assert rows[0]["vectors"] == "32 float32"
    assert rows[0]["ndcg@10"] == pytest.approx(whole)
    assert {row["vectors"]: row["bytes"] for row in rows}["32 binary, rescored"] == 4
    assert "Bytes of a vector, toy" in capsys.readouterr().out
    assert evaluate(model, data, "--out", tmp_path / "dims", "--dims", "16,8") == 0
    rows = json.loads((tmp_path / "dims" / "metrics.json").read_text())["small_vectors"]["toy"]
    assert {row["vectors"].split()[0] for row in rows} == {"16", "8"}


@pytest.mark.parametrize("dims", ["33", "0", "a,b"])
def test_lengths_that_are_none(
    dims: str, model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(model, data, "--out", tmp_path, "--dims", dims) == 2
    assert "give numbers from 1 to 32" in capsys.readouterr().err
