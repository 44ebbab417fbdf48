"""Checks of what callers pass: one line that names the argument, and few waits for the device.

On a GPU every value that the host reads waits for all work before it. So all values of a batch are read in one
transfer.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor

from dualenc.errors import DualencError
from dualenc.objectives.anchors import PADDING

if TYPE_CHECKING:
    from dualenc.objectives.base import Objective

MIN_TEMPERATURE = 1e-3
NORM_TOLERANCE = 0.01
"""Rounding to bfloat16 moves the norm of a unit vector by 0.4 % at most, normalising in bfloat16 by twice that."""

SIDE_OF_IDS = {
    "left_id": "left",
    "right_id": "right",
    "left_positives": "right",
    "right_positives": "left",
    "negative_id": "right",
}


def fail(owner: object, argument: str, problem: str) -> NoReturn:
    """Raise the error of an argument, such as "SogCLR: gamma is 2; it must lie in (0, 1]"."""
    raise DualencError(f"{type(owner).__name__}: {argument} {problem}")


TYPE_WORDS = {bool: "True or False", int: "a whole number", float: "a finite number", str: "text", type(None): "None"}


def checked_types(constructor: Callable[..., None]) -> Callable[..., None]:
    """Decorate a constructor: an argument of another type than annotated ends in one line."""
    signature = inspect.signature(constructor)

    @functools.wraps(constructor)
    def checked(self: object, *positional: Any, **named: Any) -> None:
        hints = typing.get_type_hints(constructor)
        for argument, value in signature.bind(self, *positional, **named).arguments.items():
            if argument in hints and not isinstance(value, Tensor):
                check_type(self, argument, value, hints[argument])
        constructor(self, *positional, **named)

    return checked


def check_type(owner: object, argument: str, value: Any, hint: Any) -> None:
    """Refuse text for a number, numbers that are not finite, and values that are none of the choices."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    choices = typing.get_args(hint) if is_union else (hint,)
    if any(_is_of_type(value, choice) for choice in choices):
        return
    expected = []
    for choice in choices:
        words = TYPE_WORDS.get(choice) or f"of type {getattr(choice, '__name__', choice)}"
        if typing.get_origin(choice) is Literal:
            words = f"one of {', '.join(map(str, typing.get_args(choice)))}"
        expected.append(words)
    fail(owner, argument, f"is {value!r}; it must be {' or '.join(expected)}")


def _is_of_type(value: Any, hint: Any) -> bool:
    kind = typing.get_origin(hint) or hint
    if kind is Literal:
        return value in typing.get_args(hint)
    if kind is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


def check_tensors(owner: object, values: Mapping[str, Any]) -> None:
    """Refuse lists, arrays and numbers where tensors belong; None is left out."""
    for name, value in values.items():
        if value is not None and not isinstance(value, Tensor):
            fail(owner, name, f"is a {type(value).__name__}; it must be a tensor, such as torch.as_tensor({name})")


def check_sizes(owner: object, num_left: int | None, num_right: int | None, needs_num_left: bool) -> None:
    """Refuse missing or empty id spaces."""
    if needs_num_left and num_left is None:
        fail(owner, "num_left", "is missing; pass the number of left items, e.g. len(pairs)")
    for argument, value in (("num_left", num_left), ("num_right", num_right)):
        if value is not None and value < 1:
            fail(owner, argument, f"is {value}; it must be at least 1")


def check_temperature(owner: object, temperature: float) -> None:
    """Refuse what is not a number of at least MIN_TEMPERATURE."""
    if isinstance(temperature, Tensor):
        fail(owner, "temperature", "is a tensor; pass a number, and learnable_temperature=True to have it learned")
    if not MIN_TEMPERATURE <= temperature < math.inf:
        fail(owner, "temperature", f"is {temperature}; it must be a number such as 0.07, at least {MIN_TEMPERATURE}")


def refuse_momentum(objective: Objective) -> None:
    """Refuse an objective whose momentum encoder a training loop does not keep."""
    if objective.momentum is not None:
        raise DualencError(
            f"{objective.name} needs a momentum encoder, which only dualenc's own Trainer keeps; train with that, or "
            "take GlobalCache here"
        )


