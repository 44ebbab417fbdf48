"""Vectors have length one in float32, whatever they are computed in."""

from __future__ import annotations

import pytest
import torch

from dualenc.encoders.dual import Prepare, unit_norm


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_unit_norm_returns_float32_of_length_one(dtype: torch.dtype) -> None:
    vectors = unit_norm(torch.randn(5, 7).to(dtype))
    assert vectors.dtype == torch.float32
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(5))


def test_unit_norm_keeps_direction_and_survives_zero() -> None:
    vectors = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    torch.testing.assert_close(unit_norm(vectors), torch.tensor([[0.6, 0.8], [0.0, 0.0]]))


def test_items_cost_the_same_unless_a_tower_knows_better() -> None:
    assert Prepare().lengths(["a", "long"]) == [1, 1]
