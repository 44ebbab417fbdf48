"""`dualenc export`: the towers of a model as ONNX files."""

from __future__ import annotations

from pathlib import Path

from dualenc.files import check_folder_target, check_writable
from dualenc.terminal import printable


def export(model: str, *, out: str) -> None:
    """Write the towers of a model as ONNX files, and compare each with the tower by onnxruntime.

    OUT gets left.onnx and right.onnx, or both.onnx where one tower encodes both sides, and onnx.json with the names of
    their inputs. Tokenizers and image sizes stay with the model folder.

    Args:
        model: model folder or name.
        out: folder to write.
    """
    from dualenc.encoders.load import load_model
    from dualenc.encoders.onnx import export_onnx, is_export

    folder = Path(out)
    check_writable(folder)
    check_folder_target(folder, is_export, "exported model")
    for name, difference in export_onnx(load_model(model), folder).items():
        size = (folder / name).stat().st_size / 2**20
        print(printable(f"{folder / name}: {size:.1f} MiB, differs from the tower by {difference:.1g} at most"))
