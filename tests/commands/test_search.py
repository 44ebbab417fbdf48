"""`dualenc embed`, `index` and `search` as a user types them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from dualenc.data import open_image
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import load_model
from dualenc.encoders.index_encoder import IndexEncoder
from dualenc.errors import DualencError
from dualenc.search import Index
from dualenc.search.texts import TextStore
from tests.helpers import toy
from tests.helpers.embeddings_on_disk import on_disk
from tests.helpers.image_models import save_classes
from tests.helpers.in_process import failure, found, run


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A table of 60 texts."""
    toy.save_documents(tmp_path / "docs.jsonl", 60)
    return tmp_path / "docs.jsonl"


@pytest.fixture
def index(tmp_path: Path, toy_text: Path, documents: Path) -> Path:
    """An index of the table."""
    run("index", toy_text, documents, "--out", tmp_path / "index")
    return tmp_path / "index"


@torch.inference_mode()
def encoded(model: Path, side: Any, items: list[Any]) -> np.ndarray:
    tower = load_model(model).tower(side)
    return torch.cat([tower(tower.prepare([item])) for item in items]).numpy()


@pytest.mark.slow
def test_embed_writes_what_the_model_says(
    tmp_path: Path, toy_text: Path, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("embed", toy_text, documents, "--out", tmp_path / "emb", "--batch-size", 7)
    assert "60 embeddings of dimension 32 (right side)" in capsys.readouterr().out
    embeddings = Embeddings.open(tmp_path / "emb")
    assert embeddings.ids == [f"d{i}" for i in range(60)]
    np.testing.assert_allclose(
        embeddings.vectors[:], encoded(toy_text, "right", toy.texts(60)), atol=1e-5
    )
    assert embeddings.provenance.model == str(toy_text)
    run("embed", toy_text, documents, "--side", "left", "--out", tmp_path / "queries")
    queries = Embeddings.open(tmp_path / "queries").vectors[:]
    np.testing.assert_allclose(queries, encoded(toy_text, "left", toy.texts(60)), atol=1e-5)


def test_embed_keeps_columns(
    tmp_path: Path, toy_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"_id": f"d{i}", "text": text, "year": 2000 + i, "lang": "no"}
        for i, text in enumerate(toy.texts(6))
    ]
    rows[2]["text"] = ""
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("embed", toy_text, tmp_path / "docs.jsonl", "--out", tmp_path / "emb")

    def columns(*more: str) -> Any:
        run(*words, *more)
        kept = Embeddings.open(tmp_path / "emb").columns
        return kept and kept.to_pydict()

    expected = {"year": [2000, 2001, 2003, 2004, 2005], "lang": ["no"] * 5}
    assert columns("--columns", "year,lang") == expected
    monkeypatch.setattr(
        "dualenc.search.embed.encode._Encoder.shard", lambda *_: 1 / 0
    )  # other columns cost no embedding
    assert columns("--columns", "lang") == {"lang": expected["lang"]}
    assert columns() is None


def test_index_of_a_model_and_of_its_embeddings_are_the_same(
    tmp_path: Path, toy_text: Path, documents: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emb, other = tmp_path / "emb", tmp_path / "other"
    run("embed", toy_text, documents, "--out", emb)
    capsys.readouterr()
    run("index", emb, "--out", other)
    shown = capsys.readouterr().out
    assert "60 vectors of dimension 32 (Flat, cosine)" in shown
    assert "recall@10 against exact search: 1.0000 (60 queries)" in shown
    assert re.search(
        r"a query alone: p50 [\d.]+ ms, p95 [\d.]+ ms, p99 [\d.]+ ms; 128 bytes per vector", shown
    )
    for name in ("index.faiss", "items.arrow"):
        assert (index / name).read_bytes() == (other / name).read_bytes()
    assert not list(tmp_path.glob(".*"))
    run("index", emb, "--out", other, "--factory", "IVF2,Flat", "--target-recall", 1)
    assert "(IVF2,Flat, nprobe=2, cosine)" in capsys.readouterr().out
    run(
        "index", emb, "--out", other, "--factory", "HNSW8", "--queries", emb, "--recall-queries", 20
    )
    built = Index.open(other).provenance
    assert (built.recall_queries, built.recall_queries_from) == (20, "given")


@pytest.mark.slow
def test_append_remove_and_verify(
    tmp_path: Path, toy_text: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"_id": f"late {i}", "text": text} for i, text in enumerate(toy.texts(5))]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("append", index, toy_text, tmp_path / "more.jsonl")
    assert "5 vectors appended, now 65" in capsys.readouterr().out
    assert {result["id"] for result in found(capsys, index, toy.texts(1)[0], "-k", 65)} >= {
        "late 0",
        "d0",
    }
    (tmp_path / "gone.txt").write_text("late 0\r\nd59\n", encoding="utf-8-sig")
    run("remove", index, tmp_path / "gone.txt")
    assert "2 removed, now 63 vectors" in capsys.readouterr().out
    assert not {result["id"] for result in found(capsys, index, "fox", "-k", 65)} & {
        "late 0",
        "d59",
    }
    run("verify", index)
    assert "63 vectors" in capsys.readouterr().out
    (index / "index.faiss").write_bytes(b"broken")
    assert "index.faiss: " in failure(capsys, "verify", index)


