"""`dualenc adapt`: queries learn to find the documents of an index, whose files stay as they
are."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sentence_transformers import SentenceTransformer

from dualenc.data import read_beir
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import IndexEncoder, load_model
from dualenc.search import Index
from tests.helpers import toy
from tests.helpers.in_process import evaluated, failure, found, run
from tests.helpers.make import write_vectors
from tests.helpers.processes import run_on_two

pytestmark = pytest.mark.slow
D = 16
N = 300


def checksums(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of random vectors, and clicks of queries that are their documents turned."""
    folder = tmp_path_factory.mktemp("turned")
    random = np.random.default_rng(0)
    documents = random.normal(size=(N, D)).astype(np.float32)
    turn = np.linalg.qr(random.normal(size=(D, D)))[0]
    queries = (documents @ turn + 0.1 * random.normal(size=(N, D))).astype(np.float32)
    Index.build(documents, [f"d{row}" for row in range(N)]).save(folder / "index")
    (folder / "test" / "qrels").mkdir(parents=True)
    write_vectors(folder / "test" / "queries.parquet", "q", queries)
    judgements = "".join(f"q{row}\td{row}\t1\n" for row in range(200, N))
    (folder / "test" / "qrels" / "test.tsv").write_text(judgements)
    clicks = {"query": list(queries[:240]), "document": [f"d{row}" for row in range(240)]}
    pq.write_table(pa.table(clicks), folder / "clicks.parquet")
    return folder


