"""ONNX export: towers as files for runtimes without Python, each compared with its tower before it is kept."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dualenc.encoders.dual import SIDES, DualEncoder, Tower
from dualenc.errors import DiskFull, DualencError
from dualenc.files import atomic_path, check_folder_target, write_json
from dualenc.full_disk import explain_full_disk

OUTPUT = "vectors"
ABOUT = "onnx.json"
MAX_DIFFERENCE = 1e-5


class _ByPosition(nn.Module):
    """A tower with positional inputs, as ONNX has them."""

    def __init__(self, tower: Tower, names: Sequence[str]) -> None:
        super().__init__()
        self.tower = tower
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.tower(dict(zip(self.names, inputs, strict=True)))


def export_onnx(model: DualEncoder, folder: Path) -> dict[str, float]:
    """Write left.onnx and right.onnx, or one both.onnx where one tower encodes both sides alike, and onnx.json.

    Inputs are what `tower.prepare` gives, by name; their first dimension and the length of texts are free. The output
    "vectors" holds unit vectors (B, D), float32. onnx.json says of each file its inputs, D, and the largest difference
    from the tower that onnxruntime showed on batches of other sizes than those it was traced with.

    Args:
        model: on any device; what is written computes in float32.
        folder: to write to.

    Returns:
        That largest difference, by the name of the file.

    Raises:
        DualencError: the folder holds something else, onnx, onnxscript or onnxruntime is not installed, a tower that
            cannot be traced, or one whose file differs from it by more than 1e-5.
    """
    # Imported here: an optional package, and only for this.
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise DualencError(f"ONNX needs more packages ({error.name}); pip install 'dualenc[onnx]'") from None
    check_folder_target(folder, is_export, "exported model")
    towers = {"both": model.left} if _has_one_file(model) else {side: model.tower(side) for side in SIDES}
    differences = {}
    descriptions = {}
    for name, tower in towers.items():
        path = folder / f"{name}.onnx"
        tower = tower.cpu().float().eval()
        with atomic_path(path) as part:
            inputs = _trace(tower, part)
            session = onnxruntime.InferenceSession(str(part), providers=["CPUExecutionProvider"])
            difference = max(_difference(tower, session, count) for count in (1, 3))
            # Not a number counts as different, too.
            if not difference <= MAX_DIFFERENCE:
                raise DualencError(
                    f"{path}: differs from the tower by {difference:.1g}, more than {MAX_DIFFERENCE:g}; use the model "
                    "folder itself"
                )
        differences[path.name] = difference
        descriptions[path.name] = {
            "modality": tower.modality,
            "inputs": {key: str(value.dtype).removeprefix("torch.") for key, value in inputs.items()},
            "output": OUTPUT,
            "dim": tower.dim,
            "largest_difference": difference,
        }
    write_json(folder / ABOUT, descriptions)
    return differences


def is_export(folder: Path) -> bool:
    """Whether a folder holds what `export_onnx` writes, finished or not; other files may lie beside it."""
    files = {name for name in os.listdir(folder) if not name.startswith(".")}
    return ABOUT in files or files <= {f"{name}.onnx" for name in ("both", *SIDES)}


def _has_one_file(model: DualEncoder) -> bool:
    """Whether one file serves both sides; prompts are put before texts outside of it."""
    return model.shares_weights and type(model.left) is type(model.right)


def _trace(tower: Tower, path: Path) -> dict[str, Tensor]:
    """Write the ONNX file; the inputs that it was traced with."""
    # torch.export pretends a CUDA device. Autograd's first backward pass starts a thread per device, after which no
    # forked process can run another, so that first one comes before the pretended device.
    torch.zeros((), requires_grad=True).backward()
    inputs = dict(tower.prepare(_examples(tower, 2)))
    free = torch.export.Dim.DYNAMIC  # type: ignore[attr-defined]
    # Of texts (B, T) both sizes are free, of images and vectors the number of items.
    shapes = tuple({0: free, 1: free} if tower.modality == "text" else {0: free} for _ in inputs)
    try:
        with warnings.catch_warnings(), torch.no_grad(), explain_full_disk(path):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                _ByPosition(tower, list(inputs)).eval(),
                tuple(inputs.values()),
                str(path),
                dynamo=True,
                input_names=list(inputs),
                output_names=[OUTPUT],
                dynamic_shapes=(shapes,),
                external_data=False,
                verbose=False,
            )
    except DiskFull:
        raise
    except Exception as error:  # of torch.export and onnxscript, of many kinds
        why = " ".join(str(error).split())[:160] or type(error).__name__
        raise DualencError(f"the {tower.modality} tower cannot be written as ONNX ({why})") from error
    return inputs


def _difference(tower: Tower, session: Any, count: int) -> float:
    inputs = dict(tower.prepare(_examples(tower, count)))
    with torch.no_grad():
        expected = tower(inputs).numpy()
    (found,) = session.run([OUTPUT], {name: value.numpy() for name, value in inputs.items()})
    return float(np.abs(found - expected).max())


def _examples(tower: Tower, count: int) -> list[Any]:
    """Items of different lengths, or of noise."""
    draw = np.random.default_rng(count)
    if tower.modality == "text":
        return [" ".join(["words in a text"] * (number + count)) for number in range(count)]
    if tower.modality == "image":
        return [Image.fromarray(draw.integers(0, 256, (48, 64, 3), dtype=np.uint8)) for _ in range(count)]
    return list(draw.standard_normal((count, tower.prepare.input_dim)).astype(np.float32))  # type: ignore[attr-defined]
