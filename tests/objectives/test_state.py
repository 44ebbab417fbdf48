"""The state dict is the whole truth: a run that stops and resumes is the run that never stopped,
bit by bit."""

from __future__ import annotations

import io

import pytest
import torch
from scipy.stats import kstest
from torch.nn.functional import normalize

from dualenc.errors import DualencError
from dualenc.objectives import ISIR, InfoNCE, Matryoshka, MomentumQueue, SogCLR
from dualenc.objectives.draws import SharedRandom
from tests.helpers.every import (
    EVERY,
    FIRST,
    STEPS,
    WRAPPED,
    Run,
    Setting,
    assert_same_state,
    momentum_keys,
)

FEW = FIRST + WRAPPED
WITH_TABLES = [
    s for s in FEW if s.objective.needs_num_left and s.objective.__name__ != "ExactGlobal"
]


@pytest.mark.slow
@pytest.mark.parametrize("setting", EVERY, ids=lambda s: s.name)
@pytest.mark.parametrize("stop", [2, pytest.param(1, marks=pytest.mark.nightly)])
def test_resuming_is_bit_exact(setting: Setting, stop: int) -> None:
    whole, first, second = Run(setting), Run(setting), Run(setting)
    expected = [whole.step(step) for step in range(STEPS)]
    for step in range(stop):
        first.step(step)
    file = io.BytesIO()
    torch.save(first.state(), file)
    second.load(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for step in range(stop, STEPS):
        assert torch.equal(second.step(step), expected[step])
    assert_same_state(second.state()["criterion"], whole.state()["criterion"])


@pytest.mark.slow
@pytest.mark.parametrize("setting", FEW, ids=lambda s: s.name)
def test_an_empty_batch_is_harmless(setting: Setting) -> None:
    training = Run(setting)
    nothing = torch.zeros(0, dtype=torch.long)
    for _ in range(2):
        left, right = (training.towers.encode(side, nothing) for side in ("left", "right"))
        loss = training.criterion(
            *(left, right, nothing, nothing, training.towers.encode),
            **momentum_keys(training.criterion, left, right),
        ).loss
        loss.backward()
        assert float(loss.detach()) == 0
        assert torch.isfinite(training.step(0)).all()


@pytest.mark.slow
@pytest.mark.parametrize("setting", FEW, ids=lambda s: s.name)
@pytest.mark.parametrize("how", ["eval mode", "no gradient"])
def test_evaluation_gives_one_value_and_leaves_the_state_alone(setting: Setting, how: str) -> None:
    training, undisturbed = Run(setting), Run(setting)
    for step in range(2):
        training.step(step)
        undisturbed.step(step)
    before = training.state()["criterion"]
    training.criterion.train(how != "eval mode")
    with torch.set_grad_enabled(how != "no gradient"):
        losses = [float(training.criterion(**training.given(3)).loss.detach()) for _ in range(2)]
    assert losses[0] == losses[1]
    assert_same_state(training.state()["criterion"], before)
    training.criterion.train()
    assert torch.equal(training.step(2), undisturbed.step(2))


@pytest.mark.parametrize("setting", WITH_TABLES, ids=lambda s: s.name)
def test_a_state_of_another_size_is_refused_in_one_line(setting: Setting) -> None:
    training = Run(setting)
    training.step(0)
    other = setting.build(num_left=21, num_right=71)
    with pytest.raises(DualencError, match=r"size mismatch for .* of other num_left") as caught:
        other.load_state_dict(training.criterion.state_dict())
    assert "\n" not in str(caught.value)


def test_a_state_of_another_objective_is_refused() -> None:
    for kind, saved in ((SogCLR, InfoNCE), (InfoNCE, SogCLR), (MomentumQueue, InfoNCE)):
        with pytest.raises(
            DualencError, match=rf"{kind.__name__}: .*key\(s\) in state_dict.* another objective"
        ):
            kind(num_left=9).load_state_dict(saved(num_left=9).state_dict())
    with pytest.raises(DualencError, match=r"size mismatch for queues\.0\.ids"):
        MomentumQueue(queue_size=5).load_state_dict(MomentumQueue(queue_size=6).state_dict())


LIKE = torch.zeros(())


def test_draws_are_uniform_within_and_across_numbers() -> None:
    random = SharedRandom(0)
    assert kstest(random.uniform(5000, like=LIKE).numpy(), "uniform").pvalue > 0.001
    firsts = torch.stack([SharedRandom(seed).uniform(1, like=LIKE) for seed in range(1000)])
    assert kstest(firsts.flatten().numpy(), "uniform").pvalue > 0.001
    assert (
        kstest(
            torch.cat([random.uniform(1, like=LIKE) for _ in range(1000)]).numpy(), "uniform"
        ).pvalue
        > 0.001
    )


def test_draws_continue_from_their_state() -> None:
    random = SharedRandom(7)
    random.uniform(5, like=LIKE)
    other = SharedRandom(0)
    other.load_state_dict(random.state_dict())
    device = torch.device("cpu")
    for _ in range(3):
        assert torch.equal(random.uniform(4, like=LIKE), other.uniform(4, like=LIKE.double()))
        assert torch.equal(
            random.integers(100, 5, device=device), other.integers(100, 5, device=device)
        )
        assert torch.equal(random.permutation(6, device), other.permutation(6, device))


@pytest.mark.parametrize("recent", [64, 500])
def test_a_memory_of_another_size_is_refused(recent: int) -> None:
    """Its items would stand in slots that are not theirs."""
    given = [ISIR(num_left=2000, recent=size) for size in (200, recent)]
    rows = normalize(torch.randn(8, 5), dim=1)
    for criterion in given:
        criterion(rows, rows, torch.arange(8), torch.arange(8), lambda side, ids: rows[ids % 8])
    with pytest.raises(DualencError, match=r"ISIR: .*size mismatch for memories"):
        given[1].load_state_dict(given[0].state_dict())
    assert given[1].settings != given[0].settings
    lengths = [Matryoshka(SogCLR(num_left=4), dims=dims).settings for dims in ([4, 16], [8, 16])]
    assert lengths[0] != lengths[1]
