"""Argument checks: each error names the argument, and a batch is read in one transfer."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from dualenc.errors import DualencError
from dualenc.objectives.anchors import PADDING
from dualenc.objectives.pair_batch import PairBatch

# Rounding to bfloat16 moves the norm of a unit vector by at most 0.4%, and normalizing in bfloat16
# by twice that.
NORM_TOLERANCE = 0.01

Method = TypeVar("Method", bound=Callable[..., Any])

SIDE_OF_IDS = {
    "left_id": "left",
    "right_id": "right",
    "left_positives": "right",
    "right_positives": "left",
    "negative_id": "right",
}


class ArgumentError(DualencError):
    """An invalid argument; `names_class` adds the class of the objective."""


def fail(argument: str, problem: str, fix: str) -> NoReturn:
    """Raise an error such as "gamma is 2; it must be a number in (0, 1]"."""
    raise ArgumentError(f"{argument} {problem}", fix=fix)


def names_class(method: Method) -> Method:
    """Decorate a method so that its argument errors begin with the class: "SogCLR: gamma is …"."""

    @functools.wraps(method)
    def call(self: object, *positional: Any, **named: Any) -> Any:
        try:
            return method(self, *positional, **named)
        except ArgumentError as error:
            raise DualencError(str(error), where=type(self).__name__) from None

    return cast(Method, call)


def check_range(argument: str, value: float, interval: str) -> None:
    """Raise unless `value` is a number in the interval, such as "(0, 1]"."""
    ends = interval[1:-1].split(", ")
    low, high = map(float, ends)
    includes_low = interval.startswith("[")
    includes_high = interval.endswith("]")
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # NaN fails both comparisons.
    is_above = is_number and (value > low or (includes_low and value == low))
    is_below = is_number and (value < high or (includes_high and value == high))
    if not is_above or not is_below:
        fail(argument, f"is {value!r}", f"it must be a number in {interval}")


def is_integer(value: object) -> bool:
    """Return True if the value is an integer of Python or numpy; a bool does not count as one."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_count(argument: str, value: int, least: int = 1) -> None:
    """Raise unless `value` is an integer of at least `least`."""
    if not is_integer(value) or value < least:
        fail(argument, f"is {value!r}", f"it must be an integer of at least {least}")


def check_seed(value: int) -> None:
    """Raise unless a checkpoint can store the seed, as a signed 64-bit integer."""
    if not is_integer(value) or not -(2**63) <= value < 2**63:
        fail("seed", f"is {value!r}", "it must be an integer in [-2^63, 2^63)")


def check_choice(argument: str, value: object, choices: Collection[object]) -> None:
    """Raise unless `value` is one of the choices."""
    if value not in choices:
        fail(argument, f"is {value!r}", f"it must be one of {', '.join(map(str, choices))}")


def check_tensors(embeddings: Mapping[str, Any]) -> None:
    """Raise unless embeddings are tensors (b, D); no gradient flows through arrays or lists."""
    expected = "it must be a float tensor (b, D) from the encoder"
    for name, value in embeddings.items():
        if not isinstance(value, Tensor):
            fail(name, f"is {_kind_of(value)}", expected)
        if value.dim() != 2:
            fail(name, f"has shape {_shape_of(value)}", expected)


def as_numbers(name: str, value: Any, device: torch.device) -> Tensor:
    """Return ids, weights or counts as a tensor; lists and arrays are copied to the device."""
    if isinstance(value, Tensor):
        return value
    try:
        array = np.array(value)
        # numpy makes an empty list a float array, which would not pass for ids.
        tensor = torch.from_numpy(array if array.size else array.astype(np.int64))
    except (TypeError, ValueError):
        expected = "it must be a tensor, an array or a list of numbers"
        fail(name, f"is {_kind_of(value)}", expected)
    return tensor.to(device)


def are_ids(values: Tensor) -> bool:
    """Return True if the tensor has an integer type."""
    return not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)


def _kind_of(value: Any) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"


def _shape_of(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} ({tensor.dtype})"


def check_shapes(batch: PairBatch, views: bool) -> None:
    """Raise unless the shapes, types and devices of a batch fit together.

    Args:
        batch: pairs with embeddings.
        views: True if both sides are views of the same images.
    """
    embeddings = batch.embeddings
    ids = batch.ids
    weights = batch.weights
    left = embeddings["left"]
    for name, tensor in embeddings.items():
        num_rows = len(tensor) if name == "negatives" else len(left)
        expected = (num_rows, left.shape[-1])
        if tensor.shape != expected or not tensor.is_floating_point():
            fix = f"it must be a float tensor {expected}, as left"
            fail(name, f"has shape {_shape_of(tensor)}", fix)
        if tensor.device != left.device:
            fail(name, f"is on {tensor.device}, left is on {left.device}", "move it there")
    if views and "negatives" in embeddings:
        problem = "do not go with views=True, where every other image is a negative"
        fail("negatives", problem, "leave them out")
    if ("negatives" in embeddings) != ("negative_id" in ids):
        fail("negatives", "and negative_id belong together", "pass both, (n, D) and (n,)")
    for name, values in ids.items():
        rows = embeddings["negatives"] if name == "negative_id" else left
        _check_id_shape(name, values, rows)
    if weights is not None:
        if weights.shape != left.shape[:1]:
            fail(
                "weights", f"has shape {tuple(weights.shape)}", f"it must hold {len(left)} numbers"
            )
        if weights.device != left.device:
            fail("weights", f"is on {weights.device}, left is on {left.device}", "move it there")


