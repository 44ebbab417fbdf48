"""SGD with momentum and a cosine to zero: the same numbers as torch's own scheduler, and a probe that learns."""

import numpy as np
import pytest
import torch
from torch import nn

from dualenc.errors import DualencError
from dualenc.evaluation.probe import feature_batches, predict, sgd_probe


def data(count: int = 64, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, count)
    return (np.eye(classes)[labels] @ rng.normal(size=(classes, 5)) + 0.1 * rng.normal(size=(count, 5))), labels


def test_the_weights_are_those_of_a_plain_loop_with_torchs_cosine() -> None:
    features, labels = data()
    batches = feature_batches(features, labels, batch_size=20, seed=1)
    found = sgd_probe(batches, 5, 3, steps_per_epoch=4, epochs=6)
    plain = nn.Linear(5, 3)
    nn.init.normal_(plain.weight, std=0.01, generator=torch.Generator().manual_seed(0))
    nn.init.zeros_(plain.bias)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-6)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=24)
    for epoch in range(6):
        for rows, classes in batches(epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(rows), classes).backward()
            optimizer.step()
            scheduler.step()
    assert scheduler.get_last_lr() == [pytest.approx(0.0, abs=1e-9)]
    torch.testing.assert_close(found.weight, plain.weight)


def test_it_learns_and_leaves_the_global_generator_alone() -> None:
    features, labels = data()
    state = torch.get_rng_state()
    found = sgd_probe(feature_batches(features, labels, batch_size=16), 5, 3, steps_per_epoch=4, epochs=30)
    assert torch.equal(torch.get_rng_state(), state)
    assert np.mean(predict(found, features) == labels) > 0.95


def test_an_epoch_holds_every_image_once_in_an_order_of_its_own() -> None:
    features, labels = np.arange(10.0)[:, None], np.arange(10)
    batches = feature_batches(features, labels, batch_size=4, seed=3)
    orders = [torch.cat([rows[:, 0] for rows, _ in batches(epoch)]).tolist() for epoch in (0, 0, 1)]
    assert sorted(orders[0]) == list(range(10))
    assert orders[0] == orders[1] != orders[2]
    assert all((rows[:, 0] == classes).all() for rows, classes in batches(5))


def test_mistakes_are_one_line() -> None:
    features, labels = data()
    batches = feature_batches(features * 1e30, labels)
    with pytest.raises(DualencError, match="choose a smaller learning_rate"):
        sgd_probe(batches, 5, 3, steps_per_epoch=1, epochs=50, learning_rate=1e30)
    with pytest.raises(DualencError, match="epochs=0"):
        sgd_probe(batches, 5, 3, steps_per_epoch=1, epochs=0)
    with pytest.raises(DualencError, match="train: 64 images but labels of shape"):
        next(iter(feature_batches(features, labels[:3])(0)))
