"""LoRA adapters by peft for any tower: adding them, and merging them into the weights."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dualenc.errors import DualencError, explain

Module = TypeVar("Module", bound=nn.Module)

PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Weight matrices of torch's attention that are parameters and not layers."""
CLIP_POOLING = "open_clip.modified_resnet.AttentionPool2d"
"""Pooling of CLIP's ResNets, which reads the weights of its layers without calling them."""


def add_adapters(module: nn.Module, rank: int, targets: str | list[str] = "all-linear") -> None:
    """Freeze a module and add trainable adapters W + 2·BA in float32 to its layers, in place.

    LoRA (Hu et al. 2021, arXiv:2106.09685). peft's adapters act when a layer is called. Layers that
    are never called get none: BERT's pooler, the output projection inside torch's attention, and
    the pooling of CLIP's ResNets.

    Args:
        module: a transformer, or a tower of open_clip.
        rank: number of rows of A and columns of B.
        targets: "all-linear", a list of suffixes of layer names, or a regular expression that
            matches whole names.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise DualencError(
            "LoRA needs the package peft", fix="pip install 'dualenc[lora]'"
        ) from None
    endings = tuple(targets) if isinstance(targets, list) else ()
    projections: list[str] = []
    excluded: list[str] = []
    for name, layer in module.named_modules():
        is_attention = isinstance(layer, nn.MultiheadAttention)
        if is_attention and (targets == "all-linear" or name.endswith(endings)):
            present = [key for key in PROJECTIONS if getattr(layer, key, None) is not None]
            projections += [f"{name}.{key}" for key in present]
        # Wrapped around a whole attention, peft would add BA to the weights and subtract it again
        # in each pass, which accumulates rounding errors.
        is_uncalled = isinstance(layer, NonDynamicallyQuantizableLinear) or name.endswith(
            "pooler.dense"
        )
        if is_attention or is_uncalled:
            excluded.append(name)
        if f"{type(layer).__module__}.{type(layer).__name__}" == CLIP_POOLING:
            excluded += [f"{name}.{child}" for child, _ in layer.named_children()]
    with explain(
        f"LoRA of rank {rank} with targets {targets} fails",
        "give suffixes of layer names as a list, such as [query, value]",
    ):
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=targets,
            target_parameters=projections,
            exclude_modules=excluded or None,
        )
        inject_adapter_in_model(config, module)
    # In bfloat16, small updates of an adapter would round to nothing.
    for weight in module.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()


def without_weights(module: Module) -> Module:
    """Copy a module's structure without adapters; its weights are empty, so the copy is small."""
    # `deepcopy` takes what its memo already holds, here empty tensors.
    copies: dict[int, torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty(0, dtype=tensor.dtype)
        is_weight = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(empty, False) if is_weight else empty
    copied = copy.deepcopy(module, copies)
    for name, layer in reversed(list(copied.named_modules())):
        if hasattr(layer, "get_base_layer"):
            copied.set_submodule(name, layer.get_base_layer())
    return copied


@torch.no_grad()
def merge_adapters(module: nn.Module) -> nn.Module:
    """Copy a module with all adapters merged, in float32 on the CPU.

    Returns:
        The copy, or the module itself if there are none.
    """
    if not any(hasattr(layer, "get_base_layer") for layer in module.modules()):
        return module
    # `deepcopy` would copy tensors on their own device, a GPU that may be full. CPU copies in its
    # memo prevent that.
    copies: dict[int, torch.Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        copied = tensor.detach().to("cpu", copy=True)
        copies[id(tensor)] = (
            nn.Parameter(copied, False) if isinstance(tensor, nn.Parameter) else copied
        )
    merged = copy.deepcopy(module, copies).float()
    # Adapters of several weights of one layer are nested, so start with the innermost.
    for name, layer in reversed(list(merged.named_modules())):
        if hasattr(layer, "get_base_layer"):
            layer.merge()
            merged.set_submodule(name, layer.get_base_layer())
    return merged
