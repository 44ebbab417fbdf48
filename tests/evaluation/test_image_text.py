"""Image-text recall on matrices worked by hand, against torch, and shared among processes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.evaluation import image_text_retrieval as image_text
from dualenc.evaluation.image_text_retrieval import (
    both_ways_ranks,
    both_ways_recall,
    match_captions,
)


def test_by_hand_with_several_captions() -> None:
    """Two images, three captions: 0 and 1 describe image 0, 2 describes image 1."""
    images = np.array([[1.0, 0.0], [0.6, 0.8]], np.float32)
    texts = np.array([[0.0, 1.0], [0.8, 0.6], [1.0, 0.0]], np.float32)
    # image 0 scores the texts 0, .8, 1 (its best is second); image 1: .8, .96, .6 (its only one is
    # third).
    ranks = both_ways_ranks(images, texts, [[0, 1], [2]])
    assert ranks["image_to_text"].tolist() == [2, 3]
    assert ranks["text_to_image"].tolist() == [2, 2, 2]
    scores = both_ways_recall(ranks, (1, 2))
    assert scores == {
        "image_to_text_recall@1": 0.0,
        "image_to_text_recall@2": 0.5,
        "text_to_image_recall@1": 0.0,
        "text_to_image_recall@2": 1.0,
        "mean_recall": pytest.approx(1.5 / 4),
    }


@given(st.integers(0, 2**31), st.integers(2, 12), st.integers(1, 4))
def test_equals_topk_of_torch(seed: int, count: int, per_image: int) -> None:
    generator = np.random.default_rng(seed)
    images = generator.standard_normal((count, 5)).astype(np.float32)
    texts = generator.standard_normal((count * per_image, 5)).astype(np.float32)
    captions = np.arange(count * per_image).reshape(count, per_image)
    scores = both_ways_recall(both_ways_ranks(images, texts, captions), (1, 2))
    similarity = torch.from_numpy(images @ texts.T)
    owner = torch.arange(count * per_image) // per_image
    for k in (1, 2):
        found = (
            owner[similarity.topk(min(k, similarity.shape[1]), dim=1).indices]
            == torch.arange(count)[:, None]
        )
        assert scores[f"image_to_text_recall@{k}"] == pytest.approx(
            found.any(1).float().mean().item()
        )
        found = similarity.T.topk(min(k, count), dim=1).indices == owner[:, None]
        assert scores[f"text_to_image_recall@{k}"] == pytest.approx(
            found.any(1).float().mean().item()
        )


def test_captions_are_matched_by_id_and_pairs_that_lost_a_side_are_left_out() -> None:
    """Image 1 and text 12 could not be read; image 2 had only text 12; text 11 only image 1; 10
    stands twice."""
    left, right = np.array([0, 0, 1, 2, 3, 0]), np.array([10, 13, 11, 12, 13, 10])
    matched = match_captions(left, right, [0, 2, 3], [13, 11, 10])
    assert matched.image_rows.tolist() == [0, 2]  # rows of images 0 and 3
    assert matched.text_rows.tolist() == [0, 2]  # rows of texts 13 and 10
    assert matched.captions == [[0, 1], [0]]
    assert matched.text_of_pair.tolist() == [
        1,
        0,
        0,
        1,
    ]  # of the pairs (0, 10), (0, 13), (3, 13), (0, 10)
    with pytest.raises(DualencError, match="no readable image"):
        match_captions(left, right, [7], [13])


def test_processes_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_text, "rows_at_once", lambda candidates: 3)
    generator = np.random.default_rng(0)
    images, texts = generator.standard_normal((10, 4)), generator.standard_normal((20, 4))
    captions = np.arange(20).reshape(10, 2)
    alone = both_ways_ranks(images, texts, captions)
    rank_slice, shares = distributed.rank_slice, []
    monkeypatch.setattr(distributed, "gather_objects", lambda own: shares.append(own) or [own])
    for rank in range(2):
        monkeypatch.setattr(
            distributed, "rank_slice", lambda total, rank=rank: rank_slice(total, rank, 2)
        )
        both_ways_ranks(images, texts, captions)
    together = [
        np.concatenate([shares[direction], shares[2 + direction]]).tolist() for direction in (0, 1)
    ]
    assert together == [ranks.tolist() for ranks in alone.values()]
