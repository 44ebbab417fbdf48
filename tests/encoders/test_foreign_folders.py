"""Folders as others publish them: what is missing, left over, quantized, of another purpose, or of
absurd size."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from dualenc.cli import main
from dualenc.encoders import DualEncoder, ImageTextEncoder, StaticEncoder, TextEncoder, load_model
from dualenc.errors import DualencError
from dualenc.search.embed.encode import tower_checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

pytestmark = pytest.mark.slow

TEXTS = ["A Dog runs over THE green grass", "two cats"]


@pytest.fixture
def folder(text_encoder: Callable[..., TextEncoder], tmp_path: Path) -> Path:
    """The folder of a small BERT."""
    text_encoder().save(tmp_path / "bert")
    return tmp_path / "bert"


def change(file: Path, **values: Any) -> None:
    """Set values in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def drop_weights(file: Path, *parts: str) -> None:
    """Remove the weights whose names contain one of these texts."""
    weights = load_file(file)
    left = {
        name: weight for name, weight in weights.items() if not any(part in name for part in parts)
    }
    assert len(left) < len(weights)
    save_file(left, file, metadata={"format": "pt"})


def as_transformers(folder: Path) -> None:
    """Leave what transformers reads alone."""
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (folder / name).unlink()


def checksum(folder: Path) -> str:
    return tower_checksum(load_model(folder).left)


def test_without_a_pooler_the_checksum_is_the_same_at_each_load_and_after_saving(
    folder: Path, tmp_path: Path
) -> None:
    expected = load_model(folder).encode(TEXTS)
    drop_weights(folder / "model.safetensors", "pooler")
    model = load_model(folder)
    np.testing.assert_array_equal(model.encode(TEXTS), expected)
    model.save(tmp_path / "saved")
    sums = {
        checksum(folder),
        checksum(folder),
        checksum(tmp_path / "saved"),
        tower_checksum(model.left),
    }
    assert len(sums) == 1


def test_an_index_of_a_model_without_a_pooler_is_searched(folder: Path, tmp_path: Path) -> None:
    drop_weights(folder / "model.safetensors", "pooler")
    (tmp_path / "d.jsonl").write_text(
        '{"id": "1", "text": "a cat"}\n{"id": "2", "text": "a dog"}\n'
    )
    index = str(tmp_path / "index")
    assert (
        main(["index", str(folder), str(tmp_path / "d.jsonl"), "--out", index, "--factory", "Flat"])
        == 0
    )
    assert main(["search", index, "cat"]) == 0


def test_a_complete_model_keeps_its_checksum(minilm: Path) -> None:
    """Indexes record it."""
    assert checksum(minilm).startswith("e185283b1c78")


def test_weights_that_vectors_depend_on_are_named(folder: Path) -> None:
    drop_weights(folder / "model.safetensors", "pooler", "layer.1.attention.self.key")
    with pytest.raises(
        DualencError,
        match=r"bert: 2 weights are missing, such as encoder.layer.1.attention.self.key.bias",
    ):
        load_model(folder)


def test_a_pooler_that_makes_the_vectors_is_needed(folder: Path) -> None:
    settings = {"text": {"method": "forward", "method_output_name": "pooler_output"}}
    module = {"modality_config": settings, "module_output_name": "sentence_embedding"}
    (folder / "sentence_bert_config.json").write_text(json.dumps(module))
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([modules[0], modules[-1]]))
    assert load_model(folder).encode(TEXTS).shape == (2, 32)
    drop_weights(folder / "model.safetensors", "pooler")
    with pytest.raises(DualencError, match=r"2 weights are missing, such as pooler.dense.bias"):
        load_model(folder)


@pytest.fixture
def timm_folder(tmp_path: Path) -> Path:
    """A folder of timm with a classifier, as its hub models are."""
    (tmp_path / "timm").mkdir()
    model = timm.create_model("test_resnet", num_classes=10)
    names = ("input_size", "mean", "std", "interpolation", "crop_pct", "first_conv", "classifier")
    known = {name: model.pretrained_cfg[name] for name in names}
    config = {
        "architecture": "test_resnet",
        "num_classes": 10,
        "pretrained_cfg": {**known, "num_classes": 10},
    }
    (tmp_path / "timm" / "config.json").write_text(json.dumps(config))
    save_file(model.state_dict(), tmp_path / "timm" / "model.safetensors")
    return tmp_path / "timm"


