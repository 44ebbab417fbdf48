"""Training settings: the arguments of `Trainer`, with their ranges."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from dualenc.errors import DualencError, nearest
from dualenc.hard_negatives import Rule
from dualenc.training.optim import OptimizerName, ScheduleName, check_optimizer
from dualenc.types import OnError

MixedPrecision = Literal["no", "bf16", "fp16", "auto"]

FREE_SETTINGS = (
    *("output", "num_workers", "save_every", "keep_checkpoints", "log_every"),
    *("tracker", "project", "timeout_minutes", "overwrite", "progress"),
)
"""Settings that the weights do not depend on: a run may be resumed with others."""

_COUNTS = (
    *("batch_size", "epochs", "max_steps", "gradient_accumulation", "chunk_size", "evaluate_every"),
    *("patience", "save_every", "keep_checkpoints", "log_every", "mine_every", "mine_negatives"),
)
_INTERVALS = {
    **dict.fromkeys(_COUNTS, "[1, inf)"),
    **dict.fromkeys(("seed", "num_workers", "weight_decay", "warmup"), "[0, inf)"),
    **dict.fromkeys(("learning_rate", "timeout_minutes", "max_gradient_norm"), "(0, inf)"),
    **dict.fromkeys(("momentum", "held_out"), "[0, 1)"),
    "layer_decay": "(0, 1]",
    "weight_average": "(0, 1)",
}
"""Values that numbers may have; None is always one."""


@dataclass(kw_only=True)
class TrainerSettings:
    """Settings of a training run.

    Args:
        output: folder of the run: checkpoints, metrics.jsonl and, at the end, `model`.
        batch_size: pairs in a global batch, over all processes.
        epochs: passes over the data; 1 when max_steps is not given either.
        max_steps: optimizer steps at which to stop, whatever the epochs.
        learning_rate: peak learning rate.
        optimizer: "adamw", "sgd", "lars", "lion", "muon" or others of timm; from Python any that timm lists.
        weight_decay: of weights with two or more dimensions.
        momentum: of "sgd", "lars", "muon" and others that have one.
        betas: of "adamw", "lion" and others that have two.
        layer_decay: multiplier of the learning rate from each layer to the one below; 1 is one rate for all.
        freeze: names of weights that are not trained, with * and [0-5] as in file names: "left.*", "*embeddings*".
        weight_average: decay of a moving average of the weights, such as 0.999: evaluated and saved. null: off.
        warmup: steps of linear warm-up, or their share of all steps when it is a fraction below 1.
        schedule: "cosine", "linear", "constant", "inverse_sqrt" or "warmup_stable_decay", after the warm-up.
        max_gradient_norm: gradients are scaled down to this norm; null leaves them.
        mixed_precision: "no", "bf16" or "fp16"; "auto" takes bf16 where the device multiplies it faster than float32.
        gradient_accumulation: global batches per optimizer step; each batch has its own negatives.
        chunk_size: items encoded at once, with gradient caching: memory does not grow with the batch. null: off.
        compile: `torch.compile` both towers: faster after a minute or more of compiling.
        evaluate_every: steps between evaluations; null evaluates before and after training only.
        patience: stop after so many evaluations in a row without a better one; null trains to the end.
        keep_best: the model folder gets the weights with the best evaluation, otherwise the last ones.
        save_every: steps between checkpoints, and one at the end; null writes none.
        keep_checkpoints: how many of the latest stay.
        log_every: steps between lines of metrics.jsonl.
        held_out: share of the pairs, at most 1,000, to evaluate on where no evaluator is given; by default 0.1 for
            recipes with 100 pairs or more, and 0 from Python.
        seed: of augmentation, dropout and batches.
        num_workers: processes per rank that decode and prepare the data.
        on_error: "skip" leaves out samples that cannot be read and counts them, "raise" stops at the first.
        mine_every: epochs after which the model mines new hard negatives in place of the data's, the first time after
            this many epochs (ANCE, Xiong et al. 2021, arXiv:2007.00808). null: never.
        mine_negatives: maximum for each pair, among the 100 nearest right items that are not known positives.
        mine_relative: maximum score of a negative as a share of the positive's (`dualenc mine --relative`); null: off.
        tracker: accelerate's trackers, such as tensorboard or wandb; several separated by commas.
        project: the project's name in trackers.
        timeout_minutes: how long a process waits for another before it reports it as hung.
        deterministic: deterministic algorithms on a GPU: same seed, same run.
        overwrite: start anew in a folder that holds a run; a folder of other files is refused.
        progress: show progress bars of training and evaluation.
    """

    output: str | os.PathLike[str]
    batch_size: int = 32
    epochs: int | None = None
    max_steps: int | None = None
    learning_rate: float = 1e-4
    optimizer: OptimizerName = "adamw"
    weight_decay: float = 0.01
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    layer_decay: float = 1.0
    freeze: Sequence[str] = ()
    weight_average: float | None = None
    warmup: int | float = 0.1
    schedule: ScheduleName = "cosine"
    max_gradient_norm: float | None = 1.0
    mixed_precision: MixedPrecision = "no"
    gradient_accumulation: int = 1
    chunk_size: int | None = None
    compile: bool = False
    evaluate_every: int | None = None
    patience: int | None = None
    keep_best: bool = True
    save_every: int | None = 1000
    keep_checkpoints: int = 2
    log_every: int = 10
    held_out: float | None = None
    seed: int = 0
    num_workers: int = 0
    on_error: OnError = "skip"
    mine_every: int | None = None
    mine_negatives: int = 1
    mine_relative: float | None = 0.95
    tracker: str | None = None
    project: str = "dualenc"
    timeout_minutes: float = 10.0
    deterministic: bool = True
    overwrite: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        if not os.fspath(self.output):
            raise DualencError("output is empty; name a folder")
        self.freeze = (self.freeze,) if isinstance(self.freeze, str) else tuple(self.freeze)
        for name, interval in _INTERVALS.items():
            value = getattr(self, name)
            if value is not None and not _is_in(interval, value):
                raise DualencError(f"{name} is {value}; it must be in {interval}")
        self._check_choices()
        self._check_combinations()
        # The rule checks its own arguments.
        _ = self.mining_rule

    @property
    def mining_rule(self) -> Rule:
        """Which items `mine_every` chooses."""
        try:
            return Rule(num_negatives=self.mine_negatives, relative=self.mine_relative, seed=self.seed)
        except DualencError as error:
            # It begins with the name of an argument.
            raise DualencError(f"mine_{error}") from None

    def _check_choices(self) -> None:
        check_optimizer(self.optimizer)
        for name, choices in (("schedule", get_args(ScheduleName)), ("on_error", get_args(OnError))):
            value = getattr(self, name)
            if value not in choices:
                near = nearest(str(value), choices)
                raise DualencError(f"{name} is {value!r}{near}; choose one of {', '.join(choices)}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise DualencError(
                f"betas are {list(self.betas)}; give two numbers in [0, 1), such as [0.9, 0.999]"
            )
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise DualencError(
                f"warmup is {self.warmup}; give a number of steps, or a share of all steps below 1"
            )

    def _check_combinations(self) -> None:
        if self.patience is not None and (self.evaluate_every is None or not self.keep_best):
            raise DualencError("patience counts evaluations; set evaluate_every, and leave keep_best true")
        if (
            self.mine_every is not None
            and self.max_steps is None
            and self.mine_every >= (self.epochs or 1)
        ):
            raise DualencError(
                f"mine_every is {self.mine_every}, and training ends before so many epochs are over; give more epochs, "
                "or mine beforehand (dualenc mine)"
            )


def _is_in(interval: str, value: float) -> bool:
    """Whether a number is in an interval such as "[0, 1)"."""
    lowest, highest = (float(end) for end in interval[1:-1].split(","))
    is_above = lowest < value or (value == lowest and interval[0] == "[")
    is_below = value < highest or (value == highest and interval[-1] == "]")
    return is_above and is_below
