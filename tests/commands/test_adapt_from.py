"""`dualenc adapt --from`: a run continues from an earlier one, and is measured by what that was not
trained on."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dualenc.encoders import load_model
from dualenc.search import Index
from dualenc.workflows import adapt_queries
from dualenc.workflows.adaptation_tasks import ClickFolds, fold_clicks
from tests.helpers import toy
from tests.helpers.in_process import failure, run
from tests.helpers.processes import run_on_two

pytestmark = pytest.mark.slow
D, N = 16, 600
TRAIN = ("--train", "linear", "--learning-rate", 0.02)


def write_clicks(path: Path, queries: np.ndarray, documents: np.ndarray) -> Path:
    """Write a click of each query (Q, D) on a document, given by its row (Q,)."""
    table = {"query": list(queries), "document": [f"d{row}" for row in documents.tolist()]}
    pq.write_table(pa.table(table), path)
    return path


def metrics(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "metrics.json").read_text())


def quality(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["queries of"]: row for row in metrics(folder)["quality"]}


def record(folder: Path) -> set[tuple[bytes, str]]:
    """Digests of queries, and documents, that a run says its model was trained on."""
    table = pq.read_table(folder / "trained_pairs.parquet").to_pydict()
    return set(zip(table["query"], table["document"], strict=True))


def digest(query: np.ndarray) -> bytes:
    return hashlib.blake2b(query.astype(np.float32).tobytes(), digest_size=16).digest()


def same_model(one: Path, two: Path) -> bool:
    """True if two runs have the same model, to the bit."""
    before, after = (load_model(folder / "model").state_dict() for folder in (one, two))
    return all(torch.equal(weight, after[name]) for name, weight in before.items())


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index, clicks of queries that are their documents turned, and the run of a first night."""
    folder = tmp_path_factory.mktemp("shop")
    random = np.random.default_rng(0)
    documents = random.normal(size=(N, D)).astype(np.float32)
    turn = np.linalg.qr(random.normal(size=(D, D)))[0]
    queries, others = (
        (documents @ turn + 0.3 * random.normal(size=(N, D))).astype(np.float32) for _ in range(2)
    )
    Index.build(documents, [f"d{row}" for row in range(N)]).save(folder / "index")
    for name, first, last in (("monday", 0, 150), ("tuesday", 150, 400), ("wednesday", 400, 600)):
        rows = np.arange(first, last)
        write_clicks(folder / f"{name}.parquet", queries[rows], rows)
    rows = np.arange(150, 400)
    write_clicks(folder / "noise.parquet", queries[rows], random.permutation(rows))
    write_clicks(folder / "unturned.parquet", documents[rows], rows)
    write_clicks(folder / "known.parquet", others[:150], np.arange(150))
    np.save(folder / "queries.npy", queries)
    begin(folder, "monday", folder / "first")
    return folder


def begin(shop: Path, log: str, out: Path, *options: Any) -> None:
    run("adapt", shop / "index", shop / f"{log}.parquet", "--out", out, *TRAIN, *options)


def go_on(shop: Path, logs: list[str], out: Path, *options: Any, start: str = "first") -> None:
    """Continue from a run of the shop, or any other folder."""
    paths = [shop / f"{name}.parquet" for name in logs]
    words = ["--from", shop / start, "--out", out, *TRAIN, *options]
    run("adapt", shop / "index", *paths, *words)


