"""The bar of a training in a terminal of 80 columns."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from accelerate import Accelerator

from dualenc.training.callbacks import Callback
from dualenc.training.evaluators import RetrievalEvaluator
from dualenc.training.log import RunLog
from tests.helpers import toy
from tests.helpers.fakes import TinyEncoder
from tests.helpers.runs import FixedEvaluator, train


class SlowAtFirst(FixedEvaluator):
    """Takes two seconds for the untrained model."""

    def __call__(self, model: TinyEncoder) -> dict[str, float]:
        time.sleep(2 if len(self.scores) == 2 else 0)
        return super().__call__(model)


def test_the_clock_starts_with_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", evaluator=SlowAtFirst(0.1, 0.2), progress=True)
    [ended] = set(re.findall(r"12/12 \[(\S+)<", capsys.readouterr().err))
    assert ended in ("00:00", "00:01")


class StopsAt(Callback):
    """Fails after step 7."""

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        if step == 7:
            raise RuntimeError("step 7")


def test_steps_before_a_resumption_are_done_and_not_fast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="step 7"):
        train(tmp_path / "run", callbacks=[StopsAt()])
    capsys.readouterr()
    train(tmp_path / "run", resume=True, progress=True, callbacks=[Slow()])
    rates = re.findall(r"12/12 \[\S+<\S+ +([\d.]+)step/s", capsys.readouterr().err)
    assert rates, "steps per second of those that were made here"
    assert float(rates[-1]) < 4


class Slow(Callback):
    """A quarter of a second for each step."""

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        time.sleep(0.25)


def test_long_numbers_leave_room_for_the_bar(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "metrics.jsonl", Accelerator(cpu=True), total_steps=100_000)
    log._show({"loss": 12.3456, "learning_rate": 1.87e-05, "samples_per_second": 1234.5})
    log.bar.n = 54_321
    log.bar.start_t -= 3600
    log.bar.ncols = 80
    log.bar.dynamic_ncols = None
    line = str(log.bar)
    log.close()
    assert len(line) <= 80
    assert line.endswith(", loss 12.3]")
    assert len(line.split("|")[1]) >= 9


def test_the_data_is_named_as_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.write_beir(tmp_path / "my" / "data")
    monkeypatch.chdir(tmp_path)
    evaluator = RetrievalEvaluator("my/data")
    # What a resumed run compares.
    assert evaluator.data == ("data", "test")
    scripted = FixedEvaluator(0.1, 0.2)
    scripted.source = evaluator.source
    train(tmp_path / "run", evaluator=scripted, progress=True)
    assert "step 0: score 0.1000 on my/data\n" in capsys.readouterr().err
