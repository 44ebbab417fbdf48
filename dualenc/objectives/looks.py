"""What the host must know of the device, learned in as few looks as possible: on a GPU each look waits for all work
before it, and the GPU then for the host."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from dualenc.errors import DualencError

Result = TypeVar("Result")

# Rounding to bfloat16 moves the norm of a unit vector by 0.4 % at most, normalising in bfloat16 by twice that.
NORM_TOLERANCE = 0.01

Asking = Generator[Tensor | None, Tensor, Result]
"""Work that asks `numbers = yield tensor` for what stands in a tensor (n,) of integers, and gets it on the CPU."""


class Looks:
    """Looks of one step; each also checks that what was encoded since the last one are unit vectors, or zeros."""

    def __init__(self) -> None:
        self._norms: list[Tensor] = []

    def note(self, embeddings: Tensor) -> None:
        """Have embeddings (n, D) checked at the next look."""
        # A norm is finite when all entries are, and takes one pass.
        with torch.no_grad():
            self._norms.append(torch.linalg.vector_norm(embeddings, dim=1, dtype=torch.float64))

    def together(self, works: Sequence[Result | Asking[Result]]) -> list[Result]:
        """The results of all works. Those that ask go on in step with one another, so that all questions that are open
        at a time are answered by one look; `yield` alone only waits for the check of what was encoded.

        Raises:
            DualencError: something that was encoded is not finite, or neither a unit vector nor 0.
        """
        results: dict[int, Result] = {n: work for n, work in enumerate(works) if not isinstance(work, Generator)}
        asking = {n: work for n, work in enumerate(works) if isinstance(work, Generator)}
        answers: dict[int, Tensor | None] = dict.fromkeys(asking)
        while answers:
            questions: dict[int, Tensor] = {}
            for number, answer in answers.items():
                try:
                    question = asking[number].send(answer)  # type: ignore[arg-type]  # None begins
                    questions[number] = torch.zeros(0, dtype=torch.long) if question is None else question
                except StopIteration as done:
                    results[number] = done.value
            answers = dict(zip(questions, self._look(list(questions.values())), strict=True))
        if self._norms:
            self._look([])
        return [results[number] for number in range(len(works))]

    def _look(self, questions: list[Tensor]) -> list[Tensor]:
        """The questions (n,) on the CPU, in one transfer, together with the noted norms."""
        noted, self._norms = self._norms, []
        norms = None if not noted else noted[0] if len(noted) == 1 else torch.cat(noted)
        asked = [question for question in questions if len(question)]
        if not asked:
            if norms is not None:
                _check(norms.cpu())
            return [question.cpu() for question in questions]
        if norms is not None:
            # Norms travel as the integers that their bits are.
            asked = [norms.view(torch.long), *asked]
        values = (torch.cat(asked) if len(asked) > 1 else asked[0]).cpu()
        if norms is not None:
            _check(values[: len(norms)].view(torch.double))
            values = values[len(norms) :]
        return list(values.split([len(question) for question in questions])) if len(questions) > 1 else [values]


def _check(norms: Tensor) -> None:
    values = np.array(norms.tolist())
    if not np.isfinite(values).all():
        raise DualencError("encode gave NaN or infinite values; lower the learning rate or check the encoder")
    # An empty item may be a zero vector.
    values = values[values != 0]
    if (abs(values - 1) > NORM_TOLERANCE).any():
        ends = f"[{values.min():.4g}, {values.max():.4g}]"
        raise DualencError(f"encode gave rows of norm in {ends}; they must be unit vectors (or 0): normalise them")


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on a device; from the CPU without a wait for what is still to be done there."""
    if tensor.device.type == device.type:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
