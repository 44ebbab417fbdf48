"""Two processes train the model that one process trains, with the same global batches."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from dualenc.objectives import EMC2
from dualenc.training.log import read_metrics
from tests.training.fakes import TinyEncoder, tiny_pairs, weights
from tests.training.runs import FixedEvaluator, train

ROOT = Path(__file__).resolve().parents[2]

CASES = {
    "plain": {},
    "uneven": {"batch_size": 5},
    "accumulated": {"gradient_accumulation": 2, "chunk_size": 2},
    "bad samples": {"bad": (1, 4, 7)},
    "negatives": {"negatives": [[(i + 3) % 24] * (i % 3) for i in range(24)]},
    "evaluated": {"evaluate_every": 5},
    "neighbours": {"proposals": 7},
    "batchnorm": {"batchnorm": True, "batch_size": 5},
    "batchnorm of one tower": {"batchnorm": True, "shared": True, "evaluate_every": 5},
    "items beside": {"proposals": 7, "save_every": None},
}


def one_case(output: Path, bad=(), negatives=None, proposals=None, batchnorm=False, shared=False, **changes) -> None:
    """12 steps without dropout, whose masks are drawn per process."""
    evaluator = FixedEvaluator(0.1, 0.2, 0.4, 0.3) if "evaluate_every" in changes else None
    pairs = tiny_pairs(bad=bad, negatives=negatives)
    if proposals:
        changes["objective"] = EMC2(num_left=24, proposals=proposals, neighbor_share=0.5, neighbors=3).double()
    train(output, model=TinyEncoder(batchnorm=batchnorm, shared=shared), pairs=pairs, evaluator=evaluator, **changes)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def join(rank: int, world: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank)
    )
    torch.set_num_threads(1)


def all_cases(rank: int, port: int, output: Path) -> None:
    join(rank, 2, port)
    for name, changes in CASES.items():
        one_case(output / name, **changes)
    # A run that began on one process goes on on two.
    train(output / "grown", model=TinyEncoder(), resume=True)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every case with one process and with two."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    for name, changes in CASES.items():
        one_case(one / name, **changes)
    begin_grown(two / "grown")
    mp.spawn(all_cases, args=(free_port(), two), nprocs=2)
    return one, two


class Stop(Exception):
    """The machine is needed elsewhere."""


def begin_grown(output: Path) -> None:
    from tests.training.fakes import tiny_objective

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


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_two_processes_give_the_model_of_one(runs, name):
    one, two = runs
    # The bias before a BatchNorm has no gradient but rounding, which AdamW divides by its own size.
    assert_same_model(one / name, two / name, atol=1e-8 if "batchnorm" in name else 1e-12)


def test_the_log_is_that_of_one_process(runs):
    logs = [read_metrics(folder / "bad samples" / "metrics.jsonl") for folder in runs]
    for ours, theirs in zip(*logs, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)


def test_items_encoded_are_those_of_all_processes(runs):
    """A few more than on one process: an item that two processes need is encoded by both."""
    logs = [read_metrics(folder / "items beside" / "metrics.jsonl") for folder in runs]
    for one, two in zip(*logs, strict=True):
        assert 0 < one["items_encoded"] <= two["items_encoded"] <= 1.5 * one["items_encoded"]


def test_more_processes_may_go_on_with_a_checkpoint(runs):
    one, two = runs
    assert_same_model(one / "plain", two / "grown")
    steps = [line["step"] for line in read_metrics(two / "grown" / "metrics.jsonl")]
    assert steps == [3, 6, 9, 12]


@pytest.mark.slow
def test_accelerate_launch_with_two_processes(tmp_path, runs):
    """`--multi_gpu` is what makes accelerate start several processes, ACCELERATE_USE_CPU what puts them on CPU."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--multi_gpu"]
    command += ["--main_process_port", str(free_port()), "-m", "tests.training.launched", str(tmp_path / "run")]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "rank 0 of 2" in done.stdout
    assert "rank 1 of 2" in done.stdout
    assert_same_model(runs[0] / "plain", tmp_path / "run")
