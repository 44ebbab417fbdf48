"""`dualenc evaluate image-text` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dualenc.cli import main
from dualenc.data.vector_shards import Embeddings
from dualenc.evaluation.runs import read_per_query
from tests.commands.image_models import replace_images
from tests.commands.toy import write_beir, write_captioned


@pytest.fixture
def model(toy_clip: Path) -> Path:
    return toy_clip


def evaluate(model: Path, *rest: object) -> int:
    return main(["evaluate", "image-text", str(model), *map(str, rest)])


@pytest.mark.slow
def test_recall_both_ways_from_the_embeddings(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """6 images with 2 captions each; 3 images share one caption, so there are 10 texts and 12 queries."""
    data, out = write_captioned(tmp_path / "data"), tmp_path / "out"
    assert evaluate(model, data, "--out", out) == 0
    measured = json.loads((out / "metrics.json").read_text())
    assert (measured["images"], measured["texts"]) == (6, 12)
    images = np.asarray(Embeddings.open(out / "embeddings" / "images-test").vectors)
    texts = np.asarray(Embeddings.open(out / "embeddings" / "texts-test").vectors)
    assert len(texts) == 10
    captions = [[0, 1], [2, 3], [4, 5], [2, 6], [7, 8], [2, 9]]  # in order of appearance; text 2 is shared
    similarity = images @ texts.T
    hits = [bool(set(np.argsort(-similarity[i])[:5]) & set(captions[i])) for i in range(6)]
    assert measured["metrics"]["image_to_text_recall@5"] == pytest.approx(np.mean(hits))
    queries = [(text, image) for image, own in enumerate(captions) for text in own]
    owners = {text: {image for image, own in enumerate(captions) if text in own} for text, _ in queries}
    hits = [np.argmax(similarity[:, text]) in owners[text] for text, _ in queries]
    assert measured["metrics"]["text_to_image_recall@1"] == pytest.approx(np.mean(hits))
    assert len(read_per_query(out / "text_to_image" / "per_query.ndjson")) == 12
    assert "Best and worst captions" in (out / "report.html").read_text()
    assert "text to image" in capsys.readouterr().out


@pytest.mark.slow
def test_an_image_that_cannot_be_read_is_left_out(model: Path, tmp_path: Path) -> None:
    data, out = write_captioned(tmp_path / "data"), tmp_path / "out"
    (data / "pictures" / "4.png").write_bytes(b"not a picture")
    assert evaluate(model, data, "--out", out) == 0
    measured = json.loads((out / "metrics.json").read_text())
    assert (measured["images"], measured["texts"]) == (5, 10)


@pytest.mark.slow
def test_mistakes_are_told_in_one_line(
    model: Path, toy_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_captioned(tmp_path / "data")
    for words, message in [
        ((model, data, "--split", "dev"), "no split 'dev'"),
        ((model, data, "--right_column", "caption"), "caption"),
        ((model, write_beir(tmp_path / "beir")), "pairs of text and text, not of image and text"),
        ((toy_text, data), "needs kind image-text; use `dualenc evaluate retrieval`"),
        ((tmp_path / "absent", data), "absent"),
    ]:
        assert evaluate(*words, "--out", tmp_path / "out") == 2  # type: ignore[arg-type]
        error = capsys.readouterr().err.strip().splitlines()
        assert message in error[-1], error
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_captions_and_images_replaced_in_place_count_anew(model: Path, tmp_path: Path) -> None:
    data = write_captioned(tmp_path / "data")
    assert evaluate(model, data, "--out", tmp_path / "out") == 0
    replace_images(data)
    table = data / "test.jsonl"
    table.write_text(table.read_text().replace("number", "picture"))
    assert evaluate(model, data, "--out", tmp_path / "out") == 0
    assert evaluate(model, data, "--out", tmp_path / "fresh") == 0
    for name in ("images-test", "texts-test"):
        shards = [tmp_path / out / "embeddings" / name / "data-00000.arrow" for out in ("out", "fresh")]
        assert shards[0].read_bytes() == shards[1].read_bytes()
