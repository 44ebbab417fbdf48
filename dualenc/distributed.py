"""Communication between processes: collectives, gradient averaging, sharding.

No other file imports `torch.distributed`.

With one process (or before a process group exists) every function is the identity, so callers never branch.
Tensors may have a different first dimension on each rank: the last batch of an epoch rarely divides evenly.

DTensor, FSDP and distributed checkpoints are imported where they are called: they add a second (a third) to the import
of torch, and only sharded models need them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualenc.errors import DualencError

_works_alone = False


def is_initialized() -> bool:
    """Whether a process group of more than one process is up, and this process takes part in it."""
    # A group of one process needs no communication either.
    return not _works_alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def alone() -> Iterator[None]:
    """Work as if there were no other process: for tasks of which each process does a different one."""
    global _works_alone
    # Contexts may be nested.
    before = _works_alone
    _works_alone = True
    try:
        yield
    finally:
        _works_alone = before


def rank() -> int:
    """This process's number, 0 when alone."""
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """How many processes take part, 1 when alone."""
    return dist.get_world_size() if is_initialized() else 1


def is_main() -> bool:
    """Whether this process writes files and talks to the user."""
    return rank() == 0


@contextmanager
def explain_lost_process() -> Iterator[None]:
    """Explain in one line that another process hangs or has ended; every exchange of this file runs in this.

    On gloo. NCCL ends the process itself, with its own message.

    Raises:
        DualencError: another process did not answer within the time limit of the process group, or is gone.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo has no exception classes for these; the words are those of its versions so far.
        reason = str(error)
        if any(words in reason for words in ("Timed out", "timed out", "imeout")):
            raise DualencError(
                "another process of this run did not answer in time: it hangs or is far behind; see its message, and "
                "raise trainer.timeout_minutes if it only needs longer"
            ) from error
        if any(words in reason for words in ("onnection", "Socket", "Broken pipe", "remote process")):
            raise DualencError(
                "the connection to another process of this run is lost: it has ended or was killed; see its message, "
                "then resume with --resume"
            ) from error
        raise


@explain_lost_process()
def barrier() -> None:
    """Wait until every process is here."""
    if is_initialized():
        dist.barrier()


@explain_lost_process()
def gather_objects(value: Any) -> list[Any]:
    """Any picklable value of every rank, in rank order, on every rank."""
    if not is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


@explain_lost_process()
def broadcast_object(value: Any) -> Any:
    """The main process's value, on every rank."""
    if not is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def rank_sizes(local_size: int, device: torch.device) -> list[int]:
    """The first dimension of every rank's tensor, in rank order."""
    return rank_numbers([local_size], device)[0]


