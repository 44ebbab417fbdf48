"""Logging: metric means, metrics.jsonl, trackers, the progress bar, and the model card."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from dualenc import distributed
from dualenc.data.mixture import Mixture
from dualenc.data.pairs import PairDataset
from dualenc.errors import DualencError
from dualenc.io.files import atomic_path, explain_full_disk
from dualenc.objectives.base import Objective
from dualenc.recipe.yaml_files import dump_recipe
from dualenc.training.evaluators import Evaluator, evaluated_data

logger = logging.getLogger("dualenc.training")


class Meter:
    """Accumulates scalars on the device, to avoid a host synchronization per step.

    `average` then moves their means over steps and ranks to the CPU in one transfer.

    Example:
        meter = Meter(device)
        meter.add(step=1, loss=loss, values={"loss": loss})
        meter.average()  # {"loss": 0.7}

    Args:
        device: device of the scalars.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.first_bad_step = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, step: int, loss: Tensor, values: dict[str, Tensor | float]) -> None:
        """Add the values of one step.

        Args:
            step: number of the step, from 1.
            loss: loss of the step, a scalar; `bad_step` reports the first that is not finite.
            values: scalars by name.
        """
        # Branch-free: reading the value on the host would wait for the device.
        is_first = ~torch.isfinite(loss) & (self.first_bad_step == 0)
        self.first_bad_step = torch.where(is_first, float(step), self.first_bad_step)
        for name, value in values.items():
            if name not in self.sums:
                # Created on the device, because copying a number there waits for it. In float64,
                # so that long sums lose no precision.
                self.sums[name] = torch.zeros_like(self.first_bad_step)
                self.counts[name] = 0
            self.sums[name] = self.sums[name] + value
            self.counts[name] += 1

    def bad_step(self, all_ranks: bool = True) -> int | None:
        """Return the first step whose loss was not finite, or None.

        Args:
            all_ranks: True to consider all ranks, which then call it together.
        """
        steps = self.first_bad_step[None]  # 0 if all losses were finite
        if all_ranks:
            steps = distributed.gather(steps)
        bad_steps = [int(step) for step in steps.tolist() if step > 0]
        return min(bad_steps, default=None)

    def average(self) -> dict[str, float]:
        """Return means over ranks and the steps since the last call. All ranks call it together."""
        totals = self._totals()
        means = {name: total / self.counts[name] for name, total in totals.items()}
        self.sums = {}
        self.counts = {}
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return the sums, averaged over ranks. All ranks call it together."""
        # As averages, any number of ranks can resume with them and log the same means.
        return {"sums": self._totals(), "counts": dict(self.counts)}

    def _totals(self) -> dict[str, float]:
        """Return the sums, averaged over ranks."""
        names = sorted(self.sums)
        if not names:
            return {}
        # Stacked, for one collective and one transfer to the host.
        own_sums = torch.stack([self.sums[name] for name in names])
        totals = distributed.all_reduce(own_sums, "mean").tolist()
        return dict(zip(names, totals, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self.counts = dict(state["counts"])
        self.sums = {}
        for name, value in state["sums"].items():
            self.sums[name] = torch.tensor(value, dtype=torch.float64, device=self.device)


class RunLog:
    """Logs to metrics.jsonl, trackers and a progress bar, on the main process only.

    Each line of metrics.jsonl has "step" and the values logged at that step. Nothing is written
    before `open`, so that a run which fails in its first step leaves no trace.

    Args:
        path: path of metrics.jsonl.
        accelerator: accelerator with the trackers.
        total_steps: number of steps, for the progress bar.
        progress: True to show the progress bar, and to print the lines of `info` above it.
    """

    def __init__(
        self, path: Path, accelerator: Accelerator, total_steps: int, progress: bool = True
    ) -> None:
        self.path = path
        self.accelerator = accelerator
        self.progress = progress
        self.is_active = distributed.is_main()
        self._is_open = False
        self._waiting: list[tuple[int, Mapping[str, float]]] = []
        self.bar = tqdm(
            total=total_steps,
            desc="training",
            unit="step",  # tqdm prints slow ones as "2.50s/step"
            disable=not (progress and self.is_active),
            # In a log file every update is a line.
            mininterval=0.5 if sys.stderr.isatty() else 15.0,
            dynamic_ncols=True,
        )

    def open(self, project: str, config: Mapping[str, Any], resumed_at: int = -1) -> None:
        """Start the trackers, and write everything that was logged so far.

        Args:
            project: project name in trackers.
            config: flat settings that describe the run in trackers.
            resumed_at: step of the checkpoint, after which lines are removed from metrics.jsonl;
                -1 for a new run.
        """
        # On all ranks, because accelerate decides where a tracker runs.
        if self.accelerator.log_with:
            texts = {name: str(value) for name, value in config.items()}
            self.accelerator.init_trackers(project, texts)
        if self.is_active:
            lines = [line for line in read_metrics(self.path) if line["step"] <= resumed_at]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            with atomic_path(self.path) as part:
                part.write_text(text, encoding="utf-8")
        self._is_open = True
        for step, values in self._waiting:
            self.write(step, values)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step, and show the main ones next to the progress bar.

        Args:
            step: number of the step.
            values: numbers by name.
        """
        if not self.is_active:
            return
        if not self._is_open:
            self._waiting.append((step, values))
            return
        # JSON has no NaN or infinity: they become null.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with explain_full_disk(self.path), open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **finite}) + "\n")
        known = {name: value for name, value in finite.items() if value is not None}
        self.accelerator.log(known, step=step)
        self._show(values)

    def _show(self, values: Mapping[str, float]) -> None:
        """Show the loss next to the bar; 80 columns have no room for more."""
        for name in ("loss", "batch_estimate"):
            if name in values:
                self.bar.set_postfix_str(f"{name} {values[name]:.3g}", refresh=False)
                return

    def info(self, line: str) -> None:
        """Log a line for the user, and print it above the progress bar if there is one."""
        if not self.is_active:
            return
        logger.info("%s", line)
        # Handlers of this very logger, such as the command line's, replace the printing.
        if self.progress and not logger.handlers:
            tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        """Close the progress bar and the trackers."""
        self.bar.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl, without a truncated last line.

    Args:
        path: path of the file, which need not exist.

    Raises:
        DualencError: a line was not written by a training run.
    """
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            # A kill cut the last line short.
            break
        except (UnicodeDecodeError, RecursionError):
            line = None
        step = line.get("step") if isinstance(line, dict) else None
        if type(step) is not int or not 0 <= step < 2**53:
            raise DualencError(
                f"line {number} was not written by a training run",
                fix="restore or remove it",
                where=path,
            )
        lines.append(line)
    return lines


def last_loss(path: Path) -> float:
    """Return the latest loss in a metrics.jsonl, or NaN if the objective reports none.

    Args:
        path: path of the file.
    """
    losses = [line["loss"] for line in read_metrics(path) if line.get("loss") is not None]
    return float(losses[-1]) if losses else math.nan


def training_card(
    pairs: PairDataset,
    objective: Objective,
    settings: Mapping[str, Any],
    recipe: Mapping[str, Any],
    evaluator: Evaluator | None,
    before: Mapping[str, float],
    metrics: Mapping[str, float],
    step: int,
) -> dict[str, Any]:
    """Return the training section of a model card, for `DualEncoder.save`.

    Args:
        pairs: the training pairs.
        objective: the objective.
        settings: settings of the trainer.
        recipe: the resolved recipe; if empty, the card shows the settings.
        evaluator: the evaluator, or None.
        before: metrics of the untrained model.
        metrics: metrics of the saved model.
        step: number of steps that the saved model was trained for.
    """
    data = (
        f"{type(pairs).__name__}: {len(pairs)} pairs of "
        f"{pairs.num_left} left and {pairs.num_right} right items."
    )
    if isinstance(pairs, Mixture):
        data += f" Sources: {'; '.join(pairs.describe())}."
    # One row per metric. After a resume with another evaluator, `before` is empty.
    columns = {"untrained": before, "trained": metrics}
    rows = {}
    for name in metrics:
        rows[name] = {column: values[name] for column, values in columns.items() if name in values}
    evaluated_on = None
    if metrics:
        name, split = evaluated_data(evaluator)
        evaluated_on = name if split is None else f"{name}, {split}"
    # Through JSON, which turns tuples into lists and paths into strings.
    plain = json.loads(json.dumps(recipe or {"trainer": settings}, default=os.fspath))
    return {
        "data": data,
        "training": f"{objective.name}, {step} steps with batches of {settings['batch_size']}.",
        "metrics": rows or None,
        "evaluated_on": evaluated_on,
        "recipe": dump_recipe(plain),
    }