def test_a_linear_map_turns_queries_back(
    turned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Documents of no training pair are found, too; the index stays byte for byte, and is searched
    with the model."""
    before = checksums(turned / "index")
    words = [
        "adapt",
        turned / "index",
        turned / "clicks.parquet",
        "--out",
        tmp_path / "run",
        "--train",
        "linear",
    ]
    run(
        *words,
        "--learning-rate",
        0.02,
        "--test",
        turned / "test",
        "--second",
        turned / "test",
        "--keep",
        0,
    )
    report = metrics(tmp_path / "run")
    assert checksums(turned / "index") == before
    assert report["checksum of the index"].endswith("the same after as before")
    quality = {row["queries of"]: row for row in report["quality"]}
    assert quality["new documents"]["original"] < 0.3
    assert quality["new documents"]["adapted"] > 0.9
    # All pairs are trained on in the end, and 40 of the 100 test queries have their documents.
    model = load_model(tmp_path / "run" / "model")
    assert isinstance(model, IndexEncoder)
    assert len(model.trained_ids) == 240
    trained = {int(name[1:]) for name in model.trained_ids}
    assert quality["test: documents in training"]["queries"] == len(trained & set(range(200, N)))
    assert quality["test: new documents"]["queries"] == N - 200 - len(trained & set(range(200, N)))
    assert quality["test: new documents"]["adapted"] > 0.9
    assert quality["second task: test"]["queries"] == N - 200
    # The documents' file is gone with the other intermediate ones.
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        *("map", "metrics.json", "model", "report.html", "trained_pairs.parquet", "training"),
    ]
    query = pq.read_table(turned / "test" / "queries.parquet").column("vector")[299].as_py()
    np.save(tmp_path / "query.npy", np.array(query, np.float32))
    hits = found(
        capsys, turned / "index", tmp_path / "query.npy", "--model", tmp_path / "run" / "model"
    )
    assert hits[0]["id"] == "d299"


def test_without_matplotlib_the_page_has_no_curves(
    turned: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = [
        turned / "index",
        turned / "clicks.parquet",
        "--out",
        tmp_path / "run",
        "--train",
        "linear",
    ]
    run("adapt", *words, "--epochs", 1)
    assert (
        "report.html lacks curves: drawing curves needs the package matplotlib"
        in capsys.readouterr().out
    )
    page = (tmp_path / "run" / "report.html").read_text()
    assert "new documents" in page
    assert "<figure>" not in page


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, toy_text: Path) -> Path:
    """An index of texts, and clicks of queries that are parts of them, two for each document."""
    folder = tmp_path_factory.mktemp("shop")
    texts = toy.save_documents(folder / "documents.jsonl", 200)
    run(
        "index",
        toy_text,
        folder / "documents.jsonl",
        "--out",
        folder / "index",
        "--factory",
        "HNSW16",
    )
    with open(folder / "clicks.csv", "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["query", "doc_id"])
        for row, text in enumerate(texts):
            writer.writerow([" ".join(text.split()[:4]), f"d{row}"])
            writer.writerow([" ".join(text.split()[-4:]), f"d{row}"])
    return folder


def original_and_adapted(
    shop: Path, out: Path, toy_text: Path, *options: Any
) -> tuple[np.ndarray, ...]:
    """Vectors of queries by the index's model, by the adapted one, and by the same in
    sentence-transformers."""
    run("adapt", shop / "index", shop / "clicks.csv", "--out", out, "--epochs", 2, *options)
    queries = ["ant bee cat", "fox gnu", "hen"]
    adapted = load_model(out / "model")
    outside = SentenceTransformer(str(out / "model"), device="cpu")
    return (
        load_model(toy_text).encode_query(queries),
        adapted.encode_query(queries),
        outside.encode(queries),
    )


@pytest.mark.parametrize("trained", ["perceptron", "linear", "lora", "all"])
def test_each_kind_of_training(shop: Path, tmp_path: Path, toy_text: Path, trained: str) -> None:
    """The adapted queries differ from the original ones, and are the same in
    sentence-transformers."""
    options = ["--train", trained, "--keep", 0, "--learning-rate", 3e-3]
    original, adapted, outside = original_and_adapted(shop, tmp_path / "run", toy_text, *options)
    assert np.abs(original - adapted).max() > 1e-3
    np.testing.assert_allclose(adapted, outside, atol=1e-5)
    names = [row["queries of"] for row in metrics(tmp_path / "run")["quality"]]
    assert names == ["new documents", "documents in training"]


def test_all_of_the_original_weights(shop: Path, tmp_path: Path, toy_text: Path) -> None:
    """--keep 1 is the model of the index."""
    original, adapted, _ = original_and_adapted(shop, tmp_path / "run", toy_text, "--keep", 1)
    np.testing.assert_allclose(adapted, original, atol=1e-6)
    for row in metrics(tmp_path / "run")["quality"]:
        assert row["original"] == row["adapted"]


def test_numbers_are_those_of_an_evaluation(shop: Path, tmp_path: Path, toy_text: Path) -> None:
    """The report's nDCG@10 of test queries, against ranks by a matrix product."""
    documents = [
        row["text"] for row in map(json.loads, (shop / "documents.jsonl").read_text().splitlines())
    ]
    test = tmp_path / "beir"
    (test / "qrels").mkdir(parents=True)
    queries = {f"q{row}": " ".join(documents[row].split()[1:5]) for row in range(40)}
    (test / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": name, "text": text}) + "\n" for name, text in queries.items())
    )
    judged = "".join(f"{name}\td{row}\t1\n" for row, name in enumerate(queries))
    (test / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    words = ["--out", tmp_path / "run", "--epochs", 1, "--keep", 0.5, "--test", test]
    run("adapt", shop / "index", shop / "clicks.csv", *words)
    model = load_model(tmp_path / "run" / "model")
    vectors = load_model(toy_text).encode_document(documents)
    gains = []
    for row, scores in enumerate(model.encode_query(list(queries.values())) @ vectors.T):
        top = np.argsort(-scores)[:10].tolist()
        gains.append(1 / np.log2(top.index(row) + 2) if row in top else 0)
    rows = {row["queries of"]: row for row in metrics(tmp_path / "run")["quality"]}
    seen = rows["beir: documents in training"]
    assert seen["queries"] == seen["documents"] == 40
    # Half precision decides near ties.
    assert seen["adapted"] == pytest.approx(np.mean(gains), abs=2e-3)


@pytest.mark.parametrize("part", ["fold-0-", "all-"])
def test_an_interrupted_training_goes_on(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """A run that is stopped in a fold's or the last training and resumed gives the weights of an
    uninterrupted one; what was finished is not trained again."""
    words = [
        "adapt",
        shop / "index",
        shop / "clicks.csv",
        "--train",
        "all",
        "--epochs",
        2,
        "--keep",
        0.5,
    ]
    from dualenc.training.loop import Loop

    after_step = Loop._after_step
    steps: list[str] = []

    def interrupted(self: Loop) -> None:
        after_step(self)
        steps.append(Path(self.output).name)
        if steps[-1].startswith(part) and self.steps == 7 and self.output.parts[-3] == "cut":
            self.checkpoints.save(self.steps, self.state_dict())
            raise RuntimeError("the power is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_after_step", interrupted)
        run(*words, "--out", tmp_path / "whole")
        uninterrupted = Counter(steps)
        steps.clear()
        with pytest.raises(RuntimeError, match="power"):
            run(*words, "--out", tmp_path / "cut", "--debug")
        part = "nothing"
        run(*words, "--out", tmp_path / "cut", "--resume")
    # No step is made twice.
    assert Counter(steps) == uninterrupted
    whole = load_model(tmp_path / "whole" / "model").state_dict()
    for name, weight in load_model(tmp_path / "cut" / "model").state_dict().items():
        assert torch.equal(weight, whole[name]), name


def test_the_model_is_found_beside_an_index_that_was_moved_with_it(
    shop: Path, tmp_path: Path, toy_text: Path
) -> None:
    for source, name in ((shop / "index", "index"), (toy_text, "model")):
        shutil.copytree(source, tmp_path / "moved" / name)
    path = tmp_path / "moved" / "index" / "meta.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"model": str(tmp_path / "before" / "model")})
    )
    run("adapt", path.parent, shop / "clicks.csv", "--out", tmp_path / "out", "--epochs", 1)
    assert (tmp_path / "out" / "model").is_dir()


def test_embeddings_and_their_texts_are_as_good_as_an_index(
    shop: Path, tmp_path: Path, toy_text: Path
) -> None:
    """A folder of embeddings gives the model that its index gives."""
    run("embed", toy_text, shop / "documents.jsonl", "--out", tmp_path / "emb")
    assert len(Embeddings.open(tmp_path / "emb")) == 200
    rows = []
    for source in (shop / "index", tmp_path / "emb"):
        run(
            "adapt",
            source,
            shop / "clicks.csv",
            "--out",
            tmp_path / f"run-{source.name}",
            "--epochs",
            2,
        )
        rows.append([row["adapted"] for row in metrics(tmp_path / f"run-{source.name}")["quality"]])
    np.testing.assert_allclose(rows[0], rows[1], atol=0.02)


@pytest.mark.nightly
def test_two_processes_give_the_model_of_one(shop: Path, tmp_path: Path) -> None:
    words = [
        "adapt",
        shop / "index",
        shop / "clicks.csv",
        "--epochs",
        2,
        "--device",
        "cpu",
        "--seed",
        1,
    ]
    run(*words, "--out", tmp_path / "one")
    run_on_two(tmp_path, [*map(str, words), "--out", str(tmp_path / "two")])
    one = load_model(tmp_path / "one" / "model").state_dict()
    for name, weight in load_model(tmp_path / "two" / "model").state_dict().items():
        torch.testing.assert_close(weight, one[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--train", "lora"], "vectors"),
        (["--keep", 2], "keep"),
        (["--held-out", 1], "held-out"),
        (["--held-out", 0], "--held-out 0 leaves no query to choose the share"),
        (["--learning-rate", 0], "learning-rate"),
        (["--document-column", "missing"], "missing"),
    ],
)
def test_refusals(
    turned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[Any], named: str
) -> None:
    line = failure(
        capsys,
        "adapt",
        turned / "index",
        turned / "clicks.parquet",
        "--out",
        tmp_path / "run",
        *options,
    )
    assert named in line
    assert not (tmp_path / "run").exists()


def test_a_second_task_with_the_ids_of_the_index_has_its_own_documents(
    shop: Path, tmp_path: Path, toy_text: Path
) -> None:
    """Rows are ids of many tables."""
    other = toy.write_beir(tmp_path / "other", documents=60)
    assert set(read_beir(other).corpus.ids) < set(Index.open(shop / "index").ids)
    words = [
        "adapt",
        shop / "index",
        shop / "clicks.csv",
        "--out",
        tmp_path / "run",
        "--epochs",
        1,
        "--keep",
        1,
    ]
    run(*words, "--second", other)
    (row,) = [
        row
        for row in metrics(tmp_path / "run")["quality"]
        if row["queries of"] == "second task: other"
    ]
    expected = evaluated("retrieval", tmp_path / "out", toy_text, other)["systems"][toy_text.name][
        "mean"
    ]["ndcg@10"]
    assert row["original"] == pytest.approx(expected, abs=1e-3)


def test_an_adaptation_is_not_begun_again(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished run is refused without --resume, and kept; few pairs are not held out."""
    (tmp_path / "two.csv").write_text("query,doc_id\nant bee,d0\ncat dog,d1\n")
    words = [
        "adapt",
        shop / "index",
        tmp_path / "two.csv",
        "--out",
        tmp_path / "run",
        "--epochs",
        1,
    ]
    run(*words)
    printed = capsys.readouterr().out
    assert "cannot tell whether adapting helps: no query could be held out" in printed
    assert "nothing was measured" in printed
    assert "no query could be held out" in metrics(tmp_path / "run")["chosen by"]
    assert "--resume" in failure(capsys, *words)
    run(*words, "--resume")
    assert (tmp_path / "run" / "model" / "modules.json").is_file()


def test_another_folder_is_not_overwritten(
    turned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["adapt", turned / "index", turned / "clicks.parquet", "--out", tmp_path]
    for name in ("mine.txt", "work/mine.txt", "training/mine.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
        assert "holds no adaptation" in failure(capsys, *words)
        assert (tmp_path / name).read_text() == "mine"


def test_other_tasks_fit_the_clicks_and_the_index(
    turned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is trained; a map of vectors is searched with a vector."""
    words = [
        "adapt",
        turned / "index",
        turned / "clicks.parquet",
        "--out",
        tmp_path / "run",
        "--train",
        "linear",
    ]
    texts = toy.write_beir(tmp_path / "beir")
    (texts / "qrels" / "test.tsv").write_text("d0\td0\t1\n")
    line = failure(capsys, *words, "--test", texts)
    assert (
        "test-queries are of kind text, and the queries to train on vector; "
        "give both as one of them"
    ) in line
    strange = Path(shutil.copytree(turned / "test", tmp_path / "strange"))
    (strange / "qrels" / "test.tsv").write_text("q0\tnowhere\t1\n")
    assert "holds none of its 1 judged documents" in failure(capsys, *words, "--test", strange)
    assert not (tmp_path / "run").exists()
    run(*words, "--epochs", 1)
    assert f"--model {tmp_path / 'run'}/model QUERY.npy" in capsys.readouterr().out


def test_where_too_little_is_held_out_the_report_cannot_tell(
    shop: Path, tmp_path: Path, toy_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few documents do not show what adapting costs: half of the weights, or the original."""
    lines = (shop / "clicks.csv").read_text().splitlines()
    (tmp_path / "few.csv").write_text("\n".join(lines[:41]) + "\n")
    words = [
        "adapt",
        shop / "index",
        tmp_path / "few.csv",
        "--out",
        tmp_path / "run",
        "--epochs",
        3,
    ]
    words += ["--learning-rate", 0.01]
    run(*words)
    printed = capsys.readouterr().out
    assert "cannot tell whether adapting helps: held-out queries of new doc" in printed
    assert "fewer than 30 cannot tell" in metrics(tmp_path / "run")["finding"]
    assert metrics(tmp_path / "run")["original weights kept"] in (0.5, 1)
    queries = ["ant bee cat", "fox gnu", "hen"]
    original = load_model(toy_text).encode_query(queries)
    run(*words, "--keep", 0, "--resume")
    assert "cannot tell whether adapting helps" in capsys.readouterr().out
    adapted = load_model(tmp_path / "run" / "model").encode_query(queries)
    assert np.abs(adapted - original).max() > 1e-3
    assert metrics(tmp_path / "run")["chosen by"] == "--keep"


def test_random_clicks_do_not_help(
    turned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line of the report says so, and the model is the original."""
    table = pq.read_table(turned / "clicks.parquet").to_pydict()
    random = np.random.default_rng(0).permutation(240)
    table["document"] = [table["document"][row] for row in random]
    vectors = Index.open(turned / "index").reconstruct(np.arange(240))
    table["query"] = list(vectors)
    pq.write_table(pa.table(table), tmp_path / "random.parquet")
    words = ["adapt", turned / "index", tmp_path / "random.parquet", "--out", tmp_path / "run"]
    run(*words, "--train", "linear", "--epochs", 2)
    assert "\nadapting" in capsys.readouterr().out
    report = metrics(tmp_path / "run")
    assert not report["finding"].startswith("adapting helps")


def test_documents_are_a_beir_folder_of_vectors(turned: Path, tmp_path: Path) -> None:
    """The whole command, down to the saved model, over a corpus of vectors."""
    index = Index.open(turned / "index")
    vectors = index.reconstruct(np.arange(N))
    shutil.copytree(turned / "test", tmp_path / "beir")
    table = {"_id": [f"d{row}" for row in range(N)], "vector": list(vectors)}
    pq.write_table(pa.table(table), tmp_path / "beir" / "corpus.parquet")
    words = ["adapt", tmp_path / "beir", turned / "clicks.parquet", "--out", tmp_path / "run"]
    run(*words, "--train", "linear", "--epochs", 1, "--keep", 0)
    model = load_model(tmp_path / "run" / "model")
    assert isinstance(model, IndexEncoder)
    assert model.documents.dim == D
