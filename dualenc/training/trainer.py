"""The trainer: puts the parts of a training run together."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration
from torch.nn.modules.dropout import _DropoutNd

from dualenc import distributed
from dualenc.batching.mixture import MixtureBatches
from dualenc.batching.selector import BatchSelector, RandomBatches
from dualenc.data.mixture import Mixture
from dualenc.data.pairs import PairDataset
from dualenc.encoders.batchnorm import synchronise_statistics, waits_for_others
from dualenc.encoders.dual import SIDES, DualEncoder
from dualenc.encoders.text import TextEncoder
from dualenc.errors import DualencError, nearest
from dualenc.objectives.base import Objective
from dualenc.training.checkpoint import claimed
from dualenc.training.encoding import uses_batch_statistics
from dualenc.training.evaluators import Evaluator
from dualenc.training.loader import killed_worker_told
from dualenc.training.log import read_metrics
from dualenc.training.loop import Loop
from dualenc.training.optim import OptimizerName, ScheduleName, check_optimizer, check_schedule, freeze
from dualenc.training.plan import EmbeddingSource
from dualenc.training.sharding import check_shardable, shard_model
from dualenc.training.signals import StopSignals
from dualenc.types import OnError

MixedPrecision = Literal["no", "bf16", "fp16"]

MOST_EPOCHS = 1_000_000
"""More would never end; their batches are counted before the training starts."""
MOST_WORKERS = 1024


class TrainingResult(NamedTuple):
    """The outcome of `Trainer.fit`.

    Attributes:
        model_folder: where the model is.
        steps: optimizer steps done.
        loss: mean training loss in the last line of the log; NaN where the objective does not know it.
        before: the evaluator's metrics of the untrained model; empty without an evaluator.
        metrics: the evaluator's metrics of the model in `model_folder`; empty without an evaluator.
        seconds: of this call.
        skipped: how many samples were left out because they could not be read.
    """

    model_folder: Path
    steps: int
    loss: float
    before: dict[str, float]
    metrics: dict[str, float]
    seconds: float
    skipped: int


@dataclass(kw_only=True)
class Trainer:
    """Trains any dual encoder with any objective, on one process or many.

        Trainer(output="run", epochs=3).fit(model, pairs, objective)

    N processes train the model that one process trains with the same global batches, up to rounding: gradients,
    the objective's state, batches, augmentation and BatchNorm's statistics are functions of the global batch, on
    GPUs and CPUs. Three things are not: dropout (stochastic depth too), which each process draws for its own part
    of a batch; BatchNorm with chunk_size, over chunks; and, in models with BatchNorm, the gradient of out-of-batch
    items through the batch's statistics, which reaches the own part of it only.

    SIGTERM and SIGUSR1 (what schedulers send) and Ctrl-C end the run after the step that is going on, or the
    evaluation, with a checkpoint; resuming gives the model of an unbroken run, bit for bit. A second Ctrl-C, and the
    first where save_every is None, ends it at once.

    Args:
        output: folder of the run: checkpoints, metrics.jsonl and, at the end, `model`.
        batch_size: pairs in a global batch, over all processes.
        epochs: passes over the data; 1 when max_steps is not given either.
        max_steps: optimizer steps at which to stop, whatever the epochs.
        learning_rate: peak learning rate.
        optimizer: "adamw", "sgd", "lars", "lion", "muon" or others of timm; from Python any that timm lists.
        weight_decay: of weights with two or more dimensions.
        momentum: of optimizers that have one: "sgd", "lars", "muon".
        betas: of optimizers that have two: "adamw", "lion".
        layer_decay: the learning rate of a layer as a share of that of the layer above it; 1 is one rate for all.
        freeze: names of weights that are not trained, with * and [0-5] as in file names: "left.*", "*embeddings*".
        weight_average: share of the old in a moving average of the weights, such as 0.999: the average is what is
            evaluated and saved. null: off.
        warmup: steps of linear warm-up, or their share of all steps when it is a fraction below 1.
        schedule: "cosine", "linear", "constant", "inverse_sqrt" or "warmup_stable_decay", after the warm-up.
        final_fraction: learning rate at the end as a share of the peak.
        max_gradient_norm: gradients are scaled down to this norm; null leaves them.
        mixed_precision: "no", "bf16" or "fp16".
        gradient_accumulation: global batches per optimizer step; each batch has its own negatives.
        chunk_size: items encoded at once, with gradient caching: memory does not grow with the batch. null: off.
        shard_model: each process holds a part of the weights, of their gradients and of what the optimizer keeps of
            them, for models that do not fit on one GPU; layers are brought together for their own passes.
        compile: `torch.compile` both towers, for any length of text: faster after a minute or more of compiling.
        evaluate_every: steps between evaluations; null evaluates before and after training only.
        patience: stop after so many evaluations in a row without a better one; null goes on to the end.
        keep_best: the model folder gets the weights with the best evaluation, otherwise the last ones.
        save_every: steps between checkpoints, and one at the end; null writes none.
        keep_checkpoints: how many of the latest stay.
        log_every: steps between lines of metrics.jsonl.
        seed: of augmentation, dropout and batches.
        num_workers: processes per rank that decode and prepare the data.
        on_error: "skip" leaves out samples that cannot be read and counts them, "raise" stops at the first.
        selection_embeddings: for batchings that use embeddings: "epoch" takes those of the last epoch's batches,
            "fresh" makes an evaluation-mode pass at the start of every epoch.
        selection_background: select while training goes on, one epoch late; false waits for it.
        guide_left: folder of a guide's embeddings of the left items, by which likely false negatives are no negatives
            (`guide_margin` of the objective): `dualenc mine` keeps such folders, `dualenc embed` makes them. Objectives
            that look beyond the batch refuse it.
        guide_right: likewise of the right items; with two views of images the same folder.
        tracker: accelerate's trackers, such as tensorboard or wandb; several separated by commas.
        project: what trackers call the project.
        timeout_minutes: how long a process waits for another before it takes it for hung; longer than whatever one
            process does alone, such as the ranking in an evaluation.
        deterministic: same seed, same run on a GPU too.
        overwrite: start anew in a folder that holds a run.
        progress: show a progress bar.

    Raises:
        DualencError: an argument out of range.
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
    final_fraction: float = 0.0
    max_gradient_norm: float | None = 1.0
    mixed_precision: MixedPrecision = "no"
    gradient_accumulation: int = 1
    chunk_size: int | None = None
    shard_model: bool = False
    compile: bool = False
    evaluate_every: int | None = None
    patience: int | None = None
    keep_best: bool = True
    save_every: int | None = 1000
    keep_checkpoints: int = 2
    log_every: int = 10
    seed: int = 0
    num_workers: int = 0
    on_error: OnError = "skip"
    selection_embeddings: EmbeddingSource = "epoch"
    selection_background: bool = True
    guide_left: str | None = None
    guide_right: str | None = None
    tracker: str | None = None
    project: str = "dualenc"
    timeout_minutes: float = 10.0
    deterministic: bool = True
    overwrite: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        at_least_one = ("batch_size", "epochs", "max_steps", "gradient_accumulation", "chunk_size", "evaluate_every")
        for name in (*at_least_one, "patience", "save_every", "keep_checkpoints", "log_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DualencError(f"{name} is {value}; it must be at least 1")
        if self.epochs is not None and self.epochs > MOST_EPOCHS:
            raise DualencError(f"epochs is {self.epochs}; it must be at most {MOST_EPOCHS:,}; set max_steps instead")
        if not 0 <= self.seed < 2**63 or not 0 <= self.num_workers <= MOST_WORKERS:
            raise DualencError(
                f"seed is {self.seed} and num_workers {self.num_workers}; they must be at least 0, and num_workers at "
                f"most {MOST_WORKERS}"
            )
        if not 0 < self.timeout_minutes < float("inf"):
            raise DualencError(f"timeout_minutes is {self.timeout_minutes}; it must be more than 0")
        if self.on_error not in ("skip", "raise"):
            raise DualencError(f"on_error is {self.on_error!r}; choose 'skip' or 'raise'")
        if self.max_gradient_norm is not None and not 0 < self.max_gradient_norm < math.inf:
            raise DualencError(f"max_gradient_norm is {self.max_gradient_norm}; it must be above 0; null leaves it out")
        if (self.guide_left is None) != (self.guide_right is None):
            raise DualencError("guide_left and guide_right are given together; name the embeddings of both sides")
        self.freeze = (self.freeze,) if isinstance(self.freeze, str) else tuple(self.freeze)
        if self.weight_average is not None and not 0 < self.weight_average < 1:
            raise DualencError(f"weight_average is {self.weight_average}; it must be between 0 and 1, such as 0.999")
        if self.patience is not None and (self.evaluate_every is None or not self.keep_best):
            raise DualencError("patience counts evaluations; set evaluate_every, and leave keep_best true")
        check_optimizer(
            self.optimizer, self.learning_rate, self.weight_decay, self.momentum, self.betas, self.layer_decay
        )
        check_schedule(self.schedule, self.warmup, self.final_fraction)

    def fit(
        self,
        model: DualEncoder,
        pairs: PairDataset,
        objective: Objective,
        batching: BatchSelector | None = None,
        evaluator: Evaluator | None = None,
        resume: bool = False,
        recipe: Mapping[str, Any] | None = None,
    ) -> TrainingResult:
        """Train, and leave the model in `output/model`.

        Args:
            model: trained in place; ends with the weights of the last step, of which with shard_model and several
                processes each holds a part.
            pairs: the training pairs.
            objective: the loss; its learnable parameters are trained too.
            batching: who meets whom; by default random batches, of a `Mixture` as its weights and `batches` say.
            evaluator: measures the model before, during and after training.
            resume: continue, exactly, from the latest checkpoint in `output`; from the start if there is none.
            recipe: where all of this came from, for the model card and to recognise checkpoints of other recipes.

        Until the first step is done nothing is written, and a run that is to be overwritten stays.

        Raises:
            DualencError: the folder holds a run already or one is going on there, the checkpoint is of another recipe
                or damaged, the loss is not finite, another process or a data worker is gone, or the arguments do not
                fit one another.
            Stopped: a SystemExit with code 128 + the signal, after SIGTERM or SIGUSR1.
            Interrupted: a KeyboardInterrupt, after Ctrl-C.
        """
        start = time.perf_counter()
        if self.batch_size > len(pairs):
            raise DualencError(f"batch_size is {self.batch_size} but there are {len(pairs)} pairs; make it smaller")
        if isinstance(pairs, Mixture) and not pairs.is_plain:
            batching = self._batches_of(pairs, batching)
        batching = batching or RandomBatches(len(pairs), self.batch_size, seed=self.seed)
        self._check_parts(model, pairs, objective, batching, evaluator)
        trackers = [name.strip() for name in (self.tracker or "").split(",") if name.strip()]
        accelerator = start_accelerator(self.mixed_precision, trackers, Path(self.output), self.timeout_minutes)
        device = accelerator.device
        with (
            StopSignals(saves=self.save_every is not None) as signals,
            claimed(self.output, resume=resume, overwrite=self.overwrite),
            deterministic_algorithms(self.deterministic, device),
            killed_worker_told(self.num_workers),
        ):
            freeze(model, self.freeze)
            if isinstance(pairs, Mixture) and isinstance(model, TextEncoder):
                model.name_prompts(pairs.prompts)
            skeleton = None
            if self.shard_model:
                check_shardable(model, self.optimizer, self.mixed_precision, self.compile)
            model = place(model, device, self.chunk_size, move=not (self.shard_model and distributed.is_initialized()))
            if self.shard_model and distributed.is_initialized():
                skeleton = shard_model(model, device)
            if self.compile:
                for tower in {model.left, model.right}:
                    tower.compile(dynamic=True)
            if pairs.negatives is not None and self.chunk_size is None and waits_for_others(model):
                raise DualencError(
                    "mined negatives do not go with BatchNorm on several processes, some of which may have none of "
                    "them; use one process, or set chunk_size"
                )
            counts = [torch.from_numpy(pairs.pair_counts(side)).to(device) for side in SIDES]
            objective.to(device).set_counts(*counts)
            loop = Loop(
                self, accelerator, model, pairs, objective, batching, evaluator, signals, recipe or {}, skeleton
            )
            try:
                metrics = loop.run(resume)
            finally:
                loop.close()
        losses = [line.get("loss") for line in read_metrics(Path(self.output) / "metrics.jsonl")]
        loss = next((float(value) for value in reversed(losses) if value is not None), float("nan"))
        seconds = time.perf_counter() - start
        skipped = len(loop.all_bad())
        return TrainingResult(loop.best.folder, loop.steps, loss, loop.best.before, metrics, seconds, skipped)

    def _batches_of(self, pairs: Mixture, batching: BatchSelector | None) -> BatchSelector:
        """Batches as a mixture wants them, which no other selector makes."""
        if batching is not None and not isinstance(batching, MixtureBatches):
            raise DualencError(
                f"data.weights and data.batches say what a batch is made of, which {type(batching).__name__} does not "
                "know; leave batching out, or weigh all sources 1 in mixed batches"
            )
        return batching or MixtureBatches(
            pairs.sizes,
            list(pairs.source_weights.values()),
            self.batch_size,
            self.seed,
            one_source=pairs.batches == "one_source",
            names=list(pairs.sources),
        )

    def _check_parts(
        self,
        model: DualEncoder,
        pairs: PairDataset,
        objective: Objective,
        batching: BatchSelector,
        evaluator: Evaluator | None,
    ) -> None:
        """Refuse parts that do not fit one another, before any work."""
        if self.patience is not None and evaluator is None:
            raise DualencError("patience counts evaluations, and there is no evaluator; give one, or leave it out")
        if any(distributed.is_sharded(parameter) for parameter in model.parameters()):
            raise DualencError(
                "the model is still divided among the processes of an earlier training; load what that has saved"
            )
        for name, ours, theirs, we in (
            ("batch_size", self.batch_size, batching.batch_size, "the trainer"),
            ("num_pairs", len(pairs), batching.num_pairs, "the data"),
        ):
            if ours != theirs:
                raise DualencError(f"{name} is {ours} for {we} but {theirs} for batching; give both the same")
        if (remedy := objective.needs_uniform_batches) and not batching.uniform:
            chooser, otherwise = type(batching).__name__, "leave batching out"
            if isinstance(batching, MixtureBatches):
                chooser, otherwise = "the mixture", "weigh all sources 1 in mixed batches"
            raise DualencError(
                f"{chooser} chooses who meets whom, but {objective.name} as set assumes random batches; give "
                f"it {remedy}, or {otherwise}"
            )
        trained = {"left": pairs.left_modality, "right": pairs.right_modality}
        for what, given in (("the pairs", trained), ("the evaluator", getattr(evaluator, "modalities", {}))):
            for side in SIDES:
                theirs_is, ours_is = given.get(side), model.tower(side).modality
                if theirs_is is not None and theirs_is != ours_is:
                    raise DualencError(
                        f"the {side} side of {what} is {theirs_is}, but that of the model encodes {ours_is}; choose a "
                        f"model for {theirs_is} or other data"
                    )
        if objective.needs_teacher and getattr(pairs, "scores", None) is None:
            raise DualencError(
                f"{objective.name} learns from a teacher, but the data holds no scores; give it mined negatives with "
                "scores (MinedPairs with scores: true), or leave Distilled out"
            )
        if self.guide_left is not None and objective.needs_encode:
            raise DualencError(
                f"guide_left judges candidates of the batch, and {objective.name} looks beyond; leave the guide out, "
                "or take SogCLR or another objective of the batch"
            )
        names = getattr(evaluator, "metric_names", ())
        if evaluator is not None and names and evaluator.primary not in names:
            raise DualencError(
                f"evaluator.primary is {evaluator.primary!r}{nearest(evaluator.primary, names)}; choose one of "
                f"{', '.join(names)}"
            )


def start_accelerator(
    mixed_precision: MixedPrecision, trackers: Sequence[str], folder: Path, timeout_minutes: float = 10.0
) -> Accelerator:
    """The accelerator of one training run; several runs may follow one another in a process.

    Args:
        mixed_precision: "no", "bf16" or "fp16".
        trackers: names of accelerate's trackers, such as "tensorboard" or "wandb".
        folder: of the run; trackers that write files write them to `trackers` in it.
        timeout_minutes: how long one process waits for another; counts where the processes meet for the first time.

    Raises:
        DualencError: the device has no such precision, a tracker's package is not installed, or not all processes
            have come.
    """
    if mixed_precision not in ("no", "bf16", "fp16"):
        raise DualencError(f"mixed_precision is {mixed_precision!r}; choose no, bf16 or fp16")
    available = [str(tracker) for tracker in get_available_trackers()]
    for tracker in trackers:
        if tracker not in available:
            raise DualencError(f"tracker {tracker!r} is not installed or unknown; install it (pip install {tracker})")
    # cuBLAS reads this once, before its first product; only deterministic algorithms make use of it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed_precision:
        AcceleratorState._reset_state()  # the processes stay as they are; only the precision changes
    try:
        with distributed.lost_process_told():
            accelerator = Accelerator(
                mixed_precision=mixed_precision,
                cpu=not torch.accelerator.is_available(),
                log_with=list(trackers) or None,
                project_config=ProjectConfiguration(project_dir=str(folder), logging_dir=str(folder / "trackers")),
                kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=timeout_minutes))],
            )
    except DualencError:
        raise
    except (ValueError, RuntimeError) as error:
        raise DualencError(f"mixed_precision={mixed_precision}: {error}") from error
    if mixed_precision == "fp16" and accelerator.scaler is None:
        raise DualencError(f"mixed_precision=fp16 does not work on {accelerator.device.type}; use bf16 or no")
    # `accelerate launch --cpu --num_processes N` starts one process unless it is given MPI.
    asked = os.environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_ADDR" in os.environ
    if asked and distributed.world_size() == 1 and "RANK" not in os.environ:
        warnings.warn(
            "accelerate launch --cpu has started a single process; for several on CPU set ACCELERATE_USE_CPU=true "
            "and launch with --multi_gpu --num_processes N",
            stacklevel=2,
        )
    return accelerator


