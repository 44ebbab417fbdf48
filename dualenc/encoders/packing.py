"""Sequence packing: several short texts share a row, so that no compute is spent on padding.

Short texts share rows under a mask. Long texts on a CPU stand in a single row, and attention goes
through them one by one, so that the scores of a text stay in the processor's cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dualenc.encoders.dropout import dropout_mask
from dualenc.types import Inputs

COUNT_FROM_ZERO = ("bert", "electra")
COUNT_FROM_BEHIND_PADDING = ("roberta", "xlm-roberta", "camembert")
"""Architectures that take positions and a mask per pair of tokens, by how they number positions."""
MAX_SHARE = 0.9
"""Texts stay as they are where packing would leave a larger share of tokens and padding."""
NOT_MODEL_INPUTS = ("place", "texts", "lengths", "attention_mask")
LONG = 48
"""Mean number of tokens from which attention goes through the texts one by one on a CPU."""
ONE_BY_ONE = "dualenc_one_by_one"
"""The name of that attention in transformers."""


def first_position(config: Any) -> int | None:
    """The position of a text's first token in an architecture that takes several texts in a row;
    None for others."""
    # With all layers' outputs, each would have to be unpacked.
    is_other = any(getattr(config, name, False) for name in ("is_decoder", "output_hidden_states"))
    if is_other or config._attn_implementation != "sdpa":
        return None
    if config.model_type in COUNT_FROM_ZERO:
        return 0
    return int(config.pad_token_id) + 1 if config.model_type in COUNT_FROM_BEHIND_PADDING else None


def pack(inputs: Inputs, first: int, one_by_one: bool = False) -> Inputs:
    """Texts (n, T) in fewer rows; the inputs themselves where packing would save little.

    Args:
        inputs: tokenized texts on the CPU: "attention_mask" and others (n, T), padded on either
            side.
        first: position of a text's first token, see `first_position`.
        one_by_one: attention may go through long texts one by one.

    Returns:
        The inputs in R rows of L tokens, with "position_ids"; "place" (n, T), each token's index
        among the R·L; and either "texts" (R, L), the text of each token, -1 for padding, or, of a
        single row, "lengths" (n,) of its texts.
    """
    mask = inputs["attention_mask"].bool()
    lengths: list[int] = mask.sum(dim=1).tolist()
    if one_by_one and sum(lengths) >= LONG * len(lengths):
        width = sum(lengths)
        rows = [list(range(len(lengths)))]
    else:
        one_by_one = False
        width = max(1, *lengths)
        rows = fill_rows(lengths, width)
        if len(rows) * width > MAX_SHARE * mask.numel():
            return inputs
    start = torch.zeros(len(mask), 1, dtype=torch.long)
    for number, row in enumerate(rows):
        starts = [0, *accumulate(lengths[text] for text in row[:-1])]
        start[row, 0] = number * width + torch.tensor(starts)
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    # A text without a token would stand behind the end.
    place = (start + position).clamp(max=len(rows) * width - 1)

    def in_rows(values: Tensor, padding: int = 0) -> Tensor:
        flat = values.new_full((len(rows) * width,), padding)
        flat[place[mask]] = values[mask]
        return flat.view(len(rows), width)

    packed = {name: in_rows(values) for name, values in inputs.items() if name != "attention_mask"}
    packed["position_ids"] = in_rows(token_positions(inputs, first))
    if one_by_one:
        packed["lengths"] = torch.tensor(lengths)
    else:
        numbers = torch.arange(len(mask))[:, None]
        packed["texts"] = in_rows(numbers.expand_as(mask), -1)
    return packed | {"place": place, "attention_mask": inputs["attention_mask"]}


def token_positions(inputs: Inputs, first: int) -> Tensor:
    """The position (n, T) of each token; RoBERTa and its kin give every padding token the position
    before the first."""
    counted = inputs["attention_mask"].bool()
    if first > 0:
        counted = counted & (inputs["input_ids"] != first - 1)
    position = counted.cumsum(dim=1) - 1 + first
    return position.masked_fill(~counted, max(first - 1, 0))


def fill_rows(lengths: Sequence[int], room: int) -> list[list[int]]:
    """The texts of each row of `room` tokens: always the longest that still fits into it."""
    waiting = sorted(range(len(lengths)), key=lengths.__getitem__)
    waiting_lengths = [lengths[text] for text in waiting]
    rows = []
    while waiting:
        row = []
        left = room
        while number := bisect_right(waiting_lengths, left):
            row.append(waiting.pop(number - 1))
            left -= waiting_lengths.pop(number - 1)
        rows.append(row)
    return rows


def run_packed(backbone: Any, inputs: Inputs) -> Tensor:
    """(n, T, H) last hidden states of packed texts; tokens attend to those of their own text."""
    tokens = {name: values for name, values in inputs.items() if name not in NOT_MODEL_INPUTS}
    if "lengths" in inputs:
        with one_by_one_attention(backbone.config):
            hidden = backbone(**tokens, text_lengths=inputs["lengths"].tolist()).last_hidden_state
    else:
        texts = inputs["texts"]
        same_text = texts[:, :, None] == texts[:, None]
        hidden = backbone(**tokens, attention_mask=same_text[:, None]).last_hidden_state
    return hidden.flatten(0, 1)[inputs["place"]]


@contextmanager
def one_by_one_attention(config: Any) -> Iterator[None]:
    """Have a transformer attend by `attend_one_by_one`, in a forward pass that is not repeated
    later."""
    # Takes seconds to import.
    from transformers import AttentionInterface

    AttentionInterface.register(ONE_BY_ONE, attend_one_by_one)
    before = config._attn_implementation
    config._attn_implementation = ONE_BY_ONE
    try:
        yield
    finally:
        config._attn_implementation = before


def attend_one_by_one(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    text_lengths: list[int],
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of texts one behind the other in a row, (1, heads, L, D) to (1, L, heads, D), for
    transformers."""
    parts = [tensor.split(text_lengths, dim=2) for tensor in (query, key, value)]
    attended = [attend(q, k, v, dropout, scaling) for q, k, v in zip(*parts)]
    return torch.cat(attended, dim=2).transpose(1, 2), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """Scaled dot product attention, with a dropout that is cheap on a CPU."""
    if dropout == 0:
        return scaled_dot_product_attention(query, key, value, scale=scaling)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    weights = (query * scaling @ key.mT).softmax(dim=-1)
    return weights * dropout_mask(weights, dropout) @ (value / (1 - dropout))