@pytest.mark.parametrize("part", ["layer1.0.conv1.weight", "layer1.0.bn1.running_mean"])
def test_weights_that_timm_would_draw_are_named(timm_folder: Path, part: str) -> None:
    assert checksum(timm_folder) == checksum(timm_folder)
    drop_weights(timm_folder / "model.safetensors", part)
    with pytest.raises(DualencError, match=f"timm: {part} is missing; restore the weights file"):
        load_model(timm_folder)


@pytest.mark.parametrize("shared", [True, False])
def test_lower_case_stays_when_a_model_is_saved(minilm: Path, tmp_path: Path, shared: bool) -> None:
    shutil.copytree(minilm, tmp_path / "cased")
    change(tmp_path / "cased" / "tokenizer_config.json", do_lower_case=False)
    cased = load_model(tmp_path / "cased").encode(TEXTS)
    change(tmp_path / "cased" / "sentence_bert_config.json", do_lower_case=True)
    model = TextEncoder(str(tmp_path / "cased"), shared=shared)
    expected = model.encode(TEXTS)
    assert abs(expected - cased).max() > 0.05
    model.save(tmp_path / "saved")
    np.testing.assert_allclose(load_model(tmp_path / "saved").encode(TEXTS), expected, atol=1e-6)
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode_query(TEXTS)
    np.testing.assert_allclose(theirs, expected, atol=1e-6)


def test_a_token_without_a_vector_is_refused_when_the_model_is_loaded(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        DualencError,
        match=r"bert: the tokenizer maps 'zebra' to id 300, but the model has 300 token v",
    ):
        load_model(folder)


def test_a_padding_token_without_a_vector_is_refused_when_an_image_text_model_is_loaded(
    clip: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    ImageTextEncoder(config=clip, tokenizer=tokenizer).save(tmp_path / "clip")
    change(tmp_path / "clip" / "tokenizer_config.json", pad_token="zebra")
    with pytest.raises(
        DualencError, match="the tokenizer returns id 300, but the model has 300 token vectors"
    ):
        load_model(tmp_path / "clip")


def test_a_static_table_has_a_row_for_each_token(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    StaticEncoder(tokenizer=tokenizer, dim=8).save(tmp_path / "static")
    file = tmp_path / "static" / "model.safetensors"
    save_file({"embedding.weight": load_file(file)["embedding.weight"][:-1].clone()}, file)
    with pytest.raises(DualencError, match="but the model has 299 token vectors"):
        load_model(tmp_path / "static")


def test_a_quantized_table_is_refused(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    StaticEncoder(tokenizer=tokenizer, dim=8).save(tmp_path / "static")
    file = tmp_path / "static" / "model.safetensors"
    save_file({"embeddings": (load_file(file)["embedding.weight"] * 30).to(torch.int8)}, file)
    with pytest.raises(
        DualencError,
        match=r"embeddings is quantized to I8; save it in float32 \(model2vec: quantize",
    ):
        load_model(tmp_path / "static")


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("config.json", {"architectures": ["BertForSequenceClassification"]}),
        ("config.json", {"architectures": ["BertForTokenClassification"]}),
        ("sentence_bert_config.json", {"transformer_task": "sequence-classification"}),
        ("config_sentence_transformers.json", {"model_type": "CrossEncoder"}),
    ],
)
def test_a_cross_encoder_makes_no_vectors(
    folder: Path, file: str, values: Mapping[str, Any]
) -> None:
    if file == "config.json":
        as_transformers(folder)
    assert load_model(folder).encode(TEXTS).shape == (2, 32)
    change(folder / file, **values)
    with pytest.raises(
        DualencError,
        match="a model of scores or labels, not of vectors; rerank results wi",
    ):
        load_model(folder)


def test_a_folder_with_modules_makes_vectors_of_any_transformer(folder: Path) -> None:
    change(folder / "config.json", architectures=["BertForSequenceClassification"])
    assert load_model(folder).encode(TEXTS).shape == (2, 32)


@pytest.mark.parametrize(
    "values",
    [
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"num_beams": 4, "early_stopping": True, "max_length": 20},
        {"return_dict": False},
    ],
)
def test_settings_of_older_models_are_left_out_and_vectors_stay(
    folder: Path, values: Mapping[str, Any], tmp_path: Path
) -> None:
    expected = load_model(folder).encode(TEXTS)
    change(folder / "config.json", **values)
    model = load_model(folder)
    model.check_savable()
    model.save(tmp_path / "saved")
    for each in (model, load_model(tmp_path / "saved")):
        np.testing.assert_allclose(each.encode(TEXTS), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["query-document", "image-text", "image"])
