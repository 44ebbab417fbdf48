"""Logging: means since the last log, metrics.jsonl with trackers and progress bar, the model
card."""

from __future__ import annotations

import json
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


class Meter:
    """Sums scalars on a device, so that no step waits; `average` brings their means over steps and
    ranks to the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.first_bad_step = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, step: int, loss: Tensor, values: dict[str, Tensor | float]) -> None:
        """Add the values of one step; `bad_step` reports a loss that is not finite."""
        # Without a look at the value, which would wait for the device.
        first = ~torch.isfinite(loss) & (self.first_bad_step == 0)
        self.first_bad_step = torch.where(first, float(step), self.first_bad_step)
        # On the device from the start, as numbers that are copied there wait for it.
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, torch.zeros_like(self.first_bad_step)) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    def bad_step(self, all_ranks: bool = True) -> int | None:
        """The first step whose loss was not finite, or None; on any rank, if all ranks call it
        together."""
        own = self.first_bad_step[None]
        steps = (distributed.gather(own) if all_ranks else own).tolist()
        return min((int(step) for step in steps if step > 0), default=None)

    def average(self) -> dict[str, float]:
        """Means since the last call, over the steps that had a value, and ranks; all ranks call it
        together."""
        means = {name: total / self.counts[name] for name, total in self._totals().items()}
        self.sums = {}
        self.counts = {}
        return means

    def state_dict(self) -> dict[str, Any]:
        """The sums, with which any number of processes logs the same means; all ranks call it
        together."""
        return {"sums": self._totals(), "counts": dict(self.counts)}

    def _totals(self) -> dict[str, float]:
        """The sums, averaged over ranks, in one exchange and one transfer."""
        names = sorted(self.sums)
        if not names:
            return {}
        totals = distributed.all_reduce(
            torch.stack([self.sums[name] for name in names]), "mean"
        ).tolist()
        return dict(zip(names, totals, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self.counts = dict(state["counts"])
        self.sums = {}
        for name, value in state["sums"].items():
            self.sums[name] = torch.tensor(value, dtype=torch.float64, device=self.device)


class RunLog:
    """Logs to metrics.jsonl, trackers and a progress bar on the main process; on others every
    method does nothing.

    A line has "step" and the values logged at it.
    Nothing reaches the disk or a tracker before `open`: a run that fails in its first step leaves
    no trace.
    """

    def __init__(
        self, path: Path, accelerator: Accelerator, total_steps: int, progress: bool = True
    ) -> None:
        self.path = path
        self.accelerator = accelerator
        self.is_active = distributed.is_main()
        self._is_open = False
        self._waiting: list[tuple[int, Mapping[str, float]]] = []
        self.bar = tqdm(
            total=total_steps,
            desc="training",
            unit="step",
            disable=not (progress and self.is_active),
            # A log file would get a line for each update.
            mininterval=0.5 if sys.stderr.isatty() else 15.0,
            dynamic_ncols=True,
        )

    def open(self, project: str, config: Mapping[str, Any], resumed_at: int = -1) -> None:
        """Begin a run in every tracker, described by flat settings, and write what has been logged
        so far.

        Lines of an earlier run after the step `resumed_at` go, and a line cut short by a kill.
        """
        # On all ranks: accelerate decides on which of them a tracker runs.
        if self.accelerator.log_with:
            self.accelerator.init_trackers(
                project, {name: str(value) for name, value in config.items()}
            )
        if self.is_active:
            lines = [line for line in read_metrics(self.path) if line["step"] <= resumed_at]
            with atomic_path(self.path) as part:
                part.write_text(
                    "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
                )
        self._is_open = True
        for step, values in self._waiting:
            self.write(step, values)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log values at a step; the main ones also next to the bar."""
        if not self.is_active:
            return
        if not self._is_open:
            self._waiting.append((step, values))
            return
        # JSON has no NaN.
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        with explain_full_disk(self.path), open(self.path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **finite}) + "\n")
        known = {name: value for name, value in finite.items() if value is not None}
        self.accelerator.log(known, step=step)
        self._show(values)

    def _show(self, values: Mapping[str, float]) -> None:
        """Show loss, learning rate and throughput next to the bar."""
        loss = "loss" if "loss" in values else "batch_estimate"
        short_names = {loss: loss, "learning_rate": "lr", "samples_per_second": "samples/s"}
        shown = {
            short: f"{values[name]:.3g}" for name, short in short_names.items() if name in values
        }
        if shown:
            self.bar.set_postfix(shown, refresh=False)

    def info(self, line: str) -> None:
        """Print a line for the user, above the progress bar."""
        if self.is_active:
            tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        """Finish the bar and the trackers."""
        self.bar.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line cut short is left out."""
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
                f"{path}: line {number} was not written by a training; restore or remove it"
            )
        lines.append(line)
    return lines


def last_loss(path: Path) -> float:
    """The latest loss in a metrics.jsonl; NaN without any, as of objectives that do not know their
    loss."""
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
    """The model card's part on the training, for `DualEncoder.save`; without a recipe it shows the
    settings."""
    data = f"{type(pairs).__name__}: {len(pairs)} pairs of {pairs.num_left} left and {pairs.num_right} right items."
    if isinstance(pairs, Mixture):
        data += f" Sources: {'; '.join(pairs.describe())}."
    columns = {"untrained": before, "trained": metrics}
    rows = {}
    for name in metrics:
        rows[name] = {column: values[name] for column, values in columns.items() if name in values}
    evaluated_on = None
    if metrics:
        name, split = evaluated_data(evaluator)
        evaluated_on = name if split is None else f"{name}, {split}"
    # Through JSON, to be without tuples and paths.
    plain = json.loads(json.dumps(recipe or {"trainer": settings}, default=os.fspath))
    return {
        "data": data,
        "training": f"{objective.name}, {step} steps with batches of {settings['batch_size']}.",
        "metrics": rows or None,
        "evaluated_on": evaluated_on,
        "recipe": dump_recipe(plain),
    }