def check_shapes(
    owner: object, embeddings: Mapping[str, Tensor], ids: Mapping[str, Tensor], weights: Tensor | None, views: bool
) -> None:
    """Refuse shapes, types and devices that do not fit.

    Args:
        embeddings: left, right and, if there are any, negatives, keys_left and keys_right: (b, D) each.
        ids: by name, see `SIDE_OF_IDS`.
        weights: (b,) of the pairs.
        views: whether the objective trains on two views.
    """
    check_tensors(owner, {**embeddings, **ids, "weights": weights})
    left = embeddings["left"]
    right = embeddings["right"]
    for name, tensor in embeddings.items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            fail(owner, name, f"has shape {tuple(tensor.shape)} ({tensor.dtype}); it must be a float (b, D) tensor")
    if left.shape != right.shape:
        fail(owner, "left, right", f"have shapes {tuple(left.shape)}, {tuple(right.shape)}; both must be (b, D)")
    negatives = embeddings.get("negatives")
    if negatives is not None and negatives.shape[1] != left.shape[1]:
        fail(
            owner,
            "negatives",
            f"has shape {tuple(negatives.shape)}; it must be (n, {left.shape[1]}), as left and right",
        )
    for name in ("keys_left", "keys_right"):
        if name in embeddings and embeddings[name].shape != left.shape:
            shapes = f"{tuple(embeddings[name].shape)}; it must be {tuple(left.shape)}, as left and right"
            fail(owner, name, f"has shape {shapes}")
    if views and "negatives" in embeddings:
        fail(owner, "negatives", "do not go with views=True, where every other image is a negative; leave them out")
    if ("negatives" in embeddings) != ("negative_id" in ids):
        fail(owner, "negatives", "and negative_id must be given together, (n, D) and (n,)")
    for name, values in ids.items():
        rows = embeddings["negatives"] if name == "negative_id" else left
        is_list = name.endswith("positives")
        fits = values.shape[:1] == rows.shape[:1] and values.dim() == (2 if is_list else 1)
        if not fits or values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            expected = f"({len(rows)}, K) integer ids" if is_list else f"{len(rows)} integer ids"
            fail(owner, name, f"has shape {tuple(values.shape)} ({values.dtype}); it must hold {expected}")
        if values.device != rows.device:
            fail(owner, name, f"is on {values.device}, the embeddings are on {rows.device}; move it there")
    if weights is not None and weights.shape != left.shape[:1]:
        fail(owner, "weights", f"has shape {tuple(weights.shape)}; it must hold {len(left)} numbers")


def check_values(
    owner: object,
    embeddings: Mapping[str, Tensor],
    ids: Mapping[str, Tensor],
    weights: Tensor | None,
    all_ids: Tensor,
    num_items: Mapping[str, int | None],
    views: bool,
) -> int:
    """Refuse ids out of range, norms other than 1 and bad weights, read in one transfer.

    Args:
        embeddings, ids, weights, views: see `check_shapes`.
        all_ids: (2, P) left and right ids of the pairs of all ranks.
        num_items: sizes of the id spaces, by side.

    Returns:
        The most pairs of the batch that share one item.
    """
    extremes: dict[str, Tensor] = {}
    rows = torch.cat([tensor.detach() for tensor in embeddings.values()])
    if len(rows):
        extremes["norms"] = torch.stack(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).aminmax())
    for name, values in ids.items():
        if values.numel():
            extremes[name] = torch.stack(values.aminmax())
    if weights is not None and len(weights):
        extremes["weights"] = torch.stack(weights.detach().aminmax())
    if views and len(ids["left_id"]):
        extremes["differ"] = (ids["left_id"] != ids["right_id"]).any()[None]
    if all_ids.shape[1]:
        ordered = all_ids.contiguous().sort(dim=1).values
        copies = torch.searchsorted(ordered, ordered, right=True) - torch.searchsorted(ordered, ordered)
        extremes["copies"] = copies.max()[None]
    numbers = _to_host(extremes)
    # NaN is not within the tolerance either.
    if not all(abs(norm - 1) <= NORM_TOLERANCE for norm in numbers.get("norms", [])):
        _explain_norms(owner, embeddings)
    for name, side in SIDE_OF_IDS.items():
        if name in numbers:
            _check_range(owner, name, numbers[name], num_items[side])
    low, high = numbers.get("weights", [0.0, 0.0])
    if not 0 <= low <= high < math.inf:
        fail(owner, "weights", f"holds numbers in [{low:.4g}, {high:.4g}]; they must be finite and 0 or more")
    if any(numbers.get("differ", [])):
        fail(owner, "right_id", "differs from left_id; with views=True both views carry the image's id")
    return int(max(numbers.get("copies", [0.0])))


