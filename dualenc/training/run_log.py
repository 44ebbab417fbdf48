"""What a run tells: a progress bar with live numbers, a metrics.jsonl, and accelerate's trackers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.files import atomic_path


class RunLog:
    """Logs on the main process; on others every method does nothing.

    Nothing reaches the disk or a tracker before `open`: a run that fails in its first step leaves no trace.

    Args:
        path: of the metrics.jsonl: one object per line with "step" and the values logged at it.
        accelerator: whose trackers get the same values.
        total_steps: length of the progress bar.
        progress: show the progress bar.
    """

    def __init__(self, path: Path, accelerator: Accelerator, total_steps: int, progress: bool = True) -> None:
        self.path, self.accelerator = path, accelerator
        self.active = distributed.is_main()
        self._kept_to = -1
        self._waiting: list[tuple[int, dict[str, float]]] | None = []
        self.bar = tqdm(
            total=total_steps,
            desc="training",
            unit="step",
            disable=not (progress and self.active),
            mininterval=0.5 if sys.stderr.isatty() else 15.0,
            dynamic_ncols=True,
        )

    def open(self, project: str, config: Mapping[str, Any]) -> None:
        """Begin a run in every tracker, described by flat settings, and write what has been logged so far.

        Lines of an earlier run after the step of `restart_at` go, and a line cut short by a kill.
        """
        if self.accelerator.log_with:
            self.accelerator.init_trackers(project, {name: str(value) for name, value in config.items()})
        if self.active:
            lines = [line for line in _complete_lines(self.path) if line["step"] <= self._kept_to]
            with atomic_path(self.path) as beside:
                beside.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        waiting, self._waiting = self._waiting or [], None
        for step, values in waiting:
            self.write(step, values)

    def restart_at(self, step: int) -> None:
        """Lines after a step are not of this run, which goes on from there."""
        self._kept_to = step
        self.bar.update(step - self.bar.n)

    def step(self) -> None:
        """One optimizer step is done."""
        self.bar.update()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log some values at a step; "loss", "learning_rate" and "samples_per_second" also beside the bar."""
        if not self.active:
            return
        if self._waiting is not None:
            self._waiting.append((step, values))
            return
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        try:
            with open(self.path, "a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": step, **finite}) + "\n")
        except OSError as error:
            raise DualencError(
                f"{self.path}: could not be written ({error.strerror}); make room there, then go on with --resume"
            ) from error
        self.accelerator.log({name: value for name, value in finite.items() if value is not None}, step=step)
        shown = {short: f"{values[name]:.3g}" for name, short in _SHOWN.items() if name in values}
        if shown:
            self.bar.set_postfix(shown, refresh=False)

    def say(self, line: str) -> None:
        """A line for the user, above the progress bar."""
        if self.active:
            tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        """Finish the bar and the trackers."""
        self.bar.close()
        for tracker in self.accelerator.trackers:
            tracker.finish()


_SHOWN = {"loss": "loss", "learning_rate": "lr", "samples_per_second": "samples/s"}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last line cut short is left out."""
    return _complete_lines(path)


def _complete_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