def test_new_clicks_are_held_out_and_old_ones_are_not(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No held-out pair is in the record of the first run; all others are trained on, and the model
    is better than both for documents that neither saw."""
    made: list[ClickFolds] = []

    def spied(*args: Any, **options: Any) -> ClickFolds:
        made.append(fold_clicks(*args, **options))
        return made[-1]

    monkeypatch.setattr(adapt_queries, "fold_clicks", spied)
    go_on(shop, ["monday", "tuesday"], tmp_path / "run")
    before = record(shop / "first")
    queries = np.load(shop / "queries.npy")
    assert before == {(digest(queries[row]), f"d{row}") for row in range(150)}
    [clicks] = made
    assert len(clicks.folds) == 5
    for fold in clicks.folds:
        assert fold.held_out is not None
        for row in range(len(fold.held_out)):
            query, document = fold.held_out.left_id[row], fold.held_out.right_id[row]
            pair = digest(fold.held_out.left_items[query]), f"d{document}"
            assert pair not in before
            assert int(document) >= 150
        assert set(range(150)) <= set(fold.train.right_id.tolist())
    assert "250 of 400 pairs are new to the run of --from; 250 queries" in capsys.readouterr().out
    row = quality(tmp_path / "run")["new documents"]
    assert row["queries"] == 250
    assert row["adapted"] > row["original"] + 0.05 > row["base"] + 0.05
    report = metrics(tmp_path / "run")
    assert (report["of"], report["continued from"]) == ("original", str(shop / "first"))
    assert len(record(tmp_path / "run")) == 400


def test_a_spoiled_model_gives_way_to_that_of_the_index(shop: Path, tmp_path: Path) -> None:
    spoiled = Path(shutil.copytree(shop / "first", tmp_path / "spoiled"))
    model = load_model(spoiled / "map")
    model.load_state_dict({name: -weight for name, weight in model.state_dict().items()})
    model.save(spoiled / "map")
    go_on(shop, ["unturned"], tmp_path / "run", start=str(spoiled))
    report = metrics(tmp_path / "run")
    assert (report["keep"], report["of"], report["base weights kept"]) == (1, "base", 1)
    assert report["finding"].startswith("going back to the model of the index helps: nDCG@10")
    row = quality(tmp_path / "run")["new documents"]
    assert row["base"] == row["adapted"] == 1
    assert row["original"] < 0.1
    # It was trained on nothing, so another run may hold out anything.
    assert record(tmp_path / "run") == set()


@pytest.mark.parametrize("options", [(), ("--require-gain", 0.01)])
def test_noise_leaves_the_model_as_it_was(
    shop: Path, tmp_path: Path, options: tuple[Any, ...]
) -> None:
    """To the bit, with its record: what did not change the model can still measure it."""
    if options:
        with pytest.raises(AssertionError):
            go_on(shop, ["noise"], tmp_path / "run", *options)
        assert not metrics(tmp_path / "run")["gate"]["passed"]
    else:
        go_on(shop, ["noise"], tmp_path / "run")
    report = metrics(tmp_path / "run")
    assert (report["keep"], report["of"]) == (1, "original")
    assert same_model(shop / "first", tmp_path / "run")
    assert record(tmp_path / "run") == record(shop / "first")


def test_new_queries_of_known_documents_are_measured(shop: Path, tmp_path: Path) -> None:
    """Without a new document, as many as a share of the new queries are held out by fold."""
    go_on(shop, ["monday", "known"], tmp_path / "run")
    rows = quality(tmp_path / "run")
    assert list(rows) == ["documents in training"]
    assert rows["documents in training"]["queries"] == 150
    report = metrics(tmp_path / "run")
    assert report["finding"].startswith("cannot tell whether adapting helps: held-out queries of")
    assert (report["keep"], report["of"]) == (0.5, "original")


def test_a_chain_keeps_the_record_of_all(shop: Path, tmp_path: Path) -> None:
    go_on(shop, ["tuesday"], tmp_path / "second")
    go_on(shop, ["wednesday"], tmp_path / "third", start=str(tmp_path / "second"))
    queries = np.load(shop / "queries.npy")
    assert record(tmp_path / "third") == {(digest(queries[row]), f"d{row}") for row in range(N)}
    ids = json.loads((tmp_path / "third/model/trained_documents.json").read_text())["ids"]
    assert sorted(ids) == sorted(f"d{row}" for row in range(N))
    # All three nights are known to the fourth.
    words = ["monday", "tuesday", "wednesday"]
    go_on(shop, words, tmp_path / "fourth", start=str(tmp_path / "third"))
    assert metrics(tmp_path / "fourth")["keep"] == 1


def test_the_same_log_again_holds_nothing_out(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on(shop, ["monday"], tmp_path / "run")
    assert (
        "\ncannot tell whether adapting helps: nothing is held out: the run of --from was trained "
        "on all queries of the log\n"
    ) in capsys.readouterr().out
    assert metrics(tmp_path / "run")["keep"] == 1
    assert same_model(shop / "first", tmp_path / "run")
    # A given share is taken, as without --from.
    go_on(shop, ["monday"], tmp_path / "half", "--keep", 0.5)
    assert metrics(tmp_path / "half")["keep"] == 0.5
    assert not same_model(shop / "first", tmp_path / "half")


def test_an_interrupted_run_goes_on_from_the_same_model(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resumed, it gives the model of an uninterrupted one; without the run that it continues from,
    it is refused; from another, its trainings begin anew."""
    from dualenc.training.loop import Loop

    after_step = Loop._after_step
    start = str(shutil.copytree(shop / "first", tmp_path / "start"))

    def interrupted(self: Loop) -> None:
        after_step(self)
        if Path(self.output).name.startswith("fold-2") and self.steps == 7:
            self.checkpoints.save(self.steps, self.state_dict())
            raise RuntimeError("the power is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_after_step", interrupted)
        with pytest.raises(RuntimeError, match="power"):
            go_on(shop, ["tuesday"], tmp_path / "cut", "--debug", start=start)
    # A run that is not finished is not continued from.
    words = ["adapt", shop / "index", shop / "tuesday.parquet", *TRAIN]
    line = failure(capsys, *words, "--from", tmp_path / "cut", "--out", tmp_path / "other")
    assert "holds an adaptation that is not finished" in line
    moved = shutil.move(start, tmp_path / "moved")
    line = failure(capsys, *words, "--from", start, "--out", tmp_path / "cut", "--resume")
    assert "start: no such folder; name the output of an earlier run" in line
    shutil.move(moved, start)
    go_on(shop, ["tuesday"], tmp_path / "cut", "--resume", start=start)
    go_on(shop, ["tuesday"], tmp_path / "whole", start=start)
    assert same_model(tmp_path / "cut", tmp_path / "whole")
    [folder] = (tmp_path / "cut/training").iterdir()
    go_on(shop, ["wednesday"], tmp_path / "cut", "--resume", start=str(tmp_path / "whole"))
    go_on(shop, ["wednesday"], tmp_path / "plain", start=str(tmp_path / "whole"))
    assert same_model(tmp_path / "cut", tmp_path / "plain")
    assert len(list((tmp_path / "cut/training").iterdir())) == 2, folder


def test_what_cannot_be_continued_is_refused(
    shop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], toy_text: Path
) -> None:
    """In one line, before anything is written."""
    first = shop / "first"

    def told(*words: Any, index: Path = shop / "index", train: str = "linear") -> str:
        line = failure(
            *(capsys, "adapt", index, shop / "tuesday.parquet", "--train", train),
            *("--out", tmp_path / "out", *words),
        )
        assert not (tmp_path / "out").exists()
        return line

    assert told("--from", first, train="lora") == (
        "--train lora cannot continue --from a run, whose adapters are merged into its weights; "
        "continue with --train all"
    )
    assert told("--from", first, train="perceptron").endswith(
        "trained linear, and --train is perceptron; continue with --train linear"
    )
    assert "no such folder" in told("--from", tmp_path / "nowhere")
    for other in (shop, shop / "index", first / "model"):
        assert "holds no adaptation; name the output of a finished" in told("--from", other)
    older = Path(shutil.copytree(first, tmp_path / "older"))
    (older / "trained_pairs.parquet").unlink()
    assert told("--from", older).endswith(
        "lacks trained_pairs.parquet, so it was written by an older version; adapt without --from"
    )
    (older / "trained_pairs.parquet").write_bytes(b"PAR1")
    assert "trained_pairs.parquet: is damaged" in told("--from", older)
    # Other vectors under the same ids, other documents, and vectors of another size.
    random = np.random.default_rng(1)
    for name, ids, dim in (("d", N, D), ("other", N, D), ("d", N, D + 1)):
        index = tmp_path / f"{name}{dim}"
        vectors = random.normal(size=(ids, dim)).astype(np.float32)
        Index.build(vectors, [f"d{row}" for row in range(ids)]).save(index)
        line = told("--from", first, index=index)
        assert ("holds other vectors than" in line) or ("for an index of other vectors" in line)
    line = failure(
        *(capsys, "adapt", shop / "index", shop / "monday.parquet", "--out", first, "--resume"),
        *("--from", first, *TRAIN),
    )
    assert "--from is the output itself" in line
    assert same_model(first, first)


