"""Gradient caching: plain gradient, dropout replayed, whatever the chunk; out-of-batch items as the
batch was."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.errors import DualencError
from dualenc.objectives import InfoNCE
from dualenc.training.encoding import CachedEncoding, PlainEncoding
from dualenc.training.extra_items import ItemEncoder
from tests.helpers.fakes import WIDTH, TinyEncoder, gradients, tiny_objective, tiny_pairs

CPU = torch.device("cpu")
BATCH = 11


@pytest.fixture
def inputs():
    draw = torch.Generator().manual_seed(1)
    return [
        {"rows": torch.randn(BATCH, WIDTH, generator=draw, dtype=torch.float64)} for _ in range(2)
    ]


def run(encoding, model, inputs, objective=None, extra=None):
    """Gradients of InfoNCE (with the items that `extra` brings as negatives) on one batch."""
    model.zero_grad()
    objective = objective or tiny_objective(tiny_pairs())
    left, right = encoding.encode("left", inputs[0]), encoding.encode("right", inputs[1])
    ids = torch.arange(BATCH)
    negatives = None if extra is None else extra(encoding)
    negative_id = None if negatives is None else torch.arange(BATCH, BATCH + len(negatives))
    out = objective(left, right, ids, ids, negatives=negatives, negative_id=negative_id)
    encoding.backward(out.loss)
    return out.loss.detach(), gradients(model, objective)


def close(first, second, tolerance=1e-10):
    return all(
        torch.allclose(a, b, rtol=tolerance, atol=tolerance)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("chunk_size", [1, 4, 11, 64])
@pytest.mark.parametrize("kind", ["separate", "shared", "frozen"])
def test_the_gradient_is_that_of_the_plain_step(inputs, chunk_size, kind):
    model = TinyEncoder(shared=kind == "shared").train()
    if kind == "frozen":
        model.left.requires_grad_(False)
    plain_loss, plain = run(PlainEncoding(model, CPU), model, inputs)
    cached_loss, cached = run(CachedEncoding(model, CPU, chunk_size=chunk_size), model, inputs)
    assert torch.allclose(plain_loss, cached_loss, rtol=1e-12)
    assert close(plain, cached)


class ChunkedGraph(PlainEncoding):
    """The slow way to the same thing: every chunk with its graph, all of them kept."""

    def encode(self, side, inputs, out_of_batch=False):
        parts = inputs["rows"].split(4)
        return torch.cat(
            [super(ChunkedGraph, self).encode(side, {"rows": part}, out_of_batch) for part in parts]
        )


def test_dropout_is_replayed(inputs):
    model = TinyEncoder(dropout=0.4).train()
    torch.manual_seed(5)
    slow_loss, slow = run(ChunkedGraph(model, CPU), model, inputs)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    cached_loss, cached = run(CachedEncoding(model, CPU, chunk_size=4), model, inputs)
    assert slow_loss == cached_loss
    assert close(slow, cached)
    assert torch.equal(
        after, torch.get_rng_state()
    )  # the replay itself draws nothing that others would notice
    torch.manual_seed(6)
    assert not close(slow, run(CachedEncoding(model, CPU, chunk_size=4), model, inputs)[1])


def test_items_asked_for_by_id_get_their_gradient_too(inputs):
    pairs = tiny_pairs()
    model = TinyEncoder().train()

    def extra(encoding):
        return ItemEncoder(model, pairs, encoding)("right", torch.arange(BATCH, BATCH + 5))

    plain = run(PlainEncoding(model, CPU), model, inputs, extra=extra)[1]
    cached = run(CachedEncoding(model, CPU, chunk_size=2), model, inputs, extra=extra)[1]
    assert close(plain, cached)
    assert not close(plain, run(PlainEncoding(model, CPU), model, inputs)[1])


def test_mixed_precision_is_replayed(inputs):
    model = TinyEncoder(dtype=torch.float32).train()
    rows = [{"rows": part["rows"].float()} for part in inputs]

    autocast = partial(torch.autocast, "cpu", torch.bfloat16)
    loss, expected = run(PlainEncoding(model, CPU, autocast), model, rows, InfoNCE(num_left=24))
    cached, found = run(
        CachedEncoding(model, CPU, autocast, chunk_size=4), model, rows, InfoNCE(num_left=24)
    )
    assert cached == loss
    assert close(found, expected, tolerance=2e-2)


def test_frozen_batchnorm_gives_the_gradient_of_the_plain_step(inputs):
    """In the batch and outside it; trained BatchNorm is refused."""
    model, pairs = TinyEncoder(batchnorm=True), tiny_pairs()
    with pytest.raises(DualencError, match="chunk_size does not work with BatchNorm"):
        CachedEncoding(model, CPU, chunk_size=4)
    for tower in (model.left, model.right):
        tower.layers[1].requires_grad_(False)
    model.train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def extra(encoding):
        return ItemEncoder(model, pairs, encoding)("right", torch.arange(BATCH, BATCH + 5))

    plain = run(PlainEncoding(model, CPU), model, inputs, extra=extra)
    cached = run(CachedEncoding(model, CPU, chunk_size=4), model, inputs, extra=extra)
    assert torch.allclose(plain[0], cached[0], rtol=1e-12)
    assert close(plain[1], cached[1])
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


def test_memory_of_the_graph_is_that_of_a_chunk(inputs):
    """Autograd saves nothing between the first forward and the backward pass."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(1) or tensor, lambda tensor: tensor
    ):
        CachedEncoding(TinyEncoder().train(), CPU, chunk_size=8).encode("left", inputs[0])
        assert not saved
        PlainEncoding(TinyEncoder().train(), CPU).encode("left", inputs[0])
        assert saved


