"""Forward and backward passes of a batch, whole or in chunks with gradient caching."""

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
    """Encodes a batch with its graph, and runs the backward pass. Memory grows with the batch.

    One object serves many batches; `begin` starts the next one.

    Example:
        encoding = PlainEncoding(model, device)
        left, right = encoding.encode_parts(("left", batch.left), ("right", batch.right))
        encoding.backward(objective(left, right).loss)

    Args:
        model: the model with both towers.
        device: device of the towers.
        autocast: function that returns a new mixed-precision context.
        keep_statistics: True if the objective will request out-of-batch items.
        compiled: True if the towers are compiled.
    """

    model: DualEncoder
    device: torch.device
    autocast: Autocast = nullcontext
    keep_statistics: bool = True
    compiled: bool = False

    def __post_init__(self) -> None:
        # A loop over the texts of a pass is cheap on a CPU, but would break up a compiled graph.
        self.one_by_one = self.device.type == "cpu" and not self.compiled
        self.has_batch_norm = bool(trained_norms(self.model))
        self.begin()

    def begin(self) -> None:
        """Start a batch, and drop the statistics of the last one."""
        self.statistics = BatchStatistics(keep=self.keep_statistics)

    def encode(self, side: Side, inputs: Inputs, out_of_batch: bool = False) -> Tensor:
        """Encode n prepared items to (n, D), without a graph under `torch.no_grad()`.

        Args:
            side: tower to encode with.
            inputs: inputs of the tower on any device, first dimension n; {} if n is 0.
            out_of_batch: True for items outside the batch, which BatchNorm normalizes with the
                statistics of the batch.

        Raises:
            DualencError: synchronized BatchNorm needs items on every rank, and this one lacks any.
        """
        if not inputs:
            if self.model.training and not out_of_batch and waits_for_others(self.model):
                raise DualencError(
                    "a batch left this process without samples, and synchronized BatchNorm needs "
                    "at least one on each process",
                    fix="make batch_size larger or fix the samples that cannot be read",
                )
            return self._no_rows()
        with self.statistics.of_batch(self.model.tower(side), out_of_batch):
            return self._forward(side, inputs)

    def encode_parts(self, *parts: tuple[Side, Inputs], out_of_batch: bool = False) -> list[Tensor]:
        """Encode several parts of a step, (n, D) each, in one pass if the towers share weights.

        Args:
            parts: (side, inputs) of each part.
            out_of_batch: True for items outside the batch.
        """
        # BatchNorm rules out one pass: it would normalize both sides together.
        joined = None
        if self.model.shares_weights and not self.has_batch_norm:
            joined = self.model.left.prepare.join([inputs for _, inputs in parts if inputs])
        if joined is not None:
            encoded = self.encode("left", joined, out_of_batch)
            counts = [num_rows(inputs) for _, inputs in parts]
            return list(encoded.split(counts))
        return [self.encode(side, inputs, out_of_batch) for side, inputs in parts]

    @distributed.explain_lost_process()
    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of everything that was encoded with a graph."""
        # Drop the statistics' references, so that the backward pass frees activations layer by
        # layer.
        self.statistics.release()
        loss.backward()

    @distributed.explain_lost_process()
    def _forward(self, side: Side, inputs: Inputs) -> Tensor:
        tower = self.model.tower(side)
        packed = tower.pack(inputs, self.one_by_one)
        on_device = {}
        for name, tensor in packed.items():
            on_device[name] = tensor.to(self.device, non_blocking=True)
        with self.autocast(), explain_single_values():
            return tower(on_device)

    def _no_rows(self) -> Tensor:
        """Return an empty (0, D) tensor that requires a gradient."""
        # A rank without items still takes part in the collectives of the backward pass, so the
        # tensor must require a gradient, and match the dtype and device of the other ranks' rows.
        weight = next(self.model.parameters())
        empty = weight.new_zeros(0, self.model.dim)
        return empty.requires_grad_(torch.is_grad_enabled())


class EncodeCall(NamedTuple):
    """A call of `CachedEncoding.encode`, to be repeated with its graph.

    Attributes:
        side: tower of the call.
        inputs: inputs of the tower, first dimension n.
        chunks: row indices of each chunk, together a permutation of n.
        random_states: states of the CPU and GPU generators before each chunk.
        leaves: (n, D) embeddings, which receive the gradient of the loss.
    """

    side: Side
    inputs: Inputs
    chunks: list[Tensor]
    random_states: list[tuple[Tensor, Tensor | None]]
    leaves: Tensor


@dataclass(eq=False)
class CachedEncoding(PlainEncoding):
    """Gradient caching: encodes in chunks, twice, so that memory is independent of the batch size.

    The first pass builds no graph. Once the loss is known, each chunk is encoded again with its
    graph, and backpropagates its part of the gradient (Gao et al. 2021, arXiv:2101.06983).

    Example:
        encoding = CachedEncoding(model, device, chunk_size=32)
        left, right = encoding.encode_parts(("left", batch.left), ("right", batch.right))
        encoding.backward(objective(left, right).loss)

    Args:
        chunk_size: number of items encoded at a time. The other arguments are those of
            `PlainEncoding`.

    Raises:
        DualencError: the model has trained BatchNorm, which would normalize by chunk.
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
                "whole batch",
                fix="leave chunk_size out, freeze the weights of BatchNorm (trainer.freeze), or "
                "take a model with LayerNorm",
            )

    def begin(self) -> None:
        """Start a batch, and drop the calls of the last one."""
        super().begin()
        self._calls: list[EncodeCall] = []

    def encode(self, side: Side, inputs: Inputs, out_of_batch: bool = False) -> Tensor:
        """Encode like `PlainEncoding.encode`, but to leaf tensors; `backward` builds the graph."""
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
            # Chunks group items of similar length; bring the rows back into the order of `inputs`.
            order = torch.cat(chunks).to(self.device)
            embeddings = torch.empty_like(encoded).index_copy_(0, order, encoded)
        if torch.is_grad_enabled():
            embeddings.requires_grad_()
            self._calls.append(EncodeCall(side, inputs, chunks, random_states, embeddings))
        return embeddings

    @distributed.explain_lost_process()
    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients by encoding every chunk again with its graph."""
        # This pass ends at the leaves; each chunk continues from there with a separate graph.
        loss.backward()
        calls = self._calls
        self._calls = []
        # Restored afterwards: the repetition must not shift the random numbers of the next step.
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            for call in calls:
                if call.leaves.grad is not None:
                    self._repeat(call, call.leaves.grad)

    def _repeat(self, call: EncodeCall, gradients: Tensor) -> None:
        """Encode the chunks of a call again, and backpropagate through each."""
        for rows, (on_cpu, on_gpu) in zip(call.chunks, call.random_states, strict=True):
            # Reproduce the dropout of the first pass.
            torch.set_rng_state(on_cpu)
            if on_gpu is not None:
                torch.cuda.set_rng_state(on_gpu, self.device)
            embeddings = self._forward(call.side, take(call.inputs, rows))
            # The graph is missing if all weights of the tower are frozen.
            if embeddings.requires_grad:
                torch.autograd.backward(embeddings, gradients[rows.to(self.device)])

    def _random_state(self) -> tuple[Tensor, Tensor | None]:
        """Return the states of the CPU and GPU generators."""
        on_gpu = None
        if self.device.type == "cuda":
            on_gpu = torch.cuda.get_rng_state(self.device)
        return torch.get_rng_state(), on_gpu