def _check_id_shape(name: str, values: Tensor, rows: Tensor) -> None:
    """Raise unless ids are integers (b,), or lists of positives (b, K), of the b rows."""
    is_list = name.endswith("positives")
    has_rows = values.shape[:1] == rows.shape[:1]
    has_dims = values.dim() == 1 + is_list
    if not (has_rows and has_dims and are_ids(values)):
        shape = f"({len(rows)}, K)" if is_list else len(rows)
        fail(name, f"has shape {_shape_of(values)}", f"it must hold {shape} integer ids")
    if values.device != rows.device:
        problem = f"is on {values.device}, the embeddings are on {rows.device}"
        fail(name, problem, "move it there")


def check_values(
    batch: PairBatch, all_ids: Tensor, num_items: Mapping[str, int | None], views: bool
) -> int:
    """Raise on ids out of range, norms other than 1 and bad weights.

    Args:
        batch: pairs with embeddings.
        all_ids: (2, P) left and right ids of the pairs of all ranks.
        num_items: sizes of the id spaces by side; None if unknown.
        views: see `check_shapes`.

    Returns:
        The largest number of pairs of the batch that share one item.
    """
    embeddings = batch.embeddings
    ids = batch.ids
    # Everything is reduced to its extremes on the device, because each transfer stalls its queue.
    to_read = {name: row_norms(tensor) for name, tensor in embeddings.items()}
    to_read |= ids
    if batch.weights is not None:
        to_read["weights"] = batch.weights.detach()
    if views:
        to_read["differ"] = (ids["left_id"] != ids["right_id"]).long()
    # Copies of an id are adjacent once sorted: the two searches find both ends of its run.
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
            problem = f"holds numbers in [{low:.4g}, {high:.4g}]"
            fail(name, problem, "they must be finite and 0 or more")
        elif name == "differ" and high:
            fail(
                "right_id", "differs from left_id", "with views=True both views have the image's id"
            )
    _, most_copies = extremes.get("copies", (0.0, 0.0))
    return int(most_copies)


def row_norms(rows: Tensor) -> Tensor:
    """Return (…) norms of rows (…, D), in double precision and without gradient."""
    return torch.linalg.vector_norm(rows.detach(), dim=-1, dtype=torch.float64)


def read_extremes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest entry of each non-empty tensor, in one transfer."""
    names = [name for name, tensor in tensors.items() if tensor.numel()]
    if not names:
        return {}
    extremes = []
    for name in names:
        # Double precision is exact for all ids up to 2^53.
        values = tensors[name].double()
        extremes.append(torch.stack(values.aminmax()))
    pairs: list[list[float]] = torch.stack(extremes).tolist()
    return {name: (low, high) for name, (low, high) in zip(names, pairs, strict=True)}


def check_norms(name: str, low: float, high: float) -> None:
    """Raise unless the norms of rows, which lie in [low, high], are 1."""
    if not math.isfinite(low + high):
        fix = "lower the learning rate or check the encoder"
        fail(name, "holds NaN or infinite values", fix)
    if low == 0:
        # Static embeddings of unknown tokens are zero; so is an infinite vector once normalized.
        problem = "holds zero vectors: a text has only unknown tokens, or the model has diverged"
        fail(name, problem, "check the texts, or lower the learning rate")
    if low < 1 - NORM_TOLERANCE or high > 1 + NORM_TOLERANCE:
        problem = f"has rows of norm in [{low:.4g}, {high:.4g}]"
        fail(name, problem, "they must be unit vectors: normalize them")


def _check_ids(name: str, low: float, high: float, num_items: int | None) -> None:
    smallest = 0
    padding = ""
    if name.endswith("positives"):
        smallest = PADDING
        padding = " (-1 is padding)"
    if low < smallest or (num_items is not None and high >= num_items):
        end = "N" if num_items is None else num_items
        problem = f"holds ids in [{low:.0f}, {high:.0f}]"
        fail(name, problem, f"they must lie in [0, {end}){padding}")


def check_encoded_rows(embeddings: Tensor, num_ids: int, dimension: int) -> None:
    """Raise unless `encode` returned a float tensor (n, D) for n ids."""
    expected = f"it must return a float tensor ({num_ids}, {dimension})"
    if not isinstance(embeddings, Tensor):
        fail(
            "encode", f"returned a value that is {_kind_of(embeddings)} for {num_ids} ids", expected
        )
    if embeddings.shape != (num_ids, dimension) or not embeddings.is_floating_point():
        fail("encode", f"returned shape {_shape_of(embeddings)} for {num_ids} ids", expected)


def check_encoded(embeddings: Tensor) -> None:
    """Raise unless embeddings (…, D) from `encode` are finite and have norm 1 or 0."""
    norms = row_norms(embeddings)
    # Some encoders return zeros for an empty item.
    for extremes in read_extremes({"encode": norms.masked_fill(norms == 0, 1.0)}).values():
        check_norms("the result of encode", *extremes)
