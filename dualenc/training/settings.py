"""Training settings: the arguments of `Trainer` and their valid ranges."""

from __future__ import annotations

import os
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from dualenc.errors import DualencError
from dualenc.recipe.check import mistyped
from dualenc.training.optim import OptimizerName, ScheduleName
from dualenc.types import OnError

MixedPrecision = Literal["no", "bf16", "fp16", "auto"]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # a signed 64-bit integer, which checkpoints can hold
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]

FREE_SETTINGS = (
    "output",
    "num_workers",
    "save_every",
    "keep_checkpoints",
    "log_every",
    "tracker",
    "project",
    "timeout_minutes",
    "overwrite",
    "progress",
    "evaluate_every",
    "patience",
)
"""Settings that do not affect the weights after a step. They may change when a run is resumed."""


@dataclass(kw_only=True)
class TrainerSettings:
    """Settings of a training run.

    `Trainer` takes the same arguments. In a recipe they are the keys of the section `trainer`.

    Example:
        settings = TrainerSettings(output="run", epochs=3, batch_size=64)
        settings.schedule  # "cosine"

    Args:
        output: folder of the run; gets checkpoints, metrics.jsonl and, at the end, `model`.
        batch_size: number of pairs in a global batch, over all processes.
        epochs: number of passes over the data; null means 1, unless max_steps is set.
        max_steps: number of optimizer steps; overrides epochs. null: off.
        learning_rate: peak learning rate.
        optimizer: name of the optimizer: "adamw", "sgd", "lars", "lion", "muon" or another of timm.
        weight_decay: weight decay of weights with two or more dimensions.
        momentum: momentum of "sgd", "lars", "muon" and other optimizers that have one.
        freeze: glob patterns of parameter names to freeze, such as "left.*" or "*embeddings*".
        weight_average: decay of a moving average of the weights, such as 0.999; the average is
            evaluated and saved. null: off.
        warmup: number of linear warm-up steps, or a fraction below 1 of all steps.
        schedule: learning rate schedule after the warm-up: "cosine", "linear", "constant",
            "inverse_sqrt" or "warmup_stable_decay".
        max_gradient_norm: maximum norm that gradients are clipped to. null: no clipping.
        mixed_precision: precision of the computation: "no", "bf16", "fp16" (for GPUs before Ampere,
            such as T4 and V100, which lack bf16), or "auto": bf16 if the device multiplies it
            faster than float32.
        gradient_accumulation: number of global batches per optimizer step. Each batch has separate
            negatives.
        chunk_size: number of items encoded at a time with gradient caching, which keeps memory
            independent of the batch size. Not supported with trained BatchNorm. null: off.
        compile: true to `torch.compile` both towers: faster steps, after a minute or more of
            compiling.
        evaluate_every: steps between evaluations. With held-out pairs, each evaluation embeds all
            right items, up to 100,000. null: only before and after training.
        patience: number of evaluations without improvement before training stops early. null: no
            early stopping.
        keep_best: true to save the weights with the best evaluation, false to save the last ones.
        save_every: steps between checkpoints; another one is written at the end. null: no
            checkpoints.
        keep_checkpoints: number of recent checkpoints to keep.
        log_every: steps between lines of metrics.jsonl.
        held_out: share of the pairs or images, at most 1,000, to hold out for evaluation if no
            evaluator is given. Default: 0.1 for recipes with 100 or more, 0 from Python.
        seed: random seed for augmentation, dropout and batch order.
        num_workers: number of worker processes per rank that read batches, at most one per CPU.
            Objectives that request images by id get as many workers again.
        on_error: treatment of unreadable samples: "skip" to skip and count them, "raise" to stop at
            the first one.
        mine_every: epochs between rounds of hard-negative mining with the current model, which
            replace the negatives in the data; the first round comes after this many epochs (ANCE,
            Xiong et al. 2021, arXiv:2007.00808). null: off.
        mine_negatives: maximum number of mined negatives per pair, chosen from the 100 nearest
            right items that are not known positives.
        mine_relative: maximum score of a mined negative as a share of the positive's score
            (`dualenc mine --relative`). null: off.
        tracker: trackers of accelerate, such as tensorboard or wandb, separated by commas. null:
            off.
        project: project name in trackers.
        timeout_minutes: minutes that a process waits for another before reporting it as hung.
        deterministic: true for deterministic GPU algorithms: the same seed gives the same run, up
            to rounding in fused attention.
        overwrite: true to replace a run in the output folder. Folders with other files are refused.
        progress: true to show progress bars, and what happens in the run, on stderr. The logger
            "dualenc.training" gets these lines, too.

    Raises:
        DualencError: a setting is out of range.
    """

    output: str | os.PathLike[str]
    batch_size: Count = 32
    epochs: Count | None = None
    max_steps: Count | None = None
    learning_rate: Positive = 1e-4
    optimizer: OptimizerName = "adamw"
    weight_decay: NotNegative = 0.01
    momentum: Share = 0.9
    freeze: str | Sequence[str] = ()
    weight_average: Annotated[float, Field(gt=0, lt=1)] | None = None
    warmup: Annotated[int, Field(ge=0)] | Share = 0.1
    schedule: ScheduleName = "cosine"
    max_gradient_norm: Positive | None = 1.0
    mixed_precision: MixedPrecision = "no"
    gradient_accumulation: Count = 1
    chunk_size: Count | None = None
    compile: bool = False
    evaluate_every: Count | None = None
    patience: Count | None = None
    keep_best: bool = True
    save_every: Count | None = 1000
    keep_checkpoints: Count = 2
    log_every: Count = 10
    held_out: Share | None = None
    seed: Seed = 0
    num_workers: Annotated[int, Field(ge=0)] = 0
    on_error: OnError = "skip"
    mine_every: Count | None = None
    mine_negatives: Count = 1
    mine_relative: NotNegative | None = 0.95
    tracker: str | None = None
    project: str = "dualenc"
    timeout_minutes: Positive = 10.0
    deterministic: bool = True
    overwrite: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        if not os.fspath(self.output):
            raise DualencError("output is empty", fix="name a folder")
        self.output = os.path.expanduser(self.output)
        self.freeze = (self.freeze,) if isinstance(self.freeze, str) else tuple(self.freeze)
        # Checked one by one instead of as a pydantic dataclass, so that an error names one setting
        # the way a recipe spells it.
        hints = typing.get_type_hints(TrainerSettings, include_extras=True)
        for name, hint in hints.items():
            value = getattr(self, name)
            try:
                # Strict, so that "3" or true is not taken for a number.
                pydantic.TypeAdapter(hint).validate_python(value, strict=True)
            except pydantic.ValidationError as error:
                raise mistyped(value, name, error) from None
        if self.patience is not None and (self.evaluate_every is None or not self.keep_best):
            raise DualencError(
                "patience counts evaluations",
                fix="set evaluate_every, and leave keep_best true",
            )