def test_an_index_that_has_grown_is_the_same(shop: Path, tmp_path: Path) -> None:
    """Documents may be added and removed: those of the record have the vectors that they had."""
    old = Index.open(shop / "index").reconstruct(np.arange(N))
    ids = [f"d{row}" for row in range(10, N)] + ["new"]
    Index.build(np.concatenate([old[10:], -old[:1]]), ids).save(tmp_path / "index")
    words = ["--from", shop / "first", "--out", tmp_path / "run", *TRAIN]
    run("adapt", tmp_path / "index", shop / "tuesday.parquet", *words)
    assert len(record(tmp_path / "run")) == 400


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory, toy_text: Path) -> Path:
    """An index of texts, and two logs of queries that are parts of them."""
    folder = tmp_path_factory.mktemp("texts")
    documents = toy.save_documents(folder / "documents.jsonl", 200)
    run("index", toy_text, folder / "documents.jsonl", "--out", folder / "index")
    for name, rows in (("one", range(80)), ("two", range(80, 200))):
        clicks = [f"{' '.join(documents[row].split()[:4])},d{row}" for row in rows]
        (folder / f"{name}.csv").write_text("\n".join(["query,doc_id", *clicks]) + "\n")
    return folder


@pytest.mark.parametrize(
    ("before", "after"),
    [("perceptron", "perceptron"), ("linear", "linear"), ("all", "all"), ("lora", "all")],
)
def test_text_models_continue(texts: Path, tmp_path: Path, before: str, after: str) -> None:
    """Training begins at the weights of the earlier run, whatever was trained; with another seed,
    too."""
    words = ["adapt", texts / "index"]
    first = ["--train", before, "--epochs", 2, "--keep", 0, "--learning-rate", 3e-3]
    run(*words, texts / "one.csv", "--out", tmp_path / "one", *first)
    second = ["--from", tmp_path / "one", "--train", after, "--epochs", 1, "--seed", 7]
    run(*words, texts / "two.csv", "--out", tmp_path / "kept", *second, "--keep", 1)
    queries = ["ant bee cat", "fox gnu", "hen"]
    vectors = [
        load_model(tmp_path / name / "model").encode_query(queries) for name in ("one", "kept")
    ]
    np.testing.assert_allclose(*vectors, atol=1e-6)
    run(*words, texts / "two.csv", "--out", tmp_path / "two", *second, "--keep", 0)
    adapted = load_model(tmp_path / "two/model").encode_query(queries)
    assert np.abs(adapted - vectors[0]).max() > 1e-4
    for row in metrics(tmp_path / "two")["quality"]:
        assert row["base"] != row["original"]


@pytest.mark.nightly
def test_two_processes_give_the_model_of_one(shop: Path, tmp_path: Path) -> None:
    words = ["adapt", shop / "index", shop / "tuesday.parquet", "--from", shop / "first", *TRAIN]
    words += ["--device", "cpu"]
    run(*words, "--out", tmp_path / "one")
    run_on_two(tmp_path, [*map(str, words), "--out", str(tmp_path / "two")])
    one = load_model(tmp_path / "one/model").state_dict()
    for name, weight in load_model(tmp_path / "two/model").state_dict().items():
        torch.testing.assert_close(weight, one[name], atol=1e-5, rtol=1e-4)
    assert record(tmp_path / "one") == record(tmp_path / "two")
