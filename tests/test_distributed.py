"""Gradients averaged over ranks."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from dualenc import distributed

pytestmark = pytest.mark.slow
WORLD = 3


def network() -> nn.ModuleDict:
    """Two layers in use, one that only some ranks use, one that none uses, and one in another
    precision."""
    torch.manual_seed(0)
    sizes = {"first": (5, 7), "second": (7, 3), "sometimes": (7, 3), "never": (4, 4)}
    layers = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
    layers["precise"] = nn.Linear(3, 2).double()
    return layers


def loss_of(layers: nn.ModuleDict, rank: int, part: int) -> torch.Tensor:
    """A rank's loss; ranks above 0 use the second layer twice, and the layer that is sometimes
    used."""
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * rank + part))
    hidden = layers["first"](rows).relu()
    out = layers["second"](hidden)
    if rank:
        out = out + layers["second"](hidden.flip(0)) + layers["sometimes"](hidden)
    return layers["precise"](out.double()).pow(2).sum()


def averaged(layers: nn.ModuleDict) -> list[torch.Tensor | None]:
    """What one process finds: the mean over ranks of the gradients of both parts."""
    layers.zero_grad()
    for rank in range(WORLD):
        for part in range(2):
            (loss_of(layers, rank, part) / WORLD).backward()
    return [p.grad for p in layers.parameters()]


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
    layers = network()
    for part in range(2):
        loss_of(layers, rank, part).backward()
    distributed.average_gradients(layers.parameters())
    torch.save([p.grad for p in layers.parameters()], folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_three_ranks_average_their_gradients(tmp_path: Path) -> None:
    mp.start_processes(work, (tmp_path,), nprocs=WORLD, start_method="fork")
    expected = averaged(network())
    for rank in range(WORLD):
        found = torch.load(tmp_path / f"{rank}.pt")
        for ours, right in zip(found, expected, strict=True):
            assert (ours is None) == (right is None)
            assert right is None or torch.allclose(ours, right, rtol=1e-6, atol=1e-6)


TABLE_ROWS = ([1, 1, 4], [2, 4], [])
"""The rows of a table that each rank uses; the last rank has no gradient."""


def new_table() -> nn.EmbeddingBag:
    torch.manual_seed(0)
    return nn.EmbeddingBag(6, 2, sparse=True)


def gather_rows(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
    used = new_table()
    never = new_table()
    if rows := TABLE_ROWS[rank]:
        used(torch.tensor([rows])).square().sum().backward()
    with warnings.catch_warnings():
        # torch warns of segmentation faults where nobody says whether to check sparse tensors.
        warnings.simplefilter("error")
        distributed.average_gradients([used.weight, never.weight])
    assert used.weight.grad is not None
    assert used.weight.grad.is_sparse
    torch.save((used.weight.grad.to_dense(), never.weight.grad), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_three_ranks_average_the_rows_of_sparse_gradients(tmp_path: Path) -> None:
    mp.start_processes(gather_rows, (tmp_path,), nprocs=WORLD, start_method="fork")
    table = new_table()
    table.sparse = False
    for rows in TABLE_ROWS[:2]:
        (table(torch.tensor([rows])).square().sum() / WORLD).backward()
    for rank in range(WORLD):
        gradient, unused = torch.load(tmp_path / f"{rank}.pt")
        assert unused is None
        assert torch.allclose(gradient, table.weight.grad, rtol=1e-6)
