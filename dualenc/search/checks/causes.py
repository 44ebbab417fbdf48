"""What a model may have been used with instead: other prompts, pooling, lengths, the other side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from torch import nn

from dualenc.encoders.dual import DualEncoder, Tower
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


class Cause(NamedTuple):
    """A way in which a model may have been used.

    Attributes:
        kind: "prompt", "pooling", "length" or "side".
        line: description.
        tower: context in which the tower encodes that way.
    """

    kind: str
    line: str
    tower: Callable[[], AbstractContextManager[Tower]]


def causes(encoder: DualEncoder, side: Side) -> Iterator[Cause]:
    """Yield the ways in which vectors of a side may have been made otherwise, likely ones first.

    Args:
        encoder: the model; only text encoders have any but the other side.
        side: side of the model that is recorded.
    """
    tower = encoder.tower(side)
    if isinstance(encoder, TextEncoder) and isinstance(tower, TextTower):
        yield from _prompts(encoder, tower, side)
        yield from _poolings(tower)
        yield from _lengths(tower)
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


@contextmanager
def _with(tower: Tower, target: Any, name: str, value: Any) -> Iterator[Tower]:
    """Yield the tower while an attribute of it, or of its part, has another value."""
    before = getattr(target, name)
    setattr(target, name, value)
    try:
        yield tower
    finally:
        setattr(target, name, before)