def rows(count, seed):
    return {
        "rows": torch.randn(
            count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
    }


def test_an_out_of_batch_item_is_normalised_as_the_batch_was_and_moves_no_statistics():
    model = TinyEncoder(batchnorm=True).train()
    encoding = PlainEncoding(model, CPU)
    batch = rows(12, seed=0)
    embeddings = encoding.encode("left", batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    again = encoding.encode("left", {"rows": batch["rows"][3:5]}, out_of_batch=True)
    torch.testing.assert_close(again, embeddings[3:5])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def gradients_of_others(batch, others, again=False, of_batch=0.0):
    """Of out-of-batch items, which the backward pass may have to encode again, and of the batch."""
    model = TinyEncoder(batchnorm=True).train()
    encoding = PlainEncoding(model, CPU)
    loss = of_batch * encoding.encode("left", batch)[:, 1].sum()

    def encode_others():
        return encoding.encode("left", others, out_of_batch=True)

    out = checkpoint(encode_others, use_reentrant=False) if again else encode_others()
    encoding.backward(loss + out[:, 0].sum())
    return {name: parameter.grad for name, parameter in model.left.named_parameters()}


def test_items_may_be_encoded_again_in_the_backward_pass():
    batch, others = rows(12, seed=0), rows(5, seed=1)
    expected = gradients_of_others(batch, others, of_batch=1.0)
    for name, gradient in gradients_of_others(batch, others, again=True, of_batch=1.0).items():
        torch.testing.assert_close(gradient, expected[name])


def gradients_by_hand(batch, others):
    """The same, the two layers before the tower's BatchNorm written out."""
    model = TinyEncoder(batchnorm=True).train()
    linear, norm, *rest = model.left.layers
    hidden = linear(batch["rows"])
    mean, variance = hidden.mean(0), hidden.var(0, correction=0)
    normalised = (linear(others["rows"]) - mean) / (
        variance + norm.eps
    ).sqrt() * norm.weight + norm.bias
    torch.nn.functional.normalize(torch.nn.Sequential(*rest)(normalised), dim=-1)[
        :, 0
    ].sum().backward()
    return {name: parameter.grad for name, parameter in model.left.named_parameters()}


def test_the_gradient_goes_through_the_statistics_into_the_batch():
    batch, others = rows(12, seed=0), rows(5, seed=1)
    expected = gradients_by_hand(batch, others)
    for name, gradient in gradients_of_others(batch, others).items():
        torch.testing.assert_close(gradient, expected[name])


def encoded_by(model, parts, make, together):
    """The parts of a batch encoded at once or one by one, the gradients of a loss on them, and the
    number of passes."""
    draw, passes = torch.Generator().manual_seed(0), []
    hooks = [
        tower.register_forward_pre_hook(lambda *_: passes.append(1))
        for tower in {model.left, model.right}
    ]
    model.zero_grad()
    encoding = make(model, CPU)
    encoded = (
        encoding.encode_parts(*parts) if together else [encoding.encode(*part) for part in parts]
    )
    directions = [torch.randn(one.shape, generator=draw, dtype=one.dtype) for one in encoded]
    encoding.backward(
        sum((one * direction).sum() for one, direction in zip(encoded, directions, strict=True))
    )
    for hook in hooks:
        hook.remove()
    return [*(one.detach() for one in encoded), *gradients(model)], len(passes)


@pytest.mark.parametrize(
    "make", [PlainEncoding, partial(CachedEncoding, chunk_size=6)], ids=["plain", "cached"]
)
def test_shared_weights_encode_all_parts_of_a_batch_at_once(make):
    """Whatever the lengths and the prompts; roberta counts its positions from the padding."""
    config = {
        "model_type": "roberta",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config |= {
        "intermediate_size": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    config |= {"max_position_embeddings": 40, "type_vocab_size": 1}
    tokenizer = train_tokenizer(["some words of no matter"], 300, max_length=36)
    torch.manual_seed(0)
    model = (
        TextEncoder(config=config, tokenizer=tokenizer, query_prompt="some ", max_length=36)
        .double()
        .train()
    )
    parts = [
        ("left", model.left.prepare(["words", "no matter", "matter of words"])),
        ("right", model.right.prepare(["some words of " * 4, "no", "matter " * 5, "of"])),
        ("right", model.right.prepare(["words " * 3])),
    ]
    joined, passes = encoded_by(model, parts, make, together=True)
    apart, separate = encoded_by(model, parts, PlainEncoding, together=False)
    assert close(joined, apart, tolerance=1e-6)
    assert make is not PlainEncoding or passes < separate


@pytest.mark.parametrize(
    "model", [TinyEncoder(shared=True, batchnorm=True), TinyEncoder(shared=False)]
)
def test_separate_towers_and_batchnorm_see_one_part_at_a_time(model):
    parts = [("left", rows(6, seed=0)), ("right", rows(4, seed=1))]
    for together in (True, False):
        assert encoded_by(model.train(), parts, PlainEncoding, together)[1] == 2
