"""What must be equal for a resumed run to be the same run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from dualenc import distributed
from dualenc.data.pairs import PairDataset


def fingerprint(
    settings: Mapping[str, Any], model: nn.Module, objective: nn.Module, pairs: PairDataset, batching: object
) -> dict[str, Any]:
    """A flat dict of plain values that describes a run, for `Checkpoints`.

    Args:
        settings: nested settings that the result depends on.
        model: its class and the names and shapes of its weights count.
        objective: likewise; its state is part of the run.
        pairs: its class, sizes, ids and contents count (`PairDataset.identities`), so that changed data of equal size
            is noticed; the main process reads them for all.
        batching: its class counts.
    """
    contents = distributed.broadcast_object(pairs.identities() if distributed.is_main() else {})
    return {
        **flatten(json.loads(json.dumps(settings, default=str))),
        "model": _describe(model),
        "objective": _describe(objective),
        "data": f"{type(pairs).__name__} of {len(pairs)} pairs, {pairs.num_left} left, {pairs.num_right} right items",
        **flatten(contents, "data."),
        "batching": type(batching).__name__,
    }


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _describe(module: nn.Module) -> str:
    """Class and weights: names and shapes, which do not depend on the number of processes as buffers may."""
    shapes = [(name, list(parameter.shape)) for name, parameter in module.named_parameters()]
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]
    return f"{type(module).__name__} with weights {digest}"
