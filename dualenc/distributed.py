"""Communication between processes: collectives and gradient averaging.

No other file imports `torch.distributed`. With one process (or before a process group exists) every
function is the identity, so callers never branch. Tensors may have a different first dimension on
each rank, because the last batch of an epoch rarely divides evenly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dualenc.errors import DualencError

Result = TypeVar("Result")

_is_single = False


def is_initialized() -> bool:
    """Return True if this process belongs to a process group of more than one."""
    return (
        not _is_single
        and dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size() > 1
    )


@contextmanager
def single_process() -> Iterator[None]:
    """Turn collectives off in this context, for work that differs by rank."""
    global _is_single
    outer = _is_single
    _is_single = True
    try:
        yield
    finally:
        _is_single = outer


def rank() -> int:
    """Return this process's rank; 0 for a single process."""
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """Return the number of processes; 1 for a single process."""
    return dist.get_world_size() if is_initialized() else 1


def launched() -> int:
    """Return the number of processes that a launcher has started, whether they have met or not."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Return True if this process writes files and talks to the user."""
    return rank() == 0


@contextmanager
def explain_lost_process() -> Iterator[None]:
    """Explain in one line that another process hangs or has ended.

    This applies to gloo; NCCL ends the process itself.

    Raises:
        DualencError: another process did not answer within the time limit of the process group, or
            has ended.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo raises plain RuntimeErrors, so the message decides.
        if re.search("timed out|timeout", str(error), re.IGNORECASE):
            raise DualencError(
                "another process of this run did not answer in time: it hangs or is far behind",
                fix="see its message, and raise trainer.timeout_minutes if it only needs longer",
            ) from error
        if re.search("connection|socket|broken pipe|remote process", str(error), re.IGNORECASE):
            raise DualencError(
                "the connection to another process of this run is lost: it has ended or was killed",
                fix="see its message, then resume with --resume",
            ) from error
        raise


@explain_lost_process()
def barrier() -> None:
    """Wait for every process."""
    if is_initialized():
        dist.barrier()


@explain_lost_process()
def gather_objects(value: Any) -> list[Any]:
    """Gather a picklable value of every rank, in rank order, on every rank."""
    if not is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


@explain_lost_process()
def broadcast_object(value: Any) -> Any:
    """Return the main process's value on every rank."""
    if not is_initialized():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def from_main(work: Callable[[], Result]) -> Result:
    """Run `work` on the main process and return its result on every rank.

    Its `DualencError` is raised on all ranks, so that none waits for a failed one.
    """
    outcome: tuple[Any, str | None] = (None, None)
    if is_main():
        try:
            outcome = (work(), None)
        except DualencError as error:
            outcome = (None, str(error))
    result, problem = broadcast_object(outcome)
    if problem is not None:
        raise DualencError(problem)
    return cast(Result, result)


