"""Any folder or name to a model; whatever is wrong with a folder is told in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers import PreTrainedTokenizerBase

from dualenc.encoders import DualEncoder, ImageEncoder, ImageTextEncoder, TextEncoder, load_model
from dualenc.encoders.hub import looks_like_path, model_folder
from dualenc.encoders.load import folder_kind
from dualenc.errors import DualencError, first_line

WEIGHTS = {
    "query-document": "model.safetensors",
    "image-text": "open_clip_model.safetensors",
    "image": "model.safetensors",
}


@pytest.fixture
def build(
    bert: dict[str, Any], clip: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> Callable[[str], Path]:
    """Saves a small model of a kind and returns its folder."""
    makers: dict[str, Callable[[], DualEncoder]] = {
        "query-document": lambda: TextEncoder(config=bert, tokenizer=tokenizer),
        "image-text": lambda: ImageTextEncoder(config=clip),
        "image": lambda: ImageEncoder("test_resnet", image_size=32, projector_dim=4),
    }

    def save(kind: str) -> Path:
        makers[kind]().save(tmp_path / kind)
        return tmp_path / kind

    return save


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(WEIGHTS))
def test_kind_is_found_and_the_model_ready(build: Callable[[str], Path], kind: str) -> None:
    folder = build(kind)
    assert folder_kind(folder) == kind
    model = load_model(f"local-dir:{folder}")
    assert model.kind == kind
    assert not any(module.training for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(WEIGHTS))
def test_corrupt_weights(build: Callable[[str], Path], kind: str) -> None:
    path = build(kind) / WEIGHTS[kind]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DualencError) as caught:
        load_model(path.parent)
    assert str(path.parent) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_corrupt_or_missing_projector(build: Callable[[str], Path]) -> None:
    path = build("image") / "projector.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(DualencError, match=r"projector\.safetensors"):
        load_model(path.parent)
    path.unlink()
    with pytest.raises(DualencError, match=r"projector\.safetensors"):
        load_model(path.parent)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("dualenc.json", '{"kind": "video"}', "unknown kind 'video'"),
        ("dualenc.json", "{", "not valid JSON"),
        ("config.json", '{"architecture": "no_such_net"}', "no_such_net"),
        ("config.json", "{}", "names no timm architecture"),
    ],
)
def test_broken_descriptions(build: Callable[[str], Path], file: str, text: str, message: str) -> None:
    folder = build("image")
    (folder / file).write_text(text)
    with pytest.raises(DualencError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_open_clip_configuration_without_model(build: Callable[[str], Path]) -> None:
    folder = build("image-text")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": 3}))
    with pytest.raises(DualencError, match="no model_cfg"):
        load_model(folder)


@pytest.mark.slow
def test_wrong_kind_of_folder(build: Callable[[str], Path]) -> None:
    with pytest.raises(DualencError, match=r"no config\.json, so no transformers model"):
        TextEncoder(str(build("image-text")))
    with pytest.raises(DualencError, match=r"open_clip_config\.json: no such file"):
        ImageTextEncoder(str(build("image")))
    with pytest.raises(DualencError, match="names no timm architecture"):
        ImageEncoder(str(build("query-document")))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no such folder"),
        ("ViT-B-32", "say which, as in ViT-B-32/openai"),
        ("ViT-B-32/no-such-tag", "no-such-tag"),
        ("owner/name", "neither a folder here nor a model that the hub gives"),
    ],
)
def test_names_of_nothing(name: str, message: str) -> None:
    with pytest.raises(DualencError, match=message) as caught:
        load_model(name)
    assert "\n" not in str(caught.value)


def test_a_folder_or_file_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match="holds no model"):
        load_model(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(DualencError, match="is a file; give the folder"):
        load_model(tmp_path / "file")


def test_unknown_device(build: Callable[[str], Path]) -> None:
    with pytest.raises(DualencError, match="device warp: not usable") as caught:
        load_model(build("image"), device="warp")
    assert "\n" not in str(caught.value)


def test_hub_names_are_fetched_without_code(build: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build("query-document")
    asked: dict[str, Any] = {}

    def fetch(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.update(name=name, allowed=allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert isinstance(load_model("hf-hub:owner/name"), TextEncoder)
    assert asked["name"] == "owner/name"
    assert not any(pattern.endswith((".py", ".bin", ".pt", ".pth")) for pattern in asked["allowed"])


def test_a_model_comes_back_whose_replacement_was_killed(build: Callable[[str], Path]) -> None:
    folder = build("image")
    work = folder.with_name(f".{folder.name}.part")
    work.mkdir()
    folder.rename(work / f"old-{folder.name}")
    assert load_model(folder).kind == "image"
    assert folder.is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("content", ["null", "[1, 2]", "3", '"text"', '{"a": [1]}'])
@pytest.mark.parametrize("kind", list(WEIGHTS))
def test_json_of_the_wrong_shape_is_told_by_file(kind: str, content: str, build: Callable[[str], Path]) -> None:
    """Whatever a settings file holds, the model loads or one line says what is wrong."""
    folder = build(kind)
    refusals = []
    for file in sorted(folder.rglob("*.json")):
        sound = file.read_bytes()
        file.write_text(content)
        try:
            load_model(folder)
        except DualencError as error:
            refusals.append(str(error))
        file.write_bytes(sound)
    assert refusals
    assert not any("\n" in line for line in refusals)
    load_model(folder)


def test_existing_folders_need_no_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_folder("owner/name") == Path("owner/name")
    assert model_folder(tmp_path) == model_folder(f"local-dir:{tmp_path}") == tmp_path


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert model_folder("~/model") == tmp_path / "model"


@pytest.mark.parametrize("name", ["./a", "../a", "/a", "~/a", "runs/papers/model"])
def test_paths_are_not_asked_of_the_hub(name: str) -> None:
    assert looks_like_path(name)
    with pytest.raises(DualencError, match="no such folder"):
        model_folder(name)


@pytest.mark.parametrize("name", ["bert-base-uncased", "owner/name"])
def test_hub_names_are_not_paths(name: str) -> None:
    assert not looks_like_path(name)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("One sentence.\nAnother.", "One sentence"),
        ("\n  Bad weights:\n  size mismatch.\n  more", "Bad weights: size mismatch"),
        ("", "ValueError"),
    ],
)
def test_one_line_is_quoted(message: str, line: str) -> None:
    assert first_line(ValueError(message)) == line