@explain_lost_process()
def rank_numbers(local_numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """For each of this rank's numbers, those of all ranks in rank order; one exchange.

    Args:
        local_numbers: as many on every rank.
        device: that the process group communicates on.
    """
    if not is_initialized():
        return [[number] for number in local_numbers]
    # As tensors: objects would be pickled, and take two exchanges.
    own = torch.tensor(local_numbers, device=device)
    numbers = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(numbers, own)
    return [list(column) for column in zip(*(row.tolist() for row in numbers), strict=True)]


def rank_slice(total: int, of_rank: int | None = None, of_world: int | None = None) -> slice:
    """The contiguous part of `range(total)` that a rank (this one by default) works on; sizes differ by one at most."""
    of_rank = rank() if of_rank is None else of_rank
    share, extra = divmod(total, of_world or world_size())
    start = of_rank * share + min(of_rank, extra)
    return slice(start, start + share + (of_rank < extra))


def share(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """This rank's `rank_slice` of a tensor (n, ...) that all ranks have, and the sizes of all ranks' slices."""
    slices = [rank_slice(len(tensor), of_rank=number) for number in range(world_size())]
    return tensor[slices[rank()]], [part.stop - part.start for part in slices]


def gather(tensor: Tensor, sizes: list[int] | None = None) -> Tensor:
    """Concatenate a tensor of shape (b, ...) over ranks to (B, ...), without gradient; b may differ by rank.

    Args:
        tensor: this rank's part.
        sizes: every rank's b if the caller knows them, which saves an exchange.
    """
    if not is_initialized():
        return tensor.detach() if tensor.requires_grad else tensor
    return _all_gather(tensor.detach(), sizes or rank_sizes(tensor.shape[0], tensor.device))


def gather_with_grad(tensor: Tensor, sizes: list[int] | None = None) -> Tensor:
    """Concatenate (b, ...) over ranks to (B, ...) so that gradients flow back to the rank that owns a row.

    The backward pass sums every rank's gradient of a row. Together with `average_gradients`, and losses whose average
    over ranks is the global loss, the result is the gradient of one process with the global batch.

    Args:
        tensor: this rank's part.
        sizes: every rank's b if the caller knows them, which saves an exchange.
    """
    if not is_initialized():
        return tensor
    return _GatherWithGrad.apply(tensor, sizes or rank_sizes(tensor.shape[0], tensor.device))


@explain_lost_process()
def all_reduce(tensor: Tensor, op: str = "sum") -> Tensor:
    """A new tensor with the element-wise "sum", "mean", "max" or "min" over ranks, without gradient."""
    result = tensor.detach().clone()
    if not is_initialized():
        return result
    # Not every backend has a mean.
    is_mean = op == "mean"
    dist.all_reduce(result, op=dist.ReduceOp.SUM if is_mean else getattr(dist.ReduceOp, op.upper()))
    return result / world_size() if is_mean else result


class GradientAverage:
    """Averages gradients over ranks; during the backward pass, if `expect` announces it.

    Gradients are sent in flat buckets, the last parameters first, in the order of a backward pass. After `expect` each
    bucket is sent when the next backward pass has filled it and those before it are sent, so that the order is the same
    on every rank; `finish` sends the rest, waits, and writes the averages. A missing gradient counts as zero, and a
    parameter that no rank has used keeps none. Sharded parameters are left out: their backward pass averages them.

    Args:
        parameters: the same list on every rank.
        bucket_elements: about how many numbers are sent at once.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], bucket_elements: int = 2**22) -> None:
        trained = [p for p in parameters if p.requires_grad]
        self.device = trained[0].device if trained else torch.device("cpu")
        self.parameters = [p for p in trained if not is_sharded(p)]
        self.buckets = _buckets(reversed(self.parameters), bucket_elements)
        self._group: Any = None
        self._missing: list[int] | None = None
        self._sent: list[tuple[Any, Tensor]] = []

    def expect(self) -> None:
        """Announce that the next backward pass is the last one before `finish`: filled buckets are sent at once.

        Not for models whose layers exchange values with other ranks in the middle of their backward pass.
        """
        if not is_initialized():
            return
        if self._group is None:
            # A group of its own, as an objective may exchange values during the backward pass, too.
            self._group = dist.new_group()
            for number, bucket in enumerate(self.buckets):
                for parameter in bucket:
                    parameter.register_post_accumulate_grad_hook(partial(self._filled, number))
        self._missing = [len(bucket) for bucket in self.buckets]

    @explain_lost_process()
    def finish(self, number: int = 0) -> int:
        """Write the averages.

        Args:
            number: of this rank; sent along with what is exchanged anyway.

        Returns:
            The largest `number` of all ranks, the same on every rank.
        """
        if not is_initialized():
            return number
        has_gradient = [parameter.grad is not None for bucket in self.buckets for parameter in bucket]
        flags = torch.tensor([*has_gradient, number], dtype=torch.int32)
        while len(self._sent) < len(self.buckets):
            self._send()
        # Whether a parameter has a gradient may differ by rank, but all must treat it alike.
        *used, number = all_reduce(flags.to(self.device), "max").tolist()
        is_used = iter(used)
        sent = self._sent
        self._missing = None
        self._sent = []
        for bucket, (work, flat) in zip(self.buckets, sent, strict=True):
            work.wait()
            parts = flat.div_(world_size()).split([parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                if not next(is_used):
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad.copy_(part.view_as(parameter))
        return number

    def _filled(self, number: int, parameter: Tensor) -> None:
        if self._missing is None:
            return
        self._missing[number] -= 1
        while len(self._sent) < len(self.buckets) and self._missing[len(self._sent)] == 0:
            self._send()

    @explain_lost_process()
    def _send(self) -> None:
        bucket = self.buckets[len(self._sent)]
        gradients = (torch.zeros_like(p) if p.grad is None else p.grad for p in bucket)
        # One message of many gradients: each exchange has a fixed cost.
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._sent.append((dist.all_reduce(flat, group=self._group, async_op=True), flat))


def _buckets(parameters: Iterable[torch.nn.Parameter], max_elements: int) -> list[list[torch.nn.Parameter]]:
    """Consecutive parameters of one precision and device, together at most so many elements or a single one."""
    buckets: list[list[torch.nn.Parameter]] = []
    elements = 0
    for parameter in parameters:
        last = buckets[-1][-1] if buckets else None
        fits = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not fits or elements + parameter.numel() > max_elements:
            buckets.append([])
            elements = 0
        buckets[-1].append(parameter)
        elements += parameter.numel()
    return buckets


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Average gradients over ranks after the backward pass; for training loops outside of `dualenc.training`.

    Args:
        parameters: the same list on every rank.
    """
    GradientAverage(parameters).finish()


def clip_gradients(parameters: Iterable[torch.nn.Parameter], limit: float) -> Tensor:
    """Clip averaged gradients to a norm; each rank may have a part of sharded ones.

    Args:
        parameters: the same list on every rank.
        limit: the largest norm of all gradients together.

    Returns:
        The norm before, a scalar.
    """
    parameters = list(parameters)
    if not any(is_sharded(p) for p in parameters):
        return torch.nn.utils.clip_grad_norm_(parameters, limit)
    parts = [local_part(p.grad) for p in parameters if p.grad is not None and is_sharded(p)]
    whole = [p.grad for p in parameters if p.grad is not None and not is_sharded(p)]
    # torch's own function would take the norm of this rank's parts alone.
    squares = torch.nn.utils.get_total_norm(parts).to(local_part(parameters[0])) ** 2
    norm = (all_reduce(squares) + torch.nn.utils.get_total_norm(whole).to(squares) ** 2).sqrt()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in (*parts, *whole):
        gradient.mul_(scale.to(gradient))
    return norm


def can_shard() -> bool:
    """Whether this version of torch has what sharding needs here."""
    try:
        from torch.distributed.checkpoint import HuggingFaceStorageWriter
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        return False
    writes = "save_distributed" in inspect.signature(HuggingFaceStorageWriter).parameters
    return writes and "ignored_params" in inspect.signature(fully_shard).parameters


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank holds only a part of a tensor, see `shard`."""
    if not is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return local


def shard(modules: Iterable[torch.nn.Module], device: torch.device) -> None:
    """Divide the parameters of modules among all ranks, by rows; gradients and optimizer state follow.

    Each module gathers its parameters for its own forward and backward pass only. All ranks must therefore make the
    same passes in the same order. Scalars stay whole.

    Source: Zhao et al. 2023 (PyTorch FSDP, arXiv:2304.11277), in torch's second version.

    Args:
        modules: inner ones before outer ones; parameters and buffers move to the device one module after the other.
        device: of the parts.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # One dimension: every rank has a part of every weight.
    mesh = init_device_mesh(device.type, (world_size(),))
    for module in modules:
        scalars = {parameter for parameter in module.parameters() if parameter.dim() == 0}
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)


def shard_forward(module: torch.nn.Module, name: str) -> None:
    """Make another method of a sharded module gather its parameters, as its forward does."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    register_fsdp_forward_method(module, name)


@explain_lost_process()
def whole_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on the main process's CPU, elsewhere {}; all ranks call it together, with equal keys."""
    whole = {}
    for name, tensor in tensors.items():
        full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
        if is_main():
            whole[name] = full.detach().cpu()
    return whole


@explain_lost_process()
def save_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write sharded and whole tensors as safetensors, every rank its part; all ranks call it together.

    Raises:
        DualencError: a rank could not write.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

    try:
        with _explain_failure():
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            save(dict(tensors), storage_writer=writer, no_dist=not is_initialized())
    except _Failed as error:
        raise DualencError(f"{folder}: cannot be written ({error}); mend that, then resume with --resume") from error


@explain_lost_process()
def load_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors with what `save_shards` wrote, on any number of ranks; all ranks call it together.

    Raises:
        DualencError: a tensor is missing, has another shape, or a file is damaged.
    """
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    try:
        with _explain_failure():
            reader = HuggingFaceStorageReader(str(folder))
            load(dict(tensors), storage_reader=reader, no_dist=not is_initialized())
    except _Failed as error:
        raise DualencError(f"{folder}: does not hold this model's weights ({error}); restore the folder") from error


class _Failed(Exception):
    """The reason, in one line, why a rank could not write or read its part."""


@contextmanager
def _explain_failure() -> Iterator[None]:
    """Raise the first rank's reason, where torch raises the tracebacks of all ranks on each.

    Its warning that a single process saves is suppressed: that is intended.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        try:
            yield
        except CheckpointException as error:
            reason = next((failure[0] for failure in error.failures.values()), error)
            raise _Failed(" ".join(str(reason).split())[:160]) from error


@explain_lost_process()
def _all_gather(tensor: Tensor, sizes: list[int]) -> Tensor:
    """Gather tensors of different lengths: pad to the longest rank, gather, cut the padding off."""
    # gloo and NCCL want equal shapes.
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded.contiguous())
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


class _GatherWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sizes: list[int]) -> Tensor:
        start = sum(sizes[: rank()])
        ctx.own = slice(start, start + sizes[rank()])
        return _all_gather(tensor, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad_outputs[0].contiguous(), "sum")[ctx.own], None
