"""Peak memory of a training step with gradient caching as the batch grows, over that of the
smallest batch.

    python eval/bench/memory.py --encoder minilm --batch_sizes [32,4096]
    python eval/bench/memory.py --encoder resnet18 --image_size 64 --objectives [InfoNCE,EMC2]
    python eval/bench/memory.py --encoder linear --batch_sizes [32,4096,8192]

Every measurement is a process of its own: its peak resident memory (of everything, Python and torch
included), or the peak of allocated memory on a CUDA device. glibc is told to return what is freed
at once: what it would keep for later depends on the order of sizes, and can be another 0.1 to 0.5
of the first batch's memory. On the CPU the inputs that a step keeps, out-of-batch ones included,
are in the peak, as they are in training; the last column leaves them out. MiniLM (BERT with 6
layers of 384) and ResNet-18 have random weights and random inputs. The linear encoder holds next to
nothing: what is left is the objective, the strictest comparison and a fast one.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Literal

from in_turn import new_backbone

# The measuring process imports torch; this one stays small, for a new process may inherit its
# parent's peak.
if TYPE_CHECKING:
    from torch import Tensor

    from dualenc.encoders.dual import DualEncoder
    from dualenc.types import Inputs

EncoderName = Literal["minilm", "resnet18", "linear"]
MEBIBYTE = 2**20

OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "InfoNCE": ("InfoNCE", {}),
    "DCL": ("DCL", {}),
    "HCL": ("HCL", {}),
    "SigLIP": ("SigLIP", {}),
    "SogCLR": ("SogCLR", {}),
    "ISogCLR": ("ISogCLR", {}),
    "SACLR row": ("SACLR", {}),
    "SACLR-1 matrix": ("SACLR", {"form": "matrix", "negatives": 1}),
    "GlobalCache": ("GlobalCache", {}),
    "NegativeCache": ("NegativeCache", {}),
    "EMC2": ("EMC2", {}),
    "ISIR": ("ISIR", {}),
    "ExactGlobal": ("ExactGlobal", {"corpus_chunk_size": 64}),
}


def new_inputs(encoder: EncoderName, count: int, size: int) -> Inputs:
    """Random items, prepared: `size` tokens, pixels, or numbers."""
    import torch

    if encoder == "resnet18":
        return {"pixels": torch.rand(count, 3, size, size)}
    if encoder == "linear":
        return {"numbers": torch.randn(count, size)}
    return {
        "input_ids": torch.randint(0, 30000, (count, size)),
        "attention_mask": torch.ones(count, size).long(),
    }


def new_model(encoder: EncoderName, layers: int, size: int) -> DualEncoder:
    """One tower with random weights for both sides."""
    import torch

    from dualenc.encoders.dual import DualEncoder, Tower, unit_norm

    class Net(Tower):
        def __init__(self) -> None:
            super().__init__()
            linear = encoder == "linear"
            self.net, self.dim = (
                (torch.nn.Linear(size, 384), 384) if linear else new_backbone(encoder, layers)
            )

        def forward(self, inputs: Inputs) -> Tensor:
            return unit_norm(self.net(*inputs.values()))

    tower = Net()
    return DualEncoder(
        tower, tower, kind="image" if encoder == "resnet18" else "query-document"
    ).train()


def measure(options: dict[str, Any]) -> dict[str, float]:
    """Train some steps; peak memory and the size of a batch's inputs, in MiB."""
    import torch

    import dualenc.objectives
    from dualenc.training.encoding import CachedEncoding

    torch.manual_seed(0)
    encoder, batch_size, num_items, size = (
        options[k] for k in ("encoder", "batch_size", "num_items", "size")
    )
    device = torch.device(options["device"])
    model = new_model(encoder, options["layers"], size).to(device)
    class_name, arguments = OBJECTIVES[options["objective"]]
    new_objective = getattr(dualenc.objectives, class_name)
    criterion = new_objective(num_left=num_items, views=encoder == "resnet18", **arguments).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    input_bytes = 0
    for _ in range(options["steps"]):
        encoding = CachedEncoding(model, device, chunk_size=options["chunk_size"])
        inputs = [new_inputs(encoder, batch_size, size) for _ in range(2)]
        input_bytes = sum(map(num_bytes, inputs))

        def encode(side: Any, ids: Tensor, encoding: CachedEncoding = encoding) -> Tensor:
            nonlocal input_bytes
            outside = new_inputs(encoder, len(ids), size)
            if torch.is_grad_enabled():  # then they are kept for the backward pass
                input_bytes += num_bytes(outside)
            return encoding.encode(side, outside, out_of_batch=True)

        ids = torch.randperm(num_items, device=device)[:batch_size]
        left, right = encoding.encode("left", inputs[0]), encoding.encode("right", inputs[1])
        encoding.backward(criterion(left, right, ids, encode=encode).loss)
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        return {"peak": torch.cuda.max_memory_allocated(device) / MEBIBYTE, "inputs": 0.0}
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"peak": peak / MEBIBYTE, "inputs": input_bytes / MEBIBYTE}