def _to_host(tensors: dict[str, Tensor]) -> dict[str, list[float]]:
    """The numbers in named tensors (k,), in one transfer."""
    if not tensors:
        return {}
    # Ids are exact in double precision.
    flat = torch.cat([values.to(torch.float64) for values in tensors.values()])
    parts = flat.cpu().split([len(values) for values in tensors.values()])
    return {name: part.tolist() for name, part in zip(tensors, parts, strict=True)}


def _check_range(owner: object, name: str, extremes: list[float], num_items: int | None) -> None:
    low, high = (int(value) for value in extremes)
    smallest = 0
    padding = ""
    if name.endswith("positives"):
        smallest = PADDING
        padding = " (-1 is padding)"
    if low < smallest or (num_items is not None and high >= num_items):
        end = "N" if num_items is None else num_items
        fail(owner, name, f"holds ids in [{low}, {high}]; they must lie in [0, {end}){padding}")


def _explain_norms(owner: object, embeddings: Mapping[str, Tensor]) -> NoReturn:
    """Name the embeddings whose rows are not of length one."""
    for name, tensor in embeddings.items():
        norms = torch.linalg.vector_norm(tensor.detach(), dim=1, dtype=torch.float64)
        if not bool(norms.isfinite().all()):
            fail(owner, name, "holds NaN or infinite values; lower the learning rate or check the encoder")
        if bool((norms == 0).any()):
            # What is left of an infinite vector that was scaled to length one.
            fail(owner, name, "holds zero vectors: the model has diverged; lower the learning rate or check it")
        if len(norms) and float((norms - 1).abs().max()) > NORM_TOLERANCE:
            ends = f"[{float(norms.min()):.4g}, {float(norms.max()):.4g}]"
            fail(owner, name, f"has rows of norm in {ends}; they must be unit vectors: normalise them")
    raise AssertionError("all norms are 1")


def check_encoded_rows(embeddings: Any, num_ids: int, dimension: int | None = None) -> None:
    """Refuse what is not a float tensor (n, D) from `encode`, for n ids."""
    expected = f"for {num_ids} ids; it must be a float tensor ({num_ids}, {dimension or 'D'})"
    if not isinstance(embeddings, Tensor):
        raise DualencError(f"encode gave a {type(embeddings).__name__} {expected}")
    fits = embeddings.dim() == 2 and len(embeddings) == num_ids and dimension in (None, embeddings.shape[-1])
    if not fits or not embeddings.is_floating_point():
        raise DualencError(f"encode gave shape {tuple(embeddings.shape)} ({embeddings.dtype}) {expected}")


def check_encoded(embeddings: Tensor) -> None:
    """Refuse embeddings (…, D) from `encode` that are not finite, or whose norm is neither 1 nor 0; one transfer."""
    norms = torch.linalg.vector_norm(embeddings.detach(), dim=-1, dtype=torch.float64)
    if not norms.numel():
        return
    # NaN stays NaN in both; zeros are no rows of another norm.
    low, high = torch.stack([norms.masked_fill(norms == 0, torch.inf).min(), norms.max()]).tolist()
    if not math.isfinite(high):
        raise DualencError("encode gave NaN or infinite values; lower the learning rate or check the encoder")
    if high > 0 and (low < 1 - NORM_TOLERANCE or high > 1 + NORM_TOLERANCE):
        ends = f"[{low:.4g}, {high:.4g}]"
        raise DualencError(f"encode gave rows of norm in {ends}; they must be unit vectors (or 0): normalise them")


def check_counts(owner: object, side: str, counts: Tensor, num_items: int) -> None:
    """Refuse counts of pairs per item that are not (num_items,) finite numbers of 0 or more."""
    check_tensors(owner, {f"{side}_counts": counts})
    if counts.shape != (num_items,):
        fail(owner, f"{side}_counts", f"has shape {tuple(counts.shape)}; it must hold {num_items} counts")
    if not bool((torch.isfinite(counts) & (counts >= 0)).all()):
        fail(owner, f"{side}_counts", "holds negative or infinite counts, or NaN; they must be 0 or more")