def place(model: DualEncoder, device: torch.device, chunk_size: int | None, move: bool = True) -> DualEncoder:
    """Move a model to its device, unless told not to, give every rank the main process's weights, and settle BatchNorm.

    With several processes BatchNorm takes its statistics over the global batch: by `SyncBatchNorm` on GPUs, by
    `synchronise_statistics` elsewhere; except with gradient caching, where they are those of a chunk.
    """
    if uses_batch_statistics(model):
        if chunk_size is not None:
            message = f"BatchNorm with chunk_size takes its statistics over {chunk_size} items, not over the batch"
            warnings.warn(message, stacklevel=2)
        elif distributed.world_size() > 1 and device.type == "cuda":
            model = synchronised(model)
        elif distributed.world_size() > 1:
            synchronise_statistics(model)
    if move:
        model.to(device)
    dropout = any(  # values, or whole samples (stochastic depth)
        (isinstance(module, _DropoutNd) and module.p > 0) or float(getattr(module, "drop_prob", None) or 0) > 0
        for module in model.modules()
    )
    if dropout and distributed.world_size() > 1 and distributed.is_main():
        warnings.warn(
            "each process draws dropout for its own part of a batch: the run is not the one of another number of "
            "processes; set dropout to 0 for that",
            stacklevel=2,
        )
    if distributed.world_size() > 1:
        for tensor in model.state_dict().values():
            tensor.copy_(distributed.broadcast_object(tensor.cpu()))
    return model


def synchronised(model: DualEncoder) -> DualEncoder:
    """The model with `SyncBatchNorm` for every BatchNorm."""
    from timm.layers import convert_sync_batchnorm  # torch's own would lose the activation inside timm's layers

    converted: DualEncoder = convert_sync_batchnorm(model)
    return converted


@contextmanager
def deterministic_algorithms(enabled: bool, device: torch.device) -> Iterator[None]:
    """Same seed, same run on a GPU too, where some default kernels add numbers up in no fixed order."""
    if not (enabled and device.type == "cuda"):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
