"""The small-image stem is what SimCLR describes, and timm computes the same without knowing it."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

from dualenc.encoders.timm_folder import ENLARGEMENT, TIMM_ARGS, from_timm, is_plain_resnet, replace_stem, to_timm
from dualenc.errors import DualencError


@pytest.fixture(params=[3, 1])
def network(request: pytest.FixtureRequest) -> Any:
    """A small ResNet whose batch normalisations have something to do."""
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=0, in_chans=request.param, stem_type="", avg_down=False)
    replace_stem(model)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.weight, 1, 0.1)
            nn.init.normal_(layer.running_mean, 0, 0.1)
            nn.init.uniform_(layer.running_var, 0.5, 2)
    return model.eval()


def test_keeps_the_resolution(network: Any) -> None:
    images = torch.randn(2, network.conv1.in_channels, 16, 16)
    seen: list[torch.Size] = []
    network.layer1.register_forward_hook(lambda _module, given, _out: seen.append(given[0].shape))
    network(images)
    assert seen == [torch.Size([2, 64, 16, 16])]
    assert network.conv1.kernel_size == (3, 3)


@torch.no_grad()
@pytest.mark.parametrize("size", [(16, 16), (12, 20)])
def test_timm_gives_the_same_features_of_the_enlarged_image(network: Any, size: tuple[int, int]) -> None:
    channels = network.conv1.in_channels
    arguments = {"num_classes": 0, "in_chans": channels, "avg_down": False, **TIMM_ARGS}
    reference = timm.create_model("resnet10t", **arguments).eval()
    reference.load_state_dict(to_timm(network.state_dict()))
    images = torch.randn(3, channels, *size)
    enlarged = images.repeat_interleave(ENLARGEMENT, 2).repeat_interleave(ENLARGEMENT, 3)
    expected = network(images)
    assert expected.abs().mean() > 0.01
    assert (reference(enlarged) - expected).abs().max() < 1e-5


def test_the_way_back_is_exact(network: Any) -> None:
    weights = network.state_dict()
    found = from_timm(to_timm(weights))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_other_backbones_have_no_such_stem() -> None:
    assert is_plain_resnet(timm.create_model("resnet18"))
    for name in ("resnet18d", "convnext_atto"):
        model = timm.create_model(name)
        assert not is_plain_resnet(model)
        with pytest.raises(DualencError, match="small_image_stem"):
            replace_stem(model)
