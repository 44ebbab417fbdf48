"""`encode(side, ids)`: items by id, augmented by seed, BatchNorm left alone."""

import pytest
import torch

from dualenc.errors import BadSample, DualencError
from dualenc.training.encoding import PlainEncoding
from dualenc.training.loader import ItemEncoder
from tests.training.fakes import TinyEncoder, tiny_pairs

CPU = torch.device("cpu")


def make(model=None, pairs=None, **arguments):
    model = model or TinyEncoder().train()
    items = ItemEncoder(model, pairs or tiny_pairs(), **arguments)
    return items, lambda step=0: items.bind(PlainEncoding(model, CPU), step)


def test_order_and_repetition_of_ids_are_kept():
    items, bind = make()
    encode = bind()
    rows = encode("right", torch.tensor([5, 2, 5]))
    assert torch.allclose(rows[0], rows[2])
    assert torch.allclose(rows[1:2], encode("right", torch.tensor([2])))
    assert items.num_encoded == 4


def test_augmentation_depends_on_seed_step_id_and_side():
    _, bind = make(model=TinyEncoder(shared=True), seed=1)
    ids = torch.tensor([3])
    assert torch.equal(bind(4)("left", ids), bind(4)("left", ids))
    assert not torch.allclose(bind(4)("left", ids), bind(5)("left", ids))
    _, other = make(model=TinyEncoder(shared=True), seed=2)
    assert not torch.allclose(bind(4)("left", ids), other(4)("left", ids))


def test_gradient_follows_the_callers_wish():
    _, bind = make()
    assert bind()("left", torch.tensor([1])).requires_grad
    with torch.no_grad():
        assert not bind()("left", torch.tensor([1])).requires_grad


def test_batchnorm_neither_moves_nor_looks_at_the_others():
    model = TinyEncoder(batchnorm=True).train()
    _, bind = make(model=model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    alone, together = bind()("left", torch.tensor([4])), bind()("left", torch.tensor([4, 9, 11]))
    assert torch.allclose(alone[0], together[0])
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert model.left.layers[1].training


def test_no_id_gives_no_row():
    _, bind = make()
    assert bind()("left", torch.zeros(0, dtype=torch.int64)).shape == (0, 5)


def test_broken_items_become_zero_and_are_counted_or_raise():
    items, bind = make(pairs=tiny_pairs(bad=(3, 8)))
    rows = bind()("left", torch.tensor([2, 3, 4]))
    assert rows.norm(dim=1).tolist() == pytest.approx([1, 0, 1])
    assert list(items.bad) == [("left", 3)]
    assert bind()("left", torch.tensor([3, 8])).tolist() == [[0.0] * 5] * 2
    _, strict = make(pairs=tiny_pairs(bad=(3,)), on_error="raise")
    with pytest.raises(BadSample, match="not readable"):
        strict()("left", torch.tensor([3]))


def test_ids_out_of_range_are_told():
    _, bind = make()
    with pytest.raises(DualencError, match=r"right item 24, but ids lie in \[0, 24\)"):
        bind()("right", torch.tensor([24]))
