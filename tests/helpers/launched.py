"""Small runs in processes of their own, which may be slow, get signals and be killed, alone or as
one of several ranks.

They are forked from a server that has imported everything and done nothing else: torch and
accelerate take 8 seconds to import.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm.optim  # noqa: F401  # a run imports this and the next late
import torch
import transformers.optimization  # noqa: F401
from accelerate import PartialState

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.training.evaluators import RetrievalEvaluator
from tests.helpers.fakes import TinyEncoder, tiny_objective, tiny_pairs
from tests.helpers.runs import train

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["pytest", "tests.helpers.launched"])


class SlowEvaluator:
    """Takes its time and touches a file from its second call on; the score is of the weights."""

    primary = "score"

    def __init__(self, seconds: float, sign: Path) -> None:
        self.seconds, self.sign, self.calls = seconds, sign, 0

    def __call__(self, model: TinyEncoder) -> dict[str, float]:
        self.calls += 1
        if self.calls > 1:
            self.sign.touch()
        time.sleep(self.seconds)
        return {"score": float(sum(p.sum() for p in model.parameters()))}


def small_run(
    output: Path,
    delay: float = 0.0,
    hang: tuple[int, int, float] = (-1, 0, 0.0),
    evaluation: float | None = None,
    dropout: float = 0.0,
    **settings: Any,
) -> None:
    """A run whose batches take `delay` seconds, an evaluation `evaluation`; rank hang[0] sleeps at
    batch hang[1]."""
    if evaluation is not None:
        settings["evaluator"] = SlowEvaluator(evaluation, output.with_name("evaluating"))
    objective = tiny_objective(tiny_pairs())
    calls = 0

    def wait(*_: Any) -> None:
        nonlocal calls
        calls += 1
        time.sleep(hang[2] if (distributed.rank(), calls) == hang[:2] else delay)

    objective.register_forward_pre_hook(wait)
    train(output, model=TinyEncoder(dropout=dropout), objective=objective, **settings)


def slowly_evaluated_run(output: Path, **settings: Any) -> None:
    """A run whose evaluations after steps take 0.2 seconds for a batch, and touch a file."""
    model = TinyEncoder()
    objective = tiny_objective(tiny_pairs())
    steps = 0

    def step(*_: Any) -> None:
        nonlocal steps
        steps += 1

    def wait(tower: Any, *_: Any) -> None:
        if steps and not tower.training:
            output.with_name("evaluating").touch()
            time.sleep(0.2)

    objective.register_forward_pre_hook(step)
    for tower in (model.left, model.right):
        tower.register_forward_pre_hook(wait)
    evaluator = RetrievalEvaluator(pairs=tiny_pairs(64), batch_size=1)
    train(output, model=model, objective=objective, evaluator=evaluator, **settings)


class Launched:
    """A process of its own, which leads a process group and writes to a file."""

    def __init__(self, written: Path, environment: dict[str, str], *call: Any) -> None:
        self.written = written
        self.process = SERVER.Process(target=_begin, args=(written, environment, *call))
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def end(self, seconds: float = 120) -> tuple[int, str]:
        """Wait for it: its exit code, minus the signal that killed it, and what it has written."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            raise TimeoutError(self.written.read_text())
        return self.process.exitcode, self.written.read_text()


def launch(
    folder: Path, function: Callable[..., Any], *arguments: Any, ranks: int = 1, **named: Any
) -> list[Launched]:
    """Run a function in a process, or in several that are the ranks of one run."""
    launched = []
    port = str(free_port())
    for rank in map(str, range(ranks)):
        environment = {"ACCELERATE_USE_CPU": "true"}
        if ranks > 1:
            environment |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "WORLD_SIZE": str(ranks),
            }
            environment |= {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": str(ranks)}
        launched.append(
            Launched(folder / f"written-{rank}.txt", environment, function, arguments, named)
        )
    return launched


def free_port() -> int:
    """Where the ranks of a run meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _begin(
    written: Path,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: Any,
) -> None:
    os.setsid()
    multiprocessing.set_start_method(
        "fork", force=True
    )  # for its data workers, as in a program of its own
    os.environ.update(environment)
    with open(written, "wb", buffering=0) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # tests that run in the background ignore Ctrl-C
    os.fsync = lambda _: None  # as in the tests' own process
    torch.set_num_threads(1)
    code: Any = 0
    try:
        function(*arguments, **named)
    except DualencError as error:  # as the command line does
        print(f"dualenc: error: {error}", file=sys.stderr)
        code = 2
    except SystemExit as stopped:
        code = stopped.code
    except KeyboardInterrupt:
        code = 130
    if (
        code != 2 and distributed.is_initialized()
    ):  # otherwise another rank is gone, and would be waited for
        PartialState().destroy_process_group()
    sys.exit(code)  # only here, where what the traceback held, data workers among it, is gone
