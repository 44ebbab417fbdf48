"""Two processes train the model that one process trains, with the same global batches."""

import os
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import launch_command, launch_command_parser

from dualenc.batching import RandomBatches
from dualenc.objectives import (
    EMC2,
    ISIR,
    SACLR,
    Distilled,
    GlobalCache,
    InfoNCE,
    ISogCLR,
    MomentumQueue,
    NegativeCache,
    SogCLR,
)
from dualenc.training.log import read_metrics
from tests.training.fakes import TinyEncoder, tiny_objective, tiny_pairs, vector_encoder, vector_pairs, weights
from tests.training.launched import free_port, launch
from tests.training.runs import FixedEvaluator, train
from tests.training.test_every_objective import make

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

CASES = {
    "plain": {"save_every": 2},
    "uneven": {"batch_size": 5},
    "accumulated": {"gradient_accumulation": 2, "chunk_size": 2},
    "bad samples": {"bad": (1, 4, 7)},
    "negatives": {"negatives": [[(i + 3) % 24] * (i % 3) for i in range(24)]},
    "evaluated": {"evaluate_every": 5},
    "drawn proposals": {"proposals": 7},
    "momentum encoder, batchnorm": {"momentum": 0.8, "batch_size": 5, "batchnorm": True},
    "momentum encoder, accumulated": {"momentum": 0.8, "gradient_accumulation": 2, "chunk_size": 2},
    "batchnorm": {"batchnorm": True, "batch_size": 5},
    "batchnorm of one tower": {"batchnorm": True, "shared": True, "evaluate_every": 5},
}


def one_case(
    output: Path, bad=(), negatives=None, proposals=None, momentum=None, batchnorm=False, shared=False, **changes
) -> None:
    """12 steps without dropout, whose masks are drawn per process."""
    evaluator = FixedEvaluator(0.1, 0.2, 0.4, 0.3) if "evaluate_every" in changes else None
    pairs = tiny_pairs(bad=bad, negatives=negatives)
    if proposals:
        changes["objective"] = EMC2(num_left=24, proposals=proposals).double()
    if momentum:
        changes["objective"] = MomentumQueue(queue_size=16, momentum=momentum, temperature=0.2).double()
    changes = {"save_every": None, **changes}
    train(output, model=TinyEncoder(batchnorm=batchnorm, shared=shared), pairs=pairs, evaluator=evaluator, **changes)


def train_vectors(output: Path) -> None:
    """Adapters in float32, with mined negatives."""
    pairs = vector_pairs(output.parent / "one")
    train(output / "vectors", model=vector_encoder(), pairs=pairs, objective=tiny_objective(pairs).float())


# Objectives with collectives of their own, and one without.
WITH_POSITIVES = [SogCLR, SACLR, ISogCLR, EMC2, ISIR, GlobalCache, NegativeCache, InfoNCE, MomentumQueue]


