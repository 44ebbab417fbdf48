"""Any folder or name to a model; whatever is wrong with a folder is told in one line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers.utils import logging as progress

from dualenc.encoders import DualEncoder, TextEncoder, load_model
from dualenc.encoders.load import folder_kind
from dualenc.errors import DualencError

WEIGHTS = {
    "query-document": "model.safetensors",
    "image-text": "open_clip_model.safetensors",
    "image": "model.safetensors",
}


@pytest.fixture
def saved(build: Callable[[str], DualEncoder], tmp_path: Path) -> Callable[[str], Path]:
    """Saves a small model of a kind and returns its folder."""

    def save(kind: str) -> Path:
        build(kind).save(tmp_path / kind)
        return tmp_path / kind

    return save


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(WEIGHTS))
def test_kind_is_found_and_the_model_ready(saved: Callable[[str], Path], kind: str) -> None:
    folder = saved(kind)
    assert folder_kind(folder) == kind
    model = load_model(f"local-dir:{folder}")
    assert model.kind == kind
    assert not any(module.training for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "file"), [*WEIGHTS.items(), ("image", "projector.safetensors")])
def test_corrupt_weights(saved: Callable[[str], Path], kind: str, file: str) -> None:
    path = saved(kind) / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DualencError) as caught:
        load_model(path.parent)
    assert str(path.parent) in str(caught.value)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("dualenc.json", '{"kind": "video"}', "unknown kind 'video'"),
        ("dualenc.json", "{", "not valid JSON"),
        ("config.json", '{"architecture": "no_such_net"}', "no_such_net"),
        ("config.json", "{}", "does not name a timm architecture"),
    ],
)
def test_broken_descriptions(
    saved: Callable[[str], Path], file: str, text: str, message: str
) -> None:
    folder = saved("image")
    (folder / file).write_text(text)
    with pytest.raises(DualencError, match=message):
        load_model(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no such folder"),
        ("ViT-B-32", "add the tag of its weights, as in ViT-B-32/openai"),
        ("ViT-B-32/no-such-tag", "no-such-tag"),
        ("owner/name", "neither a local folder nor available from the hub"),
        (".", "is not a model folder"),
        (__file__, "is a file; give the folder"),
    ],
)
def test_names_of_nothing(name: str, message: str) -> None:
    with pytest.raises(DualencError, match=message):
        load_model(name)


def test_an_image_text_model_of_transformers_is_told_where_to_go(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "siglip", "text_config": {}, "vision_config": {}}'
    )
    with pytest.raises(DualencError, match="give the same model by its open_clip name"):
        load_model(tmp_path)


def test_unknown_device(saved: Callable[[str], Path]) -> None:
    with pytest.raises(DualencError, match="device warp"):
        load_model(saved("image"), device="warp")


def test_hub_names_are_fetched_without_code(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved("query-document")
    asked: dict[str, Any] = {}

    def fetch(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.update(name=name, allowed=allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert isinstance(load_model("hf-hub:owner/name"), TextEncoder)
    assert asked["name"] == "owner/name"
    assert not any(pattern.endswith((".py", ".bin", ".pt", ".pth")) for pattern in asked["allowed"])


def test_a_model_comes_back_whose_replacement_was_killed(saved: Callable[[str], Path]) -> None:
    folder = saved("image")
    work = folder.with_name(f".{folder.name}.part")
    work.mkdir()
    folder.rename(work / f"old-{folder.name}")
    assert load_model(folder).kind == "image"
    assert folder.is_dir()


def test_loading_is_quiet_and_leaves_logging_as_it_was(
    saved: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = saved("query-document")
    before = logging.root.manager.disable, progress.is_progress_bar_enabled()
    logging.disable(logging.INFO)
    progress.enable_progress_bar()
    capfd.readouterr()
    try:
        load_model(folder)
        assert capfd.readouterr() == ("", "")
        assert (logging.root.manager.disable, progress.is_progress_bar_enabled()) == (
            logging.INFO,
            True,
        )
    finally:
        logging.disable(before[0])
        if not before[1]:
            progress.disable_progress_bar()
