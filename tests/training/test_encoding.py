"""Forwards of one step: items beside the batch go through the function that the batch went through."""

import pytest
import torch

from dualenc.training.encoding import PlainEncoding
from dualenc.training.gradient_cache import CachedEncoding
from tests.training.fakes import TinyEncoder

CPU = torch.device("cpu")
WAYS = {"plain": PlainEncoding, "cached": lambda model, device: CachedEncoding(model, device, chunk_size=16)}


def rows(count, seed):
    return {"rows": torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_an_item_beside_the_batch_is_normalised_as_the_batch_was(way, side):
    model = TinyEncoder(batchnorm=True).train()
    encoding = WAYS[way](model, CPU)
    batch = rows(12, seed=0)
    embeddings = encoding.encode(side, batch)
    again = encoding.encode(side, {"rows": batch["rows"][3:5]}, beside=True)
    torch.testing.assert_close(again, embeddings[3:5])


@pytest.mark.parametrize("way", WAYS)
def test_items_beside_the_batch_do_not_move_the_running_statistics(way):
    model = TinyEncoder(batchnorm=True).train()
    encoding = WAYS[way](model, CPU)
    encoding.encode("left", rows(12, seed=0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    encoding.encode("left", rows(5, seed=1), beside=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_of_items_beside_the_batch_takes_its_statistics_as_constants(way):
    batch, others = rows(12, seed=0), rows(5, seed=1)
    model = TinyEncoder(batchnorm=True).train()
    encoding = WAYS[way](model, CPU)
    encoding.encode("left", batch)
    beside = encoding.encode("left", others, beside=True)
    encoding.backward(beside[:, 0].sum())
    found = {name: parameter.grad for name, parameter in model.left.named_parameters()}

    twin = TinyEncoder(batchnorm=True).eval()
    linear, norm = twin.left.layers[0], twin.left.layers[1]
    hidden = linear(batch["rows"]).detach()
    norm.running_mean, norm.running_var = hidden.mean(0), hidden.var(0, correction=0)
    twin.left(others)[:, 0].sum().backward()
    for name, parameter in twin.left.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("way", WAYS)
def test_no_item_is_no_row(way):
    encoding = WAYS[way](TinyEncoder(batchnorm=True).train(), CPU)
    assert encoding.encode("left", {}, beside=True).shape == (0, 5)