def train_with_positives(output: Path) -> None:
    """Half of the right items have two pairs, so that some parts list no positives; one rank has an empty part."""
    right_id = [*range(12), *(12 + number // 2 for number in range(12))]
    first_batch = RandomBatches(24, 4, seed=0).select(0)[0]
    bad = tuple(first_batch[2:].tolist())
    settings = {"batch_size": 4, "epochs": 2, "save_every": None, "timeout_minutes": 0.5}
    for kind in WITH_POSITIVES:
        pairs = tiny_pairs(bad=bad, right_id=right_id)
        train(output / kind.__name__, model=TinyEncoder(), pairs=pairs, objective=make(kind), **settings)
    negatives = [[(i + 3) % 24] * (i % 2) for i in range(24)]
    judged = {"negatives": negatives, "scores": range(24), "negative_scores": range(12), "weights": range(24)}
    for kind in (InfoNCE, SogCLR):
        pairs = tiny_pairs(bad=bad, right_id=right_id, **judged)
        objective = Distilled(kind(num_left=24, temperature=0.2), "kl").double()
        name = f"{kind.__name__}, judged"
        train(output / name, model=TinyEncoder(), pairs=pairs, objective=objective, **settings)


def all_cases(output: Path) -> None:
    for name, changes in CASES.items():
        one_case(output / name, **changes)
    train_vectors(output)
    # A run that began on one process is resumed on two.
    train(output / "grown", model=TinyEncoder(), resume=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every case with one process and with two."""
    folder = tmp_path_factory.mktemp("runs")
    one, two = folder / "one", folder / "two"
    one.mkdir()
    two.mkdir()
    begin_grown(two / "grown")
    vector_pairs(one)  # written before two processes want it
    ranks = launch(two, all_cases, two, ranks=2)
    for name, changes in CASES.items():
        one_case(one / name, **changes)
    train_vectors(one)
    ended = [process.end(300) for process in ranks]
    assert [code for code, _ in ended] == [0, 0], ended
    return one, two


class Stop(Exception):
    """The machine is needed elsewhere."""


def begin_grown(output: Path) -> None:
    objective = tiny_objective(tiny_pairs())
    steps = iter(range(7))

    def stop(*_):
        if next(steps) == 6:
            raise Stop

    objective.register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        train(output, model=TinyEncoder(), objective=objective)


def assert_same_model(first: Path, second: Path, atol: float = 1e-12) -> None:
    ours, theirs = weights(first), weights(second)
    for name, weight in ours.items():
        assert torch.allclose(weight, theirs[name], rtol=1e-9, atol=atol), name


@pytest.mark.parametrize("name", list(CASES))
def test_two_processes_give_the_model_of_one(runs, name):
    one, two = runs
    # The bias before a BatchNorm has no gradient but rounding, which AdamW divides by its own size.
    assert_same_model(one / name, two / name, atol=1e-8 if "batchnorm" in name else 1e-12)


def test_two_processes_give_the_adapters_of_one(runs):
    assert_same_model(*(folder / "vectors" for folder in runs), atol=2e-6)


def test_ranks_agree_on_their_exchanges_whatever_positives_their_parts_list(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    two.mkdir()
    ranks = launch(two, train_with_positives, two, ranks=2)
    train_with_positives(one)
    ended = [process.end(120) for process in ranks]
    assert [code for code, _ in ended] == [0, 0], ended
    for folder in one.iterdir():
        assert_same_model(folder, two / folder.name)


def test_the_log_is_that_of_one_process(runs):
    logs = [read_metrics(folder / "bad samples" / "metrics.jsonl") for folder in runs]
    for ours, theirs in zip(*logs, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)


def test_items_encoded_are_those_of_all_processes(runs):
    """A few more than on one process: an item that two processes need is encoded by both."""
    logs = [read_metrics(folder / "drawn proposals" / "metrics.jsonl") for folder in runs]
    assert len(logs[0]) == 4
    for one, two in zip(*logs, strict=True):
        assert 0 < one["items_encoded"] <= two["items_encoded"] <= 1.5 * one["items_encoded"]


def test_chains_move_as_on_one_process(runs):
    logs = [read_metrics(folder / "drawn proposals" / "metrics.jsonl") for folder in runs]
    for one, two in zip(*logs, strict=True):
        for name in ("state/chains_moved", "state/chains_begun"):
            assert one[name] == pytest.approx(two[name], abs=1e-6)


def test_more_processes_may_resume_from_a_checkpoint(runs):
    one, two = runs
    assert_same_model(one / "plain", two / "grown")
    steps = [line["step"] for line in read_metrics(two / "grown" / "metrics.jsonl")]
    assert steps == [3, 6, 9, 12]


def accelerate_launch(arguments: list[str]) -> None:
    """The command, in a process that has accelerate at hand; it starts Python anew for each rank."""
    os.environ["PYTHONPATH"] = str(ROOT)
    os.chdir(ROOT)
    launch_command(launch_command_parser().parse_args(arguments))


def test_accelerate_launch_with_two_processes(tmp_path, runs):
    """`--multi_gpu` is what makes accelerate start several processes, ACCELERATE_USE_CPU what puts them on CPU."""
    command = ["--num_processes", "2", "--multi_gpu", "--main_process_port", str(free_port())]
    command += ["--module", "tests.training.launched", str(tmp_path / "run")]
    (process,) = launch(tmp_path, accelerate_launch, command)
    code, written = process.end(300)
    assert code == 0, written[-2000:]
    assert "rank 0 of 2" in written
    assert "rank 1 of 2" in written
    assert_same_model(runs[0] / "plain", tmp_path / "run")