def test_a_model_is_as_before_once_it_was_found_savable(
    build: Callable[[str], DualEncoder], kind: str
) -> None:
    model = build(kind)
    before = tower_checksum(model.left)
    model.check_savable()
    assert tower_checksum(model.left) == before


def test_what_cannot_be_saved_is_found(text_encoder: Callable[..., TextEncoder]) -> None:
    model = text_encoder()
    model.left.backbone.config.num_beams = 4
    with pytest.raises(
        DualencError, match=r"the model cannot be saved \(Some generation parameters are set"
    ):
        model.check_savable()


SIZES: list[tuple[str, str, tuple[str, ...], Any]] = [
    ("query-document", "config.json", ("num_hidden_layers",), 10**6),
    ("query-document", "config.json", ("num_hidden_layers",), 900),
    ("query-document", "config.json", ("vocab_size",), 10**8),
    ("query-document", "config.json", ("vocab_size",), 10**7),
    ("query-document", "config.json", ("max_position_embeddings",), 10**7),
    ("query-document", "tokenizer_config.json", ("extra_ids",), 10**8),
    ("image-text", "open_clip_config.json", ("model_cfg", "text_cfg", "vocab_size"), 10**7),
    ("image-text", "open_clip_config.json", ("model_cfg", "vision_cfg", "layers"), 10**6),
    ("image-text", "open_clip_config.json", ("model_cfg", "vision_cfg", "width"), 50_000),
    ("image", "config.json", ("model_args", "layers"), [10**6] * 4),
    ("image", "config.json", ("pretrained_cfg", "input_size"), [3, 10**6, 10**6]),
    ("image", "config.json", ("pretrained_cfg", "crop_pct"), 1e-4),
    ("image", "dualenc.json", ("projector_dim",), 10**8),
]


def set_value(file: Path, path: tuple[str, ...], value: Any) -> None:
    settings = json.loads(file.read_text())
    inner = settings
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    file.write_text(json.dumps(settings))


@pytest.mark.parametrize(("kind", "file", "path", "value"), SIZES)
def test_absurd_sizes_are_refused_before_anything_is_built(
    build: Callable[[str], DualEncoder],
    tmp_path: Path,
    kind: str,
    file: str,
    path: tuple[str, ...],
    value: Any,
) -> None:
    build(kind).save(tmp_path / "model")
    set_value(tmp_path / "model" / file, path, value)
    begin = time.process_time()
    with pytest.raises(DualencError) as caught:
        load_model(tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert time.process_time() - begin < 20


def values_of(settings: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a JSON document."""
    entries = settings.items() if isinstance(settings, dict) else enumerate(settings)
    paths = []
    for name, value in entries:
        paths.append((*path, name))
        if isinstance(value, (dict, list)):
            paths += values_of(value, (*path, name))
    return paths


def use(folder: Path) -> None:
    """Load a model and encode with it, by both sides."""
    items = {
        "text": ["a Dog", "", "x " * 60],
        "image": [Image.new("RGB", (50, 40)), Image.new("RGB", (20, 90))],
    }
    model = load_model(folder)
    for side in ("left", "right"):
        model.encode(items[model.tower(side).modality], side)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("image", "config.json"),
        ("image", "dualenc.json"),
        ("image-text", "open_clip_config.json"),
        ("query-document", "modules.json"),
        ("query-document", "sentence_bert_config.json"),
    ],
)
def test_values_of_other_types_end_in_one_line(
    build: Callable[[str], DualEncoder], tmp_path: Path, kind: str, file: str
) -> None:
    build(kind).save(tmp_path / "model")
    path = tmp_path / "model" / file
    original = path.read_text()
    for place in values_of(json.loads(original)):
        for value in (None, -1, "evil", ["x"], {"x": 1}, [1], 1.5):
            set_value(path, place, value)
            problem = ""
            try:
                use(path.parent)
            except DualencError as error:
                problem = str(error)
            assert "\n" not in problem, (place, value)
            path.write_text(original)
