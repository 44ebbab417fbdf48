"""Objectives in `transformers.Trainer` and its subclasses: the state of the loss in every checkpoint.

class MyTrainer(ObjectiveStateMixin, Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        left, right = (normalize(model(**inputs[side]).pooler_output, dim=-1) for side in ("left", "right"))
        loss = self.objective(left, right, inputs["left_id"], inputs["right_id"]).loss
        return (loss, None) if return_outputs else loss

trainer = MyTrainer(model, args, train_dataset=dataset, data_collator=collate)
trainer.objective = SogCLR(num_left=len(dataset))
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.files import save_tensors
from dualenc.objectives import Objective

STATE_FILE = "objective.pt"
"""File of a checkpoint folder with the state of the loss, beside those that the trainer writes."""


def refuse_momentum(objective: Objective) -> None:
    """Refuse an objective whose momentum encoder a trainer of another library does not keep."""
    if objective.momentum is not None:
        problem = "needs a momentum encoder, which only dualenc's Trainer keeps"
        raise DualencError(f"{objective.name} {problem}; train with that, or take GlobalCache here")


class ObjectiveStateMixin:
    """Trainer mixin: saves, resumes and steps the objectives of a `transformers.Trainer`.

    A checkpoint holds the objectives' state (averages, chains, memories, a learnable τ), `resume_from_checkpoint`
    restores it, a learnable τ is trained with the mean gradient of all processes, and schedules follow the training.

    Attributes:
        objective: the loss; set it before `train()`. Trainers that keep their losses in `loss`, as
            `SentenceTransformerTrainer` does, need not.
    """

    objective: nn.Module | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(_Steps(self))  # type: ignore[attr-defined]

    def objectives(self) -> dict[str, Objective]:
        """The objectives by name: of `objective`, or inside of the trainer's losses."""
        losses = self.objective if self.objective is not None else getattr(self, "loss", None)
        named = losses if isinstance(losses, dict) else {"loss": losses}
        objectives: dict[str, Objective] = {}
        for name, loss in named.items():
            if isinstance(loss, nn.Module):
                objectives |= _outermost(name, loss)
        if not objectives:
            raise DualencError(
                "the trainer has no objective; set trainer.objective, or pass loss=GlobalLoss(…)"
            )
        for objective in objectives.values():
            refuse_momentum(objective)
        return objectives

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The trainer's optimizer, which also trains a learnable τ."""
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        present: set[int] = set()
        for group in optimizer.param_groups:
            present.update(map(id, group["params"]))
        missing = [parameter for parameter in self._own_parameters() if id(parameter) not in present]
        if missing:
            # Weight decay would draw log τ to 0.
            optimizer.add_param_group({"params": missing, "weight_decay": 0.0})
        return optimizer

    def _own_parameters(self) -> Iterable[nn.Parameter]:
        """Trainable parameters of the objectives, which no wrapper of the model averages over processes."""
        for objective in self.objectives().values():
            yield from (parameter for parameter in objective.parameters() if parameter.requires_grad)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # First, so that a checkpoint which the trainer has finished is whole.
        arguments: TrainingArguments = self.args  # type: ignore[attr-defined]
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"  # type: ignore[attr-defined]
        # Collective: memories are divided among the processes.
        state = {name: objective.state_dict() for name, objective in self.objectives().items()}
        if arguments.should_save and not arguments.save_only_model:
            folder.mkdir(parents=True, exist_ok=True)
            save_tensors(folder / STATE_FILE, state)
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _load_from_checkpoint(self, checkpoint_path: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]
        path = Path(checkpoint_path) / STATE_FILE
        if not path.is_file():
            raise DualencError(
                f"{path}: missing, so the loss would start anew; resume from a checkpoint that holds it"
            )
        state = torch.load(path, map_location="cpu", weights_only=True)
        objectives = self.objectives()
        if state.keys() != objectives.keys():
            raise DualencError(
                f"{path}: of the losses {list(state)}, not {list(objectives)}; resume with those"
            )
        for name, objective in objectives.items():
            device = objective.log_temperature.device
            objective.load_state_dict(state[name])
            objective.to(device)


def _outermost(name: str, module: nn.Module) -> dict[str, Objective]:
    """The objectives in a module; not those that others wrap."""
    if isinstance(module, Objective):
        return {name: module}
    objectives: dict[str, Objective] = {}
    for child_name, child in module.named_children():
        objectives |= _outermost(f"{name}.{child_name}", child)
    return objectives


class _Steps(TrainerCallback):
    """Steps the objectives with the optimizer."""

    def __init__(self, trainer: ObjectiveStateMixin) -> None:
        self.trainer = trainer
        self.objectives: list[Objective] = []
        self.own_parameters: list[nn.Parameter] = []

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # Once: looking for them walks through all modules of the model.
        self.objectives = list(self.trainer.objectives().values())
        self.own_parameters = list(self.trainer._own_parameters())

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        for objective in self.objectives:
            objective.set_progress(state.global_step / max(state.max_steps, 1))

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        distributed.average_gradients(self.own_parameters)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # The trainer clears the gradients of the model only.
        for parameter in self.own_parameters:
            parameter.grad = None
