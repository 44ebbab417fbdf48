"""The loop knows no objective: each one trains, and is resumed exactly, with its own state."""

import signal

import pytest
import torch

import dualenc.objectives
from dualenc.objectives import ISIR, GlobalCache, InfoNCE, MomentumQueue, NegativeCache, Objective, SogCLR
from dualenc.objectives.matryoshka import Wrapper
from tests.training.fakes import TinyEncoder, kill_this_process, same, tiny_pairs, weights
from tests.training.runs import run_and_die, train

CLASSES = sorted(
    (c for name in dualenc.objectives.__all__ if isinstance(c := getattr(dualenc.objectives, name), type)),
    key=lambda c: c.__name__,
)
OBJECTIVES = [c for c in CLASSES if issubclass(c, Objective) and c is not Objective and not issubclass(c, Wrapper)]


def make(kind, views=False):
    return kind(num_left=24, num_right=24, temperature=0.2, seed=1, views=views).double()


def train_until(output, kind, at_batch, settings):
    objective, calls = make(kind), []

    def count(*_):
        calls.append(1)
        if len(calls) == at_batch:
            kill_this_process()

    objective.register_forward_pre_hook(count)
    train(output, objective=objective, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "chunk_size"),
    [*((kind, None) for kind in OBJECTIVES), (ISIR, 4)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_killed_and_resumed_equals_unbroken(tmp_path, kind, chunk_size):
    settings = {"chunk_size": chunk_size, "epochs": 2}
    result = train(tmp_path / "whole", objective=make(kind), **settings)
    assert result.steps == 8
    assert run_and_die(train_until, tmp_path / "broken", kind, 8, settings) == -signal.SIGKILL
    train(tmp_path / "broken", objective=make(kind), resume=True, **settings)
    assert same(weights(tmp_path / "broken"), weights(tmp_path / "whole"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SogCLR, ISIR, GlobalCache, MomentumQueue], ids=lambda kind: kind.__name__)
def test_gradient_caching_changes_nothing(tmp_path, kind):
    for name, chunk_size in (("plain", None), ("cached", 4)):
        train(tmp_path / name, model=TinyEncoder(), objective=make(kind), chunk_size=chunk_size, save_every=None)
    plain, cached = weights(tmp_path / "plain"), weights(tmp_path / "cached")
    assert all(torch.allclose(plain[key], cached[key], rtol=1e-8, atol=1e-12) for key in plain)


@pytest.mark.parametrize("kind", [InfoNCE, ISIR, NegativeCache, MomentumQueue], ids=lambda kind: kind.__name__)
def test_two_views(tmp_path, kind):
    """One tower, both sides augmentations of the same item."""
    pairs = tiny_pairs()
    pairs.views, pairs.right_items = True, pairs.left_items
    model = TinyEncoder(shared=True, batchnorm=True)
    result = train(tmp_path, pairs=pairs, model=model, objective=make(kind, views=True), epochs=1)
    assert result.steps == 4
