"""Checks of what callers pass: one line that names the argument. All values of a batch are read in
one transfer."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from dualenc.errors import DualencError
from dualenc.objectives.anchors import PADDING

# Rounding to bfloat16 moves the norm of a unit vector by 0.4 % at most, normalising in bfloat16 by
# twice that.
NORM_TOLERANCE = 0.01

SIDE_OF_IDS = {
    "left_id": "left",
    "right_id": "right",
    "left_positives": "right",
    "right_positives": "left",
    "negative_id": "right",
}


class ArgumentError(DualencError):
    """An argument that does not fit; `names_class` puts the objective's class before it."""


def fail(argument: str, problem: str) -> NoReturn:
    """Raise the error of an argument, such as "gamma is 2; it must lie in (0, 1]"."""
    raise ArgumentError(f"{argument} {problem}")


def names_class(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a method: its errors of arguments begin with the class, such as "SogCLR: gamma is
    …"."""

    @functools.wraps(method)
    def call(self: object, *positional: Any, **named: Any) -> Any:
        try:
            return method(self, *positional, **named)
        except ArgumentError as error:
            raise DualencError(f"{type(self).__name__}: {error}") from None

    return call


def given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not None, by name."""
    return {name: value for name, value in arguments.items() if value is not None}


def check_range(argument: str, value: float, interval: str) -> None:
    """Refuse what is no number in an interval such as "(0, 1]"."""
    low, high = (float(end) for end in interval[1:-1].split(", "))
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    is_above = is_number and (value > low or (interval[0] == "[" and value == low))
    is_below = is_number and (value < high or (interval[-1] == "]" and value == high))
    if not is_above or not is_below:
        fail(argument, f"is {value!r}; it must be a number in {interval}")


def check_count(argument: str, value: int, least: int = 1) -> None:
    """Refuse what is no whole number, or too small a one; True is not 1."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        fail(argument, f"is {value!r}; it must be a whole number of at least {least}")


def check_seed(value: int) -> None:
    """Refuse a seed that no checkpoint could hold."""
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_whole or not -(2**63) <= value < 2**63:
        fail("seed", f"is {value!r}; it must be a whole number below 2^63")


def check_choice(argument: str, value: object, choices: Collection[object]) -> None:
    """Refuse a value that is none of the choices."""
    if value not in choices:
        fail(argument, f"is {value!r}; it must be one of {', '.join(map(str, choices))}")


def check_tensors(embeddings: Mapping[str, Any]) -> None:
    """Refuse embeddings that are not tensors, through which no gradient would flow."""
    for name, value in embeddings.items():
        expected = "it must be a float tensor (b, D) from the encoder"
        if not isinstance(value, Tensor):
            fail(name, f"is {_kind_of(value)}; {expected}")
        if value.dim() != 2:
            fail(name, f"has shape {tuple(value.shape)} ({value.dtype}); {expected}")


def as_numbers(name: str, value: Any, device: torch.device) -> Tensor:
    """Ids, weights or counts as a tensor; lists and arrays are copied to the device."""
    if isinstance(value, Tensor):
        return value
    try:
        array = np.array(value)
        # A list without entries has no type.
        tensor = torch.from_numpy(array if array.size else array.astype(np.int64))
    except (TypeError, ValueError):
        fail(name, f"is {_kind_of(value)}; it must be a tensor, an array or a list of numbers")
    return tensor.to(device)


def are_ids(values: Tensor) -> bool:
    """Whether values are whole numbers by type."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def _kind_of(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def check_shapes(
    embeddings: Mapping[str, Tensor], ids: Mapping[str, Tensor], weights: Tensor | None, views: bool
) -> None:
    """Refuse shapes, types and devices of a batch that do not fit: embeddings (b, D), ids by name,
    weights (b,)."""
    left = embeddings["left"]
    for name, tensor in embeddings.items():
        num_rows = len(tensor) if name == "negatives" else len(left)
        expected = (num_rows, left.shape[-1])
        if tensor.shape != expected or not tensor.is_floating_point():
            actual = f"{tuple(tensor.shape)} ({tensor.dtype})"
            fail(name, f"has shape {actual}; it must be a float tensor {expected}, as left")
        if tensor.device != left.device:
            fail(name, f"is on {tensor.device}, left is on {left.device}; move it there")
    if views and "negatives" in embeddings:
        problem = "do not go with views=True, where every other image is a negative; leave them out"
        fail("negatives", problem)
    if ("negatives" in embeddings) != ("negative_id" in ids):
        fail("negatives", "and negative_id must be given together, (n, D) and (n,)")
    for name, values in ids.items():
        rows = embeddings["negatives"] if name == "negative_id" else left
        is_list = name.endswith("positives")
        fits = values.shape[:1] == rows.shape[:1] and values.dim() == 1 + is_list
        if not fits or not are_ids(values):
            expected_ids = (
                f"({len(rows)}, K) integer ids" if is_list else f"{len(rows)} integer ids"
            )
            fail(
                name,
                f"has shape {tuple(values.shape)} ({values.dtype}); it must hold {expected_ids}",
            )
        if values.device != rows.device:
            fail(name, f"is on {values.device}, the embeddings are on {rows.device}; move it there")
    if weights is not None:
        _check_weights(weights, left)


def _check_weights(weights: Tensor, left: Tensor) -> None:
    if weights.shape != left.shape[:1]:
        fail("weights", f"has shape {tuple(weights.shape)}; it must hold {len(left)} numbers")
    if weights.device != left.device:
        fail("weights", f"is on {weights.device}, left is on {left.device}; move it there")


def check_values(
    embeddings: Mapping[str, Tensor],
    ids: Mapping[str, Tensor],
    weights: Tensor | None,
    all_ids: Tensor,
    num_items: Mapping[str, int | None],
    views: bool,
) -> int:
    """Refuse ids out of range, norms other than 1 and bad weights; the most pairs of the batch that
    share one item.

    Args:
        embeddings, ids, weights, views: see `check_shapes`.
        all_ids: (2, P) left and right ids of the pairs of all ranks.
        num_items: sizes of the id spaces, by side.
    """
    to_read = {name: row_norms(tensor) for name, tensor in embeddings.items()}
    to_read |= ids
    if weights is not None:
        to_read["weights"] = weights.detach()
    if views:
        to_read["differ"] = (ids["left_id"] != ids["right_id"]).long()
    ordered = all_ids.contiguous().sort(dim=1).values
    end = torch.searchsorted(ordered, ordered, right=True)
    to_read["copies"] = end - torch.searchsorted(ordered, ordered)
    extremes = read_extremes(to_read)
    for name, (low, high) in extremes.items():
        if name in embeddings:
            check_norms(name, low, high)
        elif name in ids:
            _check_ids(name, low, high, num_items[SIDE_OF_IDS[name]])
        elif name == "weights" and not 0 <= low <= high < math.inf:
            fail(
                name, f"holds numbers in [{low:.4g}, {high:.4g}]; they must be finite and 0 or more"
            )
        elif name == "differ" and high:
            fail(
                "right_id", "differs from left_id; with views=True both views carry the image's id"
            )
    _, most_copies = extremes.get("copies", (0.0, 0.0))
    return int(most_copies)


def row_norms(rows: Tensor) -> Tensor:
    """(…) norms of rows (…, D), in double precision and without gradient."""
    return torch.linalg.vector_norm(rows.detach(), dim=-1, dtype=torch.float64)


def read_extremes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """The least and the largest entry of each tensor that has any, in one transfer."""
    names = [name for name, tensor in tensors.items() if tensor.numel()]
    if not names:
        return {}
    # Ids are exact in double precision.
    ends = torch.stack([end for name in names for end in tensors[name].double().aminmax()]).tolist()
    return {name: (low, high) for name, low, high in zip(names, ends[::2], ends[1::2], strict=True)}


def check_norms(name: str, low: float, high: float) -> None:
    """Refuse rows whose norms, in [low, high], are not 1."""
    if not math.isfinite(low + high):
        fail(name, "holds NaN or infinite values; lower the learning rate or check the encoder")
    if low == 0:
        # Of tokens with rows of zeros, or what is left of an infinite vector scaled to length one.
        reasons = "the model gives them for texts of unknown tokens, or has diverged"
        problem = f"holds zero vectors: {reasons}"
        fail(name, f"{problem}; check such texts, or lower the learning rate")
    if low < 1 - NORM_TOLERANCE or high > 1 + NORM_TOLERANCE:
        norms = f"[{low:.4g}, {high:.4g}]"
        fail(name, f"has rows of norm in {norms}; they must be unit vectors: normalise them")


def _check_ids(name: str, low: float, high: float, num_items: int | None) -> None:
    smallest = 0
    padding = ""
    if name.endswith("positives"):
        smallest = PADDING
        padding = " (-1 is padding)"
    if low < smallest or (num_items is not None and high >= num_items):
        end = "N" if num_items is None else num_items
        fail(name, f"holds ids in [{low:.0f}, {high:.0f}]; they must lie in [0, {end}){padding}")


def check_encoded_rows(embeddings: Tensor, num_ids: int, dimension: int) -> None:
    """Refuse what is not a float tensor (n, D) from `encode`, for n ids."""
    if not isinstance(embeddings, Tensor):
        expected = f"it must be a float tensor ({num_ids}, {dimension})"
        fail("encode", f"gave what is {_kind_of(embeddings)} for {num_ids} ids; {expected}")
    if embeddings.shape != (num_ids, dimension) or not embeddings.is_floating_point():
        actual = f"{tuple(embeddings.shape)} ({embeddings.dtype})"
        fail(
            "encode",
            f"gave shape {actual} for {num_ids} ids; it must be float ({num_ids}, {dimension})",
        )


def check_encoded(embeddings: Tensor) -> None:
    """Refuse embeddings (…, D) from `encode` that are not finite, or whose norm is neither 1 nor
    0."""
    norms = row_norms(embeddings)
    # Some encoders give zeros for an empty item.
    for extremes in read_extremes({"encode": norms.masked_fill(norms == 0, 1.0)}).values():
        check_norms("what encode gave", *extremes)
