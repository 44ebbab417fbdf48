"""Training settings: the arguments of `Trainer`, with their ranges."""

from __future__ import annotations

import os
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from dualenc.errors import DualencError
from dualenc.training.optim import OptimizerName, ScheduleName
from dualenc.types import OnError

MixedPrecision = Literal["no", "bf16", "fp16", "auto"]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what a checkpoint can hold
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]

FREE_SETTINGS = (
    *("output", "num_workers", "save_every", "keep_checkpoints", "log_every"),
    *(
        "tracker",
        "project",
        "timeout_minutes",
        "overwrite",
        "progress",
        "evaluate_every",
        "patience",
    ),
)
"""Settings that the weights of a step do not depend on: a run may be resumed with others."""


@dataclass(kw_only=True)
class TrainerSettings:
    """Settings of a training run.

    Args:
        output: folder of the run: checkpoints, metrics.jsonl and, at the end, `model`.
        batch_size: pairs in a global batch, over all processes.
        epochs: passes over the data; 1 when max_steps is not given either.
        max_steps: optimizer steps at which to stop; overrides epochs, fewer or more.
        learning_rate: peak learning rate.
        optimizer: "adamw", "sgd", "lars", "lion", "muon" or others of timm.
        weight_decay: of weights with two or more dimensions.
        momentum: of "sgd", "lars", "muon" and others that have one.
        freeze: names of weights that are not trained, with * and [0-5] as in file names: "left.*",
            "*embeddings*".
        weight_average: decay of a moving average of the weights, such as 0.999: evaluated and
            saved. null: off.
        warmup: steps of linear warm-up, or their share of all steps when it is a fraction below 1.
        schedule: "cosine", "linear", "constant", "inverse_sqrt" or "warmup_stable_decay", after the
            warm-up.
        max_gradient_norm: gradients are scaled down to this norm; null leaves them.
        mixed_precision: "no", "bf16", or "fp16" for GPUs before Ampere (T4, V100), which have no
            bf16; "auto" takes bf16 where the device multiplies it faster than float32.
        gradient_accumulation: global batches per optimizer step; each batch has its own negatives.
        chunk_size: items encoded at once, with gradient caching: memory does not grow with the
            batch. Not with BatchNorm, unless that is frozen. null: off.
        compile: `torch.compile` both towers: faster after a minute or more of compiling.
        evaluate_every: steps between evaluations, each of which embeds all right items, up to
            100,000, where pairs are held out; null evaluates before and after training only.
        patience: stop after so many evaluations in a row without a better one; null trains to the
            end.
        keep_best: the model folder gets the weights with the best evaluation, otherwise the last
            ones.
        save_every: steps between checkpoints, and one at the end; null writes none.
        keep_checkpoints: how many of the latest stay.
        log_every: steps between lines of metrics.jsonl.
        held_out: share of the pairs, at most 1,000, to evaluate on where no evaluator is given; by
            default 0.1 for recipes with 100 pairs or more, and 0 from Python.
        seed: of augmentation, dropout and batches.
        num_workers: processes per rank that read batches, and as many for images that an objective
            asks for by id.
        on_error: "skip" leaves out samples that cannot be read and counts them, "raise" stops at
            the first.
        mine_every: epochs after which the model mines new hard negatives in place of the data's,
            the first time after this many epochs (ANCE, Xiong et al. 2021, arXiv:2007.00808). null:
            never.
        mine_negatives: maximum for each pair, among the 100 nearest right items that are not known
            positives.
        mine_relative: maximum score of a negative as a share of the positive's (`dualenc mine
            --relative`); null: off.
        tracker: accelerate's trackers, such as tensorboard or wandb; several separated by commas.
        project: the project's name in trackers.
        timeout_minutes: how long a process waits for another before it reports it as hung.
        deterministic: deterministic algorithms on a GPU: same seed, same run, but for rounding in
            fused attention.
        overwrite: start anew in a folder that holds a run; a folder of other files is refused.
        progress: show progress bars of training and evaluation.
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
            raise DualencError("output is empty; name a folder")
        self.output = os.path.expanduser(self.output)
        self.freeze = (self.freeze,) if isinstance(self.freeze, str) else tuple(self.freeze)
        for name, hint in typing.get_type_hints(TrainerSettings, include_extras=True).items():
            value = getattr(self, name)
            try:
                pydantic.TypeAdapter(hint).validate_python(value, strict=True)
            except pydantic.ValidationError as error:
                reasons = [each["msg"].removeprefix("Input should be ") for each in error.errors()]
                raise DualencError(
                    f"{name} is {value!r}; it must be {' or '.join(reasons)}"
                ) from None
        if self.patience is not None and (self.evaluate_every is None or not self.keep_best):
            raise DualencError(
                "patience counts evaluations; set evaluate_every, and leave keep_best true"
            )