@explain_lost_process()
def rank_numbers(local_numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Exchange numbers between ranks: for each of this rank's numbers, return those of all ranks.

    Every rank must pass equally many numbers; a single collective is used.
    """
    if not is_initialized():
        return [[number] for number in local_numbers]
    # Sent as a tensor: objects would be pickled, and take two collectives.
    own = torch.tensor(local_numbers, device=device)
    numbers = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(numbers, own)
    table = torch.stack(numbers, dim=1)
    columns: list[list[int]] = table.tolist()
    return columns


def rank_slice(total: int, of_rank: int | None = None, of_world: int | None = None) -> slice:
    """Return the contiguous part of `range(total)` that a rank (this one by default) works on.

    Sizes differ by at most one.
    """
    of_rank = rank() if of_rank is None else of_rank
    share, extra = divmod(total, of_world or world_size())
    start = of_rank * share + min(of_rank, extra)
    return slice(start, start + share + (of_rank < extra))


def share(tensor: Tensor) -> tuple[Tensor, list[int]]:
    """Return this rank's `rank_slice` of a tensor (n, ...), and the sizes of all slices."""
    slices = [rank_slice(len(tensor), of_rank=number) for number in range(world_size())]
    sizes = [part.stop - part.start for part in slices]
    return tensor[slices[rank()]], sizes


def gather(tensor: Tensor, sizes: list[int] | None = None) -> Tensor:
    """Concatenate (b, ...) over ranks to (B, ...), without gradient.

    Args:
        tensor: (b, ...) rows of this rank.
        sizes: numbers of rows of all ranks; if given, this saves a collective.
    """
    if not is_initialized():
        return tensor.detach() if tensor.requires_grad else tensor
    return _all_gather(tensor.detach(), sizes or _sizes(tensor))


def gather_with_grad(tensor: Tensor, sizes: list[int] | None = None) -> Tensor:
    """Concatenate (b, ...) over ranks to (B, ...), with gradient.

    The backward pass gives each rank the sum over ranks of the gradients of its rows. Together with
    `average_gradients`, and losses whose average over ranks is the global loss, the result is the
    gradient of one process with the global batch.

    Args:
        tensor: (b, ...) rows of this rank.
        sizes: numbers of rows of all ranks; if given, this saves a collective.
    """
    if not is_initialized():
        return tensor
    return _GatherWithGrad.apply(tensor, sizes or _sizes(tensor))


@explain_lost_process()
def all_reduce(tensor: Tensor, op: str = "sum") -> Tensor:
    """Reduce a tensor over ranks elementwise, without gradient.

    Args:
        tensor: tensor of the same shape on every rank.
        op: "sum", "mean", "max" or "min".
    """
    if not is_initialized():
        return tensor.detach()
    # torch reduces in place.
    result = tensor.detach().clone()
    if op == "mean":
        # Not every backend supports a mean.
        return all_reduce(tensor, "sum") / world_size()
    dist.all_reduce(result, op=getattr(dist.ReduceOp, op.upper()))
    return result


@explain_lost_process()
def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Average the gradients of parameters over ranks; call it after the backward pass.

    A missing gradient counts as zero, and a parameter that no rank has used keeps none. For sparse
    gradients each rank gets the rows of all ranks.

    Args:
        parameters: parameters, the same on every rank.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not is_initialized() or not trained:
        return
    # A parameter may have a gradient on some ranks only, but all ranks must make the same
    # collective calls: 0 none, 1 dense, 2 sparse.
    own_kinds = [0 if p.grad is None else 1 + p.grad.is_sparse for p in trained]
    kinds = all_reduce(torch.tensor(own_kinds, device=trained[0].device), "max").tolist()
    # Dense gradients are sent asynchronously, so that transfers overlap.
    sent = []
    for parameter, kind in zip(trained, kinds, strict=True):
        if kind == 2:
            _average_rows(parameter)
        elif kind == 1:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sent.append((parameter.grad, dist.all_reduce(parameter.grad, async_op=True)))
    for gradient, work in sent:
        work.wait()
        gradient.div_(world_size())


def _average_rows(parameter: torch.nn.Parameter) -> None:
    """Average a sparse gradient: collect the rows of all ranks, divided by the number of ranks."""
    rows = torch.empty(0, dtype=torch.int64, device=parameter.device)  # (n,)
    values = parameter.detach()[:0]  # (n, …)
    if parameter.grad is not None:
        gradient = parameter.grad.coalesce()
        rows = gradient.indices()[0]
        values = gradient.values()
    sizes = _sizes(rows)
    all_rows = gather(rows, sizes)
    all_values = gather(values / world_size(), sizes)
    # Without an explicit choice torch warns. Rows of gradients lie inside their parameter.
    parameter.grad = torch.sparse_coo_tensor(
        all_rows[None], all_values, parameter.shape, check_invariants=False
    )


def _sizes(tensor: Tensor) -> list[int]:
    """Return the first dimension of every rank's tensor."""
    return rank_numbers([tensor.shape[0]], tensor.device)[0]


@explain_lost_process()
def _all_gather(tensor: Tensor, sizes: list[int]) -> Tensor:
    """Gather tensors of different lengths: pad to equal shapes for gloo and NCCL, then cut."""
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
        # Every rank's loss depends on all rows, so the gradients of a row are summed over ranks.
        return all_reduce(grad_outputs[0].contiguous(), "sum")[ctx.own], None
