"""Objectives in `transformers.Trainer` and its subclasses, with their state in every checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from dualenc import distributed
from dualenc.errors import DualencError
from dualenc.io.files import save_tensors
from dualenc.objectives import Objective

STATE_FILE = "objective.pt"
"""File in a checkpoint folder that holds the state of the objective."""


def refuse_momentum(objective: Objective) -> None:
    """Refuse an objective with a momentum encoder, which other trainers do not maintain."""
    if objective.momentum is not None:
        raise DualencError(
            f"{objective.name} needs a momentum encoder, which only dualenc's Trainer keeps",
            fix="train with that, or take GlobalCache here",
        )


class ObjectiveStateMixin:
    """Trainer mixin that saves, resumes and steps the objective of a `transformers.Trainer`.

    Each checkpoint holds the objective's state (averages, chains, memories, a learnable τ), and
    `resume_from_checkpoint` restores it. A learnable τ is trained with the mean gradient of all
    processes.

    Example:
        class MyTrainer(ObjectiveStateMixin, Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                left = normalize(model(**inputs["left"]).pooler_output, dim=-1)
                right = normalize(model(**inputs["right"]).pooler_output, dim=-1)
                ids = inputs["left_id"], inputs["right_id"]
                loss = self.objective(left, right, *ids).loss
                return (loss, None) if return_outputs else loss

        trainer = MyTrainer(model, args, train_dataset=dataset, data_collator=collate)
        trainer.objective = SogCLR(num_left=len(dataset))
        trainer.train()

    Attributes:
        objective: the objective; set it before `train()`. If None, the objective of
            `loss=GlobalLoss(…)` is used.
    """

    objective: Objective | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(_Steps(self))  # type: ignore[attr-defined]

    def find_objective(self) -> Objective:
        """Return `objective`, or the objective of the trainer's loss."""
        loss = getattr(self, "loss", None)
        objective = self.objective or getattr(loss, "objective", None)
        if not isinstance(objective, Objective):
            raise DualencError(
                "the objective of the trainer is missing",
                fix="set trainer.objective, or pass loss=GlobalLoss(…), one for all data",
            )
        refuse_momentum(objective)
        return objective

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create the trainer's optimizer, and add a learnable τ to it.

        The objective is moved to the trainer's device.
        """
        objective = self.find_objective().to(self.args.device)  # type: ignore[attr-defined]
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        own = {id(parameter): parameter for parameter in _trainable(objective)}
        listed = {id(each) for group in optimizer.param_groups for each in group["params"]}
        missing = [parameter for key, parameter in own.items() if key not in listed]
        if self.lr_scheduler is not None:  # type: ignore[attr-defined]
            # The scheduler has one rate per existing group, so no group can be added.
            if missing:
                raise DualencError(
                    "a custom scheduler needs an optimizer that trains the learnable τ, too",
                    fix="add objective.parameters() to the optimizer",
                )
            return optimizer
        for group in list(optimizer.param_groups):
            if not group.get("weight_decay"):
                continue
            # sentence-transformers already lists the parameters of its loss, but with weight decay,
            # which would pull log τ towards 0.
            decayed = [each for each in group["params"] if id(each) in own]
            if decayed:
                group["params"] = [each for each in group["params"] if id(each) not in own]
                optimizer.add_param_group({**group, "params": decayed, "weight_decay": 0.0})
        if missing:
            optimizer.add_param_group({"params": missing, "weight_decay": 0.0})
        return optimizer

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # Written before the trainer's files, so that a finished checkpoint is complete.
        arguments: TrainingArguments = self.args  # type: ignore[attr-defined]
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"  # type: ignore[attr-defined]
        # Called on every process: memories are sharded, and gathering them is collective.
        state = self.find_objective().state_dict()
        if arguments.should_save and not arguments.save_only_model:
            folder.mkdir(parents=True, exist_ok=True)
            save_tensors(folder / STATE_FILE, state)
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _load_from_checkpoint(self, checkpoint_path: str, *args: Any, **kwargs: Any) -> None:
        super()._load_from_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]
        path = Path(checkpoint_path) / STATE_FILE
        if self.args.save_only_model and not path.exists():  # type: ignore[attr-defined]
            return
        if not path.is_file():
            raise DualencError(
                "missing, so the loss would start from scratch",
                fix="resume from a checkpoint that has it",
                where=path,
            )
        objective = self.find_objective()
        device = objective.log_temperature.device
        objective.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        objective.to(device)


def _trainable(objective: Objective) -> list[nn.Parameter]:
    """Return the trained parameters of an objective, whose gradients no model wrapper averages."""
    return [parameter for parameter in objective.parameters() if parameter.requires_grad]


class _Steps(TrainerCallback):
    """Average and clear the gradients of the objective around each optimizer step."""

    def __init__(self, trainer: ObjectiveStateMixin) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        distributed.average_gradients(_trainable(self.trainer.find_objective()))

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # The trainer only clears the gradients of the model.
        for parameter in _trainable(self.trainer.find_objective()):
            parameter.grad = None
