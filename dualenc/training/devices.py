"""Device setup of a run: accelerate, model placement, deterministic kernels."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration

from dualenc import distributed
from dualenc.encoders.batchnorm import synchronize_statistics
from dualenc.encoders.dual import DualEncoder
from dualenc.errors import DualencError
from dualenc.training.settings import TrainerSettings


def start_accelerator(settings: TrainerSettings, folder: Path) -> Accelerator:
    """Create the accelerator of a training run. A process may run several trainings in turn.

    Trackers that write files write to `trackers` in the folder of the run.

    Args:
        settings: settings of the run. `timeout_minutes` applies only if this run creates the
            process group.
        folder: folder of the run.

    Raises:
        DualencError: the precision is not supported, or a tracker is not installed.
    """
    mixed_precision = _mixed_precision(settings)
    trackers = _trackers(settings)
    # cuBLAS reads this once, before its first product. Only deterministic algorithms use it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Accelerate's state is shared by the process and refuses another precision. Resetting it keeps
    # the process group.
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed_precision:
        AcceleratorState._reset_state()
    with distributed.explain_lost_process():
        return Accelerator(
            mixed_precision=mixed_precision,
            cpu=not torch.accelerator.is_available(),
            log_with=trackers or None,
            project_config=ProjectConfiguration(str(folder), logging_dir=str(folder / "trackers")),
            kwargs_handlers=[
                InitProcessGroupKwargs(timeout=timedelta(minutes=settings.timeout_minutes))
            ],
        )


def _mixed_precision(settings: TrainerSettings) -> str:
    """Return the precision to train with, "auto" resolved for the device."""
    mixed_precision: str = settings.mixed_precision
    if mixed_precision == "auto":
        mixed_precision = "bf16" if has_fast_bf16() else "no"
    if mixed_precision == "fp16" and not torch.cuda.is_available():
        raise DualencError("mixed_precision=fp16 needs a CUDA GPU", fix="use bf16 or no")
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", mixed_precision):
        warnings.warn(
            f"mixed_precision is {mixed_precision}; the value given to `accelerate launch` "
            f"({launched}) is ignored",
            stacklevel=3,
        )
    return mixed_precision


def _trackers(settings: TrainerSettings) -> list[str]:
    """Return the names of the trackers to log to, all of them installed."""
    available = [str(tracker) for tracker in get_available_trackers()]
    names = (settings.tracker or "").split(",")
    trackers = [name.strip() for name in names if name.strip()]
    for tracker in trackers:
        if tracker not in available:
            known = ", ".join(available) or "none"
            raise DualencError(
                f"tracker {tracker!r} is unknown or not installed",
                fix=f"install it, or take one of: {known}",
            )
    return trackers


def has_fast_bf16() -> bool:
    """Return True if the device multiplies bfloat16 faster than float32.

    This holds for GPUs since Ampere, and for CPUs with AVX512-BF16 or AMX.
    """
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def place_model(model: DualEncoder, device: torch.device) -> DualEncoder:
    """Move a model to a device. With several ranks, synchronize its BatchNorm and weights.

    Args:
        model: the model; changed in place.
        device: device of this rank.
    """
    several = distributed.world_size() > 1
    if several:
        synchronize_statistics(model)
    model.to(device)
    if several:
        # The ranks may have initialized different weights.
        for tensor in model.state_dict().values():
            tensor.copy_(distributed.broadcast_object(tensor.cpu()))
    return model


@contextmanager
def deterministic_algorithms(enabled: bool, device: torch.device) -> Iterator[None]:
    """Use deterministic GPU kernels in this context. Some default kernels sum in arbitrary order.

    Args:
        enabled: False to change nothing.
        device: device of the run; other devices than GPUs are deterministic by default.
    """
    if not (enabled and device.type == "cuda"):
        yield
        return
    algorithms_before = torch.are_deterministic_algorithms_enabled()
    benchmark_before = torch.backends.cudnn.benchmark
    memory: Any = torch.utils.deterministic
    fills_before = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    # Filling memory would add a kernel to almost every operator.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms_before)
        torch.backends.cudnn.benchmark = benchmark_before
        memory.fill_uninitialized_memory = fills_before
