"""Items that an objective asks for by id: their embeddings, augmentation and errors, in this
process or in workers."""

import multiprocessing

import pytest
import torch

from dualenc.encoders.dual import ITEM_TYPES
from dualenc.errors import BadSample, DualencError
from dualenc.objectives import GlobalCache
from dualenc.training.encoding import PlainEncoding
from dualenc.training.extra_items import ItemEncoder
from tests.helpers.fakes import TinyEncoder, same, tiny_pairs, weights
from tests.helpers.runs import train

CPU = torch.device("cpu")


class TinyImageEncoder(TinyEncoder):
    """Takes its numbers for images, which are read in workers."""

    def __init__(self) -> None:
        super().__init__(batchnorm=True)
        self.left.modality = "image"


def make_items(model=None, pairs=None, **arguments):
    model = model or TinyEncoder(batchnorm=True, shared=True).train()
    return ItemEncoder(model, pairs or tiny_pairs(), PlainEncoding(model, CPU), **arguments)


def test_items_are_embedded_in_the_order_of_their_ids_each_for_itself():
    model = TinyEncoder(batchnorm=True).train()
    items = make_items(model=model)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rows = items("right", torch.tensor([5, 2, 5]))
    assert rows.requires_grad
    assert torch.allclose(rows[0], rows[2])
    assert torch.allclose(rows[1:2], items("right", torch.tensor([2])))
    assert items("left", torch.zeros(0, dtype=torch.int64)).shape == (0, 5)
    assert items.num_encoded == 4
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert model.left.layers[1].training
    with pytest.raises(DualencError, match=r"right item 24, outside \[0, 24\)"):
        items("right", torch.tensor([24]))


def test_augmentation_of_an_item_depends_on_seed_and_batch():
    found = []
    for seed, number in ((1, 4), (1, 4), (1, 5), (2, 4)):
        items = make_items(seed=seed)
        items.begin(number)
        found.append(items("left", torch.tensor([3])))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
    assert not torch.allclose(found[0], found[3])


def test_broken_items_become_zero_or_raise():
    rows = make_items(pairs=tiny_pairs(bad=(3, 8)))("left", torch.tensor([2, 3, 8]))
    assert rows.norm(dim=1).tolist() == pytest.approx([1, 0, 0])
    with pytest.raises(BadSample, match="not readable"):
        make_items(pairs=tiny_pairs(bad=(3,)), on_error="raise")("left", torch.tensor([3]))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_read_images_as_this_process_does(num_workers):
    pairs = tiny_pairs(bad=(5, 8))
    found = []
    for workers in (0, num_workers):
        items = make_items(TinyImageEncoder().train(), pairs, seed=3, num_workers=workers)
        for number, asked in enumerate(([5, 2, 7, 2], [8], [], [1])):
            items.begin(number)
            found += items.sides(
                [("right", torch.tensor([0, 4])), ("left", torch.tensor(asked, dtype=torch.int64))]
            )
        assert len(multiprocessing.active_children()) == workers
        assert items.num_encoded == 4 * 2 + 3 + 1
        items.close()
        assert not multiprocessing.active_children()
    half = len(found) // 2
    assert all(map(torch.equal, found[:half], found[half:]))
    items = make_items(TinyImageEncoder(), pairs, num_workers=num_workers, on_error="raise")
    with pytest.raises(BadSample, match="not readable"):
        items("left", torch.arange(6))
    items.close()


def test_texts_need_no_workers():
    items = make_items(num_workers=2)
    items("left", torch.tensor([3]))
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_training_with_workers_gives_the_same_weights_and_leaves_none(tmp_path, monkeypatch):
    # The rows of the tiny images are written as texts.
    monkeypatch.setitem(ITEM_TYPES, "image", (str, "a text"))
    for workers in (0, 2):
        sizes = {"num_left": 24, "num_right": 24}
        objective = GlobalCache(**sizes, temperature=0.1)
        parts = {
            "model": TinyImageEncoder(),
            "pairs": tiny_pairs(left_modality="image"),
            "objective": objective,
        }
        train(tmp_path / str(workers), num_workers=workers, **parts)
        assert not multiprocessing.active_children()
    assert same(weights(tmp_path / "0"), weights(tmp_path / "2"))