def num_bytes(inputs: Inputs) -> int:
    """Size of prepared items."""
    return sum(tensor.nbytes for tensor in inputs.values())


def measured_alone(options: dict[str, Any]) -> dict[str, float]:
    """`measure` in a fresh process."""
    command = [sys.executable, __file__, "--options", json.dumps(options)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(
            f"{options['objective']} at B = {options['batch_size']} failed: {done.stderr[-500:]}"
        )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    encoder: EncoderName = "minilm",
    batch_sizes: list[int] = [32, 4096],  # noqa: B006 - a default for the command line, never changed
    objectives: list[str] = list(OBJECTIVES),  # noqa: B006
    chunk_size: int = 32,
    text_length: int = 128,
    image_size: int = 64,
    layers: int = 6,
    num_items: int | None = None,
    steps: int = 2,
    device: str = "cpu",
) -> None:
    """Print one line per objective and batch size, as soon as it is measured.

    Args:
        encoder: what is trained. ResNet-18 trains on two views.
        batch_sizes: pairs per step; ratios are to the first.
        objectives: which of them, by the names in OBJECTIVES.
        chunk_size: items encoded at once.
        text_length: tokens of a text.
        image_size: pixels of an image's side.
        layers: of MiniLM.
        num_items: N, size of the corpus; by default twice the largest batch.
        steps: training steps; chains have a state from the second on.
        device: cpu or cuda.
    """
    size = {"minilm": text_length, "resnet18": image_size, "linear": 64}[encoder]
    shared: dict[str, Any] = {
        "encoder": encoder,
        "size": size,
        "layers": layers,
        "chunk_size": chunk_size,
    }
    shared |= {"steps": steps, "num_items": num_items or 2 * max(batch_sizes), "device": device}
    if unknown := set(objectives) - set(OBJECTIVES):
        raise SystemExit(
            f"objectives: {', '.join(sorted(unknown))} not known; "
            f"choose from {', '.join(OBJECTIVES)}"
        )
    print(f"{encoder} ({size}), chunks of {chunk_size}, {device}; the most is 1.2")
    print(
        f"{'objective':<16}{'B':>7}{'peak, MiB':>11}"
        f"{'ratio':>8}{'inputs, MiB':>13}{'ratio without':>15}"
    )
    for name in objectives:
        first: dict[str, float] = {}
        for batch_size in batch_sizes:
            found = measured_alone({**shared, "objective": name, "batch_size": batch_size})
            first = first or found
            ratio = found["peak"] / first["peak"]
            without = (found["peak"] - found["inputs"]) / (first["peak"] - first["inputs"])
            numbers = (
                f"{found['peak']:>11,.0f}{ratio:>8.2f}{found['inputs']:>13,.1f}{without:>15.2f}"
            )
            print(f"{name:<16}{batch_size:>7}{numbers}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--options"]:
        print(json.dumps(measure(json.loads(sys.argv[2]))))
    else:
        from jsonargparse import auto_cli

        auto_cli(main)
