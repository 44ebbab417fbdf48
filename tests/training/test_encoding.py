"""Forwards of one step: items beside the batch go through the function that the batch went through."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dualenc.training.encoding import CachedEncoding, PlainEncoding
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
    again = encoding.encode(side, {"rows": batch["rows"][3:5]}, out_of_batch=True)
    torch.testing.assert_close(again, embeddings[3:5])


@pytest.mark.parametrize("way", WAYS)
def test_items_beside_the_batch_do_not_move_the_running_statistics(way):
    model = TinyEncoder(batchnorm=True).train()
    encoding = WAYS[way](model, CPU)
    encoding.encode("left", rows(12, seed=0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    encoding.encode("left", rows(5, seed=1), out_of_batch=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def gradients_beside(way, batch, others):
    """Of items beside the batch only."""
    model = TinyEncoder(batchnorm=True).train()
    encoding = WAYS[way](model, CPU)
    encoding.encode("left", batch)
    encoding.backward(encoding.encode("left", others, out_of_batch=True)[:, 0].sum())
    return {name: parameter.grad for name, parameter in model.left.named_parameters()}


def gradients_of_both(batch, others, again):
    """Of the batch and of items beside it, which the backward pass may have to encode again."""
    model = TinyEncoder(batchnorm=True).train()
    encoding = PlainEncoding(model, CPU)
    loss = encoding.encode("left", batch)[:, 1].sum()

    def encode_beside():
        return encoding.encode("left", others, out_of_batch=True)

    beside = checkpoint(encode_beside, use_reentrant=False) if again else encode_beside()
    encoding.backward(loss + beside[:, 0].sum())
    return {name: parameter.grad for name, parameter in model.left.named_parameters()}


def test_items_may_be_encoded_again_in_the_backward_pass():
    batch, others = rows(12, seed=0), rows(5, seed=1)
    found, expected = (gradients_of_both(batch, others, again) for again in (True, False))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def gradients_by_hand(batch, others, constant):
    """The same, the two layers before the tower's BatchNorm written out."""
    model = TinyEncoder(batchnorm=True).train()
    linear, norm, *rest = model.left.layers
    hidden = linear(batch["rows"])
    mean, variance = hidden.mean(0), hidden.var(0, correction=0)
    if constant:
        mean, variance = mean.detach(), variance.detach()
    normalised = (linear(others["rows"]) - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias
    torch.nn.functional.normalize(torch.nn.Sequential(*rest)(normalised), dim=-1)[:, 0].sum().backward()
    return {name: parameter.grad for name, parameter in model.left.named_parameters()}


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_goes_through_the_statistics_into_the_batch_where_that_has_a_graph(way):
    """In chunks the batch's graph is gone by then: its statistics are constants."""
    batch, others = rows(12, seed=0), rows(5, seed=1)
    found, expected = gradients_beside(way, batch, others), gradients_by_hand(batch, others, constant=way == "cached")
    for name in found:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("way", WAYS)
def test_no_item_is_no_row(way):
    encoding = WAYS[way](TinyEncoder(batchnorm=True).train(), CPU)
    assert encoding.encode("left", {}, out_of_batch=True).shape == (0, 5)
