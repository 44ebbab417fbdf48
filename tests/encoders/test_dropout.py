"""Dropout: the share that is dropped, the scale of the rest, and where it takes the place of
torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dualenc.encoders.dropout import Dropout, convert_dropout, dropout_mask


def test_dropout_drops_its_share_independently() -> None:
    torch.manual_seed(0)
    kept = dropout_mask(torch.zeros(3, 7, 50_001), 0.1)
    assert kept.unique().tolist() == [0, 1]
    assert kept.mean().item() == pytest.approx(0.9, abs=0.001)
    # Four elements of one random number are independent.
    together = kept.flatten()[:1_050_020].view(-1, 4)
    assert torch.corrcoef(together.T).fill_diagonal_(0).abs().max() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_kept_is_scaled_up_and_so_is_its_gradient(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = torch.ones(100_001, dtype=dtype, requires_grad=True)
    dropped = Dropout(0.25)(values)
    dropped.sum().backward()
    assert dropped.dtype == dtype
    assert dropped.unique().tolist() == [0, torch.tensor(4 / 3, dtype=dtype).item()]
    assert (dropped == 0).double().mean().item() == pytest.approx(0.25, abs=0.005)
    assert torch.equal(values.grad, dropped)


def test_plain_dropout_is_replaced_at_any_depth_and_keeps_its_mode() -> None:
    network = nn.Sequential(
        nn.Sequential(nn.Dropout(0.3), nn.Dropout2d(0.3)), nn.Dropout(0.2).eval()
    )
    convert_dropout(network)
    (first, second), last = network
    assert (type(first), first.p, first.training) == (Dropout, 0.3, True)
    assert type(second) is nn.Dropout2d
    assert (type(last), last.p, last.training) == (Dropout, 0.2, False)
