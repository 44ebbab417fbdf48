"""Out-of-batch items are normalised as the batch was; without a batch, by running statistics, which
stay."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from dualenc.encoders import BatchStatistics, ImageEncoder
from dualenc.encoders.batchnorm import keep_frozen_statistics
from dualenc.errors import DualencError


@pytest.fixture
def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.BatchNorm1d(16),
    )
    return nn.Sequential(*layers).double()


def images(count: int = 6) -> torch.Tensor:
    return torch.randn(count, 3, 4, 4, dtype=torch.float64)


def state(network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in network.state_dict().items()}


def test_items_of_the_batch_get_their_embeddings_again_alone_or_together(
    network: nn.Sequential,
) -> None:
    network.train()
    network[2].eval()
    statistics, batch = BatchStatistics(), images()
    with statistics.recorded(network):
        embeddings = network(batch)
    with statistics.applied(network):
        torch.testing.assert_close(network(batch), embeddings)
        torch.testing.assert_close(network(batch[2:3]), embeddings[2:3])


@pytest.mark.parametrize(
    "arguments", [{"track_running_stats": False}, {"affine": False}, {"eps": 0.1}]
)
def test_every_kind_of_layer_is_recorded(arguments: dict[str, Any]) -> None:
    norm, statistics = nn.BatchNorm1d(3, **arguments).double().train(), BatchStatistics()
    tracked = state(norm).keys()
    batch = torch.randn(7, 3, 5, dtype=torch.float64)
    with statistics.recorded(norm):
        embeddings = norm(batch)
    with statistics.applied(norm):
        torch.testing.assert_close(norm(batch[:2]), embeddings[:2])
    assert state(norm).keys() == tracked
    assert norm.track_running_stats is arguments.get("track_running_stats", True)


def test_second_derivatives_are_refused() -> None:
    norm, statistics = nn.BatchNorm2d(3).double().train(), BatchStatistics()
    batch, outside = images().requires_grad_(), images(2)
    with statistics.recorded(norm):
        norm(batch)
    with statistics.applied(norm):
        loss = norm(outside).pow(3).sum()
    with pytest.raises(DualencError, match="do not support second derivatives"):
        torch.autograd.grad(loss, batch, create_graph=True)


def test_statistics_have_the_gradient_of_mean_and_variance() -> None:
    norm, statistics = nn.BatchNorm2d(3).double().train(), BatchStatistics()
    batch, outside = images().requires_grad_(), images(2)
    with statistics.recorded(norm):
        norm(batch)
    with statistics.applied(norm):
        norm(outside).pow(3).sum().backward()
    by_hand = batch.detach().clone().requires_grad_()
    variance, mean = torch.var_mean(by_hand, dim=(0, 2, 3), correction=0, keepdim=True)
    ((outside - mean) / (variance + norm.eps).sqrt()).pow(3).sum().backward()
    torch.testing.assert_close(batch.grad, by_hand.grad)


@pytest.mark.slow
@pytest.mark.parametrize("with_graph", [True, False])
def test_the_batch_is_held_only_until_it_is_released_and_only_for_a_gradient(
    with_graph: bool,
) -> None:
    norm, statistics, batch = nn.BatchNorm1d(3).train(), BatchStatistics(), torch.randn(4, 3)
    with torch.set_grad_enabled(with_graph), statistics.recorded(norm):
        inputs = batch.requires_grad_(with_graph) * 2
        alive = weakref.ref(inputs)
        norm(inputs)
    del inputs
    gc.collect()
    assert (alive() is not None) == with_graph
    statistics.release()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("keep", [True, False])
def test_without_a_batch_running_statistics_are_used_and_stay(
    network: nn.Sequential, keep: bool
) -> None:
    network.train()
    statistics = BatchStatistics(keep)
    if not keep:
        with statistics.recorded(network):
            network(images())
    before, batch = state(network), images()
    with statistics.applied(network):
        torch.manual_seed(1)
        found = network(batch)
        assert network[2].training, "dropout keeps its mode"
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert network[1].training
    twin = copy.deepcopy(network)
    for layer in (twin[1], twin[4]):
        layer.eval()
    torch.manual_seed(1)
    torch.testing.assert_close(twin(batch), found)


def test_modes_and_statistics_return_after_an_error(network: nn.Sequential) -> None:
    network.train()
    network[4].eval()
    statistics, before = BatchStatistics(), state(network)
    for context in (statistics.recorded, statistics.applied):
        with pytest.raises(RuntimeError, match="channels"), context(network):
            network(torch.randn(2, 5, 4, 4).double())
    broken = torch.zeros(1, 3, 3, 3).double()  # one value per channel
    with pytest.raises(ValueError, match="more than 1 value"), statistics.recorded(network):
        network(broken)
    assert all(
        torch.equal(before[name], value)
        for name, value in network.state_dict().items()
        if "num" not in name
    )
    assert (network[1].training, network[1].momentum) == (True, 0.1)
    assert not network[4].training, "it was not training before either"


def test_frozen_layers_keep_their_statistics(network: nn.Sequential) -> None:
    network[1].requires_grad_(False)
    network.append(nn.BatchNorm1d(16, affine=False).double())
    before = state(network)
    network.train()
    keep_frozen_statistics(network)
    network(images())
    changed = {
        name.partition(".")[0]
        for name, value in state(network).items()
        if not torch.equal(value, before[name])
    }
    assert changed == {"4", "5"}, "a layer without weights is frozen with its tower"
    network.requires_grad_(False)
    keep_frozen_statistics(network.train())
    assert [layer.training for layer in network if hasattr(layer, "running_mean")] == [False] * 3


def test_training_mode_of_a_model_leaves_a_frozen_tower_as_it_was() -> None:
    model = ImageEncoder("test_resnet", image_size=32)
    model.left.backbone.requires_grad_(False)
    norms = {
        name: layer
        for name, layer in model.train().named_modules()
        if isinstance(layer, nn.BatchNorm2d)
    }
    assert norms
    model.encode([Image.new("RGB", (32, 32))])
    assert model.left.training
    assert not any(layer.training for layer in norms.values()), (
        "encoding between two steps changes no mode"
    )
    assert any(
        isinstance(layer, nn.BatchNorm1d) and layer.training for layer in model.left.projector
    )
