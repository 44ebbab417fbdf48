"""Short texts one behind the other in a row, so that no layer of a transformer computes for padding."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dualenc.types import Inputs

COUNT_FROM_ZERO = ("bert", "electra")
COUNT_FROM_BEHIND_PADDING = ("roberta", "xlm-roberta", "camembert")
"""How architectures number the positions of a text, of those that take positions and a mask of who attends to whom."""
WORTH_IT = 0.9
"""Texts stay as they are where more of their tokens and padding would be left."""


def first_position(config: Any) -> int | None:
    """The position of a text's first token in an architecture that takes several texts in a row; None for others."""
    if config._attn_implementation != "sdpa" or getattr(config, "is_decoder", False):
        return None
    if config.model_type in COUNT_FROM_ZERO:
        return 0
    return int(config.pad_token_id) + 1 if config.model_type in COUNT_FROM_BEHIND_PADDING else None


def pack(inputs: Inputs, first: int) -> Inputs:
    """Texts (n, T) in fewer rows, each as long as the longest text.

    Args:
        inputs: tokenized texts on the CPU: "attention_mask" and others (n, T), padded on either side.
        first: position of a text's first token; the padding token of architectures that begin behind it is one less.

    Returns:
        The inputs (R, L) of R rows with L tokens, and their "position_ids"; "texts" (R, L), which text a token is of,
        -1 for padding; "place" (n, T), where each token stands among the R·L, any place for padding; "attention_mask"
        (n, T) as it was. The inputs themselves where packing would save little.
    """
    mask = inputs["attention_mask"].bool()
    lengths: list[int] = mask.sum(dim=1).tolist()
    longest = max(1, *lengths)
    rows = fill_rows(lengths, longest)
    if len(rows) * longest > WORTH_IT * mask.numel():
        return inputs
    start = torch.zeros(len(mask), 1, dtype=torch.long)
    for number, row in enumerate(rows):
        start[row, 0] = number * longest + torch.tensor([0, *accumulate(lengths[text] for text in row[:-1])])
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    # A text without a token would stand behind the end.
    place = (start + position).clamp(max=len(rows) * longest - 1)

    def packed(values: Tensor, padding: int = 0) -> Tensor:
        flat = values.new_full((len(rows) * longest,), padding)
        flat[place[mask]] = values[mask]
        return flat.view(len(rows), longest)

    found = {name: packed(values) for name, values in inputs.items() if name != "attention_mask"}
    found["position_ids"] = packed(token_positions(inputs, first))
    found["texts"] = packed(torch.arange(len(mask))[:, None].expand_as(mask), -1)
    return found | {"place": place, "attention_mask": inputs["attention_mask"]}


def token_positions(inputs: Inputs, first: int) -> Tensor:
    """The position (n, T) of each token, as the architecture itself counts them.

    RoBERTa and its kin leave out padding tokens wherever they stand, those that a text itself holds too, and give them
    the position before the first.
    """
    counted = inputs["attention_mask"].bool()
    if first > 0:
        counted = counted & (inputs["input_ids"] != first - 1)
    position = counted.cumsum(dim=1) - 1 + first
    return position.masked_fill(~counted, max(first - 1, 0))


def fill_rows(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which texts share a row of `room` tokens: always the longest that still fits into it."""
    waiting = sorted(range(len(lengths)), key=lengths.__getitem__)
    their_lengths = [lengths[text] for text in waiting]
    rows = []
    while waiting:
        row = []
        left = room
        while number := bisect_right(their_lengths, left):
            row.append(waiting.pop(number - 1))
            left -= their_lengths.pop(number - 1)
        rows.append(row)
    return rows


def run_packed(backbone: Any, inputs: Inputs) -> Tensor:
    """(n, T, H) last hidden states of packed texts, each of whose tokens attend to those of their own text."""
    of_rows = dict(inputs)
    texts = inputs["texts"]
    place = of_rows.pop("place")
    del of_rows["texts"]
    of_rows["attention_mask"] = (texts[:, :, None] == texts[:, None])[:, None]
    return backbone(**of_rows).last_hidden_state.flatten(0, 1)[place]
