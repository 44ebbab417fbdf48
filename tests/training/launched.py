"""What `accelerate launch` runs in the tests: the plain case, and who took part."""

import sys
from pathlib import Path

from accelerate import PartialState

from dualenc import distributed
from tests.training.fakes import TinyEncoder
from tests.training.runs import train

if __name__ == "__main__":
    train(Path(sys.argv[1]), model=TinyEncoder())
    sys.stdout.write(f"rank {distributed.rank()} of {distributed.world_size()}\n")
    PartialState().destroy_process_group()
