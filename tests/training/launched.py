"""What is started as a process of its own in the tests: a small run that says what it does, and may be slow.

`python -m tests.training.launched OUTPUT [JSON]`, the JSON with settings of the trainer, and with

    delay       seconds that each batch takes
    hang        [rank, batch, seconds] that one rank sleeps at one of its batches
    evaluation  seconds that an evaluation takes; it touches the file `evaluating` beside the output
    dropout     of the model
"""

import json
import sys
import time
from pathlib import Path

from accelerate import PartialState

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.training.signals import Stopped
from tests.training.fakes import TinyEncoder, tiny_objective, tiny_pairs
from tests.training.runs import train


class SlowEvaluator:
    """Takes its time; the score is of the number of calls."""

    primary = "score"

    def __init__(self, seconds, sign):
        self.seconds, self.sign, self.calls = seconds, sign, 0

    def __call__(self, model):
        self.calls += 1
        if self.calls > 1:
            self.sign.touch()
        time.sleep(self.seconds)
        return {"score": float(sum(p.sum() for p in model.parameters()))}


def main(output: Path, settings: dict) -> None:
    delay, hang = settings.pop("delay", 0), settings.pop("hang", (-1, 0, 0))
    evaluation, dropout = settings.pop("evaluation", None), settings.pop("dropout", 0.0)
    if evaluation is not None:
        settings["evaluator"] = SlowEvaluator(evaluation, output.with_name("evaluating"))
    objective = tiny_objective(tiny_pairs())
    calls = 0

    def wait(*_):
        nonlocal calls
        calls += 1
        if (distributed.rank(), calls) == (hang[0], hang[1]):
            print("hanging", flush=True)
            time.sleep(hang[2])
        time.sleep(delay)

    objective.register_forward_pre_hook(wait)
    train(output, model=TinyEncoder(dropout=dropout), objective=objective, **settings)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
    except DualencError as error:  # as the command line does
        print(f"dualenc: error: {error}", file=sys.stderr)
        sys.exit(2)
    except Stopped:
        PartialState().destroy_process_group()
        raise
    sys.stdout.write(f"rank {distributed.rank()} of {distributed.world_size()}\n")
    PartialState().destroy_process_group()
