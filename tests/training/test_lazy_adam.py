"""Tables with sparse gradients: the rows in use, against torch's own embedding bag and
optimizers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dualenc.encoders.token_table import TokenTable
from dualenc.objectives import GlobalCache, InfoNCE
from dualenc.training.lazy_adam import LazyAdamW, sparse_tables
from dualenc.training.optim import build_optimizer, clip_gradients
from tests.helpers.fakes import static_encoder, text_pairs
from tests.helpers.runs import train

ROWS = 12
OFFSETS = torch.tensor([0, 2, 2, 5])


def new_bag() -> nn.EmbeddingBag:
    torch.manual_seed(0)
    return nn.EmbeddingBag(ROWS, 3, dtype=torch.float64)


def new_table() -> TokenTable:
    return TokenTable(new_bag())


def tokens(step: int) -> Tensor:
    """Seven token ids, some twice, of the first ten rows."""
    return torch.from_numpy(np.random.default_rng(step).integers(0, 10, 7))


def backward(table: nn.EmbeddingBag, step: int) -> None:
    """A loss whose gradient in the means differs from text to text."""
    means = table(tokens(step), OFFSETS)
    (means * torch.arange(1.0, 13, dtype=torch.float64).view(4, 3).sin()).sum().backward()


def test_means_and_gradients_are_those_of_an_embedding_bag():
    """Several passes add up; a text without tokens gives 0."""
    ours = new_table()
    theirs = new_bag()
    assert torch.equal(ours(tokens(0), OFFSETS), theirs(tokens(0), OFFSETS))
    assert not ours(tokens(0), OFFSETS)[1].any()
    for step in range(2):
        backward(ours, step)
        backward(theirs, step)
    assert ours.weight.grad.is_sparse
    assert torch.allclose(ours.weight.grad.to_dense(), theirs.weight.grad, rtol=1e-14)
    with torch.no_grad():
        assert torch.equal(ours(tokens(0), OFFSETS), theirs(tokens(0), OFFSETS))


def test_a_table_shares_the_weight_of_its_bag():
    bag = new_bag()
    assert TokenTable(bag).weight is bag.weight


def test_rows_that_every_step_uses_move_as_under_adamw():
    """With weight decay, gradient clipping and a learning rate that changes."""
    ours = new_table()
    theirs = new_bag()
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1}
    optimizers = (
        LazyAdamW(ours.parameters(), **settings),
        torch.optim.AdamW(theirs.parameters(), **settings),
    )
    every_row = torch.arange(ROWS)
    for step in range(4):
        for table, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.zero_grad()
            (table(every_row, every_row) * (1 + step + every_row[:, None])).sum().backward()
            clip_gradients(list(table.parameters()), 1.0)
            optimizer.step()
    assert torch.allclose(ours.weight, theirs.weight, rtol=1e-12)


def test_other_rows_stand_still_as_under_torchs_sparse_adam():
    ours = new_table()
    theirs = new_table()
    optimizers = (
        LazyAdamW(ours.parameters(), lr=0.1, weight_decay=0.0, eps=1e-14),
        torch.optim.SparseAdam(theirs.parameters(), lr=0.1, eps=1e-14),
    )
    for step in range(5):
        before = ours.weight.detach().clone()
        for table, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            backward(table, step)
            optimizer.step()
        # The tokens of texts 0, 2 and 3: text 1 has none.
        unused = sorted(set(range(ROWS)) - set(tokens(step).tolist()))
        assert torch.equal(ours.weight[unused], before[unused])
    assert torch.allclose(ours.weight, theirs.weight, rtol=1e-9)


def test_moments_of_unused_rows_do_not_decay():
    """A loop over numbers, by Algorithm 1 of Kingma and Ba with decoupled decay, of the rows in use
    alone."""
    table = new_table()
    optimizer = LazyAdamW(table.parameters(), lr=0.1, betas=(0.8, 0.9), weight_decay=0.2)
    weight = table.weight.detach().tolist()
    first = np.zeros((ROWS, 3)).tolist()
    second = np.zeros((ROWS, 3)).tolist()
    for step in range(1, 6):
        optimizer.zero_grad()
        backward(table, step)
        gradient = table.weight.grad.to_dense().tolist()
        optimizer.step()
        for row in set(tokens(step).tolist()):
            for column in range(3):
                g = gradient[row][column]
                first[row][column] = 0.8 * first[row][column] + 0.2 * g
                second[row][column] = 0.9 * second[row][column] + 0.1 * g * g
                mean = first[row][column] / (1 - 0.8**step)
                scale = math.sqrt(second[row][column] / (1 - 0.9**step)) + 1e-8
                weight[row][column] = weight[row][column] * (1 - 0.1 * 0.2) - 0.1 * mean / scale
    assert torch.allclose(table.weight, torch.tensor(weight, dtype=torch.float64), rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        (
            "sgd",
            lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, momentum=0.7, nesterov=True),
        ),
        ("momentum", lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, momentum=0.7)),
    ],
)
def test_other_optimizers_get_dense_gradients(name, reference):
    ours = new_table()
    theirs = new_bag()
    optimizers = (
        build_optimizer([ours], name, 0.1, weight_decay=0.1, momentum=0.7),
        reference(theirs.parameters()),
    )
    for step in range(3):
        for table, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            backward(table, step)
            optimizer.step()
    assert torch.allclose(ours.weight, theirs.weight, rtol=1e-12)


def test_adamw_is_lazy_where_a_table_is_trained():
    table = new_table()
    assert sparse_tables([nn.ModuleList([table, nn.Linear(2, 2)])]) == [table.weight]
    assert type(build_optimizer([table])) is LazyAdamW
    assert type(build_optimizer([nn.Linear(2, 2)])) is torch.optim.AdamW
    table.weight.requires_grad_(False)
    assert sparse_tables([table]) == []


TRAININGS = {
    "clipped": {"max_gradient_norm": 0.05},
    "accumulated": {"gradient_accumulation": 2},
    "in chunks": {"chunk_size": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [InfoNCE, GlobalCache])
@pytest.mark.parametrize("name", list(TRAININGS))
def test_training_with_sgd_is_that_of_dense_gradients(tmp_path, name, kind):
    """Items outside the batch included."""
    pairs = text_pairs()
    finished = []
    for folder in ("sparse", "dense"):
        model = static_encoder()
        if folder == "dense":
            bag = model.left.backbone.embedding
            model.left.backbone.embedding = nn.EmbeddingBag(
                bag.num_embeddings, bag.embedding_dim, _weight=bag.weight
            )
        settings = {
            "optimizer": "sgd",
            "learning_rate": 0.5,
            "max_steps": 8,
            "save_every": None,
            **TRAININGS[name],
        }
        criterion = kind(num_left=pairs.num_left, num_right=pairs.num_right, temperature=0.2)
        before = next(model.parameters()).detach().clone()
        train(tmp_path / folder, model=model, pairs=pairs, objective=criterion, **settings)
        finished.append(next(model.parameters()).detach())
        assert (finished[-1] - before).abs().max() > 0.01
    assert torch.allclose(*finished, atol=1e-6)
