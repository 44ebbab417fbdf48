"""An accelerator that is not there: tensors on it are CPU tensors that refuse to meet those on the
CPU.

Where there is no GPU, this still shows that nothing is left behind on the CPU, and how often a step
would wait for the device. It borrows the name of torch's "lazy" device, which has no kernels of its
own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_stack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dualenc.objectives.draws import SharedRandom

DEVICE = torch.device("lazy", 0)
COPIES = ("aten::_to_copy", "aten::copy_")
BY_INDEX = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# What has a shape, or gives a number, that the host must know before it can go on.
WAITS = (
    *(
        "aten::_local_scalar_dense",
        "aten::equal",
        "aten::is_nonzero",
        "aten::nonzero",
        "aten::masked_select",
    ),
    *(
        "aten::_unique",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::unique_consecutive",
        "aten::bincount",
    ),
)


class OnDevice(torch.Tensor):
    """A tensor on the pretended device."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        layout = {
            "strides": inner.stride(),
            "storage_offset": inner.storage_offset(),
            "dtype": inner.dtype,
        }
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.size(), **layout, device=DEVICE)
        wrapper.inner = inner
        return wrapper

    def tolist(self) -> Any:
        return self.to("cpu").tolist()

    def new_tensor(self, data: Any) -> torch.Tensor:
        return self.inner.new_tensor(data).to(DEVICE)

    @classmethod
    def __torch_dispatch__(cls, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


class PretendedDevice(TorchDispatchMode):
    """Runs every operation, and counts those after which a real device would have run out of work.

    Attributes:
        waits: in how many operations the host waited for the device.
        places: how often it did so in which line of the package.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if would_wait(function, args, kwargs or {}):
            self.waits += 1
            lines = [f for f in extract_stack() if "/dualenc/" in f.filename]
            self.places[
                f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else "elsewhere"
            ] += 1
        return run(function, args, kwargs or {})


def would_wait(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for the device in this operation."""
    name, leaves = (
        function._schema.name,
        [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)],
    )
    here = any(isinstance(leaf, OnDevice) for leaf in leaves)
    if name == "aten::_to_copy":
        to = torch.device(kwargs.get("device") or leaves[0].device)
        return to.type != leaves[0].device.type and not kwargs.get("non_blocking")
    if name == "aten::copy_":
        return isinstance(args[0], OnDevice) != isinstance(args[1], OnDevice) and args[1].dim() > 0
    if not here:
        return False
    if name in BY_INDEX:
        given = [index for index in args[1] if index is not None]
        return has_mask(given) or any(
            index.dim() and not isinstance(index, OnDevice) for index in given
        )
    return name in WAITS or (
        name == "aten::repeat_interleave" and kwargs.get("output_size") is None
    )


def has_mask(indices: Any) -> bool:
    """A mask becomes row numbers, whose count must be known."""
    return any(index is not None and index.dtype == torch.bool for index in indices)


def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation, on the tensors inside; its result is on the device that a real one would have
    it on."""
    name, device = function._schema.name, kwargs.get("device")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    wrapped = {id(tensor.inner): tensor for tensor in tensors if isinstance(tensor, OnDevice)}
    if wrapped and name not in COPIES:
        check_no_mixing(name, args, tensors)
    on_device = bool(wrapped) if device is None else torch.device(device).type == DEVICE.type
    if name == "aten::copy_":
        on_device = isinstance(args[0], OnDevice)
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(
        lambda leaf: leaf.inner if isinstance(leaf, OnDevice) else leaf, (args, kwargs)
    )
    result = function(*args, **kwargs)

    def wrap(leaf: Any) -> Any:
        if not on_device or not isinstance(leaf, torch.Tensor):
            return leaf
        return wrapped.get(id(leaf)) if id(leaf) in wrapped else OnDevice(leaf)

    return tree_map(wrap, result)


def check_no_mixing(name: str, args: Any, tensors: list[torch.Tensor]) -> None:
    """As on a GPU: CPU tensors may join in only as single numbers or as row numbers."""
    indices = [id(index) for index in args[1] if index is not None] if name in BY_INDEX else []
    for tensor in tensors:
        if not isinstance(tensor, OnDevice) and tensor.dim() and id(tensor) not in indices:
            raise RuntimeError(
                f"{name}: a tensor of shape {tuple(tensor.shape)} is on the CPU, "
                "another on the device"
            )


@contextmanager
def pretended_device() -> Iterator[PretendedDevice]:
    """Inside, `DEVICE` works; what torch cannot be told about it is replaced."""
    is_enabled, autocast, generator = torch.is_autocast_enabled, torch.autocast, SharedRandom._next

    def known(device: str) -> str:
        return "cpu" if device == DEVICE.type else device

    replacements = {
        "is_autocast_enabled": lambda device="cpu": is_enabled(known(device)),
        "autocast": lambda device, **options: autocast(known(device), **options),
    }
    # Recomputing in the backward pass keeps the random state of the device, of which this one has
    # none.
    module = SimpleNamespace(
        get_rng_state=lambda *_: torch.get_rng_state(), set_rng_state=lambda *_: None
    )
    with (
        mock.patch.object(torch, DEVICE.type, module, create=True),
        mock.patch.multiple(torch, **replacements),
        mock.patch.object(
            SharedRandom, "_next", lambda random, _: generator(random, torch.device("cpu"))
        ),
        PretendedDevice() as device,
    ):
        yield device
