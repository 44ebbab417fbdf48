"""Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on a text backbone, through `peft`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dualenc.encoders.hub import first_line
from dualenc.errors import DualencError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_lora(
    backbone: PreTrainedModel, rank: int, alpha: float | None, dropout: float, targets: str | list[str]
) -> Any:
    """Freeze the backbone and put trainable adapters of W + (alpha / rank)·BA beside its linear layers.

    Args:
        backbone: the model to adapt, in place.
        rank: rows of A and columns of B.
        alpha: scale of the adapters, 2·rank if None.
        dropout: probability of dropping an adapter's input.
        targets: "all-linear", or endings of the layers' names.

    Raises:
        DualencError: peft is not installed, or the arguments fit no layer.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise DualencError("LoRA needs the package peft: pip install 'dualenc[lora]'") from None
    try:
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank if alpha is None else alpha,  # type: ignore[arg-type]
            lora_dropout=dropout,
            target_modules=targets,
            exclude_modules=r"(.*\.)?pooler\.dense",
        )
        return get_peft_model(backbone, config)
    except Exception as error:
        raise DualencError(f"LoRA (rank {rank}, targets {targets}): {first_line(error)}; mend them") from error