@pytest.mark.slow
def test_appended_items_keep_the_columns_that_filters_read(
    tmp_path: Path, toy_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read with the data, and missed in embeddings before anything is written."""
    for name, first in (("docs", 2000), ("more", 2030)):
        rows = [
            {"_id": f"{name}{i}", "text": text, "year": first + i}
            for i, text in enumerate(toy.texts(6))
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    index = tmp_path / "index"
    run("index", toy_text, tmp_path / "docs.jsonl", "--columns", "year", "--out", index)
    run("embed", toy_text, tmp_path / "more.jsonl", "--out", tmp_path / "emb")
    refused = failure(capsys, "append", index, tmp_path / "emb")
    assert "lacks column year, which the index filters by; embed with --columns year" in refused
    run("append", index, toy_text, tmp_path / "more.jsonl")
    capsys.readouterr()
    assert len(found(capsys, index, "fox", "--where", "year>=2030", "-k", 12)) == 6


def test_what_an_index_would_refuse_is_not_embedded_first(
    tmp_path: Path,
    toy_text: Path,
    documents: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = tmp_path / "index"
    run("index", toy_text, documents, "--out", index)
    monkeypatch.setattr("dualenc.workflows.session.embed", None)
    message = failure(capsys, "append", index, toy_text, documents)
    assert "already has an item 'd0'; remove it first" in message
    meta = json.loads((index / "meta.json").read_text())
    (index / "meta.json").write_text(json.dumps(meta | {"model_checksum": "another"}))
    assert "vectors of model_checksum another" in failure(
        capsys, "append", index, toy_text, documents
    )
    # Without a recorded model, larger vectors are cut only where it is said.
    dim = Index.open(index).dim
    Index.build(np.eye(3, dim // 2, dtype=np.float32), ["x", "y", "z"]).save(tmp_path / "other")
    refused = failure(capsys, "append", tmp_path / "other", toy_text, documents)
    assert f"vectors of dimension {dim // 2}, not {dim}" in refused


def test_a_model_of_more_numbers_than_an_index_without_a_model_is_cut_with_a_warning(
    tmp_path: Path, toy_text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Index.build(np.eye(3, 8, dtype=np.float32), ["x", "y", "z"]).save(tmp_path / "index")
    run("search", tmp_path / "index", "fox", "--model", toy_text)
    assert "does not record which model made its vectors; comparing the first 8 of" in caplog.text


def test_a_lock_that_a_killed_command_has_left_is_no_obstacle(
    tmp_path: Path, toy_text: Path, documents: Path
) -> None:
    (tmp_path / ".index.embeddings").mkdir()
    (tmp_path / ".index.embeddings" / "create.lock").touch()
    run("index", toy_text, documents, "--out", tmp_path / "index")


def test_a_refused_append_is_no_obstacle(tmp_path: Path, toy_text: Path, documents: Path) -> None:
    """Nor is a failed build, whose vectors another command replaces; those of a cut index are cut
    alike."""
    run("index", toy_text, documents, "--dim", 12, "--out", tmp_path / "index")
    words = ("append", tmp_path / "index", toy_text, tmp_path / "more.jsonl")
    rows = [{"_id": name, "text": "fox"} for name in ("d0", "late")]
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(DualencError, match="already has an item 'd0'"):
        run(*words, "--debug")
    (tmp_path / "more.jsonl").write_text(json.dumps(rows[1]))
    run(*words)
    assert len(Index.open(tmp_path / "index")) == 61
    with pytest.raises(DualencError, match="IVF61"):
        run(
            "index",
            toy_text,
            documents,
            "--out",
            tmp_path / "new",
            "--factory",
            "IVF61,Flat",
            "--debug",
        )
    assert (tmp_path / ".new.embeddings").is_dir()
    run("index", toy_text, documents, "--out", tmp_path / "new", "--dim", 12)


def test_texts_are_found_again_as_they_were_read(
    tmp_path: Path, toy_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder, and without naming again the columns of the table."""
    rows = [
        {"sku": f"s{row}", "description": text, "text": "other"}
        for row, text in enumerate(toy.texts(5))
    ]
    (tmp_path / "goods.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    columns = ("--text-column", "description", "--id-column", "sku")
    run("index", toy_text, "goods.jsonl", *columns, "--out", "index")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run("index", tmp_path / "index", "--texts")
    assert list(
        TextStore(tmp_path / "index", Index.open(tmp_path / "index").items_checksum).texts
    ) == toy.texts(5)


@pytest.mark.slow
def test_search_is_the_exact_ranking_of_the_query_side(
    index: Path, toy_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    query = "fox dog"
    scores = encoded(toy_text, "left", [query]) @ encoded(toy_text, "right", toy.texts(60)).T
    best = np.argsort(-scores[0])[:3]
    assert len(found(capsys, index, query, "-k", 10**12)) == 60
    results = found(capsys, index, query, "-k", 3)
    assert [result["id"] for result in results] == [f"d{i}" for i in best]
    assert [result["rank"] for result in results] == [1, 2, 3]
    np.testing.assert_allclose([result["score"] for result in results], scores[0][best], atol=1e-5)
    assert [result["snippet"] for result in results] == [toy.texts(60)[i] for i in best]


@pytest.mark.slow
def test_a_query_may_begin_with_a_hyphen(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = found(capsys, index, "-20 degrees", "-k", 3)
    run("search", index, "-k", 3, "--json", "--", "-20 degrees")
    assert results == json.loads(capsys.readouterr().out)["results"]
    assert "write it last, after --: " in failure(capsys, "search", index, "-f option of rm")


def test_search_finds_a_model_that_moved_along(
    tmp_path: Path, toy_text: Path, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(toy_text, tmp_path / "a" / "model")
    run("index", tmp_path / "a" / "model", documents, "--out", tmp_path / "a" / "index")
    (tmp_path / "a").rename(tmp_path / "b")
    before = found(capsys, tmp_path / "b" / "index", "fox")
    (tmp_path / "b" / "model").rename(tmp_path / "elsewhere")
    message = failure(capsys, "search", tmp_path / "b" / "index", "fox")
    assert message.endswith("is gone; name its new place with --model")
    assert (
        found(capsys, tmp_path / "b" / "index", "fox", "--model", tmp_path / "elsewhere") == before
    )


def test_images_are_found_by_image_and_by_text(
    tmp_path: Path, toy_clip: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = toy.save_images(tmp_path / "images", 12)
    run("index", toy_clip, tmp_path / "images", "--out", tmp_path / "index")
    assert Index.open(tmp_path / "index").provenance.side == "left"
    by_image = found(capsys, tmp_path / "index", tmp_path / "images" / "07.png", "-k", 1)
    assert by_image[0]["id"] == "07.png"
    assert by_image[0]["score"] == pytest.approx(1, abs=1e-4)
    database = encoded(toy_clip, "left", images)
    scores = encoded(toy_clip, "right", ["a fox"]) @ database.T
    by_text = found(capsys, tmp_path / "index", "a fox", "-k", 12)
    assert [result["id"] for result in by_text] == [f"{i:02d}.png" for i in np.argsort(-scores[0])]
    assert "missing.jpg" in failure(capsys, "search", tmp_path / "index", tmp_path / "missing.jpg")
    assert found(capsys, tmp_path / "index", "a fox " * 100, "-k", 1), (
        "longer than the name of a file may be"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("embed MODEL no.jsonl --out OUT", "no.jsonl"),
        ("embed no/model DOCS --out OUT", "no/model: "),
        ("embed MODEL DOCS --out OUT --batch-size 0", 'Invalid value "0" for --batch-size.'),
        ("embed MODEL DOCS --out OUT --dim 33", "dim is 33; give 1 to 32"),
        (
            "index MODEL --out OUT",
            "is not a folder of embeddings, a FAISS file or a .npy matrix; if it is a model, name "
            "the data too",
        ),
        ("index MODEL DOCS", "needs --out"),
        ("append OUT MODEL DOCS", "is not an index"),
        ("index MODEL DOCS --out OUT --memory much", "memory is 'much'; give a size such as 2GiB"),
        (
            "index MODEL DOCS --out OUT --target-recall nan",
            'Invalid value "nan" for --target-recall.',
        ),
        ("remove INDEX no.txt", "no.txt: cannot be read"),
    ],
)
def test_mistakes(
    tmp_path: Path,
    toy_text: Path,
    index: Path,
    capsys: pytest.CaptureFixture[str],
    words: str,
    message: str,
) -> None:
    places = {
        "MODEL": toy_text,
        "DOCS": tmp_path / "docs.jsonl",
        "INDEX": index,
        "OUT": tmp_path / "out",
    }
    assert message in failure(capsys, *(places.get(word, word) for word in words.split()))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_what_is_no_index_is_told_how_to_become_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "docs.jsonl"
    texts.write_text('{"_id": "d1", "text": "fox"}\n')
    advice = f"index it with `dualenc index MODEL {texts} --out INDEX`"
    assert failure(capsys, "search", texts, "fox") == f"{texts}: is a file, not an index; {advice}"
    matrix = tmp_path / "vectors.npy"
    matrix.touch()
    assert f"`dualenc index {matrix} --out INDEX`" in failure(capsys, "search", matrix, "fox")
    message = failure(capsys, "index", texts, "--out", tmp_path / "index")
    assert f"embed its texts with a model: dualenc index MODEL {texts} --out INDEX" in message
    message = failure(capsys, "search", tmp_path, "fox")
    assert message.startswith(f"{tmp_path}: has no meta.json: not an index; make one with")
    on_disk(tmp_path / "emb", np.ones((1, 2), np.float32))
    message = failure(capsys, "search", tmp_path / "emb", "fox")
    assert message.endswith(f"make one with `dualenc index {tmp_path / 'emb'} --out INDEX`")


def test_a_model_that_changed_since(
    tmp_path: Path, toy_text: Path, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load_model(toy.text_model(tmp_path / "model"))
    run("index", tmp_path / "model", documents, "--out", tmp_path / "index")
    with torch.no_grad():
        next(model.parameters()).add_(0.01)
    model.save(tmp_path / "model")
    assert "other weights than the model has now" in failure(
        capsys, "search", tmp_path / "index", "fox"
    )


@pytest.mark.slow
def test_an_adapted_query_tower_searches_the_index_it_was_made_for(
    tmp_path: Path, toy_text: Path, documents: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = IndexEncoder(load_model(toy_text), Index.open(index).provenance)
    with torch.no_grad():
        next(model.left.parameters()).add_(
            0.5 * torch.randn(32, generator=torch.Generator().manual_seed(0))
        )
    model.save(tmp_path / "adapted")
    results = found(capsys, index, "fox dog", "-k", 60, "--model", tmp_path / "adapted")
    query = SentenceTransformer(str(tmp_path / "adapted")).encode(["fox dog"])
    scores = (query @ encoded(toy_text, "right", toy.texts(60)).T)[0]
    assert [result["id"] for result in results] == [f"d{i}" for i in np.argsort(-scores)]
    np.testing.assert_allclose(
        [result["score"] for result in results], -np.sort(-scores), atol=1e-5
    )
    assert results != found(capsys, index, "fox dog", "-k", 60)
    run(
        "index", toy.text_model(tmp_path / "other", seed=1), documents, "--out", tmp_path / "theirs"
    )
    run("index", toy_text, documents, "--dim", 12, "--out", tmp_path / "short")
    for name in ("theirs", "short"):
        message = failure(capsys, "search", tmp_path / name, "fox", "--model", tmp_path / "adapted")
        assert message.startswith(
            f"{tmp_path / name}: the model was adapted for an index of other vectors; name that"
        )
    for words in (
        ("embed", tmp_path / "adapted", documents),
        ("index", tmp_path / "adapted", documents),
    ):
        message = failure(capsys, *words, "--out", tmp_path / "new")
        assert (
            f"documents are the vectors of the index; embed new ones with {toy_text}, queries with"
            in message
        )
    assert not (tmp_path / "new").exists()


def test_ids_and_snippets_do_not_command_the_terminal(
    tmp_path: Path, toy_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;owned\x07\x9b2Jfox"
    (tmp_path / "docs.jsonl").write_text(json.dumps({"_id": evil, "text": evil}))
    run("index", toy_text, tmp_path / "docs.jsonl", "--out", tmp_path / "index")
    assert found(capsys, tmp_path / "index", evil)[0]["id"] == evil
    run("search", tmp_path / "index", evil)
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count(r"\x1b]0;owned\x07\x9b2Jfox") == 3, "the query, the id, the snippet"


def test_images_left_out_are_told(
    tmp_path: Path, toy_clip: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.save_images(tmp_path / "images", 12)
    (tmp_path / "images" / "03.png").write_bytes(b"not an image")
    words = ("embed", toy_clip, tmp_path / "images", "--out")
    run(*words, tmp_path / "emb")
    assert "left out 1 of 12 items; the first, 03.png:" in capsys.readouterr().err
    assert "03.png" in failure(capsys, *words, tmp_path / "emb2", "--on-error", "raise")


@pytest.mark.slow
def test_the_first_components_are_embedded_indexed_and_searched(
    tmp_path: Path, toy_text: Path, documents: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = encoded(toy_text, "right", toy.texts(60))
    cut = whole[:, :12] / np.linalg.norm(whole[:, :12], axis=1, keepdims=True)
    run("embed", toy_text, documents, "--out", tmp_path / "short", "--dim", 12)
    run("embed", toy_text, documents, "--out", tmp_path / "whole")
    run("index", tmp_path / "whole", "--dim", 12, "--out", tmp_path / "a")
    run("index", tmp_path / "short", "--out", tmp_path / "b")
    run("index", toy_text, documents, "--dim", 12, "--out", tmp_path / "c")
    query = encoded(toy_text, "left", ["a question"])[:, :12]
    scores = ((query / np.linalg.norm(query)) @ cut.T)[0]
    best = np.argsort(-scores)[:5]
    for name in "abc":
        results = found(capsys, tmp_path / name, "a question", "--k", 5)
        assert [result["id"] for result in results] == [f"d{row}" for row in best]
        np.testing.assert_allclose([result["score"] for result in results], scores[best], atol=1e-5)


def test_a_path_is_searched_as_what_the_file_holds(
    tmp_path: Path,
    toy_clip: Path,
    index: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever its name; a path that is searched as a text is reported."""
    pictures = save_classes(tmp_path / "pictures", per_class=2)
    shutil.copyfile(pictures / "red" / "00.png", tmp_path / "red")
    (tmp_path / "notes").write_text("a fox")
    run("index", toy_clip, pictures, "--out", tmp_path / "images")
    named, unnamed = pictures / "red" / "00.png", tmp_path / "red"
    expected = found(capsys, tmp_path / "images", named)
    assert found(capsys, tmp_path / "images", unnamed) == expected
    assert found(capsys, tmp_path / "images", "fox and/or hen") != expected
    assert not caplog.messages
    reported = {
        (
            tmp_path / "images",
            tmp_path / "notes",
        ): "the file is not an image; its path is searched as a text",
        (tmp_path / "images", tmp_path / "missing"): "no such file; the path is searched as a text",
        (
            index,
            unnamed,
        ): (
            "the file is an image, and the model of this index takes texts; "
            "its path is searched as a"
        ),
        (
            index,
            named,
        ): (
            "the file is an image, and the model of this index takes texts; "
            "its path is searched as a"
        ),
    }
    for (folder, query), line in reported.items():
        caplog.clear()
        assert found(capsys, folder, query)
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith(f"{query}: {line}")
    with pytest.raises(DualencError, match="image cannot be decoded"):
        open_image(tmp_path / "notes")


@pytest.mark.parametrize(
    "read", [None, [], "x", 3, {"a": 1}, {"split": 3}, {"quotes": "x"}, {"allow_outside": True}]
)
def test_a_meta_json_that_does_not_say_how_the_data_was_read(
    index: Path, capsys: pytest.CaptureFixture[str], read: Any
) -> None:
    """Nor does it decide what paths of a table may lead to."""
    meta = json.loads((index / "meta.json").read_text())
    (index / "meta.json").write_text(json.dumps(meta | {"read": read}))
    for words in (("index", index, "--bm25"), ("index", index, "--texts")):
        assert f"{index}: 'read' in meta.json is " in failure(capsys, *words)
