"""Towers as ONNX: what onnxruntime computes is what the tower does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dualenc.cli import main
from dualenc.encoders import ImageEncoder, ImageTextEncoder, TextEncoder, VectorEncoder, train_tokenizer
from dualenc.encoders import onnx as exporting
from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.onnx import export_onnx
from dualenc.errors import DualencError

onnxruntime = pytest.importorskip("onnxruntime")

TEXTS = ["what is a tower", "a longer text about towers and what they are good for", "short"]
CLIP = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 32, "patch_size": 16, "width": 32, "layers": 1, "head_width": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def text_model() -> TextEncoder:
    tokenizer = train_tokenizer(TEXTS, 300, max_length=16)
    config = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return TextEncoder(config=config | {"intermediate_size": 64}, tokenizer=tokenizer, max_length=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "files"),
    [
        (text_model, ["both.onnx"]),
        pytest.param(lambda: ImageTextEncoder(config=CLIP), ["left.onnx", "right.onnx"], marks=pytest.mark.nightly),
        pytest.param(
            lambda: ImageEncoder("resnet18", image_size=32, projector_dim=16), ["both.onnx"], marks=pytest.mark.nightly
        ),
        (lambda: VectorEncoder(8, tower="mlp", dim=4, hidden=16, shared=False), ["left.onnx", "right.onnx"]),
    ],
    ids=["text", "image-text", "image", "vector"],
)
def test_every_kind(tmp_path: Path, build, files: list[str]) -> None:
    torch.manual_seed(0)
    model: DualEncoder = build()
    assert sorted(export_onnx(model, tmp_path)) == files
    about = json.loads((tmp_path / "onnx.json").read_text())
    for name in files:
        tower = model.right if name.startswith("right") else model.left
        assert about[name]["dim"] == tower.dim
        session = onnxruntime.InferenceSession(str(tmp_path / name), providers=["CPUExecutionProvider"])
        for count in (1, 5):  # not the sizes that it was traced or checked with
            inputs = tower.prepare(exporting._examples(tower, count))
            assert {key: str(value.dtype).removeprefix("torch.") for key, value in inputs.items()} == about[name][
                "inputs"
            ]
            (found,) = session.run(["vectors"], {key: value.numpy() for key, value in inputs.items()})
            with torch.no_grad():
                np.testing.assert_allclose(found, tower(inputs).numpy(), atol=1e-5)


def backward_pass() -> None:
    torch.ones(3, requires_grad=True).sum().backward()


@pytest.mark.nightly
def test_forked_processes_train_after_an_export(tmp_path: Path) -> None:
    """In a process of its own: autograd starts its threads once."""
    code = (
        "import multiprocessing, sys; from pathlib import Path; from dualenc.encoders import VectorEncoder;"
        "from dualenc.encoders.onnx import export_onnx; from tests.encoders.test_onnx import backward_pass;"
        "export_onnx(VectorEncoder(8, tower='linear', dim=4), Path(sys.argv[1])); backward_pass();"
        "child = multiprocessing.get_context('fork').Process(target=backward_pass);"
        "child.start(); child.join(); sys.exit(child.exitcode)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


@pytest.mark.slow
def test_a_file_that_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_difference", lambda *_: float("nan"))
    with pytest.raises(DualencError, match="differs from the tower"):
        export_onnx(VectorEncoder(8, tower="linear", dim=4), tmp_path)
    assert not list(tmp_path.glob("*.onnx"))


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    VectorEncoder(8, tower="linear", dim=4).save(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "onnx")]) == 0
    assert "both.onnx" in capsys.readouterr().out
