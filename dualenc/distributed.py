"""Everything the package asks of other processes. No other file imports `torch.distributed`.

With one process (or before a process group exists) every function is the identity, so callers never branch.
Tensors may have a different first dimension on each rank: the last batch of an epoch rarely divides evenly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dualenc.errors import DualencError

_BUCKET_ELEMENTS = 2**24
_works_alone = False


def is_initialized() -> bool:
    """Whether a process group of more than one process is up, and this process works with the others."""
    return not _works_alone and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def alone() -> Iterator[None]:
    """Work as if there were no other process: for pieces of work that are shared out whole, one to each process."""
    global _works_alone
    before, _works_alone = _works_alone, True
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
def lost_process_told() -> Iterator[None]:
    """Another process that hangs or has ended is told in one line; every exchange of this file runs in this.

    On gloo. NCCL works outside the Python process and ends it itself, with words of its own.

    Raises:
        DualencError: another process did not answer within the time limit of the process group, or is gone.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error)
        if any(words in reason for words in ("Timed out", "timed out", "imeout")):
            raise DualencError(
                "another process of this run did not answer in time: it hangs or is far behind; see what it says, and "
                "raise trainer.timeout_minutes if it only needs longer"
            ) from error
        if any(words in reason for words in ("onnection", "Socket", "Broken pipe", "remote process")):
            raise DualencError(
                "the connection to another process of this run is lost: it has ended or was killed; see what it says, "
                "then go on with --resume"
            ) from error
        raise


@lost_process_told()
def barrier() -> None:
    """Wait until every process is here."""
    if is_initialized():
        dist.barrier()


@lost_process_told()
def gather_objects(value: Any) -> list[Any]:
    """Any picklable value of every rank, in rank order, on every rank."""
    if not is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


@lost_process_told()
def broadcast_object(value: Any) -> Any:
    """The main process's value, on every rank."""
    if not is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@lost_process_told()
def rank_sizes(local_size: int, device: torch.device) -> list[int]:
    """The first dimension of every rank's tensor, in rank order."""
    if not is_initialized():
        return [local_size]
    own = torch.tensor([local_size], device=device)
    sizes = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(sizes, own)
    return [int(size) for size in sizes]


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
        sizes: every rank's b where the caller knows them, which saves an exchange.
    """
    if not is_initialized():
        return tensor.detach() if tensor.requires_grad else tensor
    return _all_gather(tensor.detach(), sizes or rank_sizes(tensor.shape[0], tensor.device))


def gather_with_grad(tensor: Tensor, sizes: list[int] | None = None) -> Tensor:
    """Concatenate (b, ...) over ranks to (B, ...) so that gradients flow back to the rank that owns a row.

    The backward pass sums what every rank's loss says about a row. Together with `average_gradients`, and losses
    whose average over ranks is the global loss, the result is the gradient of one process with the global batch.

    Args:
        tensor: this rank's part.
        sizes: every rank's b where the caller knows them, which saves an exchange.
    """
    if not is_initialized():
        return tensor
    return _GatherWithGrad.apply(tensor, sizes or rank_sizes(tensor.shape[0], tensor.device))


@lost_process_told()
def all_reduce(tensor: Tensor, op: str = "sum") -> Tensor:
    """A new tensor with the element-wise "sum", "mean", "max" or "min" over ranks, without gradient."""
    result = tensor.detach().clone()
    if not is_initialized():
        return result
    dist.all_reduce(result, op=getattr(dist.ReduceOp, "SUM" if op == "mean" else op.upper()))
    return result / world_size() if op == "mean" else result


def average_gradients(parameters: Iterable[torch.nn.Parameter], number: int = 0) -> int:
    """Replace every gradient by its average over ranks, in flat buckets; a missing gradient counts as zero.

    The whole list must be the same on every rank. A parameter unused on all ranks keeps no gradient.

    Args:
        parameters: whose gradients.
        number: of this rank; travels with what is exchanged anyhow.

    Returns:
        The largest `number` of all ranks, the same on every rank.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if not is_initialized() or not trainable:
        return number
    flags = [*(p.grad is not None for p in trainable), number]
    *used, number = all_reduce(torch.tensor(flags, device=trainable[0].device, dtype=torch.int32), "max").tolist()
    buckets: list[list[Tensor]] = []  # each of one precision and device, and not too large for one exchange
    elements = 0
    for parameter, is_used in zip(trainable, used, strict=True):
        if not is_used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad
        alike = buckets and (buckets[-1][0].dtype, buckets[-1][0].device) == (gradient.dtype, gradient.device)
        if not alike or elements + gradient.numel() > _BUCKET_ELEMENTS:
            buckets.append([])
            elements = 0
        buckets[-1].append(gradient)
        elements += gradient.numel()
    for bucket in buckets:
        flat = all_reduce(torch.cat([gradient.reshape(-1) for gradient in bucket]), "mean")
        for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))
    return number


@lost_process_told()
def _all_gather(tensor: Tensor, sizes: list[int]) -> Tensor:
    """Pad to the longest rank (gloo and NCCL want equal shapes), gather, cut the padding away."""
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
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad_outputs[0].contiguous(), "sum")[ctx.own], None
