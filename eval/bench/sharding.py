"""Bytes of an encoder in training on each process: weights, gradients and what AdamW keeps, counted after a step.

    python eval/bench/sharding.py --ranks [1,2,3]
    python eval/bench/sharding.py --encoder adapted --ranks [1,2,3]

Each row is a run of its own on as many CPU processes (gloo), all on this machine; what is counted would be the same on
GPUs. Besides it a process needs activations, and for the time of its pass the largest unit whole: a layer, or what a
tower has besides its layers (mostly the embeddings of its vocabulary).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

EncoderName = Literal["bert", "adapted"]
CONFIGS: dict[str, dict[str, Any]] = {
    # BERT base, and a decoder of the same size with frozen weights in half precision and adapters.
    "bert": {"config": {"model_type": "bert", "vocab_size": 30522}},
    "adapted": {
        "config": {
            "model_type": "llama",
            "vocab_size": 32000,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 2048,
        },
        "pooling": "last",
        "lora_rank": 16,
        "dtype": "bfloat16",
    },
}


def measure(encoder: EncoderName, layers: int) -> dict[str, int]:
    """Bytes of this process: what it holds after a step, and of the largest unit when it is whole."""
    import torch

    from dualenc import distributed
    from dualenc.encoders import TextEncoder, train_tokenizer
    from dualenc.training.optim import build_optimizer, trainable_parameters
    from dualenc.training.sharding import repeated_layers, shard_model
    from dualenc.training.trainer import start_accelerator

    torch.manual_seed(0)
    start_accelerator("no", [], Path())
    options = {**CONFIGS[encoder], "tokenizer": train_tokenizer(["a text"] * 3, vocab_size=300)}
    options["config"] = {**options["config"], "num_hidden_layers": layers}
    model = TextEncoder(**options)
    inside = [sum(p.nbytes for p in layer.parameters()) for layer in repeated_layers(model.left)]
    unit = max(*inside, sum(p.nbytes for p in model.parameters()) - sum(inside))
    if distributed.is_initialized():
        shard_model(model, torch.device("cpu"))
    trained = trainable_parameters([model])
    optimizer = build_optimizer([model], sharded=trained)
    model("left", model.left.prepare(["a text", "text"]))[:, 0].sum().backward()
    optimizer.step()
    states = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    parts = {"weights": list(model.parameters()), "gradients": [p.grad for p in trained], "optimizer": states}
    held = {name: sum(distributed.local_part(t).nbytes for t in tensors) for name, tensors in parts.items()}
    return {**held, "unit": unit}


def on_ranks(number: int, encoder: EncoderName, layers: int) -> list[dict[str, int]]:
    """What `measure` gives on each of several processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(number), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(number):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(number)}
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true", **(group | own if number > 1 else {})}
        command = [sys.executable, __file__, "--measure", json.dumps([encoder, layers])]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    return [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]


def main(encoder: EncoderName = "bert", ranks: list[int] | None = None, layers: int = 12) -> None:
    """Print megabytes of the process that holds most, by number of processes.

    Args:
        encoder: BERT base, trained in full; or a decoder of its size with frozen bfloat16 weights and adapters.
        ranks: numbers of processes; by default 1, 2 and 3.
        layers: of the encoder.
    """
    print(f"{encoder}, {layers} layers; MB of the process that holds most")
    print(f"{'ranks':>5} {'weights':>9} {'gradients':>9} {'optimizer':>9} {'together':>9} {'largest unit':>12}")
    for number in ranks or [1, 2, 3]:
        most = max(on_ranks(number, encoder, layers), key=lambda held: sum(held.values()))
        unit = most.pop("unit")
        cells = [*most.values(), sum(most.values())]
        print(f"{number:>5} " + " ".join(f"{cell / 1e6:9.1f}" for cell in cells) + f" {unit / 1e6:12.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(*json.loads(sys.argv[2]))))
    else:
        from jsonargparse import auto_cli

        auto_cli(main)
