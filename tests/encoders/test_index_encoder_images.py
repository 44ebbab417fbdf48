"""Encoders of queries over an index of images: towers, maps, folders, and what moves with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from dualenc.data.pairs import PairDataset
from dualenc.encoders import (
    DualEncoder,
    ImageEncoder,
    ImageTextEncoder,
    IndexEncoder,
    TextEncoder,
    VectorEncoder,
    load_model,
)
from dualenc.encoders.dual import Tower
from dualenc.encoders.image_text import add_clip_adapters
from dualenc.encoders.mapped_tower import MappedTower
from dualenc.encoders.vector import VectorTower
from dualenc.errors import DualencError
from dualenc.io.provenance import Provenance
from dualenc.objectives import InfoNCE
from dualenc.training.trainer import Trainer
from dualenc.types import Modality

pytestmark = pytest.mark.slow
D = 24


def facts(**changes: Any) -> Provenance:
    known = {"model": "me/clip", "model_checksum": "ab12", "side": "left", "dim": D}
    return Provenance.from_entries({**known, "metric": "cosine", **changes})


def random_map(kind: Any, input_dim: int, dim: int) -> VectorTower:
    torch.manual_seed(1)
    tower = VectorTower(kind, input_dim, dim, 9)
    for weight in tower.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return tower


@pytest.fixture
def encoder(clip: dict[str, Any]) -> ImageTextEncoder:
    torch.manual_seed(0)
    return ImageTextEncoder(config=clip)


@pytest.fixture
def items(texts: list[str], images: list[Image.Image]) -> dict[str, list[Any]]:
    return {"text": texts, "image": images}


class LetterTower(Tower):
    """A tower of another package."""

    modality, dim, feature_dim = "text", D, D


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("kind", ["linear", "dense", "mlp", "identity"])
@pytest.mark.parametrize("modality", ["text", "image"])
def test_a_mapped_side_of_open_clip_is_the_map_of_its_vectors(
    encoder: ImageTextEncoder,
    items: dict[str, list[Any]],
    tmp_path: Path,
    modality: Modality,
    kind: Any,
) -> None:
    """In the model, in its folder, and in a copy of the copy; the other side stays as it was."""
    size = D if kind == "identity" else 17
    tower = random_map(kind, size, D)
    model = IndexEncoder(encoder, facts(), modality=modality, mapping=tower)
    model.trained_ids = ["7"]
    side = "right" if modality == "text" else "left"
    own = torch.from_numpy(encoder.encode(items[modality], side))[:, :size]
    expected = tower({"vector": F.normalize(own)}).detach().numpy()
    np.testing.assert_allclose(model.encode_query(items[modality]), expected, atol=1e-6)
    model.save(tmp_path / "one", card={"license": "mit"})
    again: Any = load_model(tmp_path / "one")
    assert (again.documents, again.trained_ids) == (facts(), ["7"])
    np.testing.assert_allclose(again.encode_query(items[modality]), expected, atol=1e-6)
    again.save(tmp_path / "two" / "one", card={"license": "mit"})
    for file in (path for path in (tmp_path / "one").rglob("*") if path.is_file()):
        copied = tmp_path / "two" / "one" / file.relative_to(tmp_path / "one")
        assert copied.read_bytes() == file.read_bytes(), file
    other: Modality = "image" if modality == "text" else "text"
    towers = again.query_towers()
    assert towers.keys() == {"text", "image"}
    found = towers[other](towers[other].prepare(items[other])).detach().numpy()
    before = encoder.encode(items[other], "left" if other == "image" else "right")
    np.testing.assert_allclose(found, before, atol=1e-6)


def test_the_folder_inside_opens_in_open_clip(
    encoder: ImageTextEncoder, texts: list[str], tmp_path: Path
) -> None:
    """With the trained weights, where the tower itself is trained."""
    model = IndexEncoder(encoder, facts())
    with torch.no_grad():
        for weight in model.left.parameters():
            weight.add_(0.01)
    model.save(tmp_path / "model")
    place = f"local-dir:{tmp_path / 'model' / 'encoder'}"
    other, _, _ = open_clip.create_model_and_transforms(place)
    tokens = open_clip.get_tokenizer(place)(texts)
    with torch.no_grad():
        expected = other.eval().encode_text(tokens, normalize=True).numpy()
    np.testing.assert_allclose(model.encode_query(texts), expected, atol=1e-5)
    np.testing.assert_allclose(
        load_model(tmp_path / "model").encode_query(texts), expected, atol=1e-5
    )
    assert not (tmp_path / "model" / "queries").exists()


@pytest.mark.parametrize("output", ["embedding", "features"])
def test_an_image_model_and_an_index_of_its_embeddings_or_features(
    images: list[Image.Image], tmp_path: Path, output: Any
) -> None:
    torch.manual_seed(0)
    encoder = ImageEncoder("test_resnet", image_size=32, projector_dim=D)
    inputs = encoder.left.prepare(images)
    with torch.no_grad():
        own = encoder.left.features(inputs) if output == "features" else encoder.left(inputs)
    documents = facts(dim=own.shape[1], output=output)
    model = IndexEncoder(encoder, documents)
    np.testing.assert_allclose(model.encode_query(images), F.normalize(own), atol=1e-6)
    tower = random_map("linear", own.shape[1], own.shape[1])
    mapped = IndexEncoder(encoder, documents, mapping=tower)
    mapped.save(tmp_path / "model")
    expected = tower({"vector": own}).detach().numpy()
    again = load_model(tmp_path / "model")
    assert isinstance(again, IndexEncoder)
    np.testing.assert_allclose(again.encode_query(images), expected, atol=1e-6)
    assert again.query_towers().keys() == {"image"}


def test_queries_are_cut_to_an_index_of_first_components(
    encoder: ImageTextEncoder, texts: list[str], tmp_path: Path
) -> None:
    IndexEncoder(encoder, facts(dim=5)).save(tmp_path / "model")
    expected = unit(encoder.encode(texts, "right")[:, :5])
    found = load_model(tmp_path / "model").encode_query(texts)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_map_of_a_text_model_becomes_modules_of_sentence_transformers(
    text_encoder: Any, texts: list[str]
) -> None:
    base: TextEncoder = text_encoder()
    tower = random_map("linear", 32, 32)
    model = IndexEncoder(base, facts(dim=32), mapping=tower)
    expected = tower({"vector": torch.from_numpy(base.encode_query(texts))}).detach()
    np.testing.assert_allclose(model.encode_query(texts), expected, atol=1e-6)
    assert model.source is None


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("modality", ["text", "image"])
def test_training_moves_the_side_of_the_queries_alone(
    encoder: ImageTextEncoder,
    items: dict[str, list[Any]],
    tmp_path: Path,
    modality: Modality,
    adapters: bool,
) -> None:
    if adapters:
        pytest.importorskip("peft", reason="peft is not installed: pip install 'dualenc[lora]'")
    queries = items[modality][:3]
    sides: dict[Modality, Any] = {"text": "right", "image": "left"}
    other: Modality = "image" if modality == "text" else "text"
    before = {name: encoder.encode(items[name][:3], side) for name, side in sides.items()}
    vectors = list(np.random.default_rng(0).normal(size=(3, D)).astype(np.float32))
    modalities: Any = {"left_modality": modality, "right_modality": "vector"}
    model = IndexEncoder(encoder, facts(), modality=modality)
    if adapters:
        add_clip_adapters(model.left, 2)
    trainer = Trainer(
        output=tmp_path, batch_size=3, max_steps=2, learning_rate=0.01, progress=False
    )
    pairs = PairDataset(queries, vectors, **modalities)
    trainer.fit(model, pairs, InfoNCE(num_left=3, num_right=3))
    again: Any = load_model(tmp_path / "model")
    towers = again.query_towers()
    after = {
        name: tower(tower.prepare(items[name][:3])).detach().numpy()
        for name, tower in towers.items()
    }
    assert np.abs(after[modality] - before[modality]).max() > 1e-3
    np.testing.assert_allclose(after[other], before[other], atol=1e-6)
    np.testing.assert_allclose(after[modality], model.encode_query(queries), atol=1e-6)


def test_the_rest_of_the_model_follows_to_a_device_and_into_copies(
    encoder: ImageTextEncoder,
) -> None:
    model = IndexEncoder(encoder, facts())
    assert all(name.startswith("left.clip.") for name in model.state_dict())
    model.to("meta")
    assert {weight.device.type for weight in encoder.parameters()} == {"meta"}


def test_an_adapted_model_can_be_adapted_again(
    encoder: ImageTextEncoder, texts: list[str], tmp_path: Path
) -> None:
    first = IndexEncoder(encoder, facts(), mapping=random_map("linear", D, D))
    second = IndexEncoder(first, facts())
    assert isinstance(second.left, MappedTower)
    second.save(tmp_path / "model")
    found = load_model(tmp_path / "model").encode_query(texts)
    np.testing.assert_allclose(found, first.encode_query(texts), atol=1e-6)


def test_parts_that_do_not_fit_are_refused(encoder: ImageTextEncoder, text_encoder: Any) -> None:
    with pytest.raises(DualencError, match="map takes vectors of 40 numbers, but the model gives"):
        IndexEncoder(encoder, facts(), mapping=VectorTower("linear", 40, D, None))
    with pytest.raises(DualencError, match=r"vectors of 24 numbers, but .* gives 30"):
        IndexEncoder(encoder, facts(), mapping=VectorTower("linear", D, 30, None))
    with pytest.raises(DualencError, match="queries are of kind image, but the model encodes text"):
        IndexEncoder(text_encoder(), facts(dim=32), modality="image")
    with pytest.raises(DualencError, match="queries are of kind vector, but the model encodes tex"):
        IndexEncoder(encoder, facts(), modality="vector")
    with pytest.raises(DualencError, match="queries are vectors, or mapped already"):
        IndexEncoder(VectorEncoder(D), facts(), mapping=VectorTower("linear", D, D, None))
    letters = LetterTower()
    with pytest.raises(DualencError, match="queries are encoded by LetterTower"):
        IndexEncoder(DualEncoder(letters, letters, kind="query-document"), facts())


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"encoder": "audio"}, "dualenc.json: unknown encoder 'audio'"),
        ({"encoder": ["image"]}, "'encoder' is a list, not a string"),
        ({"queries": "sound"}, "queries are of kind sound, but the model encodes text"),
    ],
)
def test_corrupted_folders_are_refused_in_one_line(
    encoder: ImageTextEncoder, tmp_path: Path, entries: dict[str, Any], message: str
) -> None:
    IndexEncoder(encoder, facts()).save(tmp_path / "model")
    path = tmp_path / "model" / "dualenc.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    with pytest.raises(DualencError, match=message) as error:
        load_model(tmp_path / "model")
    assert "\n" not in str(error.value)
