"""`dualenc migrate` over indexes of images, as a user types it, killed at any moment, against an
index that is built with the new model."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dualenc.data import open_image
from dualenc.encoders import load_model
from dualenc.search import Embeddings, Index
from dualenc.search.migration.maps import LinearMap
from dualenc.search.migration.stages import SHARES, Migration
from dualenc.search.searcher import Searcher
from dualenc.workflows import migrate_model
from dualenc.workflows.check_vectors import check
from tests.helpers import toy
from tests.helpers.folder_contents import contents
from tests.helpers.image_models import HUES, picture, save_image_model
from tests.helpers.in_process import failure, found, run
from tests.helpers.tars import write_tar

pytestmark = pytest.mark.slow

N, JUDGED = 240, 30
FORK = multiprocessing.get_context("fork")
SERVED = "dualenc.evaluation.migration_measures.served_shares"
MEANWHILE = "dualenc.evaluation.migration_measures.best_meanwhile"
NAMES = [f"p{row:03d}" for row in range(N)]
CAPTIONS = [f"{list(HUES)[row % 3]} picture number {' '.join(str(row))}" for row in range(N)]
KINDS = ("clip", "image")


def write_beir(folder: Path, queries: str) -> Path:
    """Pictures in subfolders, with ids, and judged captions or views of some of them."""
    (folder / "pictures").mkdir(parents=True)
    (folder / "qrels").mkdir()
    corpus, asked, judged = [], [], ["query-id\tcorpus-id\tscore"]
    for row, name in enumerate(NAMES):
        image = picture(HUES[list(HUES)[row % 3]], row)
        image.save(folder / "pictures" / f"{name}.png")
        corpus.append({"_id": name, "image": f"pictures/{name}.png"})
    for row in range(0, N, N // JUDGED):
        query = {"text": CAPTIONS[row]}
        if queries == "image":
            view = Image.fromarray(
                255 - np.asarray(open_image(folder / corpus[row]["image"]))[::-1]
            )
            view.save(folder / f"view{row}.png")
            query = {"image": f"view{row}.png"}
        asked.append({"_id": f"q{row}", **query})
        judged.append(f"q{row}\t{NAMES[row]}\t1")
    for part, rows in (("corpus", corpus), ("queries", asked)):
        lines = "".join(json.dumps(each) + "\n" for each in rows)
        (folder / f"{part}.jsonl").write_text(lines)
    (folder / "qrels" / "test.tsv").write_text("\n".join(judged) + "\n")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of each kind, a collection, and the index of each model."""
    folder = tmp_path_factory.mktemp("images")
    write_beir(folder / "clip-beir", "text")
    write_beir(folder / "image-beir", "image")
    for seed, age in enumerate(("old", "new")):
        toy.image_text_model(folder / f"clip-{age}", seed)
        # The other way round: a model that finds less would not be taken.
        save_image_model(folder / f"image-{age}", 1 - seed)
        for kind in KINDS:
            words = (folder / f"{kind}-{age}", folder / f"{kind}-beir", "--factory", "Flat")
            run("index", *words, "--out", folder / f"{kind}-{age}-index")
    return folder


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def index(made: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the old index over a copy of its images; samples are of 60 images."""
    monkeypatch.setattr("dualenc.search.migration.stages.MIN_SAMPLE", 60)
    beir = shutil.copytree(made / f"{kind}-beir", tmp_path / "beir")
    index = Path(shutil.copytree(made / f"{kind}-old-index", tmp_path / "index"))
    Index.open(index).provenance.updated(data=str(beir)).write(index)
    return index


def vectors(folder: Path) -> np.ndarray:
    return np.asarray(Index.open(folder).faiss.reconstruct_n(0, N))


def migrated(made: Path, kind: str, index: Path) -> None:
    """Raise unless an index is that of the new model."""
    np.testing.assert_allclose(vectors(index), vectors(made / f"{kind}-new-index"), atol=1e-5)
    ours, theirs = (Index.open(each).provenance for each in (index, made / f"{kind}-new-index"))
    same = ("model", "model_checksum", "side", "kind", "modality", "count", "metric", "factory")
    assert ours.only(same) == theirs.only(same)
    assert not ours.mapped
    assert Index.open(index).ids == Index.open(made / f"{kind}-new-index").ids


def scores_by_hand(made: Path, kind: str, age: str) -> tuple[float, float]:
    """Recall@10 and nDCG@10 of a model by loops over its own vectors, one relevant image each."""
    beir, model = made / f"{kind}-beir", load_model(made / f"{kind}-{age}")
    side = "right" if kind == "clip" else "left"
    lines = [json.loads(line) for line in (beir / "queries.jsonl").read_text().splitlines()]
    asked = [row["text"] if "text" in row else open_image(beir / row["image"]) for row in lines]
    images = [open_image(beir / "pictures" / f"{name}.png") for name in NAMES]
    queries, documents = model.encode(asked, side), model.encode(images, "left")
    recalls, gains = [], []
    for row, query in zip(lines, queries.astype(np.float64)):
        own = int(row["_id"][1:])
        similar = documents.astype(np.float64) @ query
        rank = 1 + int((similar > similar[own]).sum())
        recalls.append(rank <= 10)
        gains.append(1 / np.log2(rank + 1) if rank <= 10 else 0)
    return float(np.mean(recalls)), float(np.mean(gains))


def test_report_measures_what_loops_do(
    made: Path, kind: str, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualenc.search.migration.stages.MIN_SAMPLE", N)
    before = contents(index)
    run("migrate", index, made / f"{kind}-new", "--report-only")
    assert contents(index) == before
    report = json.loads((Path(f"{index}.migration") / "report.json").read_text())
    facts, systems = report["facts"], {row["system"]: row for row in report["systems"]}
    assert (facts["documents"], facts["sample"], facts["queries"]) == (N, N, JUDGED)
    assert facts["relevant are"] == "judged documents"
    for age in ("old", "new"):
        recall, gain = scores_by_hand(made, kind, age)
        row = systems[f"{age} model, {age} vectors"]
        # The old vectors are in half precision.
        assert row["recall@10"][0] == pytest.approx(recall, abs=0.04)
        assert row["ndcg@10"][0] == pytest.approx(gain, abs=0.02)


@pytest.mark.parametrize("served", [list(SHARES), [1.0]], ids=["mapped", "the old one"])
def test_migrated_index_is_that_of_the_new_model(
    made: Path,
    kind: str,
    index: Path,
    served: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(SERVED, lambda _: served)
    monkeypatch.setattr(MEANWHILE, lambda _: "index")
    run("migrate", index, made / f"{kind}-new", "--batch-size", 16)
    assert f"{N} images embedded again, least cosine 1.0" in capsys.readouterr().out
    migrated(made, kind, index)
    left = {"index", "index.migration.html", "beir"}
    assert {path.name for path in index.parent.iterdir()} == left
    queries = ["blue picture"] if kind == "clip" else []
    for query in [*queries, made / f"{kind}-beir" / "pictures" / "p007.png"]:
        results = [found(capsys, each, query) for each in (index, made / f"{kind}-new-index")]
        assert [hit["id"] for hit in results[0]] == [hit["id"] for hit in results[1]]
    run("migrate", index, made / f"{kind}-new")
    assert f"all {N} vectors are of this model" in capsys.readouterr().out


class Stopped(Exception):
    """Ends a migration at a stage."""


def stop_at(index: Path, model: Path, name: str, **options: Any) -> None:
    """Migrate until a folder of embeddings is to be written."""
    embed = migrate_model._Steps._embed_documents

    def stopped(steps: Any, rows: Any, own: str, bar: str) -> Any:
        if own == name:
            raise Stopped
        return embed(steps, rows, own, bar)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(migrate_model._Steps, "_embed_documents", stopped)
        migrate_model.migrate(str(index), str(model), progress=False, **options)


def test_candidates_are_ranked_by_the_new_model(
    made: Path, kind: str, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth = 20
    monkeypatch.setattr(MEANWHILE, lambda _: "candidates")
    monkeypatch.setattr("dualenc.search.migration.candidates.NUM_CANDIDATES", depth)
    stop_at(index, made / f"{kind}-new", "embeddings-48")
    searcher = Searcher.open(index)
    assert searcher.candidates is not None
    models = [load_model(made / f"{kind}-{age}") for age in ("old", "new")]
    spaces = [vectors(made / f"{kind}-{age}-index") for age in ("old", "new")]
    image = open_image(made / f"{kind}-beir" / "pictures" / "p007.png")
    queries: list[tuple[Any, Any]] = [(image, "left")]
    if kind == "clip":
        queries.append(("green picture number 7", "right"))
    for query, side in queries:
        old, new = (model.encode([query], side)[0] for model in models)
        rows = sorted(range(N), key=lambda row: -float(spaces[0][row] @ old))[:depth]
        wanted = sorted((float(spaces[1][row] @ new) for row in rows), reverse=True)[:7]
        hits = searcher.search(query, 7)
        np.testing.assert_allclose([hit.score for hit in hits], wanted, atol=1e-5)
        assert {hit.id for hit in hits} <= {NAMES[row] for row in rows}
    # What searches have embedded becomes part of the index.
    run("migrate", index, made / f"{kind}-new")
    migrated(made, kind, index)


def test_candidates_without_their_images(
    made: Path, kind: str, index: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(MEANWHILE, lambda _: "candidates")
    stop_at(index, made / f"{kind}-new", "embeddings-12")
    query = open_image(made / f"{kind}-beir" / "pictures" / "p000.png")
    pictures = index.parent / "beir" / "pictures"
    expected = [hit.id for hit in Searcher.open(made / f"{kind}-old-index").search(query, N)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dualenc.search.migration.candidates.NUM_CANDIDATES", N)
        searcher = Searcher.open(index)
        broken = expected[5]
        (pictures / f"{broken}.png").write_bytes(b"\x89PNG\r\n\x1a\n")
        found = [hit.id for hit in searcher.search(query, N)]
        sample = set(Embeddings.open(Path(f"{index}.migration") / "sample").ids)
        assert sorted(found) == sorted(set(expected) - ({broken} - sample))
    pictures.rename(pictures.with_name("elsewhere"))
    assert [hit.id for hit in Searcher.open(index).search(query, N)] == expected
    assert "the old model answers, not candidates" in caplog.text


def kill_at(place: str) -> None:
    """Arrange that this process is killed at a place of a migration."""

    def killing(method: Callable[..., Any], when: Callable[..., bool], *, first: bool) -> Any:
        def wrapped(self: Any, *arguments: Any) -> Any:
            if first and when(*arguments):
                os.kill(os.getpid(), signal.SIGKILL)
            result = method(self, *arguments)
            if when(*arguments):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    steps: Any = migrate_model._Steps
    if place.startswith("swap"):
        stop = int(place.removeprefix("swap "))
        swap: Any = Migration.swap
        Migration.swap = killing(swap, lambda *words: words[2] == stop, first=False)  # type: ignore[method-assign]
    elif place == "removal":
        remove = migrate_model.remove_work
        migrate_model.remove_work = lambda *words: os.kill(os.getpid(), signal.SIGKILL) or remove  # type: ignore
    else:
        method = steps._embed_documents
        steps._embed_documents = killing(method, lambda *words: words[1] == place, first=False)


@pytest.mark.parametrize(
    "place", ["sample", "embeddings-12", "swap 48", "embeddings-240", "removal"]
)
def test_killed_and_resumed(
    made: Path, kind: str, index: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SERVED, lambda _: list(SHARES))
    monkeypatch.setattr(MEANWHILE, lambda _: "index")

    def killed() -> None:
        kill_at(place)
        run("migrate", index, made / f"{kind}-new")

    process = FORK.Process(target=killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    # The index answers in between, too.
    assert len(Index.open(index)) == N
    run("migrate", index, made / f"{kind}-new")
    migrated(made, kind, index)
    run("verify", index)


def test_rollback(made: Path, kind: str, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SERVED, lambda _: list(SHARES))
    monkeypatch.setattr(MEANWHILE, lambda _: "index")
    before = contents(index)
    stop_at(index, made / f"{kind}-new", "embeddings-120")
    assert Index.open(index).provenance.mapped
    run("migrate", index, "--rollback")
    assert contents(index) == before
    run("migrate", index, made / f"{kind}-new")
    migrated(made, kind, index)


def repaint(beir: Path, count: int) -> None:
    """Replace the first images by others."""
    for row in range(count):
        Image.new("RGB", (32, 32), (255, 255, row)).save(beir / "pictures" / f"{NAMES[row]}.png")


def test_images_that_have_changed_are_refused(
    made: Path, kind: str, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beir = index.parent / "beir"
    repaint(beir, 12)
    printed = failure(capsys, "migrate", index, made / f"{kind}-new")
    assert "the images are not what was embedded: 12 of 240 images have other vectors" in printed
    assert "the model is the recorded one, so the images have changed, such as 'p000'" in printed
    assert not Path(f"{index}.migration").exists()
    shutil.copytree(made / f"{kind}-beir", beir, dirs_exist_ok=True)
    stop_at(index, made / f"{kind}-new", "embeddings-120")
    repaint(beir, 1)
    printed = failure(capsys, "migrate", index, made / f"{kind}-new")
    assert "a migration with other images is under way" in printed


def test_an_image_that_changes_meanwhile_is_noticed(
    made: Path, kind: str, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = migrate_model._Steps._embed_documents

    def changed(steps: Any, rows: Any, name: str, bar: str) -> Any:
        if name == "embeddings-240":
            repaint(index.parent / "beir", 1)
        return embed(steps, rows, name, bar)

    monkeypatch.setattr(SERVED, lambda _: [1.0])
    before = contents(index)
    with monkeypatch.context() as patch:
        patch.setattr(migrate_model._Steps, "_embed_documents", changed)
        with pytest.raises(Exception, match="images have changed since the migration began"):
            migrate_model.migrate(str(index), str(made / f"{kind}-new"), progress=False)
    assert contents(index) == before
    shutil.copytree(made / f"{kind}-beir", index.parent / "beir", dirs_exist_ok=True)
    run("migrate", index, made / f"{kind}-new")
    migrated(made, kind, index)


def test_images_that_are_gone_or_broken(
    made: Path, kind: str, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beir = index.parent / "beir"
    path = beir / "pictures" / f"{NAMES[5]}.png"
    path.write_bytes(path.read_bytes()[:60])
    printed = failure(capsys, "migrate", index, made / f"{kind}-new")
    assert "p005.png: image cannot be decoded" in printed
    run("migrate", index, "--rollback", "--discard")
    lines = (beir / "corpus.jsonl").read_text().splitlines(keepends=True)
    (beir / "corpus.jsonl").write_text("".join(line for line in lines if "p005" not in line))
    printed = failure(capsys, "migrate", index, made / f"{kind}-new")
    assert "the data lacks the item 'p005'" in printed
    beir.rename(beir.with_name("moved"))
    printed = failure(capsys, "migrate", index, made / f"{kind}-new")
    assert f"its data {beir} is gone; name it by --data" in printed
    run("migrate", index, made / f"{kind}-new", "--data", made / f"{kind}-beir")
    migrated(made, kind, index)
    assert Index.open(index).provenance.data == str(made / f"{kind}-beir")


def test_without_the_old_model(
    made: Path, kind: str, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Index.open(index).provenance.updated(model="/gone/model").write(index)
    run("migrate", index, made / f"{kind}-new", "--anyway")
    printed = capsys.readouterr()
    assert "images are matched by id, not compared with what was embedded" in printed.err
    assert "queries of the new model, mapped, find documents in the old vectors" in printed.out
    assert "candidates of its mapped queries" in " ".join(printed.out.split())
    migrated(made, kind, index)


def test_mapped_queries_find_candidates_without_the_old_model(
    made: Path, kind: str, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Index.open(index).provenance.updated(model="/gone/model").write(index)
    depth = 20
    monkeypatch.setattr(MEANWHILE, lambda _: "candidates")
    monkeypatch.setattr("dualenc.search.migration.candidates.NUM_CANDIDATES", depth)
    stop_at(index, made / f"{kind}-new", "embeddings-48")
    to_old = LinearMap.load(Path(f"{index}.migration") / "to_old.safetensors")
    old, new = (vectors(made / f"{kind}-{age}-index") for age in ("old", "new"))
    model = load_model(made / f"{kind}-new")
    query = open_image(made / f"{kind}-beir" / "pictures" / "p007.png")
    encoded = model.encode([query], "left")
    mapped = to_old(encoded)[0]
    rows = sorted(range(N), key=lambda row: -float(old[row] @ mapped))[:depth]
    wanted = sorted((float(new[row] @ encoded[0]) for row in rows), reverse=True)[:7]
    hits = Searcher.open(index).search(query, 7)
    np.testing.assert_allclose([hit.score for hit in hits], wanted, atol=1e-5)


@pytest.mark.parametrize("source", ["folder", "bytes", "tar", "outside"])
def test_other_sources(
    made: Path, tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `dualenc index` reads: a folder, a table of bytes, a tar, a table of paths elsewhere."""
    pictures = made / "clip-beir" / "pictures"
    data, words = tmp_path / source, ()
    if source == "folder":
        shutil.copytree(pictures, data)
    elif source == "bytes":
        data = tmp_path / "images.parquet"
        columns = [(pictures / f"{name}.png").read_bytes() for name in NAMES]
        pq.write_table(pa.table({"photo": columns, "key": NAMES}), data)
        words = ("--image-column", "photo", "--id-column", "key")
    elif source == "tar":
        data = tmp_path / "images.tar"
        write_tar(
            data, [(f"{name}.png", (pictures / f"{name}.png").read_bytes()) for name in NAMES]
        )
    else:
        data = tmp_path / "images.csv"
        lines = "".join(f"{name},{pictures / name}.png\n" for name in NAMES)
        data.write_text(f"id,image\n{lines}")
        words = ("--allow-outside",)
    run("index", made / "clip-old", data, "--out", tmp_path / "index", "--factory", "Flat", *words)
    own = words if source == "outside" else ()
    if own:
        assert "outside of the folder" in failure(
            capsys, "migrate", tmp_path / "index", made / "clip-new"
        )
    run("migrate", tmp_path / "index", made / "clip-new", *own)
    np.testing.assert_allclose(
        vectors(tmp_path / "index"), vectors(made / "clip-new-index"), atol=1e-5
    )
    assert check(tmp_path / "index").alarms == []


def test_texts_of_an_image_text_model(made: Path, tmp_path: Path) -> None:
    rows = [{"_id": name, "text": text} for name, text in zip(NAMES, CAPTIONS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "captions.jsonl").write_text(lines)
    for age in ("old", "new"):
        words = (made / f"clip-{age}", tmp_path / "captions.jsonl", "--factory", "Flat")
        run("index", *words, "--out", tmp_path / age)
    run("migrate", tmp_path / "old", made / "clip-new")
    np.testing.assert_allclose(vectors(tmp_path / "old"), vectors(tmp_path / "new"), atol=1e-5)


def test_past_queries_decide_the_order(
    made: Path, index: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts or images, as the models take them; what cannot be read is counted."""
    beir = index.parent / "beir"
    (beir / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    rows = [{"image": f"pictures/{NAMES[3]}.png"}] * 9 + [{"image": "broken.png"}]
    log = beir / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "log.jsonl").write_text('{"query": "blue picture"}\n')
    if kind == "image":
        assert failure(
            capsys, "migrate", index, made / "image-new", "--queries", tmp_path / "log.jsonl"
        )
    else:
        words = ("--queries", tmp_path / "log.jsonl", "--report-only")
        run("migrate", index, made / "clip-new", *words)
    run("migrate", index, made / f"{kind}-new", "--queries", log, "--report-only")
    assert "left out 1 of 10 items" in capsys.readouterr().err
    order = np.load(Path(f"{index}.migration") / "order.npy")
    old = vectors(made / f"{kind}-old-index")
    assert set(order[:10]) == set(np.argsort(-(old @ old[3]))[:10])


def test_refusals(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = shutil.copytree(made / "clip-old-index", tmp_path / "index")
    other = failure(capsys, "migrate", index, made / "image-new")
    assert "is image, but this task needs kind image-text" in other
    words = ("--output", "features", "--out", tmp_path / "emb")
    run("embed", made / "image-old", made / "image-beir", *words)
    run("index", tmp_path / "emb", "--out", tmp_path / "features")
    refused = failure(capsys, "migrate", tmp_path / "features", made / "image-new")
    assert "holds image, image, right, features; only documents of" in refused
