"""Forward and backward passes of one batch: whole, or in chunks with gradient caching."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dualenc import distributed
from dualenc.encoders.batchnorm import (
    BatchStatistics,
    explain_single_values,
    trained_norms,
    waits_for_others,
)
from dualenc.encoders.dual import DualEncoder, chunk_rows, num_rows, take
from dualenc.errors import DualencError
from dualenc.types import Inputs, Side

Autocast = Callable[[], AbstractContextManager[None]]


@dataclass(eq=False)
class PlainEncoding:
    """The forward passes of a batch with their graphs, and the backward pass: memory grows with the
    batch.

    One encoding serves many batches; `begin` opens the next.

    Args:
        model: the two towers.
        device: of the towers.
        autocast: a new mixed precision context per call.
        keep_statistics: the objective will ask for out-of-batch items.
        compiled: the towers are compiled.
    """

    model: DualEncoder
    device: torch.device
    autocast: Autocast = nullcontext
    keep_statistics: bool = True
    compiled: bool = False

    def __post_init__(self) -> None:
        self.one_by_one = self.device.type == "cpu" and not self.compiled
        self.has_batch_norm = bool(trained_norms(self.model))
        self.begin()

    def begin(self) -> None:
        """Forget the last batch."""
        self.statistics = BatchStatistics(keep=self.keep_statistics)

    def encode(self, side: Side, inputs: Inputs, out_of_batch: bool = False) -> Tensor:
        """Encode n prepared items to (n, D); under `torch.no_grad()` without a graph.

        Args:
            side: which tower.
            inputs: the tower's inputs, on any device, first dimension n; {} for no item.
            out_of_batch: BatchNorm normalises them by the statistics of the batch, and does not add
                theirs.
        """
        if not inputs:
            if self.model.training and not out_of_batch and waits_for_others(self.model):
                raise DualencError(
                    "this process has no sample of a batch, and BatchNorm over all processes needs one on each; make "
                    "batch_size larger or fix the samples that cannot be read"
                )
            return self._no_rows()
        with self.statistics.of_batch(self.model.tower(side), out_of_batch):
            return self._forward(side, inputs)

    def encode_parts(self, *parts: tuple[Side, Inputs], out_of_batch: bool = False) -> list[Tensor]:
        """Encode several parts of a step, (n, D) each: through shared weights all at once, in fewer
        passes."""
        # BatchNorm would normalise both sides together.
        joined = None
        if self.model.shares_weights and not self.has_batch_norm:
            joined = self.model.left.prepare.join([inputs for _, inputs in parts if inputs])
        if joined is not None:
            encoded = self.encode("left", joined, out_of_batch)
            return list(encoded.split([num_rows(inputs) for _, inputs in parts]))
        return [self.encode(side, inputs, out_of_batch) for side, inputs in parts]

    @distributed.explain_lost_process()
    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of everything that was encoded with a graph."""
        # Frees the stored activations layer by layer, as the backward pass is done with them.
        self.statistics.release()
        loss.backward()

    @distributed.explain_lost_process()
    def _forward(self, side: Side, inputs: Inputs) -> Tensor:
        packed = self.model.tower(side).pack(inputs, self.one_by_one)
        on_device = {
            name: tensor.to(self.device, non_blocking=True) for name, tensor in packed.items()
        }
        with self.autocast(), explain_single_values():
            return self.model(side, on_device)

    def _no_rows(self) -> Tensor:
        """(0, D) with gradient: a rank without items still takes part in the collectives of the
        backward pass."""
        # Of the weights' precision and device, as the other ranks' rows are.
        weight = next(self.model.parameters())
        return weight.new_zeros(0, self.model.dim).requires_grad_(torch.is_grad_enabled())


class EncodeCall(NamedTuple):
    """A call of `CachedEncoding.encode`, to be repeated with its graph; `leaves` (n, D) get the
    loss's gradient."""

    side: Side
    inputs: Inputs
    chunks: list[Tensor]
    random_states: list[tuple[Tensor, Tensor | None]]
    leaves: Tensor


@dataclass(eq=False)
class CachedEncoding(PlainEncoding):
    """Gradient caching: encodes `chunk_size` items at once, twice, so that memory does not grow
    with the batch.

    Other arguments as of `PlainEncoding`.

    Raises:
        DualencError: for a model with trained BatchNorm, which would normalise by a chunk.
    """

    chunk_size: int = field(default=32, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.has_batch_norm:
            norms = trained_norms(self.model)
            first = next(name for name, layer in self.model.named_modules() if layer is norms[0])
            more = f" and {len(norms) - 1} more" if len(norms) > 1 else ""
            raise DualencError(
                f"chunk_size does not work with BatchNorm ({first}{more}), which normalizes by the "
                "whole batch; leave chunk_size out, freeze the weights of BatchNorm "
                "(trainer.freeze), or take a model with LayerNorm"
            )

    def begin(self) -> None:
        """Forget the last batch."""
        super().begin()
        self._calls: list[EncodeCall] = []

    def encode(self, side: Side, inputs: Inputs, out_of_batch: bool = False) -> Tensor:
        """Like `PlainEncoding.encode`, but without a graph, to leaves from whose gradients
        `backward` continues."""
        if not inputs:
            return self._no_rows()
        chunks = chunk_rows(inputs, self.chunk_size)
        random_states = []
        parts = []
        with torch.no_grad():
            for rows in chunks:
                random_states.append(self._random_state())
                parts.append(self._forward(side, take(inputs, rows)))
            encoded = torch.cat(parts)
            order = torch.cat(chunks).to(self.device)
            embeddings = torch.empty_like(encoded).index_copy_(0, order, encoded)
        if torch.is_grad_enabled():
            embeddings.requires_grad_()
            self._calls.append(EncodeCall(side, inputs, chunks, random_states, embeddings))
        return embeddings

    @distributed.explain_lost_process()
    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients, encoding every chunk once more with its graph."""
        # Ends at the leaves; from there on each chunk has a graph of its own.
        loss.backward()
        calls = self._calls
        self._calls = []
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            for call in calls:
                if call.leaves.grad is not None:
                    self._repeat(call, call.leaves.grad)

    def _repeat(self, call: EncodeCall, gradients: Tensor) -> None:
        """Encode the chunks of a call once more, each with its graph, and go back through it."""
        for rows, (on_cpu, on_gpu) in zip(call.chunks, call.random_states, strict=True):
            # The same dropout as in the first pass.
            torch.set_rng_state(on_cpu)
            if on_gpu is not None:
                torch.cuda.set_rng_state(on_gpu, self.device)
            embeddings = self._forward(call.side, take(call.inputs, rows))
            # A tower whose weights are all frozen has no graph.
            if embeddings.requires_grad:
                torch.autograd.backward(embeddings, gradients[rows.to(self.device)])

    def _random_state(self) -> tuple[Tensor, Tensor | None]:
        on_gpu = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        return torch.get_rng_state(), on_gpu
