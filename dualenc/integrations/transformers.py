"""Objectives in `transformers.Trainer` and its subclasses: the state of the loss in every
checkpoint.

class MyTrainer(ObjectiveStateMixin, Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        left, right = (normalize(model(**inputs[side]).pooler_output, dim=-1) for side in ("left",
        "right")) loss = self.objective(left, right, inputs["left_id"], inputs["right_id"]).loss
        return (loss, None) if return_outputs else loss

trainer = MyTrainer(model, args, train_dataset=dataset, data_collator=collate)
trainer.objective = SogCLR(num_left=len(dataset))
"""

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
"""File of a checkpoint folder with the state of the objective, beside those that the trainer
writes."""


def refuse_momentum(objective: Objective) -> None:
    """Refuse an objective whose momentum encoder a trainer of another library does not keep."""
    if objective.momentum is not None:
        problem = "needs a momentum encoder, which only dualenc's Trainer keeps"
        raise DualencError(f"{objective.name} {problem}; train with that, or take GlobalCache here")


class ObjectiveStateMixin:
    """Trainer mixin: saves, resumes and steps the objective of a `transformers.Trainer`.

    A checkpoint holds the objective's state (averages, chains, memories, a learnable τ),
    `resume_from_checkpoint` restores it, and a learnable τ is trained with the mean gradient of all
    processes.

    Attributes:
        objective: the loss; set it before `train()`. With `loss=GlobalLoss(…)` of
            `SentenceTransformerTrainer` it is that loss's.
    """

    objective: Objective | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.add_callback(_Steps(self))  # type: ignore[attr-defined]

    def find_objective(self) -> Objective:
        """`objective`, or that of the trainer's loss."""
        objective = self.objective or getattr(getattr(self, "loss", None), "objective", None)
        if not isinstance(objective, Objective):
            raise DualencError(
                "the trainer has no objective; set trainer.objective, or pass loss=GlobalLoss(…), one for all data"
            )
        refuse_momentum(objective)
        return objective

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """The trainer's optimizer, which also trains a learnable τ; the objective moves to the
        trainer's device."""
        objective = self.find_objective().to(self.args.device)  # type: ignore[attr-defined]
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        own = {id(parameter): parameter for parameter in _trainable(objective)}
        listed = {id(each) for group in optimizer.param_groups for each in group["params"]}
        missing = [parameter for key, parameter in own.items() if key not in listed]
        if self.lr_scheduler is not None:  # type: ignore[attr-defined]
            # It has a rate for each of the groups that there are.
            if missing:
                problem = (
                    "a scheduler of your own needs an optimizer that trains the learnable τ, too"
                )
                raise DualencError(f"{problem}; give that also objective.parameters()")
            return optimizer
        for group in list(optimizer.param_groups):
            decayed = [
                each for each in group["params"] if id(each) in own and group.get("weight_decay")
            ]
            # sentence-transformers lists those of its loss already; but weight decay would draw log
            # τ to 0.
            if decayed:
                group["params"] = [each for each in group["params"] if id(each) not in own]
                optimizer.add_param_group({**group, "params": decayed, "weight_decay": 0.0})
        if missing:
            optimizer.add_param_group({"params": missing, "weight_decay": 0.0})
        return optimizer

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # First, so that a checkpoint which the trainer has finished is whole.
        arguments: TrainingArguments = self.args  # type: ignore[attr-defined]
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"  # type: ignore[attr-defined]
        # Collective: memories are divided among the processes.
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
                f"{path}: missing, so the loss would start anew; take a checkpoint with it"
            )
        objective = self.find_objective()
        device = objective.log_temperature.device
        objective.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        objective.to(device)


def _trainable(objective: Objective) -> list[nn.Parameter]:
    """Trainable parameters of an objective, which no wrapper of the model averages over
    processes."""
    return [parameter for parameter in objective.parameters() if parameter.requires_grad]


class _Steps(TrainerCallback):
    """Steps the objective with the optimizer."""

    def __init__(self, trainer: ObjectiveStateMixin) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: Any, **kwargs: Any
    ) -> None:
        distributed.average_gradients(_trainable(self.trainer.find_objective()))

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # The trainer clears the gradients of the model only.
        for parameter in _trainable(self.trainer.find_objective()):
            parameter.grad = None
