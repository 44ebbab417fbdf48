"""The walk of a pair in docs/design.md names what a debugger shows, in its order."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import dualenc
from dualenc.data import PairDataset
from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.objectives import InfoNCE
from dualenc.training import Trainer

PACKAGE = Path(dualenc.__file__).parent
PAGE = PACKAGE.parent / "docs" / "design.md"
BERT = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def steps_of_the_page() -> list[tuple[str, str]]:
    """File and function of each numbered step; a class stands for its methods."""
    section = PAGE.read_text(encoding="utf-8").partition("## Life of a training pair")[2]
    steps = re.findall(r"^\d+\. .*?`(\w+/\w+\.py)` \(`([\w.]+)", section, flags=re.MULTILINE)
    assert len({file for file, _ in steps}) == len(steps) == 10
    return steps


@pytest.mark.slow
def test_a_pair_passes_through_the_modules_of_the_page(tmp_path: Path) -> None:
    calls: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            name = f"{path.relative_to(PACKAGE).as_posix()}:{frame.f_code.co_qualname}"
            calls.append(tuple(name.split(":")))

    questions = [f"question {number}" for number in range(8)]
    answers = [f"the answer {number}" for number in range(8)]
    tokenizer = train_tokenizer([*questions, *answers], vocab_size=300)
    config = {**BERT, "intermediate_size": 8, "vocab_size": len(tokenizer)}
    model = TextEncoder(config=config, tokenizer=tokenizer, max_length=16)
    trainer = Trainer(output=tmp_path, batch_size=4, max_steps=1, save_every=None, progress=False)
    sys.setprofile(note)
    try:
        trainer.fit(model, PairDataset(questions, answers), InfoNCE())
    finally:
        sys.setprofile(None)
    position = 0
    for file, function in steps_of_the_page():
        while not (calls[position][0] == file and function in _names(calls[position][1])):
            position += 1
            assert position < len(calls), f"{file} ({function}) does not come after the step before"


def _names(qualified: str) -> list[str]:
    """A method by its own name, its class's, and both."""
    return [qualified, *qualified.split(".")]
