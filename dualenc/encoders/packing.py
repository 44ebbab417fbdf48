"""Sequence packing: several short texts share a row, so that no compute is spent on padding.

Short texts share rows under a block-diagonal attention mask. On a CPU, long texts are
concatenated into a single row and attention processes them one by one, so that the scores of
a text fit into the processor's cache.
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
"""Architectures that accept position ids and a mask per pair of tokens, by how they number
positions."""
MAX_SHARE = 0.9
"""Texts are packed only if tokens and padding shrink to at most this share."""
NOT_MODEL_INPUTS = ("place", "texts", "lengths", "attention_mask")
LONG = 48
"""Mean number of tokens per text from which attention processes texts one by one on a CPU."""
ONE_BY_ONE = "dualenc_one_by_one"
"""Name under which `attend_one_by_one` is registered with transformers."""


def first_position(config: Any) -> int | None:
    """Return the position id of a text's first token; None if the architecture cannot be packed.

    Packing needs sdpa attention with a mask per pair of tokens, and explicit position ids.
    """
    # The outputs of all layers would have to be unpacked one by one, and a decoder's causal mask
    # would be replaced by ours.
    is_other = any(getattr(config, name, False) for name in ("is_decoder", "output_hidden_states"))
    if is_other or config._attn_implementation != "sdpa":
        return None
    if config.model_type in COUNT_FROM_ZERO:
        return 0
    return int(config.pad_token_id) + 1 if config.model_type in COUNT_FROM_BEHIND_PADDING else None


def pack(inputs: Inputs, first: int, one_by_one: bool = False) -> Inputs:
    """Pack texts (n, T) into fewer rows; return the inputs unchanged if packing would save little.

    Args:
        inputs: tokenized texts on the CPU: "attention_mask" and others, (n, T) each, padded on
            either side.
        first: position id of a text's first token, see `first_position`.
        one_by_one: allow attention to process long texts one by one.

    Returns:
        The inputs as R rows of L tokens, with "position_ids" (R, L); "place" (n, T), the index of
        each token among the R·L; and either "texts" (R, L), the text of each token (-1 for
        padding), or, for a single row, "lengths" (n,), the number of tokens per text.
    """
    mask = inputs["attention_mask"].bool()
    lengths: list[int] = mask.sum(dim=1).tolist()
    # Long texts: one row, so scores are computed per text (n·T²) and not per row (L²).
    if one_by_one and sum(lengths) >= LONG * len(lengths):
        width = sum(lengths)
        rows = [list(range(len(lengths)))]
    else:
        one_by_one = False
        width = max(1, *lengths)
        rows = fill_rows(lengths, width)
        # The longest text sets the width; equally long texts leave nothing to pack.
        if len(rows) * width > MAX_SHARE * mask.numel():
            return inputs
    start = torch.zeros(len(mask), 1, dtype=torch.long)
    for number, row in enumerate(rows):
        # Exclusive prefix sum of the lengths in a row.
        starts = [0, *accumulate(lengths[text] for text in row[:-1])]
        start[row, 0] = number * width + torch.tensor(starts)
    # With padding on the left, cumsum - 1 is -1 before the first token.
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    # An empty text at the end of the last row would start one place behind it. Its hidden states
    # are padding and never pooled, so any valid index will do.
    place = (start + position).clamp(max=len(rows) * width - 1)

    def in_rows(values: Tensor, padding: int = 0) -> Tensor:
        """Move values (n, T) to their places in the rows, (R, L)."""
        flat = values.new_full((len(rows) * width,), padding)
        flat[place[mask]] = values[mask]
        return flat.view(len(rows), width)

    packed = {name: in_rows(values) for name, values in inputs.items() if name != "attention_mask"}
    packed["position_ids"] = in_rows(token_positions(inputs, first))
    # The usual mask is quadratic in the width, which would be huge for a single row.
    if one_by_one:
        packed["lengths"] = torch.tensor(lengths)
    else:
        numbers = torch.arange(len(mask))[:, None]
        packed["texts"] = in_rows(numbers.expand_as(mask), -1)
    return packed | {"place": place, "attention_mask": inputs["attention_mask"]}


def token_positions(inputs: Inputs, first: int) -> Tensor:
    """Return the position id (n, T) of each token.

    RoBERTa and its relatives count from behind the padding index, and give padding tokens inside
    a text the padding index itself.
    """
    counted = inputs["attention_mask"].bool()
    if first > 0:
        # RoBERTa derives positions from the ids, and so skips padding tokens written in a text.
        counted = counted & (inputs["input_ids"] != first - 1)
    position = counted.cumsum(dim=1) - 1 + first
    return position.masked_fill(~counted, max(first - 1, 0))


def fill_rows(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Assign texts to rows of `room` tokens, always the longest one that still fits (best fit)."""
    waiting = sorted(range(len(lengths)), key=lengths.__getitem__)
    waiting_lengths = [lengths[text] for text in waiting]
    rows = []
    while waiting:
        row = []
        left = room
        # `waiting` is sorted by length, so bisection finds the longest text that fits.
        while number := bisect_right(waiting_lengths, left):
            row.append(waiting.pop(number - 1))
            left -= waiting_lengths.pop(number - 1)
        rows.append(row)
    return rows


def run_packed(backbone: Any, inputs: Inputs) -> Tensor:
    """Return the last hidden states (n, T, H) of packed texts."""
    tokens = {name: values for name, values in inputs.items() if name not in NOT_MODEL_INPUTS}
    if "lengths" in inputs:
        with one_by_one_attention(backbone.config):
            hidden = backbone(**tokens, text_lengths=inputs["lengths"].tolist()).last_hidden_state
    else:
        texts = inputs["texts"]
        # Padding has text -1 and attends to padding, which keeps its softmax finite.
        same_text = texts[:, :, None] == texts[:, None]
        hidden = backbone(**tokens, attention_mask=same_text[:, None]).last_hidden_state
    return hidden.flatten(0, 1)[inputs["place"]]


@contextmanager
def one_by_one_attention(config: Any) -> Iterator[None]:
    """Make a transformer use `attend_one_by_one` inside this context.

    Must not enclose a pass that is recomputed later, as by gradient checkpointing: the
    recomputation would use the usual attention.
    """
    # Imported here because it takes seconds.
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
    """Attention over texts concatenated in a row; an attention function for transformers.

    Args:
        module: the attention layer; not used.
        query: queries (1, heads, L, D) of all texts.
        key: keys (1, heads, L, D).
        value: values (1, heads, L, D).
        attention_mask: None, since padding was removed.
        dropout: probability of dropping an attention weight.
        scaling: factor of the scores; None for 1/√D.
        text_lengths: number of tokens of each text, L in total.
        others: further arguments of transformers; ignored.

    Returns:
        The outputs (1, L, heads, D), and None in place of the attention weights.
    """
    parts = [tensor.split(text_lengths, dim=2) for tensor in (query, key, value)]
    attended = [attend(q, k, v, dropout, scaling) for q, k, v in zip(*parts)]
    return torch.cat(attended, dim=2).transpose(1, 2), None


def attend(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """Scaled dot product attention, with a dropout that is cheap on a CPU."""
    if dropout == 0:
        return scaled_dot_product_attention(query, key, value, scale=scaling)
    # torch's fused attention draws dropout one number per weight; `dropout_mask` draws 16 bits.
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    weights = (query * scaling @ key.mT).softmax(dim=-1)
    # Dividing the values by 1 - p instead of the weights touches T·D numbers and not T².
    return weights * dropout_mask(weights, dropout) @ (value / (1 - dropout))
