"""Devices and processes of a run: accelerate's set-up, placing a model, deterministic kernels."""

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
    """The accelerator of one training run; several runs may follow one another in a process.

    Trackers that write files write them to `trackers` in the folder of the run. The time limit
    counts where the processes meet for the first time.
    """
    mixed_precision = settings.mixed_precision
    if mixed_precision == "auto":
        mixed_precision = "bf16" if has_fast_bf16() else "no"
    if mixed_precision == "fp16" and not torch.cuda.is_available():
        raise DualencError("mixed_precision=fp16 needs a CUDA GPU; use bf16 or no")
    available = [str(tracker) for tracker in get_available_trackers()]
    trackers = [name.strip() for name in (settings.tracker or "").split(",") if name.strip()]
    for tracker in trackers:
        if tracker not in available:
            known = ", ".join(available) or "none"
            raise DualencError(
                f"tracker {tracker!r} is unknown or not installed; install it, or take one of: {known}"
            )
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if launched not in ("no", mixed_precision):
        message = f"mixed_precision is {mixed_precision}, whatever accelerate was launched with ({launched})"
        warnings.warn(message, stacklevel=2)
    # cuBLAS reads this once, before its first product; only deterministic algorithms make use of
    # it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The process group of an earlier run stays; only the precision changes.
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


def has_fast_bf16() -> bool:
    """Whether the device multiplies bfloat16 faster than float32: GPUs since Ampere, CPUs with
    AVX512-BF16 or AMX."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def place_model(model: DualEncoder, device: torch.device) -> DualEncoder:
    """Move a model to a device, with BatchNorm over all ranks and equal weights on each."""
    several = distributed.world_size() > 1
    if several:
        synchronize_statistics(model)
    model.to(device)
    if several:
        for tensor in model.state_dict().values():
            tensor.copy_(distributed.broadcast_object(tensor.cpu()))
    return model


@contextmanager
def deterministic_algorithms(enabled: bool, device: torch.device) -> Iterator[None]:
    """Deterministic kernels on a GPU, where some default ones add numbers up in no fixed order."""
    if not (enabled and device.type == "cuda"):
        yield
        return
    algorithms_before = torch.are_deterministic_algorithms_enabled()
    benchmark_before = torch.backends.cudnn.benchmark
    memory: Any = torch.utils.deterministic
    fills_before = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    memory.fill_uninitialized_memory = False  # a kernel more for nearly every operator
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms_before)
        torch.backends.cudnn.benchmark = benchmark_before
        memory.fill_uninitialized_memory = fills_before
