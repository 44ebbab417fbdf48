"""What is a path, what is a hub name, and how other libraries' messages are quoted."""

from __future__ import annotations

from pathlib import Path

import pytest

from dualenc.encoders.hub import first_line, looks_like_path, model_folder
from dualenc.errors import DualencError


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
