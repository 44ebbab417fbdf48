"""`dualenc evaluate retrieval` as a user runs it: files, numbers, resumption, processes, mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytrec_eval
from sentence_transformers import CrossEncoder

from dualenc.cli import main
from dualenc.data.beir import read_beir, read_qrels
from dualenc.evaluation.runs import read_per_query, read_trec
from dualenc.search.where import rows_that_meet
from tests.commands.toy import ANIMALS, WORDS, cross_encoder, text_model, write_beir


@pytest.fixture
def model(toy_text: Path) -> Path:
    return toy_text


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_beir(tmp_path_factory.mktemp("data") / "toy")


def evaluate(model: Path, *rest: object) -> int:
    return main(["evaluate", "retrieval", str(model), *map(str, rest)])


@pytest.mark.slow
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
    assert "Best and worst queries of toy-text on toy" in report
    printed = capsys.readouterr().out
    assert "toy-text" in printed
    assert f"{scores['metrics']['ndcg@10']:.4f}" in printed


@pytest.mark.slow
@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_a_table_of_pairs_is_a_test_set(model: Path, tmp_path: Path, form: str) -> None:
    """Left texts are the queries, right texts the corpus; a query in two rows has two right documents."""
    asked = ["what is a fox", "what is a wing", "what is a fox", "where is the sea"]
    answers = ["an animal", "a part of a bird", "it is red", "around the land"]
    pairs = tmp_path / f"pairs.{form}"
    columns = {"question": asked, "answer": answers}
    if form == "jsonl":
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif form == "csv":
        pairs.write_text("question,answer\n" + "".join(f"{q},{a}\n" for q, a in zip(asked, answers, strict=True)))
    else:
        pq.write_table(pa.table(columns), pairs)
    assert evaluate(model, pairs, "--out", tmp_path / "out", "--bm25") == 0
    measured = json.loads((tmp_path / "out" / "metrics.json").read_text())
    scores = measured["systems"]["toy-text"]["datasets"]["pairs"]
    assert (scores["queries"], scores["documents"]) == (3, 4)
    qrels = {"left-0": {"right-0": 1, "right-2": 1}, "left-1": {"right-1": 1}, "left-2": {"right-3": 1}}
    trec = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"}).evaluate(read_trec(tmp_path / "out" / "run.trec"))
    expected = sum(query["ndcg_cut_10"] for query in trec.values()) / 3
    assert scores["metrics"]["ndcg@10"] == pytest.approx(expected)


@pytest.mark.slow
def test_columns_of_pairs_can_be_named_and_a_beir_folder_may_stand_beside(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = tmp_path / "pairs.csv"
    pairs.write_text("a,b\nfox,an animal\nwing,of a bird\n")
    assert evaluate(model, pairs, "--out", tmp_path / "out") == 2
    assert "cannot tell which column is left_column; name it (columns: a, b)" in capsys.readouterr().err
    named = ("--left-column", "a", "--right-column", "b")
    assert evaluate(model, data, pairs, "--out", tmp_path / "out", *named) == 0
    measured = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert measured["systems"]["toy-text"]["datasets"].keys() == {"toy", "pairs"}
    assert evaluate(model, pairs, "--out", tmp_path / "other", *named, "--where", "year>2000") == 2
    assert "--where is for fields of a BEIR folder" in capsys.readouterr().err


@pytest.mark.slow
def test_bm25_finds_words_in_scripts_without_spaces(model: Path, tmp_path: Path) -> None:
    documents = [
        "猫在睡觉。",
        "北京是中国的首都",
        "東京は日本の首都です",
        "กรุงเทพเป็นเมืองหลวง",
        "vitamin K",
        "vitamin C",
    ]
    queries = ["猫", "中国首都", "日本", "เมืองหลวงคือ", "vitamin k", "C"]
    data = tmp_path / "scripts"
    (data / "qrels").mkdir(parents=True)
    for name, texts in (("corpus", documents), ("queries", queries)):
        lines = (json.dumps({"_id": f"{name}{row}", "text": text}) for row, text in enumerate(texts))
        (data / f"{name}.jsonl").write_text("\n".join(lines))
    (data / "qrels" / "test.tsv").write_text("".join(f"queries{row}\tcorpus{row}\t1\n" for row in range(6)))
    assert evaluate(model, data, "--out", tmp_path / "out", "--bm25") == 0
    scores = read_per_query(tmp_path / "out" / "bm25" / "per_query.ndjson")
    assert [query["ndcg@10"] for query in scores.values()] == [1] * 6


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_several_folders_have_a_mean(model: Path, data: Path, tmp_path: Path) -> None:
    other = write_beir(tmp_path / "other", seed=1)
    assert evaluate(model, data, other, "--out", tmp_path / "out") == 0
    system = json.loads((tmp_path / "out" / "metrics.json").read_text())["systems"]["toy-text"]
    values = [system["datasets"][name]["metrics"]["mrr@10"] for name in ("toy", "other")]
    assert system["mean"]["mrr@10"] == pytest.approx(sum(values) / 2)
    assert (tmp_path / "out" / "other" / "run.trec").is_file()


@pytest.mark.slow
def test_self_matches_can_be_kept(model: Path, data: Path, tmp_path: Path) -> None:
    assert evaluate(model, data, "--out", tmp_path, "--keep_self_matches", "--depth", "100") == 0
    assert all(query in found for query, found in read_trec(tmp_path / "run.trec").items())


@pytest.mark.slow
def test_grades_below_minus_one_are_not_relevant(model: Path, tmp_path: Path) -> None:
    data = write_beir(tmp_path / "toy")
    judgements = data / "qrels" / "test.tsv"
    head, first, *others = judgements.read_text().splitlines()
    judgements.write_text("\n".join([head, *others, first[:-1] + "-2", f"{first.split()[0]}\td9\t-3"]) + "\n")
    assert evaluate(model, data, "--out", tmp_path / "out", "--bm25") == 0
    scores = read_per_query(tmp_path / "out" / "bm25" / "per_query.ndjson")
    assert set(scores[first.split()[0]].values()) == {0.0}
    assert sum(query["recall@100"] for query in scores.values()) == 7


def numbered(folder: Path, offset: int) -> Path:
    """Ten queries and ten documents, both with the ids 0 to 9; number n is answered by number n + offset."""
    (folder / "qrels").mkdir(parents=True)
    words = [*WORDS[:6], *ANIMALS[:4]]
    queries = [{"_id": str(row), "text": words[(row + offset) % 10]} for row in range(10)]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    documents = [{"_id": str(row), "text": word} for row, word in enumerate(words)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, documents)))
    (folder / "qrels" / "test.tsv").write_text("".join(f"{row}\t{(row + offset) % 10}\t1\n" for row in range(10)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("offset", "judged"), [(0, 10), (1, 0)])
def test_queries_and_documents_may_be_numbered_alike(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, offset: int, judged: int
) -> None:
    assert evaluate(model, numbered(tmp_path / "n", offset), "--out", tmp_path / "out", "--hybrid", "rrf") == 0
    systems = json.loads((tmp_path / "out" / "metrics.json").read_text())["systems"]
    assert systems["BM25"]["mean"]["ndcg@10"] == 1
    assert [system["mean"]["recall@100"] for system in systems.values()] == [1, 1, 1]
    counts = f"{judged} of these documents are judged and kept, the other {10 - judged} are removed"
    assert caplog.text.count(f"n: 10 of 10 queries have the id of a document: {counts}") == 1
    retrieved = read_trec(tmp_path / "out" / "run.trec")
    assert sum(query in documents for query, documents in retrieved.items()) == judged


@pytest.mark.slow
def test_finished_embeddings_are_not_computed_again(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evaluate(model, data, "--out", tmp_path) == 0
    first = (tmp_path / "run.trec").read_bytes()
    (tmp_path / "run.trec").unlink()
    (tmp_path / "embeddings" / "queries-test" / "data-00000.arrow").unlink()  # as if killed before it was written
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
        (
            (model, tmp_path / "absent"),
            "absent: neither a BEIR folder (corpus.jsonl, queries.jsonl, qrels/) nor pairs",
        ),
        ((model, twin.parent), "twin: neither a BEIR folder"),
        ((model, unjudged), "no usable judgement"),
        ((model, spaced), "'a b' is empty, holds white space or is not UTF-8"),
        ((model, data, twin), "two folders are named toy"),
        ((model, data, "--depth", "10"), "depth=10"),
        ((toy_clip, data), "needs kind query-document or vector; use `dualenc evaluate image-text`"),
    ]:
        assert evaluate(*words, "--out", out) == 2  # type: ignore[arg-type]
        error = capsys.readouterr().err.strip().splitlines()
        assert message in error[-1], error
        assert not out.exists()


@pytest.fixture(scope="module")
def dated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 documents, each with a language and all but the last with a year; a query's relevant one, and a second one."""
    folder = write_beir(tmp_path_factory.mktemp("dated") / "toy")
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"lang": ("en", "de", "no")[number % 3]} | ({"year": 1990 + number} if number < 39 else {})
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "qrels" / "test.tsv").open("a") as file:
        file.writelines(f"d{number}\td{number + 9}\t{number % 3}\n" for number in range(6))
        file.write("d0\td999\t1\n")  # of a document that is not there
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("words", [("year>=2005",), ("year<2021", "lang=en,no")])
def test_a_filter_is_the_collection_without_the_others(
    model: Path, dated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    """Dense, BM25, both fused, and reranked: as of a folder written by hand, with trec_eval as the witness."""
    rows = [json.loads(line) for line in (dated / "corpus.jsonl").read_text().splitlines()]
    if len(words) == 1:
        kept = [row for row in rows if row.get("year", 0) >= 2005]
    else:
        kept = [row for row in rows if row.get("year", 9999) < 2021 and row["lang"] in ("en", "no")]
    names = {row["_id"] for row in kept}
    head, *lines = (dated / "qrels" / "test.tsv").read_text().splitlines()
    judged = [line.split("\t") for line in lines]
    answered = {query for query, document, grade in judged if document in names and int(grade) > 0}
    assert 0 < len(answered) < 8
    by_hand = tmp_path / "by-hand" / "toy"
    (by_hand / "qrels").mkdir(parents=True)
    shutil.copy(dated / "queries.jsonl", by_hand)
    (by_hand / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    left = ["\t".join(line) for line in judged if line[0] in answered and line[1] in names]
    (by_hand / "qrels" / "test.tsv").write_text("\n".join([head, *left]) + "\n")

    judge = cross_encoder(tmp_path / "judge")
    how = ("--hybrid", "rrf", "--rerank", judge, "--rerank-top", 7)
    where = [part for word in words for part in ("--where", word)]
    assert evaluate(model, dated, "--out", tmp_path / "filtered", *how, *where) == 0
    told = f"toy: {len(kept)} of 40 documents meet --where; {8 - len(answered)} of 8 queries have no relevant one"
    assert told in capsys.readouterr().out
    assert evaluate(model, by_hand, "--out", tmp_path / "whole", *how) == 0
    assert "--where" not in capsys.readouterr().out
    filtered, whole = (json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("filtered", "whole"))
    assert filtered["where"] == ",".join(words)
    assert set(filtered["systems"]) == {"toy-text", "BM25", "hybrid", "reranked"}
    assert filtered["systems"] == whole["systems"]
    qrels = read_qrels(by_hand / "qrels" / "test.tsv")
    for folder, system in ((".", "toy-text"), ("bm25", "BM25"), ("hybrid", "hybrid"), ("reranked", "reranked")):
        run = read_trec(tmp_path / "filtered" / folder / "run.trec")
        assert {document for found in run.values() for document in found} <= names
        assert run == read_trec(tmp_path / "whole" / folder / "run.trec")
        scores = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"}).evaluate(run)
        mean = sum(query["ndcg_cut_10"] for query in scores.values()) / len(answered)
        assert filtered["systems"][system]["mean"]["ndcg@10"] == pytest.approx(mean), system


def test_a_filter_by_columns_that_embeddings_have_kept(model: Path, dated: Path, tmp_path: Path) -> None:
    """Vectors in place of texts give the same, with the columns that `embed --columns` has kept."""
    for name, words in (("corpus", ["--columns", "year,lang"]), ("queries", ["--side", "left"])):
        assert main(["embed", str(model), str(dated), *words, "--out", str(tmp_path / "v" / name)]) == 0
    shutil.copytree(dated / "qrels", tmp_path / "v" / "qrels")
    collection = read_beir(tmp_path / "v", columns=["year", "lang"])
    assert collection.corpus.columns.column("year").to_pylist() == [*range(1990, 2029), None]
    some = collection.among(rows_that_meet(["year>=2005", "lang!=de"], collection.corpus.columns))
    rows = [row for row in range(15, 39) if row % 3 != 1]
    assert some.corpus.ids == [f"d{row}" for row in rows]
    np.testing.assert_array_equal(some.corpus[3], collection.corpus[rows[3]])
    assert some.corpus.columns.column("year").to_pylist() == [1990 + row for row in rows]
    texts = read_beir(dated, columns=["lang", "year"])
    assert texts.among(rows_that_meet(["year>=2005", "lang!=de"], texts.corpus.columns)).qrels == some.qrels


def test_filters_that_cannot_be_applied_are_told_in_one_line(
    model: Path, data: Path, dated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for folder, words, message in [
        (dated, ["yaer>2000"], "corpus.jsonl: no column 'yaer'; did you mean 'year'?"),
        (data, ["year>2000"], "no column 'year'; did you mean"),
        (dated, ["recent"], "'recent' is no condition; write for example year>=2020"),
        (dated, ["year>soon"], "column 'year' is compared with 'soon'; give a whole number"),
        (dated, ["lang>en"], "orders a column of text values"),
        (dated, ["year>3000"], "--where, toy: none of 40 documents is kept; ask for less"),
        (dated, ["year=1990"], "1 of 40 documents are kept, and none is relevant to a query; ask for less"),
    ]:
        assert evaluate(model, folder, "--out", out, *(p for word in words for p in ("--where", word))) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1, error
        assert message in error[0], error
        assert not out.exists()


@pytest.mark.slow
def test_texts_and_weights_replaced_under_the_same_names_count_anew(tmp_path: Path) -> None:
    runs = []
    for seed_of_texts, seed_of_weights, out in ((0, 0, "out"), (1, 0, "out"), (1, 0, "fresh"), (1, 1, "other")):
        shutil.rmtree(tmp_path / "toy", ignore_errors=True)
        data = write_beir(tmp_path / "toy", seed=seed_of_texts)
        model = text_model(tmp_path / "model", seed=seed_of_weights)
        if seed_of_weights:
            assert evaluate(model, data, "--out", tmp_path / "out") == 2, "other weights take no folder over"
        assert evaluate(model, data, "--out", tmp_path / out) == 0
        runs.append((tmp_path / out / "run.trec").read_bytes())
    assert runs[1] == runs[2]
    assert len(set(runs)) == 3


SCRIPT = "<script>alert(1)</script>"


@pytest.mark.slow
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
