"""Chunks of like length without needless padding."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dualenc.encoders.dual import chunk_rows, take


def padded(lengths, left=False):
    """Token ids 1, 2, … of each length, padded with 0 on one side."""
    width = max(lengths)
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        start = width - length if left else 0
        ids[row, start : start + length] = torch.arange(1, length + 1)
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.arange(len(lengths)),
    }


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 13), st.booleans())
def test_chunks_hold_every_row_once_and_all_its_tokens(lengths, chunk_size, left):
    inputs = padded(lengths, left)
    seen = []
    for rows in chunk_rows(inputs, chunk_size):
        chunk = take(inputs, rows)
        assert len(rows) <= chunk_size
        assert chunk["input_ids"].shape[1] == max(lengths[row] for row in rows)
        assert chunk["attention_mask"].sum(dim=1).tolist() == [lengths[row] for row in rows]
        seen += chunk["labels"].tolist()
    assert sorted(seen) == list(range(len(lengths)))


def test_images_stay_in_order():
    inputs = {"image": torch.arange(5.0)[:, None]}
    assert [rows.tolist() for rows in chunk_rows(inputs, 2)] == [[0, 1], [2, 3], [4]]
    assert take(inputs, torch.tensor([3, 1]))["image"].flatten().tolist() == [3, 1]
