"""`dualenc evaluate image-text` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dualenc.data.store.vector_shards import Embeddings
from tests.helpers.in_process import evaluated
from tests.helpers.toy import write_captioned


@pytest.mark.slow
def test_recall_both_ways_from_the_embeddings(
    toy_clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """6 images with 2 captions each; 3 images share one caption, so there are 10 texts and 12
    queries."""
    data, out = write_captioned(tmp_path / "data"), tmp_path / "out"
    measured = evaluated("image-text", out, toy_clip, data)
    assert (measured["images"], measured["texts"]) == (6, 12)
    images = np.asarray(Embeddings.open(out / "embeddings" / "images-test").vectors)
    texts = np.asarray(Embeddings.open(out / "embeddings" / "texts-test").vectors)
    assert len(texts) == 10
    captions = [
        [0, 1],
        [2, 3],
        [4, 5],
        [2, 6],
        [7, 8],
        [2, 9],
    ]  # in order of appearance; text 2 is shared
    similarity = images @ texts.T
    hits = [bool(set(np.argsort(-similarity[i])[:5]) & set(captions[i])) for i in range(6)]
    assert measured["metrics"]["image_to_text_recall@5"] == pytest.approx(np.mean(hits))
    queries = [(text, image) for image, own in enumerate(captions) for text in own]
    owners = {
        text: {image for image, own in enumerate(captions) if text in own} for text, _ in queries
    }
    hits = [np.argmax(similarity[:, text]) in owners[text] for text, _ in queries]
    assert measured["metrics"]["text_to_image_recall@1"] == pytest.approx(np.mean(hits))
    assert "image to text" in (out / "report.html").read_text()
    assert "text to image" in capsys.readouterr().out


@pytest.mark.slow
def test_an_image_that_cannot_be_read_is_left_out(
    toy_clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_captioned(tmp_path / "data"), tmp_path / "out"
    (data / "pictures" / "4.png").write_bytes(b"not a picture")
    measured = evaluated("image-text", out, toy_clip, data)
    assert (measured["images"], measured["texts"], measured["skipped"]) == (5, 10, 1)
    assert "left out 1 of 6 items; the first, 4: " in capsys.readouterr().err
