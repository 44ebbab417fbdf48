"""What a model may have been used with instead: other prompts, pooling, lengths, preprocessing of
images, the other side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from PIL import Image
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import nn

from dualenc.encoders.dual import DualEncoder, Tower
from dualenc.encoders.image import SMALL, ImagePrepare
from dualenc.encoders.text import ROLES, TextEncoder, TextPrepare, TextTower
from dualenc.types import Side, opposite

PROMPTS = (
    "",
    "query: ",
    "passage: ",
    "search_query: ",
    "search_document: ",
    "Represent this sentence for searching relevant passages: ",
)
"""Prompts that widespread models are used with: E5, Nomic, BGE."""
POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last", "max": "max"}
"""Pooling modes of sentence-transformers, by their names here."""
LENGTHS = (32, 64, 128, 256, 384, 512, 1024)
"""Usual limits of the number of tokens."""
SIZES = (32, 64, 128, 160, 192, 224, 240, 256, 288, 299, 320, 336, 378, 384, 448, 512)
"""Usual numbers of pixels per side."""
PREPARATIONS = {
    "interpolation": ("bicubic", "bilinear", "lanczos", "nearest"),
    "crop_pct": (1.0, 0.875, 0.9, 0.95),
    "crop_mode": ("center", "squash", "border"),
    "resize_mode": ("shortest", "squash", "longest"),
    "input_size": tuple([3, size, size] for size in SIZES),
    "size": SIZES,
}
"""Settings of preprocessing by timm (input_size, crop_…) and open_clip (size, resize_mode)."""
NORMALIZATIONS = {
    "CLIP": ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]),
    "ImageNet": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    "Inception and SigLIP": ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
    "none": ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]),
}
"""Means and standard deviations of pixels, by where they are usual."""


class Cause(NamedTuple):
    """A way in which a model may have been used.

    Attributes:
        kind: "prompt", "pooling", "length", "preprocessing" or "side".
        line: description.
        tower: context in which the tower encodes that way.
    """

    kind: str
    line: str
    tower: Callable[[], AbstractContextManager[Tower]]


def causes(encoder: DualEncoder, side: Side) -> Iterator[Cause]:
    """Yield the ways in which vectors of a side may have been made otherwise, likely ones first.

    Args:
        encoder: the model; only those of texts and images have any but the other side.
        side: side of the model that is recorded.
    """
    tower = encoder.tower(side)
    if isinstance(encoder, TextEncoder) and isinstance(tower, TextTower):
        yield from _prompts(encoder, tower, side)
        yield from _poolings(tower)
        yield from _lengths(tower)
    if isinstance(tower.prepare, ImagePrepare):
        yield from _preparations(tower, tower.prepare)
    other = encoder.tower(opposite(side))
    if other is not tower and other.modality == tower.modality:
        names = {"left": "query", "right": "document"}
        line = f"encoded by the model's {names[opposite(side)]} side"
        yield Cause("side", line, lambda: nullcontext(other))


def _prompts(encoder: TextEncoder, tower: TextTower, side: Side) -> Iterator[Cause]:
    own = tower.prepare.prompt
    swapped = encoder.tower(opposite(side)).prepare.prompt  # type: ignore[attr-defined]
    role = ROLES[0 if side == "left" else 1]
    for prompt in dict.fromkeys([swapped, *PROMPTS, *encoder.prompts.values()]):
        if prompt == own:
            continue
        line = f"prompt {prompt!r} instead of {own!r}" if prompt else f"without the prompt {own!r}"
        if prompt == swapped and prompt:
            line = f"the prompt of the other side: {line}"

        def changed(prompt: str = prompt) -> AbstractContextManager[Tower]:
            return _with(tower, tower, "prepare", TextPrepare(tower.parts, prompt, role))

        yield Cause("prompt", line, changed)


def _poolings(tower: TextTower) -> Iterator[Cause]:
    places = [number for number, part in enumerate(tower.parts) if isinstance(part, Pooling)]
    if len(places) != 1:
        return
    own: Any = tower.parts[places[0]]
    modes = own.pooling_mode if isinstance(own.pooling_mode, str) else "+".join(own.pooling_mode)
    for mode, name in POOLINGS.items():
        if mode == modes:
            continue
        pooling = Pooling(own.embedding_dimension, mode, own.include_prompt)
        parts = [*tower.parts[: places[0]], pooling, *tower.parts[places[0] + 1 :]]

        def changed(parts: list[Any] = parts) -> AbstractContextManager[Tower]:
            return _with(tower, tower, "head", nn.Sequential(*parts[1:]))

        yield Cause("pooling", f"{name} pooling instead of {POOLINGS.get(modes, modes)}", changed)


def _lengths(tower: TextTower) -> Iterator[Cause]:
    module = tower.parts[0]
    if not isinstance(module, Transformer):
        return
    own = module.max_seq_length
    positions = getattr(module.config, "max_position_embeddings", None) or own or 0
    for length in sorted({*LENGTHS, positions} - {own}):
        if not length or length > positions:
            continue

        def changed(length: int = length) -> AbstractContextManager[Tower]:
            return _with(tower, module, "max_seq_length", length)

        yield Cause("length", f"texts cut at {length} tokens instead of {own}", changed)


def _preparations(tower: Tower, prepare: ImagePrepare) -> Iterator[Cause]:
    own = json.loads(prepare.settings)
    changes: list[tuple[str, dict[str, Any]]] = []
    for name, values in PREPARATIONS.items():
        others = (value for value in values if name in own and value != own[name])
        changes += [(f"{name} {value} instead of {own[name]}", {name: value}) for value in others]
    for name, (mean, std) in NORMALIZATIONS.items():
        if mean != own["mean"] or std != own["std"]:
            line = f"the mean and std of {name} instead of {own['mean']}, {own['std']}"
            changes.append((line, {"mean": mean, "std": std}))
    for line, settings in changes:
        changed = _usable(tower, prepare, settings)
        if changed is None:
            continue

        def tried(changed: ImagePrepare = changed) -> AbstractContextManager[Tower]:
            return _with(tower, tower, "prepare", changed)

        yield Cause("preprocessing", f"images prepared with {line}", tried)


def _usable(tower: Tower, prepare: ImagePrepare, settings: dict[str, Any]) -> ImagePrepare | None:
    """Return preprocessing with other settings; None if the library or the tower refuses them."""
    device = next(tower.parameters()).device
    # timm and open_clip raise many kinds of errors for what they do not know.
    with suppress(Exception), torch.inference_mode():
        changed = prepare.changed(**settings)
        pixels = changed([Image.new("RGB", (SMALL, SMALL))])
        tower({name: values.to(device) for name, values in pixels.items()})
        return changed
    return None


@contextmanager
def _with(tower: Tower, target: Any, name: str, value: Any) -> Iterator[Tower]:
    """Yield the tower while an attribute of it, or of its part, has another value."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield tower
    finally:
        setattr(target, name, before)
