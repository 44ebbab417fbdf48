"""A frozen BatchNorm neither looks at the batch nor remembers it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dualenc.encoders import frozen_batchnorm


@pytest.fixture
def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.BatchNorm1d(16))


def test_running_statistics_stay_and_are_used(network: nn.Sequential) -> None:
    network.train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    images = torch.randn(6, 3, 4, 4)
    with frozen_batchnorm(network):
        torch.manual_seed(1)
        together = network(images)
        torch.manual_seed(1)
        again = network(images)
        assert network[2].training  # dropout keeps its mode
    assert torch.equal(together, again)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert network[1].training
    assert network[4].training


def test_one_item_alone_gives_what_it_gives_in_a_batch(network: nn.Sequential) -> None:
    network.train()
    network[2].eval()
    images = torch.randn(6, 3, 4, 4)
    with frozen_batchnorm(network):
        torch.testing.assert_close(network(images)[2:3], network(images[2:3]))


def test_gradients_flow_and_modes_return_after_an_error(network: nn.Sequential) -> None:
    network.train()
    network[4].eval()
    with frozen_batchnorm(network):
        network(torch.randn(2, 3, 4, 4)).sum().backward()
    assert network[1].weight.grad is not None
    with pytest.raises(RuntimeError, match="channels"), frozen_batchnorm(network):
        network(torch.randn(2, 5, 4, 4))
    assert network[1].training
    assert not network[4].training  # was not training before either
